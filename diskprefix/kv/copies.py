"""Copies between main memory and the memory that the state of a sequence lives in.

Where that is main memory too, a copy is made at once. A device with streams makes copies beside what it computes, by
way of pinned buffers: one stream loads, one saves, and computation stays on the device's current stream. No copy blocks
the thread that computes. The device itself waits for a layer's state before that layer's attention reads it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from diskprefix.kv.transfer import bytes_of, tensor_over
from diskprefix.store.codec.planes import Bytes

COPY_BYTES = 4 << 20
"""The most bytes of a copy, unless a row is longer: fewer take longer to queue than to make on a fast bus."""
_NUM_BUFFERS = 16
"""Pinned buffers of a device. Each reader fills one; the others are on their way."""
STATES = -1
"""Stands for the states of recurrent layers in place of the number of a layer. A step needs them first."""

Later: TypeAlias = deque[Callable[[], None]]
"""Copies out of a device that are still to be made, on a thread that may wait for it."""


class Copies(Protocol):
    """The copies of one sequence. `is_direct`: its memory is main memory."""

    is_direct: bool

    def fill(self, part: torch.Tensor, write: Callable[[Bytes], None], layers: Iterable[int]) -> None:
        """Has `write` fill a part of memory, shape [rows, …], which holds state of `layers`. `write` gets bytes of
        shape [rows, row_bytes]; if it raises, nothing is copied. For any thread; different threads may fill at once."""

    def read(self, payload: Bytes, part: torch.Tensor) -> None:
        """Copies values to flat bytes in main memory, and waits until they are there. Waits for a device."""

    def read_later(self, payload: Bytes, values: torch.Tensor, later: Later) -> None:
        """Copies values as they are now, but does not wait: what is left to do is added to `later`."""

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        """Returns values in main memory on the device, for what the thread computes from now on."""

    def arrive(self, layer: int | None = None) -> None:
        """Has the device wait for what was filled of a layer, or of all, before it computes what comes next. Required
        before that memory is read, written or freed. Does not block."""

    def seconds(self) -> float | None:
        """Returns the time that the last restore took on the device; 0 where there is none, None if it goes on."""


def copies_for(device: torch.device) -> Copies:
    """Returns the copies of a new sequence."""
    if device.type == "cpu":
        return DirectCopies()
    return StreamCopies(_lane(device)) if device.type in ("cuda", "xpu") else BlockingCopies(device)


class DirectCopies:
    """Copies within main memory, by numpy: torch would use all compute threads for each, while the model computes."""

    is_direct = True

    def fill(self, part: torch.Tensor, write: Callable[[Bytes], None], layers: Iterable[int]) -> None:  # noqa: ARG002
        write(bytes_of(part))

    def read(self, payload: Bytes, part: torch.Tensor) -> None:
        source = bytes_of(part)
        payload.reshape(source.shape)[...] = source

    def read_later(self, payload: Bytes, values: torch.Tensor, later: Later) -> None:  # noqa: ARG002
        self.read(payload, values)

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def arrive(self, layer: int | None = None) -> None:
        """Does nothing: what was filled is there."""

    def seconds(self) -> float | None:
        return 0.0


class BlockingCopies(DirectCopies):
    """Copies to a device without streams (Apple's). Each waits for the device."""

    is_direct = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def fill(self, part: torch.Tensor, write: Callable[[Bytes], None], layers: Iterable[int]) -> None:  # noqa: ARG002
        staged = np.empty((len(part), part[:1].numel() * part.dtype.itemsize), np.uint8)
        write(staged)
        part.copy_(torch.from_numpy(staged).view(part.dtype).view(part.shape))

    def read(self, payload: Bytes, part: torch.Tensor) -> None:
        if len(payload):
            tensor_over(payload.data, part.dtype).view(part.shape).copy_(part)

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self._device)


class Streams(Protocol):
    """Two queues of copies on a device, in order each, beside its computation: that of the calling thread's stream.

    Events are those of `torch.Event`. One thread at a time loads, and one saves.
    """

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Returns main memory, uint8, that the device copies from and to by itself."""

    def follow(self) -> Any:
        """Has later loads wait for what is queued for computation. Returns an event at this point of the loads."""

    def load(self, part: torch.Tensor, staged: torch.Tensor) -> Any:
        """Queues a copy of pinned memory to the device. Returns its event."""

    def save(self, staged: torch.Tensor, part: torch.Tensor, after: Any) -> Any:
        """Queues a copy to pinned memory, behind what is queued for computation and behind the event `after` (None:
        no other). Returns its event."""

    def wait(self, event: Any) -> None:
        """Has what is computed from now on wait for an event."""

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        """See `Copies`."""


class TorchStreams:
    """The streams of torch, for CUDA, ROCm and XPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._loads, self._saves = torch.Stream(device), torch.Stream(device)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        # Otherwise torch uses the first device, which may not be the model's.
        with torch.accelerator.device_index(self._loads.device_index):
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def follow(self) -> Any:
        self._loads.wait_stream(torch.accelerator.current_stream(self._device))
        return self._recorded(self._loads)

    def load(self, part: torch.Tensor, staged: torch.Tensor) -> Any:
        with self._loads:
            part.copy_(staged, non_blocking=True)
        return self._recorded(self._loads)

    def save(self, staged: torch.Tensor, part: torch.Tensor, after: Any) -> Any:
        self._saves.wait_stream(torch.accelerator.current_stream(self._device))
        if after is not None:
            self._saves.wait_event(after)
        with self._saves:
            staged.copy_(part, non_blocking=True)
        return self._recorded(self._saves)

    def wait(self, event: Any) -> None:
        torch.accelerator.current_stream(self._device).wait_event(event)

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        # torch reuses the pinned copy after that on the device was made.
        return values.pin_memory().to(self._device, non_blocking=True)

    def _recorded(self, stream: torch.Stream) -> Any:
        return stream.record_event(torch.Event(self._device, enable_timing=True))


