"""What follows the last tokens where they came before."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from diskprefix.engine import guesser
from diskprefix.engine.guesser import LONGEST, Guess, NgramIndex


def index_of(token_ids: Sequence[int]) -> NgramIndex:
    index = NgramIndex()
    index.extend(token_ids)
    return index


def slowly(token_ids: Sequence[int], most: int) -> Guess | None:
    """The guess by its definition: the longest match, and of several the latest."""
    found, best = -1, 1
    for place in range(len(token_ids) - 1):
        length = 0
        while length < min(LONGEST, place + 1) and token_ids[place - length] == token_ids[-1 - length]:
            length += 1
        if length >= max(best, 2):
            found, best = place, length
    if found < 0:
        return None
    guess = list(token_ids)
    for number in range(most):
        guess.append(guess[found + 1 + number])
    return Guess(guess[len(token_ids) :], best)


@pytest.mark.parametrize("num_kinds", [2, 3, 10, 100])
def test_a_guess_is_what_followed_the_longest_match(num_kinds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guesser, "_MOST_PLACES", 1000)
    chance = random.Random(num_kinds)
    for _ in range(200):
        token_ids = [chance.randrange(num_kinds) for _ in range(chance.randrange(60))]
        # Text that repeats itself.
        token_ids += token_ids[chance.randrange(60) :] * chance.randrange(3)
        assert index_of(token_ids).guess(8) == slowly(token_ids, 8), token_ids


def test_tokens_may_come_in_any_parts() -> None:
    token_ids = [1, 2, 3, 4, 1, 2, 3, 9, 1, 2]
    whole, parts = index_of(token_ids), NgramIndex()
    for token in token_ids:
        parts.extend([])
        parts.extend([token])
    assert parts.guess(5) == whole.guess(5) == Guess([3, 9, 1, 2, 3], 2)


@pytest.mark.parametrize("token_ids", [[], [1], [1, 2], [1, 1], [1, 2, 3, 2], [1, 2, 3, 4, 3]])
def test_without_a_pair_that_came_before_there_is_no_guess(token_ids: list[int]) -> None:
    assert index_of(token_ids).guess(4) is None


def test_what_reaches_the_end_goes_on_as_it_began() -> None:
    assert index_of([7, 7, 7]).guess(5) == Guess([7] * 5, 2)
    assert index_of([5, 1, 2, 3, 1, 2, 3]).guess(7) == Guess([1, 2, 3, 1, 2, 3, 1], 3)


def test_a_guess_looks_at_a_bounded_number_of_places(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    agreeing = NgramIndex._agreeing

    def counted(index: NgramIndex, place: int) -> int:
        looked.append(place)
        return agreeing(index, place)

    monkeypatch.setattr(NgramIndex, "_agreeing", counted)
    # A pair that comes everywhere, before different tokens.
    token_ids = [token for number in range(5000) for token in (1, 2, 1000 + number)] + [1, 2]
    guess = index_of(token_ids).guess(4)
    assert guess is not None
    assert guess.token_ids[0] == 5999
    assert len(looked) <= guesser._MOST_PLACES
