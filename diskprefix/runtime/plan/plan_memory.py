"""The memory of a plan at fixed addresses: buffers between operators, and the arrays that each step fills anew."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from diskprefix.native import address_of

_ALIGNMENT = 64
_MAX_AXES = 3
"""The most dimensions of a position: pictures have three."""


class PlanMemory:
    """The buffers of a plan. Those that are taken within `scratch` are used again after it."""

    buffers: dict[int, np.ndarray]
    """By address, uint8 [bytes]."""

    def __init__(self) -> None:
        self.buffers = {}
        self._free: dict[int, list[int]] = {}
        self._scratch: list[tuple[int, int]] | None = None

    @contextmanager
    def scratch(self) -> Iterator[None]:
        """Gives a context. Later ones use its buffers again."""
        self._scratch = []
        try:
            yield
        finally:
            for num_bytes, address in self._scratch:
                self._free.setdefault(num_bytes, []).append(address)
            self._scratch = None

    def take(self, num_bytes: int) -> int:
        """Returns the address of a buffer."""
        free = self._free.get(num_bytes)
        if self._scratch is not None and free:
            address = free.pop()
        else:
            memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
            address = -(-address_of(memory) // _ALIGNMENT) * _ALIGNMENT
            self.buffers[address] = memory[address - address_of(memory) :][:num_bytes]
        if self._scratch is not None:
            self._scratch.append((num_bytes, address))
        return address


class StepInputs:
    """The arrays that a step fills and that calls read, all int64: token ids [rows], positions [axes, rows], and the
    numbers of the rows that get logits."""

    num_positions: int
    """The number of positions that the model has embeddings for."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self.max_rows, self.vocab_size, self.num_positions = max_rows, vocab_size, sys.maxsize
        self.logit_rows = np.zeros(max_rows, np.int64)
        self.positions = np.zeros((_MAX_AXES, max_rows), np.int64)
        self._ids_below = dict[int, np.ndarray]()

    def ids_below(self, num_ids: int) -> np.ndarray:
        """Returns the array of token ids for a table of a number of rows. Ids beyond its end are 0."""
        return self._ids_below.setdefault(num_ids, np.zeros(self.max_rows, np.int64))

    def fill(self, token_ids: np.ndarray, positions: np.ndarray, logit_rows: np.ndarray) -> None:
        """Fills the arrays. Raises `IndexError` for a token or a position that the model does not have."""
        if not 0 <= token_ids.min() <= token_ids.max() < self.vocab_size:
            raise IndexError(f"a token is none of the {self.vocab_size}: {token_ids.min()} or {token_ids.max()}")
        if positions.max() >= self.num_positions:
            raise IndexError(f"a position is none of the {self.num_positions}: {positions.max()}")
        self.logit_rows[: len(logit_rows)] = logit_rows
        for num_ids, ids in self._ids_below.items():
            ids[: len(token_ids)] = np.where(token_ids < num_ids, token_ids, 0)
        self.positions[:, : len(token_ids)] = positions
