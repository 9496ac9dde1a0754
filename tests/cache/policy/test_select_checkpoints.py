"""The checkpoints that `auto` chooses where state cannot be cut."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diskprefix.cache.policy.seen import Sighting
from diskprefix.nouns import Mark, Prompt, Scope, Selection
from diskprefix.tokens import LEAST_TOKENS, TokenIds, as_token_ids
from tests.cache.policy.asking import select

AUTO = Scope("auto", 30)
DEFAULTS: dict[str, Any] = {"block_size": 100, "min_tokens": 200, "cold_max": 10240, "interval": 500}
LIKELY = Sighting(trials=10, again=5)
UNLIKELY = Sighting(trials=10)
"""Of a prompt whose kind never came again."""
CONTINUES = replace(UNLIKELY, continues=True)
MARKER = -1


def ids(length: int) -> TokenIds:
    return as_token_ids(range(length))


def sharing(shared: int) -> TokenIds:
    """Shares so many tokens with `ids`, and has many more that end in a marker."""
    return as_token_ids([*range(shared), *range(1_000_000, 1_001_000), MARKER])


def parted(length: int, *boundaries: int, system_end: int = 0) -> Prompt:
    """`ids` with markers before the boundaries."""
    token_ids = ids(length)
    token_ids[[position - 1 for position in boundaries]] = MARKER
    return Prompt(token_ids, boundaries, system_end)


def leaving(prompt: Prompt, shared: int) -> TokenIds:
    """Shares so many tokens with the prompt, and has many more that end in a marker."""
    return as_token_ids([*prompt.token_ids[:shared], *range(1_000_000, 1_001_000), MARKER])


def pick(prompt: Prompt, *recent: TokenIds, **changes: Any) -> Selection:
    return select(AUTO, prompt, recent, **{**DEFAULTS, "state": "checkpoints", "sighting": UNLIKELY, **changes})


def chosen(selection: Selection) -> dict[int, int]:
    return dict(zip(selection.checkpoints, selection.votes, strict=True))


def test_each_recent_prompt_votes_for_what_it_shares() -> None:
    selection = pick(Prompt(ids(3000)), sharing(650), sharing(650), sharing(1720))
    assert chosen(selection) == {600: 3, 1700: 1}
    assert (selection.selected, selection.aligned, selection.reason) == (1700, 1700, "best_checkpoints")
    assert not selection.keep_tail


def test_a_vote_is_for_the_last_safe_boundary() -> None:
    prompt = parted(3000, 1, 900, 2000)
    assert chosen(pick(prompt, leaving(prompt, 1999))) == {900: 1}
    assert chosen(pick(prompt, leaving(prompt, 2000))) == {2000: 1}


def test_what_is_not_far_beyond_another_is_left_to_it() -> None:
    """A checkpoint at 800 would save 100 tokens, and weighs 200; for two that is worth it."""
    assert chosen(pick(Prompt(ids(3000)), *[sharing(700)] * 3, sharing(820))) == {700: 4}
    assert chosen(pick(Prompt(ids(3000)), *[sharing(700)] * 3, *[sharing(820)] * 2)) == {
        700: 5,
        800: 2,
    }


def test_without_a_minimum_a_checkpoint_is_kept_wherever_a_vote_is() -> None:
    """A block saved is enough, and two places are a block apart."""
    recent = [sharing(300), sharing(420)]
    assert chosen(pick(Prompt(ids(3000)), *recent, min_tokens=0)) == {300: 2, 400: 1}
    assert pick(Prompt(ids(3000)), *recent, min_tokens=0).price == 100


def test_what_is_stored_already_saves_nothing_more() -> None:
    recent = [sharing(650), sharing(1250), sharing(1350)]
    assert chosen(pick(Prompt(ids(3000)), *recent, restored=600, min_tokens=100)) == {1200: 2, 1300: 1}
    assert chosen(pick(Prompt(ids(3000)), *recent, restored=600)) == {1200: 2}
    assert chosen(pick(Prompt(ids(3000)), *recent, restored=1200, min_tokens=100)) == {1300: 1}
    nothing = pick(Prompt(ids(3000)), *recent, restored=1300)
    assert (nothing.checkpoints, nothing.aligned, nothing.reason) == ((), 0, "already_saved")


def test_what_was_seen_before_the_window_is_one_vote_if_it_is_longer() -> None:
    assert chosen(pick(Prompt(ids(3000)), sharing(650), sighting=replace(UNLIKELY, num_blocks=12))) == {600: 2, 1200: 1}
    assert chosen(pick(Prompt(ids(3000)), sharing(650), sighting=replace(UNLIKELY, num_blocks=6))) == {600: 1}


def test_a_conversation_that_grew_votes_for_its_end_and_what_it_continues_does_not() -> None:
    prompt = parted(3000, 1, 900, 2000, 2800)
    earlier = [prompt.token_ids[:1995], prompt.token_ids[:905]]
    selection = pick(prompt, *earlier, sighting=CONTINUES)
    assert chosen(selection) == {2800: 1}
    assert (selection.aligned, selection.reason) == (2800, "continues")
    assert chosen(pick(prompt, *earlier, leaving(prompt, 950), sighting=CONTINUES)) == {900: 2, 2800: 1}


def test_a_system_message_that_nobody_has_sent_yet_is_a_vote() -> None:
    prompt = parted(3000, 1, 900, 2000, system_end=900)
    assert (chosen(pick(prompt)), pick(prompt).reason) == ({900: 1}, "new_system_prompt")
    others = [as_token_ids([*range(n * 10**6, n * 10**6 + 500), MARKER]) for n in range(2, 10)]
    assert pick(prompt, *others[:7]).reason == "new_system_prompt"
    assert (pick(prompt, *others).checkpoints, pick(prompt, *others).reason) == ((), "no_match")
    assert chosen(pick(prompt, leaving(prompt, 950))) == {900: 1}
    assert pick(prompt, leaving(prompt, 950)).reason == "best_checkpoints"


def test_a_system_message_that_nobody_has_sent_yet_is_a_vote_beside_the_prompts_end() -> None:
    """Else the next prompt with it, which asks another thing, restores nothing."""
    selection = pick(parted(3000, 1, 900, 2000, system_end=900), sighting=LIKELY)
    assert chosen(selection) == {900: 2, 2000: 1}
    assert selection.reason == "likely_repeat"


def test_the_reason_is_that_of_the_last_checkpoint() -> None:
    prompt = parted(3000, 1, 900, 2000, 2800, system_end=900)
    continues = replace(CONTINUES, num_blocks=10)
    assert pick(prompt, leaving(prompt, 950), sighting=continues).reason == "continues"
    shared = pick(prompt, leaving(prompt, 2050), sighting=replace(UNLIKELY, num_blocks=10), min_tokens=2000)
    assert (chosen(shared), shared.reason) == ({2000: 1}, "best_checkpoints")
    at_the_same = pick(parted(2090, 1, 900, 2000, 2050), sighting=replace(LIKELY, num_blocks=20))
    assert (chosen(at_the_same), at_the_same.reason) == ({2000: 2}, "likely_repeat"), "the same place on the grid"
    no_boundary = parted(3000, 900, 2000, system_end=900)
    guess = pick(no_boundary, leaving(no_boundary, 850))
    assert (chosen(guess), guess.reason) == ({900: 1}, "new_system_prompt"), "what was shared holds no safe boundary"


def test_a_conversation_with_a_reminder_that_moves_votes_for_what_comes_before_it() -> None:
    prompt = parted(3000, 1, 900, 2000, 2800, system_end=900)
    earlier = as_token_ids([*prompt.token_ids[:2000], *range(1_000_000, 1_000_200)])
    selection = pick(prompt, earlier)
    assert (chosen(selection), selection.reason) == ({2000: 2, 2800: 1}, "continues")
    longer = as_token_ids([*earlier, *range(2_000_000, 2_000_050)])
    assert chosen(pick(prompt, longer)) == {2000: 2}, "250 tokens were lost, 200 stand behind the last boundary"


def test_what_is_likely_but_below_the_minimum_is_not_kept() -> None:
    selection = pick(Prompt(ids(190)), sighting=LIKELY)
    assert (selection.checkpoints, selection.kept, selection.reason) == ((), 0, "short_prompt")


def test_the_end_of_a_conversation_is_worth_a_checkpoint_as_soon_as_it_grew() -> None:
    prompt, earlier = parted(3000, 1, 2000, 2150), parted(3000, 1, 2000).token_ids[:2000]
    assert chosen(pick(prompt, earlier, restored=2000, sighting=CONTINUES)) == {2100: 1}
    selection = pick(prompt, earlier, restored=2100, sighting=CONTINUES)
    assert (selection.checkpoints, selection.kept, selection.reason) == ((), 0, "already_saved")
    assert selection.keeps_reply, "its reply may be long"


def test_at_every_token_checkpoints_are_where_the_boundaries_are() -> None:
    prompt = parted(3000, 1, 910, 2017, 2803, system_end=910)
    selection = pick(prompt, state="token_checkpoints", sighting=LIKELY)
    assert chosen(selection) == {910: 2, 2803: 1}
    assert (selection.aligned, selection.keep_tail, selection.keeps_reply) == (2803, False, True)
    fewer_than_a_step = {"restored": 2790, "state": "token_checkpoints", "sighting": CONTINUES}
    assert pick(prompt, **fewer_than_a_step).checkpoints == ()
    assert pick(prompt, **(fewer_than_a_step | {"restored": 2787})).checkpoints == (2803,)
    assert pick(Prompt(prompt.token_ids), state="token_checkpoints", sighting=CONTINUES).checkpoints == (3000,)


def test_large_states_must_save_more() -> None:
    recent = [sharing(600), sharing(1100)]
    small = {"state": "token_checkpoints", "state_bytes": 100 << 10}
    assert chosen(pick(Prompt(ids(3000)), *recent, **small)) == {600: 2, 1100: 1}
    large = {"state": "token_checkpoints", "state_bytes": 600 * (256 << 10)}
    assert chosen(pick(Prompt(ids(3000)), *recent, **large)) == {600: 2}
    assert pick(Prompt(ids(3000)), *recent, **large).price == 600
    # The end of a conversation replaces an earlier one, and costs nothing in the long run.
    assert chosen(pick(Prompt(ids(3000)), restored=2900, sighting=CONTINUES, **large)) == {3000: 1}


def test_what_other_prompts_share_is_an_anchor_and_the_own_earlier_turns_are_not() -> None:
    prompt = parted(3000, 1, 910, 2017, 2803, system_end=910)
    turn = as_token_ids([*prompt.token_ids[:2100], *range(1_000_000, 1_000_100), MARKER])
    state = {"state": "token_checkpoints", "sighting": CONTINUES, "restored": 2803}
    assert pick(prompt, turn, **state).anchors == (910,)
    assert pick(prompt, turn, leaving(prompt, 2100), **state).anchors == (910, 2017)
    assert pick(replace(prompt, marks=(Mark(1500),)), turn, **state).anchors == (910, 1500)
    assert pick(prompt, turn, **(state | {"state": "token"})).anchors == ()
    full = select(Scope("full"), prompt, [], **DEFAULTS, state="token_checkpoints")
    assert set(full.checkpoints) <= set(full.anchors)


def test_the_end_of_a_document_is_an_anchor_once_two_short_questions_leave_there() -> None:
    prompt = parted(3000, 1, 910, 2517, 2803, system_end=910)
    questions = [as_token_ids([*prompt.token_ids[:2517], *range(n, n + 90), MARKER]) for n in (10**6, 2 * 10**6)]
    for state, at in ("token_checkpoints", 2517), ("checkpoints", 2500):
        rules = {"state": state, "sighting": CONTINUES, "restored": 2803}
        system = 910 if state == "token_checkpoints" else 900
        assert pick(prompt, questions[0], **rules).anchors == (system,)
        assert pick(prompt, *questions, **rules).anchors == (system, at)


def test_turns_that_each_rewrite_their_end_are_no_anchors_though_they_leave_in_one_block() -> None:
    prompt = parted(3000, 1, 910, 2510, 2550, 2590, 2803, system_end=910)
    turns = [as_token_ids([*prompt.token_ids[:end], *range(10**6, 10**6 + 90)]) for end in (2590, 2550, 2510)]
    selection = pick(prompt, *turns, sighting=CONTINUES, restored=2803)
    assert (selection.anchors, selection.common) == ((900,), 2590)


def test_an_exact_repeat_of_whole_blocks_can_be_restored() -> None:
    selection = pick(Prompt(ids(1000)), ids(1000), sighting=CONTINUES)
    assert selection.keep_tail or any(position < 1000 for position in selection.checkpoints)


@pytest.mark.parametrize(
    ("recent", "sighting", "reason"),
    [
        ((), UNLIKELY, "no_history"),
        ((sharing(0),), UNLIKELY, "no_match"),
        ((sharing(850),), UNLIKELY, "no_safe_boundary"),
        ((), replace(UNLIKELY, num_blocks=8), "no_safe_boundary"),
        ((sharing(950),), UNLIKELY, "short_prefix"),
        ((), LIKELY, "short_prefix"),
    ],
)
def test_auto_says_why_it_has_no_checkpoint(recent: tuple[TokenIds, ...], sighting: Sighting, reason: str) -> None:
    prompt = Prompt(ids(3000), boundaries=(900,))
    selection = pick(prompt, *recent, sighting=sighting, min_tokens=1000)
    assert (selection.selected, selection.checkpoints, selection.reason) == (0, (), reason)


POSITIONS = st.lists(st.integers(0, 60), max_size=8)


@given(POSITIONS, st.integers(0, 70), st.booleans(), st.integers(1, 6), st.integers(0, 20))
def test_no_other_set_of_checkpoints_saves_more(
    shared: list[int], restored: int, is_likely: bool, block_size: int, min_tokens: int
) -> None:
    """Counted vote by vote: each saves up to the last checkpoint at or below it, beyond what is restored anyway. Nor
    does one more checkpoint that pays its price and no more."""
    selection = select(
        AUTO,
        Prompt(ids(70)),
        [sharing(n) for n in shared],
        block_size=block_size,
        min_tokens=min_tokens,
        cold_max=100,
        interval=100,
        state="checkpoints",
        restored=restored,
        sighting=LIKELY if is_likely else UNLIKELY,
    )
    price = max(min_tokens, 1, block_size)
    # The prompt's own end is cheaper, if it is expected to come again.
    end, end_price = (70 - 70 % block_size if is_likely else -1), min(price, max(LEAST_TOKENS, block_size))
    votes = [n - n % block_size for n in [*shared, *[70] * is_likely]]
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
