"""Copies of states and logits that wait to be stored, within the room of the write buffer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from diskprefix.kv.layout import Layout
from diskprefix.kv.sequence import KVSequence
from diskprefix.store.schema import Kind
from diskprefix.store.writer import Writer


class HeldStates:
    """Copies of states and logits that the next step overwrites, and that are not published yet. Room for them in the
    write buffer is reserved.

    They cannot wait for room, so room for the last ones, and for the tokens that are copied with them, is reserved
    ahead.
    """

    def __init__(self, writer: Writer, layout: Layout) -> None:
        self._writer = writer
        self._layout = layout
        self._copies: dict[tuple[Kind, int], memoryview] = {}
        """By kind and position of the nodes that they are for."""
        self._ahead_bytes = 0
        self.positions: set[int] = set()
        """The positions of all copied states, published or not."""

    @property
    def num_held(self) -> int:
        return len(self._copies)

    def reserve(self, num_bytes: int) -> None:
        """Reserves `num_bytes` ahead in all, if there is room now."""
        missing = num_bytes - self._ahead_bytes
        if missing > 0 and self._writer.reserve(missing):
            self._ahead_bytes += missing

    def take(self, sequence: KVSequence, *, is_last: bool) -> bool:
        """Copies the states as they are now. Returns False if there is no room. `is_last`: the room that was reserved
        ahead may be used."""
        position = sequence.num_tokens
        if position in self.positions:
            return True
        copied = self.in_room(self._layout.state_bytes, sequence.read_states, is_last=is_last)
        if copied is None:
            return False
        self._copies[Kind.CHECKPOINT, position] = copied
        self.positions.add(position)
        return True

    def take_tail(self, sequence: KVSequence, logits: torch.Tensor) -> bool:
        """Copies the states and `logits`, shape [vocab], one behind the other. Returns False if there is no room."""
        state_bytes, logits_bytes = self._layout.state_bytes, self._layout.logits_bytes

        def copy() -> memoryview:
            payload = sequence.read_states(room_bytes=logits_bytes)
            sequence.logits_bytes(logits, payload[state_bytes:])
            return payload

        copied = self.in_room(state_bytes + logits_bytes, copy, is_last=True)
        if copied is not None:
            self._copies[Kind.TAIL, sequence.num_tokens] = copied
        return copied is not None

    def pop(self, kind: Kind, position: int) -> memoryview:
        """Returns the copy for a node; none is made for a block. The room for it is the caller's now."""
        return self._copies.pop((kind, position), memoryview(b""))

    def in_room(self, num_bytes: int, copy: Callable[[], memoryview], *, is_last: bool) -> memoryview | None:
        """Returns a copy, for which room is reserved now. Returns None if there is none. `is_last` as in `take`."""
        if is_last and num_bytes <= self._ahead_bytes:
            self._ahead_bytes -= num_bytes
        elif not self._writer.reserve(num_bytes):
            return None
        try:
            return copy()
        except BaseException:
            self._writer.release(num_bytes)
            raise

    def close(self) -> None:
        """Releases the copies that were not published."""
        for states in self._copies.values():
            self._writer.release(len(states))
        self._copies.clear()
        self._writer.release(self._ahead_bytes)
        self._ahead_bytes = 0
