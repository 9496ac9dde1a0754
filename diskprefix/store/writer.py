"""The background writer: a thread that writes publications to the store, in order.

A failure of the store is logged once and counted, and the daemon continues to serve.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from diskprefix.errors import CacheError, LargerThanStore, PrefixGone, ReaderStays, StoreReplaced
from diskprefix.store.housekeeping import Housekeeping
from diskprefix.store.notes import Notes
from diskprefix.store.savings import SavingsLog
from diskprefix.store.schema import ModelRecord
from diskprefix.store.store import OUTDATED, Publication, Store
from diskprefix.store.write_queue import WriteQueue
from diskprefix.units import counted

log = logging.getLogger("diskprefix")

_TOUCH_INTERVAL_S = 1.0
"""The interval in which uses of nodes and counts of requests are written, and the folder is checked. A kill loses at
most the uses of this time."""
_LAST_WRITE_S = 10.0
_RETRY_S = 1.0
"""The time between two attempts to write a publication while the store fails."""


class Writer(WriteQueue):
    """Owns the writing thread."""

    def __init__(self, store: Store, *, buffer_bytes: int, ttl_s: float = 0.0) -> None:
        """For `ttl_s` see `Housekeeping`."""
        super().__init__(store.evictor, buffer_bytes)
        self._store = store
        self.house = Housekeeping(store, ttl_s)
        self.notes = Notes(store, self._wake)
        self.savings = SavingsLog(store)
        self.house.on_forget.append(self.drop_outdated)
        self.dropped = self.evicted = self.written_bytes = self.written_tokens = 0
        self._thread = threading.Thread(target=self._run, name="kv-writer", daemon=True)
        self._thread.start()

    @property
    def error(self) -> str | None:
        """The store's last failure; None once a prompt is saved again."""
        return self.house.error

    def add_model(self, model: ModelRecord) -> None:
        """Adds a model to those that the store is served with. They are recorded when nothing waits to be written,
        and again if a new file replaces the store's."""
        with self._changed:
            self.house.models += (model,)

    def write_pages(self, timeout_s: float) -> bool:
        """Has what waits in pages written now, because others need them. Waits until some of it is. Returns False if
        there is none or the time runs out."""
        with self._changed, self._waited_for():
            before = self._page_bytes
            return self._changed.wait_for(lambda: not before or self._page_bytes < before, timeout_s) and before > 0

    def drop_pages(self) -> bool:
        """Loses the latest publication that waits in pages which nobody else uses, because others need them. What was
        submitted before it is written, and that its prompt was seen counts all the same. Returns False if there is
        none."""
        with self._changed:
            # The first one is being written.
            number = next((n for n in range(len(self._queue) - 1, 0, -1) if self._can_drop(self._queue[n])), None)
            if number is None:
                return False
            lost = self._queue[number]
            self._queue[number] = replace(lost.without_nodes(), page_bytes=0, on_done=lambda: None, is_lost=True)
            self._tell_loss(lost.chain.break_off, "its memory was needed before the disk had room for it")
        self._forget(lost)
        return True

    def drop_outdated(self) -> None:
        """Loses what waits for requests that began before the last purge, or in a store that was replaced: nobody finds
        it from now on. For any thread."""
        epoch = self._store.epoch
        with self._changed:
            late = [one for one in self._queue if one.chain.epoch != epoch]
            current = [one for one in self._queue if one.chain.epoch == epoch]
            self.pending = MappingProxyType({node.name: node for one in current for node in one.nodes})
            # The first one may be being written: the transaction refuses it.
            gone = [one for one in late if one is not self._queue[0]]
            for publication in gone:
                self._queue.remove(publication)
            lost = sum(one.chain.lose(OUTDATED) for one in late)
            self.dropped += lost
        for publication in gone:
            self._forget(publication)
        self.notes.drop_outdated()
        if lost:
            log.warning("[disk-cache] not saved, %s: %s", counted(lost, "waiting prompt"), OUTDATED)

    def _can_drop(self, publication: Publication) -> bool:
        return publication.page_bytes > 0 and publication.frees() and not self._views_of(publication)

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything that was submitted is written, and notes as far as the store takes them; and until
        records that made writing fail are removed. Returns False if the time runs out first."""
        with self._changed, self._waited_for():
            return self._changed.wait_for(
                lambda: not (self._queue or self.notes.is_waiting or self.house.is_repairing), timeout_s
            )

    def close(self, timeout_s: float) -> bool:
        """Writes what is queued, then stops. Returns False if the time ran out and publications were lost."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            return True
        with self._changed:
            late = [self._queue.pop() for _ in range(1, len(self._queue))]
            lost = sum(publication.chain.lose() for publication in late)
            self.dropped += lost
        for publication in late:
            self._forget(publication)
        # The transaction that is being written may finish, or LMDB would roll it back.
        self._thread.join(max(timeout_s, _LAST_WRITE_S))
        lost += self._thread.is_alive()
        if lost:
            log.warning("[disk-cache] %d prompts were not saved: writing took over %.0f s", lost, timeout_s)
        return not lost

    @property
    def is_alive(self) -> bool:
        """Returns whether the store is still used: the thread runs, as another process may hold LMDB's lock, or damage
        is looked for. Keep the store open then."""
        return self._thread.is_alive() or self.house.is_reading

    def _run(self) -> None:
        attempt = self.house.attempt
        while True:
            attempt(self.house.notice_purge)
            with self._changed:
                self._changed.wait_for(
                    lambda: self._next() or self._damaged or self._closing or self.notes.is_waiting, _TOUCH_INTERVAL_S
                )
                publication = self._next()
                damaged, self._damaged = self._damaged, {}
                self._has_ended = self._closing and publication is None
            for name, parent in damaged.items():
                attempt(partial(self.house.quarantine, name, parent))
            attempt(self.house.remove_damaged)
            is_done = self._write_all(publication)
            self._wake()
            if publication is not None and is_done:
                self._forget(publication)
            attempt(self.notes.make_fit)
            if self._has_ended:
                attempt(self._store.record_written)
                return
            if publication is None or self._store.problem is not None:
                attempt(self.house.maintain)

    def _write_all(self, publication: Publication | None) -> bool:
        """Writes what waits in one transaction. If that fails, each part is tried alone: none keeps the others back.
        Returns False if the publication is to be tried again: a store that fails may not do so for long."""
        left = None if publication is None else self._left_of(publication)
        # Uses come first, as the publication may replace what was used.
        sources = (self._using, self.notes.writing, self.savings.writing)
        try:
            with ExitStack() as writing:
                found = [writing.enter_context(source()) for source in sources]
                parts = tuple(part for part in found if part is not None)
                if left is not None:
                    self._publish(replace(left, parts=parts))
                elif parts:
                    self._store.write(parts)
        except Exception as error:  # noqa: BLE001 (what fails alone is told)
            if isinstance(error, StoreReplaced):
                self.house.attempt(self.house.maintain)
            for source in sources:
                self.house.attempt(partial(self._store.write_from, source))
            return left is None or self._publish_alone(left)
        return True

    def _left_of(self, publication: Publication) -> Publication | None:
        """Returns what is to be written of a publication, None if nothing is. That the prompt was seen counts also if
        its state is lost."""
        self.house.attempt(partial(self._check, publication))
        if not publication.chain.is_lost:
            return publication
        is_seen = publication.prompt is not None and publication.chain.epoch == self._store.epoch
        return publication.without_nodes() if is_seen else None

    def _check(self, publication: Publication) -> None:
        """Loses what is outdated, not finite, or was lost while it waited, and all that continues it."""
        chain = publication.chain
        if publication.is_lost:
            chain.lose()
        elif chain.epoch != self._store.epoch:
            self._tell_loss(chain.lose, OUTDATED)
        elif not chain.is_lost and not publication.is_finite:
            self._tell_loss(chain.lose, "its state is not finite")

    def _tell_loss(self, lose: Callable[[str], bool], why: str) -> None:
        if lose(why):
            self.dropped += 1
            log.warning("[disk-cache] a prompt is not saved, or not all of it: %s", why)

    def _publish_alone(self, publication: Publication) -> bool:
        """Returns what `_write_all` does."""
        chain, failure = publication.chain, self.house.attempt(partial(self._publish, publication))
        # Readers end, whenever that is. What waits for that needs no other attempt in time.
        self._waits_for_reader = isinstance(failure, (ReaderStays, StoreReplaced))
        if isinstance(failure, (PrefixGone, LargerThanStore)):
            self._tell_loss(chain.lose, str(failure))
        elif isinstance(failure, CacheError) and self._hold(_RETRY_S):
            return False
        elif failure is not None:
            # The publications of a chain count as one that is dropped.
            self.dropped += chain.lose()
        return True

    def _publish(self, publication: Publication) -> None:
        self.evicted += self._store.publish(publication)
        self._waits_for_reader = False
        if publication.nodes:
            publication.chain.has_nodes = True
        if publication.last_node is not None and publication.chain.has_nodes:
            # A whole prompt was saved. Of a full disk, a small publication alone would say nothing.
            self.house.recover()
        self.written_bytes += publication.payload_bytes
        self.written_tokens += sum(len(node.token_ids) for node in publication.nodes)
