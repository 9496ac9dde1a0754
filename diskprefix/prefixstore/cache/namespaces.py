"""One namespace for each tenant: its root, and its earlier prompts. README.md has the bounds on their memory."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from msgspec import Struct

from diskprefix.errors import CacheError, StoreCorrupt
from diskprefix.fair_cache import FairCache
from diskprefix.prefixstore.cache.policy.seen import MAX_PROMPT_BYTES, SeenPrompts
from diskprefix.prefixstore.store.epochs import Epoch
from diskprefix.prefixstore.store.ghosts import SeenRecord, newest_first
from diskprefix.prefixstore.store.schema import RootRecord
from diskprefix.prefixstore.store.store import Store
from diskprefix.tokens import TokenIds, root_hash
from diskprefix.values import Tenant

_MAX_BYTES = 128 << 20
_LEAST_BYTES = _MAX_BYTES // 256
"""The bound on the memory of all tenants, which shares divide, and the least that a tenant counts. `SeenPrompts` bounds
the memory of one."""


class TenantNamespace(Struct, eq=False):
    """One tenant's part of the cache. `root` names everything that is stored for it. `is_read`: the prompts that the
    store knows were read. The first prompt expires at `expires_at`, and the last one came at `latest_at`, both in
    seconds since the epoch."""

    root: bytes
    record: RootRecord
    seen: SeenPrompts
    outdated: Sequence[bytes] = ()
    """Roots with state that other builds computed for the tenant."""
    is_read: bool = False
    expires_at: float = math.inf
    latest_at: float = -math.inf

    def remember(
        self, token_ids: TokenIds, group: bytes, block_names: Sequence[bytes], came_at: float, lasts_s: float
    ) -> None:
        """Adds a prompt as the newest, which came at `came_at` and expires `lasts_s` seconds later. `block_names` are
        the names of its full blocks."""
        self.seen.remember(token_ids, block_names, group, came_at)
        self._note_times(came_at, lasts_s)

    def has_expired(self, now: float) -> bool:
        """Returns whether some prompt has expired, or came in the future: then the clock was wrong."""
        return not self.latest_at <= now < self.expires_at

    def replace(self, seen: SeenPrompts, times: Iterable[tuple[float, float]]) -> None:
        """Takes over the prompts that were read from the store, with `came_at` and `lasts_s` of each."""
        for came_at, lasts_s in times:
            self._note_times(came_at, lasts_s)
        # The engine's thread uses the earlier object or this one.
        self.seen, self.is_read = seen, True

    def _note_times(self, came_at: float, lasts_s: float) -> None:
        self.expires_at = min(self.expires_at, came_at + lasts_s)
        self.latest_at = max(self.latest_at, came_at)


class Beginning(NamedTuple):
    """The namespace and the epoch of a request, which name its state in memory and on the disk. Both are taken once,
    when it begins: a purge, or another root of this build, may come at any time."""

    namespace: TenantNamespace
    epoch: Epoch


class TenantNamespaces:
    """The namespaces of the tenants that were used last. `get` and its result are for the engine's thread, and do not
    read the store. `read_seen` and `forget_deleted` do, on threads that may wait for the disk.

    `record_of` returns the record of a tenant's root. `on_prompts` is called with a root and the prompts, oldest first,
    that were read from the store for it. `ttl_s` is the daemon's time to live, 0 for none.
    """

    def __init__(
        self,
        store: Store,
        record_of: Callable[[Tenant], RootRecord],
        on_prompts: Callable[[bytes, Iterable[TokenIds]], None] | None = None,
        ttl_s: float = 0.0,
    ) -> None:
        self._store = store
        self._record_of = record_of
        self._on_prompts = on_prompts
        self._ttl_s = ttl_s
        self._used = FairCache[Tenant, TenantNamespace](_MAX_BYTES)
        self._lock = threading.Lock()
        """Guards `_used` and `epochs`. Never held while the store is read."""
        self.on_forget: Callable[[], None] = lambda: None
        """Called when prompts that `on_prompts` got may have been deleted."""
        self.epochs = store.epochs
        """The epochs of the state in memory, as the store had them when `forget_deleted` looked."""

    def get(self, tenant: Tenant, share: str = "") -> TenantNamespace:
        """Returns the tenant's namespace, and marks it as used, by a request of `share`. Drops others if all take too
        much memory."""
        with self._lock:
            if (namespace := self._used.get(tenant)) is None:
                record = self._record_of(tenant)
                seen = SeenPrompts(record.block_size, is_trusting=not tenant.is_salted)
                namespace = TenantNamespace(root_hash(record.identity), record, seen)
            self._used.put(tenant, namespace, share, _LEAST_BYTES)
            self._used.measure_again(lambda used: max(_LEAST_BYTES, used.seen.num_bytes))
            return namespace

    def read_seen(self, namespace: TenantNamespace, on_prompt: Callable[[], object] = lambda: None) -> None:
        """Reads the tenant's earlier prompts from the store, unless they were read. May take a second. Calls
        `on_prompt` after each prompt. Raises `CacheError`; then the next call reads again.

        For one thread at a time, which need not be the engine's. If a tenant is dropped and read again soon, prompts
        that still wait to be written are missing.
        """
        if namespace.is_read:
            return
        seen = SeenPrompts(namespace.record.block_size, is_trusting=namespace.seen.is_trusting)
        prompts = deque[SeenRecord]()
        with self._store.reads.snapshot() as snapshot:
            for prompt in newest_first(snapshot, namespace.root, max_bytes=MAX_PROMPT_BYTES):
                prompts.appendleft(prompt)
                on_prompt()
            with suppress(StoreCorrupt):
                namespace.outdated = snapshot.outdated_roots(namespace.record.identity, namespace.record.tenant)
        if self._on_prompts is not None:
            self._on_prompts(namespace.root, (prompt.token_ids for prompt in prompts))
        for prompt in prompts:
            seen.remember(prompt.token_ids, tuple(prompt.blocks), prompt.record.group, prompt.record.came_at)
        records = (prompt.record for prompt in prompts)
        namespace.replace(seen, ((record.came_at, record.ttl_s or self._ttl_s or math.inf) for record in records))

    def drop_all(self) -> None:
        """Drops all tenants, because their roots are others now. For any thread."""
        with self._lock:
            self._used.clear()

    def forget_deleted(self) -> None:
        """Drops the tenants that were purged or have expired prompts, and all of them if another store was opened. They
        are read again when needed. Call it whenever another process may have purged something. Reads the store, so it
        is not for the engine's thread."""
        with suppress(CacheError):
            self._store.read_epochs()
        now = self._store.clock()
        with self._lock:
            before, self.epochs = self.epochs, self._store.epochs
            is_over = self.epochs.is_over
            has_gone = self._used.remove_if(lambda of, used: used.has_expired(now) or is_over(before.of(str(of))))
            if has_gone or self.epochs != before:
                self.on_forget()
