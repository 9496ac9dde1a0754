"""Guesses that are computed, and when: sequences that are counts and chances, without a model or a clock."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from diskprefix.daemon.engine.running_request import Reply
from diskprefix.daemon.engine.speculation import ngram
from diskprefix.daemon.engine.speculation.choose_drafts import Speculation
from diskprefix.daemon.engine.speculation.drafting import ChainProposer, Draft
from diskprefix.daemon.engine.speculation.guesser import MAX_GUESSES, Guesser, Rates
from diskprefix.daemon.engine.speculation.ngram import MAX_MATCH, Guess, NgramProposer, Text
from diskprefix.daemon.engine.speculation.step_times import StepTimes, speedup, worth_computing

REPEATED = list(range(100, 160))


class One:
    """A reply to REPEATED that repeats it, as far as a step is planned with it."""

    def __init__(self, speculation: Speculation, prompt: list[int] = REPEATED * 2, arrived: int = 0) -> None:
        self.arrived, self.prompt_tokens = arrived, len(prompt)
        self.token_ids: list[int] = []
        self.draft: list[int] = []
        self.room_for_draft = 1000
        self.guesser = speculation.guesser(10_000)
        asked = SimpleNamespace(prompt=SimpleNamespace(token_ids=np.array(prompt, np.int32)))
        self.running = SimpleNamespace(request=asked, draft_s=0.0)

    def sample(self, token: int) -> None:
        self.guesser.record_token(token)
        self.token_ids.append(token)


def of_text() -> Any:
    """It is given the replies of this file."""
    return Speculation(NgramProposer(), [], StepTimes(), lambda: 0.0)


def times_of(row_cost: float) -> StepTimes:
    times = StepTimes()
    times._FIRST = row_cost
    return times


def tokens_a_second(counts: list[int], chances: list[list[float]], times: StepTimes) -> float:
    num_rows, expected = len(chances), float(len(chances))
    for count, of_one in zip(counts, chances, strict=True):
        num_rows, expected = num_rows + count, expected + sum(of_one[:count])
    return expected / times.relative_time(num_rows)


def test_no_other_choice_of_guesses_gives_more_tokens_in_its_time() -> None:
    """Also where the time of a step jumps with its rows."""
    chance = random.Random(0)
    computed = 0
    for _ in range(300):
        chances = [
            list(itertools.accumulate((chance.random() for _ in range(chance.randrange(5))), lambda a, b: a * b))
            for _ in range(chance.randrange(1, 4))
        ]
        times = times_of(chance.choice([0.005, 0.03, 0.1, 0.5]))
        if chance.random() < 0.5:
            times._rows, times._times = [1, 4, 5], [1.0, 1.1, 2.0]
        counts = worth_computing(chances, times)
        computed += sum(counts)
        every = itertools.product(*(range(len(of_one) + 1) for of_one in chances))
        best = max(tokens_a_second(list(other), chances, times) for other in every)
        assert tokens_a_second(counts, chances, times) == pytest.approx(best)
    assert computed > 300


def test_guesses_of_a_step_are_bounded_and_the_likeliest_come_first() -> None:
    counts = worth_computing([[0.97**n for n in range(1, 100)], [0.9**n for n in range(1, 100)]], times_of(0.001))
    assert sum(counts) == MAX_GUESSES
    assert counts[0] > counts[1] > 0


def test_rates_follow_what_was_right_and_fade_to_what_is_usual() -> None:
    of_all = Rates((0.2, 0.7))
    for _ in range(1000):
        of_all.of_reply().record_guess(1, is_right=False)
    one = of_all.of_reply()
    assert one.values[0] == 0.2
    assert one.values[1] == of_all.values[1] < 0.01
    for _ in range(100):
        one.record_guess(1, is_right=True)
        one.record_guess(0, is_right=True)
    assert min(one.values) > 0.95
    assert of_all.of_reply().values[0] == 0.2, "a reply that repeats much is no sign that the next one will"
    for _ in range(10_000):
        of_all.fade()
        one.fade()
    assert of_all.values[1] == pytest.approx(0.7, abs=0.01)
    assert one.values[1] == pytest.approx(0.7, abs=0.05)


def test_each_sampled_token_is_counted_whether_its_guess_was_computed_or_not() -> None:
    speculation = of_text()
    one = One(speculation, [*REPEATED, *REPEATED[:4]])
    speculation.plan([one])
    assert one.draft == [], "a step to compare with comes first"
    assert one.guesser.token_ids[:3] == REPEATED[4:7]
    first = one.guesser.chances()
    assert first == sorted(first, reverse=True)
    one.sample(REPEATED[4])
    one.sample(REPEATED[5])
    right = one.guesser.chances()[0]
    assert right > first[0]
    one.sample(7)
    assert one.guesser.chances() == []
    speculation.plan([one])
    assert one.guesser.token_ids == []
    for token in REPEATED[:4]:
        one.sample(token)
    speculation.plan([one])
    assert one.guesser.token_ids[:2] == REPEATED[4:6]
    # A token that was guessed wrong.
    assert one.guesser.chances()[0] < right


def test_the_time_of_rows_is_measured_against_steps_of_the_same_sequences() -> None:
    times = StepTimes()
    assert times.needs_plain_step("a")
    for _ in range(50):
        times.record_step("a", 2, 0, 2.0)
        times.record_step("a", 12, 10, 6.0)
    assert times.relative_time(12) / times.relative_time(2) == pytest.approx(3.0, rel=0.05)
    assert times.relative_time(2) < times.relative_time(7) < times.relative_time(12) < times.relative_time(20)
    assert times.row_s * times.relative_time(2) == pytest.approx(2.0)
    assert not times.needs_plain_step("a")
    before = times.relative_time(12)
    # Nothing to compare with.
    times.record_step("b", 12, 10, 1000.0)
    assert times.relative_time(12) == before
    # What nobody uses fades, and a trial is small.
    for _ in range(3000):
        times.record_step("a", 2, 0, 2.0)
    assert times.relative_time(12) < before * 0.8
    assert times.max_guesses < 10


@pytest.mark.parametrize(("sequences", "most"), [("a", 70), ("b", 20)])
def test_after_some_steps_with_guesses_one_without_is_compared_with(sequences: str, most: int) -> None:
    times = StepTimes()
    times.record_step("a", 1, 0, 1.0)
    count = 0
    while not times.needs_plain_step(sequences):
        times.record_step(sequences, 5, 4, 1.1)
        count += 1
    assert 5 < count < most
    times.record_step(sequences, 1, 0, 1.0)
    assert not times.needs_plain_step(sequences)


def drafted(speculation: Any, one: One, row_s: float, step_s: float = 1.0) -> int:
    """The guesses of a step that takes `step_s`, and `row_s` for each row."""
    speculation.plan([one])
    speculation.record_step([one], 1 + len(one.draft), len(one.draft), step_s + row_s * (1 + len(one.draft)))
    return len(one.draft)


def test_guesses_are_computed_while_they_pay_and_no_longer() -> None:
    speculation = of_text()
    one = One(speculation)
    assert drafted(speculation, one, 0.01) == 0, "a step to compare with comes first"
    assert drafted(speculation, one, 0.01) > 5
    many = [drafted(speculation, one, 1.0, step_s=0.0) for _ in range(400)]
    assert many[0] > 5
    assert sum(many[100:]) < 20
    # Rows are cheap again, which only shows when guesses are tried again.
    few = [drafted(speculation, one, 0.01) for _ in range(6000)]
    assert statistics.fmean(few[-200:]) > 10


def test_text_that_guesses_do_not_fit_switches_them_off_and_on_again() -> None:
    speculation = of_text()
    one = One(speculation)
    drafted(speculation, one, 0.1)
    assert drafted(speculation, one, 0.1) > 3

    def reply(token_ids: list[int]) -> list[int]:
        counts = []
        for token in token_ids:
            counts.append(drafted(speculation, one, 0.1))
            one.sample(token)
        return counts

    # The same pairs, before tokens that nothing tells.
    pairs = [token for number in range(150) for token in (1, 2, 1000 + number)]
    assert sum(reply(pairs)[-100:]) == 0
    assert sum(reply(REPEATED)[-20:]) > 20


def test_a_draft_fits_the_room_of_its_sequence_and_needs_a_guesser() -> None:
    speculation = of_text()
    one, other = One(speculation), One(speculation, arrived=1)
    other.guesser, other.draft = Guesser(), [1, 2]
    speculation.plan([one, other])
    speculation.record_step([one, other], 2, 0, 1.0)
    for room in (5, 1, 0, -3):
        one.room_for_draft = room
        speculation.plan([one, other])
        assert (len(one.draft), other.draft) == (max(0, room), [])


def test_a_chain_is_worth_what_the_best_number_of_guesses_gives() -> None:
    """Always right, and for nothing: as many tokens as a step may guess. Never right, or as slow: nothing."""

    def gain(rate: float, num_sequences: int, row_cost: float, guess_cost: float) -> float:
        chances = itertools.accumulate(itertools.repeat(rate), lambda a, b: a * b)
        return speedup(times_of(row_cost), num_sequences, chances, guess_cost)

    assert gain(1.0, 1, 0.0, 0.0) == pytest.approx(MAX_GUESSES + 1)
    assert gain(0.0, 1, 0.03, 0.1) == gain(1.0, 1, 0.0, 1.0) == 1.0
    # Two guesses: 1 + 0.5 + 0.25 tokens in 1 + 2 × 0.1 steps.
    assert gain(0.5, 1, 0.0, 0.1) == pytest.approx(max((2 - 0.5**k) / (1 + 0.1 * k) for k in range(9)))
    assert gain(0.8, 1, 0.03, 0.2) > gain(0.8, 8, 0.03, 0.2) > 1


class Asked(ChainProposer):
    """Notes for which replies it is asked. Its guesses have these probabilities, and are all 7."""

    name, _FIRST_COST = "asked", 0.1

    def __init__(self, probabilities: Sequence[float] = (), seconds: float = 0.0) -> None:
        self.seconds, self.now = seconds, 0.0
        self.last: list[Any] = []
        self._probabilities = probabilities
        super().__init__(StepTimes(), lambda: self.now)

    def _ready(self, replies: Sequence[Reply], num_decoding: int, most: int) -> list[Reply]:
        del num_decoding, most
        self.last = list(replies)
        return self.last

    def _compute_guesses(self, drafts: Sequence[Draft]) -> list[tuple[int, float]]:
        self.now += self.seconds
        return [(7, (*self._probabilities, math.nan)[len(one.tokens)]) for one in drafts]


def test_a_chain_is_asked_where_the_tokens_before_tell_less() -> None:
    asked = Asked()
    speculation: Any = Speculation(NgramProposer(), [asked], asked._times, lambda: 0.0)
    sequences = [
        One(speculation, REPEATED * 2, 0),
        One(speculation, REPEATED, 1),
        One(speculation, [7, 8, 9, 7, 8], 2),
        One(speculation, REPEATED, 3),
        One(speculation, REPEATED, 4),
    ]
    sequences[3].room_for_draft, sequences[4].guesser = 0, Guesser()
    speculation.plan(sequences)
    assert asked.last == [], "a step to compare with comes first"
    speculation.record_step(sequences, len(sequences), 0, 1.0)
    speculation.plan(sequences)
    assert asked.last == sequences[1:3]


def test_a_chain_ends_where_one_more_guess_does_not_pay_and_is_given_up_where_none_does() -> None:
    asked = Asked((0.99, 0.99, 0.1, 0.99, 0.99))
    speculation: Any = Speculation(None, [asked], asked._times, lambda: asked.now)
    one = One(speculation, REPEATED)
    speculation.plan([one])
    speculation.record_step([one], 1, 0, 1.0)
    speculation.plan([one])
    assert len(one.guesser.token_ids) == 3
    assert one.draft == [7, 7], "the third guess is not likely enough for its row"
    # As slow as a step.
    asked.seconds = 1.0
    for _ in range(200):
        speculation.plan([one])
    assert one.draft == []
    calls = asked.now
    for _ in range(200):
        speculation.plan([one])
    assert asked.now < calls + 5


# What followed the last tokens where they came before.


def slowly(token_ids: Sequence[int], most: int) -> Guess | None:
    """The guess by its definition: the longest match, and of several the latest."""
    found, best = -1, 1
    for place in range(len(token_ids) - 1):
        length = 0
        while length < min(MAX_MATCH, place + 1) and token_ids[place - length] == token_ids[-1 - length]:
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
    monkeypatch.setattr(ngram, "MAX_PLACES", 1000)
    monkeypatch.setattr(ngram, "_ROOM", 4)
    chance = random.Random(num_kinds)
    texts = list(SHORT)
    for _ in range(200):
        token_ids = [chance.randrange(num_kinds) for _ in range(chance.randrange(60))]
        # Text that repeats itself.
        texts.append(token_ids + token_ids[chance.randrange(60) :] * chance.randrange(3))
    for token_ids in texts:
        cut = chance.randrange(60)
        text = Text(np.array(token_ids[:cut], np.int32))
        for part in ([], token_ids[cut : cut + 1], token_ids[cut + 1 :]):
            text.extend(part)
        assert text.guess(8) == slowly(token_ids, 8), token_ids


def test_a_guess_ends_before_a_picture() -> None:
    text = Text(np.array([1, 2, 3, -5, -6, 4, 1, 2], np.int32))
    assert text.guess(8) == Guess([3], 2)
    assert Text(np.array([1, 2, -5, 4, 1, 2], np.int32)).guess(8) == Guess([], 2)


def test_guesses_end_before_a_token_that_never_comes() -> None:
    guesser = Guesser(100, {"ngram": Rates([0.5]).of_reply()}, frozenset({7}))
    guesser.set_guesses("ngram", [5, 6, 7, 8], [(0,)] * 4)
    assert (guesser.token_ids, len(guesser.chances())) == ([5, 6], 2)
