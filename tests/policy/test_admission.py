from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diskprefix.policy import admission as rules
from diskprefix.policy.admission import AdmissionFilter, Sighting, is_continued
from diskprefix.prompt import Prompt, raw_boundaries
from diskprefix.tokens import TokenIds, as_token_ids, block_hash, common_prefix_length, root_hash

BLOCK = 4
BEGIN, END = 1, 2


def names(token_ids: TokenIds, block_size: int = BLOCK) -> list[bytes]:
    """Of the full blocks, each of which names all that stands before it."""
    chain = [root_hash("somebody")]
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        chain.append(block_hash(0, chain[-1], token_ids[start : start + block_size]))
    return chain[1:]


def add(seen: AdmissionFilter, token_ids: TokenIds, block_size: int = BLOCK) -> None:
    seen.add(token_ids, names(token_ids, block_size), block_size)


def look(seen: AdmissionFilter, prompt: Prompt | TokenIds, block_size: int = BLOCK) -> Sighting:
    prompt = prompt if isinstance(prompt, Prompt) else Prompt(prompt)
    return seen.look(prompt, names(prompt.token_ids, block_size), block_size)


def blocks(number: int, count: int) -> TokenIds:
    """Tokens of `count` blocks that no other number has."""
    return as_token_ids(range(1000 * number, 1000 * number + count * BLOCK))


def joined(*parts: TokenIds | Sequence[int]) -> TokenIds:
    return as_token_ids([int(token) for part in parts for token in part])


def chat(*words: int, ending: Sequence[int] = (BEGIN, 4), length: int = 40, system: bool = False) -> Prompt:
    """Messages of so many words, one for each number, the first perhaps the system's, and what has the model reply."""
    token_ids = joined(*([BEGIN, 4, *range(100 * n, 100 * n + length), END] for n in words), ending)
    return Prompt(token_ids, raw_boundaries(token_ids, (BEGIN, END)), length + 4 if system else 0)


def test_of_what_was_never_seen_nothing_is_known() -> None:
    assert look(AdmissionFilter(is_trusting=False), blocks(1, 3)) == Sighting()
    assert not Sighting().is_likely_again


@pytest.mark.parametrize(("shared", "num_blocks"), [(0, 0), (3, 0), (4, 1), (11, 2), (12, 3), (20, 5)])
def test_as_many_blocks_are_known_as_were_seen_in_full(shared: int, num_blocks: int) -> None:
    seen = AdmissionFilter(is_trusting=False)
    add(seen, blocks(1, 5))
    assert look(seen, joined(blocks(1, 5)[:shared], blocks(2, 3))).num_blocks == num_blocks


def test_a_block_after_another_beginning_is_another_block() -> None:
    seen = AdmissionFilter(is_trusting=False)
    add(seen, joined(blocks(1, 1), blocks(2, 1)))
    assert look(seen, joined(blocks(3, 1), blocks(2, 1))).num_blocks == 0


def test_looking_changes_nothing() -> None:
    seen = AdmissionFilter(is_trusting=False)
    add(seen, blocks(1, 3))
    answers = [look(seen, blocks(1, 4)) for _ in range(20)]
    assert set(answers) == {Sighting(num_blocks=3, continues=True)}
    assert [look(seen, blocks(2, 4)) for _ in range(2)] == [Sighting()] * 2
    assert len(seen) == 3


def test_a_prompt_is_known_after_a_thousand_others() -> None:
    seen = AdmissionFilter(is_trusting=False)
    add(seen, blocks(1, 5))
    for number in range(2, 1002):
        add(seen, blocks(number, 3))
    assert look(seen, blocks(1, 5)).num_blocks == 5


def test_what_was_not_seen_for_long_is_forgotten_and_what_came_again_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_GENERATION", 10)
    seen = AdmissionFilter(is_trusting=False)
    add(seen, blocks(1, 5))
    add(seen, blocks(2, 5))
    assert look(seen, blocks(1, 5)).num_blocks == 5, "in the old generation"
    add(seen, blocks(1, 5))
    add(seen, blocks(3, 5))
    assert [look(seen, blocks(number, 5)).num_blocks for number in (1, 2, 3)] == [5, 0, 5]
    assert len(seen) <= 2 * 10


def trials(seen: AdmissionFilter, count: int, again: int, num_blocks: int = 3, first: int = 1) -> None:
    """So many prompts of so many blocks, some of which come again, one of them several times."""
    for number in range(first, first + count):
        add(seen, blocks(number, num_blocks))
    for number in [*range(first, first + again), *[first] * (again > 0)]:
        add(seen, blocks(number, num_blocks))


