"""Thousands of random arrivals, and what a step must be whatever they are. And the pace, by the times of steps."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from diskprefix.daemon.engine import scheduler as module
from diskprefix.daemon.engine.scheduler import (
    IDLE_ROWS,
    MAX_REPLIES,
    MAX_ROWS,
    MIN_ROWS,
    Chunk,
    Pace,
    Scheduler,
    Shares,
)
from diskprefix.daemon.engine.scheduler import ScheduledReply as Tokens
from tests.examples import examples

GRID = 64
TWO = Shares(replying=1, waiting=1)


@dataclass
class World:
    """A scheduler and what becomes of its sequences: each is prefilled, then decodes until its reply ends."""

    scheduler: Scheduler[Tokens] = field(default_factory=Scheduler)
    replies: dict[Tokens, int] = field(default_factory=dict)
    """How many tokens each reply has."""
    prefilled: dict[str, int] = field(default_factory=dict)
    """Prompt rows by share."""
    num_arrived: int = 0

    def arrive(self, prompt_tokens: int, reply: int = 1, *, share: str = "a", **others: Any) -> Tokens:
        self.num_arrived += 1
        one = Tokens(share=share, arrived=self.num_arrived, prompt_tokens=prompt_tokens, grid=GRID, **others)
        self.replies[one] = reply
        self.scheduler.add_sequence(one)
        return one

    def step(self) -> list[Chunk[Tokens]]:
        step = self.scheduler.schedule()
        prompts = [chunk for chunk in step if not chunk.sequence.is_decoding]
        for chunk in prompts:
            share = str(chunk.sequence.share)
            self.prefilled[share] = self.prefilled.get(share, 0) + chunk.num_rows
        self.scheduler.advance(step)
        for chunk in step:
            self._sample(chunk.sequence)
        return step

    def _sample(self, one: Tokens) -> None:
        if one.num_left:
            return
        if one.num_known - one.prompt_tokens + 1 == self.replies[one]:
            self.scheduler.remove_sequence(one)
            del self.replies[one]
        else:
            one.num_known += 1
            self.scheduler.add_sequence(one)


def random_worlds() -> Iterator[tuple[random.Random, World]]:
    for seed in range(examples(6)):
        yield random.Random(seed), World()


def some_arrive(chance: random.Random, world: World) -> None:
    while len(world.replies) < 40 and chance.random() < 0.4:
        length = chance.choice([1, 7, GRID, 200, 256, 300, 1000, 3000])
        world.arrive(
            length,
            chance.choice([1, 2, 10, 40]),
            share=chance.choice("abc"),
            packs=chance.random() < 0.8,
            num_computed=chance.choice([0, length // 2 // GRID * GRID]),
        )


def check(step: Sequence[Chunk[Tokens]], present: list[Tokens]) -> None:
    assert bool(step) == bool(present)
    named = [chunk.sequence for chunk in step]
    assert len(set(map(id, named))) == len(named)
    for chunk in step:
        one = chunk.sequence
        assert one.num_computed == chunk.start < chunk.end - chunk.num_drafted <= one.num_known
        assert chunk.num_drafted <= len(one.draft) * one.is_decoding
        if not one.packs:
            assert step == [chunk]
            is_in_prompt = chunk.start < one.prompt_tokens
            assert chunk.end in (one.prompt_tokens, chunk.start - chunk.start % GRID + GRID) or not is_in_prompt
            assert is_in_prompt or chunk.num_rows == 1
    if named and named[0].packs:
        assert sum(chunk.num_rows for chunk in step) <= MAX_ROWS
        packed = [one for one in present if one.packs]
        waiting = {one.share for one in packed if not one.is_decoding}
        for share in {one.share for one in packed}:
            decoding = [one for one in packed if one.share == share and one.is_decoding]
            most = MAX_REPLIES if waiting - {share} else len(decoding)
            assert sum(one in named for one in decoding) == min(len(decoding), most)
        ends = {chunk.end == chunk.sequence.num_known for chunk in step if not chunk.sequence.is_decoding}
        assert len(ends) <= 1, "a step in which a prompt ends has others that end, but no part of one"


def test_prompts_have_no_more_rows_beside_replies_than_they_may() -> None:
    world = World()
    world.arrive(1, reply=1000)
    world.step()
    world.arrive(5000)
    assert [chunk.num_rows for chunk in world.scheduler.schedule(20)] == [1, 20]
    assert sum(chunk.num_rows for chunk in world.scheduler.schedule()) == MAX_ROWS
    without = World()
    without.arrive(5000)
    assert [chunk.num_rows for chunk in without.scheduler.schedule(20)] == [MAX_ROWS]


def test_every_step_is_sound_and_every_sequence_ends() -> None:
    num_drafted = 0
    for chance, world in random_worlds():
        for _ in range(200):
            some_arrive(chance, world)
            if chance.random() < 0.05 and world.replies:
                # It gave up its memory, and is computed again.
                one = chance.choice(list(world.replies))
                world.scheduler.remove_sequence(one)
                one.num_computed = 0
                world.scheduler.add_sequence(one)
            if chance.random() < 0.05 and world.replies:
                one = chance.choice(list(world.replies))
                world.scheduler.remove_sequence(one)
                del world.replies[one]
            for one in world.replies:
                one.draft = []
            plain = world.scheduler.schedule()
            for one in world.replies:
                # Prompts may have one from before they gave up their memory.
                one.draft = [1] * chance.choice([0, 5, 100]) if one.packs else []
            step = world.scheduler.schedule()
            check(step, list(world.replies))
            known = [replace(chunk, end=chunk.end - chunk.num_drafted, num_drafted=0) for chunk in step]
            assert known == plain, "guesses take rows that nobody else needs"
            num_drafted += sum(chunk.num_drafted for chunk in step)
            world.step()
        bound = sum(2 * one.num_left + reply for one, reply in world.replies.items())
        for _ in range(bound):
            world.step()
        assert not world.replies
    assert num_drafted > 1000


def test_more_replies_than_rows_take_turns_and_leave_some_to_prompts() -> None:
    world = World(Scheduler(8))
    replies = [world.arrive(1, 1000) for _ in range(20)]
    for _ in range(20):
        world.step()
    assert all(one.is_decoding for one in replies)
    before = [one.num_computed for one in replies]
    for _ in range(20):
        world.step()
    gained = [one.num_computed - count for one, count in zip(replies, before, strict=True)]
    assert 0 < max(gained) <= 2 * min(gained)


def test_a_short_prompt_overtakes_a_long_one() -> None:
    world = World()
    long = world.arrive(6000, 5)
    world.step()
    short = world.arrive(300)
    world.step()
    world.step()
    assert short not in world.replies
    assert long.num_computed <= 2 * MAX_ROWS


@pytest.mark.parametrize("packs", [False, True])
def test_a_prompt_without_a_reply_gives_way_to_all_others(packs: bool) -> None:
    world = World()
    ahead = world.arrive(1000, is_background=True)
    assert [chunk.num_rows for chunk in world.step()] == [IDLE_ROWS]
    other = world.arrive(300, 3, packs=packs)
    while other in world.replies:
        assert [chunk.sequence for chunk in world.step()] == [other]
    assert [chunk.sequence for chunk in world.step()] == [ahead]
    assert ahead.num_computed == 2 * IDLE_ROWS
    # A request waits for it.
    ahead.is_background = False
    assert [chunk.num_rows for chunk in world.step()] == [MAX_ROWS]


def test_a_prompt_that_left_the_background_is_computed_beside_the_replies_of_others() -> None:
    """500 steps in which another reply decodes."""
    world = World()
    reply = world.arrive(100, 600, share="b")
    world.step()
    ahead = world.arrive(2000, is_background=True)
    for _ in range(50):
        assert [chunk.sequence for chunk in world.step()] == [reply]
    ahead.is_background = False
    while ahead in world.replies:
        assert reply in world.replies, "it waited for the whole reply"
        world.step()


def rows_that_pass(length: int, short: int) -> int:
    """How many rows others have before a prompt is computed, if short ones arrive all the time."""
    world = World()
    long = world.arrive(length)
    while long in world.replies:
        assert sum(world.prefilled.values()) < 20 * length, "it starves"
        while len(world.replies) < 6:
            world.arrive(short)
        world.step()
    return sum(world.prefilled.values()) - length


@pytest.mark.cases(2)
@pytest.mark.parametrize("short", [1, 255, 300])
def test_after_four_times_its_length_nothing_new_passes_a_prompt(short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waited already may: five short ones, and one more step."""
    assert rows_that_pass(3000, short) <= 4 * 3000 + 5 * short + MAX_ROWS
    monkeypatch.setattr(module, "_AGING", 0)
    with pytest.raises(AssertionError, match="it starves"):
        rows_that_pass(3000, short)


