"""The memory of one group of per-token tensors of a sequence, which may hold a window of the tokens only.

Memory that slides holds, of a group with a window, what the next step looks at, and the block that is not complete yet.
When a step needs more room, it moves on by whole tiles, so that a token stays in its place within a tile: attention
reads tiles by their absolute position.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from diskprefix.kv.layout import Group
from diskprefix.kv.step import TILE
from diskprefix.kv.transfer import Bytes, bytes_of, copy_into, in_main_memory, write_through
from diskprefix.tokens import floor_to_grid

_PAD_TOKENS = 64
"""Keeps the distance between heads off powers of two, which would map them to the same cache sets. Never used."""
_STEP_TOKENS = 256
"""Rows that a step may have without the memory of a window being enlarged."""
_SPARE_TILES = 1
"""With more of them, memory moves less often."""


def whole_tiles(num_tokens: int) -> int:
    """Returns the number rounded up to whole tiles."""
    return -(-num_tokens // TILE) * TILE


def group_bytes(group: Group, capacity: int, block_size: int | None) -> int:
    """Returns the memory that a group takes where `capacity` tokens of a sequence fit. `block_size`: see
    `GroupMemory`."""
    return group.bytes_per_token * (_room_for(group, capacity, block_size) + _PAD_TOKENS) if capacity else 0


def sequence_bytes(bytes_per_token: int, num_tokens: int) -> int:
    """Returns the memory that a group takes which keeps all of so many tokens, whole steps of capacity."""
    return bytes_per_token * (num_tokens + _PAD_TOKENS)


def _room_for(group: Group, capacity: int, block_size: int | None) -> int:
    if block_size is None or group.window is None:
        return capacity
    looked_at = max(group.window, block_size) + max(_STEP_TOKENS, block_size)
    # A tile more, as both ends are within a tile.
    return min(capacity, whole_tiles(looked_at) + TILE * (1 + _SPARE_TILES))


@dataclass(eq=False)
class _Mark:
    """The point `end`. `tensor` holds what a window needs around it, from position `first` on, once that has slid out
    of the memory. `complete_from`: see `GroupMemory`."""

    end: int
    first: int
    complete_from: int
    tensor: torch.Tensor | None = None


class GroupMemory:
    """Tokens of a sequence from position `first` on, a multiple of `TILE`.

    `block_size`: it slides, and keeps blocks of so many tokens until they are complete. None: it keeps all tokens.
    """

    def __init__(self, group: Group, device: torch.device, block_size: int | None) -> None:
        self.group = group
        self.first = 0
        self.complete_from = 0
        """The first token whose state is there. Of layers with a window, a restore loads no more than the model still
        looks at."""
        self._device = device
        self._block_size = None if group.window is None else block_size
        self._mark: _Mark | None = None
        self._rows: Bytes | None
        """The memory as bytes, shape [rows, tokens × head_dim × itemsize], where it is main memory."""
        self.release()

    @property
    def num_bytes(self) -> int:
        marked = self._mark.tensor if self._mark else None
        return sum(t.numel() * t.dtype.itemsize for t in (self.tensor, marked) if t is not None)

    @property
    def room(self) -> int:
        """Tokens that fit."""
        return max(0, self.tensor.shape[3] - _PAD_TOKENS)

    def bytes_for(self, capacity: int) -> int:
        """Returns the memory that it takes where `capacity` tokens of a sequence fit."""
        return group_bytes(self.group, capacity, self._block_size)

    def allocated(self, capacity: int, valid: int) -> torch.Tensor:
        """Returns a tensor for `capacity` tokens of a sequence, with what is there of the first `valid`, for `use`.
        Raises what torch and numpy raise when memory runs out."""
        room = _room_for(self.group, capacity, self._block_size)
        return self.tensor if room <= self.room else self._enlarged(room, valid)

    def use(self, tensor: torch.Tensor) -> None:
        """Takes a tensor for its memory. Not before: a capture may be reading beside us."""
        self.tensor = tensor
        self._rows = bytes_of(tensor.flatten(0, 2).flatten(1)) if in_main_memory(tensor) else None

    def release(self) -> None:
        """Gives the memory back."""
        self._rows = None
        self.tensor = torch.empty(
            len(self.group.specs),
            1,
            self.group.heads,
            0,
            self.group.head_dim,
            dtype=self.group.dtype,
            device=self._device,
        )

    def has_room(self, end: int) -> bool:
        """Returns whether tokens up to `end` fit. What keeps all tokens was made large enough before."""
        return self._block_size is None or whole_tiles(end) - self.first <= self.room

    def needed_from(self, position: int) -> int:
        """Returns the first token that is still needed when the tokens from `position` on are computed."""
        if self._block_size is None:
            return 0
        return min(self.group.first_needed(position), floor_to_grid(position, self._block_size))

    def slide(self, first: int, valid: int, end: int) -> None:
        """Makes room for the tokens up to `end`: what stands before the tile of token `first` goes. `valid` tokens of
        the sequence are there."""
        first = max(self.first, first - first % TILE)
        self._save_marked(first)
        self._drop_before(first, valid)
        if not self.has_room(end):
            self.use(self._enlarged(whole_tiles(end) - first, valid))

    def expect(self, have: int, start: int, end: int) -> None:
        """Makes ready for a restore, which fills the tokens from `start` to `end`. There are `have`, and those between
        them and `start` are not loaded, as the window has passed them. They are set to zero from the tile of `start`
        on: attention multiplies them by weights of 0."""
        if start <= have:
            if not self.has_room(end):
                self.slide(start, have, end)
            return
        if not self.has_room(end):
            # Nothing of before is needed.
            self.slide(start, 0, end)
            have = 0
        self.complete_from = start
        self.clear(max(have, start - start % TILE), start)

    def clear(self, start: int, end: int) -> None:
        """Sets tokens to zero."""
        self.tensor[:, :, :, max(start - self.first, 0) : max(end - self.first, 0)] = 0

    def fill(self, position: int, num_tokens: int, rows: slice, write: Callable[[Bytes], None]) -> None:
        """See `KVArena.fill`."""
        start = position - self.first
        assert start >= 0, "what slid out is not filled"
        if self._rows is not None:
            token_bytes = self.group.head_dim * self.group.dtype.itemsize
            write(self._rows[rows, start * token_bytes : (start + num_tokens) * token_bytes])
        else:
            write_through(write, self.tensor.flatten(0, 2)[rows, start : start + num_tokens])

    def read_into(self, payload: Bytes, position: int, num_tokens: int) -> None:
        """Copies tokens to flat bytes in main memory."""
        start = position - self.first
        assert start >= 0, "what slid out is not read"
        copy_into(payload, self.tensor[:, :, :, start : start + num_tokens])

    def holds(self, num_tokens: int) -> bool:
        """Returns whether the sequence can be gone on from after so many of its tokens."""
        return self._source(num_tokens) is not None

    def mark(self, num_tokens: int) -> None:
        """Keeps what is needed to return to this point, and to a block before it, when it slides out."""
        first = self.needed_from(max(0, num_tokens - (self._block_size or 0)))
        self._mark = _Mark(num_tokens, max(self.first, first - first % TILE), self.complete_from)

    def truncate(self, num_tokens: int) -> None:
        """Forgets all but the first tokens. They must be held, or the memory is about to be filled."""
        if not num_tokens:
            self.first = self.complete_from = 0
        elif not self._is_live(num_tokens):
            self._take(self, num_tokens)
        if self._mark is not None and num_tokens < self._mark.end:
            self._mark = None

    def copy_from(self, other: GroupMemory, num_tokens: int) -> None:
        """Takes over tokens of another sequence: as many of its first `num_tokens` as it has and as there is room for,
        but for a step."""
        self._take(other, num_tokens)

    def _take(self, other: GroupMemory, num_tokens: int) -> None:
        source = other._source(num_tokens)
        assert source is not None, "what slid out is not gone on from"
        tensor, first, complete_from = source
        needed = self.needed_from(num_tokens)
        self.first = max(first, min(needed - needed % TILE, whole_tiles(num_tokens) + TILE - self.room))
        self.complete_from = max(complete_from, self.first)
        self.tensor[:, :, :, : num_tokens - self.first] = tensor[:, :, :, self.first - first : num_tokens - first]

    def _source(self, num_tokens: int) -> tuple[torch.Tensor, int, int] | None:
        """Returns a tensor that holds what is needed to go on after so many tokens, the position that it begins with,
        and that from which on it is complete."""
        if self._is_live(num_tokens):
            return self.tensor, self.first, self.complete_from
        mark = self._mark
        if mark is None or mark.tensor is None or num_tokens > mark.end:
            return None
        complete_from = max(mark.first, mark.complete_from)
        is_there = self.group.first_needed(num_tokens) >= complete_from
        return (mark.tensor, mark.first, complete_from) if is_there else None

    def _is_live(self, num_tokens: int) -> bool:
        return self.group.first_needed(num_tokens) >= self.complete_from

    def _save_marked(self, first: int) -> None:
        """Copies what the mark needs if it slides out when the memory begins with `first`."""
        mark = self._mark
        if mark is not None and mark.tensor is None and mark.first < first:
            at = slice(mark.first - self.first, mark.end - self.first)
            mark.tensor = self.tensor[:, :, :, at].clone()

    def _drop_before(self, first: int, valid: int) -> None:
        by, num_tokens = first - self.first, max(0, valid - first)
        # In parts that do not overlap.
        for start in range(0, num_tokens, by) if by else ():
            end = min(start + by, num_tokens)
            self.tensor[:, :, :, start:end] = self.tensor[:, :, :, start + by : end + by]
        self.first = first
        self.complete_from = max(self.complete_from, first)

    def _enlarged(self, room: int, valid: int) -> torch.Tensor:
        """Returns a larger tensor with the same tokens."""
        shape = (len(self.group.specs), 1, self.group.heads, room + _PAD_TOKENS, self.group.head_dim)
        grown = zeros(shape, self.group.dtype, self._device)
        kept = max(0, valid - self.first)
        grown[:, :, :, :kept] = self.tensor[:, :, :, :kept]
        return grown


_made_ahead: dict[int, Bytes] = {}
"""Memory of zeros in main memory that nobody uses yet, by its size in bytes."""


def make_ahead(num_bytes: int) -> torch.Tensor:
    """Takes memory for a tensor of exactly so many bytes that `zeros` will return, and returns it, uint8, for its pages
    to be made."""
    _made_ahead[num_bytes] = memory = np.zeros(num_bytes, dtype=np.uint8)
    return torch.from_numpy(memory)


def give_back_ahead() -> None:
    """Gives back what was made ahead and not used."""
    _made_ahead.clear()


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # Reading threads are not in inference mode, and may not write to tensors that were made in it.
    with torch.inference_mode(False):
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # numpy asks the kernel for huge pages, torch does not: without them a restore loses a quarter of its speed. The
        # kernel gives pages of zeros, and only when they are written.
        num_bytes = math.prod(shape) * dtype.itemsize
        memory = _made_ahead.pop(num_bytes, None)
        if memory is None:
            memory = np.zeros(num_bytes, dtype=np.uint8)
        return torch.from_numpy(memory).view(dtype).view(shape)
