"""The shared parts of one prefix cache: its store, its threads, its measured times and its counts."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from diskprefix import hooks
from diskprefix.cache.cost_model import CostModel
from diskprefix.cache.namespaces import TenantNamespaces
from diskprefix.cache.policy.write_budget import Spending, SpentByKey
from diskprefix.cache.tiers.loading import MOST_LOADS, READER_THREADS
from diskprefix.cache.tiers.local import BufferTier, DiskTier
from diskprefix.cache.tiers.tier import SharedTier, Tier
from diskprefix.errors import StoreUnavailable
from diskprefix.kv.layout import Layout
from diskprefix.namespace_key import NamespaceKey
from diskprefix.nouns import SHARED, Tenant
from diskprefix.settings import Settings
from diskprefix.store.notes import TenantNotes
from diskprefix.store.pieces import PayloadLayout
from diskprefix.store.schema import RootRecord
from diskprefix.store.store import Store
from diskprefix.store.store_identity import Epoch
from diskprefix.store.writer import Writer

log = logging.getLogger("diskprefix")

_REMOTE_CLOSE_S = 5.0
_NOTE_TTL_S = 30 * 86400.0
"""The time to live of notes without `--kv-cache-ttl`. OpenAI keeps responses as long."""


def open_store(settings: Settings, on_wait: Callable[[str], None] = lambda _why: None) -> Store:
    """Opens the store of a cache; `on_wait` as for `Store`. Raises `CacheError` if the folder cannot be used, but not
    if it is full or read-only, and `SettingsError` if a key file cannot be read."""
    key_file = settings.namespace_key_file
    namespace = None if key_file is None else NamespaceKey.read(key_file)
    try:
        store = Store(
            settings.kv_cache_dir,
            budget_bytes=settings.kv_cache_budget,
            on_corruption="quarantine",
            min_free_bytes=settings.kv_cache_min_free,
            serving=True,
            namespace=namespace,
            on_wait=on_wait,
        )
    except StoreUnavailable as error:
        if "already open in this process" in str(error):
            raise StoreUnavailable(
                f"{settings.kv_cache_dir} is in use by another session of this process; close() that one first, or "
                "choose another cache_dir"
            ) from error
        raise
    store.meter.budget_bytes = settings.write_budget_bytes
    return store


class TieredStore:
    """An open store with its writer, the tiers that can be read at once, and the tier that machines share."""

    def __init__(self, settings: Settings, store: Store) -> None:
        """Raises `SettingsError` if the shared tier cannot be opened."""
        self.settings, self.store = settings, store
        self.remote: SharedTier | None = hooks.open_tier(settings)
        self.writer = Writer(store, buffer_bytes=settings.kv_cache_write_buffer, ttl_s=settings.kv_cache_ttl)
        self.spent = SpentByKey()
        self.stalled: str | None = None
        """A read of the disk does not end. Until it does, nothing else is read. Set by `note_stall`."""
        # One load more is that of a draft model.
        num_readers = READER_THREADS * (MOST_LOADS + 1)
        self.readers = ThreadPoolExecutor(num_readers, thread_name_prefix="kv-reader")
        self.aside = ThreadPoolExecutor(1, thread_name_prefix="kv-aside")
        """The thread for small work that reads nothing from the disk."""
        self.tiers: tuple[Tier, ...] = (BufferTier(self.writer), DiskTier(store, self.writer.quarantine))
        """The nearest first."""

    def close(self, timeout_s: float) -> bool:
        """Does `end_writing`, and closes the store."""
        is_written = self.end_writing(timeout_s)
        self.close_store()
        return is_written

    def end_writing(self, timeout_s: float) -> bool:
        """Uploads and writes what waits. Returns False if time ran out before everything was written."""
        if self.remote is not None:
            # It reads what it uploads from the store.
            self.remote.close(min(timeout_s, _REMOTE_CLOSE_S))
        return self.writer.close(timeout_s)

    def close_store(self) -> None:
        """Closes the store, if nothing writes any more. It stays open if a read does not end."""
        if not self.writer.is_alive:
            try:
                self.store.close()
            except StoreUnavailable as error:
                log.warning("[disk-cache] not closed: %s", error)

    def note_stall(self, waited_s: float | None) -> None:
        """Records, and logs once, that a read has not ended for `waited_s` seconds; with None, that all have ended."""
        if waited_s is not None and self.stalled is None:
            self.stalled = (
                f"the disk of --kv-cache-dir {self.store.path} has not answered for {waited_s:.0f} s: "
                "prompts are computed, and nothing is read until it answers"
            )
            log.error("[disk-cache] %s", self.stalled)
        elif waited_s is None and self.stalled is not None:
            self.stalled = None
            log.info("[disk-cache] the disk answers again")


class CacheResources:
    """The store and the threads of one prefix cache, and its counts."""

    cost_model: CostModel
    namespaces: TenantNamespaces

    def __init__(self, settings: Settings, store: Store, layout: Layout, beside: CacheResources | None = None) -> None:
        """`beside` is the cache of another model in the same store, whose threads serve
        this one too."""
        self.settings = settings
        self.layout = layout
        self.payload_layout = PayloadLayout.parse(layout.describe())
        self.has_own_threads = beside is None
        self.tiered: TieredStore = TieredStore(settings, store) if beside is None else beside.tiered
        self.store, self.writer = store, self.tiered.writer
        self.tiers, self.remote = self.tiered.tiers, self.tiered.remote
        self.readers, self.aside = self.tiered.readers, self.tiered.aside
        self._aside: set[Future[None]] = set()
        self.counters: Counter[str] = Counter()
        self._counting = threading.Lock()
        self.restored_tokens: Counter[str] = Counter(memory=0, disk=0, remote=0)
        """By the tier they came from."""
        self.misses: Counter[str] = Counter()

    def count(self, what: str) -> None:
        """Adds one to a counter. For any thread."""
        with self._counting:
            self.counters[what] += 1

    def spending(self, tenant: Tenant = SHARED) -> Spending | None:
        """Returns the state of `--kv-cache-write-budget`, None without one. What waits to be written counts too. With
        API keys, that of the `tenant`'s key. Reads nothing from the disk."""
        limit, now = self.store.meter.budget_bytes, self.store.clock()
        if not limit:
            return None
        used = self.store.written_lately().last_day(now) + self.writer.pending_bytes
        has_share = self.settings.api_keys is not None and tenant != SHARED
        own_bytes, num_keys = self.tiered.spent.of(tenant.ids[:1], now) if has_share else (0, 1)
        return Spending(
            own_bytes=own_bytes,
            num_keys=num_keys,
            used_bytes=used,
            limit_bytes=limit,
            bytes_per_token=self.layout.bytes_per_token,
            state_bytes=self.layout.state_bytes,
        )

    def spend(self, tenant: Tenant, num_bytes: int) -> None:
        """Counts what is to be written for the `tenant`'s API key. For the engine's thread."""
        if self.settings.api_keys is not None:
            self.tiered.spent.add(tenant.ids[:1], num_bytes, self.store.clock())

    def notes_of(
        self, root: bytes, record: RootRecord, ttl_s: float | None = None, epoch: Epoch | None = None
    ) -> TenantNotes:
        """Returns the notes of a root, for any thread. `ttl_s` is the time to live of new notes, in seconds; with None
        the daemon's `--kv-cache-ttl` holds. `epoch` is that in which their request began; with None it begins now."""
        lasts_s = ttl_s or self.settings.kv_cache_ttl or _NOTE_TTL_S
        return TenantNotes(self.writer.notes, epoch or self.store.epoch, root, record, lasts_s)

    def lasts_s(self, ttl_s: float | None) -> float:
        """Returns the time to live, in seconds, of what a request asks to keep for `ttl_s`."""
        return ttl_s or self.settings.kv_cache_ttl or math.inf

    def run_aside(self, work: Callable[[], None]) -> None:
        """Runs small work on the thread `kv-aside`."""
        future = self.aside.submit(work)
        self._aside.add(future)
        future.add_done_callback(self._end_aside)

    def _end_aside(self, future: Future[None]) -> None:
        self._aside.discard(future)
        if (error := future.exception()) is not None:
            self.count("errors")
            log.error("[disk-cache] not saved: %r", error)

    def settle(self, timeout_s: float | None = None) -> bool:
        """Waits until all is with the writer. Returns False if the time runs out first."""
        return not wait(list(self._aside), timeout_s).not_done
