"""Copies of what the next step overwrites: states that exist at one position only, and next-token logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from diskprefix.kv.arena import KVArena
from diskprefix.kv.layout import Layout
from diskprefix.store.writer import Writer

_Copy = TypeVar("_Copy")


class HeldStates:
    """The copies that one request made and has not published yet. The room for them in the write buffer is reserved.

    They cannot wait for room. So room for the last ones, on which the others rest, is reserved ahead. `leaving` bytes
    are left to what can wait: that always goes on.
    """

    def __init__(self, writer: Writer, layout: Layout, *, leaving: int) -> None:
        self._writer = writer
        self._layout = layout
        self._leaving = leaving
        self._copies: dict[int, memoryview] = {}
        self._ahead_bytes = 0
        self.positions: set[int] = set()
        """Where states were taken, published or not."""

    @property
    def num_held(self) -> int:
        return len(self._copies)

    def reserve(self, num_bytes: int) -> None:
        """Reserve that much ahead in all, if there is room now."""
        missing = num_bytes - self._ahead_bytes
        if missing > 0 and self._writer.reserve(missing, leaving=self._leaving):
            self._ahead_bytes += missing

    def take(self, arena: KVArena, *, is_last: bool) -> bool:
        """Copy the states as they are now. Returns False if there is no room for them. `is_last`: what was reserved
        ahead may be used."""
        position = arena.num_tokens
        if position in self.positions:
            return True
        copied = self._in_room(self._layout.state_bytes, arena.read_states, is_last=is_last)
        if copied is None:
            return False
        self._copies[position] = copied
        self.positions.add(position)
        return True

    def tail(self, arena: KVArena, logits: torch.Tensor) -> tuple[memoryview, ...] | None:
        """Returns copies of the states and of `logits`, shape [vocab]; None if there is no room for them."""
        num_bytes = self._layout.state_bytes + self._layout.logits_bytes
        return self._in_room(num_bytes, lambda: (arena.read_states(), arena.logits_bytes(logits)), is_last=True)

    def pop(self, position: int) -> memoryview:
        """Returns the copy that was taken there. The room for it is the caller's now."""
        return self._copies.pop(position)

    def release(self) -> None:
        """Forget what was not published."""
        for position, states in self._copies.items():
            self._writer.release(len(states))
            self.positions.remove(position)
        self._copies.clear()

    def close(self) -> None:
        self.release()
        self._writer.release(self._ahead_bytes)
        self._ahead_bytes = 0

    def _in_room(self, num_bytes: int, copy: Callable[[], _Copy], *, is_last: bool) -> _Copy | None:
        if is_last and num_bytes <= self._ahead_bytes:
            self._ahead_bytes -= num_bytes
        elif not self._writer.reserve(num_bytes, leaving=self._leaving):
            return None
        try:
            return copy()
        except BaseException:
            self._writer.release(num_bytes)
            raise
