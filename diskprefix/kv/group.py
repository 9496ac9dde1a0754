"""The memory of one group of per-token tensors of a sequence, which may hold a window of the tokens only.

Sliding memory holds, of a group with a window, the tokens that the next step looks at and the block that is not
complete yet. When a step needs more room, it moves by whole tiles, so that a token keeps its place within a tile:
attention reads tiles by their absolute position.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from diskprefix.kv.layout import Group
from diskprefix.kv.sizes import PAD_TOKENS, TILE, whole_tiles, window_room
from diskprefix.kv.transfer import bytes_of, fill, read
from diskprefix.store.codec.planes import Bytes
from diskprefix.tokens import floor_to_grid


def group_bytes(group: Group, capacity: int, block_size: int | None) -> int:
    """Returns the bytes of a group's memory with room for `capacity` tokens. `block_size`: see `GroupMemory`."""
    return group.bytes_per_token * (_room_for(group, capacity, block_size) + PAD_TOKENS) if capacity else 0


def _room_for(group: Group, capacity: int, block_size: int | None) -> int:
    if block_size is None or group.window is None:
        return capacity
    return min(capacity, window_room(group.window, block_size))


@dataclass(eq=False)
class _Mark:
    """A marked point, after `end` tokens. `tensor` holds the tokens from position `first` to `end` once they have slid
    out of the memory. `complete_from`: see `GroupMemory`."""

    end: int
    first: int
    complete_from: int
    tensor: torch.Tensor | None = None


