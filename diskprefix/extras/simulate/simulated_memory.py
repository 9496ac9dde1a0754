"""The KV memory of a daemon in which nothing overlaps: sequences that ended, in which a later prompt may continue."""

from __future__ import annotations

from dataclasses import dataclass

from diskprefix.cache.policy.select import AT_CHECKPOINTS, StateKind
from diskprefix.tokens import LEAST_TOKENS, TokenIds, common_prefix_length, floor_to_grid


@dataclass(eq=False)
class _Ended:
    """A sequence that ended at `when`, with the tokens whose state is in memory."""

    tenant: str
    token_ids: TokenIds
    when: float


class SimulatedMemory:
    """Sequences within `max_tokens` in all, at most `max_idle` beside the last one. `grid` is where prompts can be cut.

    Which one goes is decided as `kv.pool.KVPool` does: the one with the fewest tokens for each second since its last
    use if there are too many, the one that ended first if there are too many tokens.
    """

    def __init__(self, max_tokens: int, max_idle: int, state: StateKind, grid: int) -> None:
        self._max_tokens = max_tokens
        self._max_idle = max_idle
        self._state = state
        self._grid = grid
        self._ended: list[_Ended] = []

    def take(self, tenant: str, token_ids: TokenIds) -> int:
        """Returns how many tokens of a prompt are in memory. A sequence of which it shares most goes on in it."""
        found = [(self._usable(one, token_ids), one.when, one) for one in self._ended if one.tenant == tenant]
        num_tokens, _, best = max(found, key=lambda one: one[:2], default=(0, 0.0, None))
        if best is None or num_tokens < LEAST_TOKENS:
            return 0
        if 2 * num_tokens >= len(best.token_ids) or self._state in AT_CHECKPOINTS:
            self._ended.remove(best)
        return num_tokens

    def keep(self, tenant: str, token_ids: TokenIds, when: float) -> None:
        """Keeps a sequence that has ended."""
        self._ended.append(_Ended(tenant, token_ids, when))
        while len(self._ended) > self._max_idle:
            self._ended.remove(min(self._ended, key=lambda one: len(one.token_ids) / (1.0 + when - one.when)))
        while sum(len(one.token_ids) for one in self._ended) > self._max_tokens:
            del self._ended[0]

    def _usable(self, one: _Ended, token_ids: TokenIds) -> int:
        common = common_prefix_length(one.token_ids, token_ids)
        if self._state in AT_CHECKPOINTS:
            is_whole = common == len(one.token_ids) < len(token_ids)
            return common if is_whole and common % self._grid == 0 else 0
        return floor_to_grid(min(common, len(token_ids) - 1), self._grid)
