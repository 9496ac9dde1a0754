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

from diskprefix.errors import PrefixGone, StoreFull
from diskprefix.store.housekeeping import Housekeeping
from diskprefix.store.notes import Notes
from diskprefix.store.savings import SavingsLog
from diskprefix.store.schema import ModelRecord
from diskprefix.store.store import Publication, Store
from diskprefix.store.write_queue import WriteQueue

log = logging.getLogger("diskprefix")

_TOUCH_INTERVAL_S = 1.0
"""The interval in which uses of nodes and counts of requests are written, and the folder is checked. A kill loses at
most the uses of this time."""
_LAST_WRITE_S = 10.0


class Writer(WriteQueue):
    """Owns the writing thread."""

    def __init__(self, store: Store, *, buffer_bytes: int, ttl_s: float = 0.0) -> None:
        """For `ttl_s` see `Housekeeping`."""
        super().__init__(store.evictor, buffer_bytes)
        self._store = store
        self.house = Housekeeping(store, ttl_s)
        self.notes = Notes(store, self._wake)
        self.savings = SavingsLog(store)
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
        with self._changed:
            before, self._held_at = self._page_bytes, None
            self._changed.notify_all()
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

    def _can_drop(self, publication: Publication) -> bool:
        return publication.page_bytes > 0 and publication.frees() and not self._views_of(publication)

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
            late = [self._queue.pop() for _ in range(1, len(self._queue))]
            lost = sum(publication.chain.lose() for publication in late)
            self.dropped += lost
        for publication in late:
            self._forget(publication)
        # The transaction that is being written may finish, or LMDB would roll it back.
        self._thread.join(max(timeout_s, _LAST_WRITE_S))
        lost += self.is_alive
        if lost:
            log.warning("[disk-cache] %d prompts were not saved: writing took over %.0f s", lost, timeout_s)
        return not lost

    @property
    def is_alive(self) -> bool:
        """Returns whether the thread still runs: another process may hold LMDB's lock. Keep the store open then."""
        return self._thread.is_alive()

    def _run(self) -> None:
        attempt = self.house.attempt
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._next() or self._damaged or self._closing or self.notes.is_waiting, _TOUCH_INTERVAL_S
                )
                publication = self._next()
                damaged, self._damaged = self._damaged, {}
                self._has_ended = self._closing and publication is None
            for name, parent in damaged.items():
                attempt(partial(self.house.quarantine, name, parent))
            self._write_all(publication)
            self._wake()
            if publication is not None:
                self._forget(publication)
            attempt(self.notes.make_fit)
            attempt(self.house.notice_purge)
            if self._has_ended:
                attempt(self._store.record_written)
                return
            if publication is None or self._store.problem is not None:
                attempt(self.house.maintain)

    def _write_all(self, publication: Publication | None) -> None:
        """Writes what waits in one transaction. If that fails, each part is tried alone: none keeps the others back."""
        if publication is not None:
            self.house.attempt(partial(self._check, publication))
        if publication is not None and publication.chain.is_lost:
            # What it continues is lost. That the prompt was seen counts all the same.
            publication = publication.without_nodes() if publication.prompt is not None else None
        # Uses come first, as the publication may replace what was used.
        sources = (self._using, self.notes.writing, self.savings.writing)
        try:
            with ExitStack() as writing:
                found = [writing.enter_context(source()) for source in sources]
                parts = tuple(part for part in found if part is not None)
                if publication is not None:
                    self._publish(replace(publication, parts=parts))
                elif parts:
                    self._store.write(parts)
        except Exception:  # noqa: BLE001 (what fails alone is told)
            for source in sources:
                self.house.attempt(partial(self._store.write_from, source))
            if publication is not None:
                self.house.attempt(partial(self._publish_alone, publication))

    def _check(self, publication: Publication) -> None:
        """Loses what is not finite, or was lost while it waited, and all that continues it."""
        if publication.is_lost:
            publication.chain.lose()
        elif not publication.chain.is_lost and not publication.is_finite:
            self._tell_loss(publication.chain.lose, "its state is not finite")

    def _tell_loss(self, lose: Callable[[str], bool], why: str) -> None:
        if lose(why):
            self.dropped += 1
            log.warning("[disk-cache] a prompt is not saved, or not all of it: %s", why)

    def _publish_alone(self, publication: Publication) -> None:
        try:
            self._publish(publication)
        except BaseException as error:
            # The publications of a chain count as one that is dropped.
            self.dropped += publication.chain.lose()
            if not isinstance(error, StoreFull | PrefixGone):
                raise
            log.warning("[disk-cache] not saved: %s", error)

    def _publish(self, publication: Publication) -> None:
        self.evicted += self._store.publish(publication)
        if publication.nodes:
            publication.chain.has_nodes = True
        if publication.last_node is not None and publication.chain.has_nodes:
            # A whole prompt was saved. Of a full disk, a small publication alone would say nothing.
            self.house.recover()
        self.written_bytes += publication.payload_bytes
        self.written_tokens += sum(len(node.token_ids) for node in publication.nodes)
