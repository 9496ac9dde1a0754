from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diskprefix.cache.policy.seen import Earlier, SeenPrompt, Sighting
from diskprefix.cache.policy.select import StateKind, _Window
from diskprefix.nouns import Mark, Prompt, Reason, Scope, Selection
from diskprefix.tokens import TokenIds, as_token_ids, common_prefix_length, raw_boundaries
from tests.cache.policy.asking import select

OFF, FULL, AUTO = Scope("off"), Scope("full"), Scope("auto", 30)
DEFAULTS: dict[str, Any] = {"block_size": 256, "min_tokens": 512, "cold_max": 10240, "interval": 10240}
SMALL: dict[str, Any] = {"block_size": 4, "min_tokens": 0, "cold_max": 100, "interval": 100}
NOTHING_KEPT = frozenset(
    {"off", "already_saved", "no_history", "no_match", "no_safe_boundary"}
    | {"short_prompt", "short_prefix", "read_only", "faster_to_compute"}
)
BEGIN, END, THINK = 1, 2, 3
"""Markers around messages, and one that is no marker of this template."""
ROLE = 4
LIKELY = Sighting(trials=10, again=5)
UNLIKELY = Sighting(trials=10)
"""Of a prompt whose kind never came again."""


def test_what_is_left_for_others_is_everything_nothing_or_what_came_before() -> None:
    selection = Selection(scope=FULL, prompt_tokens=100, reason="full", common=20, seen=30)
    assert [selection.shared(rule, 80, 10) for rule in ("all", "off", "seen-twice")] == [80, 0, 30]
    assert [selection.shared("seen-twice", 80, had) for had in (50, 90)] == [50, 80]


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


def message(number: int, length: int) -> list[int]:
    """`length` tokens and two markers. Messages of different numbers share no words, and none with `ids`."""
    words = range(10_000_000 * number, 10_000_000 * number + length - 3)
    return [BEGIN, ROLE, *words, END]


def chat(*messages: tuple[int, int], ending: tuple[int, ...] = (BEGIN, ROLE)) -> Prompt:
    """Messages of a number and a length, the first of them the system's, and what has the model reply."""
    token_ids = as_token_ids([token for one in messages for token in message(*one)] + list(ending))
    # The next message begins in the same way, whoever sends it.
    return Prompt(token_ids, raw_boundaries(token_ids, (BEGIN, END)), messages[0][1] + 1 if len(messages) > 1 else 0)


SYSTEM, ASKED, SAID, TOLD = (1, 1000), (2, 300), (3, 400), (4, 500)
"""Messages of a conversation."""
FIRST_TURN, SECOND_TURN = chat(SYSTEM, ASKED), chat(SYSTEM, ASKED, SAID, TOLD)


def pick(scope: Scope, prompt: Prompt, *recent: TokenIds, **changes: Any) -> Selection:
    return select(scope, prompt, recent, **{**DEFAULTS, "sighting": UNLIKELY, **changes})


CONTINUES = replace(UNLIKELY, continues=True)


def seen(num_blocks: int) -> Sighting:
    return replace(UNLIKELY, num_blocks=num_blocks)


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


def test_off_selects_nothing_and_looks_at_nothing() -> None:
    assert pick(OFF, Prompt(ids(5000)), ids(5000), state="checkpoints") == Selection(
        scope=OFF, prompt_tokens=5000, reason="off"
    )


@pytest.mark.parametrize(("length", "aligned"), [(512, 512), (513, 512), (4123, 4096), (4096, 4096), (767, 512)])
def test_full_selects_the_whole_prompt_with_its_tail(length: int, aligned: int) -> None:
    selection = pick(FULL, Prompt(ids(length)))
    assert (selection.selected, selection.aligned, selection.keep_tail) == (length, aligned, True)
    assert selection.reason == "full"
    assert selection.checkpoints == ()