class GroupMemory:
    """The memory of the tokens of a sequence from position `first` on, a multiple of `TILE`.

    With `block_size`, it slides, and keeps blocks of so many tokens until they are complete. With None, it keeps all
    tokens.
    """

    def __init__(self, group: Group, device: torch.device, block_size: int | None) -> None:
        self.group = group
        self.first = 0
        self.complete_from = 0
        """The first token whose state is there. For layers with a window, a restore loads only the tokens that the
        model still looks at."""
        self._device = device
        self._block_size = None if group.window is None else block_size
        self._mark: _Mark | None = None
        self._rows: Bytes | None
        """The memory as bytes, shape [rows, tokens × head_dim × itemsize]. None on another device."""
        self.release()

    @property
    def num_bytes(self) -> int:
        marked = self._mark.tensor if self._mark else None
        return sum(t.numel() * t.dtype.itemsize for t in (self.tensor, marked) if t is not None)

    @property
    def room(self) -> int:
        """The number of tokens that fit."""
        return max(0, self.tensor.shape[3] - PAD_TOKENS)

    def allocated(self, capacity: int, valid: int) -> torch.Tensor:
        """Returns a tensor for `capacity` tokens of a sequence, with the state of the first `valid`, for `replace`.
        Raises the errors of torch and numpy when memory runs out."""
        room = _room_for(self.group, capacity, self._block_size)
        return self.tensor if room <= self.room else self._enlarged(room, valid)

    def replace(self, tensor: torch.Tensor) -> None:
        """Replaces the memory by a tensor that has the same tokens already: a capture may read beside this."""
        self.tensor = tensor
        self._rows = bytes_of(tensor.flatten(0, 2).flatten(1)) if tensor.device.type == "cpu" else None

    def release(self) -> None:
        """Frees the memory."""
        self._rows = self._mark = None
        shape = (len(self.group.specs), 1, self.group.heads, 0, self.group.head_dim)
        self.tensor = torch.empty(shape, dtype=self.group.dtype, device=self._device)

    def has_room(self, end: int) -> bool:
        """Returns True if tokens up to `end` fit. Memory that keeps all tokens was made large enough before."""
        return self._block_size is None or whole_tiles(end) - self.first <= self.room

    def needed_from(self, position: int) -> int:
        """Returns the first token that is needed to compute the tokens from `position` on."""
        if self._block_size is None:
            return 0
        return min(self.group.first_needed(position), floor_to_grid(position, self._block_size))

    def slide(self, first: int, valid: int, end: int) -> None:
        """Makes room for the tokens up to `end`: the tokens before the tile of token `first` are dropped. `valid` is
        the number of tokens of the sequence."""
        first = max(self.first, first - first % TILE)
        self._save_marked(first)
        self._drop_before(first, valid)
        if not self.has_room(end):
            self.replace(self._enlarged(whole_tiles(end) - first, valid))

    def prepare_restore(self, have: int, start: int, end: int) -> None:
        """Prepares for a restore, which fills the tokens from `start` to `end`. The first `have` tokens are there.
        Those between them and `start` are not loaded, because the window has passed them. They are set to zero from the
        tile of `start` on: attention multiplies them by weights of 0."""
        if start <= have:
            if not self.has_room(end):
                self.slide(start, have, end)
            return
        if not self.has_room(end):
            # None of the tokens before is needed.
            self.slide(start, 0, end)
            have = 0
        self.complete_from = start
        cleared = max(have, start - start % TILE)
        self.tensor[:, :, :, max(cleared - self.first, 0) : max(start - self.first, 0)] = 0

    def fill(self, position: int, num_tokens: int, rows: slice, write: Callable[[Bytes], None]) -> None:
        """See `KVArena.fill`."""
        start = position - self.first
        assert start >= 0, "tokens that slid out are not filled"
        if self._rows is not None:
            token_bytes = self.group.head_dim * self.group.dtype.itemsize
            write(self._rows[rows, start * token_bytes : (start + num_tokens) * token_bytes])
        else:
            part = self.tensor.flatten(0, 2)[rows, start : start + num_tokens]
            fill(part, write)

    def read_into(self, payload: Bytes, position: int, num_tokens: int) -> None:
        """Copies tokens to flat bytes in main memory."""
        start = position - self.first
        assert start >= 0, "tokens that slid out are not read"
        read(payload, self.tensor[:, :, :, start : start + num_tokens].flatten(0, 2))

    def holds(self, num_tokens: int) -> bool:
        """Returns True if a sequence can continue after `num_tokens` of its tokens."""
        return self._source(num_tokens) is not None

    def mark(self, num_tokens: int) -> None:
        """Marks this point. The tokens needed to return to it, and to a block before it, are kept when they slide
        out."""
        first = self.needed_from(max(0, num_tokens - (self._block_size or 0)))
        self._mark = _Mark(num_tokens, max(self.first, first - first % TILE), self.complete_from)

    def stays(self, num_tokens: int) -> bool:
        """Returns True if `truncate` moves no tokens."""
        return not num_tokens or self._is_live(num_tokens)

    def truncate(self, num_tokens: int) -> None:
        """Forgets all but the first tokens, which must be held, unless the memory is about to be filled."""
        if not num_tokens:
            self.first = self.complete_from = 0
        elif not self.stays(num_tokens):
            self.copy_from(self, num_tokens)
        if self._mark is not None and num_tokens < self._mark.end:
            self._mark = None

    def copy_from(self, other: GroupMemory, num_tokens: int) -> None:
        """Copies the first `num_tokens` tokens of another sequence, as far as it holds them and as they fit beside a
        step."""
        source = other._source(num_tokens)
        assert source is not None, "a sequence does not continue from tokens that slid out"
        tensor, first, complete_from = source
        needed = self.needed_from(num_tokens)
        self.first = max(first, min(needed - needed % TILE, whole_tiles(num_tokens) + TILE - self.room))
        self.complete_from = max(complete_from, self.first)
        self.tensor[:, :, :, : num_tokens - self.first] = tensor[:, :, :, self.first - first : num_tokens - first]

    def _source(self, num_tokens: int) -> tuple[torch.Tensor, int, int] | None:
        """Returns a tensor with the tokens needed to continue after so many tokens, the position of its first token,
        and the first position from which it is complete."""
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
        """Copies the tokens that the mark needs if they slide out when the memory begins with `first`."""
        mark = self._mark
        if mark is not None and mark.tensor is None and mark.first < first:
            at = slice(mark.first - self.first, mark.end - self.first)
            mark.tensor = self.tensor[:, :, :, at].clone()

    def _drop_before(self, first: int, valid: int) -> None:
        by, num_tokens = first - self.first, max(0, valid - first)
        # Parts that do not overlap.
        for start in range(0, num_tokens, by) if by else ():
            end = min(start + by, num_tokens)
            self.tensor[:, :, :, start:end] = self.tensor[:, :, :, start + by : end + by]
        self.first = first
        self.complete_from = max(self.complete_from, first)

    def _enlarged(self, room: int, valid: int) -> torch.Tensor:
        """Returns a larger tensor with the same tokens."""
        shape = (len(self.group.specs), 1, self.group.heads, room + PAD_TOKENS, self.group.head_dim)
        grown = zeros(shape, self.group.dtype, self._device)
        kept = max(0, valid - self.first)
        grown[:, :, :, :kept] = self.tensor[:, :, :, :kept]
        return grown


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # Reading threads are not in inference mode, and may not write to tensors that were made in it.
    with torch.inference_mode(False):
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # numpy asks the kernel for huge pages, torch does not: without them a restore loses a quarter of its speed. The
        # kernel gives pages of zeros, and only when they are written.
        num_bytes = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
