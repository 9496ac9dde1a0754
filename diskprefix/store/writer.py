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
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import MappingProxyType

from msgspec.structs import replace

from diskprefix.errors import CacheError, LargerThanStore, PrefixGone, ReaderStays, StoreReplaced
from diskprefix.store.changes import NewNode, SmallWrite, Use, touches
from diskprefix.store.eviction import recorded_ttl
from diskprefix.store.housekeeping import Housekeeping
from diskprefix.store.notes import Notes
from diskprefix.store.save import Hold, Save, Waiting
from diskprefix.store.savings import SavingsLog
from diskprefix.store.schema import ModelRecord
from diskprefix.store.store import OUTDATED, Publication, Store

log = logging.getLogger("diskprefix")

_TOUCH_INTERVAL_S = 1.0
"""The interval in which uses of nodes and counts of requests are written, and the folder is checked. A kill loses the
uses and counts of this time."""
_HUNG_WRITE_S = 20.0
"""A stop does not wait for a write that has taken so long: LMDB rolls it back."""
_FOREIGN_WRITE_S = 10.0
"""A stop does not wait for LMDB's lock when it has waited so long for it: another process does not end its write."""
_LAST_WRITE_S = 10.0
"""A stop waits at least so long for the write that is running."""
_JOIN_S = 0.5
_RETRY_S = 1.0
"""The time between two attempts to write a publication while the store fails."""
_PAUSE_S = 2.0
"""The pause of one step of a prompt, longer than most steps. A cancelled prompt just does not renew it."""
_MAX_HELD_S = 10.0
"""The longest time that pauses keep a publication from being written. A kill loses it."""
_MAX_SAVES = 1000
"""Limit for the saves that wait. Each may hold the logits at its prompt's end, which are outside KV memory."""


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
    """Owns the writing thread. The methods are for any thread, never raise, and wait for the disk only if they say so.

    The oldest `Save` with something to write is served first. Payloads are in held pages, so KV memory limits what
    waits. Other memory is reserved from the buffer first, with `reserve`.
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
        """The nodes that are not yet in the store, an immutable view. Read it *before* taking a snapshot, or a node may
        be in neither."""
        self.pending_bytes = 0
        """The bytes of waiting payloads."""
        self._buffer_bytes, self._reserved_bytes = buffer_bytes, 0
        self._changed = threading.Condition()
        self._saves: dict[Save, None] = {}
        """The saves with something to write, or whose requests have not ended, oldest first."""
        self._writing: Waiting | None = None
        self._views: dict[object, Mapping[bytes, NewNode]] = {}
        """The value of `pending` that each open `view` has."""
        self._to_release: list[tuple[Waiting, frozenset[object]]] = []
        """What left the queue and is still held, with the views that show it."""
        self._num_held = 0
        """The number of publications whose holds are not released."""
        self._touches: dict[bytes, Use] = {}
        self._damaged: dict[bytes, bytes] = {}
        self._held_until = 0.0
        """The time of `time.monotonic` until which writing is paused."""
        self._waits_for_reader = False
        """A reader keeps the store from being written. Nothing is lost for that, even after `_MAX_HELD_S`."""
        self._num_waiting = 0
        """The number of callers that wait until something is written."""
        self._closing = self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="kv-writer", daemon=True)
        self._thread.start()

    @property
    def error(self) -> str | None:
        """See `Housekeeping.error`."""
        return self.housekeeping.error

    @property
    def num_pending(self) -> int:
        """The number of saves of which something waits or is being written."""
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

    def add(self, save: Save, publication: Publication, holds: Sequence[Hold] = (), *, is_last: bool = False) -> None:
        """Queues a publication behind the others of its save. `holds` keep its payloads, and are released when it is
        written or lost. Its nodes are visible at once. Of a failed save only the seen prompt is written, and nothing
        once the thread has ended. With `is_last`, ends the save."""
        waiting = Waiting(save, publication, holds)
        with self._changed:
            save.is_finished |= is_last
            is_refused = self._has_ended or (save not in self._saves and len(self._saves) >= _MAX_SAVES)
            if is_refused:
                self.fail(save, "" if self._has_ended else "too many prompts wait for the disk")
            self._num_held += bool(holds)
            if save.has_failed:
                self._to_release.append((waiting, frozenset()))
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
        """Ends a save: nothing more will be added."""
        with self._changed:
            save.is_finished = True
            self._pin(save)

    def note_loss(self, save: Save, why: str) -> None:
        """Records that a part of a save is lost that nothing continues. Counts and logs the first loss of a save; an
        empty reason is not logged."""
        with self._changed:
            if save.lost is not None:
                return
            save.lost = why
            self.dropped += 1
        if why:
            log.warning("[disk-cache] %s is not saved, or not all of it: %s", save.label, why)

    def fail(self, save: Save, why: str = "", keep: int = sys.maxsize, *, keeps_prompt: bool = True) -> None:
        """Drops the waiting publications of a save but the first `keep`, and all that would come. Still writes the seen
        prompt, unless `keeps_prompt` is False. For `why` see `note_loss`."""
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
        """Drops what waits for requests that began before the last purge, or in a store that was replaced. No reader
        finds it from now on."""
        epoch = self._store.epoch
        with self._changed:
            for save in [save for save in self._saves if save.waiting and save.epoch != epoch]:
                self.fail(save, OUTDATED, 0, keeps_prompt=False)
                # The transaction will refuse what is being written. Nobody may find it meanwhile.
                self._hide([node for waiting in save.waiting for node in waiting.nodes])
        self.notes.drop_outdated()

    def drop_pages(self) -> bool:
        """Drops the last publication, of the latest save, whose pages become free then, because others need them. What
        it continues is still written. Returns False if there is none."""
        with self._changed:
            waiting = [(save, n) for save in self._saves for n in range(len(save.waiting))]
            last = next((place for place in reversed(waiting) if self._can_drop(place[0].waiting[place[1]])), None)
            if last is not None:
                self.fail(last[0], "its memory was needed before the disk had room for it", last[1])
        return last is not None

    def write_pages(self, timeout_s: float) -> bool:
        """Has waiting publications written now, because others need their pages, and waits for the first. Returns False
        if there is none or the time runs out."""
        with self._changed, self._waited_for():
            before = self._num_held
            return self._changed.wait_for(lambda: not before or self._num_held < before, timeout_s) and before > 0

    @contextmanager
    def view(self) -> Iterator[Mapping[bytes, NewNode]]:
        """Yields `pending`, whose payloads are held until the end of the block."""
        view = object()
        with self._changed:
            pending = self._views[view] = self.pending
        try:
            yield pending
        finally:
            with self._changed:
                del self._views[view]
                self._release()

    # The time of writing, and other records, for any thread.

    def pause_writing(self) -> None:
        """Pauses writing for two seconds or until `resume_writing`, because the model needs the processors for a
        prompt. Pauses end after ten seconds in all, when payloads of half the buffer's size wait, and while a caller
        waits for the writing."""
        self._hold(_PAUSE_S)

    def resume_writing(self) -> None:
        with self._changed:
            self._held_until = 0.0
            self._changed.notify_all()

    def touch(self, name: bytes, when: float, ttl_s: float | None = None, *, hits: int = 1) -> None:
        """Records the use of a stored node and of its ancestors. Uses are written together, later.

        `ttl_s`: the time to live that the request asks for, in seconds; None for the daemon's. `hits` is 0 if only the
        time to live is new.
        """
        self._use({name: Use(when, hits, recorded_ttl(ttl_s))})

    def quarantine(self, name: bytes, parent: bytes) -> None:
        """Removes a damaged node before the next publication is written."""
        with self._changed:
            self._damaged[name] = parent
            self._changed.notify_all()

    def set_model(self, model: ModelRecord, before: ModelRecord | None = None) -> None:
        """Adds a model to those that the store is served with, in the place of the one `before`. They are recorded
        before anything of them is stored, and again after a purge and in a new file of the store."""
        with self._changed:
            models = (*(one for one in self.housekeeping.models if one != before), model)
            self.housekeeping.models = models
            self._store.evictor.served = tuple(one.identity for one in models)

    def flush(self, timeout_s: float) -> bool:
        """Waits until all publications are written, notes are written or refused, and records that made writing fail
        are removed. Returns False if the time runs out first."""
        with self._changed, self._waited_for():
            return self._changed.wait_for(
                lambda: not (self.num_pending or self.notes.is_waiting or self.housekeeping.is_repairing), timeout_s
            )

    def close(self, timeout_s: float) -> bool:
        """Writes what is queued, then stops. Waits. Returns False if the time ran out and something was lost."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._join(timeout_s)
        with self._changed:
            unwritten = [save for save in self._saves if save.waiting and save.waiting[-1] is not self._writing]
            for save in unwritten:
                self.fail(save, "", 0, keeps_prompt=False)
        # The running transaction may finish, or LMDB would roll it back.
        self._join(max(timeout_s, _LAST_WRITE_S))
        num_lost = len(unwritten) + self._thread.is_alive()
        if num_lost:
            why = self._store.write_stall or f"writing took over {timeout_s:.0f} s"
            log.warning("[disk-cache] %d prompts were not saved: %s", num_lost, why)
        return not num_lost

    def _join(self, timeout_s: float) -> None:
        """Waits for the end of the thread, but not while it has waited long for a process that does not end its write
        (then no transaction of this process is running), nor while the disk does not finish a write."""
        deadline = time.monotonic() + timeout_s
        # Bound: `deadline`.
        while self._thread.is_alive() and (left_s := deadline - time.monotonic()) > 0:
            if self._store.write_waited_s > _FOREIGN_WRITE_S or self._store.write_s > _HUNG_WRITE_S:
                return
            self._thread.join(min(left_s, _JOIN_S))

    # The queue, under its lock.

    def _next(self) -> Waiting | None:
        """Returns the publication to write now, None if there is none."""
        first = next((save.waiting[0] for save in self._saves if save.waiting), None)
        return None if first is None or self._is_held(first) else first

    def _is_held(self, first: Waiting) -> bool:
        if self._closing or self._num_waiting or self.pending_bytes > self._buffer_bytes // 2:
            return False
        latest = math.inf if self._waits_for_reader else first.made_at + _MAX_HELD_S
        return time.monotonic() < min(self._held_until, latest)

    def _hold(self, seconds: float) -> bool:
        """Pauses writing. Returns whether a publication waits because of it."""
        with self._changed:
            self._held_until = time.monotonic() + seconds
            return self._next() is None and self.num_pending > 0

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
        """Pins the node that the first waiting publication of a save continues, or else the last of the `written` ones.
        At the end of the save, unpins it and removes the save from the queue."""
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
        frees_pages = any(hold.frees() for hold in waiting.holds)
        return waiting is not self._writing and frees_pages and not self._views_of(waiting)

    def _forget(self, done: Sequence[Waiting]) -> None:
        """Hides publications that were written or are lost. They are held as long as views show them."""
        self._hide([node for waiting in done for node in waiting.nodes])
        self._to_release += [(waiting, self._views_of(waiting)) for waiting in done]
        self.pending_bytes -= sum(waiting.publication.payload_bytes for waiting in done)
        self._release()

    def _hide(self, nodes: Sequence[NewNode]) -> None:
        hidden = {node.name for node in nodes}
        self.pending = MappingProxyType({name: node for name, node in self.pending.items() if name not in hidden})

    def _views_of(self, waiting: Waiting) -> frozenset[object]:
        """Returns the views that show a node of a publication."""
        views = self._views.items()
        return frozenset(view for view, shown in views if any(shown.get(n.name) is n for n in waiting.nodes))

    def _release(self) -> None:
        """Releases the holds of publications that left the queue and that no open view shows."""
        open_views = self._views.keys()
        done = [waiting for waiting, views in self._to_release if views.isdisjoint(open_views)]
        self._to_release = [entry for entry in self._to_release if not entry[1].isdisjoint(open_views)]
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
    def _using(self) -> Iterator[SmallWrite | None]:
        """Yields the write of the uses of stored nodes, None if there are none. They continue to wait if the block
        raises."""
        with self._changed:
            used, self._touches = self._touches, {}
            # The uses of nodes that are not in the store yet continue to wait.
            self._touches = {name: used.pop(name) for name in used.keys() & self.pending.keys()}
        try:
            yield touches(used) if used else None
        except BaseException:
            self._use(used)
            raise

    # The thread.

    def _run(self) -> None:
        attempt = self.housekeeping.attempt
        # Bound: `close` ends the thread.
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
            if waiting is not None and self._store.problem is None:
                attempt(self.housekeeping.record_models)
            is_done = self._write_all(waiting)
            self._wake()
            if waiting is not None:
                self._end_writing(waiting, is_done=is_done)
            attempt(self.notes.make_fit)
            if self._has_ended:
                with suppress(CacheError):
                    # What was found out about a model a moment ago. Without it, the next start finds it out again.
                    self.housekeeping.record_models()
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
        """Writes a publication and all small writes in one transaction. If that fails, tries each one alone, so that
        none keeps the others back. Returns False if the publication is to be tried again."""
        left = None if waiting is None else self._left_of(waiting)
        # Uses come first, as the publication may replace what was used.
        sources = (self._using, self.notes.writing, self.savings.writing)
        try:
            with ExitStack() as writing:
                yielded = [writing.enter_context(source()) for source in sources]
                small_writes = tuple(small_write for small_write in yielded if small_write is not None)
                if waiting is not None and left is not None:
                    self._publish(waiting.save, replace(left, small_writes=small_writes))
                elif small_writes:
                    self._store.write(small_writes)
        except Exception as error:  # noqa: BLE001 (the attempts alone report it)
            if waiting is not None:
                waiting.save.has_written_nodes = False
            if isinstance(error, StoreReplaced):
                self.housekeeping.attempt(self.housekeeping.maintain)
            for source in sources:
                self.housekeeping.attempt(partial(self._store.write_from, source))
            return waiting is None or left is None or self._publish_alone(waiting.save, left)
        if waiting is not None and left is not None and left.last_node is not None and waiting.save.has_written_nodes:
            # Nodes of a saved prompt were written. On a full disk, a small write alone may still fit.
            self.housekeeping.recover()
        return True

    def _left_of(self, waiting: Waiting) -> Publication | None:
        """Returns what is to be written of a publication, or None. Drops a save that is outdated, and one whose state
        is not finite, of which the seen prompt is still written."""
        save, publication = waiting.save, waiting.publication
        if save.epoch != self._store.epoch:
            self.fail(save, OUTDATED, 0, keeps_prompt=False)
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
        """Writes a publication. Returns False if it is to be tried again."""
        failure = self.housekeeping.attempt(partial(self._publish, save, publication))
        # A reader ends at some time, so there is no limit for the attempts.
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
