"""The memory of sequences: of those that run, and of those that ended, where a later prompt may begin.

Each sequence has a `KVAllocation` with a `KVArena` of its own. All of them together stay within a bound in bytes. The
memory of a sequence that ended is kept until the room is needed: a later prompt that begins with its tokens continues
there without a copy. That is the memory tier. When it holds too many sequences, the one with the fewest tokens for each
second since its last use goes, so that a few short requests do not displace a long conversation that pauses. When
memory is short, the least recently used sequence goes first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np
import torch

from diskprefix.errors import ContextTooLong
from diskprefix.kv.arena import KVArena, bytes_for, tokens_within
from diskprefix.kv.layout import Layout
from diskprefix.kv.transfer import populate
from diskprefix.nouns import CacheOptions
from diskprefix.tokens import LEAST_TOKENS, TokenIds, common_prefix_length, floor_to_grid
from diskprefix.units import format_size

_TOKENS_AHEAD = 4096
"""Of a reply, that get memory at once. With more, one long prompt would keep out the short ones of others."""


@dataclass(eq=False)
class KVAllocation:
    """The memory of one sequence. Only prompts of the same `owner` may continue in it.

    The first `num_exact` of the `token_ids` have the state that a prefill computes, or will have it once they are
    computed. `logits` are the next-token logits, shape [vocab], after `logits_at` tokens.
    """

    arena: KVArena
    num_computed: int = 0
    """The tokens that the arena holds. While a fetch fills it, those that it held before."""
    owner: Hashable = None
    token_ids: TokenIds = field(default_factory=lambda: np.empty(0, np.int32))
    num_exact: int = 0
    is_busy: bool = False
    used_at: float = 0.0
    options: CacheOptions | None = None
    """Those of the request that ended here."""
    expires_at: float = float("inf")
    """The time on the clock of `time.monotonic`."""
    logits_at: int = 0
    logits: torch.Tensor | None = None

    @property
    def worth(self) -> float:
        """The tokens for each second since the last use: what continuing in it saves, and how soon that is expected."""
        return self.num_computed / (1.0 + time.monotonic() - self.used_at)


@dataclass(frozen=True)
class PrefixMatch:
    """An allocation that holds the beginning of a prompt: `num_tokens` tokens now, `later` when its own prompt is
    computed."""

    allocation: KVAllocation
    num_tokens: int
    later: int

    @property
    def is_worth_waiting_for(self) -> bool:
        return self.later >= self.num_tokens + LEAST_TOKENS


class KVPool:
    """Allocations within `limit_bytes`, and within the free memory of the device (`free_bytes`). For the engine's
    thread.

    At most `max_idle` sequences that ended are kept. `block_size` is the grid, in tokens.
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
        self.allocations: list[KVAllocation] = []
        self._device = device
        self._device_free_bytes = free_bytes
        self._block_size = block_size
        self._is_idle = True
        """True until the first request. Until then, pages are made ahead."""
        self._spare: list[KVArena] = []
        """The memory of no sequence, kept because pages that were touched once are faster to fill."""

    @property
    def used_bytes(self) -> int:
        arenas = [*(allocation.arena for allocation in self.allocations), *self._spare]
        return sum(arena.num_bytes for arena in arenas)

    def longest(self, most_tokens: int) -> int:
        """Returns the longest sequence, at most `most_tokens`, that fits if it is alone."""
        return tokens_within(self.layout, self.limit_bytes, most_tokens, self._block_size)

    def touch(self, num_bytes: int, max_tokens: int) -> None:
        """Allocates memory before the first request. A thread makes its pages beside the rest of the start, until
        `give_way`. Raises `ContextTooLong` if there is less memory."""
        arena = self._new_arena()
        affordable = min(num_bytes, self._room_bytes() // 2) // max(self.layout.bytes_per_token, 1)
        arena.reserve(min(max_tokens, affordable))
        self._spare.append(arena)
        wanted = ([memory.tensor for memory in arena.memory], lambda: self._is_idle)
        threading.Thread(target=populate, args=wanted, name="kv-memory", daemon=True).start()

    def give_way(self) -> None:
        """Stops making pages ahead, as a request has come. Meanwhile the process could map no memory, which a tokenizer
        does hundreds of times. For any thread."""
        self._is_idle = False

    def match_prefix(self, owner: Hashable, token_ids: TokenIds) -> PrefixMatch | None:
        """Returns the allocation that holds, or will hold, most of a prompt; None if none has a token of it."""
        found = [self._matched(one, token_ids) for one in self.allocations if one.owner == owner]
        now = max(found, key=lambda m: (m.num_tokens, not m.allocation.is_busy, m.allocation.used_at), default=None)
        later = max(found, key=lambda one: one.later, default=None)
        if now is None or later is None or later.later < LEAST_TOKENS:
            return None
        return later if later.later >= now.num_tokens + LEAST_TOKENS else now

    def allocate(self, num_tokens: int, most_tokens: int = 0) -> KVAllocation | None:
        """Returns an empty allocation with room for `num_tokens` tokens, or for more of a sequence that may get
        `most_tokens`; None if others must end first. Raises `ContextTooLong` if they never fit."""
        num_tokens = self._tokens_at_once(num_tokens, most_tokens)
        fitting = (arena for arena in self._spare if arena.capacity >= num_tokens)
        arena = min(fitting, key=lambda arena: arena.capacity, default=None)
        if arena is not None:
            self._spare.remove(arena)
        elif (arena := self._fresh_arena(num_tokens)) is None:
            return None
        arena.truncate(0)
        self.allocations.append(allocation := KVAllocation(arena, is_busy=True, used_at=time.monotonic()))
        return allocation

    def extend(self, found: PrefixMatch, num_tokens: int, most_tokens: int = 0) -> KVAllocation | None:
        """Returns memory that holds the matched prefix, with room as `allocate` gives it; None if others must end
        first. An idle allocation is adopted if the prompt shares most of its tokens. Otherwise the shared part is
        copied, unless there is no room for two."""
        source = found.allocation
        is_most = 2 * found.num_tokens >= len(source.token_ids)
        if not source.is_busy and (is_most or not self.layout.is_sliceable):
            return self._adopted(found, num_tokens, most_tokens)
        was_busy, source.is_busy = source.is_busy, True
        try:
            allocation = self.allocate(num_tokens, most_tokens)
        finally:
            source.is_busy = was_busy
        if allocation is None:
            return None if source.is_busy else self._adopted(found, num_tokens, most_tokens)
        allocation.arena.copy_from(source.arena, found.num_tokens)
        allocation.num_computed = found.num_tokens
        if source.logits_at <= found.num_tokens:
            allocation.logits_at, allocation.logits = source.logits_at, source.logits
        return allocation

    def fork(self, source: KVAllocation, num_tokens: int) -> KVAllocation | None:
        """Returns memory with a copy of the marked point of a sequence; None if others must end first."""
        allocation = self.allocate(num_tokens)
        if allocation is not None:
            allocation.num_computed = source.arena.marked_tokens
            allocation.arena.copy_from(source.arena, allocation.num_computed)
        return allocation

    def grow(self, allocation: KVAllocation, num_tokens: int) -> bool:
        """Makes room for `num_tokens` tokens in all. Returns False if others must end first."""
        if num_tokens <= allocation.arena.capacity:
            return True
        while True:
            try:
                allocation.arena.reserve(num_tokens)
            except ContextTooLong:
                if not self._free_something():
                    return False
            else:
                return True

    def release(self, allocation: KVAllocation, *, keep: bool) -> None:
        """Ends the sequence of an allocation. `keep`: a later prompt may continue in it."""
        allocation.is_busy, allocation.used_at = False, time.monotonic()
        if not keep or not self.max_idle or not allocation.num_computed:
            self._spare.append(self._removed(allocation))
            return
        idle = sorted(self.idle, key=lambda one: one.worth)
        for least in idle[: max(0, len(idle) - self.max_idle)]:
            self._spare.append(self._removed(least))

    def drop_gone(self, is_gone: Callable[[Hashable], bool]) -> None:
        """Gives back the memory of sequences that ended and have expired, or whose owner `is_gone`. Their state does
        not stay in memory that is kept for others."""
        now = time.monotonic()
        gone = [one for one in self.idle if one.expires_at <= now or is_gone(one.owner)]
        if gone:
            self._spare += [self._removed(allocation) for allocation in gone]
            while self._spare:
                self._spare.pop().discard()

    def stats(self) -> dict[str, int]:
        """Returns sizes in bytes, numbers of sequences, and the tokens of those that ended."""
        idle = self.idle
        return {
            "limit_bytes": self.limit_bytes,
            "used_bytes": self.used_bytes,
            "max_entries": self.max_idle,
            "entries": len(idle),
            "entry_tokens": sum(len(one.token_ids) for one in idle),
            "running": len(self.allocations) - len(idle),
        }

    @property
    def idle(self) -> list[KVAllocation]:
        """The memory of sequences that ended."""
        return [one for one in self.allocations if not one.is_busy]

    def _matched(self, allocation: KVAllocation, token_ids: TokenIds) -> PrefixMatch:
        common = min(common_prefix_length(allocation.token_ids, token_ids), allocation.num_exact)
        later = self._usable(allocation, common, common, len(token_ids)) if allocation.is_busy else 0
        now = self._usable(allocation, common, allocation.num_computed, len(token_ids))
        return PrefixMatch(allocation, now, max(now, later))

    def _usable(self, allocation: KVAllocation, common: int, num_computed: int, prompt_tokens: int) -> int:
        """Returns from how many of the `common` tokens a prompt can continue once `num_computed` are computed."""
        num_tokens = allocation.arena.held(min(common, num_computed))
        if num_tokens == prompt_tokens and allocation.logits_at == prompt_tokens and allocation.logits is not None:
            is_there = self.layout.is_sliceable or (allocation.num_computed == num_tokens and not allocation.is_busy)
            return num_tokens if is_there else 0
        match self.layout.state_kind:
            case "token":
                return allocation.arena.held(min(num_tokens, prompt_tokens - 1))
            case "sliceable":
                grid_point = floor_to_grid(min(num_tokens, prompt_tokens - 1), self._block_size)
                return grid_point if allocation.arena.held(grid_point) == grid_point else 0
            case "token_checkpoints" | "checkpoints" as kind:
                # States are those at the end of what was computed.
                is_there = num_tokens == num_computed < prompt_tokens and not allocation.is_busy
                is_exact = kind == "token_checkpoints" or num_computed % self._block_size == 0
                return num_computed if is_there and is_exact else 0

    def _tokens_at_once(self, num_tokens: int, most_tokens: int) -> int:
        """Returns the tokens to allocate memory for: more than `num_tokens` where the sequence could not grow for want
        of room for the old memory beside the new, and there is room for them."""
        wanted = min(most_tokens, num_tokens + _TOKENS_AHEAD)
        if wanted <= num_tokens or 2 * bytes_for(self.layout, num_tokens, self._block_size) <= self.limit_bytes:
            return num_tokens
        busy = sum(one.arena.num_bytes for one in self.allocations if one.is_busy)
        room = min(self.limit_bytes, self._device_free_bytes() + self.used_bytes) - busy
        return wanted if bytes_for(self.layout, wanted, self._block_size) <= room else num_tokens

    def _adopted(self, found: PrefixMatch, num_tokens: int, most_tokens: int) -> KVAllocation | None:
        allocation = found.allocation
        allocation.is_busy = True
        allocation.arena.settle(drop=True)
        allocation.arena.truncate(found.num_tokens)
        allocation.num_computed = found.num_tokens
        if allocation.logits_at > found.num_tokens:
            # They follow other tokens.
            allocation.logits_at, allocation.logits = 0, None
        if num_tokens <= allocation.arena.capacity or self.grow(
            allocation, self._tokens_at_once(num_tokens, most_tokens)
        ):
            return allocation
        allocation.is_busy = False
        if any(other.is_busy for other in self.allocations):
            return None
        # There is no room for a larger copy beside it, and nobody to wait for.
        return self.allocate(num_tokens, most_tokens)

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
        if self.allocations:
            return None
        raise ContextTooLong(
            f"{num_tokens} tokens need {format_size(needed)} of KV memory, {format_size(max(room, 0))} are available; "
            "use a shorter prompt or a machine with more memory"
        )

    def _free_something(self) -> bool:
        """Gives memory back: spare memory first, then that of the sequence that ended longest ago."""
        if self._spare:
            self._spare.pop().discard()
            return True
        if not (idle := self.idle):
            return False
        self._removed(min(idle, key=lambda one: one.used_at)).discard()
        return True

    def _removed(self, allocation: KVAllocation) -> KVArena:
        allocation.arena.settle(drop=True)
        self.allocations.remove(allocation)
        return allocation.arena

    def _new_arena(self) -> KVArena:
        return KVArena(self.layout, self._device, self._room_bytes, block_size=self._block_size)

    def _room_bytes(self) -> int:
        return min(self.limit_bytes - self.used_bytes, self._device_free_bytes())
