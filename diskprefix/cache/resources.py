"""The store with its writer and tiers, and the threads that read: prefix caches of one store share them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from diskprefix import hooks
from diskprefix.cache.policy.write_budget import SpentByKey
from diskprefix.cache.tiers.loading import MOST_LOADS, READER_THREADS
from diskprefix.cache.tiers.local import BufferTier, DiskTier
from diskprefix.cache.tiers.tier import SharedTier, Tier
from diskprefix.errors import StoreUnavailable
from diskprefix.namespace_key import NamespaceKey
from diskprefix.settings import Settings
from diskprefix.store.store import Store
from diskprefix.store.writer import Writer

log = logging.getLogger("diskprefix")

_REMOTE_CLOSE_S = 5.0


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
