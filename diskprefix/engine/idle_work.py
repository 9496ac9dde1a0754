"""The work of the engine's thread while nobody waits: in small steps, each of which gives way to a request.

A task is a generator, which yields a read or write of the store that it waits for, or None after a step of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import numpy as np
from msgspec import Struct, field

from diskprefix.cache.cached_request import CachedRequest
from diskprefix.engine.ahead_jobs import AheadModel
from diskprefix.engine.device import raise_if_lost
from diskprefix.engine.fetches import RunningFetch
from diskprefix.engine.scheduler import IDLE_ROWS
from diskprefix.engine.served_model import ServedModel
from diskprefix.errors import CacheError, DiskStalled
from diskprefix.kv.sequence import KVSequence, Owner
from diskprefix.model.runtime import Rows
from diskprefix.printable import first_line
from diskprefix.tokens import TokenIds
from diskprefix.values import CacheOptions, Prompt

_STALLED_S = 1.0
"""Seconds between two looks whether the disk answers."""

Steps: TypeAlias = "Generator[Future[Any] | None]"


class IdleTask(Protocol):
    """A kind of work. `begin` returns the steps of the next piece, None if there is none; `give_up` drops a piece whose
    steps failed. A piece that is stopped begins again later. `wait_s` are the seconds until `begin` may return a piece
    without an event, None if it will not."""

    @property
    def wait_s(self) -> float | None: ...

    def begin(self) -> Steps | None: ...

    def give_up(self, reason: str) -> None: ...


class IdleWork:
    """Runs tasks, on the engine's thread. `begin_read` begins a fetch. `wake` is called, on any thread, when `work` can
    go on."""

    def __init__(
        self, served: ServedModel, begin_read: Callable[[RunningFetch], None], wake: Callable[[], None]
    ) -> None:
        self.served, self.cache, self._begin_read, self._wake = served, served.cache, begin_read, wake
        self.tasks: list[IdleTask] = []
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="idle")
        """Reads and writes the store but for restores, and renders. Nothing waits for it: it may hang."""
        self._reading: Future[Any] | None = None
        self._running: tuple[IdleTask, Steps] | None = None

    def work(self) -> bool:
        """Computes some tokens. Returns False if there is nothing to do, or if it waits for the disk."""
        if self._reading is not None and not self._reading.done():
            return False
        if self._running is None and self.cache.store.reads.stalled is None:
            begun = ((task, steps) for task in self.tasks if (steps := task.begin()) is not None)
            self._running = next(begun, None)
        if self._running is None:
            return False
        task, steps = self._running
        try:
            self._reading = next(steps)
        except StopIteration:
            self._running = self._reading = None
        except Exception as error:  # noqa: BLE001 (what fails here fails no request)
            raise_if_lost(error)
            self._running = self._reading = None
            task.give_up(first_line(error))
        return True

    @property
    def wait_s(self) -> float | None:
        """The seconds until there may be work; None if there is none, or a read will `wake`."""
        waits = [wait_s for task in self.tasks if (wait_s := task.wait_s) is not None]
        if self._running is not None or not waits:
            return None
        # Nothing begins while the disk does not answer.
        return min(waits) if self.cache.store.reads.stalled is None else max(_STALLED_S, *waits)

    def stop(self) -> None:
        """Gives all memory back, because a request has come."""
        if self._running is not None:
            self._running[1].close()
            self._running = self._reading = None

    def close(self) -> None:
        self.stop()
        self._reader.shutdown(wait=False, cancel_futures=True)

    def read(self, read: Callable[[], Any]) -> Future[Any]:
        reading = self._reader.submit(read)
        reading.add_done_callback(lambda _: self._wake())
        return reading

    def compute(self, model: AheadModel, sequence: KVSequence, token_ids: TokenIds) -> None:
        """Computes one step: the next of the `token_ids` that the sequence lacks."""
        rows = token_ids[sequence.num_tokens : sequence.num_tokens + IDLE_ROWS]
        model.runtime.run([Rows(sequence, rows.astype(np.int64))])

    @contextmanager
    def restoring(
        self, model: AheadModel, prompt: Prompt, options: CacheOptions, owner: Owner | None = None
    ) -> Iterator[RestoredSequence]:
        """Gives a context with a sequence into which the stored state of a prompt is read. If it has an `owner`, it
        begins with what memory has, and its state stays there."""
        pages = model.pages
        sequence = pages.begin(owner, prompt.token_ids, expires_at=model.cache.expires_at(options.ttl_s))
        if not isinstance(sequence, KVSequence):
            raise CacheError("there is no memory for it")
        have = sequence.num_tokens
        # The fetch may take tokens back, so others must not begin with them.
        pages.set_ready(sequence, 0)
        cached = CachedRequest(model.cache, prompt, options, goes_on=True)
        read = RunningFetch(lambda: not restored.is_over, lambda _: self._end_read(model, restored))
        restored = RestoredSequence(sequence, cached, read)
        read.fetch = cached.begin_fetch(sequence, prompt.token_ids, have, is_wanted=read.is_wanted)
        read.steps = read.run_steps(prefetches=False)
        self._begin_read(read)
        try:
            yield restored
        finally:
            restored.is_over = True
            if read.is_over:
                keep = owner is not None and restored.is_taken
                self._release(model, restored, options, prompt.token_ids if keep else None)
            else:
                self._abandon(model, restored)

    def _abandon(self, model: AheadModel, restored: RestoredSequence) -> None:
        """Leaves a sequence to the thread that may still write to its pages. No request waits for it any more: nobody
        goes on computing it."""
        model.pages.abandon(restored.sequence)

    def _end_read(self, model: AheadModel, restored: RestoredSequence) -> None:
        """Lets the work go on with what was read. If it was stopped meanwhile, ends its sequence instead, once no
        thread writes to it any more."""
        if not restored.reading.done():
            restored.reading.set_result(None)
        if restored.read.is_over and restored.is_over and not restored.is_released:
            self._release(model, restored)

    def _release(
        self,
        model: AheadModel,
        restored: RestoredSequence,
        options: CacheOptions | None = None,
        token_ids: TokenIds | None = None,
    ) -> None:
        """Ends a sequence. The state of the first of `token_ids` stays in memory; nothing with None."""
        restored.is_released, sequence = True, restored.sequence
        restored.read.fetch.close()
        restored.cached.leave()
        known = None if token_ids is None else token_ids[: sequence.num_tokens]
        model.pages.end(sequence, keep=known is not None, token_ids=known, options=options)


class RestoredSequence(Struct):
    """A sequence of idle work, and the read of its stored state. `reading` is done when the read has ended, or is given
    up."""

    sequence: KVSequence
    cached: CachedRequest
    read: RunningFetch
    reading: Future[Any] = field(default_factory=Future)
    is_taken: bool = False
    is_over: bool = False
    """The work has ended, or was stopped."""
    is_released: bool = False

    def num_restored(self) -> int:
        """Returns the number of tokens that were restored, once they are. Raises `CacheError` if the read was given
        up."""
        self.reading.result()
        if self.read.is_given_up:
            raise DiskStalled("the disk did not answer in time")
        if self.read.error is not None:
            raise self.read.error
        self.is_taken = True
        return self.cached.take(self.read.fetch).num_tokens
