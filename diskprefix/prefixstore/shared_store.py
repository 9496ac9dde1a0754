"""The open stores of this process. LMDB must not open a file twice in one process, and an engine may run its scheduler
and its worker in one."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from diskprefix.prefixstore.cache.tiered_store import TieredStore, open_store
from diskprefix.prefixstore.store_options import StoreOptions
from diskprefix.processors import unbound

_CLOSE_TIMEOUT_S = 20.0


class SharedStore(TieredStore):
    """The store of all users of one path in this process. For any thread. Each user calls `release` at the end."""

    def __init__(self, settings: StoreOptions) -> None:
        """Raises `CacheError` and `SettingsError`."""
        store = open_store(settings)
        try:
            with unbound():
                super().__init__(settings, store)
        except BaseException:
            store.close()
            raise
        self.num_users = 0

    @property
    def problem(self) -> str | None:
        """The reason why not everything is stored or read; None if it is. Does not wait."""
        return self.store.problem or self.store.write_stall or self.writer.error or self.store.reads.stalled

    @property
    def num_removed(self) -> int:
        """The number of nodes that this process has evicted, or removed because they expired or were damaged."""
        return self.writer.evicted + self.writer.housekeeping.expired + self.writer.housekeeping.quarantined

    def release(self) -> bool:
        """Closes the store if this was its last user. Returns False if not everything was written in time."""
        with _lock:
            self.num_users -= 1
            if self.num_users:
                return True
            _open.pop(_key(self.settings), None)
            # Whoever opens the path meanwhile waits: the file is open until this returns.
            return self.close(_CLOSE_TIMEOUT_S)


_lock = threading.Lock()
_open: dict[tuple[int, Path], SharedStore] = {}
"""The open stores by process and path. A forked process does not use the store that it inherits."""


def open_shared(settings: StoreOptions) -> SharedStore:
    """Returns the store of these settings, and opens it if needed.

    Raises `SettingsError`, and `CacheError` if the folder cannot be used. A full or read-only folder can be used.
    """
    key = _key(settings)
    with _lock:
        if key not in _open:
            _open[key] = SharedStore(settings)
        shared = _open[key]
        shared.num_users += 1
        return shared


def _key(settings: StoreOptions) -> tuple[int, Path]:
    return os.getpid(), settings.kv_cache_dir.resolve()
