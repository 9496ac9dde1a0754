"""Thousands of random arrivals, and what a step must be whatever they are."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest

from diskprefix.engine import scheduler as module
from diskprefix.engine.scheduler import MAX_ROWS, Chunk, Scheduler
from diskprefix.engine.scheduler import Sequence as Tokens
from tests.examples import examples

GRID = 64


def sequence(
    prompt_tokens: int, *, tenant: str = "a", arrived: int = 0, packs: bool = True, computed: int = 0
) -> Tokens:
    return Tokens(
        tenant=tenant,
        arrived=arrived,
        prompt_tokens=prompt_tokens,
        packs=packs,
        grid=GRID,
        num_computed=computed,
    )


@dataclass
class World:
    """A scheduler and what becomes of its sequences: each is prefilled, then decodes until its reply ends."""

    scheduler: Scheduler[Tokens] = field(default_factory=Scheduler)
    replies: dict[Tokens, int] = field(default_factory=dict)
    """How many tokens each reply has."""
    prefilled: dict[str, int] = field(default_factory=dict)
    """Prompt rows by tenant."""
    num_arrived: int = 0

    def arrive(self, prompt_tokens: int, reply: int = 1, **others: object) -> Tokens:
        self.num_arrived += 1
        one = sequence(prompt_tokens, arrived=self.num_arrived, **others)  # type: ignore[arg-type]
        self.replies[one] = reply
        self.scheduler.add(one)
        return one

    def step(self) -> list[Chunk[Tokens]]:
        step = self.scheduler.schedule()
        prompts = [chunk for chunk in step if not chunk.sequence.is_decoding]
        for chunk in prompts:
            tenant = str(chunk.sequence.tenant)
            self.prefilled[tenant] = self.prefilled.get(tenant, 0) + chunk.num_rows
        self.scheduler.advance(step)
        for chunk in step:
            self._sample(chunk.sequence)
        return step

    def _sample(self, one: Tokens) -> None:
        if one.num_left:
            return
        if one.num_known - one.prompt_tokens + 1 == self.replies[one]:
            self.scheduler.remove(one)
            del self.replies[one]
        else:
            one.num_known += 1
            self.scheduler.add(one)


def random_worlds() -> Iterator[tuple[random.Random, World]]:
    for seed in range(examples(6)):
        yield random.Random(seed), World()


def some_arrive(chance: random.Random, world: World) -> None:
    while len(world.replies) < 40 and chance.random() < 0.4:
        length = chance.choice([1, 7, GRID, 200, 256, 300, 1000, 3000])
        world.arrive(
            length,
            chance.choice([1, 2, 10, 40]),
            tenant=chance.choice("abc"),
            packs=chance.random() < 0.8,
            computed=chance.choice([0, length // 2 // GRID * GRID]),
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
        assert all(one in named for one in present if one.packs and one.is_decoding)


def test_prompts_have_no_more_rows_beside_replies_than_they_may() -> None:
    world = World()
    world.arrive(1, reply=1000)
    world.step()
    world.arrive(5000)
    world.arrive(3, tenant="b")
    step = world.scheduler.schedule(20)
    assert [chunk.num_rows for chunk in step] == [1, 3], "a step in which a prompt ends has no part of another"
    world.step()
    assert [chunk.num_rows for chunk in world.scheduler.schedule(20)] == [1, 20]
    assert sum(chunk.num_rows for chunk in world.scheduler.schedule()) == MAX_ROWS


def test_a_prompt_without_replies_beside_it_has_all_rows() -> None:
    world = World()
    world.arrive(5000)
    assert [chunk.num_rows for chunk in world.scheduler.schedule(20)] == [MAX_ROWS]


def test_every_step_is_sound_and_every_sequence_ends() -> None:
    num_drafted = 0
    for chance, world in random_worlds():
        for _ in range(200):
            some_arrive(chance, world)
            if chance.random() < 0.05 and world.replies:
                # It gave up its memory, and is computed again.
                one = chance.choice(list(world.replies))
                world.scheduler.remove(one)
                one.num_computed = 0
                world.scheduler.add(one)
            if chance.random() < 0.05 and world.replies:
                one = chance.choice(list(world.replies))
                world.scheduler.remove(one)
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


def test_a_step_in_which_a_prompt_ends_has_others_that_end_but_no_part_of_one() -> None:
    world = World()
    reply, ends, long, too = world.arrive(1, 9), world.arrive(40), world.arrive(6000), world.arrive(50)
    world.step()
    assert {chunk.sequence for chunk in world.step()} <= {reply, long}
    assert (ends in world.replies, too in world.replies) == (False, False)
    assert long.num_computed == MAX_ROWS - 1


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


@pytest.mark.parametrize("short", [1, 30, 200, 255, 256, 300])
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
    return (one.tenant, one.packs) == (other.tenant, other.packs)


@pytest.mark.parametrize("decodes", [True, False], ids=["and decodes", "and leaves between two"])
@pytest.mark.parametrize("length", [40, 256, 300, 6000])
def test_tenants_share_by_turns(length: int, decodes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One has a long prompt, the other sends one after another."""

    def gap() -> int:
        world = World()
        if decodes:
            world.arrive(1, 10_000, tenant="b")
            world.step()
        world.arrive(20_000, tenant="a")
        theirs = world.arrive(length, tenant="b")
        world.prefilled.clear()
        gaps = [0]
        while world.prefilled.get("a", 0) < 10_000 and gaps[-1] <= 20 * MAX_ROWS:
            if theirs not in world.replies:
                theirs = world.arrive(length, tenant="b")
            world.step()
            gaps.append(abs(world.prefilled.get("a", 0) - world.prefilled.get("b", 0)))
        return max(gaps)

    assert gap() <= 2 * MAX_ROWS
    monkeypatch.setattr(Scheduler, "_by_turns", lambda _, prompts: iter(sorted(prompts, key=lambda one: one.num_left)))
    assert gap() > 2 * MAX_ROWS


def test_nobody_saves_up_turns_while_only_replies_are_computed() -> None:
    world = World()
    world.arrive(1, 10_000, tenant="a")
    world.step()
    world.arrive(20_000, tenant="b")
    for _ in range(40):
        world.step()
    world.arrive(20_000, tenant="a")
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
            world.arrive(20, 1, packs=False, tenant="b")
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
