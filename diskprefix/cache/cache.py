"""The prefix cache of one model: its store, its threads, its prompts and its counts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np
from msgspec.structs import asdict

from diskprefix.cache.cached_request import CachedRequest
from diskprefix.cache.context import RequestContext
from diskprefix.cache.cost_model import CostModel
from diskprefix.cache.namespaces import TenantNamespaces
from diskprefix.cache.policy.scope import parse_scope
from diskprefix.cache.resources import CacheResources
from diskprefix.cache.tiers.loading import READER_THREADS
from diskprefix.errors import CacheError, StoreUnavailable
from diskprefix.kv.layout import Layout
from diskprefix.kv.sequence import KVSequence, Owner
from diskprefix.nouns import SHARED, CacheOptions, Prompt, Tenant
from diskprefix.settings import Settings
from diskprefix.store.codec.codec import decode_piece, encode_piece
from diskprefix.store.notes import TenantNotes
from diskprefix.store.purge import Purged, PurgeFilter, delete_entry, purge
from diskprefix.store.savings import Savings
from diskprefix.store.schema import Kind, ModelRecord, RootRecord
from diskprefix.store.store import Store
from diskprefix.tokens import TokenIds, root_hash

log = logging.getLogger("diskprefix")

_PURGE_S = 10.0
"""Seconds that a purge waits for the writer to save what it has, and for the shared tier."""


class PrefixCache(CacheResources):
    """The prefix cache of one model. `begin` is for the engine thread; `stats` is for any thread.

    `identity` returns the canonical text that identifies the model's numbers for a tenant (`model.load.fingerprint`).
    Its hash is the root of all that the tenant stores. `tokenizer` is its folder, for the record. `on_prompts`: see
    `TenantNamespaces`. `beside`: see `CacheResources`.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        layout: Layout,
        identity: Callable[[str], str],
        model_name: str,
        on_prompts: Callable[[bytes, Iterable[TokenIds]], None] | None = None,
        *,
        tokenizer: str = "",
        beside: PrefixCache | None = None,
    ) -> None:
        super().__init__(settings, store, layout, beside)
        self._identity = identity
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._secret = store.secret
        """That of the names in memory, which stay when another file takes the store's place."""
        self.namespaces = TenantNamespaces(store, self.root_record, on_prompts, settings.kv_cache_ttl)
        self.on_forget.append(self.namespaces.forget_deleted)
        shared = self.namespaces.get(SHARED)
        with suppress(CacheError):
            # The first request tries again.
            self.namespaces.read(shared)
        self.root = shared.root
        """The root of callers with neither key nor salt."""
        if not layout.unsupported:
            self.writer.add_model(ModelRecord(model=model_name, identity=identity(str(SHARED))))
        self.cost_model = CostModel(settings.kv_cache_gate, layout.loaded_bytes)

    @property
    def on_forget(self) -> list[Callable[[], None]]:
        """Called when something was purged, by any process, or may have expired: memories of it must go too."""
        return self.writer.house.on_forget

    def notes(self, tenant: Tenant) -> TenantNotes:
        """Returns the notes of a tenant; for any thread."""
        record = self.root_record(tenant)
        return self.notes_of(root_hash(record.identity), record)

    def owner(self, tenant: Tenant) -> Owner:
        """Returns whose state in memory that of a tenant is now; for any thread."""
        return Owner(root_hash(self.root_record(tenant).identity), self._secret, self.namespaces.purged_at)

    def owner_of(self, options: CacheOptions, private: bytes) -> Owner:
        """Returns whose state in memory that of a request is. `private` is a random key of the request, in case that it
        shares nothing; if its scope is off, it does not begin with what its tenant shares either."""
        owner = self.owner(options.tenant)
        if options.scope.kind == "off":
            return owner._replace(root=private, private=private)
        return owner if options.save else owner._replace(private=private)

    def is_gone(self, owner: Hashable) -> bool:
        """Returns whether the state in memory of an `owner` can no longer be found."""
        return isinstance(owner, Owner) and owner.purged_at != self.namespaces.purged_at

    def delete(self, entry_id: str) -> Purged:
        """Removes a saved prompt; see `purge`. Raises `EntryNotFound`."""
        return delete_entry(entry_id, self.purge)

    def purge(self, purge_filter: PurgeFilter) -> Purged:
        """Removes what a filter selects: from the store, from this process's memory and, if it selects saved prompts,
        from the shared tier. Waits for all of that. Raises `CacheError` if the store cannot
        be written."""
        # Prompts that ended before are then not lost with those that are computed. It may take too long: a purge has
        # what still waits refused.
        self.writer.flush(_PURGE_S)
        purged = purge(self.store, purge_filter, self.store.clock())
        for forget in self.on_forget:
            forget()
        if self.remote is not None:
            try:
                purged.remote_objects = self.remote.forget(purged.texts, _PURGE_S)
            except CacheError as error:
                purged.remote_error = str(error)
        return purged

    def warm_up(self, sequence: KVSequence) -> None:
        """Starts the reading threads and runs their code once, so that the first restore is as fast as any other.

        Overwrites the beginning of the sequence.
        """
        num_tokens = self.settings.block_size
        if not self.payload_layout.groups:
            return
        cut = self.payload_layout.cuts(num_tokens, Kind.BLOCK)[0]
        rows = slice(0, cut.piece.num_rows)
        blank = memoryview(bytes(cut.piece.num_bytes))
        stored = memoryview(encode_piece(blank, cut.piece, self.store.codec, 0))
        started = threading.Barrier(READER_THREADS)

        def read(_: int) -> None:
            started.wait()
            sequence.fill(0, num_tokens, cut.group, rows, lambda out: decode_piece(stored, cut.piece, 0, out))

        list(self.readers.map(read, range(READER_THREADS)))

    def begin(self, prompt: Prompt, options: CacheOptions, *, goes_on: bool = False) -> CachedRequest:
        """Starts a request. Does not wait.

        `goes_on`: the prompt ends at a grid point and is only a beginning, so its next-token logits are neither needed
        nor kept.
        """
        return CachedRequest(RequestContext(self, self.namespaces.get(options.tenant), prompt, options, goes_on))

    def save_idle(self, sequence: KVSequence, token_ids: TokenIds, options: CacheOptions, owner: Owner) -> None:
        """Queues the state of a sequence of `owner` that has ended, as far as it is not stored, and its scope leaves to
        the policy how much is kept. The sequence holds the `token_ids`."""
        is_long = len(token_ids) >= max(1, self.settings.kv_cache_min_tokens)
        if is_long and options.save and options.scope.most is None:
            request = self.begin(Prompt(np.append(token_ids, token_ids[-1:])), options)
            # The request is new, its state is not.
            if owner.purged_at == request.epoch.purged_at:
                request.save_idle(sequence)

    @property
    def health(self) -> tuple[str, str | None]:
        """`ok`, `unsupported` or `degraded`, and why it is degraded. Reads nothing from the disk."""
        error = self.store.problem or self.tiered.stalled or self.writer.error
        return "degraded" if error else "unsupported" if self.layout.unsupported else "ok", error

    def stats(self) -> dict[str, Any]:
        """Returns the figures for `/props` and `/metrics`. Reads the store, which may take long. Never raises."""
        state, error = self.health
        try:
            if self.tiered.stalled is not None:
                raise StoreUnavailable(self.tiered.stalled)
            written = self.store.written()
            counts = self.store.counts() | {"room_bytes": self.store.evictor.room_bytes()}
            savings = self.writer.savings.total()
        except CacheError as failure:
            names = ("entries", "blocks", "prompts", "ghosts", "notes", "ghost_bytes", "used_bytes", "file_bytes")
            counts = dict.fromkeys((*names, "room_bytes"), 0)
            state, error = "degraded", str(failure)
            savings, written = None, self.store.written_lately()
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
            "stalled_reads": self.counters["stalled_reads"],
            "write_budget_bytes": written.budget_bytes,
            "unaffordable": self.counters["unaffordable"],
            "dropped": self.writer.dropped,
            "evicted_blocks": self.writer.evicted,
            "expired_blocks": self.writer.house.expired,
            "quarantined": self.writer.house.quarantined,
            "saved_s": self.writer.savings.saved_s,
            "savings": _savings_dict(savings, self.store.clock()),
            "gate": self.cost_model.as_dict(),
            "remote": None if self.remote is None else self.remote.stats(),
        }

    def close(self, timeout_s: float) -> bool:
        """Flushes the writer and closes the store. Returns False if time ran out before everything was saved. A cache
        that is `beside` another leaves the store to that one."""
        if not self.has_own_threads:
            return True
        self.settle(timeout_s)
        # Before the threads, which may take long to end: what waits is written within the time.
        is_written = self.tiered.end_writing(timeout_s)
        for threads in (self.readers, self.aside):
            # A read that hangs is not waited for.
            threads.shutdown(wait=False)
        self.tiered.close_store()
        return is_written

    def root_record(self, tenant: Tenant) -> RootRecord:
        """Returns the record of a tenant's root; for any thread."""
        return RootRecord(
            model=self._model_name,
            block_size=self.settings.block_size,
            layout=self.layout.describe(),
            created_at=time.time(),
            identity=self._identity(str(tenant)),
            tenant=str(tenant),
            tokenizer=self._tokenizer,
        )


def _savings_dict(savings: Savings | None, now: float) -> dict[str, Any] | None:
    """Returns None if the store cannot be read, or no request asked it yet."""
    if savings is None or not savings.total.requests:
        return None
    return {"since": savings.since, "total": asdict(savings.total), "today": asdict(savings.today(now))}
