"""The work of the engine's thread while there is no request, in small steps. A request stops the work between two
steps, unless the work may go on beside requests.

A task is a generator. It yields a future of the store that it waits for, or None after a step of the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
from msgspec import Struct, field

from diskprefix.daemon.engine.device import raise_if_lost
from diskprefix.daemon.engine.fetches import ReadJob
from diskprefix.daemon.engine.idle.ahead_jobs import AheadModel
from diskprefix.daemon.engine.scheduler import IDLE_ROWS
from diskprefix.daemon.engine.served_model import ServedModel
from diskprefix.daemon.engine.stay import Stay
from diskprefix.errors import CacheError, DiskStalled
from diskprefix.prefixstore.cache.cached_request import CachedRequest
from diskprefix.prefixstore.cache.context import SENT, PromptOrigin
from diskprefix.prefixstore.kv.sequence import KVSequence, Owner
from diskprefix.printable import first_line
from diskprefix.runtime.contract import Rows
from diskprefix.tokens import TokenIds
from diskprefix.values import CacheOptions, Prompt

log = logging.getLogger("diskprefix")

_STALLED_S = 1.0
"""Seconds between two checks whether the disk answers."""

Steps: TypeAlias = "Generator[Future[Any] | None]"


class IdleTask(Protocol):
    """A kind of idle work. `next_steps` returns the steps of the next piece of work, None if there is none. `give_up`
    drops a piece whose steps failed. A piece that was stopped begins again later. `wait_s` is the time in seconds after
    which `next_steps` may return a piece without any event; None if it will not. `goes_beside`: the work begins and
    goes on beside requests, because it has waited for too long."""

    @property
    def wait_s(self) -> float | None: ...

    @property
    def goes_beside(self) -> bool: ...

    def next_steps(self) -> Steps | None: ...

    def give_up(self, reason: str) -> None: ...


class IdleWork:
    """Runs idle tasks on the engine's thread. `begin_read` begins a restore. `wake` is called, on any thread, when
    `work` can go on."""

    def __init__(self, served: ServedModel, begin_read: Callable[[ReadJob], None], wake: Callable[[], None]) -> None:
        self.served, self.cache, self._begin_read, self._wake = served, served.cache, begin_read, wake
        self.tasks: list[IdleTask] = []
        self._reading: Future[Any] | None = None
        self._running: tuple[IdleTask, Steps] | None = None

    def work(self, *, is_beside: bool) -> bool:
        """Computes some tokens, with `is_beside` beside requests. Returns False if there is nothing to do, or if the
        work waits for the disk."""
        if self._reading is not None and not self._reading.done():
            return False
        try:
            if self._running is None and self.cache.store.reads.stalled is None:
                tasks = (task for task in self.tasks if task.goes_beside or not is_beside)
                begun = ((task, steps) for task in tasks if (steps := task.next_steps()) is not None)
                self._running = next(begun, None)
            if self._running is None:
                return False
            self._reading = next(self._running[1])
        except StopIteration:
            self._running = self._reading = None
        except Exception as error:
            # What fails here fails no request.
            raise_if_lost(error)
            running, self._running, self._reading = self._running, None, None
            if running is None:
                log.exception("[engine] idle work does not begin")
                return False
            running[0].give_up(first_line(error))
        return True

    @property
    def wait_s(self) -> float | None:
        """The seconds until there may be work; None if there is no work, or if a read will call `wake`."""
        waits = [wait_s for task in self.tasks if (wait_s := task.wait_s) is not None]
        if self._running is not None or not waits:
            return None
        # Nothing begins while the disk does not answer.
        wait_s = min(waits)
        return wait_s if self.cache.store.reads.stalled is None else max(_STALLED_S, wait_s)

    @property
    def goes_beside(self) -> bool:
        """Returns whether there may be work beside requests."""
        return any(task.goes_beside for task in self.tasks)

    def stop(self) -> None:
        """Stops the running task, because a request has come, unless it goes on beside requests."""
        if self._running is not None and not self._running[0].goes_beside:
            self.close()

    def give_way(self) -> None:
        """Stops the running task, because a request lacks memory."""
        if self._running is not None:
            task, _ = self._running
            self.close()
            task.give_up("requests need its memory")

    def close(self) -> None:
        """Ends the running task, which gives its memory back."""
        running, self._running, self._reading = self._running, None, None
        try:
            if running is not None:
                running[1].close()
        except Exception as error:
            raise_if_lost(error)
            log.exception("[engine] idle work did not end well")

    def submit_read(self, read: Callable[[], Any]) -> Future[Any]:
        reading = self.served.pools.idle.submit(read)
        reading.add_done_callback(lambda _: self._wake())
        return reading

    def compute_step(self, model: AheadModel, sequence: KVSequence, token_ids: TokenIds) -> None:
        """Computes one step: the next tokens of `token_ids` that the sequence lacks. On the grid, the step is the one
        that a prefill takes."""
        start, size, is_exact = (
            sequence.num_tokens,
            model.cache.settings.block_size,
            model.cache.layout.exact_at == "token",
        )
        rows = token_ids[start : start + (IDLE_ROWS if is_exact else size - start % size)]
        model.runtime.run([Rows(sequence, rows.astype(np.int64))])

    @contextmanager
    def restoring(
        self,
        model: AheadModel,
        prompt: Prompt,
        options: CacheOptions,
        owner: Owner | None = None,
        origin: PromptOrigin = SENT,
        *,
        of_any_build: bool = False,
    ) -> Iterator[RestoredSequence]:
        """Yields a sequence into which the stored state of a prompt is read. With an `owner`, the sequence begins with
        the state that memory has, and its state stays in memory. `origin` is that of the prompt. For
        `of_any_build` see `RequestContext`."""
        token_ids, pages = prompt.token_ids, model.pages
        sequence = pages.begin_sequence(owner, token_ids, expires_at=model.cache.expires_at(options.ttl_s))
        if not isinstance(sequence, KVSequence):
            raise CacheError("there is no memory for it")
        stay, is_taken = Stay(pages, sequence), False
        try:
            cached = CachedRequest(
                model.cache, prompt, options, is_prefix_only=True, origin=origin, of_any_build=of_any_build
            )
            restored = RestoredSequence(stay, cached)
            try:
                job = ReadJob(lambda: True)
                restore = cached.begin_restore(sequence, token_ids, sequence.num_tokens, is_wanted=job.is_wanted)
                job.steps = restore.steps(prefetches=False)
                stay.read(self._begin_read, job, cached, restore, partial(restored.reading.set_result, None))
                yield restored
            finally:
                is_taken = restored.is_taken
                cached.leave()
        finally:
            known = token_ids[: sequence.num_tokens] if owner is not None and is_taken else None
            stay.end_stay(keep=known is not None, token_ids=known, options=options)


class RestoredSequence(Struct):
    """A sequence of idle work. `reading` is done once its stored state was read, or the read was given up."""

    stay: Stay
    cached: CachedRequest
    reading: Future[Any] = field(default_factory=Future)
    is_taken: bool = False

    @property
    def sequence(self) -> KVSequence:
        return self.stay.sequence

    def num_restored(self) -> int:
        """Returns the number of restored tokens. Call it once `reading` is done. Raises `CacheError` if the read was
        given up, and the error of the read."""
        self.reading.result()
        assert self.stay.job is not None
        if self.stay.job.is_given_up:
            raise DiskStalled("the disk did not answer in time")
        restored = self.stay.take_restored()
        self.is_taken = True
        return restored.num_tokens
