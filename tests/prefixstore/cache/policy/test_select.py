"""How much of a prompt is kept, and where `auto` has checkpoints if state cannot be cut."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, TypeAlias, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from diskprefix.prefixstore.cache.policy.seen import Earlier, SeenPrompt, Sighting
from diskprefix.prefixstore.cache.policy.select import Rules, _Window
from diskprefix.prefixstore.cache.policy.select import select as select_by
from diskprefix.tokens import LEAST_TOKENS, TokenIds, as_token_ids, common_prefix_length, raw_boundaries
from diskprefix.values import Mark, Prompt, Reason, Scope, Selection

OFF, FULL, AUTO = Scope("off"), Scope("full"), Scope("auto", 30)
DEFAULTS: dict[str, Any] = {"block_size": 256, "min_tokens": 512, "cold_max": 10240, "interval": 10240}
COARSE: dict[str, Any] = {"block_size": 100, "min_tokens": 200, "cold_max": 10240, "interval": 500}
SMALL: dict[str, Any] = {"block_size": 4, "min_tokens": 0, "cold_max": 100, "interval": 100}
NOTHING_KEPT = frozenset(
    {"off", "already_saved", "no_history", "no_match", "no_safe_boundary"}
    | {"short_prompt", "short_prefix", "read_only", "faster_to_compute"}
)
BEGIN, END, THINK = 1, 2, 3
"""Markers around messages, and one that is no marker of this template."""
ROLE = 4
MARKER = -1
LIKELY = Sighting(trials=10, again=5, stays_s=3600.0, new_share=0.2, seen_share=0.2)
"""In a store without room. Of a prompt whose kind comes again in time."""
UNLIKELY = replace(LIKELY, again=0, new_share=0.199)
CONTINUES = replace(LIKELY, again=0, continues=True)
ROOM = replace(UNLIKELY, stays_s=math.inf, seen_share=0.0)
ROOM_GROWN = replace(ROOM, continues=True)
Shown: TypeAlias = "Prompt | TokenIds"
"""An earlier prompt."""


def tokens(scope: int) -> Scope:
    return Scope("tokens", scope)


def ids(length: int, first: int = 0) -> TokenIds:
    return as_token_ids(range(first, first + length))


def sharing(length: int, shared: int) -> TokenIds:
    """`length` tokens of which the first `shared` are those of `ids(length)`, and the last is the first again: a marker
    where the first is one."""
    token_ids = ids(length)
    token_ids[shared:] += 1_000_000
    token_ids[-1] = 0
    return token_ids


def leaving(prompt: Prompt, shared: int, ending: Sequence[int] = (MARKER,), num_others: int = 1000) -> TokenIds:
    """The first `shared` tokens of a prompt, and many others."""
    return as_token_ids([*prompt.token_ids[:shared], *range(1_000_000, 1_000_000 + num_others), *ending])


def parted(length: int, *boundaries: int, system_end: int = 0) -> Prompt:
    """`ids` with markers before the boundaries."""
    token_ids = ids(length)
    token_ids[[position - 1 for position in boundaries]] = MARKER
    return Prompt(token_ids, boundaries, system_end)


def chat(*messages: tuple[int, int], ending: tuple[int, ...] = (BEGIN, ROLE)) -> Prompt:
    """Messages of a number and a length, the first of them the system's, and what has the model reply. Messages of
    different numbers share no words, and none with `ids`."""
    text = [
        token
        for number, length in messages
        for token in (BEGIN, ROLE, *range(10_000_000 * number, 10_000_000 * number + length - 3), END)
    ]
    token_ids = as_token_ids([*text, *ending])
    # The next message begins in the same way, whoever sends it.
    return Prompt(token_ids, raw_boundaries(token_ids, (BEGIN, END)), messages[0][1] + 1 if len(messages) > 1 else 0)


def seen(num_blocks: int, sighting: Sighting = UNLIKELY) -> Sighting:
    return replace(sighting, num_blocks=num_blocks)


def earlier(prompt: Prompt, before: Shown) -> Earlier:
    token_ids = before.token_ids if isinstance(before, Prompt) else before
    return Earlier(SeenPrompt((), token_ids.tobytes()), common_prefix_length(prompt.token_ids, token_ids))


def select(
    scope: Scope,
    prompt: Prompt,
    recent: Sequence[Shown],
    *,
    restored: int = 0,
    sighting: Sighting = UNLIKELY,
    **rules: Any,
) -> Selection:
    known = replace(sighting, recent=tuple(earlier(prompt, one) for one in recent))
    return select_by(scope, prompt, Rules(**rules), known, restored=restored)


def pick(scope: Scope, prompt: Prompt, *recent: Shown, **changes: Any) -> Selection:
    return select(scope, prompt, recent, **(DEFAULTS | changes))


def pick_checkpoints(prompt: Prompt, *recent: Shown, **changes: Any) -> Selection:
    return select(AUTO, prompt, recent, **(COARSE | {"state": "checkpoints"} | changes))


def chosen(selection: Selection) -> dict[int, int]:
    """The checkpoints, each with its votes."""
    return dict(zip(selection.checkpoints, selection.votes, strict=True))


LONG = Prompt(ids(4123))


@pytest.mark.parametrize(
    ("scope", "length", "changes", "expected"),
    [
        (FULL, 512, {}, (512, 512, True, "full")),
        (FULL, 4123, {}, (4123, 4096, True, "full")),
        (FULL, 100, {"min_tokens": 100}, (100, 0, True, "full")),
        (FULL, 511, {}, (511, 0, False, "short_prompt")),
        (tokens(511), 511, {}, (511, 0, False, "short_prompt")),
        (tokens(512), 4123, {}, (512, 512, False, "tokens")),
        (tokens(1000), 4123, {}, (1000, 768, False, "tokens")),
        (tokens(4122), 4123, {}, (4122, 4096, False, "tokens")),
        (tokens(4123), 4123, {}, (4123, 4096, True, "tokens")),
        (tokens(1_000_000), 4123, {}, (4123, 4096, True, "tokens")),
        # What would be kept counts, not the boundary above it.
        (tokens(700), 4123, {"min_tokens": 600}, (700, 0, False, "short_prefix")),
        (tokens(255), 4123, {"min_tokens": 0}, (255, 0, False, "short_prefix")),
        (tokens(7), 0, {"min_tokens": 0}, (0, 0, False, "tokens")),
        (FULL, 0, {"min_tokens": 0}, (0, 0, False, "full")),
        (OFF, 5000, {}, (0, 0, False, "off")),
    ],
    ids=str,
)
def test_full_and_a_number_keep_so_many_tokens_whatever_was_seen(
    scope: Scope, length: int, changes: dict[str, int], expected: tuple[int, int, bool, Reason]
) -> None:
    for recent in ([], [ids(5000)], [sharing(5000, 90)]):
        selection = pick(scope, Prompt(ids(length), (1, 600) if length > 600 else ()), *recent, **changes)
        assert (selection.selected, selection.aligned, selection.keep_tail, selection.reason) == expected
        assert selection.checkpoints == ()


SYSTEM, ASKED, SAID, TOLD = (1, 1000), (2, 300), (3, 400), (4, 500)
"""Messages of a conversation."""
FIRST_TURN, TURN = chat(SYSTEM, ASKED), chat(SYSTEM, ASKED, SAID, TOLD)
WITHOUT_BOUNDARY = Prompt(TURN.token_ids, FIRST_TURN.boundaries, FIRST_TURN.system_end)
OTHERS = [chat((n, 1000), (50, 300)) for n in range(10, 18)]
"""Eight prompts, each with a system message of its own."""
REMINDED, LENGTHILY = chat(SYSTEM, ASKED, SAID, TOLD, (9, 150)), chat(SYSTEM, ASKED, SAID, TOLD, (9, 400))
TOOLS = chat((1, 700), (5, 300))
OTHER_TOOLS = as_token_ids([*TOOLS.token_ids[:600], *ids(600, 7), END])
THINKING = chat(SYSTEM, ASKED, ending=(BEGIN, ROLE, THINK, 77, 78))
"""The template rewrites what has the model reply."""
QUOTING = Prompt(TURN.token_ids.copy(), TURN.boundaries, TURN.system_end)
QUOTING.token_ids[[1200, 2100]] = END
REWRITTEN, UNLIKE = chat(SYSTEM, ASKED, (9, 100)), [chat((7, 400), (8, 300))] * 3
MARKED = Prompt(ids(4123), (1, 1432, 4100), 1432, marks=(Mark(600), Mark(1432, 300.0), Mark(3000)))
MARKED_EARLY = Prompt(ids(4123), (1, 1432), 1432, marks=(Mark(300), Mark(500)))
TRUSTING, TRUSTED = Sighting(trials=9, is_trusting=True), Sighting(trials=10, is_trusting=True)
SEEN_4, SEEN_5, SEEN_6 = seen(4), seen(5), seen(6)
GOES_ON = replace(LIKELY, num_blocks=5, older=earlier(TURN, REWRITTEN))
NEW_TURN, SELDOM_TURN = (replace(UNLIKELY, continues=True, trials=trials) for trials in (9, 10))
EVICTED = replace(UNLIKELY, seen_share=0.199)
EVICTED_TURN = replace(EVICTED, continues=True, trials=0)

KEPT_BY_AUTO: dict[str, tuple[Prompt, list[Shown], Sighting, int, int, Reason, bool]] = {
    "the last safe boundary of the best match": (
        Prompt(ids(4123), (1, 700, 1432, 1990), 700),
        [sharing(4000, 90), sharing(3000, 1500), sharing(5000, 800)],
        *(UNLIKELY, 1432, 1280, "shared_prefix", False),
    ),
    "a new system message": (TURN, [], UNLIKELY, 0, 0, "no_history", False),
    "a new one beside others": (TURN, [*OTHERS], UNLIKELY, 1, 0, "short_prefix", False),
    "a known system message": (TURN, [chat(SYSTEM, (9, 300))], UNLIKELY, 1001, 768, "shared_prefix", False),
    "known from before the window": (TURN, [ids(4000, 7)], SEEN_4, 1001, 768, "shared_prefix", False),
    "known, but evicted before it comes again": (TURN, [chat(SYSTEM, (9, 300))], EVICTED, 0, 0, "no_room", False),
    "a turn, evicted before it comes again": (TURN, [FIRST_TURN], EVICTED_TURN, 2201, 2048, "continues", True),
    "a repeat that would be evicted": (
        LONG, [ids(4123)], replace(EVICTED_TURN, is_repeat=True), 0, 0, "no_room", False
    ),
    "nothing was seen": (LONG, [], UNLIKELY, 0, 0, "no_history", False),
    "nothing is shared": (Prompt(ids(4123), (1,)), [sharing(4000, 0)], UNLIKELY, 0, 0, "no_match", False),
    "no boundary": (Prompt(ids(4123), (900,)), [sharing(4000, 899)], UNLIKELY, 0, 0, "no_safe_boundary", False),
    "a short prompt": (Prompt(ids(511)), [ids(511)], UNLIKELY, 511, 0, "short_prompt", False),
    "a repeat": (LONG, [ids(4123)], UNLIKELY, 4123, 4123, "shared_prefix", False),
    "the beginning of another": (LONG, [ids(5000)], UNLIKELY, 4123, 4123, "shared_prefix", False),
    "an end on a boundary": (Prompt(ids(999), (1, 999)), [ids(999)], UNLIKELY, 999, 999, "shared_prefix", False),
    "a conversation grew": (TURN, [FIRST_TURN], CONTINUES, 2201, 2048, "continues", True),
    "the reply begins otherwise": (TURN, [THINKING], LIKELY, 1701, 1536, "continues", False),
    "a message is missing": (
        TURN, [chat(SYSTEM, ASKED, (6, 400), (7, 300))], UNLIKELY, 1301, 1280, "shared_prefix", False
    ),
    "another question of a word": (TURN, [chat(SYSTEM, (6, 9))], UNLIKELY, 1001, 768, "shared_prefix", False),
    "another long question": (TURN, [chat(SYSTEM, (6, 400))], LIKELY, 2201, 2048, "likely_repeat", True),
    "a short reminder moves": (
        REMINDED, [chat(SYSTEM, ASKED, SAID, (9, 150))], LIKELY, 2201, 2048, "continues", False
    ),
    "a long reminder moves": (
        LENGTHILY, [chat(SYSTEM, ASKED, SAID, (9, 400))], UNLIKELY, 1701, 1536, "shared_prefix", False
    ),
    "without what will be rewritten again": (
        LENGTHILY, [chat(SYSTEM, ASKED, SAID, (9, 400))], LIKELY, 2201, 2048, "likely_repeat", False
    ),
    "an eighth was rewritten": (LONG, [sharing(1600, 1400)], LIKELY, 3923, 3840, "continues", False),
    "more was rewritten": (LONG, [sharing(1601, 1400)], LIKELY, 3922, 3840, "likely_repeat", False),
    "of as good matches the one that lost least": (
        LONG, [sharing(3000, 1400), sharing(1500, 1400)], LIKELY, 4023, 3840, "continues", False
    ),
    "a better match that lost more": (
        LONG, [sharing(1500, 1400), sharing(3000, 1450)], LIKELY, 4123, 4096, "likely_repeat", True
    ),
    "it grew by less than it will lose": (
        Prompt(ids(2100)), [sharing(2200, 2000)], LIKELY, 2000, 1792, "shared_prefix", False
    ),
    "a marker's text in a message": (QUOTING, [QUOTING.token_ids[:1304]], CONTINUES, 2201, 2048, "continues", True),
    "a turn of a new kind": (TURN, [FIRST_TURN], NEW_TURN, 2201, 2048, "continues", True),
    "a turn of a known kind": (TURN, [FIRST_TURN], SELDOM_TURN, 1301, 1280, "shared_prefix", False),
    "raw text grew": (LONG, [ids(1500)], CONTINUES, 4123, 4096, "continues", True),
    "it grew within a message": (WITHOUT_BOUNDARY, [FIRST_TURN], UNLIKELY, 1301, 1280, "shared_prefix", False),
    "seen before the window": (TURN, [chat(SYSTEM, (6, 300))], SEEN_6, 1301, 1280, "shared_prefix", False),
    "its kind comes again": (TURN, [ids(4000, 7)], LIKELY, 2201, 2048, "likely_repeat", True),
    "raw text of such a kind": (LONG, [], LIKELY, 4123, 4096, "likely_repeat", True),
    "a repeat of such a kind": (LONG, [ids(4123)], LIKELY, 4123, 4123, "shared_prefix", True),
    "little is shared": (LONG, [sharing(4000, 300)], LIKELY, 4123, 4096, "likely_repeat", True),
    "others filled the window": (TURN, [*UNLIKE], SEEN_5, 1001, 768, "shared_prefix", False),
    "it goes on from before them": (TURN, [*UNLIKE], GOES_ON, 1701, 1536, "continues", False),
    "it goes on from one of them": (TURN, [*UNLIKE, REWRITTEN], LIKELY, 1701, 1536, "continues", False),
    # Claude Code marks its newest message of the user, and then sends a message of the system.
    "what is marked": (MARKED, [sharing(4000, 90)], UNLIKELY, 3000, 2816, "marks", False),
    "more than is marked": (MARKED, [sharing(4000, 90)], LIKELY, 4100, 4096, "likely_repeat", True),
    "a mark behind the end": (Prompt(ids(4123), marks=(Mark(5000),)), [], UNLIKELY, 4123, 4123, "marks", False),
    "room for a new prompt": (TURN, [], ROOM, len(TURN.token_ids), 2048, "room", True),
    "room for a turn": (TURN, [FIRST_TURN], ROOM_GROWN, len(TURN.token_ids), 2048, "continues", True),
    "room for what will be rewritten": (LONG, [sharing(1600, 1400)], ROOM, 4123, 4096, "room", True),
    "room for the reply of a short prompt": (Prompt(ids(511)), [], ROOM, 511, 0, "short_prompt", True),
}  # fmt: skip


@pytest.mark.parametrize("case", KEPT_BY_AUTO)
def test_auto_keeps_what_will_be_asked_for_again_and_says_why(case: str) -> None:
    prompt, recent, sighting, *expected = KEPT_BY_AUTO[case]
    found = pick(AUTO, prompt, *recent, sighting=sighting)
    assert [found.selected, found.kept, found.reason, found.saves_reply] == expected
    assert (found.window, found.recent) == (30, len(recent))


class Counted(list[Earlier]):
    """Counts how often it is gone through."""

    passes = 0

    def __iter__(self) -> Iterator[Earlier]:
        self.passes += 1
        return super().__iter__()


def test_what_was_lost_is_found_in_two_passes_over_the_window() -> None:
    """With a pass for each prompt, a window of 8 192 prompts took three seconds of the engine's thread."""
    recent = Counted([Earlier(SeenPrompt((), ids(7).tobytes()), 5)] * 100)
    assert _Window(recent, 0, UNLIKELY).lost == 2
    assert recent.passes <= 2