@pytest.mark.parametrize(
    ("n", "selected", "aligned", "keep_tail"),
    [
        (1000, 1000, 768, False),
        (1024, 1024, 1024, False),
        (4122, 4122, 4096, False),
        (4123, 4123, 4096, True),
        (4124, 4123, 4096, True),
        (1_000_000, 4123, 4096, True),
    ],
)
def test_a_number_selects_that_many_tokens(n: int, selected: int, aligned: int, keep_tail: bool) -> None:
    selection = pick(tokens(n), Prompt(ids(4123)))
    assert (selection.selected, selection.aligned, selection.keep_tail) == (selected, aligned, keep_tail)
    assert selection.reason == "tokens"


def test_a_number_is_not_moved_to_a_chat_boundary() -> None:
    assert pick(tokens(1024), Prompt(ids(4123), boundaries=(1, 600))).aligned == 1024


@pytest.mark.parametrize("scope", [FULL, tokens(511), AUTO], ids=str)
def test_of_a_short_prompt_nothing_is_kept_but_the_boundary_is_reported(scope: Scope) -> None:
    selection = pick(scope, Prompt(ids(511)), ids(511))
    assert (selection.selected, selection.aligned, selection.keep_tail) == (511, 0, False)
    assert selection.checkpoints == ()
    assert selection.reason == "short_prompt"


def test_exactly_min_tokens_is_enough() -> None:
    assert pick(tokens(512), Prompt(ids(4123))).aligned == 512
    assert pick(FULL, Prompt(ids(512))).keep_tail


def test_what_would_be_kept_counts_and_not_the_boundary_above_it() -> None:
    selection = pick(tokens(700), Prompt(ids(4123)), min_tokens=600)
    assert (selection.selected, selection.aligned, selection.reason) == (700, 0, "short_prefix")


def test_a_prompt_shorter_than_a_block_is_kept_by_its_tail_alone() -> None:
    selection = pick(FULL, Prompt(ids(100)), min_tokens=100)
    assert (selection.selected, selection.aligned, selection.keep_tail) == (100, 0, True)
    assert selection.reason == "full"


def test_less_than_a_block_without_its_tail_is_nothing_even_without_a_minimum() -> None:
    selection = pick(tokens(255), Prompt(ids(4123)), min_tokens=0)
    assert (selection.aligned, selection.keep_tail, selection.reason) == (0, False, "short_prefix")


@pytest.mark.parametrize("scope", [OFF, FULL, AUTO, tokens(7)], ids=str)
def test_a_prompt_without_tokens_has_nothing_to_keep(scope: Scope) -> None:
    selection = pick(scope, Prompt(ids(0)), ids(9), min_tokens=0, state="checkpoints")
    assert (selection.selected, selection.aligned, selection.keep_tail, selection.checkpoints) == (0, 0, False, ())


def test_auto_selects_the_last_safe_boundary_of_the_best_match() -> None:
    prompt = Prompt(ids(4123), boundaries=(1, 700, 1432, 1990), system_end=700)
    selection = pick(AUTO, prompt, sharing(4000, 90), sharing(3000, 1500), sharing(5000, 800))
    assert (selection.common, selection.selected, selection.aligned) == (1500, 1432, 1280)
    assert (selection.window, selection.recent) == (30, 3)
    assert selection.reason == "shared_prefix"
    assert not selection.keep_tail


@pytest.mark.parametrize(("common", "safe"), [(1431, 700), (1432, 1432), (1433, 1432)])
def test_a_boundary_exactly_at_the_end_of_the_match_counts(common: int, safe: int) -> None:
    prompt = Prompt(ids(4123), boundaries=(1, 700, 1432, 1990))
    assert pick(AUTO, prompt, sharing(4000, common)).selected == safe


