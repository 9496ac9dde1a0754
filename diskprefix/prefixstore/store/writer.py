"""The background writer: a queue of publications, and a thread that writes them to the store.

A failure of the store is logged once and counted, and the daemon continues to serve.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from msgspec.structs import replace

from diskprefix.errors import CacheError, LargerThanStore, PrefixGone, ReaderStays, StoreReplaced
from diskprefix.prefixstore.store.changes import NewNode, SmallWrite, Use, WriteSource, touches
from diskprefix.prefixstore.store.eviction import recorded_ttl
from diskprefix.prefixstore.store.housekeeping import Housekeeping
from diskprefix.prefixstore.store.notes import Notes
from diskprefix.prefixstore.store.pieces import Hold
from diskprefix.prefixstore.store.save import Save
from diskprefix.prefixstore.store.schema import ModelRecord
from diskprefix.prefixstore.store.store import EXPIRED, OUTDATED, Publication, Store
from diskprefix.thread_pool import standing_thread

log = logging.getLogger("diskprefix")

_JOIN_S = 0.5


@dataclass(frozen=True)
class WriterLimits:
    """Limits of waiting, in seconds, and of what waits."""

    touch_interval_s: float = 1.0
    """The interval at which uses of nodes and counts of requests are written, and the folder is checked. A kill loses
    the uses and counts of this time."""
    hung_write_s: float = 20.0
    """A stop does not wait for a write that has taken longer than this: LMDB rolls it back."""
    foreign_write_s: float = 10.0
    """A stop no longer waits for LMDB's lock after this time: another process does not end its write."""
    last_write_s: float = 10.0
    """A stop waits at least this long for the running write."""
    retry_s: float = 1.0
    """The time between two attempts to write a publication while the store fails."""
    tries_s: float = 10.0
    """While the store fails, a publication is tried again until it is this old."""
    pause_s: float = 2.0
    """The pause for one step of a prompt, longer than most steps. A cancelled prompt no longer renews it."""
    max_held_s: float = 3.0
    """Pauses delay a publication by at most this time. A kill loses the delayed publications."""
    max_saves: int = 1000
    """Limit for the waiting saves. Each may hold the logits at its prompt's end, which are outside KV memory."""


class Room:
    """Reserved bytes of the write buffer. A `Hold`."""

    def __init__(self, writer: Writer, num_bytes: int) -> None:
        self._writer, self._num_bytes = writer, num_bytes

    def release(self) -> None:
        num_bytes, self._num_bytes = self._num_bytes, 0
        self._writer.give_back(num_bytes)

    def frees(self) -> bool:
        return False


class Waiting(NamedTuple):
    """The nodes that wait for the disk, by their names. `ends` has the names of the nodes, waiting or stored, at which
    whole prompts will end."""

    nodes: Mapping[bytes, NewNode]
    ends: frozenset[bytes]