CUT = Prompt(ids(4123), (1, 1432, 4100))


@pytest.mark.parametrize(
    ("scope", "prompt", "changes", "checkpoints"),
    [
        # One of the earlier prompts leaves at 1,500.
        (FULL, LONG, {}, (1280, 4096)),
        (FULL, CUT, {"cold_max": 1432}, (1280, 4096)),
        (FULL, CUT, {"cold_max": 1431}, (1280, 4096)),
        (FULL, Prompt(ids(4123), (1, 4100)), {"cold_max": 0}, (4096,)),
        (FULL, Prompt(ids(4123), (1, 300, 4100)), {"cold_max": 1000}, (4096,)),
        (FULL, Prompt(ids(4123), (1, 4100)), {"interval": 1000}, (768, 1792, 2816, 3840, 4096)),
        # The tail has the states at the prompt's end.
        (FULL, Prompt(ids(4096), (1, 4000)), {"interval": 2048}, (2048, 3840)),
        (FULL, Prompt(ids(4096), (1, 4000)), {"interval": 1, "min_tokens": 3500}, (3584, 3840)),
        (FULL, Prompt(ids(30_000), (1, 5000, 29_990)), {}, (4864, 10240, 20480, 29_952)),
        (FULL, Prompt(ids(20_480), (1, 20_480)), {}, (10240,)),
        (FULL, Prompt(ids(600), (1,)), {"min_tokens": 600}, ()),
        (AUTO, CUT, {}, (1280,)),
        (tokens(1432), CUT, {}, (1280,)),
        # Below a far number lie checkpoints to fall back to.
        (tokens(1432), CUT, {"interval": 600, "min_tokens": 100}, (512, 1024, 1280)),
        (AUTO, MARKED, {}, (512, 1280, 2816)),
        (tokens(2900), MARKED, {}, (512, 1280, 2816)),
        (tokens(3500), MARKED, {}, (512, 1280, 2816, 3328)),
        (FULL, MARKED, {}, (512, 1280, 2816, 4096)),
    ],
    ids=str,
)
def test_checkpoints_are_at_what_is_kept_and_at_marks_and_of_full_where_others_may_leave(
    scope: Scope, prompt: Prompt, changes: dict[str, int], checkpoints: tuple[int, ...]
) -> None:
    assert pick(scope, prompt, sharing(4000, 1500), state="checkpoints", **changes).checkpoints == checkpoints