def test_only_the_newest_prompts_in_the_window_are_looked_at() -> None:
    recent = [sharing(4000, 600), sharing(4000, 1100), sharing(4000, 2100)]
    prompt = Prompt(ids(4123))
    assert [pick(Scope("auto", n), prompt, *recent).aligned for n in (1, 2, 3, 30)] == [512, 1024, 2048, 2048]
    assert [pick(Scope("auto", n), prompt, *recent).recent for n in (1, 2, 3, 30)] == [1, 2, 3, 3]


def test_a_system_message_that_nobody_has_sent_yet_is_guessed_beside_other_prompts() -> None:
    others = [chat((n, 1000), (50, 300)).token_ids for n in range(10, 17)]
    assert len(others) == 7
    for recent in ([], others[:1], others):
        selection = pick(AUTO, SECOND_TURN, *recent)
        assert (selection.selected, selection.aligned, selection.reason) == (1001, 768, "new_system_prompt")


def test_where_eight_recent_prompts_share_nothing_the_guess_is_not_used() -> None:
    others = [chat((n, 1000), (50, 300)).token_ids for n in range(10, 18)]
    selection = pick(AUTO, SECOND_TURN, *others)
    assert (selection.selected, selection.aligned, selection.reason) == (1, 0, "short_prefix")
    again = chat((17, 1000), (51, 200)).token_ids
    assert pick(AUTO, SECOND_TURN, *others, again).reason == "new_system_prompt"


def test_a_system_message_that_was_seen_is_no_guess() -> None:
    selection = pick(AUTO, SECOND_TURN, chat(SYSTEM, (9, 300)).token_ids)
    assert (selection.common, selection.selected, selection.reason) == (1002, 1001, "shared_prefix")
    before_the_window = pick(AUTO, SECOND_TURN, ids(4000, 7), sighting=seen(4))
    assert (before_the_window.seen, before_the_window.selected, before_the_window.reason) == (
        1024,
        1001,
        "shared_prefix",
    )


def test_of_a_system_message_that_was_seen_in_part_all_is_guessed() -> None:
    tools = chat((1, 700), (5, 300))
    other = as_token_ids([*tools.token_ids[:600], *ids(600, 7), END])
    selection = pick(AUTO, Prompt(tools.token_ids, tools.boundaries, tools.system_end), other)
    assert (selection.common, selection.selected, selection.reason) == (600, 701, "new_system_prompt")


@pytest.mark.parametrize(
    ("prompt", "recent", "reason"),
    [
        (Prompt(ids(4123)), [], "no_history"),
        (Prompt(ids(4123), boundaries=(1,)), [sharing(4000, 0)], "no_match"),
        (Prompt(ids(4123), boundaries=(900,)), [sharing(4000, 899)], "no_safe_boundary"),
    ],
)
def test_auto_says_why_it_has_no_boundary(prompt: Prompt, recent: list[TokenIds], reason: str) -> None:
    selection = pick(AUTO, prompt, *recent, state="checkpoints")
    assert (selection.selected, selection.aligned, selection.checkpoints) == (0, 0, ())
    assert selection.reason == reason


@pytest.mark.parametrize("other", [ids(4123), ids(5000)], ids=["repeat", "longer"])
def test_an_exact_repeat_without_boundaries_keeps_its_tail(other: TokenIds) -> None:
    selection = pick(AUTO, Prompt(ids(4123)), other)
    assert (selection.selected, selection.aligned, selection.keep_tail) == (4123, 4096, True)
    assert selection.diverged_at is None


def test_a_chat_that_ends_on_a_boundary_may_be_kept_whole() -> None:
    prompt = Prompt(ids(1024), boundaries=(1, 1024))
    selection = pick(AUTO, prompt, ids(1024))
    assert (selection.selected, selection.aligned, selection.keep_tail) == (1024, 1024, True)


