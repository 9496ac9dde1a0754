"""The part of a selection that `--kv-cache-write-budget` leaves: what is least likely to be missed is not written.

Each beginning of a prompt is written while less than a share of the budget was used in the last 24 hours. The share is
largest for what had to be computed again: an earlier prompt began with it, and neither memory nor disk had it. It is
smaller for a new system message, for the new part of a conversation that goes on, and smallest for a new prompt. What
was seen before but is still in memory can wait, as it is written when it was missed once. What the request itself asks
to keep (its scope, time to live or marks) has room as long as there is any.

Each API key has an equal part of the budget, among the keys that asked in these hours: within it the same shares hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace

from diskprefix.cache.policy.select import Rules
from diskprefix.tokens import floor_to_grid
from diskprefix.values import Prompt, Selection

_MISSED, _SYSTEM, _GOES_ON, _NEW = 0.95, 0.75, 0.25, 0.2
"""The shares. The last twentieth of the budget is for records: uses of blocks, recent prompts."""


@dataclass(frozen=True, kw_only=True)
class Spending:
    """The use of a budget: `used_bytes` of `limit_bytes` were written in the last 24 hours, `own_bytes` of them for the
    API key of the request, one of `num_keys`. Each token adds `bytes_per_token`, each checkpoint and each end of a
    prompt `state_bytes`."""

    used_bytes: int
    limit_bytes: int
    bytes_per_token: int
    state_bytes: int = 0
    own_bytes: int = 0
    num_keys: int = 1

    @property
    def is_ample(self) -> bool:
        """Even what was not missed yet is written."""
        return self.used_bytes <= _GOES_ON * self.limit_bytes

    @property
    def is_spent(self) -> bool:
        """Nothing more is written."""
        return self.used_bytes >= _MISSED * self.limit_bytes

    def allows(self, selection: Selection, stored: int, share: float) -> bool:
        """Returns whether what a selection adds to the `stored` tokens fits in a share of the budget."""
        return self._fits(self.cost(selection, stored), share)

    def cost(self, selection: Selection, stored: int) -> int:
        """Returns the bytes that a selection adds to the `stored` tokens."""
        num_states = sum(at > stored for at in selection.checkpoints) + selection.keep_tail
        return max(0, selection.kept - stored) * self.bytes_per_token + num_states * self.state_bytes

    def allows_reply(self, end: int, stored: int, *, is_asked: bool) -> bool:
        """Returns whether a prompt and its reply fit, which add `end` - `stored` tokens and the state at the end. That
        is not known when the prompt is chosen. `is_asked`: see `within_budget`."""
        cost = max(0, end - stored) * self.bytes_per_token + self.state_bytes
        return self._fits(cost, _MISSED if is_asked else _GOES_ON)

    def allows_picture(self, num_bytes: int, *, is_asked: bool) -> bool:
        """Returns whether the output of an encoder fits, which takes longer to compute than a prompt of as many
        bytes."""
        return self._fits(num_bytes, _MISSED if is_asked else _SYSTEM)

    def _fits(self, cost: int, share: float) -> bool:
        most = share * self.limit_bytes
        return not cost or (self.used_bytes + cost <= most and self.own_bytes + cost <= most / self.num_keys)


class SpentByKey:
    """Estimates what was written for each API key in the last 24 hours, since the start. For the engine's thread."""

    def __init__(self) -> None:
        self._hours_of: dict[Hashable, Counter[int]] = {}

    def add(self, key: Hashable, num_bytes: int, now: float) -> None:
        self._hours_of.setdefault(key, Counter())[int(now // 3600)] += num_bytes

    def of(self, key: Hashable, now: float) -> tuple[int, int]:
        """Returns the bytes for a key that asks now, and the number of keys that asked in these hours."""
        self.add(key, 0, now)
        for other, hours in list(self._hours_of.items()):
            self._hours_of[other] = Counter({hour: n for hour, n in hours.items() if hour >= now // 3600 - 24})
        self._hours_of = {other: hours for other, hours in self._hours_of.items() if hours}
        return self._hours_of[key].total(), len(self._hours_of)


def within_budget(
    selection: Selection,
    prompt: Prompt,
    spending: Spending | None,
    rules: Rules,
    *,
    stored: int,
    had: int,
    is_asked: bool,
) -> Selection:
    """Returns the longest beginning of a selection that may be written now: all of it without a budget. If it is less,
    the reason is `write_budget`.

    `stored` tokens of the prompt are in the store; `had` were restored, from there or from memory. `is_asked`: the
    request itself says what to keep.
    """
    if spending is None or not selection.kept:
        return selection
    shares = _shares(selection, prompt, had, rules.price)
    if is_asked:
        shares[selection.kept] = _MISSED
    for at in sorted(shares, reverse=True):
        part = selection if at >= selection.kept else _cut(selection, at, rules)
        if part.kept and spending.allows(part, stored, shares[at]):
            return part
    return selection.keeping_nothing("write_budget")


def _shares(selection: Selection, prompt: Prompt, had: int, least: int) -> dict[int, float]:
    """Returns beginnings of a prompt, in tokens, and up to which share of the budget each is written. Fewer than
    `least` tokens that were computed again do not count as missed."""
    known, end = max(selection.common, selection.seen), selection.kept
    goes_on = selection.reason == "continues" or known >= end
    shares = {end: _GOES_ON if goes_on else _NEW}

    def allow(at: int, share: float) -> None:
        at = end if at >= end else prompt.last_safe(at)
        shares[at] = max(share, shares.get(at, 0.0))

    allow(prompt.system_end, _SYSTEM)
    allow(known, _MISSED if known >= had + least else _GOES_ON)
    for mark in prompt.marks:
        allow(mark.position, _MISSED)
    return shares


def _cut(selection: Selection, at: int, rules: Rules) -> Selection:
    """Returns a selection that keeps no more than `at` tokens."""
    at = floor_to_grid(at, rules.grid)
    checkpoints = tuple(position for position in selection.checkpoints if position <= at)
    if selection.checkpoints:
        at = checkpoints[-1] if checkpoints else 0
    if at < max(rules.min_tokens, 1):
        return selection.keeping_nothing("write_budget")
    return replace(
        selection,
        reason="write_budget",
        selected=at,
        aligned=at,
        keep_tail=False,
        saves_reply=False,
        checkpoints=checkpoints,
        votes=selection.votes[: len(checkpoints)],
    )
