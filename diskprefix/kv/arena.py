"""The memory that a sequence's state lives in, laid out so that a block moves with one copy.

The layers that transformers sees are views of it. The memory is kept between requests: pages that were touched once are
several times faster to fill.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from diskprefix.errors import ContextTooLong
from diskprefix.kv.caches import ArenaCache, ModelCache, RwkvStates, XlstmStates
from diskprefix.kv.capturer import Capturer
from diskprefix.kv.layers import StateLayer, TokenLayer, make_layer
from diskprefix.kv.layout import CacheKind, Layout, is_out_of_memory
from diskprefix.kv.step import TILE, Run, Step, computing
from diskprefix.settings import format_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Bytes: TypeAlias = npt.NDArray[np.uint8]

_CAPACITY_STEP = 1024
_PAD_TOKENS = 64
"""Keeps the distance between heads off powers of two, which would map them to the same cache sets."""


def tensor_over(payload: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Returns a flat tensor over the bytes of `payload`, without a copy. It is good while `payload` lives."""
    # `torch.frombuffer` warns about every read-only buffer, such as a view of the store's memory map: hence ctypes.
    address = np.frombuffer(payload, dtype=np.uint8).ctypes.data
    return torch.frombuffer((ctypes.c_uint8 * len(payload)).from_address(address), dtype=dtype)