@pytest.mark.parametrize("scope", [FULL, AUTO, tokens(1000)], ids=str)
def test_every_scope_but_off_says_where_the_prompt_diverged(scope: Scope) -> None:
    prompt = Prompt(ids(4123), boundaries=(1,))
    assert pick(scope, prompt, sharing(4000, 90), sharing(4000, 40)).diverged_at == 90
    assert pick(scope, prompt, sharing(4000, 0)).diverged_at == 0
    assert pick(scope, prompt).diverged_at is None
    assert pick(scope, prompt, ids(4200)).diverged_at is None


@pytest.mark.parametrize(
    ("length", "boundaries", "changes", "checkpoints"),
    [
        (4123, (), {}, (4096,)),
        (4123, (1, 1432, 4100), {"cold_max": 2000}, (1280, 4096)),
        (4123, (1, 1432, 4100), {"cold_max": 1432}, (1280, 4096)),
        (4123, (1, 1432, 4100), {"cold_max": 1431}, (4096,)),
        (4123, (1, 4100), {"cold_max": 0}, (4096,)),
        (4123, (1, 300, 4100), {"cold_max": 1000}, (4096,)),
        (4123, (1, 4100), {"interval": 1000}, (768, 1792, 2816, 3840, 4096)),
        # The tail has the states at the prompt's end.
        (4096, (1, 4000), {"interval": 2048}, (2048, 3840)),
        (4096, (1, 4000), {"interval": 1, "min_tokens": 3500}, (3584, 3840)),
        (30_000, (1, 5000, 29_990), {}, (4864, 10240, 20480, 29_952)),
        (30_000, (), {}, (10240, 20480, 29_952)),
        (20_480, (1, 20_480), {}, (10240,)),
        (600, (1,), {"min_tokens": 600}, ()),
    ],
)
def test_full_has_cold_continued_and_last_checkpoints(
    length: int, boundaries: tuple[int, ...], changes: dict[str, int], checkpoints: tuple[int, ...]
) -> None:
    assert pick(FULL, Prompt(ids(length), boundaries), state="checkpoints", **changes).checkpoints == checkpoints


@pytest.mark.parametrize("scope", [AUTO, tokens(1432)], ids=str)
def test_auto_and_a_number_have_a_checkpoint_at_their_boundary(scope: Scope) -> None:
    selection = pick(scope, Prompt(ids(4123), boundaries=(1, 1432)), sharing(4000, 1500), state="checkpoints")
    assert selection.checkpoints == (1280,) == (selection.aligned,)


def test_below_a_far_number_lie_checkpoints_to_fall_back_to() -> None:
    prompt = Prompt(ids(4123), boundaries=(1, 1432, 4100))
    selection = pick(tokens(1432), prompt, sharing(4000, 1500), state="checkpoints", interval=600, min_tokens=100)
    assert selection.checkpoints == (512, 1024, 1280)


def test_a_conversation_that_grew_is_kept_to_its_last_safe_boundary() -> None:
    selection = pick(AUTO, SECOND_TURN, FIRST_TURN.token_ids, sighting=CONTINUES)
    assert selection.common == 1302
    assert (selection.selected, selection.aligned, selection.reason) == (2201, 2048, "continues")
    assert not selection.keep_tail


def test_a_conversation_grew_too_if_the_template_rewrote_what_has_the_model_reply() -> None:
    thinking = chat(SYSTEM, ASKED, ending=(BEGIN, ROLE, THINK, 77, 78)).token_ids
    assert pick(AUTO, SECOND_TURN, thinking).reason == "continues"


def test_a_conversation_did_not_grow_if_a_message_of_it_is_missing() -> None:
    another = chat(SYSTEM, ASKED, (6, 400), (7, 300)).token_ids
    selection = pick(AUTO, SECOND_TURN, another)
    assert (selection.selected, selection.reason) == (1301, "shared_prefix")


@pytest.mark.parametrize("length", [9, 50, 400])
def test_a_conversation_did_not_grow_if_what_was_asked_is_another(length: int) -> None:
    """However short: to share the system message says nothing of what stands behind it."""
    assert pick(AUTO, SECOND_TURN, chat(SYSTEM, (6, length)).token_ids).reason == "shared_prefix"


