"""The resources that prefix caches of one store share: the store, its writer and tiers, and the reading threads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from diskprefix.errors import StoreUnavailable
from diskprefix.prefixstore.cache.policy.write_budget import SpentByShare
from diskprefix.prefixstore.cache.tiers.loading import MAX_LOADS, READER_THREADS
from diskprefix.prefixstore.cache.tiers.local import of_any_build, view_buffer, view_disk
from diskprefix.prefixstore.cache.tiers.tier import SharedTier, Tier
from diskprefix.prefixstore.namespace_key import NamespaceKey
from diskprefix.prefixstore.store.folder import require_on_disk
from diskprefix.prefixstore.store.statistics.savings import SavingsLog
from diskprefix.prefixstore.store.store import Store
from diskprefix.prefixstore.store.writer import Writer
from diskprefix.prefixstore.store_options import StoreOptions
from diskprefix.thread_pool import ThreadPool

log = logging.getLogger("diskprefix")

_REMOTE_CLOSE_S = 5.0


def open_store(settings: StoreOptions, on_wait: Callable[[str], None] = lambda _why: None) -> Store:
    """Opens the store of a cache; `on_wait` as for `Store`. Raises `CacheError` if the folder cannot be used, but not
    if it is full or read-only, and `SettingsError` if a key file cannot be read, or for a budget above the disk."""
    require_on_disk(settings.kv_cache_dir, settings.kv_cache_budget or 0)
    key_file = settings.namespace_key_file
    namespace = None if key_file is None else NamespaceKey.read(key_file)
    try:
        store = Store(
            settings.kv_cache_dir,
            budget_bytes=settings.kv_cache_budget or 0,
            new_budget_bytes=settings.kv_cache_new_budget,
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


def _open_remote(settings: StoreOptions) -> SharedTier | None:
    if settings.remote_tier is None:
        return None
    # Its library is an optional dependency.
    from diskprefix.prefixstore.remote.remote_tier import open_tier

    return open_tier(settings)


class TieredStore:
    """An open store with its writer, the tiers of this machine, and the tier that machines share."""

    def __init__(self, settings: StoreOptions, store: Store) -> None:
        """Raises `SettingsError` if the shared tier cannot be opened."""
        self.settings, self.store = settings, store
        self.remote = _open_remote(settings)
        self.savings = SavingsLog(store)
        self.writer = Writer(
            store,
            buffer_bytes=settings.kv_cache_write_buffer,
            ttl_s=settings.kv_cache_ttl,
            also_writes=(self.savings.writing,),
        )
        self.spent = SpentByShare()
        # A draft model has one load more.
        num_readers = READER_THREADS * (MAX_LOADS + 1)
        self.readers = ThreadPool(num_readers, "kv-reader").start()
        self.background = ThreadPool(1, "kv-background").start()
        """The thread for small work that reads nothing from the disk."""
        self.tiers = self.tiers_of(of_any_build)
        """The tiers with the state of every build."""

    def tiers_of(self, accepts: Callable[[bytes], bool]) -> tuple[Tier, ...]:
        """Returns the tiers, the nearest first, with the state of the builds whose digests are accepted. `accepts` is
        called for each node, on any thread."""
        disk = partial(view_disk, self.store, self.writer.quarantine, accepts)
        return partial(view_buffer, self.writer), disk

    def close(self, timeout_s: float) -> bool:
        """Uploads and writes what waits, ends the threads, and closes the store. Returns False if time ran out before
        everything was written. The store stays open if something still reads or writes it."""
        if self.remote is not None:
            # The shared tier reads its uploads from the store.
            self.remote.close(min(timeout_s, _REMOTE_CLOSE_S))
        is_written = self.writer.close(timeout_s)
        for threads in (self.readers, self.background):
            # A read that hangs is not waited for.
            threads.shutdown(wait=False)
        self.store.reads.close()
        if not self.writer.is_alive:
            try:
                self.store.close()
            except StoreUnavailable as error:
                log.warning("[disk-cache] not closed: %s", error)
        return is_written