CHAT, SHORT_END = parted(3000, 1, 900, 2000, 2800, system_end=900), parted(3000, 1, 2000, 2150)
FINE = parted(3000, 1, 910, 2017, 2803, system_end=910)
RAW = Prompt(ids(3000))
NEVER_CUT = parted(3000, 900, 2000, system_end=900)
AT_TOKENS = {"state": "token_checkpoints", "sighting": CONTINUES}
LARGE = {"state": "token_checkpoints", "state_bytes": 600 * (256 << 10)}
CUT_AT_900 = Prompt(ids(3000), boundaries=(900,))

CHECKPOINTS_OF_AUTO: dict[str, tuple[Prompt, list[Shown], dict[str, Any], tuple[dict[int, int], Reason]]] = {
    "a vote for each": (RAW, [leaving(RAW, n) for n in (650, 650, 1720)], {}, ({600: 3, 1700: 1}, "best_checkpoints")),
    "below a boundary": (CHAT, [leaving(CHAT, 1999)], {}, ({900: 1}, "best_checkpoints")),
    "at a boundary": (CHAT, [leaving(CHAT, 2000)], {}, ({2000: 1}, "best_checkpoints")),
    "all is stored": (RAW, [leaving(RAW, 1350)], {"restored": 1300}, ({}, "already_saved")),
    "it grew": (
        CHAT, [CHAT.token_ids[:1995], CHAT.token_ids[:905]], {"sighting": CONTINUES}, ({2800: 1}, "continues")
    ),
    "another left it": (
        CHAT,
        [CHAT.token_ids[:1995], CHAT.token_ids[:905], leaving(CHAT, 950)],
        {"sighting": CONTINUES},
        ({900: 2, 2800: 1}, "continues"),
    ),
    "a new system message": (CHAT, [], {}, ({900: 1}, "new_system_prompt")),
    "a known system message": (CHAT, [leaving(CHAT, 950)], {}, ({900: 1}, "best_checkpoints")),
    "others have their own": (CHAT, [*OTHERS], {}, ({}, "no_match")),
    # Else the next prompt with it, which asks another thing, restores nothing.
    "a new one beside its end": (CHAT, [], {"sighting": LIKELY}, ({900: 2, 2800: 1}, "likely_repeat")),
    "the last one's reason": (
        CHAT, [leaving(CHAT, 950)], {"sighting": seen(10, CONTINUES)}, ({900: 3, 2800: 1}, "continues")
    ),
    "seen before the window": (
        CHAT, [leaving(CHAT, 2050)], {"sighting": seen(10), "min_tokens": 2000}, ({2000: 1}, "best_checkpoints")
    ),
    "two at one place of the grid": (
        parted(2090, 1, 900, 2000, 2050), [], {"sighting": seen(20, LIKELY)}, ({2000: 2}, "likely_repeat")
    ),
    "shared to no boundary": (NEVER_CUT, [leaving(NEVER_CUT, 850)], {}, ({900: 1}, "new_system_prompt")),
    "a reminder moves": (CHAT, [leaving(CHAT, 2000, (), 200)], {}, ({2000: 2, 2800: 1}, "continues")),
    "250 tokens were lost, 200 grew": (CHAT, [leaving(CHAT, 2000, (), 250)], {}, ({2000: 2}, "continues")),
    "a short prompt": (Prompt(ids(190)), [], {"sighting": LIKELY}, ({}, "short_prompt")),
    "a short end": (
        SHORT_END, [SHORT_END.token_ids[:2000]], {"restored": 2000, "sighting": CONTINUES}, ({2100: 1}, "continues")
    ),
    "a shorter end": (
        SHORT_END, [SHORT_END.token_ids[:2000]], {"restored": 2100, "sighting": CONTINUES}, ({}, "already_saved")
    ),
    "at tokens": (FINE, [], {**AT_TOKENS, "sighting": LIKELY}, ({910: 2, 2803: 1}, "likely_repeat")),
    "the last question": (
        replace(FINE, question_end=2017), [], {**AT_TOKENS, "restored": 910}, ({2017: 2, 2803: 1}, "continues")
    ),
    "an end of 13 tokens": (FINE, [], {**AT_TOKENS, "restored": 2790}, ({}, "already_saved")),
    "an end of 16 tokens": (FINE, [], {**AT_TOKENS, "restored": 2787}, ({2803: 1}, "continues")),
    "raw text": (Prompt(FINE.token_ids), [], AT_TOKENS, ({3000: 1}, "continues")),
    "small states": (
        RAW,
        [leaving(RAW, n) for n in (600, 1100)],
        {"state": "token_checkpoints", "state_bytes": 100 << 10},
        ({600: 2, 1100: 1}, "best_checkpoints"),
    ),
    "large states": (RAW, [leaving(RAW, n) for n in (600, 1100)], LARGE, ({600: 2}, "best_checkpoints")),
    # It replaces an earlier end, and costs nothing in the long run.
    "the end with large states": (
        RAW, [], {**LARGE, "restored": 2900, "sighting": CONTINUES}, ({3000: 1}, "continues")
    ),
    "no history": (CUT_AT_900, [], {"min_tokens": 1000}, ({}, "no_history")),
    "no match": (CUT_AT_900, [leaving(CUT_AT_900, 0)], {"min_tokens": 1000}, ({}, "no_match")),
    "no boundary": (CUT_AT_900, [leaving(CUT_AT_900, 850)], {"min_tokens": 1000}, ({}, "no_safe_boundary")),
    "none before the window": (CUT_AT_900, [], {"min_tokens": 1000, "sighting": seen(8)}, ({}, "no_safe_boundary")),
    "too little": (CUT_AT_900, [leaving(CUT_AT_900, 950)], {"min_tokens": 1000}, ({}, "short_prefix")),
    "too little is likely": (CUT_AT_900, [], {"min_tokens": 1000, "sighting": LIKELY}, ({}, "short_prefix")),
}  # fmt: skip


