"""The memory of sequences: those that run, and those that ended and may be gone on from.

Each sequence has a slot with a `KVArena` of its own. All slots together take no more than a bound in bytes. A sequence
that ended stays in its slot until the room is needed: a later prompt that begins with its tokens goes on there, without
a copy. That is the memory tier. When it has too many sequences, that one goes which is worth least: its tokens, divided
by the time since its last use. So a few short requests do not take the place of a long conversation that pauses. When
memory is short, the least recently used slot goes first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np
import torch

from diskprefix.errors import ContextTooLong
from diskprefix.kv.arena import KVArena, bytes_for
from diskprefix.kv.layout import Layout
from diskprefix.kv.transfer import populate
from diskprefix.tokens import LEAST_TOKENS, TokenIds, common_prefix_length, floor_to_grid
from diskprefix.units import format_size


@dataclass(eq=False)
class Slot:
    """The memory of one sequence. `owner` says whose the tokens are, so that no other tenant gets them.

    `num_exact` of the `token_ids` are what a prefill computes, or will be once they are computed. `logits` are the
    next-token logits, shape [vocab], after `logits_at` tokens.
    """

    arena: KVArena
    num_computed: int = 0
    """Tokens that the arena holds. While a fetch fills it, those of before."""
    owner: Hashable = None
    token_ids: TokenIds = field(default_factory=lambda: np.empty(0, np.int32))
    num_exact: int = 0
    is_busy: bool = False
    used_at: float = 0.0
    expires_at: float = float("inf")
    """On the clock of `time.monotonic`."""
    logits_at: int = 0
    logits: torch.Tensor | None = None


@dataclass(frozen=True)
class Found:
    """A slot that holds the beginning of a prompt: `num_tokens` tokens now, `later` when its own prompt is computed."""

    slot: Slot
    num_tokens: int
    later: int

    @property
    def is_worth_waiting_for(self) -> bool:
        return self.later >= self.num_tokens + LEAST_TOKENS


def _worth(slot: Slot) -> float:
    """Tokens for each second since the last use: what going on from it saves, and how soon that is expected."""
    return slot.num_computed / (1.0 + time.monotonic() - slot.used_at)


class KVPool:
    """Slots within `limit_bytes`, and within what `free_bytes` says that the device has left. For the engine's thread.

    `max_idle` sequences that ended are kept. `block_size` is the grid, in tokens.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        *,
        limit_bytes: int,
        free_bytes: Callable[[], int],
        max_idle: int,
        block_size: int,
    ) -> None:
        self.layout = layout
        self.limit_bytes = limit_bytes
        self.max_idle = max_idle
        self.slots: list[Slot] = []
        self._device = device
        self._device_free_bytes = free_bytes
        self._block_size = block_size
        self._is_idle = True
        """Until the first request, memory is made ahead."""
        self._spare: list[KVArena] = []
        """Memory of no sequence. It is kept, because pages that were touched once are faster to fill."""

    @property
    def used_bytes(self) -> int:
        return sum(slot.arena.num_bytes for slot in self.slots) + sum(arena.num_bytes for arena in self._spare)

    def touch(self, num_bytes: int, max_tokens: int) -> None:
        """Takes memory ahead, before the first request. Its pages come in a thread beside the rest of the start, until
        `give_way`. Raises `ContextTooLong` if there is less."""
        arena = self._new_arena()
        affordable = min(num_bytes, self._room_bytes() // 2) // max(self.layout.bytes_per_token, 1)
        arena.reserve(min(max_tokens, affordable))
        self._spare.append(arena)
        tensors = [memory.tensor for memory in arena.memory]
        wanted = (tensors, lambda: self._is_idle)
        threading.Thread(target=populate, args=wanted, name="kv-memory", daemon=True).start()

    def give_way(self) -> None:
        """A request is there: the rest of the pages comes when it is used. While they are made ahead, the process can
        map no memory, which a tokenizer does hundreds of times: it took half a second. For any thread."""
        self._is_idle = False

    def find(self, owner: Hashable, token_ids: TokenIds) -> Found | None:
        """Returns the slot that holds, or will hold, most of a prompt; None if there is none with a token of it."""
        found = [self._found(slot, token_ids) for slot in self.slots if slot.owner == owner]
        now = max(found, key=lambda one: (one.num_tokens, not one.slot.is_busy, one.slot.used_at), default=None)
        later = max(found, key=lambda one: one.later, default=None)
        if now is None or later is None or later.later < LEAST_TOKENS:
            return None
        return later if later.later >= now.num_tokens + LEAST_TOKENS else now

    def take(self, num_tokens: int) -> Slot | None:
        """Returns an empty slot with room for `num_tokens` tokens; None if others must end first.

        Raises `ContextTooLong` if they never fit.
        """
        arena = self._spare_arena(num_tokens) or self._fresh_arena(num_tokens)
        if arena is None:
            return None
        arena.truncate(0)
        return self._used(Slot(arena))

    def go_on(self, found: Found, num_tokens: int) -> Slot | None:
        """Returns a slot that holds what was found, with room for `num_tokens` tokens; None if others must end first.

        An idle slot whose sequence the prompt shares the larger part of is adopted. Otherwise what is shared is copied,
        unless there is no room for two.
        """
        source = found.slot
        is_most = 2 * found.num_tokens >= len(source.token_ids)
        if not source.is_busy and (is_most or not self.layout.is_sliceable):
            return self._adopted(found, num_tokens)
        was_busy, source.is_busy = source.is_busy, True
        try:
            slot = self.take(num_tokens)
        finally:
            source.is_busy = was_busy
        if slot is None:
            return None if source.is_busy else self._adopted(found, num_tokens)
        slot.arena.copy_from(source.arena, found.num_tokens)
        slot.num_computed = found.num_tokens
        if source.logits_at <= found.num_tokens:
            slot.logits_at, slot.logits = source.logits_at, source.logits
        return slot

    def fork(self, source: Slot, num_tokens: int) -> Slot | None:
        """Returns a slot with a copy of the marked point of a sequence; None if others must end first."""
        slot = self.take(num_tokens)
        if slot is not None:
            slot.num_computed = source.arena.marked_tokens
            slot.arena.copy_from(source.arena, slot.num_computed)
        return slot

    def grow(self, slot: Slot, num_tokens: int) -> bool:
        """Makes room for `num_tokens` tokens in all. Returns False if others must end first."""
        if num_tokens <= slot.arena.capacity:
            return True
        while True:
            try:
                slot.arena.reserve(num_tokens)
            except ContextTooLong:
                if not self._free_something():
                    return False
            else:
                return True

    def release(self, slot: Slot, *, keep: bool) -> None:
        """The sequence of `slot` has ended. `keep`: it may be gone on from."""
        slot.is_busy, slot.used_at = False, time.monotonic()
        if not keep or not self.max_idle or not slot.num_computed:
            self._forget(slot)
            return
        idle = sorted((slot for slot in self.slots if not slot.is_busy), key=_worth)
        for least in idle[: max(0, len(idle) - self.max_idle)]:
            self._forget(least)

    def drop_gone(self, is_gone: Callable[[Hashable], bool]) -> None:
        """Gives back the memory of sequences that ended and have expired, or whose owner `is_gone`. What they held is
        not left in memory that is kept for others."""
        now = time.monotonic()
        gone = [slot for slot in self.slots if not slot.is_busy and (slot.expires_at <= now or is_gone(slot.owner))]
        for slot in gone:
            slot.arena.settle(drop=True)
            self.slots.remove(slot)
        if gone:
            self._spare.clear()

    def stats(self) -> dict[str, int]:
        """Sizes in bytes, numbers of sequences, and the tokens of those that ended."""
        idle = [slot for slot in self.slots if not slot.is_busy]
        return {
            "limit_bytes": self.limit_bytes,
            "used_bytes": self.used_bytes,
            "max_entries": self.max_idle,
            "entries": len(idle),
            "entry_tokens": sum(len(slot.token_ids) for slot in idle),
            "running": len(self.slots) - len(idle),
        }

    def _found(self, slot: Slot, token_ids: TokenIds) -> Found:
        common = min(common_prefix_length(slot.token_ids, token_ids), slot.num_exact)
        later = self._usable(slot, common, common, len(token_ids)) if slot.is_busy else 0
        now = self._usable(slot, common, slot.num_computed, len(token_ids))
        return Found(slot, now, max(now, later))

    def _usable(self, slot: Slot, common: int, num_computed: int, prompt_tokens: int) -> int:
        """Returns how many of the `common` tokens a prompt can go on from once `num_computed` are computed."""
        num_tokens = slot.arena.held(min(common, num_computed))
        if num_tokens == prompt_tokens and slot.logits_at == prompt_tokens and slot.logits is not None:
            is_there = self.layout.is_sliceable or (slot.num_computed == num_tokens and not slot.is_busy)
            return num_tokens if is_there else 0
        match self.layout.state_kind:
            case "token":
                return slot.arena.held(min(num_tokens, prompt_tokens - 1))
            case "sliceable":
                grid_point = floor_to_grid(min(num_tokens, prompt_tokens - 1), self._block_size)
                return grid_point if slot.arena.held(grid_point) == grid_point else 0
            case "checkpoints":
                # States are those at the end of what was computed.
                is_there = num_tokens == num_computed < prompt_tokens and not slot.is_busy
                return num_computed if is_there and num_computed % self._block_size == 0 else 0
            case "one_pass":
                return 0

    def _adopted(self, found: Found, num_tokens: int) -> Slot | None:
        slot = found.slot
        slot.is_busy = True
        slot.arena.settle(drop=True)
        slot.arena.truncate(found.num_tokens)
        slot.num_computed = found.num_tokens
        if slot.logits_at > found.num_tokens:
            # Those after other tokens.
            slot.logits_at, slot.logits = 0, None
        if self.grow(slot, num_tokens):
            return slot
        slot.is_busy = False
        if any(other.is_busy for other in self.slots):
            return None
        # There is no room for what it holds beside a larger copy, and nobody to wait for.
        return self.take(num_tokens)

    def _used(self, slot: Slot) -> Slot:
        slot.is_busy, slot.used_at = True, time.monotonic()
        self.slots.append(slot)
        return slot

    def _spare_arena(self, num_tokens: int) -> KVArena | None:
        """Returns the smallest arena of no sequence in which so many tokens fit."""
        fitting = [arena for arena in self._spare if arena.capacity >= num_tokens]
        arena = min(fitting, key=lambda arena: arena.capacity, default=None)
        if arena is not None:
            self._spare.remove(arena)
        return arena

    def _fresh_arena(self, num_tokens: int) -> KVArena | None:
        needed = bytes_for(self.layout, num_tokens, self._block_size)
        if needed > self.limit_bytes:
            raise ContextTooLong(
                f"{num_tokens} tokens need {format_size(needed)} of KV memory, and --kv-memory allows "
                f"{format_size(self.limit_bytes)}; use a shorter prompt or raise --kv-memory"
            )
        while needed > (room := self._room_bytes()):
            if not self._free_something():
                break
        if needed <= room:
            arena = self._new_arena()
            arena.reserve(num_tokens)
            return arena
        if self.slots:
            return None
        raise ContextTooLong(
            f"{num_tokens} tokens need {format_size(needed)} of KV memory, {format_size(max(room, 0))} are available; "
            "use a shorter prompt or a machine with more memory"
        )

    def _free_something(self) -> bool:
        """Gives memory back: that of no sequence, then that of the sequence that ended longest ago."""
        if self._spare:
            self._spare.pop()
            return True
        idle = min((slot for slot in self.slots if not slot.is_busy), key=lambda slot: slot.used_at, default=None)
        if idle is None:
            return False
        idle.arena.settle(drop=True)
        self.slots.remove(idle)
        return True

    def _forget(self, slot: Slot) -> None:
        slot.arena.settle(drop=True)
        self.slots.remove(slot)
        self._spare.append(slot.arena)

    def _new_arena(self) -> KVArena:
        return KVArena(self.layout, self._device, self._room_bytes, block_size=self._block_size)

    def _room_bytes(self) -> int:
        return min(self.limit_bytes - self.used_bytes, self._device_free_bytes())