def of_kind(seen: AdmissionFilter, num_blocks: int = 3) -> tuple[int, int]:
    sighting = look(seen, blocks(900, num_blocks))
    return sighting.trials, sighting.again


@pytest.mark.parametrize(
    ("count", "again", "likely"),
    [(9, 9, False), (10, 0, False), (10, 4, False), (10, 5, True), (15, 6, False), (15, 7, True), (30, 12, False)],
)
def test_what_comes_again_more_than_two_times_in_five_is_likely_to(count: int, again: int, likely: bool) -> None:
    seen = AdmissionFilter(is_trusting=False)
    trials(seen, count, again)
    assert of_kind(seen) == (count, again)
    assert look(seen, blocks(900, 3)).is_likely_again == likely


@pytest.mark.parametrize(("count", "is_trusting", "untried"), [(0, True, True), (9, True, True), (10, True, False)])
def test_a_kind_is_untried_until_ten_of_it_came_where_that_is_trusted(
    count: int, is_trusting: bool, untried: bool
) -> None:
    seen, wary = AdmissionFilter(is_trusting=is_trusting), AdmissionFilter(is_trusting=False)
    trials(seen, count, 0)
    assert look(seen, blocks(900, 3)).is_untried == untried
    assert not look(wary, blocks(900, 3)).is_untried


def test_what_goes_on_in_two_ways_is_a_beginning_and_no_conversation() -> None:
    seen = AdmissionFilter(is_trusting=False)
    anchor = joined(blocks(1, 3), [7])
    longer = [joined(anchor, blocks(number, 3)) for number in range(2, 6)]
    add(seen, anchor)
    assert look(seen, longer[0]).continues
    for token_ids in longer[:2]:
        assert look(seen, token_ids).continues
        add(seen, token_ids)
        add(seen, token_ids)
    assert not look(seen, longer[2]).continues, "it went on in two ways; to come again counts once"
    assert look(seen, joined(longer[1], [8, 9])).continues, "this one has gone on in no way yet"


def test_prompts_with_the_same_blocks_are_told_apart_by_their_ends() -> None:
    seen = AdmissionFilter(is_trusting=False)
    for end in (60, 70, 80):
        add(seen, joined(blocks(1, 3), range(end, end + 3)))
    for end in (60, 70, 80):
        assert look(seen, joined(blocks(1, 3), range(end, end + 3), blocks(5, 1))).continues


def test_prompts_with_about_as_many_new_blocks_are_of_one_kind() -> None:
    seen = AdmissionFilter(is_trusting=False)
    for number, num_blocks in enumerate((4, 5, 6, 7), start=1):
        add(seen, blocks(number, num_blocks))
    assert [of_kind(seen, n)[0] for n in (3, 4, 5, 6, 7, 8)] == [0, 4, 4, 4, 4, 0]


def test_only_the_new_blocks_of_a_prompt_make_its_kind() -> None:
    seen = AdmissionFilter(is_trusting=False)
    add(seen, blocks(1, 8))
    add(seen, joined(blocks(1, 8), blocks(2, 2)))
    assert [of_kind(seen, n)[0] for n in (8, 2, 10)] == [1, 1, 1], "10 is of the kind of 8"
    sighting = look(seen, joined(blocks(1, 8), blocks(3, 2)))
    assert (sighting.num_blocks, sighting.trials) == (8, 1)


def test_a_prompt_without_new_blocks_is_no_trial() -> None:
    seen = AdmissionFilter(is_trusting=False)
    for _ in range(3):
        add(seen, blocks(1, 3))
    assert of_kind(seen) == (1, 1)
    assert look(seen, blocks(1, 3)) == Sighting(num_blocks=3, continues=True)


@pytest.mark.parametrize(("num_blocks", "again"), [(5, 0), (6, 0), (7, 1), (8, 1)])
def test_most_of_what_was_new_must_come_again(num_blocks: int, again: int) -> None:
    """Of eight blocks the seventh tells."""
    seen = AdmissionFilter(is_trusting=False)
    add(seen, blocks(1, 8))
    add(seen, joined(blocks(1, 8)[: num_blocks * BLOCK], blocks(2, 1)))
    assert of_kind(seen, 8) == (1, again)


