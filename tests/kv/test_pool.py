"""The memory of sequences: its bound, what is found in it, and whose it is."""

from __future__ import annotations

import gc
import random
import tracemalloc
import weakref
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from diskprefix.kv.arena import KVArena, bytes_for
from diskprefix.kv.layout import Layout
from diskprefix.kv.pool import KVAllocation, KVPool, PrefixMatch
from diskprefix.model.exact.self_check import rehearse
from diskprefix.tokens import LEAST_TOKENS, TokenIds
from tests.exactness.architectures import tiny_model
from tests.examples import examples
from tests.runner import BLOCK, random_prompt

CPU = torch.device("cpu")


@cache
def layout_of(kind: str) -> Layout:
    layout = rehearse(tiny_model("qwen3_next" if kind == "checkpoints" else "llama", torch.float32))
    return replace(layout, exact_at="token") if kind == "token" else layout


def pool_of(kind: str, *num_tokens: int, max_idle: int = 8) -> KVPool:
    """With room for sequences of so many tokens."""
    layout = layout_of(kind)
    return KVPool(
        layout,
        CPU,
        limit_bytes=sum(bytes_for(layout, count) for count in num_tokens),
        free_bytes=lambda: 1 << 40,
        max_idle=max_idle,
        block_size=BLOCK,
    )


@pytest.fixture
def pool() -> KVPool:
    return pool_of("token", 1000, 1000, 1000)


def tokens(num_tokens: int, seed: int = 0) -> TokenIds:
    return random_prompt(seed, num_tokens)


def fill(arena: KVArena, value: int, num_tokens: int) -> None:
    for number, group in enumerate(arena.layout.groups):
        rows = slice(0, len(group.specs) * group.heads)
        arena.fill(0, num_tokens, number, rows, lambda out: out.fill(value))
    for state in arena.states:
        state.fill_(value)
    arena.truncate(num_tokens)


def value_of(allocation: KVAllocation, num_tokens: int) -> set[int]:
    """The bytes of its first tokens."""
    return set(bytes(allocation.arena.read_tokens(0, num_tokens)))


def extended(pool: KVPool, prompt: TokenIds, most_tokens: int = 0) -> KVAllocation:
    allocation = pool.extend(found(pool, prompt), len(prompt), most_tokens)
    assert allocation is not None
    return allocation


def hold(
    pool: KVPool, token_ids: TokenIds, computed: int | None = None, *, value: int = 1, owner: str = "a"
) -> KVAllocation:
    """A sequence that runs."""
    allocation = pool.allocate(len(token_ids))
    assert allocation is not None
    allocation.owner, allocation.token_ids, allocation.num_exact = owner, token_ids, len(token_ids)
    allocation.num_computed = len(token_ids) if computed is None else computed
    fill(allocation.arena, value, allocation.num_computed)
    return allocation


def ended(pool: KVPool, token_ids: TokenIds, **options: Any) -> KVAllocation:
    allocation = hold(pool, token_ids, **options)
    pool.release(allocation, keep=True)
    return allocation


def found(pool: KVPool, token_ids: TokenIds, owner: str = "a") -> PrefixMatch:
    one = pool.match_prefix(owner, token_ids)
    assert one is not None
    return one


def longer(token_ids: TokenIds, num_tokens: int, seed: int = 99) -> TokenIds:
    return np.concatenate([token_ids, tokens(num_tokens, seed)])


# The bound.