@pytest.mark.parametrize("case", CHECKPOINTS_OF_AUTO)
def test_auto_has_checkpoints_where_boundaries_are_shared_and_at_an_end_that_grows(case: str) -> None:
    prompt, recent, changes, expected = CHECKPOINTS_OF_AUTO[case]
    selection = pick_checkpoints(prompt, *recent, **changes)
    assert (chosen(selection), selection.reason) == expected
    assert selection.selected == selection.aligned == selection.kept == max(expected[0], default=0)
    # Also where all before the reply is stored: the reply may be long.
    sighting: Sighting = changes.get("sighting", UNLIKELY)
    goes_on = sighting.continues or sighting.is_likely_repeat
    assert selection.saves_reply == (goes_on and not selection.reason.startswith("short_"))


def test_a_checkpoint_must_save_its_price() -> None:
    assert pick_checkpoints(RAW, min_tokens=0).price == 100
    assert pick_checkpoints(RAW, **LARGE).price == 600


def test_an_exact_repeat_of_whole_blocks_can_be_restored() -> None:
    selection = pick_checkpoints(Prompt(ids(1000)), ids(1000), sighting=CONTINUES)
    assert selection.keep_tail or any(position < 1000 for position in selection.checkpoints)


DOCUMENT = parted(3000, 1, 910, 2517, 2803, system_end=910)
QUESTIONS = [as_token_ids([*DOCUMENT.token_ids[:2517], *range(n, n + 90), MARKER]) for n in (10**6, 2 * 10**6)]
ENDS = parted(3000, 1, 910, 2510, 2550, 2590, 2803, system_end=910)


