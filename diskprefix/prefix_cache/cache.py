"""The prefix cache of one model: its store, its threads, its history and its counts."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from diskprefix.errors import CacheError
from diskprefix.kv.layers import KVArena
from diskprefix.kv.layout import Layout
from diskprefix.policy.boundary import Prompt
from diskprefix.policy.history import History
from diskprefix.policy.scope import MAX_VALUE, Scope
from diskprefix.prefix_cache.request import CachedRequest
from diskprefix.settings import Settings
from diskprefix.store.schema import RootRecord
from diskprefix.store.store import Store
from diskprefix.store.writer import Writer

log = logging.getLogger("diskprefix")

_HISTORY_TOKENS = 1 << 22
"""The window is bounded in memory and on disk whatever N a request asks for: 16 MiB of token ids for each root."""
READER_THREADS = 2


class PrefixCache:
    """The prefix cache of one model. `begin` is for the engine thread; `stats` may be called from any thread."""

    def __init__(
        self, settings: Settings, store: Store, layout: Layout, root: bytes, model_name: str, default_scope: Scope
    ) -> None:
        self.settings = settings
        self.store = store
        self.layout = layout
        self.root = root
        self.default_scope = default_scope
        self.root_record = RootRecord(
            model=model_name, block_size=settings.block_size, layout=layout.describe(), created_at=time.time()
        )
        self.writer = Writer(store, buffer_bytes=settings.kv_cache_write_buffer)
        self.readers = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="kv-reader")
        self._capturer = ThreadPoolExecutor(1, thread_name_prefix="kv-capture")
        # The thread starts with its first task: now, so that it cannot fail in the middle of a request.
        self._capturer.submit(time.time).result()
        self._capturing: Future[None] | None = None
        self.damage: str | None = None
        """What could not be read because the file itself is damaged: it stays so until the file is replaced."""
        self.counters: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        with store.snapshot() as snapshot:
            prompts = snapshot.recent_prompts(root, MAX_VALUE)
        self.history = History.from_prompts(prompts, max_prompts=MAX_VALUE, max_tokens=_HISTORY_TOKENS)

    def warm_up(self, arena: KVArena) -> None:
        """Start the reading threads and take their way once, so that the first restore is as fast as any other.

        Overwrites the beginning of the arena; does nothing if that has no memory yet.
        """
        num_tokens = min(self.settings.block_size, arena.capacity)
        if not num_tokens:
            return
        blank = memoryview(bytes(self.layout.payload_bytes(num_tokens, with_logits=True)))
        started = threading.Barrier(READER_THREADS)

        def read(_: int) -> None:
            started.wait()
            arena.write_block(0, num_tokens, blank, with_logits=True)

        list(self.readers.map(read, range(READER_THREADS)))

    def begin(self, prompt: Prompt, scope: Scope) -> CachedRequest:
        """Select what to save of `prompt`, and start a request. Waits until the arena is free to be overwritten."""
        self.settle()
        return CachedRequest(self, prompt, scope)

    def start_capture(self, copy: Callable[[], None]) -> None:
        """Run `copy`, which reads the arena, beside the engine thread; at most one at a time."""
        self.settle()
        self._capturing = self._capturer.submit(copy)

    def settle(self) -> None:
        """Wait for the capture that is under way. Once it is over, what it captured is visible to `restore`."""
        capturing, self._capturing = self._capturing, None
        if capturing is not None and (error := capturing.exception()) is not None:
            self.counters["errors"] += 1
            log.warning("[disk-cache] a prompt was not saved: %r", error, exc_info=error)

    def stats(self) -> dict[str, Any]:
        """What `/props` and `/metrics` show. Counts of this process, sizes of the store. Never raises."""
        try:
            counts, error = self.store.counts(), self.writer.error or self.damage
        except CacheError as failure:
            counts, error = {"entries": 0, "blocks": 0, "prompts": 0, "used_bytes": 0}, str(failure)
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
            "budget_bytes": self.store.budget_bytes,
            "pending_bytes": self.writer.pending_bytes,
            "bytes_per_token": self.layout.bytes_per_token,
            "hits": self.counters["hits"],
            "misses": dict(self.misses),
            "restored_tokens": self.counters["restored_tokens"],
            "restored_bytes": self.counters["restored_bytes"],
            "saved_tokens": self.writer.written_tokens,
            "saved_bytes": self.writer.written_bytes,
            "dropped": self.writer.dropped + self.counters["refused"],
            "evicted_blocks": self.writer.evicted,
            "quarantined": self.writer.quarantined,
            "errors": self.counters["errors"],
        }

    def close(self, timeout_s: float) -> bool:
        """Flush the writer and close the store; False when time ran out before everything was saved."""
        self.settle()
        self._capturer.shutdown()
        flushed = self.writer.close(timeout_s)
        self.readers.shutdown()
        self.store.close()
        return flushed
