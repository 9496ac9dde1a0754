"""Copies of states and logits that wait to be stored, within the room of the write buffer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from diskprefix.kv.arena import KVArena
from diskprefix.kv.layout import Layout
from diskprefix.store.writer import Writer


class HeldStates:
    """Copies of states and logits that the next step overwrites, and that are not published yet. Room for them in the
    write buffer is reserved.

    They cannot wait for room, so room for the last ones, which the others need, is reserved ahead. `leaving` bytes are
    left for copies that can wait.
    """

    def __init__(self, writer: Writer, layout: Layout, *, leaving: int) -> None:
        self._writer = writer
        self._layout = layout
        self._leaving = leaving
        self._copies: dict[int, memoryview] = {}
        self._ahead_bytes = 0
        self.positions: set[int] = set()
        """The positions of all copied states, published or not."""

    @property
    def num_held(self) -> int:
        return len(self._copies)

    def reserve(self, num_bytes: int) -> None:
        """Reserves `num_bytes` ahead in all, if there is room now."""
        missing = num_bytes - self._ahead_bytes
        if missing > 0 and self._writer.reserve(missing, leaving=self._leaving):
            self._ahead_bytes += missing

    def take(self, arena: KVArena, *, is_last: bool) -> bool:
        """Copies the states as they are now. Returns False if there is no room. `is_last`: the room that was reserved
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

    def tail(self, arena: KVArena, logits: torch.Tensor) -> memoryview | None:
        """Returns copies of the states and of `logits`, shape [vocab], one behind the other; None if there is no room
        for them."""
        state_bytes, logits_bytes = self._layout.state_bytes, self._layout.logits_bytes

        def copy() -> memoryview:
            payload = arena.read_states(room_bytes=logits_bytes)
            arena.logits_bytes(logits, payload[state_bytes:])
            return payload

        return self._in_room(state_bytes + logits_bytes, copy, is_last=True)

    def pop(self, position: int) -> memoryview:
        """Returns the copy that was taken there. The room for it is the caller's now."""
        return self._copies.pop(position)

    def close(self) -> None:
        """Releases the copies that were not published."""
        for states in self._copies.values():
            self._writer.release(len(states))
        self._copies.clear()
        self._writer.release(self._ahead_bytes)
        self._ahead_bytes = 0

    def _in_room(self, num_bytes: int, copy: Callable[[], memoryview], *, is_last: bool) -> memoryview | None:
        if is_last and num_bytes <= self._ahead_bytes:
            self._ahead_bytes -= num_bytes
        elif not self._writer.reserve(num_bytes, leaving=self._leaving):
            return None
        try:
            return copy()
        except BaseException:
            self._writer.release(num_bytes)
            raise