@pytest.mark.parametrize(
    ("prompt", "recent", "state", "anchors"),
    [
        (FINE, [leaving(FINE, 2100, num_others=100)], "token_checkpoints", (910,)),
        (FINE, [leaving(FINE, 2100, num_others=100), leaving(FINE, 2100)], "token_checkpoints", (910, 2017)),
        (replace(FINE, marks=(Mark(1500),)), [leaving(FINE, 2100, num_others=100)], "token_checkpoints", (910, 1500)),
        (FINE, [leaving(FINE, 2100)], "token", ()),
        # The end of a document, once two short questions leave there.
        (DOCUMENT, QUESTIONS[:1], "token_checkpoints", (910,)),
        (DOCUMENT, QUESTIONS, "token_checkpoints", (910, 2517)),
        (DOCUMENT, QUESTIONS, "checkpoints", (900, 2500)),
        # The next question leaves at the last one where a template drops the thoughts behind it.
        (replace(FINE, question_end=2017), [], "token_checkpoints", (910, 2017)),
        # Turns that each rewrite their end leave in one block, but not at one place.
        (ENDS, [leaving(ENDS, end, (), 90) for end in (2590, 2550, 2510)], "checkpoints", (900,)),
    ],
    ids=str,
)
def test_what_other_prompts_share_is_an_anchor_and_the_own_earlier_turns_are_not(
    prompt: Prompt, recent: list[TokenIds], state: str, anchors: tuple[int, ...]
) -> None:
    found = pick_checkpoints(prompt, *recent, state=state, sighting=CONTINUES, restored=2803)
    assert found.anchors == anchors