@pytest.mark.parametrize(("num_blocks", "again"), [(8, 0), (10, 0), (12, 1)])
def test_what_was_seen_before_says_nothing_about_what_was_new(num_blocks: int, again: int) -> None:
    seen = AdmissionFilter(is_trusting=False)
    add(seen, blocks(1, 8))
    longer = joined(blocks(1, 8), blocks(2, 4))
    add(seen, longer)
    add(seen, longer[: num_blocks * BLOCK])
    assert of_kind(seen, 4) == (1, again)


def test_of_many_trials_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_TRIALS", 4)
    seen = AdmissionFilter(is_trusting=False)
    trials(seen, 3, 3)
    assert of_kind(seen) == (3, 3)
    trials(seen, 3, 0, first=20)
    assert of_kind(seen) == (4, 1)
    trials(seen, 4, 0, num_blocks=9, first=40)
    assert (of_kind(seen), of_kind(seen, 9)) == ((0, 0), (4, 0))


def test_a_conversation_is_known_to_go_on_after_a_thousand_others() -> None:
    seen = AdmissionFilter(is_trusting=False)
    add(seen, chat(1, 2).token_ids)
    for number in range(10, 1010):
        add(seen, chat(number).token_ids)
    assert look(seen, chat(1, 2, 3, 4)).continues
    assert not look(seen, chat(1, 3, 2, 4)).continues


def test_a_conversation_goes_on_though_the_template_rewrote_what_has_the_model_reply() -> None:
    seen = AdmissionFilter(is_trusting=False)
    add(seen, chat(1, 2, ending=(BEGIN, 4, 70, 71)).token_ids)
    assert look(seen, chat(1, 2, 3)).continues
    assert not look(seen, chat(1, 3)).continues


@pytest.mark.parametrize(("num_blocks", "goes_on"), [(3, True), (2, False)])
def test_all_blocks_of_a_prompt_must_be_there_for_it_to_go_on(num_blocks: int, goes_on: bool) -> None:
    seen = AdmissionFilter(is_trusting=False)
    add(seen, joined(blocks(1, 3), [7]))
    assert look(seen, joined(blocks(1, num_blocks), blocks(2, 2))).continues == goes_on


@pytest.mark.parametrize(("rewritten", "goes_on"), [(0, True), (32, True), (33, False)])
def test_of_what_stands_behind_the_blocks_a_little_may_be_rewritten(rewritten: int, goes_on: bool) -> None:
    seen = AdmissionFilter(is_trusting=False)
    shared = range(64 + 20)
    add(seen, joined(shared, range(500, 500 + rewritten)), 64)
    assert look(seen, joined(shared, range(900, 1000)), 64).continues == goes_on


def test_any_earlier_turn_will_do() -> None:
    seen = AdmissionFilter(is_trusting=False)
    for words in ((1,), (1, 2, 3)):
        add(seen, chat(*words).token_ids)
    assert look(seen, chat(1, 5, 6)).continues, "it went on from the first turn in another way"


def test_a_prompt_of_less_than_a_block_says_nothing() -> None:
    seen = AdmissionFilter(is_trusting=False)
    add(seen, as_token_ids([1, 2, 3]))
    assert len(seen) == 0
    assert look(seen, as_token_ids([1, 2, 3, 4])) == Sighting()


def test_of_many_prompts_the_oldest_ends_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_ENDS", 2)
    seen = AdmissionFilter(is_trusting=False)
    for number in (1, 2, 1, 3):
        add(seen, blocks(number, 2))
    goes_on = [look(seen, joined(blocks(number, 2), [7])).continues for number in (1, 2, 3)]
    assert goes_on == [True, False, True]


def test_what_is_remembered_does_not_follow_the_callers_array() -> None:
    token_ids = joined(blocks(1, 2), [7])
    seen = AdmissionFilter(is_trusting=False)
    add(seen, token_ids)
    token_ids[-1] = 8
    assert look(seen, joined(blocks(1, 2), [7, 9])).continues


def continued(prompt: Prompt, earlier: TokenIds, block_size: int = 1) -> bool:
    """As the two places ask it: at what is shared, or at a block before it."""
    common = common_prefix_length(prompt.token_ids, earlier)
    at = common - common % block_size
    return is_continued(prompt, at, earlier[at:])


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize(
    ("earlier", "is_there"),
    [
        (chat(1, 2), True),
        (chat(1), True),
        (chat(1, 2, 3, 4), True),
        (chat(1, 2, 3, 4, ending=()), True),
        (chat(1, 2, ending=(BEGIN, 4, 70, 71)), True),
        (chat(1, 2, ending=range(70, 70 + 32)), True),
        (chat(1, 2, ending=range(70, 70 + 33)), False),
        (chat(1, 3), False),
        (chat(1, 2, 4), False),
        (chat(2), False),
        (chat(1, 2, 3, 4, 5), False),
    ],
)
def test_a_chat_continues_another_if_all_its_messages_are_there(
    earlier: Prompt, is_there: bool, block_size: int
) -> None:
    assert continued(chat(1, 2, 3, 4), earlier.token_ids, block_size) == is_there