class PinnedBuffers:
    """A bounded number of pinned buffers, which are reused in the order in which they were given back."""

    def __init__(self, make: Callable[[int], torch.Tensor], count: int = _NUM_BUFFERS, size: int = COPY_BYTES) -> None:
        self._make, self._size = make, size
        self._free: SimpleQueue[tuple[torch.Tensor | None, Any]] = SimpleQueue()
        for _ in range(count):
            self._free.put((None, None))

    def take(self, num_bytes: int) -> torch.Tensor:
        """Returns a buffer of at least so many bytes. Waits until one is free, and until what was last copied from it
        is on the device. A longer one than all others is made for one use."""
        if num_bytes > self._size:
            return self._make(num_bytes)
        buffer, event = self._free.get()
        try:
            if event is not None:
                event.synchronize()
            return self._make(self._size) if buffer is None else buffer
        except BaseException:
            self._free.put((buffer, event))
            raise

    def give(self, buffer: torch.Tensor, event: Any = None) -> None:
        """Gives a buffer back, which is free after `event`."""
        if len(buffer) == self._size:
            self._free.put((buffer, event))


class Lane:
    """The streams of a device with their buffers, which its sequences share."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.buffers = PinnedBuffers(streams.pinned)
        self.loading, self.saving = threading.Lock(), threading.Lock()


@cache
def _lane(device: torch.device) -> Lane:
    return Lane(TorchStreams(device))


class StreamCopies:
    """Copies of one sequence on the streams of its device."""

    is_direct = False

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._coming: dict[int, Any] = {}
        """By layer, the event of its last copy, unless the device waits for it already. Loads are made in order."""
        self._began: Any = None
        self._last: Any = None

    def __deepcopy__(self, _memo: object) -> StreamCopies:
        return StreamCopies(self._lane)

    def fill(self, part: torch.Tensor, write: Callable[[Bytes], None], layers: Iterable[int]) -> None:
        lane, num_bytes, event = self._lane, part.numel() * part.dtype.itemsize, None
        buffer = lane.buffers.take(num_bytes)
        try:
            staged = buffer[:num_bytes]
            write(staged.numpy().reshape(len(part), -1))
            with lane.loading:
                if not self._coming:
                    # Memory may have been moved, cleared, or read by an earlier sequence.
                    self._began = lane.streams.follow()
                event = self._last = lane.streams.load(part, staged.view(part.dtype).view(part.shape))
                self._coming.update(dict.fromkeys(layers, event))
        finally:
            lane.buffers.give(buffer, event)

    def read(self, payload: Bytes, part: torch.Tensor) -> None:
        lane, part = self._lane, part.flatten() if part.is_contiguous() else part
        row_bytes = part[:1].numel() * part.dtype.itemsize
        num_rows = max(1, COPY_BYTES // max(row_bytes, 1))
        queued: deque[tuple[torch.Tensor, Any, Bytes]] = deque()
        try:
            for start in range(0, len(part) if row_bytes else 0, num_rows):
                rows = part[start : start + num_rows]
                out = payload[start * row_bytes : (start + len(rows)) * row_bytes]
                buffer = lane.buffers.take(len(out))
                with lane.saving:
                    staged = buffer[: len(out)].view(part.dtype).view(rows.shape)
                    queued.append((buffer, lane.streams.save(staged, rows, self._last), out))
                if len(queued) == 2:
                    # The next one is copied beside this.
                    self._land(queued)
            while queued:
                self._land(queued)
        finally:
            for buffer, event, _ in queued:
                lane.buffers.give(buffer, event)

    def _land(self, queued: deque[tuple[torch.Tensor, Any, Bytes]]) -> None:
        buffer, event, out = queued[0]
        event.synchronize()
        out[...] = buffer.numpy()[: len(out)]
        self._lane.buffers.give(buffer)
        queued.popleft()

    def read_later(self, payload: Bytes, values: torch.Tensor, later: Later) -> None:
        later.append(partial(self.read, payload, values.clone()))

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        return self._lane.streams.upload(values)

    def arrive(self, layer: int | None = None) -> None:
        if layer is None and self._coming:
            self._lane.streams.wait(self._last)
            self._coming.clear()
        elif layer is not None and (event := self._coming.get(layer)) is not None:
            self._lane.streams.wait(event)
            del self._coming[layer]

    def seconds(self) -> float | None:
        if self._last is None:
            return 0.0
        return self._began.elapsed_time(self._last) / 1e3 if self._last.query() else None


def finish(later: Later) -> None:
    """Makes the copies that were left for later."""
    while later:
        later.popleft()()