@pytest.mark.parametrize(
    ("prompt", "recent", "state", "learned"),
    [
        (DOCUMENT, [leaving(DOCUMENT, 2600)], "token_checkpoints", {2517}),
        (DOCUMENT, [leaving(DOCUMENT, 2600)], "checkpoints", {2500}),
        (DOCUMENT, [leaving(DOCUMENT, 2600)], "token", set()),
        # One turn of a conversation rewrote its end.
        (DOCUMENT, QUESTIONS[:1], "token_checkpoints", set()),
        (DOCUMENT, QUESTIONS, "token_checkpoints", {2517}),
    ],
    ids=str,
)
def test_full_has_checkpoints_where_other_conversations_leave_as_auto_has(
    prompt: Prompt, recent: list[TokenIds], state: str, learned: set[int]
) -> None:
    rules = COARSE | {"interval": 10_240, "state": state}
    alone, beside = (select(FULL, prompt, others, **rules) for others in ([], recent))
    assert set(beside.checkpoints) - set(alone.checkpoints) == learned
    assert learned <= set(beside.anchors)


def test_all_checkpoints_of_full_are_anchors() -> None:
    full = select(FULL, FINE, [], **COARSE, state="token_checkpoints")
    assert set() < set(full.checkpoints) <= set(full.anchors)


