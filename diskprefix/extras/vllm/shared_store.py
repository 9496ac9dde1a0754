"""The open stores of this process. LMDB must not open a file twice in one process, and vLLM may run the scheduler and
the worker in the same one."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path

from diskprefix.cache.resources import TieredStore, open_store
from diskprefix.extras.vllm.processors import unbound
from diskprefix.settings import Settings

_CLOSE_TIMEOUT_S = 20.0


class SharedStore(TieredStore):
    """The store that all connectors of this process with the same path use. Each of its users calls `release`."""

    def __init__(self, settings: Settings) -> None:
        """Raises `CacheError` and `SettingsError`."""
        store = open_store(settings)
        try:
            with unbound():
                super().__init__(settings, store)
        except BaseException:
            store.close()
            raise
        self.num_users = 0
        self._remote_counts: Counter[str] = Counter()
        """The counts of the shared tier that were reported so far."""

    def take_remote_counts(self) -> Counter[str]:
        """Returns the counts of the shared tier in this process since the last call, by the names in `stats`."""
        if self.remote is None:
            return Counter()
        counts = self.remote.stats()
        for name in ("url", "state", "offered"):
            del counts[name]
        refused = {f"refused_{reason}": number for reason, number in counts.pop("refused").items()}
        with _lock:
            now = Counter({f"remote_{name}": number for name, number in counts.items()} | refused)
            new, self._remote_counts = now - self._remote_counts, now
        return new

    def release(self) -> bool:
        """Closes the store if nobody else uses it. Returns False if not everything could be written in time."""
        with _lock:
            self.num_users -= 1
            if self.num_users:
                return True
            _open.pop(_key(self.settings), None)
        return self.close(_CLOSE_TIMEOUT_S)


_lock = threading.Lock()
_open: dict[tuple[int, Path], SharedStore] = {}
"""The open stores by process and path: a store that a forked process inherits is not its own."""


def open_shared(settings: Settings) -> SharedStore:
    """Opens the store of these settings, or returns the open one. Raises `CacheError` if the folder cannot be used, but
    not if it is full or read-only, and `SettingsError`."""
    key = _key(settings)
    with _lock:
        if key not in _open:
            _open[key] = SharedStore(settings)
        shared = _open[key]
        shared.num_users += 1
        return shared


def _key(settings: Settings) -> tuple[int, Path]:
    return os.getpid(), settings.kv_cache_dir.resolve()
