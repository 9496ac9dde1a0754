"""The open stores of this process. LMDB must not open a file twice in one process, and vLLM may run the scheduler and
the worker in the same one."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from diskprefix import hooks
from diskprefix.cache.resources import open_store
from diskprefix.cache.tiers.buffer import BufferTier
from diskprefix.cache.tiers.disk import DiskTier
from diskprefix.cache.tiers.tier import Tier, View
from diskprefix.extras.vllm.processors import unbound
from diskprefix.settings import Settings
from diskprefix.store.maintenance.repair import repair_index
from diskprefix.store.writer import Writer

_CLOSE_TIMEOUT_S = 20.0
_CLOSE_REMOTE_S = 5.0


class SharedStore:
    """A store and its writer, used by all connectors of this process with the same path. `close` it as often as it was
    opened."""

    def __init__(self, settings: Settings) -> None:
        """Raises `CacheError` and `SettingsError`."""
        self.settings = settings
        with unbound():
            self.remote = hooks.open_tier(settings)
        self.store = open_store(settings)
        with unbound():
            self.writer = Writer(
                self.store,
                buffer_bytes=settings.kv_cache_write_buffer,
                ttl_s=settings.kv_cache_ttl,
                repair=repair_index,
            )
        self.tiers: tuple[Tier, ...] = (BufferTier(self.writer), DiskTier(self.store, self.writer.quarantine))
        """From the nearest to the farthest."""
        self.num_users = 0
        self._remote_counts: Counter[str] = Counter()
        """What was told of the shared tier so far."""

    @contextmanager
    def views(self) -> Iterator[list[View]]:
        """What the tiers have now. Raises `CacheError`."""
        with ExitStack() as stack:
            yield [stack.enter_context(tier.view()) for tier in self.tiers]

    def take_remote_counts(self) -> Counter[str]:
        """Returns what the shared tier did in this process since the last call, by the names in `stats`."""
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

    def close(self) -> bool:
        """Returns False if what was to be saved could not all be written in time."""
        with _lock:
            self.num_users -= 1
            if self.num_users:
                return True
            _open.pop(_key(self.settings), None)
        if self.remote is not None:
            # It reads what it writes from the store.
            self.remote.close(_CLOSE_REMOTE_S)
        is_written = self.writer.close(_CLOSE_TIMEOUT_S)
        if not self.writer.is_alive:
            self.store.close()
        return is_written


_lock = threading.Lock()
_open: dict[tuple[int, Path], SharedStore] = {}
"""By process and path: what a forked process inherits is not its own."""


def open_shared(settings: Settings) -> SharedStore:
    """Raises `CacheError` if the folder cannot be used, but not if it is full or read-only, and `SettingsError`."""
    key = _key(settings)
    with _lock:
        if key not in _open:
            _open[key] = SharedStore(settings)
        shared = _open[key]
        shared.num_users += 1
        return shared


def _key(settings: Settings) -> tuple[int, Path]:
    return os.getpid(), settings.kv_cache_dir.resolve()
