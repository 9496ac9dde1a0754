"""What is known of earlier prompts: whether a new one will come again, and what broke its prefix."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from diskprefix.prefixstore.cache.policy import seen as rules
from diskprefix.prefixstore.cache.policy.breaks import common_end, find_break
from diskprefix.prefixstore.cache.policy.seen import SeenPrompts, Sighting
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


def sighting_of(seen: SeenPrompts, token_ids: TokenIds, block_size: int = BLOCK) -> Sighting:
    """What all prompts say, without a window."""
    return replace(seen.sighting_of(token_ids, names(token_ids, block_size), 0), older=None)


def blocks(number: int, count: int) -> TokenIds:
    """Tokens of `count` blocks that no other number has."""
    return as_token_ids(range(1000 * number, 1000 * number + count * BLOCK))


def joined(*parts: TokenIds | Sequence[int]) -> TokenIds:
    return as_token_ids([int(token) for part in parts for token in part])


def trials(seen: SeenPrompts, count: int, again: int) -> None:
    """So many prompts of three blocks, some of which come again, one of them several times."""
    for number in [*range(1, 1 + count), *range(1, 1 + again), *[1] * (again > 0)]:
        add(seen, blocks(number, 3))


def of_kind(seen: SeenPrompts, num_blocks: int = 3) -> tuple[int, int]:
    sighting = sighting_of(seen, blocks(900, num_blocks))
    return sighting.trials, sighting.again


@pytest.mark.parametrize(
    ("count", "again", "likely"),
    [(0, 0, False), (9, 9, False), (10, 0, False), (10, 4, False), (10, 5, True), (15, 6, False), (15, 7, True)],
)
def test_what_comes_again_more_than_two_times_in_five_is_likely_to_once_ten_of_its_kind_came(
    count: int, again: int, likely: bool
) -> None:
    trusting, wary = nothing_seen(is_trusting=True), nothing_seen()
    for seen in (trusting, wary):
        trials(seen, count, again)
        assert of_kind(seen) == (count, again)
        assert sighting_of(seen, blocks(900, 3)).is_likely_repeat == likely
    assert sighting_of(trusting, blocks(900, 3)).is_learning == (count < 10)
    assert not sighting_of(wary, blocks(900, 3)).is_learning


def test_prompts_with_about_as_many_new_blocks_are_of_one_kind() -> None:
    seen = nothing_seen()
    for number, num_blocks in enumerate((4, 5, 6, 7), start=1):
        add(seen, blocks(number, num_blocks))
    assert [of_kind(seen, n)[0] for n in (3, 4, 5, 6, 7, 8)] == [0, 4, 4, 4, 4, 0]


def test_only_the_new_blocks_of_a_prompt_make_its_kind() -> None:
    seen = nothing_seen()
    add(seen, joined(blocks(1, 8), [7]))
    add(seen, joined(blocks(1, 8), blocks(2, 2)))
    assert [of_kind(seen, n)[0] for n in (8, 2, 10)] == [1, 1, 1], "10 is of the kind of 8"
    sighting = sighting_of(seen, joined(blocks(1, 8), blocks(3, 2)))
    assert (sighting.num_blocks, sighting.trials) == (8, 1)


def test_turns_of_conversations_are_of_a_kind_of_their_own() -> None:
    seen = nothing_seen()
    add(seen, blocks(1, 3))
    add(seen, joined(blocks(1, 3), blocks(2, 3)))
    sightings = [sighting_of(seen, token_ids) for token_ids in (blocks(3, 3), joined(blocks(1, 3), blocks(4, 3)))]
    assert [(sighting.continues, sighting.trials) for sighting in sightings] == [(False, 1), (True, 1)]


def test_shares_are_of_what_comes_again_before_it_would_be_evicted() -> None:
    """Chats of a block and a half go on after a minute, other prompts of three blocks come again after an hour."""
    seen = nothing_seen()
    for number in range(1, 200):
        chat, again = joined(blocks(2 * number, 1), [7, 7]), blocks(2 * number + 1, 3)
        for token_ids, came_at in ((chat, 0.0), (joined(chat, [7, 7, 7]), 60.0), (again, 0.0), (again, 3600.0)):
            seen.remember(token_ids, names(token_ids), came_at=came_at + 1e5 * number)

    def shares(token_ids: TokenIds, stays_s: float) -> tuple[int, int]:
        sighting = seen.sighting_of(token_ids, names(token_ids), 0, stays_s=stays_s)
        return round(sighting.new_share), round(sighting.seen_share)

    assert [shares(blocks(900, 1), stays_s) for stays_s in (30.0, 90.0)] == [(0, 0), (1, 0)]
    assert [shares(blocks(900, 3), stays_s) for stays_s in (90.0, 3000.0, 4000.0)] == [
        (0, 0),
        (0, 0),
        (1, 0),
    ]


@pytest.mark.parametrize("rest", [[], [7]])
def test_a_repeat_is_of_the_kind_of_what_was_seen_as_often(rest: list[int]) -> None:
    """Turns that come again nearly never say nothing of repeats that always do."""
    seen = nothing_seen()
    for number in range(1, 100):
        once, repeated = joined(blocks(2 * number, 3), rest), joined(blocks(2 * number + 1, 3), rest)
        for token_ids in (once, joined(once, [7, 7]), *[repeated] * 9):
            seen.remember(token_ids, names(token_ids), came_at=1e5 * number)
    twice = joined(blocks(900, 3), rest)
    for came_at in (2e7, 3e7):
        seen.remember(twice, names(twice), came_at=came_at)
    as_it_was, longer = sighting_of(seen, twice), sighting_of(seen, joined(twice, [8]))
    assert [sighting.is_repeat for sighting in (as_it_was, longer)] == [True, False]
    assert as_it_was.new_share == as_it_was.seen_share > 0.9
    assert longer.continues
    assert longer.new_share < 0.6


def test_a_request_beside_a_conversation_does_not_take_the_place_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a request for a summary or a title does, whose last full block is that of the conversation."""
    monkeypatch.setattr(rules, "_MAX_ENDS", 4)
    seen = nothing_seen()
    for end in ([7], [8, 1], [8, 2], [8, 3]):
        add(seen, joined(blocks(1, 2), end))
    assert sighting_of(seen, joined(blocks(1, 2), [7, 9])).continues
    add(seen, joined(blocks(1, 2), [8, 4]))
    assert not sighting_of(seen, joined(blocks(1, 2), [7, 9])).continues, "of more than four the oldest is forgotten"


