from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diskprefix.policy.boundary import Prompt
from diskprefix.policy.scope import Scope
from diskprefix.policy.select import Selection, longest_common_prefix, select
from diskprefix.tokens import TokenIds, as_token_ids, common_prefix_length

OFF, FULL, AUTO = Scope("off"), Scope("full"), Scope("auto", 30)
DEFAULTS: dict[str, Any] = {"block_size": 256, "min_tokens": 512, "cold_max": 10240, "interval": 10240}
SMALL: dict[str, Any] = {"block_size": 4, "min_tokens": 0, "cold_max": 100, "interval": 100}


def tokens(scope: int) -> Scope:
    return Scope("tokens", scope)


def ids(length: int, first: int = 0) -> TokenIds:
    return as_token_ids(range(first, first + length))


def sharing(length: int, shared: int) -> TokenIds:
    """`length` tokens of which the first `shared` are those of `ids(length)`."""
    token_ids = ids(length)
    token_ids[shared:] += 1_000_000
    return token_ids


def pick(scope: Scope, prompt: Prompt, *recent: TokenIds, **changes: Any) -> Selection:
    return select(scope, prompt, recent, **{**DEFAULTS, **changes})


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
def test_below_min_tokens_nothing_is_kept_but_the_boundary_is_reported(scope: Scope) -> None:
    selection = pick(scope, Prompt(ids(511)), ids(511), state="checkpoints")
    assert (selection.selected, selection.aligned, selection.keep_tail) == (511, 0, False)
    assert selection.checkpoints == ()
    assert selection.reason == "below_min_tokens"


def test_exactly_min_tokens_is_enough() -> None:
    assert pick(tokens(512), Prompt(ids(4123))).aligned == 512
    assert pick(FULL, Prompt(ids(512))).keep_tail


def test_what_would_be_kept_counts_and_not_the_boundary_above_it() -> None:
    selection = pick(tokens(700), Prompt(ids(4123)), min_tokens=600)
    assert (selection.selected, selection.aligned, selection.reason) == (700, 0, "below_min_tokens")


def test_a_prompt_shorter_than_a_block_is_kept_by_its_tail_alone() -> None:
    selection = pick(FULL, Prompt(ids(100)), min_tokens=100)
    assert (selection.selected, selection.aligned, selection.keep_tail) == (100, 0, True)
    assert selection.reason == "full"


def test_less_than_a_block_without_its_tail_is_nothing_even_without_a_minimum() -> None:
    selection = pick(tokens(255), Prompt(ids(4123)), min_tokens=0)
    assert (selection.aligned, selection.keep_tail, selection.reason) == (0, False, "below_min_tokens")


@pytest.mark.parametrize("scope", [OFF, FULL, AUTO, tokens(7)], ids=str)
def test_a_prompt_without_tokens_has_nothing_to_keep(scope: Scope) -> None:
    selection = pick(scope, Prompt(ids(0)), ids(9), min_tokens=0, state="checkpoints")
    assert (selection.selected, selection.aligned, selection.keep_tail, selection.checkpoints) == (0, 0, False, ())


def test_auto_selects_the_last_safe_boundary_of_the_best_match() -> None:
    prompt = Prompt(ids(4123), boundaries=(1, 700, 1432, 1990), system_end=700)
    selection = pick(AUTO, prompt, sharing(4000, 90), sharing(3000, 1500), sharing(5000, 800))
    assert (selection.common, selection.safe, selection.selected, selection.aligned) == (1500, 1432, 1432, 1280)
    assert (selection.window, selection.recent) == (30, 3)
    assert selection.reason == "best_match"
    assert not selection.keep_tail


@pytest.mark.parametrize(("common", "safe"), [(1431, 700), (1432, 1432), (1433, 1432)])
def test_a_boundary_exactly_at_the_end_of_the_match_counts(common: int, safe: int) -> None:
    prompt = Prompt(ids(4123), boundaries=(1, 700, 1432, 1990))
    assert pick(AUTO, prompt, sharing(4000, common)).safe == safe


def test_without_boundaries_every_position_is_safe() -> None:
    selection = pick(AUTO, Prompt(ids(4123)), sharing(4000, 1500))
    assert (selection.safe, selection.selected, selection.aligned) == (1500, 1500, 1280)


def test_only_the_newest_prompts_in_the_window_are_looked_at() -> None:
    recent = [sharing(4000, 600), sharing(4000, 1100), sharing(4000, 2100)]
    prompt = Prompt(ids(4123))
    assert [pick(Scope("auto", n), prompt, *recent).aligned for n in (1, 2, 3, 30)] == [512, 1024, 2048, 2048]
    assert [pick(Scope("auto", n), prompt, *recent).recent for n in (1, 2, 3, 30)] == [1, 2, 3, 3]


