"""The background writer: a thread that writes publications to the store, in order.

The buffer is bounded in bytes. A caller reserves room for its data first, and no request waits for that. A failure of
the store is logged once and counted, and the daemon continues to serve.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from diskprefix.errors import CacheError, PrefixGone, StoreCorrupt, StoreFull
from diskprefix.store.changes import Changes, NewNode, Part, Use, touches
from diskprefix.store.eviction import expiry_interval_s, recorded_ttl
from diskprefix.store.note_record import note_bytes
from diskprefix.store.notes import Notes
from diskprefix.store.savings import SavingsLog, forget_hits
from diskprefix.store.schema import ModelRecord, model_key
from diskprefix.store.store import Publication, Store
from diskprefix.store.verify import remove_damaged

log = logging.getLogger("diskprefix")

_TOUCH_INTERVAL_S = 1.0
"""The interval in which uses of nodes and counts of requests are written, and the folder is checked. A kill loses at
most the uses of this time."""
_LAST_WRITE_S = 10.0
_MAX_HELD_S = 10.0
"""A kill loses what was computed in that time."""


class Writer:
    """Owns the writing thread. `reserve`, `submit` and `touch` do not wait for the disk and do not raise."""

    def __init__(self, store: Store, *, buffer_bytes: int, ttl_s: float = 0.0) -> None:
        """`ttl_s`: nodes that were not used for this many seconds are removed; 0 keeps them. Uses may ask for another
        time."""
        self._store = store
        self._ttl_s = ttl_s
        self._expired_at = -math.inf
        self._buffer_bytes = buffer_bytes
        self._queue: deque[Publication] = deque()
        self._touches: dict[bytes, Use] = {}
        self._damaged: dict[bytes, bytes] = {}
        self._models: tuple[ModelRecord, ...] = ()
        self._is_told, self._are_recorded = False, True
        """A model was added that the thread has not seen yet; the store has a record of all `_models`."""
        self.pending: Mapping[bytes, NewNode] = MappingProxyType({})
        """The nodes that are not yet in the store, an immutable view. Read it before a snapshot is taken, or a node may
        be in neither."""
        self.pending_bytes = 0
        self.on_room: Callable[[], None] = lambda: None
        """Called when there is more room in the buffer."""
        self._changed = threading.Condition()
        self.notes = Notes(store, self._wake)
        self.savings = SavingsLog(store, store.write)
        self.on_forget: list[Callable[[], None]] = []
        """Called when records were deleted, by any process, or may have expired: memories of them must go too."""
        self._purged_at: bytes | None = None
        """The time of the last purge of any process, as the store has it, after which memories were dropped."""
        self._held_at: float | None = None
        """The time since which writing is paused, on the clock of `time.monotonic`; None if it is not."""
        self._num_waiting = 0
        """Callers that wait until everything is written."""
        self._closing = False
        self.dropped = self.evicted = self.expired = self.quarantined = 0
        self.written_bytes = self.written_tokens = 0
        self.error: str | None = None
        """The store's last failure; None once a prompt is saved again."""
        self._look()
        self._thread = threading.Thread(target=self._run, name="kv-writer", daemon=True)
        self._thread.start()

    def reserve(self, size: int, *, leaving: int = 0) -> bool:
        """Reserves `size` bytes of the buffer. Returns whether there was room for them and `leaving` bytes more."""
        with self._changed:
            has_room = size + leaving <= self.room_bytes
            self.pending_bytes += size if has_room else 0
            return has_room

    def release(self, size: int) -> None:
        """Gives back reserved bytes that are not needed."""
        with self._changed:
            self.pending_bytes -= size
            self._changed.notify_all()
        self.on_room()

    def submit(self, publication: Publication, *, reserved_bytes: int) -> None:
        """Queues a publication whose payloads take the bytes that were reserved. Its nodes are visible at once."""
        assert publication.payload_bytes == reserved_bytes
        with self._changed:
            if publication.base is not None:
                self._store.evictor.pin(publication.base)
            self._queue.append(publication)
            self.pending = MappingProxyType(dict(self.pending) | {n.name: n for n in publication.nodes})
            self._changed.notify_all()

    def pause_writing(self) -> None:
        """Pauses writing until `resume_writing`, because the model needs the processors for a prompt. The pause also
        ends after ten seconds, when half of the buffer is used, and if a caller waits for the writing."""
        with self._changed:
            self._held_at = self._held_at or time.monotonic()

    def resume_writing(self) -> None:
        with self._changed:
            self._held_at = None
            self._changed.notify_all()

    def touch(self, name: bytes, when: float, ttl_s: float | None = None, *, hits: int = 1) -> None:
        """Records the use of a stored node and of the nodes that it continues. Uses are written together, later.

        `ttl_s`: how long the request asks to keep the nodes, in seconds; None leaves that to the daemon. `hits` is 0 if
        only the time to live is new.
        """
        use = Use(when, hits, recorded_ttl(ttl_s))
        with self._changed:
            noted = self._touches.get(name)
            self._touches[name] = use if noted is None else noted.and_also(use)

    def add_model(self, model: ModelRecord) -> None:
        """Adds a model to those that the store is served with. They are recorded again if a new file replaces the
        store's."""
        with self._changed:
            self._models += (model,)
            self._is_told, self._are_recorded = True, False
            self._changed.notify_all()

    def quarantine(self, name: bytes, parent: bytes) -> None:
        """Removes a damaged node before the next publication is written."""
        with self._changed:
            self._damaged[name] = parent
            self._changed.notify_all()

    @property
    def num_pending(self) -> int:
        """Publications that wait to be written, or are being written."""
        return len(self._queue)

    @property
    def room_bytes(self) -> int:
        """The bytes that may still be reserved."""
        return 0 if self._closing else max(0, self._buffer_bytes - self.pending_bytes)

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything that was submitted is written, and notes as far as the store takes them. Returns False
        if the time runs out first."""
        with self._changed:
            self._num_waiting += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: not (self._queue or self.notes.is_waiting), timeout_s)
            finally:
                self._num_waiting -= 1

    def close(self, timeout_s: float) -> bool:
        """Writes what is queued, then stops. Returns False if the time ran out and publications were lost."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if not self.is_alive:
            return True
        with self._changed:
            lost = 0
            while len(self._queue) > 1:
                lost += self._queue.pop().chain.lose()
            self.dropped += lost
        # The transaction that is being written may finish, or LMDB would roll it back.
        self._thread.join(max(timeout_s, _LAST_WRITE_S))
        lost += self.is_alive
        if lost:
            log.warning("[disk-cache] %d prompts were not saved: writing took over %.0f s", lost, timeout_s)
        return not lost

    @property
    def is_alive(self) -> bool:
        """Returns whether the thread still runs, since another process may hold LMDB's lock. Then the store must stay
        open."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work, _TOUCH_INTERVAL_S)
                publication = self._next()
                damaged, self._damaged = self._damaged, {}
                is_told, self._is_told = self._is_told, False
                closing = self._closing
            if is_told:
                self._attempt(self._record)
            for name, parent in damaged.items():
                self._attempt(partial(self._quarantine, name, parent))
            self._write_all(publication)
            self._wake()
            if publication is not None:
                self._forget(publication)
            self._attempt(self.notes.make_fit)
            self._attempt(self._notice_purge)
            if publication is None and closing:
                self._attempt(self._record_written)
                return
            if publication is None or self._store.problem is not None:
                self._attempt(self._maintain)

    def _has_work(self) -> bool:
        return bool(self._next() or self._damaged or self._is_told or self._closing or self.notes.is_waiting)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _next(self) -> Publication | None:
        """Returns the publication to be written now."""
        return self._queue[0] if self._queue and not self._is_held() else None

    def _is_held(self) -> bool:
        if self._held_at is None or self._closing or self._num_waiting:
            return False
        return self.pending_bytes <= self._buffer_bytes // 2 and time.monotonic() < self._held_at + _MAX_HELD_S

    def _attempt(self, step: Callable[[], None]) -> None:
        """Runs a step. The thread survives whatever it raises: a bug shows as a degraded cache and a logged
        traceback."""
        try:
            step()
        except StoreCorrupt as error:
            self._report(error)
            self._remove_damaged(error)
        except CacheError as error:
            self._report(error)
        except Exception as error:
            log.exception("[disk-cache] the writer failed")
            self.error = f"internal error: {error!r}"

    def _write_all(self, publication: Publication | None) -> None:
        """Writes what waits in one transaction. If that fails, each part is tried alone: none keeps the others back."""
        if publication is not None and publication.chain.is_lost:
            # What it continues is lost. That the prompt was seen counts all the same.
            publication = replace(publication, nodes=(), last_node=None, entry=None)
            publication = publication if publication.prompt is not None else None
        # Uses come first, as the publication may replace what was used.
        sources = (self._touching, self.notes.writing, self.savings.writing)
        parts, failed = list[Part](), list[Part]()
        refused: BaseException | None = None
        try:
            with ExitStack() as writing:
                found = [writing.enter_context(source()) for source in sources]
                parts = [_noting(part, failed) for part in found if part is not None]
                if publication is not None:
                    self._publish(replace(publication, parts=tuple(parts)))
                elif parts:
                    self._store.write(parts)
            return
        except Exception as error:  # noqa: BLE001 (it is told below)
            # Alone, it may fit.
            took_room = isinstance(error, StoreFull) and any(part.need_bytes for part in parts)
            refused = None if failed or took_room else error
        for write in (self._write_touches, self.notes.write, self.savings.write):
            self._attempt(write)
        if publication is not None:
            self._attempt(partial(self._publish_alone, publication, refused))

    def _publish_alone(self, publication: Publication, refused: BaseException | None) -> None:
        try:
            if refused is not None:
                raise refused
            self._publish(publication)
        except BaseException as error:
            # The publications of a chain count as one that is dropped.
            self.dropped += publication.chain.lose()
            if not isinstance(error, StoreFull | PrefixGone):
                raise
            log.warning("[disk-cache] not saved: %s", error)

    def _publish(self, publication: Publication) -> None:
        started = time.perf_counter()
        self.evicted += self._store.publish(publication)
        if publication.nodes:
            publication.chain.has_nodes = True
        if publication.last_node is not None and publication.chain.has_nodes:
            # A whole prompt was saved. Of a full disk, a small publication alone would say nothing.
            self._recover()
        self.written_bytes += publication.payload_bytes
        self.written_tokens += sum(len(node.token_ids) for node in publication.nodes)
        log.debug(
            "[disk-cache] wrote %d nodes, %.1f MB in %.0f ms",
            len(publication.nodes),
            publication.payload_bytes / 1e6,
            (time.perf_counter() - started) * 1e3,
        )

    def _record(self) -> None:
        """Records all models in the store. A failure is tried again at the next check of the folder."""
        with self._changed:
            models = self._models
        with self._store.snapshot() as snapshot:
            new = [model for model in models if not snapshot.has_record("meta", model_key(model.identity))]
        if new:
            self._store.evictor.make_room(sum(note_bytes(len(model.identity)) for model in new), frozenset())
            with self._store.changes() as changes:
                for model in new:
                    changes.put_model(model)
        with self._changed:
            self._are_recorded = models == self._models

    def _record_written(self) -> None:
        if self._store.problem is None:
            self._store.record_written()

    def _quarantine(self, name: bytes, parent: bytes) -> None:
        self.quarantined += self._store.quarantine(name, parent)
        self._store.try_file()

    def _write_touches(self) -> None:
        with self._touching() as part:
            if part is not None:
                self._store.write([part])

    @contextmanager
    def _touching(self) -> Iterator[Part | None]:
        """Yields the uses of nodes that are in the store; None if there are none. With an error they wait on."""
        with self._changed:
            used, self._touches = self._touches, {}
            # Nodes that are not in the store yet are used once they are.
            self._touches = {name: used.pop(name) for name in used.keys() & self.pending.keys()}
        try:
            yield touches(used) if used else None
        except BaseException:
            with self._changed:
                for name, use in used.items():
                    new = self._touches.get(name)
                    self._touches[name] = use if new is None else use.and_also(new)
            raise

    def _maintain(self) -> None:
        if self._store.maintain():
            self._recover()
            self._are_recorded = False
        self._look()
        self._expire()
        if not self._are_recorded:
            self._record()

    def _expire(self) -> None:
        """Removes expired nodes at intervals. The first time is soon after the start."""
        if self._store.problem is not None:
            return
        now = time.monotonic()
        if now >= self._expired_at + expiry_interval_s(self._ttl_s, has_own_ttls=self._store.evictor.may_have_own_ttls):
            self._expired_at = now
            if expired := self._store.evictor.expire(self._ttl_s):
                self.expired += expired
                forget_hits(self._store)
            self._have_forgotten()

    def _notice_purge(self) -> None:
        """Has memories dropped if a process has purged something since the last time."""
        if self._store.problem is not None:
            return
        with self._store.snapshot() as snapshot:
            purged_at = snapshot.meta("purged_at")
        if purged_at != self._purged_at:
            self._purged_at = purged_at
            forget_hits(self._store)
            self._have_forgotten()

    def _have_forgotten(self) -> None:
        for forget in self.on_forget:
            forget()

    def _look(self) -> None:
        """Reports what is wrong with the folder, once."""
        if self._store.problem is not None:
            self._report(self._store.problem)

    def _remove_damaged(self, error: StoreCorrupt) -> None:
        """Removes damaged records that make writing fail. `Store.maintain` deals with damage of the file itself."""
        try:
            self.quarantined += remove_damaged(self._store).records
            self._store.try_file()
        except CacheError as failure:
            log.debug("[disk-cache] not removed: %s, because of %s", error, failure)

    def _recover(self) -> None:
        if self.error is not None:
            self.error = None
            log.info("[disk-cache] saving again")

    def _report(self, error: CacheError | str) -> None:
        told = error if isinstance(error, str) else self._store.told(error)
        if self.error is None:
            log.warning("[disk-cache] serving without saving until this is repaired: %s", told)
        self.error = told

    def _forget(self, publication: Publication) -> None:
        with self._changed:
            if self._queue and self._queue[0] is publication:
                self._queue.popleft()
            self.pending_bytes -= publication.payload_bytes
            gone = {node.name for node in publication.nodes}
            self.pending = MappingProxyType({k: v for k, v in self.pending.items() if k not in gone})
            if publication.base is not None:
                self._store.evictor.unpin(publication.base)
            self._changed.notify_all()
        self.on_room()


def _noting(part: Part, failed: list[Part]) -> Part:
    """Returns a part that adds itself to `failed` when it cannot be put."""

    def put(changes: Changes) -> None:
        try:
            part.put(changes)
        except BaseException:
            failed.append(part)
            raise

    return part._replace(put=put)
