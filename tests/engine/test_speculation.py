"""Guesses that are computed, and when: sequences that are counts and chances, without a model or a clock."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from diskprefix.engine import guesser as guesser_module
from diskprefix.engine.drafting import speedup
from diskprefix.engine.guesser import LONGEST, MOST_ROWS, AcceptanceRates, DraftRate, Guess, Guesser, NgramIndex
from diskprefix.engine.speculation import RowCost, Speculation, worth_computing

REPEATED = list(range(100, 160))


@dataclass(eq=False)
class One:
    """A sequence of REPEATED and what it repeats of it."""

    arrived: int = 0
    room_for_draft: int = 1000
    draft: list[int] = field(default_factory=list)
    guesser: Guesser | None = field(default_factory=lambda: Guesser(np.array(REPEATED * 2, np.int32), 10_000))


of_counts: Any = Speculation
"""It is given sequences of this file."""


def tokens_a_second(counts: list[int], chances: list[list[float]], row_cost: float) -> float:
    num_rows, expected = len(chances), float(len(chances))
    for count, of_one in zip(counts, chances, strict=True):
        num_rows, expected = num_rows + count, expected + sum(of_one[:count])
    return expected / (1 + row_cost * num_rows)


def test_no_other_choice_of_guesses_gives_more_tokens_in_its_time() -> None:
    chance = random.Random(0)
    computed = 0
    for _ in range(300):
        chances = [
            list(itertools.accumulate((chance.random() for _ in range(chance.randrange(5))), lambda a, b: a * b))
            for _ in range(chance.randrange(1, 4))
        ]
        row_cost = chance.choice([0.005, 0.03, 0.1, 0.5])
        counts = worth_computing(chances, row_cost)
        computed += sum(counts)
        every = itertools.product(*(range(len(of_one) + 1) for of_one in chances))
        best = max(tokens_a_second(list(other), chances, row_cost) for other in every)
        assert tokens_a_second(counts, chances, row_cost) == pytest.approx(best)
    assert computed > 300


def test_guesses_of_a_step_are_bounded_and_the_likeliest_come_first() -> None:
    counts = worth_computing([[0.97**n for n in range(1, 100)], [0.9**n for n in range(1, 100)]], 0.001)
    assert sum(counts) == MOST_ROWS
    assert counts[0] > counts[1] > 0


def test_rates_follow_what_was_right_by_the_length_of_the_match() -> None:
    rates = AcceptanceRates()
    short, middle, long = (rates.of_match(num_agreeing) for num_agreeing in (3, 8, 40))
    assert (rates.of_match(2), rates.of_match(1000)) == (short, long)
    before = rates.of(short), rates.of(long)
    for _ in range(100):
        rates.record(short, is_right=True)
        rates.record(long, is_right=False)
    assert rates.of(short) > 0.95 > before[0]
    assert rates.of(long) < 0.05 < before[1]
    assert 0 < rates.of(middle) < 1


def test_a_guesser_counts_each_sampled_token_whether_its_guess_was_computed_or_not() -> None:
    guesser = Guesser(np.array([*REPEATED, *REPEATED[:4]], np.int32), 10_000)
    guesser.look_back()
    assert guesser.token_ids[:3] == REPEATED[4:7]
    first = guesser.chances()
    assert list(first) == sorted(first, reverse=True)
    guesser.record_token(REPEATED[4])
    guesser.record_token(REPEATED[5])
    right = guesser.chances()[0]
    assert right > first[0]
    guesser.record_token(7)
    assert guesser.chances() == []
    guesser.look_back()
    assert guesser.token_ids == []
    for token in REPEATED[:4]:
        guesser.record_token(token)
    guesser.look_back()
    assert guesser.token_ids[:2] == REPEATED[4:6]
    # A token that was guessed wrong.
    assert guesser.chances()[0] < right


def test_the_cost_of_a_row_is_measured_against_steps_of_the_same_sequences() -> None:
    cost = RowCost()
    assert cost.needs_plain_step("a")
    for _ in range(200):
        cost.record_step("a", 2, 0, 1 + 0.1 * 2)
        cost.record_step("a", 12, 10, 1 + 0.1 * 12)
    assert cost.value == pytest.approx(0.1, rel=0.05)
    assert not cost.needs_plain_step("a")
    assert cost.needs_plain_step("b")
    # Nothing to compare with.
    cost.record_step("b", 12, 10, 1000.0)
    assert cost.value == pytest.approx(0.1, rel=0.05)


def test_after_many_steps_with_guesses_one_without_is_compared_with() -> None:
    cost = RowCost()
    cost.record_step("a", 1, 0, 1.0)
    count = 0
    while not cost.needs_plain_step("a"):
        cost.record_step("a", 5, 4, 1.1)
        count += 1
    assert 10 < count < 1000
    cost.record_step("a", 1, 0, 1.0)
    assert not cost.needs_plain_step("a")


def drafted(speculation: Any, one: One, row_s: float, step_s: float = 1.0) -> int:
    """The guesses of a step that takes `step_s`, and `row_s` for each row."""
    speculation.plan([one])
    speculation.record_step([one], 1 + len(one.draft), len(one.draft), step_s + row_s * (1 + len(one.draft)))
    return len(one.draft)


def test_guesses_are_computed_while_they_pay_and_no_longer() -> None:
    speculation, one = of_counts(), One()
    assert drafted(speculation, one, 0.01) == 0, "a step to compare with comes first"
    assert drafted(speculation, one, 0.01) > 10
    many = [drafted(speculation, one, 1.0, step_s=0.0) for _ in range(400)]
    assert many[0] > 10
    assert sum(many[200:]) < 10
    # Rows are cheap again, which only shows when guesses are tried again.
    few = [drafted(speculation, one, 0.01) for _ in range(6000)]
    assert few[0] == 0
    assert few[-10:] > [10] * 10


def test_text_that_guesses_do_not_fit_switches_them_off_and_on_again() -> None:
    speculation, one = of_counts(), One()
    assert one.guesser is not None
    speculation.row_cost._over = 0.1 * speculation.row_cost._weight
    drafted(speculation, one, 0.1)
    assert drafted(speculation, one, 0.1) > 5

    def reply(token_ids: list[int]) -> list[int]:
        assert one.guesser is not None
        counts = []
        for token in token_ids:
            counts.append(drafted(speculation, one, 0.1))
            one.guesser.record_token(token)
        return counts

    # The same pairs, before tokens that nothing tells.
    pairs = [token for number in range(150) for token in (1, 2, 1000 + number)]
    assert sum(reply(pairs)[-100:]) == 0
    assert sum(reply(REPEATED)[-20:]) > 20


def test_a_draft_fits_the_room_of_its_sequence_and_needs_a_guesser() -> None:
    speculation, one, other = of_counts(), One(), One(arrived=1, draft=[1, 2], guesser=None)
    speculation.plan([one, other])
    speculation.record_step([one, other], 2, 0, 1.0)
    for room in (5, 1, 0, -3):
        one.room_for_draft = room
        speculation.plan([one, other])
        assert (len(one.draft), other.draft) == (max(0, room), [])


def test_a_draft_model_is_worth_what_the_best_number_of_guesses_gives() -> None:
    """Always right, and for nothing: as many tokens as a step may guess. Never right, or as slow: nothing."""
    assert speedup(1.0, 1, 0.0, 0.0) == pytest.approx(MOST_ROWS + 1)
    assert speedup(0.0, 1, 0.03, 0.1) == speedup(1.0, 1, 0.0, 1.0) == 1.0
    # Two guesses: 1 + 0.5 + 0.25 tokens in 1 + 2 × 0.1 steps.
    assert speedup(0.5, 1, 0.0, 0.1) == pytest.approx(max((2 - 0.5**k) / (1 + 0.1 * k) for k in range(9)))
    assert speedup(0.8, 1, 0.03, 0.2) > speedup(0.8, 8, 0.03, 0.2) > 1


def test_what_is_known_of_a_draft_model_in_one_sequence_fades_to_what_is_known_of_it_in_all() -> None:
    of_all = DraftRate()
    for _ in range(1000):
        DraftRate(of_all).record(is_right=False)
    one = DraftRate(of_all)
    assert one.value == of_all.value < 0.01
    for _ in range(1000):
        of_all.fade()
    assert of_all.value > 0.5
    for _ in range(3000):
        one.fade()
    assert one.value == pytest.approx(of_all.value, abs=0.01)


class Asked:
    """A drafter that only notes for which sequences it is asked."""

    def __init__(self) -> None:
        self.last: list[One] = []

    def draft(self, sequences: Sequence[One], num_decoding: int, row_cost: float, plain_s: float) -> None:
        self.last, self.given = list(sequences), (num_decoding, row_cost, plain_s)


def test_a_draft_model_is_asked_where_the_tokens_before_tell_less() -> None:
    asked, of_all = Asked(), DraftRate()

    def one(arrived: int, prompt: list[int], room: int = 100) -> One:
        guesser = Guesser(np.array(prompt, np.int32), 10_000, draft_rate=DraftRate(of_all))
        return One(arrived=arrived, guesser=guesser, room_for_draft=room)

    sequences = [
        one(0, REPEATED * 2),
        one(1, REPEATED),
        one(2, [7, 8, 9, 7, 8]),
        one(3, REPEATED, 0),
        One(4, guesser=None),
    ]
    speculation = of_counts(asked)
    speculation.plan(sequences)
    assert asked.last == [], "a step to compare with comes first"
    speculation.record_step(sequences, len(sequences), 0, 1.0)
    speculation.plan(sequences)
    assert asked.last == sequences[1:3]
    assert asked.given == (5, speculation.row_cost.value, 1.0)


# What follows the last tokens where they came before.


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


SHORT = [[], [1], [1, 2], [1, 1], [1, 2, 3, 2], [1, 2, 3, 4, 3], [7, 7, 7], [5, 1, 2, 3, 1, 2, 3]]


@pytest.mark.parametrize("num_kinds", [2, 3, 10, 100])
def test_a_guess_is_what_followed_the_longest_match(num_kinds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever parts the tokens come in. What reaches the end goes on as it began."""
    monkeypatch.setattr(guesser_module, "_MOST_PLACES", 1000)
    chance = random.Random(num_kinds)
    texts = list(SHORT)
    for _ in range(200):
        token_ids = [chance.randrange(num_kinds) for _ in range(chance.randrange(60))]
        # Text that repeats itself.
        texts.append(token_ids + token_ids[chance.randrange(60) :] * chance.randrange(3))
    for token_ids in texts:
        index, cut = NgramIndex(), chance.randrange(60)
        for part in ([], token_ids[:cut], token_ids[cut:]):
            index.extend(part)
        assert index.guess(8) == slowly(token_ids, 8), token_ids


def test_a_guess_looks_at_a_bounded_number_of_places(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    agreeing = NgramIndex._agreeing

    def counted(index: NgramIndex, place: int) -> int:
        looked.append(place)
        return agreeing(index, place)

    monkeypatch.setattr(NgramIndex, "_agreeing", counted)
    # A pair that comes everywhere, before different tokens.
    token_ids = [token for number in range(5000) for token in (1, 2, 1000 + number)] + [1, 2]
    index = NgramIndex()
    index.extend(token_ids)
    guess = index.guess(4)
    assert guess is not None
    assert guess.token_ids[0] == 5999
    assert len(looked) <= guesser_module._MOST_PLACES