def test_without_history_auto_guesses_the_end_of_the_system_message() -> None:
    prompt = Prompt(ids(4123), boundaries=(1, 1432, 4100), system_end=1432)
    selection = pick(AUTO, prompt)
    assert (selection.safe, selection.selected, selection.aligned) == (1432, 1432, 1280)
    assert (selection.reason, selection.recent, selection.common) == ("system_guess", 0, 0)


def test_with_history_the_guess_is_not_used() -> None:
    prompt = Prompt(ids(4123), boundaries=(1, 1432, 4100), system_end=1432)
    assert pick(AUTO, prompt, sharing(4000, 2)).selected == 1


@pytest.mark.parametrize(
    ("prompt", "recent", "reason"),
    [
        (Prompt(ids(4123)), [], "no_history"),
        (Prompt(ids(4123), boundaries=(1,)), [sharing(4000, 0)], "no_match"),
        (Prompt(ids(4123), boundaries=(900,)), [sharing(4000, 899)], "no_boundary"),
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


def test_one_long_prompt_after_many_others_is_found_again() -> None:
    recent = [sharing(600, 3) for _ in range(29)]
    assert pick(AUTO, Prompt(ids(4123)), *recent, sharing(4000, 2000)).common == 2000
    assert pick(AUTO, Prompt(ids(4123)), *recent, recent[0], sharing(4000, 2000)).common == 3


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
        (4096, (1, 4000), {"interval": 2048}, (2048, 3840, 4096)),
        (4096, (1, 4000), {"interval": 1, "min_tokens": 3500}, (3584, 3840, 4096)),
        (30_000, (1, 5000, 29_990), {}, (4864, 10240, 20480, 29_952)),
        (30_000, (), {}, (10240, 20480, 29_952)),
        (20_480, (1, 20_480), {}, (10240, 20480)),
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


@pytest.mark.parametrize("scope", [AUTO, tokens(1432)], ids=str)
def test_below_a_far_boundary_lie_checkpoints_to_fall_back_to(scope: Scope) -> None:
    prompt = Prompt(ids(4123), boundaries=(1, 1432, 4100))
    selection = pick(scope, prompt, sharing(4000, 1500), state="checkpoints", interval=600, min_tokens=100)
    assert selection.checkpoints == (512, 1024, 1280)


def test_state_of_one_pass_is_kept_at_the_end_of_a_prompt_only() -> None:
    prompt = Prompt(ids(4123), boundaries=(1, 1432))
    whole = pick(FULL, prompt, state="one_pass")
    assert (whole.keep_tail, whole.aligned, whole.checkpoints) == (True, 4096, ())
    for scope in (AUTO, tokens(1432)):
        part = pick(scope, prompt, sharing(4000, 1500), state="one_pass")
        assert (part.selected, part.aligned, part.reason) == (1432, 0, "one_pass")


@pytest.mark.parametrize("scope", [FULL, AUTO, tokens(1432)], ids=str)
def test_state_that_can_be_cut_has_no_checkpoints(scope: Scope) -> None:
    assert pick(scope, Prompt(ids(30_000)), sharing(20_000, 15_000)).checkpoints == ()


@pytest.mark.parametrize(
    ("selection", "line"),
    [
        (pick(OFF, Prompt(ids(9))), "[disk-cache] off scope: reason=off"),
        (
            pick(FULL, Prompt(ids(4123))),
            "[disk-cache] full scope: prompt=4123 selected=4096 tail=27 reason=full",
        ),
        (
            pick(FULL, Prompt(ids(100))),
            "[disk-cache] full scope: prompt=100 selected=0 tail=0 reason=below_min_tokens",
        ),
        (
            pick(tokens(1000), Prompt(ids(4123))),
            "[disk-cache] tokens scope: n=1000 prompt=4123 selected=768 tail=0 reason=tokens",
        ),
        (
            pick(AUTO, Prompt(ids(4123), (1, 1432)), *[sharing(4000, 1500)] * 12),
            "[disk-cache] auto scope: window=30 recent=12 safe=1432 selected=1280 common=1500 reason=best_match",
        ),
        (
            pick(Scope("auto", 8), Prompt(ids(4123), (1, 1432), system_end=1432)),
            "[disk-cache] auto scope: window=8 recent=0 safe=1432 selected=1280 common=0 reason=system_guess",
        ),
    ],
    ids=["off", "full", "below_min", "tokens", "auto", "guess"],
)
def test_the_log_line_says_what_was_chosen_and_why(selection: Selection, line: str) -> None:
    assert selection.log_line() == line


# Two letters only, so that random prompts share prefixes of every length.
PROMPT_IDS = st.lists(st.integers(0, 1), max_size=40).map(as_token_ids)
RECENT = st.lists(PROMPT_IDS, max_size=6)


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    token_ids = draw(PROMPT_IDS)
    positions = st.integers(1, max(1, len(token_ids)))
    boundaries = tuple(sorted(draw(st.sets(positions, max_size=6)))) if len(token_ids) else ()
    return Prompt(token_ids, boundaries, draw(st.sampled_from((0, *boundaries))))


SCOPES = st.one_of(
    st.sampled_from([OFF, FULL]), st.builds(Scope, st.sampled_from(["auto", "tokens"]), st.integers(1, 45))
)
KNOBS = st.fixed_dictionaries(
    {
        "block_size": st.integers(1, 9),
        "min_tokens": st.integers(0, 20),
        "cold_max": st.integers(0, 50),
        "interval": st.integers(1, 50),
        "state": st.sampled_from(["cuttable", "checkpoints", "one_pass"]),
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
    assert list(selection.checkpoints) == sorted(set(selection.checkpoints))


@given(SCOPES, prompts(), RECENT, KNOBS)
def test_the_same_inputs_give_the_same_selection(
    scope: Scope, prompt: Prompt, recent: list[TokenIds], knobs: dict[str, Any]
) -> None:
    copy = Prompt(prompt.token_ids.copy(), prompt.boundaries, prompt.system_end)
    again = select(scope, copy, tuple(token_ids.copy() for token_ids in recent), **knobs)
    assert select(scope, prompt, recent, **knobs) == again


@given(SCOPES, prompts(), RECENT, KNOBS)
def test_what_is_kept_and_only_that_has_a_reason_to_be_kept(
    scope: Scope, prompt: Prompt, recent: list[TokenIds], knobs: dict[str, Any]
) -> None:
    selection = select(scope, prompt, recent, **knobs)
    kept = selection.aligned > 0 or selection.keep_tail
    assert kept == (selection.reason in ("full", "tokens", "best_match", "system_guess")) or not len(prompt.token_ids)
    assert "\n" not in selection.log_line()


@given(st.integers(1, 8), prompts(), st.lists(PROMPT_IDS, min_size=1, max_size=6))
def test_auto_cuts_at_a_boundary_inside_the_longest_match(n: int, prompt: Prompt, recent: list[TokenIds]) -> None:
    selection = select(Scope("auto", n), prompt, recent, **SMALL)
    assert selection.common == max(common_prefix_length(prompt.token_ids, other) for other in recent[:n])
    if prompt.boundaries:
        assert selection.selected == max((p for p in prompt.boundaries if p <= selection.common), default=0)
    else:
        assert selection.selected == selection.common


@given(PROMPT_IDS, RECENT, RECENT)
def test_more_history_never_shortens_the_match(
    token_ids: TokenIds, recent: list[TokenIds], older: list[TokenIds]
) -> None:
    assert longest_common_prefix(token_ids, recent) <= longest_common_prefix(token_ids, [*recent, *older])


@given(prompts(), PROMPT_IDS, RECENT)
def test_appending_tokens_never_shortens_the_match(prompt: Prompt, more: TokenIds, recent: list[TokenIds]) -> None:
    longer = Prompt(as_token_ids([*prompt.token_ids, *more]), prompt.boundaries, prompt.system_end)
    before, after = select(AUTO, prompt, recent, **SMALL), select(AUTO, longer, recent, **SMALL)
    assert before.common <= after.common
    assert before.selected <= after.selected


@given(prompts(), PROMPT_IDS)
def test_a_conversation_that_grew_matches_all_of_its_last_turn(prompt: Prompt, more: TokenIds) -> None:
    grown = Prompt(as_token_ids([*prompt.token_ids, *more]), prompt.boundaries)
    assert select(AUTO, grown, [prompt.token_ids], **SMALL).common == len(prompt.token_ids)


@given(prompts(), st.lists(PROMPT_IDS, min_size=1, max_size=6))
def test_the_first_token_that_diverged_is_new_to_every_prompt(prompt: Prompt, recent: list[TokenIds]) -> None:
    token_ids = prompt.token_ids
    diverged_at = select(FULL, prompt, recent, **SMALL).diverged_at
    seen_whole = any(common_prefix_length(token_ids, other) == len(token_ids) for other in recent)
    assert (diverged_at is None) == seen_whole
    if diverged_at is not None:
        new, old = token_ids[: diverged_at + 1].tolist(), token_ids[:diverged_at].tolist()
        assert not any(other[: diverged_at + 1].tolist() == new for other in recent)
        assert any(other[:diverged_at].tolist() == old for other in recent)