@pytest.mark.parametrize("block_size", [1, 4])
def test_to_share_the_system_message_is_not_to_go_on(block_size: int) -> None:
    prompt, short = chat(1, 2, 3, system=True), chat(1, 9, length=40).token_ids[: 43 + 2 + 5]
    assert len(short) - common_prefix_length(prompt.token_ids, short) == 5
    assert not continued(prompt, short, block_size)
    assert continued(chat(1, 2, 3), short, block_size), "of a chat without a system message the first one is said"


def test_raw_text_continues_another_if_nearly_all_of_it_is_there() -> None:
    prompt = Prompt(as_token_ids(range(60)))
    assert continued(prompt, as_token_ids(range(12)))
    assert continued(prompt, as_token_ids(range(60)))
    assert continued(prompt, as_token_ids([*range(12), *range(70, 70 + 32)]))
    assert not continued(prompt, as_token_ids([*range(12), *range(70, 70 + 33)]))
    assert continued(prompt, as_token_ids(range(61))), "it may have more at its end"
    assert not continued(prompt, as_token_ids(range(93)))


def test_without_a_shared_boundary_nothing_is_continued() -> None:
    prompt = chat(1, 2, 3)
    assert not continued(prompt, as_token_ids([70, 71]))
    beyond = Prompt(prompt.token_ids, prompt.boundaries[-1:])
    assert not continued(beyond, as_token_ids([*prompt.token_ids[:5], 70]))


def test_a_long_text_without_markers_is_not_what_the_template_wrote_at_the_end() -> None:
    prompt = chat(1, 2, 3)
    assert not continued(prompt, as_token_ids([*prompt.token_ids[:1], *range(1000, 2000)]))
    assert not continued(prompt, as_token_ids([*prompt.token_ids[:10], *range(1000, 2000)]))


# Two letters only, so that random prompts share prefixes of every length.
PROMPTS = st.lists(st.lists(st.integers(0, 1), max_size=12).map(as_token_ids), max_size=12)


@given(PROMPTS, st.lists(st.integers(0, 1), max_size=12).map(as_token_ids), st.integers(1, 4))
def test_what_is_known_is_what_the_prompts_say(earlier: list[TokenIds], token_ids: TokenIds, block_size: int) -> None:
    seen = AdmissionFilter(is_trusting=False)
    for other in earlier:
        add(seen, other, block_size)
    sighting = look(seen, token_ids, block_size)
    shared = (common_prefix_length(token_ids, other) // block_size for other in earlier)
    assert sighting.num_blocks == max(shared, default=0)
    assert 0 <= sighting.again <= sighting.trials <= len(earlier)
    full = [other[: len(other) // block_size * block_size] for other in earlier]
    is_there = any(len(other) and np.array_equal(other, token_ids[: len(other)]) for other in full)
    assert sighting.continues == is_there, "what fills no block is less than may be rewritten"


@given(PROMPTS, st.integers(1, 4))
def test_the_counts_are_those_of_the_trials_that_are_remembered(earlier: list[TokenIds], remembered: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "_TRIALS", remembered)
        patch.setattr(rules, "_GENERATION", 8)
        patch.setattr(rules, "_ENDS", 2)
        seen = AdmissionFilter(is_trusting=False)
        for token_ids in earlier:
            add(seen, token_ids, 1)
            kinds = [look(seen, as_token_ids([9] * (1 << bits)), 1) for bits in range(5)]
            assert all(0 <= kind.again <= kind.trials for kind in kinds)
            assert sum(kind.trials for kind in kinds) <= remembered


@given(PROMPTS)
def test_the_same_prompts_in_the_same_order_give_the_same_answers(earlier: list[TokenIds]) -> None:
    first, second = AdmissionFilter(is_trusting=False), AdmissionFilter(is_trusting=False)
    for token_ids in earlier:
        assert look(first, token_ids) == look(second, token_ids)
        for seen in (first, second):
            add(seen, token_ids)
