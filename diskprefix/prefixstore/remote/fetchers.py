"""Threads for fetches, which requests share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

from msgspec import Struct

from diskprefix.thread_pool import ThreadPool

_Result = TypeVar("_Result")


class ObjectFetch(Struct, Generic[_Result], eq=False):
    """One call, and the number of requests that wait for its result."""

    key: Hashable
    future: Future[_Result]
    num_waiting: int = 0


class Fetchers(Generic[_Result]):
    """Runs calls in threads. Requests for the same key share one call. For any thread."""

    def __init__(self, max_threads: int) -> None:
        self._pool = ThreadPool(max_threads, "remote-fetch").start()
        self._waited_for: dict[Hashable, ObjectFetch[_Result]] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def share(self, key: Hashable, call: Callable[[], _Result]) -> ObjectFetch[_Result]:
        """Returns the running fetch with this key, or starts one with `call`. Callers that stop waiting call
        `leave`. After `close`, a new fetch is a cancelled one."""
        with self._lock:
            fetch = self._waited_for.get(key)
            if fetch is None or fetch.future.done():
                future = Future[_Result]() if self._is_closed else self._pool.submit(call)
                fetch = self._waited_for[key] = ObjectFetch(key, future)
                if self._is_closed:
                    future.cancel()
            fetch.num_waiting += 1
            return fetch

    def leave(self, fetch: ObjectFetch[_Result]) -> None:
        """Stops waiting for a fetch. A fetch that has not begun is cancelled if nobody else waits for it."""
        with self._lock:
            fetch.num_waiting -= 1
            if not fetch.num_waiting:
                fetch.future.cancel()
                if self._waited_for.get(fetch.key) is fetch:
                    del self._waited_for[fetch.key]

    def close(self) -> None:
        """Begins no further call, cancels those that have not begun, and does not wait. A process that is to end before
        running calls do must use `os._exit`, as the daemon does (`daemon/server/process/process.py`, `leave`)."""
        with self._lock:
            self._is_closed = True
            self._pool.shutdown(wait=False, cancel_futures=True)
