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

    They cannot wait for room. So `leaving` bytes are left to what can: that always goes on.
    """

    def __init__(self, writer: Writer, layout: Layout, *, leaving: int) -> None:
        self._writer = writer
        self._layout = layout
        self._leaving = leaving
        self._copies: dict[int, memoryview] = {}
        self.positions: set[int] = set()
        """Where states were taken, published or not."""
        self.had_no_room = False
        """Whether something was not taken for want of room."""

    @property
    def num_held(self) -> int:
        return len(self._copies)

    def take(self, arena: KVArena) -> None:
        """Copy the states as they are now, unless there is no room for them."""
        position = arena.num_tokens
        if position in self.positions:
            return
        copied = self._in_room(self._layout.state_bytes, arena.read_states)
        if copied is not None:
            self._copies[position] = copied
            self.positions.add(position)

    def tail(self, arena: KVArena, logits: torch.Tensor) -> tuple[memoryview, ...] | None:
        """Returns copies of the states and of `logits`, shape [vocab]; None if there is no room for them."""
        num_bytes = self._layout.state_bytes + self._layout.logits_bytes
        return self._in_room(num_bytes, lambda: (arena.read_states(), arena.logits_bytes(logits)))

    def pop(self, position: int) -> memoryview:
        """Returns the copy that was taken there. The room for it is the caller's now."""
        return self._copies.pop(position)

    def release(self) -> None:
        """Forget what was not published."""
        for position, states in self._copies.items():
            self._writer.release(len(states))
            self.positions.remove(position)
        self._copies.clear()

    def _in_room(self, num_bytes: int, copy: Callable[[], _Copy]) -> _Copy | None:
        if not self._writer.reserve(num_bytes, leaving=self._leaving):
            self.had_no_room = True
            return None
        try:
            return copy()
        except BaseException:
            self._writer.release(num_bytes)
            raise
