"""The stay of one sequence in an engine: its pages, and the read that fills them with stored state.

Each reply, each piece of idle work and each sequence of the draft model has one while it has memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from diskprefix.daemon.engine.fetches import ReadJob
from diskprefix.prefixstore.cache.cached_request import CachedRequest
from diskprefix.prefixstore.cache.matching import RestoreResult
from diskprefix.prefixstore.cache.restore import Restore
from diskprefix.prefixstore.kv.page_cache import PageCache
from diskprefix.prefixstore.kv.sequence import KVSequence


class Stay:
    """A sequence, from its first page to its last: it is read into (`is_reading`), computed, and over. For the engine's
    thread. As a context, it ends with the block.

    A stay may end at any time. If a thread may still write to the pages then, they belong to the thread from that time
    on, and come back when the thread returns.
    """

    def __init__(self, pages: PageCache, sequence: KVSequence) -> None:
        self.sequence = sequence
        self.job: ReadJob | None = None
        """The last read."""
        self.is_reading = False
        """True until the read has ended or is given up."""
        self.is_over = False
        self._pages = pages
        self._cached: CachedRequest | None = None
        self._restore: Restore | None = None
        """The restore whose result nobody has taken over."""
        self._is_left = False
        """The pages belong to the thread of the job."""

    def __enter__(self) -> Stay:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_stay()

    def read(
        self,
        begin: Callable[[ReadJob], None],
        job: ReadJob,
        cached: CachedRequest,
        restore: Restore,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins a job whose steps are those of `restore`, with `begin`. Calls `on_end` once the job has ended or is
        given up, unless the stay is over."""
        # The restore may take tokens back, so others must not share them.
        self._pages.set_ready(self.sequence, 0)
        self.job, self._cached, self._restore, self.is_reading = job, cached, restore, True
        job.on_end, job.close = partial(self._end_read, restore, on_end), restore.close
        begin(job)

    def take_restored(self) -> RestoreResult:
        """Returns what was read, or what the sequence had before if the read was given up. Raises the error of the
        read."""
        assert self.job is not None
        assert self._cached is not None
        assert self._restore is not None
        if self.job.error is not None:
            raise self.job.error
        restored = self._cached.adopt_restore(self._restore, gave_up=self.job.is_given_up)
        self._restore = None
        return restored

    def end_stay(self, *, is_sound: bool = True, keep: bool = False, **kept: Any) -> None:
        """Ends the stay: no prompt finds or awaits the sequence any more. A second call does nothing. For `keep` and
        `kept` see `PageCache.end_sequence`. If the state is not sound, its named blocks are forgotten."""
        if self.is_over:
            return
        self.is_over, self.is_reading = True, False
        restore, self._restore = self._restore, None
        if self.job is not None:
            self.job.give_up()
        try:
            if not is_sound:
                self._pages.forget_names(self.sequence)
        finally:
            if self.job is not None and self.job.may_write:
                self._is_left = True
                self._pages.abandon(self.sequence)
            else:
                self._pages.end_sequence(self.sequence, keep=keep, **kept)
            if restore is not None and self.job is not None and self.job.is_over:
                restore.close()

    def _end_read(self, restore: Restore, on_end: Callable[[], None], job: ReadJob) -> None:
        if job.is_late:
            restore.close()
            if self._is_left and job is self.job:
                self._pages.end_sequence(self.sequence, keep=False)
        elif not self.is_over:
            self.is_reading = False
            on_end()