def test_what_is_not_to_be_kept_says_why_and_what_was_seen() -> None:
    nothing = pick(FULL, LONG, sharing(4000, 1500), state="checkpoints").keeping_nothing("read_only")
    assert (nothing.selected, nothing.aligned, nothing.kept, nothing.keep_tail) == (0, 0, 0, False)
    assert (nothing.checkpoints, nothing.votes, nothing.reason) == ((), (), "read_only")
    assert (nothing.common, nothing.prompt_tokens, nothing.scope) == (1500, 4123, FULL)


def test_what_is_left_for_others_is_everything_nothing_or_what_came_before() -> None:
    selection = Selection(scope=FULL, prompt_tokens=100, reason="full", common=20, seen=30)
    assert [selection.shared(rule, 80, 10) for rule in ("all", "off", "seen-twice")] == [80, 0, 30]
    assert [selection.shared("seen-twice", 80, had) for had in (50, 90)] == [50, 80]


# Two letters only, so that random prompts share prefixes of every length.
PROMPT_IDS = st.lists(st.integers(-1, 0), max_size=40).map(as_token_ids)
EARLIER = st.lists(st.integers(-1, 0), min_size=1, max_size=40).map(as_token_ids)
RECENT = st.lists(EARLIER, max_size=6)


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    token_ids = draw(PROMPT_IDS)
    positions = st.integers(1, max(1, len(token_ids)))
    boundaries = tuple(sorted(draw(st.sets(positions, max_size=6)))) if len(token_ids) else ()
    marks = draw(st.just(()) | st.sets(positions, max_size=3).map(sorted)) if len(token_ids) else ()
    return Prompt(token_ids, boundaries, draw(st.sampled_from((0, *boundaries))), marks=tuple(map(Mark, marks)))


SCOPES = st.one_of(
    st.sampled_from([OFF, FULL]), st.builds(Scope, st.sampled_from(["auto", "tokens"]), st.integers(1, 45))
)
KNOBS = st.fixed_dictionaries(
    {
        "block_size": st.integers(1, 9),
        "min_tokens": st.integers(0, 20),
        "cold_max": st.integers(0, 50),
        "interval": st.integers(1, 50),
        "state": st.sampled_from(["sliceable", "checkpoints"]),
        "restored": st.integers(0, 40),
        "sighting": st.builds(Sighting, st.integers(0, 12), st.integers(0, 12), st.integers(0, 12), st.booleans()),
    }
)


