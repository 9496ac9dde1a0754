"""The background writer: what waits to be saved, and a thread that writes it to the store.

A failure of the store is logged once and counted, and the daemon continues to serve.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from diskprefix.errors import CacheError, LargerThanStore, PrefixGone, ReaderStays, StoreReplaced
from diskprefix.store.changes import NewNode, Part, Use, touches
from diskprefix.store.eviction import recorded_ttl
from diskprefix.store.housekeeping import Housekeeping
from diskprefix.store.notes import Notes
from diskprefix.store.save import Hold, Save, Waiting
from diskprefix.store.savings import SavingsLog
from diskprefix.store.schema import ModelRecord
from diskprefix.store.store import OUTDATED, Publication, Store

log = logging.getLogger("diskprefix")

_TOUCH_INTERVAL_S = 1.0
"""The interval in which uses of nodes and counts of requests are written, and the folder is checked. A kill loses at
most the uses of this time."""
_LAST_WRITE_S = 10.0
_RETRY_S = 1.0
"""The time between two attempts to write a publication while the store fails."""
_PAUSE_S = 2.0
"""Longer than most steps of a prompt, each of which pauses writing again. One that is cancelled just stops doing so."""
_MAX_HELD_S = 10.0
"""A kill loses what was computed in that time."""
_MOST_SAVES = 1000
"""Each may hold the logits at its prompt's end, which lie in no pages."""


class Room:
    """Reserved bytes of the write buffer. A `Hold`."""

    def __init__(self, writer: Writer, num_bytes: int) -> None:
        self._writer, self._num_bytes = writer, num_bytes

    def release(self) -> None:
        num_bytes, self._num_bytes = self._num_bytes, 0
        self._writer.give_back(num_bytes)

    def frees(self) -> bool:
        return False


