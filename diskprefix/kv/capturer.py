"""The thread that copies state out of KV memory while the model computes.

A copy needs room in a buffer. Only this thread waits for room.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger("diskprefix")


@dataclass(frozen=True, eq=False)
class Capture:
    """A copy out of `memory`. Its `num_bytes` of the buffer are reserved before `copy` is called.

    `drop` is called in place of `copy` if the memory was wanted while there was no room, or if `is_void()`, which must
    not wait. Both are called on the capturing thread.
    """

    memory: object
    num_bytes: int
    copy: Callable[[], None]
    drop: Callable[[], None]
    is_void: Callable[[], bool] = lambda: False


class Capturer:
    """Owns the thread. Makes the captures of one memory in the order of `submit`. Its methods are for any thread."""

    def __init__(self, reserve: Callable[[int], bool], on_error: Callable[[], None]) -> None:
        """Starts the thread. `reserve` takes bytes of the buffer if there is room, and does not wait. `on_error` is
        called after a capture raised an error, which is logged."""
        self._reserve = reserve
        self._on_error = on_error
        self._queue: deque[Capture] = deque()
        self._running: Capture | None = None
        self._wanted: list[object] = []
        """The memories that a caller waits for. Their captures do not wait for room."""
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kv-capture", daemon=True)
        # Started now, so that it cannot fail in the middle of a request.
        self._thread.start()

    def submit(self, capture: Capture) -> None:
        """Queues a capture. The part of `memory` that it reads must not change until `settle` returns."""
        with self._changed:
            self._queue.append(capture)
            self._changed.notify_all()

    def wake(self) -> None:
        """Tells the thread that there may be more room in the buffer."""
        with self._changed:
            self._changed.notify_all()

    def settle(self, memory: object = None, *, drop: bool = False, timeout_s: float | None = None) -> bool:
        """Waits until no capture of `memory` (None: of any memory) is left. Returns False if the time runs out first.
        With `drop`, captures that the buffer has no room for are dropped."""
        with self._changed:
            if drop:
                self._wanted.append(memory)
                self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: not self._is_captured(memory), timeout_s)
            finally:
                if drop:
                    self._wanted.remove(memory)

    def close(self, timeout_s: float) -> None:
        """Makes the captures that are left, waits at most `timeout_s` seconds for room, and ends the thread."""
        self.settle(timeout_s=timeout_s)
        self.settle(drop=True)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _is_captured(self, memory: object) -> bool:
        captures = [*self._queue, self._running]
        return any(capture is not None and memory in (None, capture.memory) for capture in captures)

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            capture, has_room = taken
            try:
                if has_room:
                    capture.copy()
                else:
                    capture.drop()
            except Exception as error:
                log.exception("[disk-cache] not saved: %r", error)
                self._on_error()
            with self._changed:
                self._running = None
                self._changed.notify_all()

    def _take(self) -> tuple[Capture, bool] | None:
        """Waits for the next capture that can be made or dropped. Returns it, and True if it can be made."""
        with self._changed:
            while True:
                if (found := self._next()) is not None:
                    self._running = found[0]
                    self._queue.remove(found[0])
                    return found
                if self._closing and not self._queue:
                    return None
                self._changed.wait()

    def _next(self) -> tuple[Capture, bool] | None:
        # A memory that a caller waits for comes first.
        ahead = next((capture for capture in self._queue if self._is_wanted(capture)), None)
        capture = ahead or (self._queue[0] if self._queue else None)
        if capture is None:
            return None
        if capture.is_void():
            return capture, False
        if self._reserve(capture.num_bytes):
            return capture, True
        return None if ahead is None else (capture, False)

    def _is_wanted(self, capture: Capture) -> bool:
        return None in self._wanted or capture.memory in self._wanted
