"""Threads that fetch, and fetches that requests share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Generic, TypeVar

_Result = TypeVar("_Result")


@dataclass(eq=False)
class Fetch(Generic[_Result]):
    """One call, and how many wait for its result."""

    key: Hashable
    call: Callable[[], _Result]
    future: Future[_Result] = field(default_factory=Future)
    num_waiting: int = 0


class Fetchers(Generic[_Result]):
    """Runs calls on daemon threads, because a process that ends must not wait for the network (it does for a
    `ThreadPoolExecutor`). Those who want the same share one call. For any thread."""

    def __init__(self, most_threads: int) -> None:
        self._most_threads = most_threads
        self._num_threads = 0
        self._idle = threading.Semaphore(0)
        self._queue: SimpleQueue[Fetch[_Result] | None] = SimpleQueue()
        self._running: dict[Hashable, Fetch[_Result]] = {}
        """Those that wait in the queue, too."""
        self._lock = threading.Lock()
        """Of all but the queue."""

    def share(self, key: Hashable, call: Callable[[], _Result]) -> Fetch[_Result]:
        """Returns the fetch with this key; `call` is run if there is none. Who does not wait for it any more says so
        with `leave`."""
        with self._lock:
            fetch = self._running.get(key)
            if fetch is None:
                fetch = self._running[key] = Fetch(key, call)
                self._queue.put(fetch)
                if not self._idle.acquire(blocking=False) and self._num_threads < self._most_threads:
                    self._num_threads += 1
                    threading.Thread(target=self._run, name=f"remote-fetch-{self._num_threads}", daemon=True).start()
            fetch.num_waiting += 1
            return fetch

    def leave(self, fetch: Fetch[_Result]) -> None:
        """Somebody does not wait for a fetch any more. If nobody does, and it has not begun, it never will."""
        with self._lock:
            fetch.num_waiting -= 1
            if not fetch.num_waiting and fetch.future.cancel():
                del self._running[fetch.key]

    def close(self) -> None:
        """Let the threads end when they have done what is queued. Does not wait."""
        self._queue.put(None)

    def _run(self) -> None:
        while (fetch := self._queue.get()) is not None:
            if fetch.future.set_running_or_notify_cancel():
                self._call(fetch)
            # What it brought may be large, and the next one may be long in coming.
            del fetch
            self._idle.release()
        self._queue.put(None)

    def _call(self, fetch: Fetch[_Result]) -> None:
        try:
            result = fetch.call()
        except BaseException as error:  # noqa: BLE001 (who waits is told)
            self._end(fetch)
            fetch.future.set_exception(error)
        else:
            self._end(fetch)
            fetch.future.set_result(result)

    def _end(self, fetch: Fetch[_Result]) -> None:
        with self._lock:
            del self._running[fetch.key]
