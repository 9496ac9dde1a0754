"""One namespace for each tenant: its root, its recent prompts, and the blocks that it has seen.

The memory of all tenants together is bounded; README.md says how. Reading a tenant from the store hashes millions of
tokens, so `load` does that on threads of its own, never on the engine's.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from diskprefix.cache.choosing import SeenPrompts
from diskprefix.cache.tiers.nodes import PromptNodes
from diskprefix.errors import CacheError
from diskprefix.nouns import MAX_VALUE, SHARED, Tenant
from diskprefix.store.pieces import PayloadLayout
from diskprefix.store.schema import RootRecord
from diskprefix.store.store import Store
from diskprefix.tokens import TokenIds, root_hash

log = logging.getLogger("diskprefix")

_MAX_BYTES = 128 << 20
_MAX_TENANTS = 256
"""Bounds over all tenants. The tenant that was used last is kept whatever its size, which `SeenPrompts` bounds."""
_READING_THREADS = 4


@dataclass(eq=False)
class TenantNamespace:
    """One tenant's part of the cache. `root` names everything that is stored for it. The first of its prompts expires
    at `expires_at`, in seconds since the epoch."""

    root: bytes
    record: RootRecord
    seen: SeenPrompts
    expires_at: float = math.inf

    def remember(self, token_ids: TokenIds, group: bytes, block_names: Sequence[bytes], expires_at: float) -> None:
        """Adds a prompt as the newest. `block_names` are the names of its full blocks."""
        self.seen.remember(token_ids, group, block_names)
        self.expires_at = min(self.expires_at, expires_at)


class TenantNamespaces:
    """The namespaces of the tenants that were used last. `load` is for any thread; `get` and its result are for the
    engine's thread. Neither reads the store: `forget_deleted` does, on a thread that may wait for the disk.

    `record_of` returns the record of a tenant's root. `on_history` is called with a root and the prompts, oldest first,
    that were read from the store for it. `ttl_s` is the daemon's time to live, 0 for none.
    """

    def __init__(
        self,
        store: Store,
        layout: PayloadLayout,
        record_of: Callable[[Tenant], RootRecord],
        on_history: Callable[[bytes, Iterable[TokenIds]], None] | None = None,
        ttl_s: float = 0.0,
    ) -> None:
        self._store = store
        self._layout = layout
        self._record_of = record_of
        self._on_history = on_history
        self._ttl_s = ttl_s
        self._loaded: OrderedDict[Tenant, Future[TenantNamespace]] = OrderedDict()
        """The loaded tenants and those that are being read. The one that was used longest ago comes first."""
        self._lock = threading.Lock()
        """Guards `_loaded` and `purged_at`. Never held while the store's prompts are read."""
        self._threads = ThreadPoolExecutor(_READING_THREADS, thread_name_prefix="tenant")
        self.on_forget: Callable[[], None] = lambda: None
        """Called when prompts that `on_history` got may be gone."""
        self.purged_at: bytes | None = None
        """The time of the last `diskprefix purge`, as the store had it when `forget_deleted` looked."""
        self._forget_what_was_purged()

    def load(self, tenant: Tenant) -> Future[TenantNamespace]:
        """Reads the tenant's recent prompts from the store unless they are in memory. May take a second.

        Returns a future that is done when they are in memory, or could not be read: then the next `load` tries again.
        All callers for one tenant share its future, and must not cancel it. Prompts that still wait to be written are
        not read, so they are missing from a tenant that was dropped and is read again soon.
        """
        with self._lock:
            if tenant not in self._loaded:
                self._loaded[tenant] = self._threads.submit(self._load, tenant)
            return self._use(tenant)

    def expires_at(self, came_at: float, ttl_s: float | None) -> float:
        """Returns the time when a prompt expires that came at `came_at`, both in seconds since the epoch. `ttl_s` is
        its own time to live, or None."""
        return came_at + (ttl_s or self._ttl_s or math.inf)

    def forget_deleted(self) -> None:
        """Drops the tenants with purged or expired prompts. They are read again when needed. Reads the store: to be
        called whenever another process may have purged something, but not by the engine's thread."""
        self._forget_what_was_purged()
        now = self._store.clock()
        with self._lock:
            for tenant, one in list(self._loaded.items()):
                if one.done() and one.result().expires_at <= now:
                    del self._loaded[tenant]
                    self.on_forget()

    def close(self) -> None:
        """Waits for the tenants that are being read, and ends the threads."""
        self._threads.shutdown()

    def get(self, tenant: Tenant) -> TenantNamespace:
        """Returns the tenant's namespace. If it is not loaded, or no longer, returns one without recent prompts: the
        request is served as a tenant's first one, and what it adds to the history counts from the next `load` on."""
        with self._lock:
            if tenant in self._loaded and self._use(tenant).done():
                return self._loaded[tenant].result()
        log.debug("[disk-cache] the recent prompts of a tenant are not in memory: going on without them")
        return self._new(tenant)

    def _load(self, tenant: Tenant) -> TenantNamespace:
        namespace = self._new(tenant)
        try:
            self._read_into(namespace)
        except BaseException as error:
            with self._lock:
                self._loaded.pop(tenant, None)
            if not isinstance(error, CacheError):
                raise
            log.warning("[disk-cache] the recent prompts cannot be read: %s", error)
        return namespace

    def _use(self, tenant: Tenant) -> Future[TenantNamespace]:
        """Marks a tenant as used, and drops others if there are too many. The caller holds the lock."""
        self._loaded.move_to_end(tenant)
        num_bytes = {other: one.result().seen.num_bytes for other, one in self._loaded.items() if one.done()}
        total = sum(num_bytes.values())
        for oldest in list(num_bytes)[:-1]:
            if total <= _MAX_BYTES and len(self._loaded) <= _MAX_TENANTS:
                break
            del self._loaded[oldest]
            total -= num_bytes[oldest]
        return self._loaded[tenant]

    def _forget_what_was_purged(self) -> None:
        """Drops all tenants if `diskprefix purge` has removed prompts, here or in another process."""
        try:
            with self._store.snapshot() as snapshot:
                purged_at = snapshot.meta("purged_at")
        except CacheError:
            return
        with self._lock:
            if purged_at != self.purged_at:
                self.purged_at = purged_at
                self._loaded.clear()
                self.on_forget()

    def _new(self, tenant: Tenant) -> TenantNamespace:
        record = self._record_of(tenant)
        seen = SeenPrompts(record.block_size, is_trusting=tenant == SHARED)
        return TenantNamespace(root_hash(record.identity), record, seen)

    def _read_into(self, namespace: TenantNamespace) -> None:
        with self._store.snapshot() as snapshot:
            prompts = snapshot.recent_prompts(namespace.root, MAX_VALUE)
            times = list(snapshot.prompt_times(namespace.root))
        if self._on_history is not None:
            self._on_history(namespace.root, (token_ids for _, token_ids in prompts))
        block_size = namespace.record.block_size
        expires_at = min((self.expires_at(when, own_s) for when, own_s in times), default=math.inf)
        for group, token_ids in prompts:
            nodes = PromptNodes(self._store.secret, namespace.root, token_ids, block_size, self._layout)
            namespace.remember(token_ids, group, nodes.block_names, expires_at)