def test_a_conversation_with_a_reminder_that_moves_is_kept_up_to_the_reminder() -> None:
    before, now = chat(SYSTEM, ASKED, SAID, (9, 150)), chat(SYSTEM, ASKED, SAID, TOLD, (9, 150))
    selection = pick(AUTO, now, before.token_ids)
    assert (selection.common, len(before.token_ids)) == (1702, 1852)
    assert (selection.selected, selection.aligned, selection.reason) == (2201, 2048, "continues")


def test_a_conversation_did_not_grow_if_much_of_it_was_rewritten() -> None:
    before, now = chat(SYSTEM, ASKED, SAID, (9, 400)), chat(SYSTEM, ASKED, SAID, TOLD, (9, 400))
    selection = pick(AUTO, now, before.token_ids)
    assert (selection.selected, selection.reason) == (1701, "shared_prefix")
    likely = pick(AUTO, now, before.token_ids, sighting=LIKELY)
    assert (likely.selected, likely.reason) == (2201, "likely_repeat"), "without what will be rewritten again"


@pytest.mark.parametrize(
    ("length", "selected", "reason"),
    [(1600, 3923, "continues"), (1601, 1400, "shared_prefix"), (1401, 4122, "continues")],
)
def test_at_most_an_eighth_of_what_grew_was_rewritten(length: int, selected: int, reason: str) -> None:
    selection = pick(AUTO, Prompt(ids(4123)), sharing(length, 1400))
    assert (selection.selected, selection.reason) == (selected, reason)


def test_of_prompts_that_share_as_much_the_one_that_lost_least_counts() -> None:
    for recent in ([1500, 3000], [3000, 1500]):
        selection = pick(AUTO, Prompt(ids(4123)), *[sharing(length, 1400) for length in recent])
        assert (selection.selected, selection.reason) == (4023, "continues")
    best_match = pick(AUTO, Prompt(ids(4123)), sharing(1500, 1400), sharing(3000, 1450))
    assert (best_match.selected, best_match.reason) == (1450, "shared_prefix"), "one that shares less does not count"


def test_what_grew_by_less_than_it_will_lose_is_kept_up_to_the_match() -> None:
    selection = pick(AUTO, Prompt(ids(2100)), sharing(2200, 2000))
    assert (selection.selected, selection.reason) == (2000, "shared_prefix")


def test_text_of_a_marker_inside_a_message_is_no_place_to_cut() -> None:
    first, second = FIRST_TURN.token_ids.copy(), SECOND_TURN.token_ids.copy()
    first[1200], second[1200], second[2100] = END, END, END
    selection = pick(AUTO, Prompt(second, SECOND_TURN.boundaries, SECOND_TURN.system_end), first, sighting=CONTINUES)
    assert (selection.selected, selection.reason) == (2201, "continues")


def test_raw_text_that_grew_is_kept_whole() -> None:
    assert pick(AUTO, Prompt(ids(4123)), ids(1500), sighting=CONTINUES).reason == "continues"
    assert pick(AUTO, Prompt(ids(4123)), ids(1500), sighting=CONTINUES).selected == 4123
    assert not pick(AUTO, Prompt(ids(4096)), ids(1500), sighting=CONTINUES).keep_tail, (
        "it is not expected to come again without more"
    )


def test_a_chat_does_not_continue_raw_text_that_begins_with_the_same_marker() -> None:
    raw = as_token_ids([BEGIN, *range(20, 4000)])
    assert pick(AUTO, SECOND_TURN, raw).reason == "new_system_prompt"


