from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diskprefix.cache.policy import sightings as rules
from diskprefix.cache.policy.sightings import AdmissionFilter, Sighting
from diskprefix.tokens import TokenIds, as_token_ids, block_hash, common_prefix_length, root_hash

BLOCK = 4


def names(token_ids: TokenIds, block_size: int = BLOCK) -> list[bytes]:
    """Of the full blocks, each of which names all that stands before it."""
    chain = [root_hash("somebody")]
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        chain.append(block_hash(0, chain[-1], token_ids[start : start + block_size]))
    return chain[1:]


def add(seen: AdmissionFilter, token_ids: TokenIds, block_size: int = BLOCK) -> None:
    seen.add(token_ids, names(token_ids, block_size), block_size)


def look(seen: AdmissionFilter, token_ids: TokenIds, block_size: int = BLOCK) -> Sighting:
    return seen.look(token_ids, names(token_ids, block_size), block_size)


def blocks(number: int, count: int) -> TokenIds:
    """Tokens of `count` blocks that no other number has."""
    return as_token_ids(range(1000 * number, 1000 * number + count * BLOCK))


def joined(*parts: TokenIds | Sequence[int]) -> TokenIds:
    return as_token_ids([int(token) for part in parts for token in part])


def test_of_what_was_never_seen_nothing_is_known() -> None:
    assert look(AdmissionFilter(is_trusting=False), blocks(1, 3)) == Sighting()
    assert not Sighting().is_likely_repeat


def test_looking_changes_nothing() -> None:
    seen = AdmissionFilter(is_trusting=False)
    add(seen, blocks(1, 3))
    answers = [look(seen, blocks(1, 4)) for _ in range(20)]
    assert set(answers) == {Sighting(num_blocks=3, continues=True)}
    assert [look(seen, blocks(2, 4)) for _ in range(2)] == [Sighting()] * 2
    assert len(seen) == 3


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
    assert look(seen, blocks(900, 3)).is_likely_repeat == likely


@pytest.mark.parametrize(("count", "is_trusting", "untried"), [(0, True, True), (9, True, True), (10, True, False)])
def test_a_kind_is_learning_until_ten_of_it_came_where_that_is_trusted(
    count: int, is_trusting: bool, untried: bool
) -> None:
    seen, wary = AdmissionFilter(is_trusting=is_trusting), AdmissionFilter(is_trusting=False)
    trials(seen, count, 0)
    assert look(seen, blocks(900, 3)).is_learning == untried
    assert not look(wary, blocks(900, 3)).is_learning


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


def test_a_conversation_is_known_to_continue_after_a_thousand_others() -> None:
    seen = AdmissionFilter(is_trusting=False)
    add(seen, joined(blocks(1, 2), [7]))
    for number in range(10, 1010):
        add(seen, blocks(number, 2))
    assert look(seen, joined(blocks(1, 2), [7, 8, 9])).continues
    assert not look(seen, joined(blocks(1, 2), [8, 7, 9])).continues


@pytest.mark.parametrize(("num_blocks", "continues"), [(3, True), (2, False)])
def test_a_prompt_continues_another_only_if_it_has_all_of_it(num_blocks: int, continues: bool) -> None:
    seen = AdmissionFilter(is_trusting=False)
    add(seen, blocks(1, 3))
    assert look(seen, joined(blocks(1, num_blocks), blocks(2, 2))).continues == continues


def test_any_earlier_turn_may_be_continued() -> None:
    seen = AdmissionFilter(is_trusting=False)
    for turn in (blocks(1, 1), joined(blocks(1, 1), blocks(2, 1))):
        add(seen, turn)
    assert look(seen, joined(blocks(1, 1), blocks(3, 1))).continues, "from the first turn, in another way"


def test_a_request_beside_a_conversation_does_not_take_the_place_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a request for a summary or a title does, whose last full block is that of the conversation."""
    monkeypatch.setattr(rules, "_ENDS_OF_A_BLOCK", 4)
    seen = AdmissionFilter(is_trusting=False)
    for end in ([7], [8, 1], [8, 2], [8, 3]):
        add(seen, joined(blocks(1, 2), end))
    assert look(seen, joined(blocks(1, 2), [7, 9])).continues
    add(seen, joined(blocks(1, 2), [8, 4]))
    assert not look(seen, joined(blocks(1, 2), [7, 9])).continues, "of more than four the oldest is forgotten"


def test_an_end_that_comes_again_counts_once() -> None:
    seen = AdmissionFilter(is_trusting=False)
    for end in ([7], *[[8, 1], [8, 2]] * 20):
        add(seen, joined(blocks(1, 2), end))
    assert look(seen, joined(blocks(1, 2), [7, 9])).continues


def test_of_many_prompts_the_oldest_ends_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_ENDS", 2)
    seen = AdmissionFilter(is_trusting=False)
    for number in (1, 2, 1, 3):
        add(seen, blocks(number, 2))
    assert [look(seen, joined(blocks(n, 2), [7])).continues for n in (1, 2, 3)] == [True, False, True]


def test_what_is_remembered_does_not_follow_the_callers_array() -> None:
    token_ids = joined(blocks(1, 2), [7])
    seen = AdmissionFilter(is_trusting=False)
    add(seen, token_ids)
    token_ids[-1] = 8
    assert look(seen, joined(blocks(1, 2), [7, 9])).continues


def test_a_prompt_of_less_than_a_block_says_nothing() -> None:
    seen = AdmissionFilter(is_trusting=False)
    add(seen, as_token_ids([1, 2, 3]))
    assert len(seen) == 0
    assert look(seen, as_token_ids([1, 2, 3, 4])) == Sighting()


@pytest.mark.parametrize(("count", "num_blocks"), [(3000, 1), (20, 500)], ids=["short prompts", "long prompts"])
def test_it_takes_no_more_memory_than_it_says(count: int, num_blocks: int) -> None:
    made = [[bytes([*number.to_bytes(4), *n.to_bytes(12)]) for n in range(num_blocks)] for number in range(count)]
    tracemalloc.start()
    try:
        seen = AdmissionFilter(is_trusting=False)
        for prompt in made:
            # A copy of each name, as the caller's are hashed anew for each request.
            seen.add(as_token_ids(range(BLOCK * num_blocks + BLOCK - 1)), [bytes(bytearray(n)) for n in prompt], BLOCK)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken <= seen.num_bytes <= 3 * taken


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
    whole = [other.tolist() for other in earlier if len(other) >= block_size]
    begins = any(token_ids[: len(other)].tolist() == other for other in whole)
    assert begins or not sighting.continues
    if earlier and whole and whole[-1] == earlier[-1].tolist() and token_ids.tolist() == whole[-1] + [9]:
        assert sighting.continues


@given(PROMPTS, st.integers(1, 4))
def test_the_counts_are_those_of_the_trials_that_are_remembered(earlier: list[TokenIds], remembered: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "_TRIALS", remembered)
        patch.setattr(rules, "_GENERATION", 8)
        seen = AdmissionFilter(is_trusting=False)
        for token_ids in earlier:
            add(seen, token_ids, 1)
            kinds = [look(seen, as_token_ids([9] * (1 << bits)), 1) for bits in range(5)]
            assert all(0 <= kind.again <= kind.trials for kind in kinds)
            assert sum(kind.trials for kind in kinds) <= remembered
