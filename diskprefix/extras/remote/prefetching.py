"""Fetching the nodes of one prompt from the shared tier to the nearest one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from diskprefix.cache.tiers.tier import PrefetchRequest
from diskprefix.extras.remote.bundle import BundleSlot, blocks_per_bundle, ends, whole_bundles
from diskprefix.extras.remote.fetchers import Fetchers, ObjectFetch
from diskprefix.store.changes import NewNode

MOST_AT_ONCE = 16
"""The most objects of one request that are fetched at the same time. The number begins at 1 and doubles, so that a
prompt without any object in the bucket costs few requests."""
_LOOK_S = 0.1
"""Seconds between two checks whether the request was cancelled."""

Found: TypeAlias = tuple[NewNode, ...] | None
"""The nodes of a bundle; None if there is no such object, or no sound one."""


class PrefetchJob:
    """Fetches the bundles of one prompt in order, up to the first that is missing. `fetch` starts the fetch of one
    bundle by `fetchers`."""

    def __init__(
        self,
        wish: PrefetchRequest,
        num_near: int,
        deadline: float,
        fetchers: Fetchers[Found],
        fetch: Callable[[PrefetchRequest, BundleSlot, int], ObjectFetch[Found]],
    ) -> None:
        self._wish, self._num_near, self._deadline = wish, num_near, deadline
        self._fetchers, self._ask = fetchers, fetch
        self._asked: set[ObjectFetch[Found]] = set()
        self.names: set[bytes] = set()
        self.num_bytes = 0
        self.is_whole, self.is_late = True, False

    def run(self) -> None:
        """Fetches and publishes the bundles. Raises the errors of fetches and of `publish`."""
        try:
            self._prefetch()
        finally:
            for fetch in self._asked:
                self._fetchers.leave(fetch)

    def _prefetch(self) -> None:
        nodes = self._wish.nodes
        size = blocks_per_bundle(nodes)
        slots = deque(slot for slot in whole_bundles(nodes, size) if slot.last > self._num_near)
        ahead: deque[tuple[BundleSlot, ObjectFetch[Found]]] = deque()
        at_once, reached = 1, self._num_near // size * size
        while slots or ahead:
            while slots and len(ahead) < at_once:
                slot = slots.popleft()
                ahead.append((slot, self._fetch(slot)))
            slot, fetch = ahead.popleft()
            found = self._result(fetch)
            if found is None:
                if not self.is_whole:
                    return
                break
            if not self._publish(found):
                return
            reached, at_once = slot.last, min(MOST_AT_ONCE, 2 * at_once)
        self._bring_end(size, reached)

    def _bring_end(self, size: int, reached: int) -> None:
        """Fetches the end of another machine's prompt that lies before the next whole bundle."""
        nodes = self._wish.nodes
        slots = ends(size, reached, nodes.num_blocks)
        slots = [slot for slot in slots if slot.last > self._num_near or slot.has_tail]
        fetches = [self._fetch(slot) for slot in slots]
        for fetch in fetches:
            if (found := self._result(fetch)) is not None:
                self._publish(found)
                return
            if not self.is_whole:
                return

    def _fetch(self, slot: BundleSlot) -> ObjectFetch[Found]:
        fetch = self._ask(self._wish, slot, self._num_near)
        self._asked.add(fetch)
        return fetch

    def _result(self, fetch: ObjectFetch[Found]) -> Found:
        """Waits until the time is over, or the request is cancelled. Raises what the fetch raises."""
        while not self._wish.is_cancelled():
            left = self._deadline - time.monotonic()
            if left <= 0:
                self.is_late = True
                break
            try:
                found = fetch.future.result(min(left, _LOOK_S))
            except TimeoutError:
                continue
            # What it prefetched may be large.
            self._asked.remove(fetch)
            self._fetchers.leave(fetch)
            return found
        self.is_whole = False
        return None

    def _publish(self, found: tuple[NewNode, ...]) -> bool:
        if not self._wish.publish(found):
            self.is_whole = False
            return False
        self.names.update(node.name for node in found)
        self.num_bytes += sum(node.payload_bytes for node in found)
        return True