class Writer:
    """Owns the writing thread. The methods are for any thread, never raise, and wait for the disk only if they say so.

    The oldest `Save` with something to write is served first. Payloads are in held pages, so KV memory limits the
    waiting payloads. Other memory is first reserved from the buffer, with `reserve`.
    """

    def __init__(
        self,
        store: Store,
        *,
        buffer_bytes: int,
        ttl_s: float = 0.0,
        also_writes: Sequence[WriteSource] = (),
        limits: WriterLimits = WriterLimits(),
    ) -> None:
        """For `ttl_s` see `Housekeeping`. The writes that `also_writes` yield are made with each publication, and at
        least once in `limits.touch_interval_s`. `limits` may be replaced while the writer runs."""
        self.limits = limits
        self._store, self._also_writes, self._ttl_s = store, also_writes, ttl_s
        self.housekeeping = Housekeeping(store, ttl_s)
        self.notes = Notes(store, self._wake)
        self.housekeeping.on_forget.append(self.drop_outdated)
        self.dropped = self.evicted = self.written_bytes = self.written_tokens = 0
        self.pending: Mapping[bytes, NewNode] = MappingProxyType({})
        """The nodes that are not yet in the store, as an immutable view. Read it *before* taking a snapshot; otherwise
        a node may be in neither."""
        self.pending_bytes = 0
        """The bytes of waiting payloads."""
        self._buffer_bytes, self._reserved_bytes = buffer_bytes, 0
        self._changed = threading.Condition()
        self._saves: dict[Save, None] = {}
        """The saves with something to write, or whose requests have not ended, oldest first."""
        self._writing: Save | None = None
        """The save whose first publication is being written."""
        self._views: dict[object, Mapping[bytes, NewNode]] = {}
        """The value of `pending` that each open `view` has."""
        self._to_release: list[tuple[Publication, frozenset[object]]] = []
        """Publications that have left the queue but are still held, with the views that show them."""
        self._num_held = 0
        """The number of publications whose holds are not released."""
        self._touches: dict[bytes, Use] = {}
        self._damaged: dict[bytes, bytes] = {}
        self._held_until = self._retry_at = 0.0
        """The times of `time.monotonic` until which writing is paused for a prompt, and because the store fails."""
        self._waits_for_reader = False
        """A reader keeps the store from being written. No publication is lost because of that, even after
        `tries_s`."""
        self._num_waiting = 0
        """The number of callers that wait until something is written."""
        self._closing = self._has_ended = False
        self._thread = standing_thread(self._run, "kv-writer", self.housekeeping.note_bug)
        self._thread.start()

    @property
    def error(self) -> str | None:
        """See `Housekeeping.error`."""
        return self.housekeeping.error

    @property
    def num_pending(self) -> int:
        """The number of saves with a publication that waits or is being written."""
        return sum(bool(save.waiting) for save in list(self._saves))

    @property
    def room_bytes(self) -> int:
        """The bytes of the buffer that may still be reserved."""
        return 0 if self._closing else max(0, self._buffer_bytes - self._reserved_bytes)

    @property
    def is_alive(self) -> bool:
        """Returns whether the store is still in use and must stay open: the thread may wait for LMDB's lock, or a check
        for damage is running."""
        return self._thread.is_alive() or self.housekeeping.is_reading

    # The queue, for any thread.

    def reserve(self, num_bytes: int) -> Room | None:
        """Reserves bytes of the buffer. Returns None if they do not fit."""
        with self._changed:
            if num_bytes > self.room_bytes:
                return None
            self._reserved_bytes += num_bytes
            return Room(self, num_bytes)

    def give_back(self, num_bytes: int) -> None:
        with self._changed:
            self._reserved_bytes -= num_bytes
            self._changed.notify_all()

    def queue_publication(
        self, save: Save, publication: Publication, holds: Sequence[Hold] = (), *, is_last: bool = False
    ) -> None:
        """Queues a publication after the others of its save. `holds` keep its payloads, and are released when it is
        written or lost. Its nodes are visible at once. Of a failed save, only the seen prompt is written; nothing is
        written if its epoch is over, too many saves wait or the thread has ended. With `is_last`, ends the save."""
        publication = _queued(publication, holds)
        with self._changed:
            if is_last:
                save.note_end()
            is_refused = self._has_ended or (save not in self._saves and len(self._saves) >= self.limits.max_saves)
            if is_over := self._store.epochs.is_over(save.epoch):
                self._drop_outdated(save, OUTDATED)
            elif is_refused:
                self.fail(save, "" if self._has_ended else "too many prompts wait for the disk")
            self._num_held += bool(holds)
            if save.has_failed:
                self._to_release.append((publication, frozenset()))
                self._release_holds()
                publication = publication.without_nodes()
            if not save.has_failed or (publication.prompt is not None and not (is_refused or is_over)):
                save.has_nodes |= bool(publication.nodes)
                save.waiting.append(publication)
                self._saves[save] = None
                self.pending = MappingProxyType(dict(self.pending) | {node.name: node for node in publication.nodes})
                self.pending_bytes += publication.payload_bytes
                self._pin(save)
                self._changed.notify_all()

    def finish(self, save: Save) -> None:
        """Ends a save: nothing more will be added."""
        with self._changed:
            save.note_end()
            self._pin(save)

    def note_loss(self, save: Save, why: str) -> None:
        """Records the loss of a part that no other part of the save continues. Counts and logs the first loss of a
        save; an empty reason is not logged."""
        with self._changed:
            if save.lost is not None:
                return
            save.lost = why
            self.dropped += 1
        if why:
            log.warning("[disk-cache] %s is not saved, or not all of it: %s", save.label, why)

    def fail(self, save: Save, why: str = "", keep: int = sys.maxsize, *, keeps_prompt: bool = True) -> None:
        """Drops the waiting publications of a save except the first `keep`, and all later ones. Still writes the seen
        prompt, unless `keeps_prompt` is False. For `why` see `note_loss`."""
        with self._changed:
            self.note_loss(save, why)
            save.has_failed = True
            num_kept = max(keep, self._writing is save)
            lost = [save.waiting.pop() for _ in range(len(save.waiting) - num_kept)]
            seen = [publication for publication in lost if publication.prompt is not None and keeps_prompt]
            save.waiting.extend(_queued(publication.without_nodes()) for publication in seen)
            self._hide_publications(lost)
            self._pin(save)

    def drop_outdated(self) -> None:
        """Drops the waiting publications and notes of requests whose epoch is over. From now on they are visible to no
        reader."""
        with self._changed:
            self._drop_all_outdated()
        self.notes.drop_outdated()

    def drop_pages(self) -> bool:
        """Frees pages by dropping one waiting publication: the last one of the newest save that would free any. The
        publications before it are still written; the rest of its save fails. Returns False if no publication would free
        pages."""
        with self._changed:
            places = [(save, n) for save in self._saves for n in range(len(save.waiting))]
            last = next((place for place in reversed(places) if self._can_drop(*place)), None)
            if last is not None:
                self.fail(last[0], "its memory was needed before the disk had room for it", last[1])
        return last is not None

    def write_pages(self, timeout_s: float) -> bool:
        """Ends pauses, because others need the pages of waiting publications, and waits until a publication has
        released its pages. Returns False if no publication holds any or the time runs out."""
        with self._changed, self._waited_for():
            before = self._num_held
            return self._changed.wait_for(lambda: not before or self._num_held < before, timeout_s) and before > 0

    @contextmanager
    def view(self) -> Iterator[Waiting]:
        """Yields what waits, without the nodes of epochs that are over, or whose time to live is. Its payloads are held
        until the end of the block."""
        view = object()
        with self._changed:
            self._drop_all_outdated()
            nodes = self._views[view] = self.pending
            lasts = (publication.last_node for save in self._saves for publication in save.waiting)
            waiting = Waiting(nodes, frozenset(last for last in lasts if last is not None))
        try:
            yield waiting
        finally:
            with self._changed:
                del self._views[view]
                self._release_holds()

    # The time of writing, and other records, for any thread.

    def pause_writing(self) -> None:
        """Pauses writing for two seconds or until `resume_writing`, because the model needs the processors for a
        prompt. A publication that has waited for three seconds is written all the same, so that a kill loses no more of
        a long prompt. Pauses end when waiting payloads exceed half of the buffer, and while a caller waits until
        something is written."""
        with self._changed:
            self._held_until = time.monotonic() + self.limits.pause_s

    def write_at_once(self, save: Save) -> None:
        """Ends pauses for what a save has queued so far."""
        with self._changed:
            save.not_held_until = time.monotonic()
            self._changed.notify_all()

    def resume_writing(self) -> None:
        with self._changed:
            self._held_until = 0.0
            self._changed.notify_all()

    def touch(self, name: bytes, when: float, ttl_s: float | None = None, *, hits: int = 1) -> None:
        """Records the use of a stored node and of its ancestors. Uses are written together, later.

        `ttl_s`: the time to live that the request asks for, in seconds; None for the daemon's. `hits` is 0 if only the
        time to live is new.
        """
        self._queue_uses({name: Use(when, hits, recorded_ttl(ttl_s))})

    def quarantine(self, name: bytes, parent: bytes) -> None:
        """Removes a damaged node before the next publication is written."""
        with self._changed:
            self._damaged[name] = parent
            self._changed.notify_all()

    def set_model(self, model: ModelRecord, before: ModelRecord | None = None) -> None:
        """Adds a model to the models that the store is served with, in place of `before`. The models are recorded
        before any of their state is stored, and again after a purge and in a new file of the store."""
        with self._changed:
            models = (*(known for known in self.housekeeping.models if known != before), model)
            self.housekeeping.models = models
            self._store.evictor.served = tuple(known.identity for known in models)

    def flush(self, timeout_s: float) -> bool:
        """Waits until no publication is waiting, each note was written or an attempt was made, and records that made a
        write fail are removed. Returns False if the time runs out first."""
        with self._changed, self._waited_for():
            return self._changed.wait_for(
                lambda: not (self.num_pending or self.notes.is_waiting or self.housekeeping.is_repairing), timeout_s
            )

    def close(self, timeout_s: float) -> bool:
        """Writes the queue, then stops the thread. Waits for both. Returns False if the time ran out and something was
        lost."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._join(timeout_s)
        with self._changed:
            unwritten = [save for save in self._saves if len(save.waiting) > (self._writing is save)]
            for save in unwritten:
                self.fail(save, "", 0, keeps_prompt=False)
        # Let the running transaction finish: otherwise LMDB would roll it back.
        self._join(max(timeout_s, self.limits.last_write_s))
        num_lost = len(unwritten) + self._thread.is_alive()
        if num_lost:
            why = self._store.write_stall or f"writing took over {timeout_s:.0f} s"
            log.warning("[disk-cache] %d prompts were not saved: %s", num_lost, why)
        return not num_lost

    def _join(self, timeout_s: float) -> None:
        """Waits for the end of the thread. Returns early if the thread has waited too long for a process that does not
        end its write (then no transaction of this process is running), or if the disk does not finish a write."""
        deadline = time.monotonic() + timeout_s
        # Bound: `deadline`.
        while self._thread.is_alive() and (left_s := deadline - time.monotonic()) > 0:
            limits = self.limits
            if self._store.write_waited_s > limits.foreign_write_s or self._store.write_s > limits.hung_write_s:
                return
            self._thread.join(min(left_s, _JOIN_S))

    # The queue, under its lock.

    def _next(self) -> Save | None:
        """Returns the oldest save whose first publication is to be written now, None if there is none."""
        return next((save for save in self._saves if save.waiting and not self._held_s(save)), None)

    def _held_s(self, save: Save) -> float:
        """Returns for how many seconds the first publication of a save is not to be written yet."""
        first = save.waiting[0]
        if self._closing or self._num_waiting or self.pending_bytes > self._buffer_bytes // 2:
            return 0.0
        tries_until = math.inf if self._waits_for_reader else first.queued_at + self.limits.tries_s
        is_held = first.queued_at > save.not_held_until
        held_until = min(self._held_until, first.queued_at + self.limits.max_held_s) if is_held else 0.0
        return max(0.0, max(held_until, min(self._retry_at, tries_until)) - time.monotonic())

    def _try_later(self, save: Save) -> bool:
        """Pauses writing because the store fails. Returns False if the first publication of a save is not tried
        again."""
        with self._changed:
            self._retry_at = time.monotonic() + self.limits.retry_s
            return self._held_s(save) > 0

    @contextmanager
    def _waited_for(self) -> Iterator[None]:
        """Ends pauses during the block. The caller holds the lock."""
        self._num_waiting += 1
        self._changed.notify_all()
        try:
            yield
        finally:
            self._num_waiting -= 1

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _pin(self, save: Save, written: Sequence[NewNode] = ()) -> None:
        """Pins the node that the first waiting publication of a save continues, otherwise the last of the `written`
        nodes. At the end of the save, unpins the node and removes the save from the queue."""
        pinned = written[-1].name if written else save.pinned
        if save.waiting and (base := save.waiting[0].base) is not None:
            pinned = base
        if save.is_finished and not save.waiting:
            self._saves.pop(save, None)
            pinned = None
        if pinned != save.pinned:
            pinned, save.pinned = save.pinned, pinned
            if save.pinned is not None:
                self._store.evictor.pin(save.pinned)
            if pinned is not None:
                self._store.evictor.unpin(pinned)

    def _can_drop(self, save: Save, number: int) -> bool:
        publication, is_writing = save.waiting[number], self._writing is save and number == 0
        frees_pages = any(hold.frees() for hold in publication.holds)
        return not is_writing and frees_pages and not self._views_of(publication)

    def _drop_all_outdated(self) -> None:
        """Drops the saves whose epoch or time to live is over. Nothing else hides them before the thread comes to them,
        and it may be waiting for the disk."""
        over = {epoch for epoch in {save.epoch for save in self._saves} if self._store.epochs.is_over(epoch)}
        for save in [save for save in self._saves if save.waiting]:
            if save.epoch in over:
                self._drop_outdated(save, OUTDATED)
            elif self._has_expired(save):
                self._drop_outdated(save, EXPIRED)

    def _has_expired(self, save: Save) -> bool:
        """Returns whether the time to live of some state that waits is over since the request ended."""
        return save.is_finished and save.unused_s > min(
            publication.lasts_s(self._ttl_s) for publication in save.waiting
        )

    def _drop_outdated(self, save: Save, why: str) -> None:
        self.fail(save, why, 0, keeps_prompt=False)
        # What is being written must not be visible meanwhile. The transaction will refuse it, or it expires at once.
        self._hide([node for publication in save.waiting for node in publication.nodes])

    def _hide_publications(self, done: Sequence[Publication]) -> None:
        """Hides publications that were written or are lost. Their holds are released once no view shows them."""
        self._hide([node for publication in done for node in publication.nodes])
        self._to_release += [(publication, self._views_of(publication)) for publication in done]
        self.pending_bytes -= sum(publication.payload_bytes for publication in done)
        self._release_holds()

    def _hide(self, nodes: Sequence[NewNode]) -> None:
        # Another save may wait with a node of the same name.
        hidden = set(nodes)
        self.pending = MappingProxyType({name: node for name, node in self.pending.items() if node not in hidden})

    def _views_of(self, publication: Publication) -> frozenset[object]:
        """Returns the views that show a node of a publication."""
        views = self._views.items()
        return frozenset(view for view, shown in views if any(shown.get(n.name) is n for n in publication.nodes))

    def _release_holds(self) -> None:
        """Releases the holds of publications that left the queue and that no open view shows."""
        open_views = self._views.keys()
        done = [publication for publication, views in self._to_release if views.isdisjoint(open_views)]
        self._to_release = [entry for entry in self._to_release if not entry[1].isdisjoint(open_views)]
        for hold in [hold for publication in done for hold in publication.holds]:
            hold.release()
        self._num_held -= sum(bool(publication.holds) for publication in done)
        self._changed.notify_all()

    def _queue_uses(self, uses: Mapping[bytes, Use]) -> None:
        with self._changed:
            for name, use in uses.items():
                noted = self._touches.get(name)
                self._touches[name] = use if noted is None else noted.and_also(use)

    @contextmanager
    def _using(self) -> Iterator[SmallWrite | None]:
        """Yields the write of the uses of stored nodes, None if there are none. If the block raises, the uses continue
        to wait."""
        with self._changed:
            used, self._touches = self._touches, {}
            # The uses of nodes that are not in the store yet continue to wait.
            self._touches = {name: used.pop(name) for name in used.keys() & self.pending.keys()}
        try:
            yield touches(used) if used else None
        except BaseException:
            self._queue_uses(used)
            raise

    # The thread.

    def _run(self) -> None:
        attempt = self.housekeeping.attempt
        # Bound: `close` ends the thread.
        while True:
            attempt(self.housekeeping.notice_purge)
            with self._changed:
                held_s = [self._held_s(save) for save in self._saves if save.waiting]
                self._changed.wait_for(
                    lambda: self._next() or self._damaged or self._closing or self.notes.is_waiting,
                    min([self.limits.touch_interval_s, *held_s]),
                )
                save = self._writing = self._next()
                damaged, self._damaged = self._damaged, {}
                self._has_ended = self._closing and save is None
            for name, parent in damaged.items():
                attempt(partial(self.housekeeping.quarantine, name, parent))
            attempt(self.housekeeping.remove_damaged)
            if save is not None and self._store.problem is None:
                attempt(self.housekeeping.record_models)
            is_done = self._write_all(save)
            self._wake()
            if save is not None:
                self._end_writing(save, is_done=is_done)
            attempt(self.notes.make_fit)
            if self._store.problem is None:
                attempt(self._store.evictor.measure_again)
            if self._has_ended:
                with suppress(CacheError):
                    # Records a fact that was measured about a model just before the end. Otherwise the next start has
                    # to measure it again.
                    self.housekeeping.record_models()
                attempt(self._store.record_written)
                return
            if save is None or self._store.problem is not None:
                attempt(self.housekeeping.maintain)

    def _end_writing(self, save: Save, *, is_done: bool) -> None:
        with self._changed:
            self._writing = None
            if is_done:
                publication = save.waiting.popleft()
                self._hide_publications([publication])
                self._pin(save, () if save.has_failed else publication.nodes)

    def _write_all(self, save: Save | None) -> bool:
        """Writes the first publication of a save and all small writes in one transaction. If that fails, tries each of
        them alone, so that a failing one does not stop the others. Returns False if the publication must be tried
        again."""
        left = None if save is None else self._left_of(save)
        # Uses come first, because the publication may replace the nodes that were used.
        sources = (self._using, self.notes.writing, *self._also_writes)
        try:
            with ExitStack() as writing:
                yielded = [writing.enter_context(source()) for source in sources]
                small_writes = tuple(small_write for small_write in yielded if small_write is not None)
                if save is not None and left is not None:
                    self._write_publication(save, replace(left, small_writes=small_writes))
                elif small_writes:
                    self._store.write(small_writes)
        except Exception as error:  # noqa: BLE001 (the attempts alone report it)
            if save is not None:
                save.has_written_nodes = False
            if isinstance(error, StoreReplaced):
                self.housekeeping.attempt(self.housekeeping.maintain)
            for source in sources:
                self.housekeeping.attempt(partial(self._store.write_from, source))
            return save is None or left is None or self._publish_alone(save, left)
        if save is not None and left is not None and save.has_written_nodes:
            self.housekeeping.recover(is_whole=left.last_node is not None)
        return True

    def _left_of(self, save: Save) -> Publication | None:
        """Returns the publication to write, or None. Fails outdated and expired saves, and saves whose state is not
        finite; for the latter, the seen prompt is still written."""
        publication = save.waiting[0]
        if (is_over := self._store.epochs.is_over(save.epoch)) or self._has_expired(save):
            self.fail(save, OUTDATED if is_over else EXPIRED, 0, keeps_prompt=False)
            return None
        try:
            is_finite = publication.is_finite
        except Exception:  # noqa: BLE001 (writing it fails too, and reports it)
            is_finite = True
        if not is_finite:
            self.fail(save, "its state is not finite", 0)
            return None if publication.prompt is None else publication.without_nodes()
        return publication

    def _publish_alone(self, save: Save, publication: Publication) -> bool:
        """Writes a publication. Returns False if it must be tried again."""
        failure = self.housekeeping.attempt(partial(self._write_publication, save, publication))
        # A reader ends at some time, so there is no limit for the attempts.
        self._waits_for_reader = isinstance(failure, (ReaderStays, StoreReplaced))
        if isinstance(failure, (PrefixGone, LargerThanStore)):
            self.fail(save, str(failure), 0)
        elif isinstance(failure, CacheError) and self._try_later(save):
            return False
        elif failure is not None:
            self.fail(save, "", 0)
        return True

    def _write_publication(self, save: Save, publication: Publication) -> None:
        self.evicted += self._store.publish(replace(publication, unused_s=save.unused_s))
        self._waits_for_reader = False
        save.has_written_nodes |= bool(publication.nodes)
        self.written_bytes += publication.payload_bytes
        self.written_tokens += sum(len(node.token_ids) for node in publication.nodes)


def _queued(publication: Publication, holds: Sequence[Hold] = ()) -> Publication:
    """Returns a publication as it is queued now."""
    return replace(publication, holds=holds, queued_at=time.monotonic())
