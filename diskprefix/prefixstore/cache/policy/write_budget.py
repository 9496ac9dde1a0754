"""The part of a selection that may be written within `--kv-cache-write-budget`.

Each beginning of a prompt is written while less than a fraction of the budget was used in the last 24 hours. The
fraction is largest for a beginning that was missed: an earlier prompt had it too, but neither memory nor disk had its
state. It is smaller for a new system message and for the new part of a conversation, and smallest for a new prompt. A
beginning that is still in memory can wait until it is missed. The selection of a request that says itself what to keep
(by scope, time to live or marks) is written as long as there is room.

The shares (`CacheOptions.share`) that asked in these 24 hours have equal parts of the budget. The fractions hold within
each part too.
"""

from __future__ import annotations

from collections import Counter

from msgspec import Struct
from msgspec.structs import replace

from diskprefix.prefixstore.cache.policy.select import Rules
from diskprefix.tokens import floor_to_grid
from diskprefix.values import Prompt, Selection

_MISSED, _SYSTEM, _GOES_ON, _NEW = 0.95, 0.75, 0.25, 0.2
"""The fractions. The last twentieth of the budget is for records, such as uses of blocks and recent prompts."""
_MAX_SHARES = 256
"""The most shares with a part of their own: anybody may have many addresses."""


class Spending(Struct, frozen=True, kw_only=True):
    """The use of a budget: `used_bytes` of `limit_bytes` were written in the last 24 hours, `own_bytes` of them for the
    request's share, which is one of `num_shares`. A token takes `bytes_per_token`, a checkpoint or the end of a prompt
    `state_bytes`."""

    used_bytes: int
    limit_bytes: int
    bytes_per_token: int
    state_bytes: int = 0
    own_bytes: int = 0
    num_shares: int = 1

    @property
    def is_ample(self) -> bool:
        """True if even state that nobody missed yet is written."""
        return self.used_bytes <= _GOES_ON * self.limit_bytes

    @property
    def is_spent(self) -> bool:
        """True if nothing more is written."""
        return self.used_bytes >= _MISSED * self.limit_bytes

    def allows(self, selection: Selection, stored: int, fraction: float) -> bool:
        """Returns whether a selection, without the `stored` tokens, fits in a fraction of the budget."""
        return self._fits(self.cost(selection, stored), fraction)

    def cost(self, selection: Selection, stored: int) -> int:
        """Returns the bytes of a selection without the `stored` tokens."""
        num_states = sum(at > stored for at in selection.checkpoints) + selection.keep_tail
        return max(0, selection.kept - stored) * self.bytes_per_token + num_states * self.state_bytes

    def allows_reply(self, stop: int, stored: int, *, is_asked: bool) -> bool:
        """Returns whether a prompt and its reply fit: the tokens from `stored` to `stop` and the state there. The
        length is not known when the prompt is selected. For `is_asked` see `within_budget`."""
        cost = max(0, stop - stored) * self.bytes_per_token + self.state_bytes
        return self._fits(cost, _MISSED if is_asked else _GOES_ON)

    def allows_picture(self, num_bytes: int, *, is_asked: bool) -> bool:
        """Returns whether the output of an encoder fits. Computing it takes longer than a prompt of as many bytes."""
        return self._fits(num_bytes, _MISSED if is_asked else _SYSTEM)

    def _fits(self, cost: int, fraction: float) -> bool:
        limit = fraction * self.limit_bytes
        return not cost or (self.used_bytes + cost <= limit and self.own_bytes + cost <= limit / self.num_shares)


class SpentByShare:
    """Estimates the bytes written for each share in the last 24 hours, since the start. For the engine's thread."""

    def __init__(self) -> None:
        self._hours_of: dict[str, Counter[int]] = {}

    def add(self, share: str, num_bytes: int, now: float) -> None:
        """Counts bytes of a share. Shares above `_MAX_SHARES` count as one."""
        counted = share if share in self._hours_of or len(self._hours_of) < _MAX_SHARES else ""
        self._hours_of.setdefault(counted, Counter())[int(now // 3600)] += num_bytes

    def spent_by(self, share: str, now: float) -> tuple[int, int]:
        """Returns the bytes of a share that asks now, and the number of shares that have written in the last 24 hours,
        with this one."""
        for other, hours in list(self._hours_of.items()):
            self._hours_of[other] = Counter({hour: n for hour, n in hours.items() if hour >= now // 3600 - 24})
        self._hours_of = {other: hours for other, hours in self._hours_of.items() if hours.total()}
        own = self._hours_of.get(share, self._hours_of.get("", Counter()))
        is_new = share not in self._hours_of and "" not in self._hours_of
        return own.total(), len(self._hours_of) + is_new


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
    """Returns the longest beginning of a selection that may be written now, with the reason `write_budget` if that is
    not all.

    The store has the first `stored` tokens of the prompt, and `had` were restored from there or from memory.
    `is_asked`: the request itself says what to keep.
    """
    if spending is None or not selection.kept:
        return selection
    fractions = _fractions(selection, prompt, had, rules.price)
    if is_asked:
        fractions[selection.kept] = _MISSED
    for at in sorted(fractions, reverse=True):
        part = selection if at >= selection.kept else _cut(selection, at, rules)
        if part.kept and spending.allows(part, stored, fractions[at]):
            return part
    return selection.keeping_nothing("write_budget")


def _fractions(selection: Selection, prompt: Prompt, had: int, min_missed: int) -> dict[int, float]:
    """Returns beginnings of a prompt, in tokens, with their fractions of the budget. Fewer than `min_missed` tokens
    that had to be computed again do not count as missed."""
    known, whole = max(selection.common, selection.seen), selection.kept
    goes_on = selection.reason == "continues" or known >= whole
    fractions = {whole: _GOES_ON if goes_on else _NEW}

    def allow(at: int, fraction: float) -> None:
        at = whole if at >= whole else prompt.last_safe(at)
        fractions[at] = max(fraction, fractions.get(at, 0.0))

    allow(prompt.system_end, _SYSTEM)
    allow(known, _MISSED if known >= had + min_missed else _GOES_ON)
    for mark in prompt.marks:
        allow(mark.position, _MISSED)
    return fractions


def _cut(selection: Selection, at: int, rules: Rules) -> Selection:
    """Returns the selection shortened to at most `at` tokens."""
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
