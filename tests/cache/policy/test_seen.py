from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diskprefix.cache.policy import seen as rules
from diskprefix.cache.policy.seen import SeenPrompts, Sighting
from diskprefix.tokens import TokenIds, as_token_ids, block_hash, common_prefix_length, root_hash

BLOCK = 4


def names(token_ids: TokenIds, block_size: int = BLOCK) -> list[bytes]:
    """Of the full blocks, each of which names all that stands before it."""
    chain = [root_hash("somebody")]
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        chain.append(block_hash(0, chain[-1], token_ids[start : start + block_size]))
    return chain[1:]


def nothing_seen(block_size: int = BLOCK, *, is_trusting: bool = False) -> SeenPrompts:
    return SeenPrompts(block_size, is_trusting=is_trusting)


def add(seen: SeenPrompts, token_ids: TokenIds, block_size: int = BLOCK, group: bytes = b"") -> None:
    seen.remember(token_ids, names(token_ids, block_size), group)


def look(seen: SeenPrompts, token_ids: TokenIds, block_size: int = BLOCK) -> Sighting:
    """What all prompts say, without a window."""
    return replace(seen.look(token_ids, names(token_ids, block_size), 0), older=None)


def blocks(number: int, count: int) -> TokenIds:
    """Tokens of `count` blocks that no other number has."""
    return as_token_ids(range(1000 * number, 1000 * number + count * BLOCK))


def joined(*parts: TokenIds | Sequence[int]) -> TokenIds:
    return as_token_ids([int(token) for part in parts for token in part])


def test_of_what_was_never_seen_nothing_is_known() -> None:
    assert look(nothing_seen(), blocks(1, 3)) == Sighting()
    assert not Sighting().is_likely_repeat


def test_looking_changes_nothing() -> None:
    seen = nothing_seen()
    add(seen, blocks(1, 3))
    answers = [look(seen, blocks(1, 4)) for _ in range(20)]
    assert set(answers) == {Sighting(num_blocks=3, continues=True)}
    assert [look(seen, blocks(2, 4)) for _ in range(2)] == [Sighting()] * 2
    assert len(seen) == 1


def trials(seen: SeenPrompts, count: int, again: int, num_blocks: int = 3, first: int = 1) -> None:
    """So many prompts of so many blocks, some of which come again, one of them several times."""
    for number in range(first, first + count):
        add(seen, blocks(number, num_blocks))
    for number in [*range(first, first + again), *[first] * (again > 0)]:
        add(seen, blocks(number, num_blocks))


def of_kind(seen: SeenPrompts, num_blocks: int = 3) -> tuple[int, int]:
    sighting = look(seen, blocks(900, num_blocks))
    return sighting.trials, sighting.again


@pytest.mark.parametrize(
    ("count", "again", "likely"),
    [(9, 9, False), (10, 0, False), (10, 4, False), (10, 5, True), (15, 6, False), (15, 7, True), (30, 12, False)],
)
def test_what_comes_again_more_than_two_times_in_five_is_likely_to(count: int, again: int, likely: bool) -> None:
    seen = nothing_seen()
    trials(seen, count, again)
    assert of_kind(seen) == (count, again)
    assert look(seen, blocks(900, 3)).is_likely_repeat == likely


@pytest.mark.parametrize(("count", "is_trusting", "untried"), [(0, True, True), (9, True, True), (10, True, False)])
def test_a_kind_is_learning_until_ten_of_it_came_where_that_is_trusted(
    count: int, is_trusting: bool, untried: bool
) -> None:
    seen, wary = nothing_seen(is_trusting=is_trusting), nothing_seen()
    trials(seen, count, 0)
    assert look(seen, blocks(900, 3)).is_learning == untried
    assert not look(wary, blocks(900, 3)).is_learning


