"""Our cache layers for transformers: preallocated, and laid out so that a block moves with one copy.

`KVArena` owns the memory, one tensor per group of equal forms, [tensors, 1, heads, capacity, head_dim]; the layers that
transformers sees are views of it. Nothing grows token by token (transformers' own layer copies the whole cache with
`torch.cat` at every step). The memory is kept between requests: pages that were touched once are several times
faster to fill (the first touch of fresh memory costs a page fault).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from diskprefix.errors import ContextTooLong
from diskprefix.kv.layout import Group, Layout, is_out_of_memory
from diskprefix.settings import format_size

Bytes: TypeAlias = npt.NDArray[np.uint8]

_CAPACITY_STEP = 1024
_PAD_TOKENS = 64
"""Keeps the distance between heads off powers of two, which would map them to the same cache sets."""


def tensor_over(payload: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor over the bytes of `payload`, without a copy; good while `payload` lives.

    `torch.frombuffer` warns about every read-only buffer, such as a view of the store's memory map: hence ctypes.
    """
    address = np.frombuffer(payload, dtype=np.uint8).ctypes.data
    return torch.frombuffer((ctypes.c_uint8 * len(payload)).from_address(address), dtype=dtype)


class FullAttentionLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of every token so far, written in place into views of the arena.

    `keys` and `values` are [1, heads, capacity, head_dim]; the first `length` tokens are valid.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def bind(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Point the layer at new memory; the caller has copied what is valid."""
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The arena binds the layer before its first use; there is nothing to do here."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [1, heads, n, head_dim] and answer views of all that is valid."""
        end = self.length + key_states.shape[-2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.length = 0


class KVArena:
    """The KV memory of one sequence. Not thread-safe: it belongs to the engine thread.

    `free_bytes` tells how much memory of `device` may still be taken; without it, there is no limit but the machine's.
    """

    def __init__(self, layout: Layout, device: torch.device, free_bytes: Callable[[], int] | None = None) -> None:
        self._layout = layout
        self.device = device
        self._free_bytes = free_bytes
        self._capacity = 0
        self._marked = 0
        self._tensors: list[torch.Tensor] = []
        self._rows: list[Bytes] = []
        """The same memory by group, shape [rows, capacity × head_dim × itemsize], where it is main memory."""
        self._layers = [FullAttentionLayer() for _ in range(layout.num_layers)]
        self.cache = Cache(layers=self._layers)
        """What the model takes as `past_key_values`."""

    @property
    def capacity(self) -> int:
        """Tokens that there is memory for."""
        return self._capacity

    @property
    def num_tokens(self) -> int:
        return self._layers[0].length

    def truncate(self, num_tokens: int) -> None:
        """Forget all tokens from `num_tokens` on."""
        assert num_tokens <= self._capacity or num_tokens == 0
        for layer in self._layers:
            layer.length = num_tokens

    def mark(self) -> None:
        """Remember this length for `rewind`."""
        self._marked = self.num_tokens

    def rewind(self) -> None:
        """Go back to the marked length: what lies before it was never overwritten."""
        self.truncate(self._marked)

    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` tokens in all; what is valid stays. New memory is touched here, once.

        Raises `ContextTooLong` if there is not enough memory. While nothing is valid, the old memory is given back
        before the new is taken: call `truncate(0)` first, once nobody reads the arena, and half of the peak is saved.
        """
        if num_tokens <= self._capacity:
            return
        capacity = self._affordable_capacity(num_tokens)
        if not self.num_tokens:
            self._release()
        # Outside inference mode, whatever the caller is in: reading threads are not in it, and torch lets nobody else
        # write to tensors that were made in it.
        with torch.inference_mode(False):
            grown = self._allocate(num_tokens, capacity)
            for before, after in zip(self._tensors, grown, strict=False):
                after[:, :, :, : self.num_tokens] = before[:, :, :, : self.num_tokens]
            # Only now: a capture may be reading beside us.
            self._tensors, self._capacity = grown, capacity
            self._bind()

    def fill(self, position: int, num_tokens: int, group: int, rows: slice, write: Callable[[Bytes], None]) -> None:
        """Have `write` fill rows of a group for tokens `position` … `position + num_tokens`.

        A row is one head of one tensor. `write` gets bytes of shape [rows, num_tokens × head_dim × itemsize], each row
        contiguous: the arena's own memory where that is main memory. Different rows may be filled from different
        threads at once. On the CPU all this is numpy's: torch would set a team of threads to work for each copy, which
        is slower for one piece and disastrous while the model computes beside it.
        """
        form = self._layout.groups[group]
        token_bytes = form.head_dim * form.dtype.itemsize
        if self._rows:
            write(self._rows[group][rows, position * token_bytes : (position + num_tokens) * token_bytes])
            return
        part = self._tensors[group].flatten(0, 2)[rows, position : position + num_tokens]
        staged = np.empty((len(part), num_tokens * token_bytes), dtype=np.uint8)
        write(staged)
        part.copy_(tensor_over(staged.data.cast("B"), part.dtype).view(part.shape))

    def logits_from(self, payload: Bytes) -> torch.Tensor:
        """The next-token logits that a tail ends with, shape [vocab], on the arena's device. Takes `payload` over."""
        return torch.from_numpy(payload.reshape(-1)).view(self._layout.logits_dtype).to(self.device)

    def read_block(self, position: int, num_tokens: int, logits: torch.Tensor | None) -> memoryview:
        """A copy of those tokens' state as a raw payload (see `store.schema`), `logits` (shape [vocab]) after a tail's.

        May run beside the engine thread as long as nothing before `position + num_tokens` is written.
        """
        size = self._layout.payload_bytes(num_tokens, with_logits=logits is not None)
        payload = np.empty(size, dtype=np.uint8)
        start = 0
        for group, tensor in zip(self._layout.groups, self._tensors, strict=True):
            part = tensor[:, :, :, position : position + num_tokens]
            end = start + group.bytes_per_token * num_tokens
            if self._rows:
                source = _bytes_of(part)
                payload[start:end].reshape(source.shape)[...] = source
            elif num_tokens:
                tensor_over(payload[start:end].data, part.dtype).view(part.shape).copy_(part)
            start = end
        if logits is not None:
            tensor_over(payload[start:].data, self._layout.logits_dtype).copy_(logits)
        return payload.data

    def _affordable_capacity(self, num_tokens: int) -> int:
        """Larger by half at least, so that a long reply does not copy the arena again and again; if that is too much,
        what is needed."""
        exact = _rounded(num_tokens)
        generous = max(exact, _rounded(self._capacity + self._capacity // 2))
        if self._free_bytes is None:
            return generous
        # While tokens are valid, the old memory is held until they are copied.
        room = self._free_bytes() + (0 if self.num_tokens else self._size_bytes(self._capacity))
        if self._size_bytes(exact) > room:
            raise self._too_long(num_tokens, room)
        return generous if self._size_bytes(generous) <= room else exact

    def _size_bytes(self, capacity: int) -> int:
        return self._layout.bytes_per_token * capacity

    def _too_long(self, num_tokens: int, room: int | None) -> ContextTooLong:
        needed = format_size(self._size_bytes(_rounded(num_tokens)))
        found = "more than there is" if room is None else f"{format_size(room)} are available"
        return ContextTooLong(
            f"{num_tokens} tokens need {needed} of KV memory, {found}; "
            "use a shorter prompt or a machine with more memory"
        )

    def _allocate(self, num_tokens: int, capacity: int) -> list[torch.Tensor]:
        try:
            return [self._zeros(group, capacity) for group in self._layout.groups]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise self._too_long(num_tokens, None) from error

    def _zeros(self, group: Group, capacity: int) -> torch.Tensor:
        shape = (len(group.specs), 1, group.heads, capacity, group.head_dim)
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=group.dtype, device=self.device)
        # numpy asks the kernel for huge pages, torch does not: without them a restore loses a quarter of its speed.
        memory = np.empty(math.prod(shape) * group.dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(memory).view(group.dtype).view(shape).zero_()

    def _release(self) -> None:
        self._tensors, self._rows, self._capacity = [], [], 0
        for layer in self._layers:
            layer.bind(torch.empty(0), torch.empty(0))

    def _bind(self) -> None:
        views = {
            (spec.layer, spec.part): tensor[i]
            for group, tensor in zip(self._layout.groups, self._tensors, strict=True)
            for i, spec in enumerate(group.specs)
        }
        in_main_memory = all(map(_in_main_memory, self._tensors))
        self._rows = [_bytes_of(t.flatten(0, 2).flatten(1)) for t in self._tensors] if in_main_memory else []
        for i, layer in enumerate(self._layers):
            layer.bind(views[i, "keys"], views[i, "values"])


def _rounded(num_tokens: int) -> int:
    """The capacity that is allocated for `num_tokens` tokens."""
    return -(-num_tokens // _CAPACITY_STEP) * _CAPACITY_STEP + _PAD_TOKENS


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    """The memory of a tensor in main memory, its last dimension in bytes."""
    return tensor.view(torch.uint8).numpy()


def _in_main_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"
