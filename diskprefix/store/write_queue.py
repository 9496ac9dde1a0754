"""The queue of the writer: publications in order within a number of bytes, uses of nodes, and damaged nodes."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from diskprefix.store.changes import NewNode, Part, Use, touches
from diskprefix.store.eviction import recorded_ttl
from diskprefix.store.evictor import Evictor
from diskprefix.store.store import Publication

_PAUSE_S = 2.0
"""Longer than most steps of a prompt, each of which pauses writing again. One that is cancelled just stops doing so."""
_MAX_HELD_S = 10.0
"""A kill loses what was computed in that time."""


class WriteQueue:
    """A caller reserves room for its data first, and no request waits for that. The methods are for any thread, do not
    wait for the disk and do not raise; those with an underscore are for the writing thread."""

    def __init__(self, evictor: Evictor, buffer_bytes: int) -> None:
        self._evictor = evictor
        self._buffer_bytes = buffer_bytes
        self._queue: deque[Publication] = deque()
        self._touches: dict[bytes, Use] = {}
        self._damaged: dict[bytes, bytes] = {}
        self.pending: Mapping[bytes, NewNode] = MappingProxyType({})
        """The nodes that are not yet in the store, an immutable view. Read it before a snapshot is taken, or a node may
        be in neither."""
        self.pending_bytes = self._page_bytes = 0
        """The bytes of payloads that wait, and how many of them take no room in the buffer."""
        self._changed = threading.Condition()
        self._held_until = 0.0
        """The time until which writing is paused, on the clock of `time.monotonic`."""
        self._waits_for_reader = False
        """A reader keeps the store from being written. Nothing is lost for that after `_MAX_HELD_S`."""
        self._num_waiting = 0
        """Callers that wait until everything is written."""
        self._views: dict[object, Mapping[bytes, NewNode]] = {}
        """For each reader what it reads."""
        self._left: list[tuple[Publication, frozenset[object]]] = []
        """What left the queue and is not done, with the views that show it."""
        self._closing = self._has_ended = False

    def reserve(self, size: int) -> bool:
        """Reserves `size` bytes of the buffer. Returns whether there was room for them."""
        with self._changed:
            has_room = size <= self.room_bytes
            self.pending_bytes += size if has_room else 0
            return has_room

    def release(self, size: int) -> None:
        """Gives back reserved bytes that are not needed."""
        with self._changed:
            self.pending_bytes -= size
            self._changed.notify_all()

    def submit(self, publication: Publication, *, reserved_bytes: int) -> None:
        """Queues a publication whose payloads take the bytes that were reserved. Its nodes are visible at once. It is
        lost if the thread has ended."""
        assert publication.payload_bytes == reserved_bytes + publication.page_bytes
        with self._changed:
            pending = dict(self.pending) | {n.name: n for n in publication.nodes}
            if publication.base is not None:
                self._evictor.pin(publication.base)
            self._queue.append(publication)
            self.pending = MappingProxyType(pending)
            self.pending_bytes += publication.page_bytes
            self._page_bytes += publication.page_bytes
            self._changed.notify_all()
            is_late = self._has_ended
        if is_late:
            publication.chain.lose()
            self._forget(publication)

    @contextmanager
    def view(self) -> Iterator[Mapping[bytes, NewNode]]:
        """Yields `pending`. Until the end, no publication that it shows is done."""
        view = object()
        with self._changed:
            pending = self._views[view] = self.pending
        try:
            yield pending
        finally:
            with self._changed:
                del self._views[view]
            self._finish()

    def pause_writing(self) -> None:
        """Pauses writing for two seconds or until `resume_writing`, because the model needs the processors for a
        prompt. Nothing is held for more than ten seconds, when half of the buffer is used, or while a caller waits for
        the writing."""
        self._hold(_PAUSE_S)

    def resume_writing(self) -> None:
        with self._changed:
            self._held_until = 0.0
            self._changed.notify_all()

    def touch(self, name: bytes, when: float, ttl_s: float | None = None, *, hits: int = 1) -> None:
        """Records the use of a stored node and of the nodes that it continues. Uses are written together, later.

        `ttl_s`: how long the request asks to keep the nodes, in seconds; None leaves that to the daemon. `hits` is 0 if
        only the time to live is new.
        """
        self._use({name: Use(when, hits, recorded_ttl(ttl_s))})

    def quarantine(self, name: bytes, parent: bytes) -> None:
        """Removes a damaged node before the next publication is written."""
        with self._changed:
            self._damaged[name] = parent
            self._changed.notify_all()

    @contextmanager
    def _waited_for(self) -> Iterator[None]:
        """Nothing is held meanwhile. The caller holds the lock."""
        self._num_waiting += 1
        self._changed.notify_all()
        try:
            yield
        finally:
            self._num_waiting -= 1

    @property
    def num_pending(self) -> int:
        """Publications that wait to be written, or are being written."""
        return len(self._queue)

    @property
    def room_bytes(self) -> int:
        """The bytes that may still be reserved."""
        return 0 if self._closing else max(0, self._buffer_bytes - self.pending_bytes + self._page_bytes)

    def _use(self, uses: Mapping[bytes, Use]) -> None:
        with self._changed:
            for name, use in uses.items():
                noted = self._touches.get(name)
                self._touches[name] = use if noted is None else noted.and_also(use)

    @contextmanager
    def _using(self) -> Iterator[Part | None]:
        """Yields the uses of nodes that are in the store; None if there are none. With an error they wait on."""
        with self._changed:
            used, self._touches = self._touches, {}
            # Nodes that are not in the store yet are used once they are.
            self._touches = {name: used.pop(name) for name in used.keys() & self.pending.keys()}
        try:
            yield touches(used) if used else None
        except BaseException:
            self._use(used)
            raise

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _next(self) -> Publication | None:
        """Returns the publication to be written now."""
        return self._queue[0] if self._queue and not self._is_held() else None

    def _hold(self, seconds: float) -> bool:
        """Pauses writing. Returns whether the first publication waits because of it."""
        with self._changed:
            self._held_until = time.monotonic() + seconds
            return self._is_held()

    def _is_held(self) -> bool:
        if not self._queue or self._closing or self._num_waiting or self.pending_bytes > self._buffer_bytes // 2:
            return False
        latest = math.inf if self._waits_for_reader else self._queue[0].made_at + _MAX_HELD_S
        return time.monotonic() < min(self._held_until, latest)

    def _forget(self, publication: Publication) -> None:
        """Takes a publication that was written, or is lost, out of the queue. Every one leaves by this method."""
        with self._changed:
            gone = {node.name for node in publication.nodes}
            self.pending = MappingProxyType({k: v for k, v in self.pending.items() if k not in gone})
            if publication.base is not None:
                self._evictor.unpin(publication.base)
            self._left.append((publication, self._views_of(publication)))
        self._finish()
        with self._changed:
            if publication in self._queue:
                self._queue.remove(publication)
            self._changed.notify_all()

    def _views_of(self, publication: Publication) -> frozenset[object]:
        """Returns the views that show a node of a publication."""
        views = self._views.items()
        return frozenset(view for view, shown in views if any(shown.get(n.name) is n for n in publication.nodes))

    def _finish(self) -> None:
        """Calls `on_done` of what left the queue and no open view shows. Not under the lock: the callee has its own."""
        with self._changed:
            open_views = self._views.keys()
            done = [publication for publication, views in self._left if views.isdisjoint(open_views)]
            self._left = [one for one in self._left if not one[1].isdisjoint(open_views)]
        for publication in done:
            publication.on_done()
        with self._changed:
            self.pending_bytes -= sum(publication.payload_bytes for publication in done)
            self._page_bytes -= sum(publication.page_bytes for publication in done)
            self._changed.notify_all()
