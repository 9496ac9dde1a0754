"""The prefix cache of one model: its store, its threads, its history and its counts."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from diskprefix.cache_options import CacheOptions
from diskprefix.errors import CacheError
from diskprefix.kv.arena import KVArena
from diskprefix.kv.layout import Layout
from diskprefix.policy.admission import AdmissionFilter
from diskprefix.policy.history import History
from diskprefix.policy.scope import MAX_VALUE, Scope
from diskprefix.prefix_cache.cost_model import CostModel, Use
from diskprefix.prefix_cache.nodes import PromptNodes
from diskprefix.prefix_cache.request import CachedRequest
from diskprefix.prefix_cache.restore import READER_THREADS
from diskprefix.prompt import Prompt
from diskprefix.settings import Settings
from diskprefix.store.codec.codec import decode_piece, encode_piece
from diskprefix.store.maintenance.repair import repair_index
from diskprefix.store.pieces import PayloadLayout
from diskprefix.store.schema import HISTORY_TOKENS, Kind, RootRecord
from diskprefix.store.store import Store
from diskprefix.store.writer import Writer
from diskprefix.tenant import SHARED, Tenant
from diskprefix.tokens import TokenIds, root_hash

log = logging.getLogger("diskprefix")

_TENANTS = 256
_ALL_HISTORY_TOKENS = 1 << 24
"""Tenants and tokens whose recent prompts are kept in memory together, as clients choose salts; those of others are
read from the store when they come back."""


@dataclass(frozen=True, eq=False)
class TenantNamespace:
    """What one tenant sees of the cache: a root of its own, the recent prompts under it, and what was seen before."""

    root: bytes
    record: RootRecord
    history: History
    admission: AdmissionFilter


class PrefixCache:
    """The prefix cache of one model. `begin` is for the engine thread; `stats` may be called from any thread.

    `identity` gives the canonical text that identifies the model's numbers for a tenant (`kv.fingerprint`): its hash is
    the root of all that the tenant stores. `device` names what computes them, as precisely as its speed is to be told
    from others'. `on_history` is told of a root's recent prompts, oldest first, when they are
    read from the store.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        layout: Layout,
        identity: Callable[[str], str],
        model_name: str,
        default_scope: Scope,
        on_history: Callable[[bytes, Iterable[TokenIds]], None] | None = None,
        *,
        device: str,
    ) -> None:
        self.settings = settings
        self.store = store
        self.layout = layout
        self.payload_layout = PayloadLayout.parse(layout.describe())
        self.default_scope = default_scope
        self.writer = Writer(
            store, buffer_bytes=settings.kv_cache_write_buffer, ttl_s=settings.kv_cache_ttl, repair=repair_index
        )
        self.readers = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="kv-reader")
        self._identity = identity
        self._on_history = on_history
        self._model_name = model_name
        self._namespaces: OrderedDict[Tenant, TenantNamespace] = OrderedDict()
        self._purged_at: bytes | None = None
        self._capturer = ThreadPoolExecutor(1, thread_name_prefix="kv-capture")
        # The thread starts with its first task: now, so that it cannot fail in the middle of a request.
        self._capturer.submit(time.time).result()
        self._capturing: list[Future[None]] = []
        self.counters: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        root = self.namespace(SHARED).root
        key = f"{root.hex()} {device} {store.store_id.hex()}"
        self.worth = CostModel(settings.kv_cache_gate, layout.loaded_bytes, key=key)

    def namespace(self, tenant: Tenant) -> TenantNamespace:
        """The tenant's part of the cache, its recent prompts read from the store if they are not in memory."""
        self._forget_what_was_purged()
        namespace = self._namespaces.pop(tenant, None) or self._read_namespace(tenant)
        self._namespaces[tenant] = namespace
        while len(self._namespaces) > _TENANTS or self._history_tokens() > _ALL_HISTORY_TOKENS:
            self._namespaces.popitem(last=False)
        return namespace

    def _forget_what_was_purged(self) -> None:
        """`diskprefix purge` may have removed recent prompts, here or beside another daemon: read them anew then."""
        try:
            with self.store.snapshot() as snapshot:
                purged_at = snapshot.meta("purged_at")
        except CacheError:
            return
        if purged_at != self._purged_at:
            self._purged_at = purged_at
            self._namespaces.clear()

    def _history_tokens(self) -> int:
        """Tokens that the recent prompts of all tenants but the current one hold."""
        return (
            sum(namespace.history.num_tokens for namespace in self._namespaces.values())
            if len(self._namespaces) > 1
            else 0
        )

    def _read_namespace(self, tenant: Tenant) -> TenantNamespace:
        identity = self._identity(str(tenant))
        root = root_hash(identity)
        record = RootRecord(
            model=self._model_name,
            block_size=self.settings.block_size,
            layout=self.layout.describe(),
            created_at=time.time(),
            identity=identity,
            tenant=str(tenant),
        )
        prompts: list[tuple[bytes, TokenIds]] = []
        try:
            with self.store.snapshot() as snapshot:
                prompts = snapshot.recent_prompts(root, MAX_VALUE)
        except CacheError as error:
            log.warning("[disk-cache] the recent prompts cannot be read: %s", error)
        if self._on_history is not None:
            self._on_history(root, (token_ids for _, token_ids in prompts))
        history = History.from_prompts(prompts, max_prompts=MAX_VALUE, max_tokens=HISTORY_TOKENS)
        admission = AdmissionFilter(is_trusting=tenant == SHARED)
        secret, block_size = self.store.secret, self.settings.block_size
        for _, token_ids in prompts:
            names = PromptNodes(secret, root, token_ids, block_size, self.payload_layout).block_names()
            admission.add(token_ids, names, block_size)
        return TenantNamespace(root, record, history, admission)

    def warm_up(self, arena: KVArena) -> None:
        """Start the reading threads and take their way once, so that the first restore is as fast as any other.

        Overwrites the beginning of the arena; does nothing if that has no memory yet.
        """
        num_tokens = min(self.settings.block_size, arena.capacity)
        if not num_tokens:
            return
        if not self.payload_layout.groups:
            return
        cut = self.payload_layout.cuts(num_tokens, Kind.BLOCK)[0]
        rows = slice(0, cut.piece.num_rows)
        blank = memoryview(bytes(cut.piece.num_bytes))
        stored = memoryview(encode_piece(blank, cut.piece, self.store.codec, 0))
        started = threading.Barrier(READER_THREADS)

        def read(_: int) -> None:
            started.wait()
            arena.fill(0, num_tokens, cut.group, rows, lambda out: decode_piece(stored, cut.piece, 0, out))

        list(self.readers.map(read, range(READER_THREADS)))

    def begin(
        self,
        prompt: Prompt,
        options: CacheOptions,
        *,
        goes_on: bool = False,
    ) -> CachedRequest:
        """Start a request. Waits until the arena is free to be overwritten.

        `goes_on`: the prompt ends at a grid point and is only a beginning, so its next-token logits are neither needed
        nor kept.
        """
        self.settle()
        return CachedRequest(self, self.namespace(options.tenant), prompt, options, goes_on=goes_on)

    def is_worth(self, num_tokens: int, *, use: Use) -> bool:
        """Whether so many tokens are faster restored than computed, by what was measured."""
        return self.worth.allows(num_tokens, use)

    def start_capture(self, copy: Callable[[], None]) -> None:
        """Run `copy`, which reads the arena, beside the engine thread, after those that were started before it."""
        self._capturing.append(self._capturer.submit(copy))

    def settle(self) -> None:
        """Wait for the captures that are under way. Once they are over, what they captured is visible to `restore`."""
        capturing, self._capturing = self._capturing, []
        for capture in capturing:
            if (error := capture.exception()) is not None:
                self.counters["errors"] += 1
                log.warning("[disk-cache] a prompt was not saved: %r", error, exc_info=error)

    @property
    def health(self) -> tuple[str, str | None]:
        """`ok`, `unsupported` or `degraded`, and why it is degraded. Reads nothing from the disk."""
        error = self.store.problem or self.writer.error
        return "degraded" if error else "unsupported" if self.layout.unsupported else "ok", error

    def stats(self) -> dict[str, Any]:
        """What `/props` and `/metrics` show. Counts of this process, sizes of the store. Never raises.

        Reads the store, which may wait for the disk.
        """
        try:
            counts, error = self.store.counts(), self.store.problem or self.writer.error
        except CacheError as failure:
            counts, error = dict.fromkeys(("entries", "blocks", "prompts", "used_bytes", "file_bytes"), 0), str(failure)
        return {
            "scope": str(self.default_scope),
            "dir": str(self.store.path),
            "store_id": self.store.store_id.hex(),
            "state": "degraded" if error else "unsupported" if self.layout.unsupported else "ok",
            "error": error,
            "entries": counts["entries"],
            "blocks": counts["blocks"],
            "history": counts["prompts"],
            "used_bytes": counts["used_bytes"],
            "file_bytes": counts["file_bytes"],
            "budget_bytes": self.store.budget_bytes,
            "codec": self.store.codec.name.lower(),
            "codec_reason": self.store.codec_reason,
            "pending_bytes": self.writer.pending_bytes,
            "bytes_per_token": self.layout.bytes_per_token,
            "state_bytes": self.layout.state_bytes,
            "hits": self.counters["hits"],
            "misses": dict(self.misses),
            "restored_tokens": self.counters["restored_tokens"],
            "restored_bytes": self.counters["restored_bytes"],
            "saved_tokens": self.writer.written_tokens,
            "saved_bytes": self.writer.written_bytes,
            "dropped": self.writer.dropped + self.counters["refused"],
            "evicted_blocks": self.writer.evicted,
            "expired_blocks": self.writer.expired,
            "quarantined": self.writer.quarantined,
            "errors": self.counters["errors"],
            "gate": self.worth.as_dict(),
        }

    def close(self, timeout_s: float) -> bool:
        """Flush the writer and close the store; False when time ran out before everything was saved."""
        self.settle()
        self._capturer.shutdown()
        self.worth.remember()
        flushed = self.writer.close(timeout_s)
        self.readers.shutdown()
        if not self.writer.is_alive:
            self.store.close()
        return flushed
