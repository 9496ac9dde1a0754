"""The prefix cache of one model: its store, its threads, its prompts and its counts."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from msgspec.structs import asdict

from diskprefix.errors import CacheError
from diskprefix.prefixstore.cache.build_bits import BuildBits
from diskprefix.prefixstore.cache.cost_model import CostModel
from diskprefix.prefixstore.cache.namespaces import Beginning, TenantNamespaces
from diskprefix.prefixstore.cache.other_settings import count_stored_otherwise
from diskprefix.prefixstore.cache.policy.write_budget import Spending
from diskprefix.prefixstore.cache.tiered_store import TieredStore
from diskprefix.prefixstore.cache.tiers.loading import READER_THREADS
from diskprefix.prefixstore.kv.layout import Layout
from diskprefix.prefixstore.kv.sequence import KVSequence, Owner
from diskprefix.prefixstore.store.codec.codec import decode_piece, encode_piece
from diskprefix.prefixstore.store.epochs import Epoch, Epochs
from diskprefix.prefixstore.store.notes import TenantNotes
from diskprefix.prefixstore.store.pieces import PayloadLayout
from diskprefix.prefixstore.store.purge import Purged, PurgeFilter, delete_entry, purge
from diskprefix.prefixstore.store.schema import ModelRecord, NodeKind, OptionValue, RootRecord
from diskprefix.prefixstore.store.statistics.lost_tokens import LostTokens, of_last_day
from diskprefix.prefixstore.store.statistics.savings import Savings, Tally
from diskprefix.prefixstore.store.store import Store
from diskprefix.prefixstore.store.write_counter import WrittenBytes
from diskprefix.prefixstore.store_options import StoreOptions
from diskprefix.scope import parse_scope
from diskprefix.tokens import TokenIds, root_hash
from diskprefix.units import counted
from diskprefix.values import SHARED, CacheOptions, Tenant

log = logging.getLogger("diskprefix")

_NOTE_TTL_S = 30 * 86400.0
"""The time to live of notes without `--kv-cache-ttl`. OpenAI keeps responses as long."""
_MOST_LOGGED = 3
"""The combinations of options that a start names."""
_PURGE_S = 10.0
"""The maximum time that a purge waits for the writer, and for the shared tier."""


class PrefixCache:
    """The prefix cache of one model, which requests (`CachedRequest`) use. `stats` is for any thread.

    `identity` returns the canonical text that identifies the model's numbers for a tenant (`model.load.fingerprint`).
    The hash of this text is the root of all that the tenant stores. `tokenizer` is the tokenizer's folder, for the
    record. `build` says what computes, if the identity does not. For `on_prompts` see `TenantNamespaces`, for `options`
    `ModelRecord`. `beside` is the cache of another model in the same store; the two share their threads.
    """

    def __init__(
        self,
        settings: StoreOptions,
        store: Store,
        layout: Layout,
        identity: Callable[[str], str],
        model_name: str,
        on_prompts: Callable[[bytes, Iterable[TokenIds]], None] | None = None,
        *,
        tokenizer: str = "",
        build: str = "",
        options: Mapping[str, OptionValue] = MappingProxyType({}),
        beside: PrefixCache | None = None,
    ) -> None:
        self.settings, self.layout = settings, layout
        self.payload_layout = PayloadLayout.parse(layout.describe())
        self.has_own_threads = beside is None
        self.tiered: TieredStore = TieredStore(settings, store) if beside is None else beside.tiered
        self.store, self.writer = store, self.tiered.writer
        self.remote = self.tiered.remote
        self.readers, self.background = self.tiered.readers, self.tiered.background
        self._aside: set[Future[object]] = set()
        self.counters: Counter[str] = Counter()
        self._counting = threading.Lock()
        self.restored_tokens: Counter[str] = Counter(memory=0, disk=0, remote=0)
        """The number of restored tokens, by tier."""
        self.misses: Counter[str] = Counter()
        self.unverified: set[bytes] = set()
        """The names of nodes whose state came from a file and was restored by this process."""
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._secret = store.secret
        """The secret of the names in memory, also when another file has taken the store's place."""
        build = "" if layout.unsupported else build
        self.bits = BuildBits(store, model_name, identity, build, options, layout.state_kind)
        self.tiers = self.tiered.tiers_of(self.bits.accepts)
        """The tiers of this machine with the state that this build may use, the nearest first."""
        self._model: ModelRecord | None = None
        """The record of the model, as the writer has it."""
        self.namespaces = TenantNamespaces(store, self.root_record, on_prompts, settings.kv_cache_ttl)
        self.on_forget.extend((self._recall_bits_again, self.namespaces.forget_deleted))
        with suppress(CacheError):
            # The first request reads both again.
            self.recall_bits()
            self.namespaces.read_seen(self.namespaces.get(SHARED))
        # Without a build, there is nothing to recall.
        self._set_model()
        if not layout.unsupported:
            self.writer.housekeeping.least_bytes = layout.bytes_per_token * settings.block_size + layout.state_bytes
            self.writer.housekeeping.check_room()
        self.cost_model = CostModel(settings.kv_cache_gate, layout.loaded_bytes)
        if options and self.has_own_threads:
            with suppress(CacheError):
                self._log_stored_otherwise()

    def _log_stored_otherwise(self) -> None:
        """Logs how many saved prompts of the model were made with other options, and with which. Raises
        `CacheError`."""
        with self.store.reads.snapshot() as snapshot:
            counts = count_stored_otherwise(snapshot, self.bits.identity(str(SHARED)), self.bits.options)
        for number, text in counts[:_MOST_LOGGED]:
            were, them = ("was", "it") if number == 1 else ("were", "them")
            made = f"{counted(number, 'saved prompt')} of this model {were} made with {text}"
            log.info("[disk-cache] %s; this start does not find %s", made, them)
        if others := sum(number for number, _ in counts[_MOST_LOGGED:]):
            log.info("[disk-cache] %s more with further options; `diskprefix inspect` lists all", f"{others:,}")

    @property
    def on_forget(self) -> list[Callable[[], None]]:
        """Called when something was purged, by any process, or may have expired: what memory has of it must go too."""
        return self.writer.housekeeping.on_forget

    def notes(self, tenant: Tenant) -> TenantNotes:
        """Returns the notes of a tenant; for any thread."""
        record = self.root_record(tenant)
        return self.notes_of(root_hash(record.identity), record)

    @property
    def epochs(self) -> Epochs:
        """The epochs of the store and of the state in memory, which a purge reaches a moment later; for any thread."""
        return self.store.epochs._replace(purges=self.namespaces.epochs.purges)

    def epoch(self, tenant: Tenant) -> Epoch:
        """Returns the epoch of a tenant's requests that begin now; for any thread."""
        return self.epochs.of(str(tenant))

    def count_lost(self, tenant: Tenant, epoch: Epoch, lost: Sequence[LostTokens]) -> None:
        """Counts tokens that a request computed again, which began in `epoch`; for any thread."""
        record = self.root_record(tenant)
        self.tiered.savings.record_request(epoch, root_hash(record.identity), record, Tally(), lost)

    def owner(self, tenant: Tenant) -> Owner:
        """Returns the owner of a tenant's state in memory; for any thread."""
        root = root_hash(self.root_record(tenant).identity)
        return Owner(root, self._secret, str(tenant), self.epoch(tenant).last_purge)

    def begin(self, options: CacheOptions) -> Beginning:
        """Begins a request with these options. For the engine's thread."""
        return Beginning(self.namespaces.get(options.tenant, options.share), self.epoch(options.tenant))

    def owner_of(self, options: CacheOptions, private: bytes, began: Beginning) -> Owner:
        """Returns the owner of the state in memory of a request, which `began`. `private` is a random key of the
        request, which is used if the request shares nothing. With the scope `off`, or if what is shared has other bits,
        the request does not begin with shared state either."""
        owner = Owner(began.namespace.root, self._secret, str(options.tenant), began.epoch.last_purge)
        if options.scope.kind == "off" or self.bits.state == "other":
            return owner._replace(root=private, private=private)
        return owner if options.save else owner._replace(private=private)

    def is_gone(self, owner: Hashable) -> bool:
        """Returns whether nobody may use the state of an `owner` in memory any more: it was purged, or this build has
        found out that it has another root."""
        return isinstance(owner, Owner) and (
            self.epochs.purges.was_purged(owner.tenant, owner.last_purge)
            or owner.root != root_hash(self.bits.identity(owner.tenant))
        )

    def delete(self, entry_id: str) -> Purged:
        """Removes a saved prompt; see `purge`. Raises `EntryNotFound`."""
        return delete_entry(entry_id, self.purge)

    def purge(self, purge_filter: PurgeFilter) -> Purged:
        """Removes what a filter selects: from the store, from this process's memory and, if it selects saved prompts,
        from the shared tier. Waits for all of that. Raises `CacheError` if the store cannot be written."""
        # Complete prompts are saved first, because the store refuses them after the purge.
        self.writer.flush(_PURGE_S)
        purged = purge(self.store, purge_filter, self.store.clock())
        for forget in self.on_forget:
            forget()
        if self.remote is not None:
            try:
                purged.remote_objects = self.remote.delete_texts(purged.texts, _PURGE_S)
            except CacheError as error:
                purged.remote_error = str(error)
        return purged

    @property
    def root(self) -> bytes:
        """The root of callers with neither key nor salt."""
        return root_hash(self.bits.identity(str(SHARED)))

    @property
    def must_recheck(self) -> bool:
        """The store may have state of another build, of which none was computed again."""
        return self.bits.state in ("unknown", "unchecked", "beside")

    def recall_bits(self) -> None:
        """Reads whether this build has a root of its own, which another process of the build may have found out. Reads
        the store, so it is not for the engine's thread. Raises `CacheError`."""
        if self.bits.recall():
            self.namespaces.drop_all()
            self._set_model()

    def note_same_bits(self, builds: frozenset[bytes]) -> None:
        """Notes that this build computes what the builds with these digests have stored. Does not wait."""
        self.bits.note_same(builds)
        self._set_model()

    def note_other_bits(self, builds: frozenset[bytes]) -> bool:
        """Notes that this build computes other bits than the builds with these digests have stored of the model, of all
        tenants. Returns whether it gets another root. Until the store has a record of that, nothing is restored, shared
        or saved. Does not wait."""
        return self._left_root(leaves=self.bits.note_other(builds))

    def note_nothing_compared(self, *, is_stored: bool) -> bool:
        """Notes that nothing of other builds can be compared, and whether they have stored something. Returns like
        `note_other_bits`."""
        return self._left_root(leaves=self.bits.note_nothing(is_stored=is_stored))

    def _left_root(self, *, leaves: bool) -> bool:
        if leaves:
            self.count("outdated")
        self._set_model()
        return leaves

    def _recall_bits_again(self) -> None:
        with suppress(CacheError):
            self.recall_bits()

    def _set_model(self) -> None:
        record = None if self.layout.unsupported else self.bits.model_record
        if record is not None and record != self._model:
            self.writer.set_model(record, self._model)
            self._model = record

    def warm_up(self, sequence: KVSequence) -> None:
        """Runs the code of the reading threads once, so that the first restore is as fast as any other. Overwrites the
        beginning of the sequence."""
        num_tokens = self.settings.block_size
        if not self.payload_layout.groups:
            return
        piece = self.payload_layout.pieces(num_tokens, NodeKind.BLOCK)[0]
        blank = memoryview(bytes(piece.num_bytes))
        stored = memoryview(encode_piece(blank, piece, self.store.codec, 0))

        def read_rows(_: int) -> None:
            sequence.fill(0, num_tokens, piece.group, piece.rows, lambda out: decode_piece(stored, piece, 0, out))

        list(self.readers.map(read_rows, range(READER_THREADS)))

    def count(self, name: str) -> None:
        """Adds one to a counter. For any thread."""
        with self._counting:
            self.counters[name] += 1

    def spending(self, share: str = "") -> Spending | None:
        """Returns the use of `--kv-cache-write-budget`, None without a budget. Bytes that wait to be written count too.
        What `share`, a `CacheOptions.share`, has used of its part is in the result. Reads nothing from the disk."""
        limit, now = self.store.meter.budget_bytes, self.store.clock()
        if not limit:
            return None
        used = self.store.written_lately().last_day(now) + self.writer.pending_bytes
        own_bytes, num_shares = self.tiered.spent.spent_by(share, now) if share else (0, 1)
        return Spending(
            own_bytes=own_bytes,
            num_shares=num_shares,
            used_bytes=used,
            limit_bytes=limit,
            bytes_per_token=self.layout.bytes_per_token,
            state_bytes=self.layout.state_bytes,
        )

    def spend(self, share: str, num_bytes: int) -> None:
        """Counts bytes to be written for a `share`, if it is known. For the engine's thread."""
        if share:
            self.tiered.spent.add(share, num_bytes, self.store.clock())

    def notes_of(
        self, root: bytes, record: RootRecord, ttl_s: float | None = None, epoch: Epoch | None = None
    ) -> TenantNotes:
        """Returns the notes of a root, for any thread. `ttl_s` is the time to live of new notes, in seconds; with None
        the daemon's `--kv-cache-ttl` holds. `epoch`: when their request began; None is now."""
        lasts_s = ttl_s or self.settings.kv_cache_ttl or _NOTE_TTL_S
        epoch = epoch or self.store.epochs.of(record.tenant)
        return TenantNotes(self.writer.notes, epoch, root, record, lasts_s)

    def lasts_s(self, ttl_s: float | None) -> float:
        """Returns the time to live, in seconds, of state that a request asks to keep for `ttl_s`."""
        return ttl_s or self.settings.kv_cache_ttl or math.inf

    def expires_at(self, ttl_s: float | None) -> float:
        """Returns when state that is used now expires, on the clock of `time.monotonic`. For `ttl_s` see `lasts_s`."""
        return time.monotonic() + self.lasts_s(ttl_s)

    def run_aside(self, work: Callable[[], object]) -> None:
        """Runs small work on the thread `kv-background`."""

        def note_end(future: Future[object]) -> None:
            self._aside.discard(future)
            if (error := future.exception()) is not None:
                self.count("errors")
                log.error("[disk-cache] not saved: %r", error)

        future = self.background.submit(work)
        self._aside.add(future)
        future.add_done_callback(note_end)

    def finish_aside(self, timeout_s: float | None = None) -> bool:
        """Waits for `run_aside`. Returns False if the time runs out first."""
        return not wait(list(self._aside), timeout_s).not_done

    def has_disk_room(self, num_tokens: int) -> bool:
        """Returns False if the disk is full and has no room for a prompt of this length, even if everything else is
        evicted. Does not read the disk."""
        num_bytes = num_tokens * self.layout.bytes_per_token + self.layout.state_bytes
        return num_bytes <= self.writer.housekeeping.disk_room_bytes

    @property
    def is_disk_full(self) -> bool:
        """Returns whether the disk is full, as the writer saw it last."""
        return self.writer.housekeeping.disk_room_bytes < math.inf

    @property
    def health(self) -> tuple[str, str | None]:
        """`ok`, `unsupported` or `degraded`, and the reason for the last. Reads nothing from the disk."""
        store = self.store
        error = store.problem or store.reads.stalled or store.write_stall or self.writer.error
        return "degraded" if error else "unsupported" if self.layout.unsupported else "ok", error

    def _read_counts(self) -> tuple[WrittenBytes, dict[str, int], Savings]:
        """Returns what the store has counted. Waits for the disk."""
        counts = self.store.counts() | {"room_bytes": self.store.evictor.room_bytes()}
        return self.store.written(), counts, self.tiered.savings.total()

    def stats(self) -> dict[str, Any]:
        """Returns the figures for `/props` and `/metrics`. Reads the store, which may take long. Never raises."""
        state, error = self.health
        try:
            written, counts, savings = self.store.reads.ask(self._read_counts)
        except CacheError as failure:
            names = ("entries", "blocks", "prompts", "ghosts", "notes", "ghost_bytes", "used_bytes", "file_bytes")
            counts = dict.fromkeys((*names, "room_bytes"), 0)
            state, error = "degraded", str(failure)
            savings, written = None, self.store.written_lately()
        totals, lost = None, list[LostTokens]()
        if savings is not None and savings.total.requests:
            now = self.store.clock()
            today, lost = savings.today(now), of_last_day(savings.lost, now)
            totals = {"since": savings.since, "total": asdict(savings.total), "today": asdict(today)}
        return {
            "scope": str(parse_scope(self.settings.disk_prefix_cache, param="--disk-prefix-cache")),
            "dir": str(self.store.path),
            "store_id": self.store.store_id.hex(),
            "state": state,
            "error": error,
            "full_disk": self.store.evictor.full_disk(),
            **counts,
            "budget_bytes": self.store.budget_bytes,
            "codec": self.store.codec.name.lower(),
            "pending_bytes": self.writer.pending_bytes + self.writer.notes.waiting_bytes,
            "pending": self.writer.num_pending,
            "buffer_bytes": self.settings.kv_cache_write_buffer,
            "bytes_per_token": self.layout.bytes_per_token,
            "state_bytes": self.layout.state_bytes,
            **{name: self.counters[name] for name in ("prompt_tokens", "restored_bytes", "errors")},
            "restored_tokens": dict(self.restored_tokens),
            "misses": dict(self.misses),
            "saved_tokens": self.writer.written_tokens,
            "saved_bytes": self.writer.written_bytes,
            "process_disk_written_bytes": self.store.meter.total_bytes,
            "disk_written_bytes": written.total,
            "disk_written_last_day_bytes": written.last_day(self.store.clock()),
            "stalled_reads": self.store.reads.num_stalled,
            **{name: self.counters[name] for name in ("outdated", "ahead_tokens")},
            "write_budget_bytes": written.budget_bytes,
            "unaffordable": self.counters["unaffordable"],
            "dropped": self.writer.dropped,
            "notes_removed": self.writer.notes.removed,
            "evicted_blocks": self.writer.evicted,
            "expired_blocks": self.writer.housekeeping.expired,
            "quarantined": self.writer.housekeeping.quarantined,
            "saved_s": self.tiered.savings.saved_s,
            "savings": totals,
            "lost": [asdict(row) for row in lost],
            "gate": self.cost_model.as_dict(),
            "remote": None if self.remote is None else self.remote.stats(),
        }

    def close(self, timeout_s: float) -> bool:
        """Flushes the writer and closes the store. Returns False if time ran out before everything was saved. Does
        nothing for a cache `beside` another one."""
        if not self.has_own_threads:
            return True
        self.finish_aside(timeout_s)
        return self.tiered.close(timeout_s)

    def root_record(self, tenant: Tenant) -> RootRecord:
        """Returns the record of a tenant's root; for any thread."""
        return RootRecord(
            model=self._model_name,
            block_size=self.settings.block_size,
            layout=self.layout.describe(),
            created_at=time.time(),
            identity=self.bits.identity(str(tenant)),
            tenant=str(tenant),
            tokenizer=self._tokenizer,
        )