@pytest.mark.parametrize("kind", ["token", "checkpoints"])
def test_memory_never_exceeds_the_bound_not_even_while_a_sequence_grows(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = layout_of(kind)
    reserve = KVArena.reserve
    for seed in range(examples(8)):
        chance = random.Random(seed)
        pool = pool_of(kind, 3000, 1000, 1000)
        taken = [0]

        def counted(self: KVArena, num_tokens: int, pool: KVPool = pool, taken: list[int] = taken) -> None:
            used, before = pool.used_bytes, self.capacity
            reserve(self, num_tokens)
            if self.capacity > before:
                # What it had is held until it is copied.
                taken[0] = max(taken[0], used + self.num_bytes - layout.state_bytes)

        monkeypatch.setattr(KVArena, "reserve", counted)
        running: list[KVAllocation] = []
        for _ in range(60):
            length = chance.choice([1, 500, 1024, 1025, 2500])
            match chance.choice(["take", "grow", "release", "go on", "fork", "touch"]):
                case "take":
                    allocation = pool.allocate(length)
                case "go on" if (
                    one := pool.match_prefix("a", longer(tokens(200, chance.randrange(2)), length))
                ) is not None:
                    allocation = pool.extend(one, 200 + length)
                case "fork" if running and kind == "token":
                    allocation = pool.fork(chance.choice(running), length)
                case "grow" if running:
                    one_more, allocation = chance.choice(running), None
                    before = one_more.arena.capacity
                    assert pool.grow(one_more, length) == (one_more.arena.capacity >= length)
                    assert one_more.arena.capacity >= before
                case "release" if running:
                    allocation = None
                    ending = running.pop(chance.randrange(len(running)))
                    ending.owner, ending.token_ids = "a", longer(tokens(200, chance.randrange(2)), 100)
                    ending.num_computed = ending.num_exact = min(len(ending.token_ids), ending.arena.capacity)
                    pool.release(ending, keep=chance.random() < 0.7)
                case _:
                    allocation = None
            if allocation is not None:
                assert allocation.arena.capacity >= length or not layout.groups
                fill(allocation.arena, 1, min(length, allocation.arena.capacity))
                running.append(allocation)
            assert pool.used_bytes <= pool.limit_bytes
            assert [allocation for allocation in pool.allocations if allocation.is_busy] == running or set(
                map(id, running)
            ) == {id(allocation) for allocation in pool.allocations if allocation.is_busy}
        assert taken[0] <= pool.limit_bytes


def test_memory_of_no_sequence_is_taken_again_the_smallest_that_fits() -> None:
    pool = pool_of("token", 1000, 3000, 3000)
    small, large = hold(pool, tokens(1000)), hold(pool, tokens(3000))
    for allocation in (small, large):
        pool.release(allocation, keep=False)
    used = pool.used_bytes
    assert hold(pool, tokens(500)).arena is small.arena
    assert hold(pool, tokens(500)).arena is large.arena
    assert pool.used_bytes == used


def test_memory_of_no_sequence_goes_before_that_of_the_sequence_used_longest_ago(pool: KVPool) -> None:
    oldest, newer = ended(pool, tokens(900, 1)), ended(pool, tokens(900, 2))
    oldest.used_at, newer.used_at = 1.0, 2.0
    pool.release(hold(pool, tokens(900, 3)), keep=False)
    pool._spare[0]._release()
    pool.limit_bytes -= 1000
    assert pool.allocate(900) is not None
    assert pool.allocations[0] is newer
    assert oldest not in pool.allocations


def test_short_requests_do_not_take_the_place_of_a_long_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of("token", 1000, *[50] * 6, max_idle=2)
    clock = 0.0
    monkeypatch.setattr("diskprefix.kv.pool.time.monotonic", lambda: clock)
    long = ended(pool, tokens(1000))
    for seed in range(1, 4):
        clock += 2.0
        last = ended(pool, tokens(50, seed))
    assert pool.allocations == [long, last]
    clock += 1000.0
    newer = ended(pool, tokens(50, 4)), ended(pool, tokens(50, 5))
    assert pool.allocations == list(newer), "it was not used for so long that what is new is worth more"


def test_memory_that_is_given_back_is_free_at_once() -> None:
    """An arena and its layers refer to each other, and a garbage collection may be long in coming."""
    pool, hybrid = pool_of("token", 3000), KVArena(layout_of("checkpoints"), CPU)
    states = [weakref.ref(state) for state in hybrid.states]
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for seed in range(6):
            one = hold(pool, tokens(2900, seed), owner="gone" if seed == 5 else "a")
            assert tracemalloc.get_traced_memory()[0] < 1.1 * pool.limit_bytes
            pool.release(one, keep=bool(seed % 2))
        pool.drop_gone(lambda owner: owner == "gone")
        hybrid.discard()
        assert states
        assert all(state() is None for state in states)
        assert tracemalloc.get_traced_memory()[0] < 0.1 * pool.limit_bytes
    finally:
        tracemalloc.stop()
        gc.enable()


# What is found.


def test_a_later_turn_adopts_and_another_conversation_copies(pool: KVPool) -> None:
    source = ended(pool, tokens(300), value=7)
    assert extended(pool, longer(tokens(300)[:200], 50)) is source
    assert (source.num_computed, source.arena.num_tokens) == (200, 200)
    source.token_ids, source.num_computed = tokens(300), 300
    fill(source.arena, 7, 300)
    pool.release(source, keep=True)
    copy = extended(pool, longer(tokens(300)[:100], 500))
    assert copy is not source
    assert value_of(copy, 100) == {7}
    assert (copy.num_computed, source.num_computed, source.is_busy) == (100, 300, False)
    fill(copy.arena, 9, 100)
    assert value_of(source, 300) == {7}


def test_a_source_is_not_given_away_while_it_is_copied() -> None:
    """There is room for one sequence: the source is adopted though little of it is shared."""
    pool = pool_of("token", 1000)
    source = ended(pool, tokens(900), value=7)
    assert extended(pool, longer(tokens(900)[:100], 500)) is source
    assert value_of(source, 100) == {7}


def test_what_cannot_grow_is_given_up_if_there_is_nobody_to_wait_for() -> None:
    pool = pool_of("token", 2000, 500)
    source, beside = ended(pool, tokens(1000)), hold(pool, tokens(400, 5))
    turn = longer(tokens(1000), 200)
    assert pool.extend(found(pool, turn), len(turn)) is None
    assert found(pool, turn).num_tokens == 1000
    pool.release(beside, keep=False)
    pool.limit_bytes = bytes_for(pool.layout, 2000)
    assert extended(pool, turn).num_computed == 0
    assert source not in pool.allocations


@pytest.mark.parametrize(
    ("limit", "others", "num_tokens", "most_tokens", "capacity"),
    [
        (8000, (), 3000, 7900, 3072),
        (8000, (), 5000, 7900, 8192),
        (20000, (), 11000, 20000, 15360),
        (8000, (1000,), 5000, 7900, 5120),
    ],
    ids=["it can grow", "it cannot", "4096 tokens more", "others need the rest"],
)
def test_a_sequence_of_more_than_half_of_memory_gets_more_at_once_where_others_leave_it(
    limit: int, others: tuple[int, ...], num_tokens: int, most_tokens: int, capacity: int
) -> None:
    pool = pool_of("token", limit)
    for other in others:
        assert pool.allocate(other, other) is not None
    allocation = pool.allocate(num_tokens, most_tokens)
    assert allocation is not None
    assert allocation.arena.capacity == capacity


def test_a_later_turn_stays_in_its_memory_while_it_fits() -> None:
    pool = pool_of("token", 8000)
    one = ended(pool, tokens(5000))
    assert extended(pool, longer(tokens(5000), 100), 7900) is one
    assert (one.num_computed, one.arena.capacity) == (5000, 5120)


def test_what_was_purged_is_in_no_memory_that_is_kept(pool: KVPool) -> None:
    for owner in ("purged", "purged", "kept"):
        ended(pool, tokens(300), owner=owner)
    pool.release(pool.allocate(100) or pytest.fail("there is room"), keep=False)
    pool.drop_gone(lambda owner: owner == "purged")
    assert [allocation.owner for allocation in pool.allocations] == ["kept"]
    assert pool.used_bytes == pool.allocations[0].arena.num_bytes, "no spare memory, which may hold anything"


@pytest.mark.parametrize(
    ("kind", "held", "prompt", "expected"),
    [
        ("token", 100, 150, 100),
        ("token", 100, 100, 99),
        ("token", 100, 60, 59),
        ("sliceable", 100, 150, 96),
        ("sliceable", 96, 96, 80),
        ("checkpoints", 96, 150, 96),
        ("checkpoints", 100, 150, 0),
        ("checkpoints", 96, 96, 0),
        ("checkpoints", 96, 60, 0),
    ],
)
@pytest.mark.parametrize("has_logits", [False, True], ids=["", "with logits"])
def test_as_much_is_found_as_the_model_can_go_on_from(
    kind: str, held: int, prompt: int, expected: int, has_logits: bool
) -> None:
    pool = pool_of(kind, 1000)
    allocation = ended(pool, tokens(held))
    if has_logits:
        allocation.logits_at, allocation.logits = held, torch.zeros(4)
        expected = prompt if prompt == held else expected
    token_ids = tokens(held)[:prompt] if prompt <= held else longer(tokens(held), prompt - held)
    one = pool.match_prefix("a", token_ids)
    assert (one.num_tokens if one else 0) == expected


def test_no_more_is_found_than_is_exact(pool: KVPool) -> None:
    allocation = ended(pool, tokens(300))
    allocation.num_exact = 120
    assert found(pool, longer(tokens(300), 50)).num_tokens == 120


@pytest.mark.parametrize("shared", [200, 100], ids=["adopted", "copied"])
def test_logits_are_found_only_with_all_tokens_before_them(shared: int, pool: KVPool) -> None:
    source = ended(pool, tokens(300))
    source.logits_at, source.logits = 300, torch.zeros(4)
    allocation = extended(pool, longer(tokens(300)[:shared], 400))
    assert (allocation.logits_at, allocation.logits) == (0, None)


def test_a_running_sequence_is_waited_for_if_it_will_have_more(pool: KVPool) -> None:
    whole = tokens(900)
    allocation = hold(pool, whole, 0)
    one = found(pool, longer(whole[:800], 50))
    assert (one.num_tokens, one.later, one.is_worth_waiting_for) == (0, 800, True)
    allocation.num_computed = 800 - LEAST_TOKENS + 1
    one = found(pool, longer(whole[:800], 50))
    assert (one.num_tokens, one.is_worth_waiting_for) == (800 - LEAST_TOKENS + 1, False)
    assert pool.match_prefix("a", longer(whole[: LEAST_TOKENS - 1], 50)) is None


def test_nobody_waits_for_little_more_than_memory_has(pool: KVPool) -> None:
    whole = tokens(900)
    kept = ended(pool, whole[:795])
    hold(pool, whole, 0)
    one = found(pool, longer(whole[:800], 50))
    assert (one.allocation, one.num_tokens, one.is_worth_waiting_for) == (kept, 795, False)
    assert found(pool, whole).is_worth_waiting_for


def test_a_model_with_states_waits_for_nobody() -> None:
    """They move on with the one that computes them."""
    pool = pool_of("checkpoints", 1000)
    hold(pool, tokens(900), 0)
    assert pool.match_prefix("a", tokens(900)) is None


def test_a_copy_for_another_choice_begins_at_the_marked_point() -> None:
    pool = pool_of("checkpoints", 100, 100)
    source = hold(pool, tokens(96), value=3)
    source.arena.mark()
    for state in source.arena.states:
        state.fill_(9)
    fork = pool.fork(source, 100)
    assert fork is not None
    assert fork.num_computed == fork.arena.num_tokens == 96
    assert all(bool((state == 3).all()) for state in fork.arena.states)
    assert all(bool((state == 9).all()) for state in source.arena.states)
    assert pool.fork(source, 100) is None