def test_a_prompt_that_grew_but_has_no_new_boundary_is_kept_up_to_the_match() -> None:
    prompt = Prompt(SECOND_TURN.token_ids, FIRST_TURN.boundaries, FIRST_TURN.system_end)
    selection = pick(AUTO, prompt, FIRST_TURN.token_ids)
    assert (selection.selected, selection.reason) == (1301, "shared_prefix")


def test_what_was_seen_before_the_window_is_kept_as_what_was_seen_in_it() -> None:
    selection = pick(AUTO, SECOND_TURN, chat(SYSTEM, (6, 300)).token_ids, sighting=seen(6))
    assert (selection.common, selection.seen) == (1002, 1536)
    assert (selection.selected, selection.reason) == (1301, "shared_prefix")
    assert selection.diverged_at == 1002, "this is about the window alone"


def test_the_longer_of_the_match_and_what_was_seen_before_it_counts() -> None:
    recent = sharing(4000, 2000)
    selected = [pick(AUTO, Prompt(ids(4123)), recent, sighting=seen(n)).selected for n in (0, 7, 8, 16, 99)]
    assert selected == [2000, 2000, 2048, 4096, 4123]


def test_a_prompt_whose_kind_comes_again_is_kept_at_once() -> None:
    selection = pick(AUTO, SECOND_TURN, ids(4000, 7), sighting=LIKELY)
    assert (selection.selected, selection.aligned, selection.reason) == (2201, 2048, "likely_repeat")
    assert pick(AUTO, SECOND_TURN, FIRST_TURN.token_ids, sighting=replace(LIKELY, continues=True)).reason == "continues"
    assert pick(AUTO, Prompt(ids(4123)), sighting=LIKELY).selected == 4123


def test_until_a_kind_is_known_its_prompts_are_kept_at_once_where_that_is_trusted() -> None:
    def after(trials: int, *, is_trusting: bool = True) -> Selection:
        return pick(AUTO, SECOND_TURN, sighting=Sighting(trials=trials, is_trusting=is_trusting))

    assert (after(0).selected, after(0).reason) == (2201, "learning")
    assert after(9).reason == "learning"
    assert after(10).reason == "new_system_prompt"
    assert after(0, is_trusting=False).reason == "new_system_prompt"


def test_a_conversation_whose_end_is_rewritten_goes_on_though_others_filled_the_window() -> None:
    rewritten = chat(SYSTEM, ASKED, (9, 100))
    others = [chat((7, 400), (8, 300)).token_ids] * 3
    assert pick(AUTO, SECOND_TURN, rewritten.token_ids).reason == "continues"
    alone = pick(AUTO, SECOND_TURN, *others, sighting=seen(5))
    assert alone.reason == "shared_prefix"
    assert alone.selected < 1400
    beside = pick(AUTO, SECOND_TURN, *others, sighting=seen(5), older=rewritten.token_ids)
    within = pick(AUTO, SECOND_TURN, *others, rewritten.token_ids, sighting=seen(5))
    assert (beside.selected, beside.reason, beside.lost) == (within.selected, "continues", within.lost)
    assert (beside.recent, beside.common) == (3, alone.common), "it is not in the window"


@pytest.mark.parametrize("shared", [1, 300])
def test_texts_that_share_little_say_nothing_of_what_is_lost_at_their_ends(shared: int) -> None:
    assert pick(AUTO, Prompt(ids(4123)), sharing(4000, shared), sighting=LIKELY).selected == 4123


MARKED = Prompt(ids(4123), (1, 1432, 4100), 1432, marks=(Mark(600), Mark(1432, 300.0), Mark(3000)))


@pytest.mark.parametrize(
    ("sighting", "selected", "reason"),
    [(UNLIKELY, 3000, "marks"), (CONTINUES, 4100, "continues"), (LIKELY, 4100, "likely_repeat")],
    ids=["one-off", "continues", "likely"],
)
def test_auto_keeps_what_is_marked_and_more_where_that_will_come_again(
    sighting: Sighting, selected: int, reason: str
) -> None:
    """Claude Code marks its newest message of the user, and then sends a message of the system."""
    selection = pick(AUTO, MARKED, sharing(4000, 90), sighting=sighting)
    assert (selection.selected, selection.reason) == (selected, reason)
    assert selection.keeps_reply == (reason != "marks")
    assert not selection.keep_tail


