"""Gets the rows of pictures from the store or from the encoder. The encoder runs on its own thread, in slices between
steps. The engine's thread waits for each slice, so other replies go on."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakValueDictionary

from msgspec import Struct, field

from diskprefix.daemon.engine.device import raise_if_lost
from diskprefix.daemon.engine.fetches import ReadJob
from diskprefix.daemon.engine.pictures.prompt_pictures import PromptPictures
from diskprefix.daemon.engine.pools import EnginePools
from diskprefix.prefixstore.cache.encoded_pictures import EncodedPictures, are_saved
from diskprefix.prefixstore.kv.numbers import Array
from diskprefix.prefixstore.store.epochs import Epoch
from diskprefix.prefixstore.store.reads import Patience
from diskprefix.values import CacheOptions, Picture

if TYPE_CHECKING:
    from torch import nn

    from diskprefix.runtime.pictures.vision_encoder import VisionEncoder


class _Closed(BaseException):
    """Raised inside a call that is no longer wanted."""


class SlicedCall:
    """A call on a thread of `threads`. The thread runs only while `run_slice` waits, up to the next of the
    `modules`."""

    def __init__(self, call: Callable[[], Array], modules: Iterable[nn.Module], threads: Executor) -> None:
        self._call = call
        self._may_go, self._has_paused = threading.Semaphore(0), threading.Semaphore(0)
        self._is_closed = self.is_over = False
        self.result: Array | None = None
        self.error: Exception | None = None
        self._thread = 0
        """The id of the thread, once it runs the call."""
        self._hooks = [module.register_forward_pre_hook(lambda *_: self._pause()) for module in modules]
        try:
            threads.submit(self._run)
        except BaseException:
            self._remove_hooks()
            raise

    def run_slice(self) -> None:
        """Runs the call up to the next module. At the end of the call, sets `is_over` and `result` or `error`."""
        self._may_go.release()
        self._has_paused.acquire()

    def close(self) -> None:
        """Ends the call at the next module."""
        if not self.is_over:
            self._is_closed = True
            self.run_slice()

    def _pause(self) -> None:
        if threading.get_ident() == self._thread:
            self._has_paused.release()
            self._wait()

    def _wait(self) -> None:
        self._may_go.acquire()
        if self._is_closed:
            raise _Closed

    def _run(self) -> None:
        try:
            self._thread = threading.get_ident()
            self._wait()
            self.result = self._call()
        except _Closed:
            pass
        except Exception as error:  # noqa: BLE001 (the engine raises it)
            self.error = error
        finally:
            self._thread = 0
            self._remove_hooks()
            self.is_over = True
            self._has_paused.release()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()


_PREPARED = 2
"""The most pictures whose pixels are in memory: the picture that is being encoded, and the next one."""
_Key: TypeAlias = "tuple[tuple[str, ...], bytes]"


class _Job(Struct, eq=False):
    """A picture whose rows are wanted. `wanted_by` lists the prompts, with the number of the picture in each."""

    picture: Picture
    options: CacheOptions
    epoch: Epoch
    wanted_by: list[tuple[PromptPictures, int]] = field(default_factory=list)
    inputs: dict[str, Any] | None = None
    rows: Array | None = None
    error: Exception | None = None
    call: SlicedCall | None = None
    is_preparing: bool = False
    is_encoded: bool = False
    encode_s: float = 0.0

    @property
    def share(self) -> str:
        return self.options.share

    @property
    def has_begun(self) -> bool:
        return self.is_preparing or self.inputs is not None or self.call is not None

    @property
    def is_over(self) -> bool:
        return all(pictures.is_over for pictures, _ in self.wanted_by)


class PictureRowsSource:
    """Loads the rows of pictures from the store, or encodes the pictures. For the engine's thread. `begin` begins a
    read. `wake` is called when a picture is prepared, on any thread. `beat` is called with the number of the picture's
    tokens before each slice of the encoder. An error fails the prompts that want the picture, and no others."""

    def __init__(
        self,
        encoder: VisionEncoder,
        stored: EncodedPictures,
        begin: Callable[[ReadJob], None],
        wake: Callable[[], None],
        beat: Callable[[int], None],
        pools: EnginePools,
    ) -> None:
        self._encoder, self._stored, self._begin, self._wake, self._beat = encoder, stored, begin, wake, beat
        self._jobs: dict[_Key, _Job] = {}
        self._recent: WeakValueDictionary[_Key, Array] = WeakValueDictionary()
        """Rows that are still in use by a prompt."""
        self._encoding: deque[_Job] = deque()
        """Pictures to encode, because they are not stored. The first ones are prepared."""
        self._ended: list[tuple[PromptPictures, Exception | None]] = []
        self._pools = pools

    def want(self, pictures: PromptPictures, number: int, options: CacheOptions) -> bool:
        """Returns True if another prompt has the rows of this picture; the prompt then gets them. Otherwise begins to
        load or encode the rows, unless that has begun already, and returns False."""
        picture = pictures.pictures[number]
        key = options.tenant.ids, picture.name
        if (rows := self._recent.get(key)) is not None:
            pictures.encoded[number] = rows
            return True
        if (job := self._jobs.get(key)) is None:
            job = _Job(picture, options, self._stored.epoch(options.tenant), [(pictures, number)])
            self._begin_load(job, pictures.patience)
            self._jobs[key] = job
        if are_saved(options) and not are_saved(job.options):
            job.options = options
        if (pictures, number) not in job.wanted_by:
            job.wanted_by.append((pictures, number))
        return False

    def _begin_load(self, job: _Job, patience: Patience) -> None:
        read = ReadJob(lambda: not job.is_over, partial(self._end_load, job), patience=patience)
        read.steps = iter([("picture", lambda: self._stored.load(job.picture, job.options, read.is_wanted))])
        self._begin(read)

    def ready_prompts(self) -> list[tuple[PromptPictures, Exception | None]]:
        """Returns the prompts that got rows since the last call (with None), and the prompts that get none because of
        an error."""
        ended, self._ended = self._ended, []
        return ended

    def run_slice(self) -> bool:
        """Runs a slice of the encoder. Returns False if there is nothing to do. The encoding of a picture is completed
        even if its prompts have ended: their clients may send them again. Raises `DeviceLost`."""
        for job in [
            waiting
            for waiting in self._encoding
            if waiting.call is None and (waiting.is_over or waiting.error is not None)
        ]:
            # The pixels of the picture take much memory.
            self._encoding.remove(job)
            self._end_job(job)
        for job in [*islice(self._encoding, _PREPARED)]:
            if not job.is_preparing:
                job.is_preparing = True
                with self._failing(job):
                    self._pools.preparer.submit(self._prepare, job)
        if not self._encoding or (self._encoding[0].call is None and self._encoding[0].inputs is None):
            # True if prompts got their rows, or an error, and wait for `ready_prompts`.
            return bool(self._ended)
        job = self._encoding[0]
        with self._failing(job):
            self._encode(job)
        if job.call is None:
            self._encoding.popleft()
            self._end_job(job)
        return True

    def _encode(self, job: _Job) -> None:
        """Runs a slice of the encoder for a picture. After the last one, the job has its rows and no call."""
        started = time.perf_counter()
        if job.call is None:
            inputs, job.inputs = job.inputs or {}, None
            encode = partial(self._encoder.encode, job.picture, inputs)
            job.call = SlicedCall(encode, self._encoder.slices(), self._pools.encoder)
        self._beat(job.picture.num_tokens)
        job.call.run_slice()
        job.encode_s += time.perf_counter() - started
        if job.call.is_over:
            # The call holds the rows.
            call, job.call = job.call, None
            if call.error is not None:
                raise call.error
            job.rows, job.is_encoded = call.result, call.result is not None
            if job.rows is not None:
                self._stored.save(job.picture, job.rows, job.options, job.epoch, job.encode_s)

    @contextmanager
    def _failing(self, job: _Job) -> Iterator[None]:
        """Fails a job, and so the prompts that want its picture, with an error that is raised in the block. Raises
        `DeviceLost`."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (the prompts get it)
            # The encoder's error names the picture. The cause of that error is the error of the device.
            raise_if_lost(error.__cause__ or error)
            job.error = error
            call, job.call = job.call, None
            if call is not None:
                call.close()

    def close(self) -> None:
        for job in self._encoding:
            if job.call is not None:
                job.call.close()

    def _end_load(self, job: _Job, read: ReadJob) -> None:
        if read.is_late:
            return
        job.rows, job.error = read.result, read.error
        if job.rows is not None or job.error is not None or job.is_over:
            self._end_job(job)
        else:
            self._queue(job)

    def _queue(self, job: _Job) -> None:
        """Adds a picture to encode. Shares take turns: it goes before pictures that are not begun and have more of
        their share before them."""
        num_before, turns = sum(other.share == job.share for other in self._encoding), Counter[str]()
        for index, other in enumerate(self._encoding):
            if turns[other.share] > num_before and not other.has_begun:
                self._encoding.insert(index, job)
                return
            turns[other.share] += 1
        self._encoding.append(job)

    def _prepare(self, job: _Job) -> None:
        """Decodes a picture into the inputs of the encoder. Runs on the preparer's thread."""
        try:
            job.inputs = None if job.is_over else job.picture.prepare()
        except Exception as error:  # noqa: BLE001 (the engine raises it)
            job.error = error
        job.is_preparing = job.inputs is not None
        self._wake()

    def _end_job(self, job: _Job) -> None:
        key = job.options.tenant.ids, job.picture.name
        self._jobs.pop(key, None)
        if job.rows is not None:
            self._recent[key] = job.rows
        for index, (pictures, number) in enumerate(job.wanted_by):
            pictures.encoded[number] = job.rows
            if job.is_encoded and index == 0:
                # The first prompt reports the work.
                pictures.encode_s += job.encode_s
                pictures.num_encoded += 1
            pictures.num_restored += not job.is_encoded and job.rows is not None
            self._ended.append((pictures, job.error))