def test_of_the_prompts_that_wait_the_first_is_no_new_one_once_it_was_overtaken_enough() -> None:
    for chance, world in random_worlds():
        aged: dict[Tokens, int] = {}
        for _ in range(300):
            some_arrive(chance, world)
            aged = {one: at for one, at in aged.items() if one in world.replies and not one.is_decoding}
            waiting = [one for one in world.replies if one not in aged and one.overtaken >= 4 * one.num_left]
            aged |= dict.fromkeys(waiting, world.num_arrived)
            step = world.scheduler.schedule()
            first = next((chunk.sequence for chunk in step if not chunk.sequence.is_decoding), None)
            if first is not None:
                passed = [one for one, at in aged.items() if first.arrived > at and same_turn(one, first)]
                assert not passed
            world.step()


def same_turn(one: Tokens, other: Tokens) -> bool:
    return (one.share, one.packs) == (other.share, other.packs)


@pytest.mark.parametrize("decodes", [True, False], ids=["and decodes", "and leaves between two"])
@pytest.mark.parametrize("length", [40, 300, 6000])
def test_shares_take_turns(length: int, decodes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One has a long prompt, the other sends one after another."""

    def gap() -> int:
        world = World()
        if decodes:
            world.arrive(1, 10_000, share="b")
            world.step()
        world.arrive(20_000, share="a")
        theirs = world.arrive(length, share="b")
        world.prefilled.clear()
        gaps = [0]
        while world.prefilled.get("a", 0) < 10_000 and gaps[-1] <= 20 * MAX_ROWS:
            if theirs not in world.replies:
                theirs = world.arrive(length, share="b")
            world.step()
            gaps.append(abs(world.prefilled.get("a", 0) - world.prefilled.get("b", 0)))
        return max(gaps)

    assert gap() <= 2 * MAX_ROWS
    monkeypatch.setattr(Scheduler, "_by_turns", lambda _, prompts: iter(sorted(prompts, key=lambda one: one.num_left)))
    assert gap() > 2 * MAX_ROWS


def test_nobody_saves_up_turns_while_only_replies_are_computed() -> None:
    world = World()
    world.arrive(1, 10_000, share="a")
    world.step()
    world.arrive(20_000, share="b")
    for _ in range(40):
        world.step()
    world.arrive(20_000, share="a")
    world.prefilled.clear()
    for _ in range(20):
        world.step()
    assert abs(world.prefilled["a"] - world.prefilled["b"]) <= MAX_ROWS


@pytest.mark.parametrize("packs", [True, False], ids=["beside packed ones", "beside others like them"])
def test_a_reply_has_its_turn_however_many_short_prompts_come_that_do_not_pack(packs: bool) -> None:
    world = World()
    reply = world.arrive(10, 1000, packs=packs)
    for _ in range(100):
        if not any(one is not reply for one in world.replies):
            world.arrive(20, 1, packs=False, share="b")
        world.step()
    assert reply.num_known > 40


def test_sequences_that_do_not_pack_take_turns() -> None:
    """All prompts together are one, and so are all that pack."""
    world = World()
    replies = [world.arrive(1, 1000, packs=False) for _ in range(3)]
    packed = [world.arrive(1, 1000) for _ in range(5)]
    for _ in range(10):
        world.step()
    prompts = [world.arrive(6000, packs=False) for _ in range(2)]
    before = [one.num_computed for one in (*replies, *packed)]
    for _ in range(5 * 10):
        world.step()
    gained = [one.num_computed - count for one, count in zip((*replies, *packed), before, strict=True)]
    assert gained == [10] * 8
    assert sum(one.num_computed for one in prompts) == 10 * GRID


# The pace.


def settled(pace: Pace, always_s: float, row_s: float, num_steps: int = 60, shares: Shares = TWO) -> tuple[int, float]:
    """Has a machine compute steps of a reply and a prompt; returns the rows and the seconds of the last whole step."""
    for _ in range(num_steps):
        rows = rows_of_next(pace, shares)
        pace.record_step(1, rows, always_s + rows * row_s)
    rows = min(rows_of_next(pace, shares), rows)
    return rows, always_s + rows * row_s


def rows_of_next(pace: Pace, shares: Shares = TWO) -> int:
    most = pace.max_prompt_rows(shares)
    return MAX_ROWS if most is None else min(MAX_ROWS, most)


def test_a_step_with_replies_and_prompts_takes_the_target_on_a_machine_that_gets_slower_and_faster() -> None:
    pace = Pace(0.05)
    for row_s in (0.0003, 0.0015, 0.0003, 0.002, 0.0005):
        assert settled(pace, 0.015, row_s)[1] == pytest.approx(0.05, abs=2 * row_s)


def test_where_a_step_takes_the_target_whatever_it_computes_prompts_have_half_of_the_time() -> None:
    assert settled(Pace(0.05), 0.4, 0.01)[1] == pytest.approx(0.8, abs=0.02)


def test_beside_programs_that_use_the_processors_prompts_get_on() -> None:
    """What a step takes whatever it computes grows then: small steps would make prompts wait for nothing."""
    pace = Pace(0.05)
    settled(pace, 0.015, 0.001)
    assert settled(pace, 0.3, 0.001)[0] > 0.9 * MAX_ROWS


def test_on_a_machine_that_has_become_slow_replies_do_not_pause_for_long() -> None:
    pace = Pace(0.05)
    settled(pace, 0.015, 0.0015)
    assert settled(pace, 0.075, 0.0075)[0] == MIN_ROWS


@pytest.mark.parametrize(
    ("steps", "max_prompt_rows"),
    [
        ([(1, 0, 0.1)], None),
        ([(0, MAX_ROWS, 0.128)], 100),
        ([(0, MAX_ROWS, 1000.0)], MIN_ROWS),
        ([(1, 20, 0.0)], 40),
    ],
    ids=["no prompt yet", "by prompts alone", "the least", "at most twice the last ones"],
)
def test_the_rows_of_prompts_follow_from_the_steps_so_far(
    steps: list[tuple[int, int, float]], max_prompt_rows: int | None
) -> None:
    """A step has replies, rows of prompts, and seconds."""
    pace = Pace(0.05)
    for step in steps:
        pace.record_step(*step)
    assert pace.max_prompt_rows(TWO) == (None if max_prompt_rows is None else pytest.approx(max_prompt_rows, abs=1))


@pytest.mark.parametrize(("row_s", "factor"), [(0.0004, 2), (0.1, 0.5)])
def test_now_and_then_a_step_has_other_rows_so_that_two_times_can_be_told_apart(row_s: float, factor: float) -> None:
    """Twice as many, unless steps are long already."""
    pace = Pace(0.05)
    settled(pace, 0.02, row_s)
    steps = list[int]()
    for _ in range(21):
        steps.append(rows_of_next(pace))
        pace.record_step(1, steps[-1], 0.02 + steps[-1] * row_s)
    usual = sorted(steps)[10]
    others = [rows / usual for rows in steps if rows != pytest.approx(usual, rel=0.1)]
    assert others == pytest.approx([factor] * 3, abs=0.1)


def test_a_crowd_with_prompts_has_as_much_time_as_its_part_of_the_shares() -> None:
    """Where a step takes longer than the target. Without a crowd, prompts have half of the time."""
    for shares, times in ((TWO, 1), (Shares(2, 6), 3), (Shares(3, 1), 1)):
        assert settled(Pace(0.05), 0.5, 0.01, shares=shares)[1] == pytest.approx(0.5 + 0.5 * times, abs=0.03)
    world = World()
    world.arrive(1, reply=1000, share="a")
    world.step()
    assert world.scheduler.shares == (1, 0)
    for share in "abbc":
        world.arrive(100, share=share)
    assert world.scheduler.shares == (1, 3)


@pytest.mark.parametrize(("waiting", "seconds"), [(0, 0.05), (1, 0.05), (2, 0.15), (3, 0.25)])
def test_each_further_share_with_a_prompt_has_twice_the_time_of_the_first(waiting: int, seconds: float) -> None:
    for replying in (1, 4):
        shares = Shares(replying, waiting)
        assert settled(Pace(0.05), 0.015, 0.001, shares=shares)[1] == pytest.approx(seconds, abs=0.002)


def test_while_others_have_prompts_the_replies_of_a_share_take_turns() -> None:
    world = World()
    many = [world.arrive(1, 10_000, share="many") for _ in range(3 * MAX_REPLIES)]
    few = [world.arrive(1, 10_000, share="few") for _ in range(MAX_REPLIES)]
    world.step()
    world.arrive(100, share="many")
    assert {id(chunk.sequence) for chunk in world.step()} >= {*map(id, many), *map(id, few)}, "nobody else has a prompt"
    world.arrive(10_000, share="other")
    before = {id(one): one.num_computed for one in (*many, *few)}
    for _ in range(6):
        world.step()
    assert [one.num_computed - before[id(one)] for one in many] == [2] * len(many)
    assert [one.num_computed - before[id(one)] for one in few] == [6] * len(few)


def test_beside_a_picture_that_takes_more_rows_than_are_left_a_reply_gets_its_own() -> None:
    world = World()
    reply = world.arrive(8, 4)
    world.step()
    reply.draft = [1, 2]
    pictured = world.arrive(400, spans=((10, 266),), num_computed=10)
    assert world.scheduler.schedule(MIN_ROWS) == [Chunk(reply, 8, 9), Chunk(pictured, 10, 266)]