def test_what_is_remembered_does_not_follow_the_callers_array() -> None:
    token_ids = joined(blocks(1, 2), [7])
    seen = nothing_seen()
    add(seen, token_ids)
    token_ids[-1] = 8
    assert sighting_of(seen, joined(blocks(1, 2), [7, 9])).continues


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
TOKENS = st.lists(st.integers(-1, 0), max_size=12).map(as_token_ids)
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
    sighting = seen.sighting_of(token_ids, names(token_ids, block_size), window, group)
    assert seen.sighting_of(token_ids, names(token_ids, block_size), window, group) == sighting, (
        "asking changes nothing"
    )
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
    whole = [one.tolist() for one, _ in told]
    assert sighting.continues == any(token_ids[: len(one)].tolist() == one for one in whole)


@given(PROMPTS, st.integers(1, 12), st.integers(1, 12))
def test_the_bounds_hold(prompts: list[tuple[TokenIds, bytes]], most: int, most_ghosts: int) -> None:
    seen = SeenPrompts(1, is_trusting=False, max_bytes=450 * most, max_ghosts=most_ghosts)
    for number, (token_ids, group) in enumerate(prompts):
        add(seen, token_ids, 1, group)
        add(seen, as_token_ids([2 + number]), 1)
        assert seen._prompt_bytes <= 450 * most
        assert len(seen._ghosts) <= most_ghosts
        for name, ghost in seen._ghosts.items():
            assert bool(ghost.token_ids) == (ghost.num_prompts > 0) == any(ghost in one.blocks for one in seen._prompts)
            assert ghost.name == name
    while seen._ghosts:
        seen._forget_oldest_ghost()
    assert (seen.num_bytes, seen._windows) == (rules._bytes_of_ends(seen._root.ends), {})


def test_of_what_is_forgotten_the_ends_go_before_their_beginnings() -> None:
    seen = SeenPrompts(BLOCK, is_trusting=False, max_ghosts=5)
    add(seen, blocks(1, 4))
    add(seen, blocks(2, 3))
    assert [sighting_of(seen, blocks(number, 4)).num_blocks for number in (1, 2)] == [2, 3]