def bytes_for(layout: Layout, num_tokens: int) -> int:
    """Returns the least memory that a `KVArena` with room for `num_tokens` tokens takes."""
    capacity = -(-num_tokens // _CAPACITY_STEP) * _CAPACITY_STEP + _PAD_TOKENS
    return layout.bytes_per_token * capacity + layout.state_bytes


class KVArena:
    """The state of one sequence. Not thread-safe: it belongs to the engine thread.

    `free_bytes` returns how much memory of `device` may still be taken. Groups are counted as in payloads
    (`store.pieces`): those of per-token tensors, then those of states.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        free_bytes: Callable[[], int] | None = None,
        capacity_step: int = _CAPACITY_STEP,
    ) -> None:
        self.layout = layout
        self.device = device
        self._free_bytes = free_bytes
        self._is_exact_at_tokens = layout.exact_at == "token"
        self._capacity_step = TILE * -(-capacity_step // TILE) if self._is_exact_at_tokens else capacity_step
        self._capacity = 0
        # A tile must not reach beyond the memory.
        self._unused_tokens = _PAD_TOKENS if self._is_exact_at_tokens else 0
        self._num_tokens = 0
        self._clear_to = 0
        """Behind the last token there are zeros up to this one."""
        self._marked: tuple[int, list[torch.Tensor]] = 0, []
        self.capturer: Capturer | None = None
        """The thread that copies state out of this memory."""
        self.complete_from = 0
        """The first token of which every group has its state. Of layers with a window, a restore loads no more than
        the model still looks at."""
        self._tensors: list[torch.Tensor] = []
        """By group of per-token tensors, shape [tensors, 1, heads, capacity, head_dim]."""
        self._rows: list[Bytes] = []
        """The same memory as bytes, shape [rows, capacity × head_dim × itemsize], where it is main memory."""
        layers = [make_layer(spec) for spec in layout.layers]
        self._token_layers = [layer for layer in layers if isinstance(layer, TokenLayer)]
        self._state_layers = [layer for layer in layers if isinstance(layer, StateLayer)]
        self.layers = layers
        self._states = self._allocate_states()
        for layer in self._token_layers:
            layer.grow = self.reserve
        self.cache = make_cache(layout.cache_kind, layers, lambda: self.num_tokens)

    def __getstate__(self) -> dict[str, Any]:
        """What `copy.deepcopy` of a cache copies: nothing is captured from a copy."""
        return vars(self) | {"capturer": None}

    @property
    def capacity(self) -> int:
        """Tokens that there is memory for."""
        return self._capacity

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""
        return self._size_bytes(self._capacity + self._unused_tokens if self._capacity else 0) + self.layout.state_bytes

    @property
    def marked_tokens(self) -> int:
        """Where `rewind` returns to."""
        return self._marked[0]

    @property
    def num_tokens(self) -> int:
        return self._token_layers[0].length if self._token_layers else self._num_tokens

    def forward(self, model: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
        """Runs [1, n] more tokens. Returns the next-token logits, shape [vocab], in the model's dtype."""
        start, end = self.num_tokens, self.num_tokens + token_ids.shape[1]
        call: dict[str, Any] = {self.layout.cache_argument: self.cache.argument(model), "use_cache": True}
        step = Step((self.begin(end - start),)) if self._is_exact_at_tokens else None
        if "position_ids" in self.layout.options:
            # Not every model counts on from its cache.
            call["position_ids"] = torch.arange(start, end, device=token_ids.device).unsqueeze(0)
        if "logits_to_keep" in self.layout.options:
            call["logits_to_keep"] = 1
        with computing(step):
            output = model(input_ids=token_ids, **call)
        self.cache.take(output)
        # States do not count tokens.
        self._num_tokens = end
        assert self._num_tokens == self.num_tokens, "the model must add all tokens of a step to its state"
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def begin(self, num_rows: int) -> Run:
        """Makes the memory ready for a step of so many tokens, of a model that is exact at every token."""
        start, end = self.num_tokens, self.num_tokens + num_rows
        self.reserve(end)
        self._clear_behind(end)
        return Run(start, num_rows)

    def _clear_behind(self, end: int) -> None:
        """Writes zeros from `end` to the end of its tile. Attention multiplies what lies there by weights of 0, so that
        nothing else would do if it is not finite: an infinity of another sequence would show."""
        border = -(-end // TILE) * TILE
        if border > self._clear_to:
            for tensor in self._tensors:
                tensor[:, :, :, max(end, self._clear_to) : border] = 0
            self._clear_to = border

    def settle(self, *, drop: bool = False) -> None:
        """Waits for the captures of this memory, which must be over before what they read is overwritten.

        With `drop`, those for which the write buffer has no room are dropped and counted: then no disk is waited for,
        and it takes no longer than copying what the buffer holds.
        """
        if self.capturer is not None:
            self.capturer.settle(self, drop=drop)

    def truncate(self, num_tokens: int) -> None:
        """Takes the first `num_tokens` tokens in memory for the sequence, and the states for theirs."""
        assert num_tokens <= self._capacity or num_tokens == 0 or not self._token_layers
        self._num_tokens = self._clear_to = num_tokens
        if not num_tokens:
            self._marked = 0, []
            self.complete_from = 0
        for token_layer in self._token_layers:
            token_layer.set_length(num_tokens)
        for state_layer in self._state_layers:
            state_layer.set_has_state(num_tokens > 0)

    def skip(self, group: int, start: int, end: int) -> None:
        """Says that a restore loads nothing of a group for the tokens from `start` to `end`, which the window has
        passed. Writes zeros to the end of the last tile of them: attention multiplies them by weights of 0."""
        if start >= end:
            return
        self.complete_from = max(self.complete_from, end)
        if self._is_exact_at_tokens:
            self._tensors[group][:, :, :, max(start, end - end % TILE) : end] = 0

    def mark(self) -> None:
        """Remembers this point for `rewind`. States are copied, as they are updated in place."""
        self._marked = self.num_tokens, [tensor.clone() for tensor in self._states]

    def copy_from(self, other: KVArena, num_tokens: int) -> None:
        """Takes over the first `num_tokens` tokens of another sequence, for which there is room here; with states,
        those that `other` has marked."""
        for mine, its in zip(self._tensors, other._tensors, strict=True):
            mine[:, :, :, :num_tokens] = its[:, :, :, :num_tokens]
        self.truncate(num_tokens)
        self.complete_from = other.complete_from
        for state, marked in zip(self._states, other._marked[1], strict=True):
            state.copy_(marked)

    def rewind(self) -> None:
        """Returns to the marked point: the tokens before it were never overwritten."""
        num_tokens, states = self._marked
        self.truncate(num_tokens)
        for state, marked in zip(self._states, states, strict=True):
            state.copy_(marked)

    def reserve(self, num_tokens: int) -> None:
        """Makes room for `num_tokens` tokens in all; what is valid stays. Raises `ContextTooLong` if it does not fit.

        After `truncate(0)` the old memory is given back before the new is taken.
        """
        if num_tokens <= self._capacity or not self._token_layers:
            return
        # The longest: in the middle of a step, some layers have its tokens already.
        valid = max(layer.length for layer in self._token_layers)
        capacity = self._affordable_capacity(num_tokens, valid)
        if not valid:
            self._release()
        # Reading threads are not in inference mode, and may not write to tensors that were made in it.
        with torch.inference_mode(False):
            grown = self._allocate(num_tokens, capacity)
            for before, after in zip(self._tensors, grown, strict=False):
                after[:, :, :, :valid] = before[:, :, :, :valid]
            # Only now: a capture may be reading beside us.
            self._tensors, self._capacity = grown, capacity - self._unused_tokens
            self._bind()

    def fill(self, position: int, num_tokens: int, group: int, rows: slice, write: Callable[[Bytes], None]) -> None:
        """Has `write` fill rows of a group; of per-token tensors for tokens `position` … `position + num_tokens`.

        A row is one head of one tensor, or a part of a state. `write` gets bytes of shape [rows, row_bytes], each row
        contiguous. Different rows may be filled from different threads at once. On the CPU numpy copies: torch would
        set a team of threads to work for each piece while the model computes beside it.
        """
        if group >= len(self.layout.groups):
            self._fill_state(group - len(self.layout.groups), rows, write)
            return
        form = self.layout.groups[group]
        token_bytes = form.head_dim * form.dtype.itemsize
        if self._rows:
            write(self._rows[group][rows, position * token_bytes : (position + num_tokens) * token_bytes])
            return
        part = self._tensors[group].flatten(0, 2)[rows, position : position + num_tokens]
        _write_through(write, part)

    def logits_from(self, payload: Bytes) -> torch.Tensor:
        """Returns the logits in a tail's payload, shape [vocab], on the arena's device. Takes `payload` over."""
        return torch.from_numpy(payload.reshape(-1)).view(self.layout.logits_dtype).to(self.device)

    def read_tokens(self, position: int, num_tokens: int) -> memoryview:
        """Returns a copy of those tokens' state as a payload. May run beside a thread that writes later tokens."""
        payload = np.empty(self.layout.bytes_per_token * num_tokens, dtype=np.uint8)
        start = 0
        for group, tensor in zip(self.layout.groups, self._tensors, strict=True) if num_tokens else ():
            end = start + group.bytes_per_token * num_tokens
            _copy_into(payload[start:end], tensor[:, :, :, position : position + num_tokens])
            start = end
        return payload.data

    def read_states(self) -> memoryview:
        """Returns a copy of the states as in a checkpoint's payload. For the engine thread: each step changes them."""
        payload = np.empty(self.layout.state_bytes, dtype=np.uint8)
        start = 0
        for group, tensor in zip(self.layout.states, self._states, strict=True):
            _copy_into(payload[start : start + group.num_bytes], tensor)
            start += group.num_bytes
        return payload.data

    def logits_bytes(self, logits: torch.Tensor) -> memoryview:
        """Returns next-token logits, shape [vocab], as in a tail's payload."""
        payload = np.empty(self.layout.logits_bytes, dtype=np.uint8)
        tensor_over(payload.data, self.layout.logits_dtype).copy_(logits)
        return payload.data

    def _fill_state(self, number: int, rows: slice, write: Callable[[Bytes], None]) -> None:
        group = self.layout.states[number]
        part = self._states[number].view(len(group.specs) * group.rows_each, -1)[rows]
        if _in_main_memory(part):
            write(_bytes_of(part))
        else:
            _write_through(write, part)

    def _affordable_capacity(self, num_tokens: int, valid: int) -> int:
        """Grows by half at least, so that a long reply copies the arena seldom; if that does not fit, by the need."""
        exact = self._rounded(num_tokens)
        generous = max(exact, self._rounded(self._capacity + self._capacity // 2))
        if self._free_bytes is None:
            return generous
        # While tokens are valid, the old memory is held until they are copied.
        room = self._free_bytes() + (0 if valid else self._size_bytes(self._capacity))
        if self._size_bytes(exact) > room:
            raise self._too_long(num_tokens, room)
        return generous if self._size_bytes(generous) <= room else exact

    def _rounded(self, num_tokens: int) -> int:
        return -(-num_tokens // self._capacity_step) * self._capacity_step + _PAD_TOKENS

    def _size_bytes(self, capacity: int) -> int:
        return self.layout.bytes_per_token * capacity

    def _too_long(self, num_tokens: int, room: int | None) -> ContextTooLong:
        needed = format_size(self._size_bytes(self._rounded(num_tokens)))
        found = "more than there is" if room is None else f"{format_size(room)} are available"
        return ContextTooLong(
            f"{num_tokens} tokens need {needed} of KV memory, {found}; "
            "use a shorter prompt or a machine with more memory"
        )

    def _allocate(self, num_tokens: int, capacity: int) -> list[torch.Tensor]:
        shapes = [(len(g.specs), 1, g.heads, capacity, g.head_dim) for g in self.layout.groups]
        try:
            return [self._zeros(shape, g.dtype) for g, shape in zip(self.layout.groups, shapes, strict=True)]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise self._too_long(num_tokens, None) from error

    def _allocate_states(self) -> list[torch.Tensor]:
        with torch.inference_mode(False):
            states = [self._zeros((len(g.specs), 1, *g.shape), g.dtype) for g in self.layout.states]
        for group, tensor in zip(self.layout.states, states, strict=True):
            for spec, state in zip(group.specs, tensor, strict=True):
                self.layers[spec.layer].bind_state(spec.part, spec.index, state.detach())
        for layer in self._state_layers:
            layer.set_has_state(False)
        return states

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        # numpy asks the kernel for huge pages, torch does not: without them a restore loses a quarter of its speed.
        memory = np.empty(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(memory).view(dtype).view(shape).zero_()

    def _release(self) -> None:
        self._tensors, self._rows, self._capacity = [], [], 0
        for group in self.layout.groups:
            for spec in group.specs:
                self.layers[spec.layer].bind(spec.part, torch.empty(1, 1, 0, 1, dtype=spec.dtype, device=self.device))

    def _bind(self) -> None:
        in_main_memory = all(map(_in_main_memory, self._tensors))
        self._rows = [_bytes_of(t.flatten(0, 2).flatten(1)) for t in self._tensors] if in_main_memory else []
        for group, tensor in zip(self.layout.groups, self._tensors, strict=True):
            for spec, part in zip(group.specs, tensor, strict=True):
                # Detached: who runs the model outside `no_grad` writes to it with autograd looking on.
                self.layers[spec.layer].bind(spec.part, part.detach())


def _copy_into(payload: Bytes, part: torch.Tensor) -> None:
    """Copies a tensor's values to flat bytes in main memory."""
    if _in_main_memory(part):
        source = _bytes_of(part)
        payload.reshape(source.shape)[...] = source
    elif len(payload):
        tensor_over(payload.data, part.dtype).view(part.shape).copy_(part)


class _Staging(threading.local):
    """Main memory on the way to another device, kept for each thread because fresh pages are slow. It is page-locked
    for CUDA, which copies once more otherwise."""

    memory: torch.Tensor | None = None

    def take(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Returns bytes, shape [num_bytes], uint8, that are good until the next call in the thread."""
        if self.memory is None or len(self.memory) < num_bytes:
            self.memory = torch.empty(num_bytes, dtype=torch.uint8)
            if device.type == "cuda":
                # Otherwise the first GPU is used, with which the model may have nothing to do.
                with torch.cuda.device(device):
                    self.memory = self.memory.pin_memory()
        return self.memory[:num_bytes]


_staging = _Staging()


def _write_through(write: Callable[[Bytes], None], part: torch.Tensor) -> None:
    """Has `write` fill a tensor of shape [rows, …] on another device, by way of main memory."""
    staged = _staging.take(part.numel() * part.dtype.itemsize, part.device)
    write(staged.numpy().reshape(len(part), -1))
    part.copy_(staged.view(part.dtype).view(part.shape))


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    return tensor.view(torch.uint8).numpy()


def _in_main_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def make_cache(kind: CacheKind, layers: list[Any], num_tokens: Callable[[], int]) -> ModelCache:
    """Returns a cache over `layers`. `num_tokens` returns how many tokens the sequence has."""
    match kind:
        case "dynamic":
            return ArenaCache(layers, num_tokens)
        case "minimax":
            # It inherits from a class in the model's own code, which takes a while to import.
            from diskprefix.kv.minimax import MiniMaxArenaCache

            return MiniMaxArenaCache(layers, num_tokens)
        case "rwkv":
            return RwkvStates(layers[0])
        case "xlstm":
            return XlstmStates(layers)