def test_prompts_with_about_as_many_new_blocks_are_of_one_kind() -> None:
    seen = nothing_seen()
    for number, num_blocks in enumerate((4, 5, 6, 7), start=1):
        add(seen, blocks(number, num_blocks))
    assert [of_kind(seen, n)[0] for n in (3, 4, 5, 6, 7, 8)] == [0, 4, 4, 4, 4, 0]


def test_only_the_new_blocks_of_a_prompt_make_its_kind() -> None:
    seen = nothing_seen()
    add(seen, blocks(1, 8))
    add(seen, joined(blocks(1, 8), blocks(2, 2)))
    assert [of_kind(seen, n)[0] for n in (8, 2, 10)] == [1, 1, 1], "10 is of the kind of 8"
    sighting = look(seen, joined(blocks(1, 8), blocks(3, 2)))
    assert (sighting.num_blocks, sighting.trials) == (8, 1)


@pytest.mark.parametrize(("num_blocks", "again"), [(5, 0), (6, 0), (7, 1), (8, 1)])
def test_most_of_what_was_new_must_come_again(num_blocks: int, again: int) -> None:
    """Of eight blocks the seventh tells."""
    seen = nothing_seen()
    add(seen, blocks(1, 8))
    add(seen, joined(blocks(1, 8)[: num_blocks * BLOCK], blocks(2, 1)))
    assert of_kind(seen, 8) == (1, again)


@pytest.mark.parametrize(("num_blocks", "again"), [(8, 0), (10, 0), (12, 1)])
def test_what_was_seen_before_says_nothing_about_what_was_new(num_blocks: int, again: int) -> None:
    seen = nothing_seen()
    add(seen, blocks(1, 8))
    longer = joined(blocks(1, 8), blocks(2, 4))
    add(seen, longer)
    add(seen, longer[: num_blocks * BLOCK])
    assert of_kind(seen, 4) == (1, again)


