"""Fetches the nodes of one prompt from the shared tier to the nearest tier."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import TypeAlias

from diskprefix.prefixstore.cache.tiers.tier import PrefetchRequest
from diskprefix.prefixstore.remote.bundle import BundleSlot, blocks_per_bundle, last_bundles, whole_bundles
from diskprefix.prefixstore.remote.fetchers import Fetchers, ObjectFetch
from diskprefix.prefixstore.store.changes import NewNode

MAX_CONCURRENT = 16
"""The maximum number of concurrent fetches for one request. The number begins at 1 and doubles, so that a prompt
without any object in the bucket costs few fetches."""
_POLL_S = 0.1
"""Seconds between two checks whether the request was cancelled."""

FetchedNodes: TypeAlias = tuple[NewNode, ...] | None
"""The nodes of a bundle, or None if the object is missing or was refused."""


class PrefetchJob:
    """Fetches the bundles of one prompt in order, up to the first that is missing. `start` starts the fetch of one
    bundle in `fetchers`. Afterwards `names` and `num_bytes` say what was published. `is_whole` is False if the job was
    given up, and `is_late` True if that was for the deadline."""

    def __init__(
        self,
        request: PrefetchRequest,
        num_near: int,
        deadline: float,
        fetchers: Fetchers[FetchedNodes],
        start: Callable[[PrefetchRequest, BundleSlot, int], ObjectFetch[FetchedNodes]],
    ) -> None:
        self._request, self._num_near, self._deadline = request, num_near, deadline
        self._fetchers, self._start = fetchers, start
        self._running: set[ObjectFetch[FetchedNodes]] = set()
        self.names: set[bytes] = set()
        self.num_bytes = 0
        self.is_whole, self.is_late = True, False

    def run(self) -> None:
        """Fetches and publishes the bundles. Raises the errors of fetches and of `publish`."""
        try:
            self._prefetch()
        finally:
            for fetch in self._running:
                self._fetchers.leave(fetch)

    def _prefetch(self) -> None:
        nodes = self._request.nodes
        size = blocks_per_bundle(nodes)
        slots = deque(slot for slot in whole_bundles(nodes, size) if slot.last > self._num_near)
        ahead: deque[tuple[BundleSlot, ObjectFetch[FetchedNodes]]] = deque()
        num_concurrent, num_blocks = 1, self._num_near // size * size
        while slots or ahead:
            while slots and len(ahead) < num_concurrent:
                slot = slots.popleft()
                ahead.append((slot, self._fetch(slot)))
            slot, fetch = ahead.popleft()
            if (nodes_fetched := self._wait(fetch)) is None:
                break
            if not self._publish(nodes_fetched):
                return
            num_blocks, num_concurrent = slot.last, min(MAX_CONCURRENT, 2 * num_concurrent)
        if self.is_whole:
            self._fetch_last(last_bundles(size, num_blocks, nodes.num_blocks))

    def _fetch_last(self, slots: Sequence[BundleSlot]) -> None:
        """Fetches the first of `slots` that exists: the last bundle of a prompt of another machine."""
        for fetch in [self._fetch(slot) for slot in slots if slot.last > self._num_near or slot.has_tail]:
            if (nodes := self._wait(fetch)) is not None:
                self._publish(nodes)
            if nodes is not None or not self.is_whole:
                return

    def _fetch(self, slot: BundleSlot) -> ObjectFetch[FetchedNodes]:
        fetch = self._start(self._request, slot, self._num_near)
        self._running.add(fetch)
        return fetch

    def _wait(self, fetch: ObjectFetch[FetchedNodes]) -> FetchedNodes:
        """Returns the result of a fetch, or None and gives up at the deadline, or if the request or the fetch is
        cancelled. Raises the error of the fetch."""
        while not self._request.is_cancelled():
            left = self._deadline - time.monotonic()
            if left <= 0:
                self.is_late = True
                break
            try:
                nodes = fetch.future.result(min(left, _POLL_S))
            except TimeoutError:
                continue
            except CancelledError:
                # The tier is closed.
                break
            # The nodes may be large: they must not live as long as the job.
            self._running.remove(fetch)
            self._fetchers.leave(fetch)
            return nodes
        self.is_whole = False
        return None

    def _publish(self, nodes: tuple[NewNode, ...]) -> bool:
        """Publishes nodes. Returns False, and gives up, if there is no room."""
        if not self._request.publish(nodes):
            self.is_whole = False
            return False
        self.names.update(node.name for node in nodes)
        self.num_bytes += sum(node.payload_bytes for node in nodes)
        return True