RANDOM = np.random.default_rng(7)


def text(num_tokens: int) -> TokenIds:
    return RANDOM.integers(0, 50_000, num_tokens, dtype=np.int32)


HEAD, REST, OTHER, FIRST, SECOND, REPEATING = text(20), text(2000), text(2000), text(800), text(800), [*text(32)] * 30
PIECES = [text(10) for _ in range(200)]
BEFORE = joined(HEAD, text(10), REST)
OWN = joined(HEAD, text(10), REST, text(50))


@pytest.mark.parametrize(
    ("now", "recent", "known", "at", "least"),
    [
        (joined(HEAD, text(13), REST, text(100)), [BEFORE], 20, 20, 1900),
        (joined(HEAD, SECOND, FIRST), [joined(HEAD, FIRST, SECOND)], 20, 20, 1500),
        # Of several earlier prompts the one that shows the greatest loss.
        (BEFORE, [text(500), joined(HEAD, text(10), REST[:600]), joined(HEAD[:15], text(10), REST)], 20, 15, 1900),
        (joined(OWN, text(300)), [BEFORE], 20, 20, 1900),
        (joined(HEAD, *PIECES[::-1]), [joined(HEAD, *PIECES)], 20, 20, 1500),
        (joined(HEAD, *(joined(piece[:9], text(1)) for piece in PIECES)), [joined(HEAD, *PIECES)], 20, 29, 1500),
        (joined(HEAD, *PIECES[::-1], text(9000)), [joined(HEAD, *PIECES)], 20, 20, 1500),
    ],
    ids=[
        *("a line changed", "texts moved", "several", "another agent", "small pieces moved", "a change in each piece"),
        "small pieces moved in a longer prompt",
    ],
)
def test_a_change_before_text_that_is_the_same_is_a_break(
    now: TokenIds, recent: list[TokenIds], known: int, at: int, least: int
) -> None:
    found = find_break(now, recent, known)
    assert found is not None
    assert found.at == at
    assert least <= found.num_tokens <= 2000


@pytest.mark.parametrize(
    ("now", "recent", "known"),
    [
        (joined(HEAD, REST, OTHER), [joined(HEAD, REST)], 20),
        (joined(HEAD, OTHER), [joined(HEAD, REST)], 20),
        (joined(HEAD, text(5), REST[:100]), [joined(HEAD, REST[:100])], 20),
        (joined(REST, text(20), OTHER[:400], text(1600)), [joined(REST, HEAD, OTHER)], 20),
        (joined(HEAD, REST), [joined(HEAD, REST)], 20),
        (joined(HEAD, text(10), REPEATING, text(500)), [joined(HEAD, text(10), REPEATING)], 20),
        (joined(HEAD, *PIECES[:120:-1], text(1200)), [joined(HEAD, *PIECES)], 20),
        # A sub-agent's prompt that shares the tools with another agent's breaks once, not in each of its turns.
        (joined(OWN, text(300)), [OWN, BEFORE], len(OWN)),
        (joined(OWN, text(300)), [BEFORE], len(OWN)),
        (joined(OWN, text(300)), [joined(BEFORE, text(1000))], len(OWN)),
        (text(1000), [], 0),
        (text(0), [text(0), text(1000)], 0),
    ],
    ids=[
        *("it continues", "another text", "a short text", "a smaller part is the same", "the same prompt"),
        *(
            "a text that repeats itself",
            "some small pieces moved",
            "its own turn",
            "found anyway",
            "found anyway of a longer one",
        ),
        *("no earlier prompt", "no token"),
    ],
)
def test_other_prompts_show_no_break(now: TokenIds, recent: list[TokenIds], known: int) -> None:
    assert find_break(now, recent, known) is None


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (joined(text(1), HEAD[1:], REST[:60]), 79),
        (joined(text(20), HEAD, REST[:60]), 80),
        (joined(text(20), HEAD[1:], REST[:30]), 0),
        (joined(HEAD, text(60)), 0),
        (joined(HEAD, REST[:60]), 0),
        (text(0), 0),
    ],
    ids=["the first word", "text before it", "two places", "another text", "the same", "nothing"],
)
def test_what_is_the_common_end_one_small_difference(now: TokenIds, expected: int) -> None:
    earlier = joined(HEAD, REST[:60])
    assert common_end(now, earlier) == common_end(earlier, now) == expected