@given(SCOPES, prompts(), RECENT, KNOBS)
def test_whatever_is_selected_lies_in_the_prompt_and_on_the_grid_and_has_a_reason(
    scope: Scope, prompt: Prompt, recent: list[TokenIds], knobs: dict[str, Any]
) -> None:
    selection = select(scope, prompt, recent, **knobs)
    block_size, length = knobs["block_size"], len(prompt.token_ids)
    assert 0 <= selection.aligned <= selection.selected <= length == selection.prompt_tokens
    assert selection.aligned in (0, selection.selected - selection.selected % block_size)
    if selection.keep_tail:
        assert 0 < selection.selected == length >= knobs["min_tokens"]
    elif selection.aligned:
        assert selection.aligned >= knobs["min_tokens"]
    for position in selection.checkpoints:
        assert knobs["state"] == "checkpoints"
        assert position % block_size == 0
        assert max(knobs["min_tokens"], 1) <= position <= selection.aligned
    if knobs["state"] == "checkpoints" and selection.aligned and not selection.keep_tail:
        assert selection.checkpoints[-1] == selection.aligned, "nothing could be restored there"
    assert len(selection.votes) in (0, len(selection.checkpoints))
    assert list(selection.checkpoints) == sorted(set(selection.checkpoints))
    assert selection.reason in get_args(Reason)
    assert (selection.kept == 0) == (selection.reason in NOTHING_KEPT) or not length


@given(SCOPES, prompts(), RECENT, KNOBS)
def test_marks_add_to_what_is_kept(scope: Scope, prompt: Prompt, recent: list[TokenIds], knobs: dict[str, Any]) -> None:
    marked, plain = (select(scope, each, recent, **knobs) for each in (prompt, replace(prompt, marks=())))
    grid = knobs["block_size"]
    counting = [mark.position for mark in prompt.marks if mark.position // grid * grid >= max(knobs["min_tokens"], 1)]
    asked = max(counting, default=0) if scope != OFF else 0
    assert marked.selected == max(plain.selected, asked)
    assert set(marked.checkpoints) >= set(plain.checkpoints)
    assert marked.saves_reply >= plain.saves_reply


@given(st.sampled_from([FULL, AUTO, tokens(9)]), prompts(), RECENT)
def test_every_scope_but_off_says_which_first_token_is_new_to_all_prompts(
    scope: Scope, prompt: Prompt, recent: list[TokenIds]
) -> None:
    commons = [common_prefix_length(prompt.token_ids, other) for other in recent]
    is_new = bool(commons) and max(commons) < len(prompt.token_ids)
    assert select(scope, prompt, recent, **SMALL).diverged_at == (max(commons) if is_new else None)


POSITIONS = st.lists(st.integers(0, 60), max_size=8)


@given(POSITIONS, st.integers(0, 70), st.integers(0, 70), st.booleans(), st.integers(1, 6), st.integers(0, 20))
def test_no_other_set_of_checkpoints_saves_more(
    shared: list[int], restored: int, num_seen: int, is_likely: bool, block_size: int, min_tokens: int
) -> None:
    """Counted vote by vote: each saves up to the last checkpoint at or below it, beyond what is restored anyway. Nor
    does one more checkpoint that pays its price and no more."""
    selection = select(
        AUTO,
        Prompt(ids(70)),
        [sharing(1000, n) for n in shared],
        block_size=block_size,
        min_tokens=min_tokens,
        cold_max=100,
        interval=100,
        state="checkpoints",
        restored=restored,
        sighting=seen(num_seen // block_size, LIKELY if is_likely else UNLIKELY),
    )
    price = max(min_tokens, 1, block_size)
    num_seen -= num_seen % block_size
    # The prompt's own end is cheaper, if it is expected to come again.
    end, end_price = (70 - 70 % block_size if is_likely else -1), min(price, max(LEAST_TOKENS, block_size))
    of_older = [num_seen] * (num_seen > max(shared, default=0))
    votes = [n - n % block_size for n in [*shared, *of_older, *[70] * is_likely]]
    votes = [vote for vote in votes if vote > restored and vote >= min_tokens]

    def gain(checkpoints: tuple[int, ...]) -> int:
        saved = (max((at for at in checkpoints if at <= vote), default=restored) - restored for vote in votes)
        return sum(saved) - sum(end_price if at == end else price for at in checkpoints)

    places = sorted(set(votes))
    sets = [some for size in range(len(places) + 1) for some in combinations(places, size)]
    best = max(map(gain, sets))
    assert gain(selection.checkpoints) == best
    assert not [some for some in sets if set(some) > set(selection.checkpoints) and gain(some) == best]
    assert selection.votes == tuple(sum(vote >= at for vote in votes) for at in selection.checkpoints)