@pytest.mark.parametrize(
    ("scope", "reason", "checkpoints"),
    [
        (AUTO, "marks", (512, 1280, 2816)),
        (tokens(2900), "marks", (512, 1280, 2816)),
        (tokens(3500), "tokens", (512, 1280, 2816, 3328)),
        (FULL, "full", (512, 1280, 2816, 4096)),
    ],
    ids=str,
)
def test_every_mark_has_a_checkpoint_under_every_scope(scope: Scope, reason: str, checkpoints: tuple[int, ...]) -> None:
    selection = pick(scope, MARKED, state="checkpoints")
    assert (selection.reason, selection.checkpoints) == (reason, checkpoints)


def test_a_mark_at_the_end_keeps_the_whole_prompt() -> None:
    for position in (4123, 5000):
        selection = pick(AUTO, Prompt(ids(4123), marks=(Mark(position),)))
        assert (selection.selected, selection.aligned, selection.keep_tail) == (4123, 4096, True)


@pytest.mark.parametrize("state", ["sliceable", "checkpoints"])
def test_marks_that_too_little_stands_before_do_not_count(state: StateKind) -> None:
    near = (Mark(300), Mark(500))
    for scope in (AUTO, tokens(2000), FULL):
        marked = pick(scope, Prompt(ids(4123), (1, 1432), 1432, marks=near), state=state)
        assert marked == pick(scope, Prompt(ids(4123), (1, 1432), 1432), state=state)
    both = pick(AUTO, Prompt(ids(4123), marks=(*near, Mark(1000))), state=state)
    assert (both.selected, both.reason) == (1000, "marks")


@pytest.mark.parametrize("reason", ["read_only", "faster_to_compute"])
def test_what_is_not_to_be_kept_says_why_and_what_was_seen(reason: Reason) -> None:
    selection = pick(FULL, Prompt(ids(4123)), sharing(4000, 1500), state="checkpoints")
    nothing = selection.keeping_nothing(reason)
    assert (nothing.selected, nothing.aligned, nothing.kept, nothing.keep_tail) == (0, 0, 0, False)
    assert (nothing.checkpoints, nothing.votes, nothing.reason) == ((), (), reason)
    assert (nothing.common, nothing.prompt_tokens, nothing.scope) == (1500, 4123, FULL)