class Writer:
    """Owns the writing thread. The methods are for any thread, do not wait for the disk unless they say so, and do not
    raise.

    The oldest `Save` that has something to write goes first. Payloads lie in pages that are held, so KV memory bounds
    what waits. Only what is in no pages takes room in the buffer, for which `reserve` asks first.
    """

    def __init__(self, store: Store, *, buffer_bytes: int, ttl_s: float = 0.0) -> None:
        """For `ttl_s` see `Housekeeping`."""
        self._store = store
        self.housekeeping = Housekeeping(store, ttl_s)
        self.notes = Notes(store, self._wake)
        self.savings = SavingsLog(store)
        self.housekeeping.on_forget.append(self.drop_outdated)
        self.dropped = self.evicted = self.written_bytes = self.written_tokens = 0
        self.pending: Mapping[bytes, NewNode] = MappingProxyType({})
        """The nodes that are not yet in the store, an immutable view. Read it before a snapshot is taken, or a node may
        be in neither."""
        self.pending_bytes = 0
        """The bytes of payloads that wait."""
        self._buffer_bytes, self._reserved_bytes = buffer_bytes, 0
        self._changed = threading.Condition()
        self._saves: dict[Save, None] = {}
        """Those with something to write, or whose requests have not ended."""
        self._writing: Waiting | None = None
        self._views: dict[object, Mapping[bytes, NewNode]] = {}
        """For each reader what it reads."""
        self._left: list[tuple[Waiting, frozenset[object]]] = []
        """What left the queue and is still held, with the views that show it."""
        self._num_held = 0
        """The publications whose holds are not released."""
        self._touches: dict[bytes, Use] = {}
        self._damaged: dict[bytes, bytes] = {}
        self._held_until = 0.0
        """The time until which writing is paused, on the clock of `time.monotonic`."""
        self._waits_for_reader = False
        """A reader keeps the store from being written. Nothing is lost for that after `_MAX_HELD_S`."""
        self._num_waiting = 0
        """Callers that wait until everything is written."""
        self._closing = self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="kv-writer", daemon=True)
        self._thread.start()

    @property
    def error(self) -> str | None:
        """The store's last failure; None once a prompt is saved again."""
        return self.housekeeping.error

    @property
    def num_pending(self) -> int:
        """The prompts of which something waits, or is being written."""
        return sum(bool(save.waiting) for save in list(self._saves))

    @property
    def room_bytes(self) -> int:
        """The bytes of the buffer that may still be reserved."""
        return 0 if self._closing else max(0, self._buffer_bytes - self._reserved_bytes)

    @property
    def is_alive(self) -> bool:
        """Returns whether the store is still used: the thread runs, as another process may hold LMDB's lock, or damage
        is looked for. Keep the store open then."""
        return self._thread.is_alive() or self.housekeeping.is_reading

    # What is to be saved.

    def reserve(self, num_bytes: int) -> Room | None:
        """Reserves bytes of the buffer. Returns None if there is no room for them."""
        with self._changed:
            if num_bytes > self.room_bytes:
                return None
            self._reserved_bytes += num_bytes
            return Room(self, num_bytes)

    def give_back(self, num_bytes: int) -> None:
        with self._changed:
            self._reserved_bytes -= num_bytes
            self._changed.notify_all()

    def add(self, save: Save, publication: Publication, holds: Sequence[Hold] = (), *, is_last: bool = False) -> None:
        """Queues a publication behind the others of its save. Its payloads lie in what `holds` keep, which are released
        when it is written or lost. Its nodes are visible at once. Of a save that has failed, only that the prompt was
        seen is written, and nothing once the thread has ended. With `is_last`, ends the save."""
        waiting = Waiting(save, publication, holds)
        with self._changed:
            save.is_finished |= is_last
            is_refused = self._has_ended or (save not in self._saves and len(self._saves) >= _MOST_SAVES)
            if is_refused:
                self.fail(save, "" if self._has_ended else "too many prompts wait for the disk")
            self._num_held += bool(holds)
            if save.has_failed:
                self._left.append((waiting, frozenset()))
                self._release()
                waiting = Waiting(save, publication.without_nodes())
            if not save.has_failed or (publication.prompt is not None and not is_refused):
                save.has_nodes |= bool(waiting.nodes)
                save.waiting.append(waiting)
                self._saves[save] = None
                self.pending = MappingProxyType(dict(self.pending) | {node.name: node for node in waiting.nodes})
                self.pending_bytes += waiting.publication.payload_bytes
                self._pin(save)
                self._changed.notify_all()

    def finish(self, save: Save) -> None:
        """Ends a save: nothing is added any more."""
        with self._changed:
            save.is_finished = True
            self._pin(save)

    def note_loss(self, save: Save, why: str) -> None:
        """Records that something is lost which nothing continues. The first loss of a save is counted, and its reason
        stays, and is logged unless it is empty."""
        with self._changed:
            if save.lost is not None:
                return
            save.lost = why
            self.dropped += 1
        if why:
            log.warning("[disk-cache] %s is not saved, or not all of it: %s", save.what, why)

    def fail(self, save: Save, why: str = "", keep: int = sys.maxsize, *, keeps_prompt: bool = True) -> None:
        """Loses what waits of a save behind the first `keep` publications, and all that would come. That the prompt was
        seen is written all the same, unless `keeps_prompt` is False. For `why` see `note_loss`."""
        with self._changed:
            self.note_loss(save, why)
            save.has_failed = True
            is_writing = self._writing is not None and self._writing.save is save
            lost = [save.waiting.pop() for _ in range(len(save.waiting) - max(keep, is_writing))]
            seen = [waiting.publication for waiting in lost if waiting.publication.prompt is not None and keeps_prompt]
            save.waiting.extend(Waiting(save, publication.without_nodes()) for publication in seen)
            self._forget(lost)
            self._pin(save)

    def drop_outdated(self) -> None:
        """Loses what waits for requests that began before the last purge, or in a store that was replaced: nobody finds
        it from now on."""
        epoch = self._store.epoch
        with self._changed:
            for save in [save for save in self._saves if save.waiting and save.epoch != epoch]:
                self.fail(save, OUTDATED, 0, keeps_prompt=False)
                # The transaction refuses what is being written.
                self._hide([node for waiting in save.waiting for node in waiting.nodes])
        self.notes.drop_outdated()

    def drop_pages(self) -> bool:
        """Loses the last publication of the latest save that waits in pages which nobody else uses, because others need
        them. What it continues is written. Returns False if there is none."""
        with self._changed:
            waiting = [(save, n) for save in self._saves for n in range(len(save.waiting))]
            last = next((place for place in reversed(waiting) if self._can_drop(place[0].waiting[place[1]])), None)
            if last is not None:
                self.fail(last[0], "its memory was needed before the disk had room for it", last[1])
        return last is not None

    def write_pages(self, timeout_s: float) -> bool:
        """Has what waits in pages written now, because others need them. Waits until some of it is. Returns False if
        there is none or the time runs out."""
        with self._changed, self._waited_for():
            before = self._num_held
            return self._changed.wait_for(lambda: not before or self._num_held < before, timeout_s) and before > 0

    @contextmanager
    def view(self) -> Iterator[Mapping[bytes, NewNode]]:
        """Yields `pending`. Until the end, all that it shows is held."""
        view = object()
        with self._changed:
            pending = self._views[view] = self.pending
        try:
            yield pending
        finally:
            with self._changed:
                del self._views[view]
                self._release()

    # When it is written, and what else is.

    def pause_writing(self) -> None:
        """Pauses writing for two seconds or until `resume_writing`, because the model needs the processors for a
        prompt. Nothing is held for more than ten seconds, when half of the buffer's size waits, or while a caller waits
        for the writing."""
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

    def add_model(self, model: ModelRecord) -> None:
        """Adds a model to those that the store is served with. They are recorded when nothing waits to be written,
        and again if a new file replaces the store's."""
        with self._changed:
            self.housekeeping.models += (model,)

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything that was added is written, and notes as far as the store takes them; and until records
        that made writing fail are removed. Returns False if the time runs out first."""
        with self._changed, self._waited_for():
            return self._changed.wait_for(
                lambda: not (self.num_pending or self.notes.is_waiting or self.housekeeping.is_repairing), timeout_s
            )

    def close(self, timeout_s: float) -> bool:
        """Writes what is queued, then stops. Waits. Returns False if the time ran out and something was lost."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        with self._changed:
            late = [save for save in self._saves if save.waiting and save.waiting[-1] is not self._writing]
            for save in late:
                self.fail(save, "", 0, keeps_prompt=False)
        # The transaction that is being written may finish, or LMDB would roll it back.
        self._thread.join(max(timeout_s, _LAST_WRITE_S))
        lost = len(late) + self._thread.is_alive()
        if lost:
            log.warning("[disk-cache] %d prompts were not saved: writing took over %.0f s", lost, timeout_s)
        return not lost

    # The queue, under its lock.

    def _next(self) -> Waiting | None:
        """Returns what is to be written now."""
        first = next((save.waiting[0] for save in self._saves if save.waiting), None)
        return None if first is None or self._is_held(first) else first

    def _is_held(self, first: Waiting) -> bool:
        if self._closing or self._num_waiting or self.pending_bytes > self._buffer_bytes // 2:
            return False
        latest = math.inf if self._waits_for_reader else first.made_at + _MAX_HELD_S
        return time.monotonic() < min(self._held_until, latest)

    def _hold(self, seconds: float) -> bool:
        """Pauses writing. Returns whether something waits because of it."""
        with self._changed:
            self._held_until = time.monotonic() + seconds
            return self._next() is None and self.num_pending > 0

    @contextmanager
    def _waited_for(self) -> Iterator[None]:
        """Nothing is held meanwhile. The caller holds the lock."""
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
        """Pins what the first waiting publication of a save continues, or else what was written last. At the end of the
        save, unpins it, and takes the save out of the queue."""
        pinned = written[-1].name if written else save.pinned
        if save.waiting and (base := save.waiting[0].publication.base) is not None:
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

    def _can_drop(self, waiting: Waiting) -> bool:
        return waiting is not self._writing and waiting.frees() and not self._views_of(waiting)

    def _forget(self, gone: Sequence[Waiting]) -> None:
        """Hides what was written, or is lost. It is held as long as views show it."""
        self._hide([node for waiting in gone for node in waiting.nodes])
        self._left += [(waiting, self._views_of(waiting)) for waiting in gone]
        self.pending_bytes -= sum(waiting.publication.payload_bytes for waiting in gone)
        self._release()

    def _hide(self, nodes: Sequence[NewNode]) -> None:
        gone = {node.name for node in nodes}
        self.pending = MappingProxyType({k: v for k, v in self.pending.items() if k not in gone})

    def _views_of(self, waiting: Waiting) -> frozenset[object]:
        """Returns the views that show a node of a publication."""
        views = self._views.items()
        return frozenset(view for view, shown in views if any(shown.get(n.name) is n for n in waiting.nodes))

    def _release(self) -> None:
        """Releases the holds of what left the queue and no open view shows."""
        open_views = self._views.keys()
        done = [waiting for waiting, views in self._left if views.isdisjoint(open_views)]
        self._left = [entry for entry in self._left if not entry[1].isdisjoint(open_views)]
        for hold in [hold for waiting in done for hold in waiting.holds]:
            hold.release()
        self._num_held -= sum(bool(waiting.holds) for waiting in done)
        self._changed.notify_all()

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

    # The thread.

    def _run(self) -> None:
        attempt = self.housekeeping.attempt
        while True:
            attempt(self.housekeeping.notice_purge)
            with self._changed:
                self._changed.wait_for(
                    lambda: self._next() or self._damaged or self._closing or self.notes.is_waiting, _TOUCH_INTERVAL_S
                )
                waiting = self._writing = self._next()
                damaged, self._damaged = self._damaged, {}
                self._has_ended = self._closing and waiting is None
            for name, parent in damaged.items():
                attempt(partial(self.housekeeping.quarantine, name, parent))
            attempt(self.housekeeping.remove_damaged)
            is_done = self._write_all(waiting)
            self._wake()
            if waiting is not None:
                self._end_writing(waiting, is_done=is_done)
            attempt(self.notes.make_fit)
            if self._has_ended:
                attempt(self._store.record_written)
                return
            if waiting is None or self._store.problem is not None:
                attempt(self.housekeeping.maintain)

    def _end_writing(self, waiting: Waiting, *, is_done: bool) -> None:
        with self._changed:
            self._writing = None
            if is_done:
                waiting.save.waiting.popleft()
                self._forget([waiting])
                self._pin(waiting.save, () if waiting.save.has_failed else waiting.nodes)

    def _write_all(self, waiting: Waiting | None) -> bool:
        """Writes what waits in one transaction. If that fails, each part is tried alone: none keeps the others back.
        Returns False if the publication is to be tried again: a store that fails may not do so for long."""
        left = None if waiting is None else self._left_of(waiting)
        # Uses come first, as the publication may replace what was used.
        sources = (self._using, self.notes.writing, self.savings.writing)
        try:
            with ExitStack() as writing:
                found = [writing.enter_context(source()) for source in sources]
                parts = tuple(part for part in found if part is not None)
                if waiting is not None and left is not None:
                    self._publish(waiting.save, replace(left, parts=parts))
                elif parts:
                    self._store.write(parts)
        except Exception as error:  # noqa: BLE001 (what fails alone is told)
            if waiting is not None:
                waiting.save.has_written_nodes = False
            if isinstance(error, StoreReplaced):
                self.housekeeping.attempt(self.housekeeping.maintain)
            for source in sources:
                self.housekeeping.attempt(partial(self._store.write_from, source))
            return waiting is None or left is None or self._publish_alone(waiting.save, left)
        if waiting is not None and left is not None and left.last_node is not None and waiting.save.has_written_nodes:
            # A prompt was saved with all else, nodes among it. On a full disk, a small part alone may still fit.
            self.housekeeping.recover()
        return True

    def _left_of(self, waiting: Waiting) -> Publication | None:
        """Returns what is to be written of a publication, None if nothing is. Loses what is outdated or not finite, and
        all that continues it. That the prompt was seen counts also if its state is lost."""
        save, publication = waiting.save, waiting.publication
        if save.epoch != self._store.epoch:
            self.fail(save, OUTDATED, 0, keeps_prompt=False)
            return None
        try:
            is_finite = publication.is_finite
        except Exception:  # noqa: BLE001 (writing it fails too, and tells that)
            is_finite = True
        if not is_finite:
            self.fail(save, "its state is not finite", 0)
            return None if publication.prompt is None else publication.without_nodes()
        return publication

    def _publish_alone(self, save: Save, publication: Publication) -> bool:
        """Returns what `_write_all` does."""
        failure = self.housekeeping.attempt(partial(self._publish, save, publication))
        # Readers end, whenever that is. What waits for that needs no other attempt in time.
        self._waits_for_reader = isinstance(failure, (ReaderStays, StoreReplaced))
        if isinstance(failure, (PrefixGone, LargerThanStore)):
            self.fail(save, str(failure), 0)
        elif isinstance(failure, CacheError) and self._hold(_RETRY_S):
            return False
        elif failure is not None:
            self.fail(save, "", 0)
        return True

    def _publish(self, save: Save, publication: Publication) -> None:
        self.evicted += self._store.publish(publication)
        self._waits_for_reader = False
        save.has_written_nodes |= bool(publication.nodes)
        self.written_bytes += publication.payload_bytes
        self.written_tokens += sum(len(node.token_ids) for node in publication.nodes)
