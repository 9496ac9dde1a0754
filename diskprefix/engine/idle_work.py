"""The work of the engine's thread while nobody waits: in small steps, each of which gives way to a request.

A task is a generator, which yields a read or write of the store that it waits for, or None after a step of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any, Protocol, TypeAlias

import numpy as np
from msgspec import Struct

from diskprefix.cache.cached_request import CachedRequest
from diskprefix.cache.fetch import Fetch
from diskprefix.engine.ahead_jobs import AheadModel
from diskprefix.engine.device import raise_if_lost
from diskprefix.engine.scheduler import IDLE_ROWS
from diskprefix.engine.served_model import ServedModel
from diskprefix.errors import CacheError
from diskprefix.kv.sequence import KVSequence, Owner
from diskprefix.model.runtime import Rows
from diskprefix.printable import first_line
from diskprefix.tokens import TokenIds
from diskprefix.values import CacheOptions, Prompt

Steps: TypeAlias = "Generator[Future[Any] | None]"


class IdleTask(Protocol):
    """A kind of work. `begin` returns the steps of the next piece, None if there is none; `give_up` drops a piece whose
    steps failed. A piece that is stopped begins again later."""

    def begin(self) -> Steps | None: ...

    def give_up(self, reason: str) -> None: ...


class IdleWork:
    """Runs tasks, on the engine's thread. `wake` is called, on any thread, when `work` can go on."""

    def __init__(self, served: ServedModel, wake: Callable[[], None]) -> None:
        self.served, self.cache, self._wake = served, served.cache, wake
        self.tasks: list[IdleTask] = []
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="idle")
        """Reads and writes the store, and renders."""
        self._reading: Future[Any] | None = None
        self._running: tuple[IdleTask, Steps] | None = None

    def work(self) -> bool:
        """Computes some tokens. Returns False if there is nothing to do, or if it waits for the disk."""
        if self._reading is not None and not self._reading.done():
            return False
        if self._running is None:
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
        return self.served.ahead.wait_s if self._running is None else None

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
        pages, is_over = model.pages, Event()
        sequence = pages.begin(owner, prompt.token_ids, expires_at=model.cache.expires_at(options.ttl_s))
        if not isinstance(sequence, KVSequence):
            raise CacheError("there is no memory for it")
        have = sequence.num_tokens
        # The fetch may take tokens back, so others must not begin with them.
        pages.set_ready(sequence, 0)
        cached = CachedRequest(model.cache, prompt, options, goes_on=True)
        fetch = cached.begin_fetch(sequence, prompt.token_ids, have, is_wanted=lambda: not is_over.is_set())
        restored = RestoredSequence(sequence, cached, fetch, self.read(fetch.run))

        def end(_: Future[Any]) -> None:
            fetch.close()
            cached.leave()
            keep = owner is not None and restored.is_taken
            token_ids = prompt.token_ids[: sequence.num_tokens] if keep else None
            pages.end(sequence, keep=keep, token_ids=token_ids, options=options)
            self._wake()

        try:
            yield restored
        finally:
            is_over.set()
            # The thread writes to the pages until it has returned.
            restored.reading.add_done_callback(end)


class RestoredSequence(Struct):
    sequence: KVSequence
    cached: CachedRequest
    fetch: Fetch
    reading: Future[Any]
    is_taken: bool = False

    def num_restored(self) -> int:
        """Returns the number of tokens that were restored, once they are."""
        self.reading.result()
        self.is_taken = True
        return self.cached.take(self.fetch).num_tokens
