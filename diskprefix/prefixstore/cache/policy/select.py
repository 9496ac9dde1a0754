"""Decides how much of a prompt is kept.

policies/README.md explains the rules. `auto` only cuts at safe boundaries: positions between messages, after which
other prompts may differ.

Where state can be cut anywhere, all of a prompt is kept while the store has room. Once it had to evict something, the
age of what it evicts is compared with the ages at which similar prompts come again. If too few come again before that
age, only the longest prefix is kept that this prompt shares with an earlier one, or nothing.

Under every scope but `off`, a prompt is kept at least up to the last position that the client marked.

Where state exists at checkpoints only, each prompt of the window votes for the last safe boundary that it shares with
this prompt. Older prompts together vote for the last boundary that was seen before. This prompt votes for its own end
if it is expected to come again. The set of positions is chosen for which

    sum over its positions of (tokens since the position before) x (votes for it or for a later one)  -  price of each

is largest. The first position counts from where this prompt was restored to, as tokens before that are stored already.
The price is `min_tokens`, or more for large states. The end of a conversation that is expected to continue has the
lowest price, because it soon replaces an earlier end (`anchors`), and so has the end of the last question: where a
template drops the thoughts of earlier turns, the next question's prompt leaves there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

from msgspec import Struct

from diskprefix.prefixstore.cache.policy.seen import ENOUGH_TRIALS, Earlier, Sighting
from diskprefix.prefixstore.store_options import StoreOptions
from diskprefix.tokens import LEAST_TOKENS, floor_to_grid
from diskprefix.values import Prompt, Reason, Scope, Selection

StateKind: TypeAlias = Literal["token", "sliceable", "token_checkpoints", "checkpoints"]
"""The places where a restored prefix can end: any token; the end of any block; a checkpoint, which may be at any token;
a checkpoint, which is at the end of a block."""
AT_ANY_TOKEN: tuple[StateKind, ...] = ("token", "token_checkpoints")
"""The kinds of models that are exact at every token."""
AT_CHECKPOINTS: tuple[StateKind, ...] = ("token_checkpoints", "checkpoints")
"""The kinds with state that exists at one position only."""

_SHORT_END = 8
"""A prompt belongs to an earlier one's conversation if at most this part (1/8) of the earlier one was rewritten."""
_WORTHWHILE = 1 / 5
"""In a store without room, state is written if at least this share of similar state comes again before it would be
evicted. Computing takes far longer than writing. With 1/10, presets in a loop restored 25 points less (`cline-prompts`
of `tools/bench policies`), with 2/5 a trace of documents and an agent 3 (`mooncake`, `openhands-mock`)."""
_MIN_UNLIKE = 8
"""The number of recent prompts without a common beginning after which a new system message is not kept at once."""
_BYTES_FOR_A_TOKEN = 256 << 10
"""A checkpoint must save a token for each of these bytes. Keys and values of a token have 10 to 200 KiB."""


