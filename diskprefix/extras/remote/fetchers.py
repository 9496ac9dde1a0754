"""Threads that fetch objects, and fetches that requests share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Generic, TypeVar

_Result = TypeVar("_Result")


@dataclass(eq=False)
class ObjectFetch(Generic[_Result]):
    """One call, and the number of requests that wait for its result."""

    key: Hashable
    call: Callable[[], _Result]
    future: Future[_Result] = field(default_factory=Future)
    num_waiting: int = 0


class Fetchers(Generic[_Result]):
    """Runs calls on daemon threads, because a process that ends must not wait for the network (it does for a
    `ThreadPoolExecutor`). Requests for the same key share one call. For any thread."""

    def __init__(self, most_threads: int) -> None:
        self._most_threads = most_threads
        self._num_threads = 0
        self._idle = threading.Semaphore(0)
        self._queue: SimpleQueue[ObjectFetch[_Result] | None] = SimpleQueue()
        self._running: dict[Hashable, ObjectFetch[_Result]] = {}
        """The running fetches and those in the queue."""
        self._lock = threading.Lock()
        """Guards everything but the queue."""

    def share(self, key: Hashable, call: Callable[[], _Result]) -> ObjectFetch[_Result]:
        """Returns the fetch with this key, and starts it with `call` if there is none. A caller that stops waiting
        calls `leave`."""
        with self._lock:
            fetch = self._running.get(key)
            if fetch is None:
                fetch = self._running[key] = ObjectFetch(key, call)
                self._queue.put(fetch)
                if not self._idle.acquire(blocking=False) and self._num_threads < self._most_threads:
                    self._num_threads += 1
                    threading.Thread(target=self._run, name=f"remote-fetch-{self._num_threads}", daemon=True).start()
            fetch.num_waiting += 1
            return fetch

    def leave(self, fetch: ObjectFetch[_Result]) -> None:
        """Stops waiting for a fetch. If nobody else waits and it has not begun, it is cancelled."""
        with self._lock:
            fetch.num_waiting -= 1
            if not fetch.num_waiting and fetch.future.cancel():
                del self._running[fetch.key]

    def close(self) -> None:
        """Lets the threads end when the queue is empty. Does not wait."""
        self._queue.put(None)

    def _run(self) -> None:
        while (fetch := self._queue.get()) is not None:
            if fetch.future.set_running_or_notify_cancel():
                self._call(fetch)
            # What it brought may be large, and the next one may be long in coming.
            del fetch
            self._idle.release()
        self._queue.put(None)

    def _call(self, fetch: ObjectFetch[_Result]) -> None:
        try:
            result = fetch.call()
        except BaseException as error:  # noqa: BLE001 (who waits is told)
            self._end(fetch)
            fetch.future.set_exception(error)
        else:
            self._end(fetch)
            fetch.future.set_result(result)

    def _end(self, fetch: ObjectFetch[_Result]) -> None:
        with self._lock:
            del self._running[fetch.key]
