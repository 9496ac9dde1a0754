"""The memory that a sequence's state lives in, laid out so that a block moves with one copy.

The layers that transformers sees are views of it. The memory is kept between requests, because pages that were touched
once are several times faster to fill.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from diskprefix.errors import ContextTooLong
from diskprefix.kv.caches import ArenaCache
from diskprefix.kv.capturer import Capturer
from diskprefix.kv.group import GroupMemory, group_bytes, zeros
from diskprefix.kv.layers import StateLayer, TokenLayer, make_layer
from diskprefix.kv.layout import Layout, is_out_of_memory
from diskprefix.kv.sizes import CAPACITY_STEP, longest_within, whole_tiles
from diskprefix.kv.step import Run, Step, computing
from diskprefix.kv.transfer import fill, read
from diskprefix.store.codec.planes import Bytes
from diskprefix.units import format_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def bytes_for(layout: Layout, num_tokens: int, block_size: int | None = None) -> int:
    """Returns the least memory of a `KVArena` with room for `num_tokens` tokens."""
    capacity = -(-num_tokens // CAPACITY_STEP) * CAPACITY_STEP
    return sum(group_bytes(group, capacity, block_size) for group in layout.groups) + layout.state_bytes


def tokens_within(layout: Layout, num_bytes: int, most: int, block_size: int) -> int:
    """Returns the longest sequence, at most `most` tokens, whose `KVArena` fits in so many bytes."""
    return longest_within(num_bytes, lambda count: bytes_for(layout, count, block_size), most, CAPACITY_STEP)


class KVArena:
    """The state of one sequence. Not thread-safe: it belongs to the engine thread.

    `free_bytes` returns the memory of `device` that may still be allocated. Groups are numbered as in payloads
    (`store.pieces`): first those of per-token tensors, then those of states. With `block_size`, groups with a window
    slide, and keep blocks of so many tokens until they are complete (`kv.group`). Without, they keep all tokens.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        free_bytes: Callable[[], int] | None = None,
        capacity_step: int = CAPACITY_STEP,
        block_size: int | None = None,
    ) -> None:
        self.layout = layout
        self.device = device
        self._free_bytes, self._block_size = free_bytes, block_size
        self._is_exact_at_tokens = layout.exact_at == "token"
        self._capacity_step = whole_tiles(capacity_step) if self._is_exact_at_tokens else capacity_step
        self.capacity = 0
        """The number of tokens of a sequence that there is memory for, or for their windows."""
        self._num_tokens = 0
        self._marked: tuple[int, list[torch.Tensor]] = 0, []
        self.capturer: Capturer | None = None
        """The thread that copies state out of this memory."""
        self.memory = [GroupMemory(group, device, block_size) for group in layout.groups]
        """The memory of per-token tensors, by group."""
        layers = [make_layer(spec) for spec in layout.layers]
        self.token_layers = [layer for layer in layers if isinstance(layer, TokenLayer)]
        self._state_layers = [layer for layer in layers if isinstance(layer, StateLayer)]
        self.layers = layers
        self.states = self._allocate_states()
        """The memory of states, by group."""
        self.cache = ArenaCache(layers, lambda: self.num_tokens)

    @property
    def num_bytes(self) -> int:
        return sum(memory.num_bytes for memory in self.memory) + self.layout.state_bytes

    @property
    def complete_from(self) -> int:
        """The first token that every group has the state of."""
        return max((memory.complete_from for memory in self.memory), default=0)

    def slides(self, num_tokens: int) -> bool:
        """Returns True if windows have moved, or will move before the sequence has so many tokens."""
        return self.complete_from > 0 or not all(memory.has_room(num_tokens) for memory in self.memory)

    @property
    def marked_tokens(self) -> int:
        """The number of tokens at the marked point, to which `rewind` returns."""
        return self._marked[0]

    @property
    def num_tokens(self) -> int:
        return self.token_layers[0].length if self.token_layers else self._num_tokens

    def forward(self, model: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
        """Runs [1, n] more tokens. Returns the next-token logits, shape [vocab], in the model's dtype."""
        return self.compute(model, token_ids, 1)[-1]

    def compute(self, model: PreTrainedModel, token_ids: torch.Tensor, num_logits: int) -> torch.Tensor:
        """Runs [1, n] more tokens. Returns the logits behind the last `num_logits` of them, shape [num_logits,
        vocab]."""
        start, end = self.num_tokens, self.num_tokens + token_ids.shape[1]
        run = self.begin_step(end - start)
        call: dict[str, Any] = {self.layout.cache_argument: self.cache, "use_cache": True}
        step = Step((run,)) if self._is_exact_at_tokens else None
        if "position_ids" in self.layout.options:
            # Not every model counts positions from its cache.
            call["position_ids"] = torch.arange(start, end, device=self.device).unsqueeze(0)
        if "logits_to_keep" in self.layout.options:
            call["logits_to_keep"] = num_logits
        with computing(step):
            output = model(input_ids=token_ids.to(self.device), **call)
        self.end_step(run)
        logits: torch.Tensor = output.logits[0, -num_logits:]
        return logits

    def begin_step(self, num_rows: int) -> Run:
        """Prepares the memory for a step of `num_rows` tokens."""
        start, end = self.num_tokens, self.num_tokens + num_rows
        self.make_room(end)
        return Run(start, num_rows)

    def end_step(self, run: Run) -> None:
        """Counts the tokens of a step: states do not."""
        self._num_tokens = run.end
        assert self._num_tokens == self.num_tokens, "the model must add all tokens of a step to its state"

    def make_room(self, end: int) -> None:
        """Makes room for tokens up to `end`. Windows move if that is needed."""
        self.reserve(end)
        if not all(memory.has_room(end) for memory in self.memory):
            self._slide(end)

    def _slide(self, end: int) -> None:
        start = self.num_tokens
        self.settle(drop=True)
        for memory in self.memory:
            if not memory.has_room(end):
                memory.slide(memory.needed_from(start), start, end)
        self._bind()

    def settle(self, *, drop: bool = False) -> None:
        """Waits for the captures of this memory, which must end before the memory is overwritten. With `drop`, those
        that the write buffer has no room for are dropped and counted. Then this waits for no disk."""
        if self.capturer is not None:
            self.capturer.settle(self, drop=drop)

    def truncate(self, num_tokens: int) -> None:
        """Keeps the first `num_tokens` tokens, which must be `held`. The states must be those after these tokens."""
        assert num_tokens <= self.capacity or num_tokens == 0 or not self.token_layers
        self._num_tokens = num_tokens
        if num_tokens < self.marked_tokens:
            self._marked = 0, []
        for memory in self.memory:
            memory.truncate(num_tokens)
        self._bind()
        for token_layer in self.token_layers:
            token_layer.set_length(num_tokens)
        for state_layer in self._state_layers:
            state_layer.set_has_state(num_tokens > 0)

    def take_back(self, num_tokens: int) -> None:
        """Forgets the last tokens of the last step, so that `num_tokens` remain. For models without states."""
        assert not self._state_layers, "a state cannot be taken back"
        for layer in self.token_layers:
            layer.set_length(num_tokens)
        self._num_tokens = num_tokens

    def held(self, num_tokens: int) -> int:
        """Returns how many of the first `num_tokens` tokens a sequence can continue from. If the window before them has
        slid out, that is the marked point, or 0."""
        points = (num_tokens, min(num_tokens, self.marked_tokens))
        return next((point for point in points if all(memory.holds(point) for memory in self.memory)), 0)

    def prepare_restore(self, group: int, start: int, end: int) -> None:
        """Prepares a group for a restore of the tokens from `start` to `end`, behind those of the sequence. Tokens in
        between are not loaded, because the window has passed them. Then `held` says from where the sequence can still
        continue."""
        memory = self.memory[group]
        if not memory.has_room(end):
            self.settle(drop=True)
        memory.prepare_restore(self.num_tokens, start, end)
        self._bind()

    def mark(self) -> None:
        """Marks this point for `rewind` and `held`. States are copied, because they are updated in place."""
        self._marked = self.num_tokens, [tensor.clone() for tensor in self.states]
        for memory in self.memory:
            memory.mark(self.num_tokens)

    def copy_from(self, other: KVArena, num_tokens: int) -> None:
        """Copies the first `num_tokens` tokens of another sequence, which must hold them. There must be room for them.
        Of states, those at the marked point of `other` are copied."""
        for mine, its in zip(self.memory, other.memory, strict=True):
            mine.copy_from(its, num_tokens)
        self.truncate(num_tokens)
        for state, marked in zip(self.states, other._marked[1], strict=True):
            state.copy_(marked)

    def rewind(self) -> None:
        """Returns to the marked point."""
        num_tokens, states = self._marked
        self.truncate(num_tokens)
        for state, marked in zip(self.states, states, strict=True):
            state.copy_(marked)

    def reserve(self, num_tokens: int) -> None:
        """Makes room for `num_tokens` tokens in all, and keeps those of the sequence. Raises `ContextTooLong` if they
        do not fit. After `truncate(0)` the old memory is freed before the new is allocated."""
        if num_tokens <= self.capacity or not self.token_layers:
            return
        valid = self.num_tokens
        capacity = self._affordable_capacity(num_tokens, valid)
        if not valid:
            self._release()
        grown = self._allocate(num_tokens, capacity, valid)
        for memory, tensor in zip(self.memory, grown, strict=True):
            memory.replace(tensor)
        self.capacity = capacity
        self._bind()

    def fill(self, position: int, num_tokens: int, group: int, rows: slice, write: Callable[[Bytes], None]) -> None:
        """Has `write` fill rows of a group; of per-token tensors for tokens `position` … `position + num_tokens`.

        A row is one head of one tensor, or a part of a state. `write` gets bytes of shape [rows, row_bytes], each row
        contiguous. Different threads may fill different rows at once.
        """
        number = group - len(self.layout.groups)
        if number < 0:
            self.memory[group].fill(position, num_tokens, rows, write)
            return
        specs = self.layout.states[number]
        part = self.states[number].view(len(specs.specs) * specs.rows_each, -1)[rows]
        fill(part, write)

    def logits_from(self, payload: Bytes) -> torch.Tensor:
        """Returns the logits in a tail's payload, shape [vocab], on the arena's device. `payload` must not change
        afterwards."""
        return torch.from_numpy(payload.reshape(-1)).view(self.layout.logits_dtype).to(self.device)

    def read_tokens(self, position: int, num_tokens: int) -> memoryview:
        """Returns a copy of the tokens' state as a payload. May run beside a thread that writes later tokens."""
        payload = np.empty(self.layout.bytes_per_token * num_tokens, dtype=np.uint8)
        start = 0
        for memory in self.memory if num_tokens else ():
            end = start + memory.group.bytes_per_token * num_tokens
            memory.read_into(payload[start:end], position, num_tokens)
            start = end
        return payload.data

    def read_states(self, room_bytes: int = 0) -> memoryview:
        """Returns a copy of the states as in a checkpoint's payload, with `room_bytes` more bytes behind them, which
        hold anything. For the engine thread: each step changes the states."""
        payload = np.empty(self.layout.state_bytes + room_bytes, dtype=np.uint8)
        start = 0
        for group, tensor in zip(self.layout.states, self.states, strict=True):
            read(payload[start : start + group.num_bytes], tensor)
            start += group.num_bytes
        return payload.data

    def logits_bytes(self, logits: torch.Tensor, payload: memoryview | None = None) -> memoryview:
        """Returns next-token logits, shape [vocab], as in a tail's payload: in `payload`, if that is given."""
        found = bytearray(self.layout.logits_bytes) if payload is None else payload
        read(np.frombuffer(found, np.uint8), logits.detach().to(self.layout.logits_dtype))
        return memoryview(found)

    def _affordable_capacity(self, num_tokens: int, valid: int) -> int:
        """Returns the capacity to grow to: by half at least, so that a long reply copies the arena seldom, or by the
        need if that does not fit."""
        exact = self._rounded(num_tokens)
        generous = max(exact, self._rounded(self.capacity + self.capacity // 2))
        if self._free_bytes is None:
            return generous
        # While tokens are valid, the old memory is held until they are copied.
        room = self._free_bytes() + (0 if valid else self._size_bytes(self.capacity))
        if self._size_bytes(exact) > room:
            raise self._too_long(num_tokens, room)
        return generous if self._size_bytes(generous) <= room else exact

    def _rounded(self, num_tokens: int) -> int:
        return -(-num_tokens // self._capacity_step) * self._capacity_step

    def _size_bytes(self, capacity: int) -> int:
        return sum(group_bytes(group, capacity, self._block_size) for group in self.layout.groups)

    def _too_long(self, num_tokens: int, room: int | None) -> ContextTooLong:
        needed = format_size(self._size_bytes(self._rounded(num_tokens)))
        found = "more than there is" if room is None else f"{format_size(room)} are available"
        return ContextTooLong(
            f"{num_tokens} tokens need {needed} of KV memory, {found}; "
            "use a shorter prompt or a machine with more memory"
        )

    def _allocate(self, num_tokens: int, capacity: int, valid: int) -> list[torch.Tensor]:
        try:
            return [memory.allocated(capacity, valid) for memory in self.memory]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise self._too_long(num_tokens, None) from error

    def _allocate_states(self) -> list[torch.Tensor]:
        states = [zeros((len(g.specs), 1, *g.shape), g.dtype, self.device) for g in self.layout.states]
        for group, tensor in zip(self.layout.states, states, strict=True):
            for spec, state in zip(group.specs, tensor, strict=True):
                self.layers[spec.layer].bind_state(spec.part, spec.index, state.detach())
        for layer in self._state_layers:
            layer.set_has_state(False)
        return states

    def discard(self) -> None:
        """Frees all memory at once. Nothing may use the arena any more."""
        # Its layers and its cache refer to it, and a garbage collection may be long in coming.
        vars(self).clear()

    def _release(self) -> None:
        self.capacity = 0
        for memory in self.memory:
            memory.release()
        self._bind()

    def _bind(self) -> None:
        for memory in self.memory:
            for spec, part in zip(memory.group.specs, memory.tensor, strict=True):
                # Detached, for callers that run the model outside `no_grad`.
                self.layers[spec.layer].bind(spec.part, part.detach(), memory.first)