def test_a_request_beside_a_conversation_does_not_take_the_place_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a request for a summary or a title does, whose last full block is that of the conversation."""
    monkeypatch.setattr(rules, "_ENDS_OF_A_GHOST", 4)
    seen = nothing_seen()
    for end in ([7], [8, 1], [8, 2], [8, 3]):
        add(seen, joined(blocks(1, 2), end))
    assert look(seen, joined(blocks(1, 2), [7, 9])).continues
    add(seen, joined(blocks(1, 2), [8, 4]))
    assert not look(seen, joined(blocks(1, 2), [7, 9])).continues, "of more than four the oldest is forgotten"


def test_what_is_remembered_does_not_follow_the_callers_array() -> None:
    token_ids = joined(blocks(1, 2), [7])
    seen = nothing_seen()
    add(seen, token_ids)
    token_ids[-1] = 8
    assert look(seen, joined(blocks(1, 2), [7, 9])).continues


def test_a_prompt_of_less_than_a_block_is_in_the_window_only() -> None:
    seen = nothing_seen()
    add(seen, as_token_ids([1, 2, 3]))
    assert look(seen, as_token_ids([1, 2, 3, 4])) == Sighting()
    assert [one.common for one in seen.look(as_token_ids([1, 2, 9, 4]), [], 1).recent] == [2]


def test_prompts_that_share_a_beginning_share_its_ghosts() -> None:
    seen = nothing_seen()
    add(seen, blocks(1, 100))
    alone = seen.num_bytes
    add(seen, joined(blocks(1, 100), [7]))
    assert seen.num_bytes < 1.1 * alone


@pytest.mark.parametrize(("count", "num_blocks"), [(3000, 1), (20, 500)], ids=["short prompts", "long prompts"])
def test_it_takes_about_as_much_memory_as_it_says(count: int, num_blocks: int) -> None:
    made = [[bytes([*number.to_bytes(4), *n.to_bytes(12)]) for n in range(num_blocks)] for number in range(count)]
    tracemalloc.start()
    try:
        seen = nothing_seen()
        for prompt in made:
            # A copy of each name, as the caller's are hashed anew for each request.
            seen.remember(as_token_ids(range(BLOCK * num_blocks + BLOCK - 1)), [bytes(bytearray(n)) for n in prompt])
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken <= seen.num_bytes <= 3 * taken


# Two letters only, so that random prompts share prefixes of every length.
TOKENS = st.lists(st.integers(0, 1), max_size=12).map(as_token_ids)
PROMPTS = st.lists(st.tuples(TOKENS, st.sampled_from([b"", b"group one"])), max_size=12)


@given(PROMPTS, TOKENS, st.integers(1, 4), st.integers(0, 8), st.integers(1, 12), st.sampled_from([b"", b"group one"]))
def test_what_is_known_is_what_the_last_prompts_say(
    prompts: list[tuple[TokenIds, bytes]], token_ids: TokenIds, block_size: int, window: int, most: int, group: bytes
) -> None:
    """Against the prompts themselves, as many as there is room for."""
    seen = SeenPrompts(block_size, is_trusting=False, max_bytes=450 * most)
    for other, its_group in prompts:
        add(seen, other, block_size, its_group)
    told = [(one, its_group) for one, its_group in prompts if len(one)]
    held = told[len(told) - len(seen) :]
    sighting = seen.look(token_ids, names(token_ids, block_size), window, group)
    of_group = [one for one, its_group in reversed(held) if its_group == group]
    commons = [common_prefix_length(token_ids, one) for one in of_group]
    assert [one.common for one in sighting.recent] == commons[:window]
    assert [one.prompt.token_ids.tolist() for one in sighting.recent] == [one.tolist() for one in of_group[:window]]
    most_recent, most_older = max(commons[:window], default=0), max(commons[window:], default=0)
    assert (sighting.older.common if sighting.older else None) == (most_older if most_older > most_recent else None)
    if sighting.older is not None:
        first = of_group[window:][commons[window:].index(most_older)]
        assert sighting.older.prompt.token_ids.tolist() == first.tolist()
        assert sighting.older.lost == len(first) - most_older
    shared = (common_prefix_length(token_ids, one) // block_size for one, _ in told)
    assert sighting.num_blocks == max(shared, default=0), "names are remembered for longer"
    whole = [one.tolist() for one, _ in told if len(one) >= block_size]
    assert sighting.continues == any(token_ids[: len(one)].tolist() == one for one in whole)


@given(PROMPTS, st.integers(1, 12), st.integers(1, 12))
def test_the_bounds_hold_and_the_counts_are_those_of_what_is_left(
    prompts: list[tuple[TokenIds, bytes]], most: int, most_ghosts: int
) -> None:
    seen = SeenPrompts(1, is_trusting=False, max_bytes=450 * most, max_ghosts=most_ghosts)
    for number, (token_ids, group) in enumerate(prompts):
        add(seen, token_ids, 1, group)
        add(seen, as_token_ids([2 + number]), 1)
        assert seen._prompt_bytes <= 450 * most
        assert len(seen._ghosts) <= most_ghosts
        for name, ghost in seen._ghosts.items():
            assert bool(ghost.token_ids) == (ghost.num_prompts > 0) == any(ghost in one.blocks for one in seen._prompts)
            assert ghost.name == name
        kinds = [look(seen, as_token_ids([99] * (1 << bits)), 1) for bits in range(5)]
        assert sum(kind.trials for kind in kinds) == sum(ghost.kind > 0 for ghost in seen._ghosts.values())
        assert sum(kind.again for kind in kinds) == sum(ghost.came_again for ghost in seen._ghosts.values())
    while seen._ghosts:
        seen._forget_oldest_ghost()
    assert (seen.num_bytes, seen._windows) == (0, {})


def test_of_what_is_forgotten_the_ends_go_before_their_beginnings() -> None:
    seen = SeenPrompts(BLOCK, is_trusting=False, max_ghosts=5)
    add(seen, blocks(1, 4))
    add(seen, blocks(2, 3))
    assert [look(seen, blocks(number, 4)).num_blocks for number in (1, 2)] == [2, 3]