class Rules(Struct, frozen=True, kw_only=True):
    """The settings of the policy, in tokens, and the kind of the model's state.

    A prefix shorter than `min_tokens` is not kept. `cold_max` and `interval` place the checkpoints of the scopes `full`
    and `N`. `state_bytes` is the size of a checkpoint's states.
    """

    block_size: int
    min_tokens: int
    cold_max: int
    interval: int
    state: StateKind = "sliceable"
    state_bytes: int = 0

    @property
    def grid(self) -> int:
        """State is kept at multiples of this position."""
        return 1 if self.state in AT_ANY_TOKEN else self.block_size

    @property
    def price(self) -> int:
        """The minimum number of tokens that a checkpoint must save."""
        return max(self.min_tokens, 1, self.grid, self.state_bytes // _BYTES_FOR_A_TOKEN)

    @classmethod
    def of(cls, settings: StoreOptions, state: StateKind, state_bytes: int = 0) -> Rules:
        """Returns the rules of a daemon's settings, for a model with this kind and size of state."""
        return cls(
            block_size=settings.block_size,
            min_tokens=settings.kv_cache_min_tokens,
            cold_max=settings.kv_cache_cold_max,
            interval=settings.kv_cache_interval,
            state=state,
            state_bytes=state_bytes,
        )


class _Choice(NamedTuple):
    """A boundary and its reason. For state at checkpoints, `support` has the positions up to it with their votes."""

    selected: int
    reason: Reason
    support: dict[int, int] | None = None
    is_whole: bool = True
    """The prompt's end is kept too, if the boundary is there."""
    goes_on: bool = False
    """A later prompt is expected to continue from the reply."""
    anchors: tuple[int, ...] = ()
    """Positions, stored already or not, after which other conversations are expected to differ from this prompt."""


class _Window(NamedTuple):
    """The earlier prompts of the window, newest first, and the knowledge from all others. `seen` is the number of the
    prompt's tokens whose blocks were seen before, in the window or not."""

    recent: Sequence[Earlier]
    seen: int
    sighting: Sighting

    @property
    def common(self) -> int:
        """The maximum number of tokens that a prompt of the window shares with this one."""
        return max((earlier.common for earlier in self.recent), default=0)

    @property
    def known(self) -> int:
        """The number of first tokens that were seen before, in the window or not."""
        return max(self.common, self.seen)

    @property
    def max_common(self) -> int:
        """The maximum number of tokens that a prompt of the window or the older prompt shares with this one."""
        older = self.sighting.older
        return max(self.common, older.common if older is not None else 0)

    @property
    def lost(self) -> int:
        """The number of last tokens of the most similar earlier prompt that this one lacks; the minimum, if there are
        several such prompts."""
        common, older = self.common, self.sighting.older
        if older is not None and older.common > common:
            return older.lost
        return min((earlier.lost for earlier in self.recent if earlier.common == common), default=0)


def select(scope: Scope, prompt: Prompt, rules: Rules, sighting: Sighting, *, restored: int = 0) -> Selection:
    """Returns the part of `prompt` to keep under `scope`, given a sighting. A pure function.

    If messages were left out of a prompt, the scopes `auto` and `N` keep marked positions only, as the tokens are not
    those of the conversation. The checkpoints of `auto` depend on `restored`, the number of tokens that need not be
    computed. Other scopes only report the prompts of the window. `Sighting.older` only tells whether this prompt
    continues it.
    """
    num_tokens, grid = len(prompt.token_ids), rules.grid
    if scope.kind == "off":
        return Selection(scope=scope, prompt_tokens=num_tokens, reason="off")
    auto = scope.kind == "auto"
    if not auto:
        sighting = Sighting(recent=sighting.recent)
    window = _Window(sighting.recent, min(sighting.num_blocks * rules.block_size, num_tokens), sighting)
    min_tokens = max(rules.min_tokens, 1)
    # A mark with fewer tokens before it keeps nothing.
    marks = [mark.position for mark in prompt.marks if floor_to_grid(mark.position, grid) >= min_tokens]
    choice = _choose_boundary(scope, prompt, rules, window, restored)
    if marks and min(marks[-1], num_tokens) > choice.selected:
        choice = choice._replace(selected=min(marks[-1], num_tokens), reason="marks", is_whole=True)

    at_checkpoints = rules.state in AT_CHECKPOINTS
    selected, reason = choice.selected, choice.reason
    aligned = floor_to_grid(selected, grid)
    keep_tail = 0 < selected == num_tokens and choice.is_whole
    if selected and (selected if keep_tail else aligned) < min_tokens:
        aligned, keep_tail, reason = 0, False, _why_short(prompt, min_tokens)
    support: dict[int, int] = {}
    if at_checkpoints and (aligned or keep_tail):
        positions = _checkpoints_of_scope(scope, prompt, rules, choice, aligned) if choice.support is None else set()
        positions |= {floor_to_grid(at, grid) for at in (aligned, *marks)}
        support = dict.fromkeys(positions, 0) | (choice.support or {})
        if keep_tail:
            # The tail has the states there.
            support.pop(num_tokens, None)
    checkpoints = tuple(sorted(position for position in support if min_tokens <= position <= aligned))
    anchors = {*choice.anchors, *(floor_to_grid(at, grid) for at in (prompt.system_end, prompt.question_end, *marks))}
    if choice.support is None:
        anchors |= set(checkpoints)
    return Selection(
        scope=scope,
        prompt_tokens=num_tokens,
        reason=reason,
        selected=selected,
        aligned=aligned,
        keep_tail=keep_tail,
        saves_reply=choice.goes_on and (keep_tail or aligned > 0 or reason in ("already_saved", "short_prompt")),
        checkpoints=checkpoints,
        anchors=tuple(sorted(anchors - {0})) if at_checkpoints else (),
        votes=tuple(support[position] for position in checkpoints) if choice.support is not None else (),
        window=scope.value if auto else 0,
        recent=len(window.recent),
        common=window.common,
        seen=window.seen,
        price=rules.price if auto and at_checkpoints else 0,
        lost=window.lost,
        trials=sighting.trials,
        again=sighting.again,
    )


def _choose_boundary(scope: Scope, prompt: Prompt, rules: Rules, window: _Window, restored: int) -> _Choice:
    """Returns the boundary under a scope, without the client's marks."""
    num_tokens, min_tokens = len(prompt.token_ids), max(rules.min_tokens, 1)
    if prompt.rewriting.is_shortened and not scope.keeps_all:
        return _Choice(0, "left_out")
    if scope.kind == "full":
        has_states = rules.state in AT_CHECKPOINTS
        anchors = _anchors(_leaving(prompt, window, rules.grid).of_others, rules, min_tokens) if has_states else ()
        return _Choice(num_tokens, "full", goes_on=True, anchors=anchors)
    if scope.kind != "auto":
        return _Choice(min(scope.value, num_tokens), "tokens", goes_on=scope.value > num_tokens)
    if rules.state in AT_CHECKPOINTS:
        return _by_support(prompt, window, rules, min_tokens, restored)
    return _by_sighting(prompt, window)


def _checkpoints_of_scope(scope: Scope, prompt: Prompt, rules: Rules, choice: _Choice, aligned: int) -> set[int]:
    """Returns the positions where the scopes `full` and `N` have checkpoints. Those after `aligned` are not used."""
    positions: list[int] = []
    if scope.keeps_all or choice.reason == "tokens":
        # They bound the recomputation for a prompt that differs in between.
        positions += range(rules.interval, aligned + 1, rules.interval)
    if scope.keeps_all:
        # Other conversations share the first ones, the next turn has the last ones.
        num_tokens = len(prompt.token_ids)
        cold, last = prompt.last_safe(min(rules.cold_max, num_tokens)), prompt.last_safe(num_tokens)
        positions += (prompt.system_end, prompt.question_end, cold, last, *choice.anchors)
    return {floor_to_grid(at, rules.grid) for at in positions}


def _by_sighting(prompt: Prompt, window: _Window) -> _Choice:
    """Returns the boundary if state can be cut anywhere: all of the prompt while the store has room, then the part that
    comes again before it would be evicted. Turns are expected to, until their kind is known."""
    sighting = window.sighting
    if sighting.has_room:
        reason: Reason = "continues" if sighting.continues else "room"
        return _Choice(len(prompt.token_ids), reason, is_whole=False, goes_on=True)
    expected = _expected(prompt, window, "likely_repeat")
    is_new_kind = sighting.continues and not sighting.is_repeat and sighting.trials < ENOUGH_TRIALS
    comes_again = is_new_kind or sighting.new_share >= _WORTHWHILE
    if comes_again and expected.selected > window.known:
        return expected
    if sighting.seen_share < _WORTHWHILE:
        return _Choice(0, "no_room" if window.known else _why_nothing(window))
    safe = prompt.last_safe(window.known)
    goes_on = comes_again and expected.goes_on and safe == expected.selected
    return _Choice(safe, "shared_prefix", goes_on=goes_on) if safe else _Choice(0, _why_nothing(window))


def _by_support(prompt: Prompt, window: _Window, rules: Rules, min_tokens: int, restored: int) -> _Choice:
    """Returns the checkpoints after `restored` that are expected to save most tokens. Each must save its price."""
    grid, price = rules.grid, rules.price
    votes, of_others = _leaving(prompt, window, grid)
    if window.seen > window.common:
        votes[floor_to_grid(prompt.last_safe(window.seen), grid)] += 1
    reasons: dict[int, Reason] = {}
    guess = _system_guess(prompt, window, min_tokens)
    is_likely, is_learning = window.sighting.is_likely_repeat, window.sighting.is_learning
    end = _expected(prompt, window, "likely_repeat" if is_likely else "learning")
    expected = end if is_likely or is_learning or end.reason == "continues" else None
    for choice in (guess, expected):
        if choice is not None:
            aligned = floor_to_grid(choice.selected, grid)
            votes[aligned] += 1
            reasons[aligned] = choice.reason
    ends = () if expected is None else (floor_to_grid(at, grid) for at in (expected.selected, prompt.question_end))
    prices = dict.fromkeys(ends, min(price, max(LEAST_TOKENS, grid)))
    for at in prices.keys() - reasons.keys():
        # The last question may be where the next one leaves: a template drops the thoughts after it.
        votes[at] += 1
    goes_on = expected is not None and expected.goes_on
    anchors = _anchors(of_others, rules, min_tokens)
    ahead = {at: n for at, n in votes.items() if at > restored and at >= min_tokens}
    support = _best_positions(ahead, restored, price, prices)
    if support:
        last = max(support)
        # An exact repeat needs the logits of its end too: a checkpoint alone does not restore it.
        is_whole = window.common == len(prompt.token_ids)
        reason = reasons.get(last, "best_checkpoints")
        return _Choice(last, reason, support, is_whole=is_whole, goes_on=goes_on, anchors=anchors)
    if max(votes, default=0) >= min_tokens:
        return _Choice(0, "already_saved", {}, goes_on=goes_on, anchors=anchors)
    return _Choice(0, _why_short(prompt, min_tokens) if any(votes) else _why_nothing(window), {})


class _Leaving(NamedTuple):
    """The numbers of prompts of the window that leave a prompt at each position: of all, and of other conversations."""

    votes: Counter[int]
    of_others: Counter[int]


def _leaving(prompt: Prompt, window: _Window, grid: int) -> _Leaving:
    """Returns the last safe boundaries, on the grid, that earlier prompts share with this one. An earlier prompt that
    this one continues leaves nowhere."""
    leaving: Counter[int] = Counter()
    far: set[int] = set()
    for earlier in window.recent:
        if earlier.lost:
            at = prompt.last_safe(earlier.common)
            leaving[at] += 1
            if earlier.lost * _SHORT_END > earlier.lost + earlier.common:
                far.add(at)
    votes: Counter[int] = Counter()
    of_others: Counter[int] = Counter()
    for at, number in leaving.items():
        votes[floor_to_grid(at, grid)] += number
        # The turns of one conversation differ near their ends, each at another place.
        if at in far or number > 1:
            of_others[floor_to_grid(at, grid)] += number
    return _Leaving(votes, of_others)


def _anchors(of_others: Counter[int], rules: Rules, min_tokens: int) -> tuple[int, ...]:
    """Returns the positions, stored already or not, after which other conversations are expected to differ."""
    return tuple(_best_positions({at: n for at, n in of_others.items() if at >= min_tokens}, 0, rules.price))


def _expected(prompt: Prompt, window: _Window, otherwise: Reason) -> _Choice:
    """Returns the part of the prompt that comes again, alone or with more after it, if any does. `otherwise` is the
    reason if the prompt does not continue an earlier one.

    A client may rewrite the end of a conversation in each turn (the beginning of a reply, a reminder, a list of open
    files). As many tokens of this prompt are expected to be rewritten as were of the earlier one.
    """
    num_tokens, common = len(prompt.token_ids), window.max_common
    last = prompt.last_safe(num_tokens)
    if window.sighting.continues:
        return _Choice(last, "continues", is_whole=False, goes_on=True)
    # A shared system message alone, or less than was lost, says nothing about the rest.
    is_same = prompt.last_safe(common) > prompt.system_end and window.lost <= common
    end = prompt.last_safe(max(num_tokens - window.lost, 0)) if is_same else last
    # A reply after a rewritten end does not come again.
    goes_on = not (is_same and window.lost)
    if is_same and 0 < window.lost * _SHORT_END <= common + window.lost:
        return _Choice(end, "continues", is_whole=False)
    return _Choice(end, otherwise, is_whole=False, goes_on=goes_on)


def _system_guess(prompt: Prompt, window: _Window, min_tokens: int) -> _Choice | None:
    """Returns the end of a new system message; None if there is none, or if the recent prompts show that system
    messages do not come again."""
    if not prompt.system_end or window.known >= prompt.system_end:
        return None
    beginnings = [bytes(earlier.prompt.token_ids[:min_tokens]) for earlier in window.recent]
    is_shared = len(set(beginnings)) < len(beginnings)
    return _Choice(prompt.system_end, "new_system_prompt") if is_shared or len(beginnings) < _MIN_UNLIKE else None


def _why_short(prompt: Prompt, min_tokens: int) -> Reason:
    return "short_prompt" if len(prompt.token_ids) < min_tokens else "short_prefix"


def _why_nothing(window: _Window) -> Reason:
    if window.known:
        return "no_safe_boundary"
    return "no_match" if window.recent else "no_history"


def _best_positions(
    votes: dict[int, int], start: int, price: int, prices: Mapping[int, int] = MappingProxyType({})
) -> dict[int, int]:
    """Returns the set of positions that saves most, a longer one of equal sets, with the votes that each position gets
    in it. Uses dynamic programming from the last position to the first, in O(n²) for n positions. `prices` has the
    prices that differ from `price`."""
    positions = [start, *sorted(votes)]
    num_votes = [0] * (len(positions) + 1)
    """Votes for each position and those after it."""
    # The maximum that later positions save if this one is taken, and the next position that is taken then.
    saved: list[tuple[int, int]] = [(0, 0)] * len(positions)
    for i in range(len(positions) - 1, -1, -1):
        num_votes[i] = num_votes[i + 1] + votes.get(positions[i], 0)
        options = [
            (saved[j][0] + (positions[j] - positions[i]) * num_votes[j] - prices.get(positions[j], price), j)
            for j in range(i + 1, len(positions))
        ]
        best = max(options, default=(-1, 0), key=lambda option: (option[0], -option[1]))
        saved[i] = best if best[0] >= 0 else (0, 0)
    taken: dict[int, int] = {}
    number = saved[0][1]
    # Bound: each number comes with a lower one.
    while number:
        taken[positions[number]] = num_votes[number]
        number = saved[number][1]
    return taken
