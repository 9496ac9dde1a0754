"""The work of the engine's thread while there is no request, in small steps. A request stops the work between two
steps, unless the work may go on beside requests.

A task is a generator. It yields a future of the store that it waits for, or None after a step of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import numpy as np
from msgspec import Struct, field

from diskprefix.cache.cached_request import CachedRequest
from diskprefix.cache.context import SENT, Origin
from diskprefix.cache.restore import Restore
from diskprefix.engine.device import raise_if_lost
from diskprefix.engine.fetches import ReadJob
from diskprefix.engine.idle.ahead_jobs import AheadModel
from diskprefix.engine.scheduler import IDLE_ROWS
from diskprefix.engine.served_model import ServedModel
from diskprefix.errors import CacheError, DiskStalled
from diskprefix.kv.sequence import KVSequence, Owner
from diskprefix.model.runtime import Rows
from diskprefix.printable import first_line
from diskprefix.tokens import TokenIds
from diskprefix.values import CacheOptions, Prompt

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
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="idle")
        """The thread that reads and writes the store (except for restores) and renders prompts. It may hang, because
        nothing waits for it."""
        self._reading: Future[Any] | None = None
        self._running: tuple[IdleTask, Steps] | None = None

    def work(self, *, is_beside: bool) -> bool:
        """Computes some tokens, with `is_beside` beside requests. Returns False if there is nothing to do, or if the
        work waits for the disk."""
        if self._reading is not None and not self._reading.done():
            return False
        if self._running is None and self.cache.store.reads.stalled is None:
            tasks = (task for task in self.tasks if task.goes_beside or not is_beside)
            self._running = next(((task, steps) for task in tasks if (steps := task.next_steps()) is not None), None)
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
            self._end_task()

    def give_way(self) -> None:
        """Stops the running task, because a request lacks memory."""
        if self._running is not None:
            task, _ = self._running
            self._end_task()
            task.give_up("requests need its memory")

    def _end_task(self) -> None:
        """Ends the running task, which gives its memory back."""
        if self._running is not None:
            self._running[1].close()
            self._running = self._reading = None

    def close(self) -> None:
        self._end_task()
        self._reader.shutdown(wait=False, cancel_futures=True)

    def submit_read(self, read: Callable[[], Any]) -> Future[Any]:
        reading = self._reader.submit(read)
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
        origin: Origin = SENT,
    ) -> Iterator[RestoredSequence]:
        """Yields a sequence into which the stored state of a prompt is read. With an `owner`, the sequence begins with
        the state that memory has, and its state stays in memory. `origin` is that of the prompt."""
        pages = model.pages
        sequence = pages.begin_sequence(owner, prompt.token_ids, expires_at=model.cache.expires_at(options.ttl_s))
        if not isinstance(sequence, KVSequence):
            raise CacheError("there is no memory for it")
        have = sequence.num_tokens
        # The restore may take tokens back, so others must not share them.
        pages.set_ready(sequence, 0)
        cached = CachedRequest(model.cache, prompt, options, goes_on=True, origin=origin)
        job = ReadJob(lambda: not restored.is_over, lambda _: self._end_read(model, restored))
        restore = cached.begin_restore(sequence, prompt.token_ids, have, is_wanted=job.is_wanted)
        restored = RestoredSequence(sequence, cached, restore, job)
        job.steps, job.close = restore.steps(prefetches=False), restore.close
        self._begin_read(job)
        try:
            yield restored
        finally:
            restored.is_over = True
            if job.is_over:
                keep = owner is not None and restored.is_taken
                self._end_sequence(model, restored, options, prompt.token_ids if keep else None)
            else:
                self._abandon(model, restored)

    def _abandon(self, model: AheadModel, restored: RestoredSequence) -> None:
        """Leaves a sequence to the thread that may still write to its pages. The sequence no longer counts as running,
        because it will not be computed further."""
        model.pages.abandon(restored.sequence)

    def _end_read(self, model: AheadModel, restored: RestoredSequence) -> None:
        """Lets the work go on with the state that was read. If the work was stopped meanwhile, ends its sequence
        instead, once no thread writes to the sequence any more."""
        if not restored.reading.done():
            restored.reading.set_result(None)
        if restored.job.is_over and restored.is_over and not restored.is_released:
            self._end_sequence(model, restored)

    def _end_sequence(
        self,
        model: AheadModel,
        restored: RestoredSequence,
        options: CacheOptions | None = None,
        token_ids: TokenIds | None = None,
    ) -> None:
        """Ends a sequence. The state of the first of `token_ids` stays in memory; nothing with None."""
        restored.is_released, sequence = True, restored.sequence
        restored.restore.close()
        restored.cached.leave()
        known = None if token_ids is None else token_ids[: sequence.num_tokens]
        model.pages.end_sequence(sequence, keep=known is not None, token_ids=known, options=options)


class RestoredSequence(Struct):
    """A sequence of idle work, and the restore of its stored state by a job. `reading` is done once the job has ended
    or was given up."""

    sequence: KVSequence
    cached: CachedRequest
    restore: Restore
    job: ReadJob
    reading: Future[Any] = field(default_factory=Future)
    is_taken: bool = False
    is_over: bool = False
    """The work has ended or was stopped."""
    is_released: bool = False

    def num_restored(self) -> int:
        """Returns the number of restored tokens. Call it once `reading` is done. Raises `CacheError` if the job was
        given up, and the error of the job."""
        self.reading.result()
        if self.job.is_given_up:
            raise DiskStalled("the disk did not answer in time")
        if self.job.error is not None:
            raise self.job.error
        self.is_taken = True
        return self.cached.adopt_restore(self.restore).num_tokens