# Two letters only, so that random prompts share prefixes of every length.
PROMPT_IDS = st.lists(st.integers(0, 1), max_size=40).map(as_token_ids)
EARLIER = st.lists(st.integers(0, 1), min_size=1, max_size=40).map(as_token_ids)
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
def test_whatever_is_selected_lies_in_the_prompt_and_on_the_grid(
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


@given(SCOPES, prompts(), RECENT, KNOBS)
def test_marks_add_to_what_is_kept(scope: Scope, prompt: Prompt, recent: list[TokenIds], knobs: dict[str, Any]) -> None:
    marked, plain = (select(scope, each, recent, **knobs) for each in (prompt, replace(prompt, marks=())))
    grid = knobs["block_size"]
    counting = [mark.position for mark in prompt.marks if mark.position // grid * grid >= max(knobs["min_tokens"], 1)]
    asked = max(counting, default=0) if scope != OFF else 0
    assert marked.selected == max(plain.selected, asked)
    assert set(marked.checkpoints) >= set(plain.checkpoints)
    assert marked.keeps_reply >= plain.keeps_reply


@given(SCOPES, prompts(), RECENT, KNOBS)
def test_what_is_kept_and_only_that_has_a_reason_to_be_kept(
    scope: Scope, prompt: Prompt, recent: list[TokenIds], knobs: dict[str, Any]
) -> None:
    selection = select(scope, prompt, recent, **knobs)
    assert selection.reason in get_args(Reason)
    assert (selection.kept == 0) == (selection.reason in NOTHING_KEPT) or not len(prompt.token_ids)


@given(st.integers(6, 9), prompts(), RECENT, KNOBS, st.randoms(use_true_random=False))
def test_the_order_of_the_window_is_of_no_importance(
    n: int, prompt: Prompt, recent: list[TokenIds], knobs: dict[str, Any], random: Any
) -> None:
    shuffled = random.sample(recent, len(recent))
    assert select(Scope("auto", n), prompt, recent, **knobs) == select(Scope("auto", n), prompt, shuffled, **knobs)


@given(prompts(), RECENT, KNOBS, st.integers(2, 4))
def test_where_state_can_be_cut_a_prompt_in_the_window_counts_once(
    prompt: Prompt, recent: list[TokenIds], knobs: dict[str, Any], times: int
) -> None:
    knobs = knobs | {"state": "sliceable"}
    once, often = (select(AUTO, prompt, window, **knobs) for window in (recent, recent * times))
    assert (once.selected, once.kept, once.reason) == (often.selected, often.kept, often.reason)


@given(st.integers(1, 8), prompts(), RECENT, KNOBS)
def test_where_state_can_be_cut_auto_keeps_what_was_seen_or_will_return_or_the_system_message(
    n: int, prompt: Prompt, recent: list[TokenIds], knobs: dict[str, Any]
) -> None:
    prompt = Prompt(prompt.token_ids, prompt.boundaries, prompt.system_end)
    selection = select(Scope("auto", n), prompt, recent, **(knobs | {"state": "sliceable"}))
    known = max(selection.common, selection.seen)
    assert selection.common == max((common_prefix_length(prompt.token_ids, other) for other in recent[:n]), default=0)
    assert selection.seen == min(knobs["sighting"].num_blocks * knobs["block_size"], len(prompt.token_ids))
    safe = sorted(prompt.boundaries or range(len(prompt.token_ids) + 1))
    last_known = max((p for p in safe if p <= known), default=0)
    match selection.reason:
        case "shared_prefix":
            assert selection.selected == last_known
        case "continues" | "likely_repeat":
            assert selection.selected == safe[-1] > known
        case "new_system_prompt":
            assert selection.selected == prompt.system_end > known
        case "short_prompt" | "short_prefix":
            assert selection.selected in (last_known, safe[-1], prompt.system_end)
        case _:
            assert not selection.selected


@given(prompts(), PROMPT_IDS, RECENT)
def test_appending_tokens_never_shortens_the_match(prompt: Prompt, more: TokenIds, recent: list[TokenIds]) -> None:
    longer = Prompt(as_token_ids([*prompt.token_ids, *more]), prompt.boundaries, prompt.system_end, marks=prompt.marks)
    before, after = select(AUTO, prompt, recent, **SMALL), select(AUTO, longer, recent, **SMALL)
    assert before.common <= after.common
    assert before.selected <= after.selected


@given(prompts(), st.lists(EARLIER, min_size=1, max_size=6))
def test_the_first_token_that_diverged_is_new_to_every_prompt(prompt: Prompt, recent: list[TokenIds]) -> None:
    token_ids = prompt.token_ids
    diverged_at = select(FULL, prompt, recent, **SMALL).diverged_at
    seen_whole = any(common_prefix_length(token_ids, other) == len(token_ids) for other in recent)
    assert (diverged_at is None) == seen_whole
    if diverged_at is not None:
        new, old = token_ids[: diverged_at + 1].tolist(), token_ids[:diverged_at].tolist()
        assert not any(other[: diverged_at + 1].tolist() == new for other in recent)
        assert any(other[:diverged_at].tolist() == old for other in recent)
