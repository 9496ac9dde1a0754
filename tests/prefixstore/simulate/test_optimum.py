"""The optimum that no policy exceeds, and the tree of prompts that it is made of."""

from __future__ import annotations

from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diskprefix.prefixstore.recording.radix_tree import RadixNode, RadixTree
from diskprefix.prefixstore.simulate.geometry import CHECKPOINTS, SLICEABLE, TOKEN, Geometry
from diskprefix.prefixstore.simulate.optimum import optimum
from diskprefix.prefixstore.simulate.simulator import Policy, simulate
from diskprefix.prefixstore.simulate.trace import Trace, TraceRequest
from diskprefix.prefixstore.store.eviction import usable_bytes
from diskprefix.tokens import TokenIds, as_token_ids, common_prefix_length
from diskprefix.values import Prompt, Scope
from tests.examples import examples
from tests.prefixstore.simulate.workloads import CATALOG

POLICY = Policy(scope=Scope("full"), min_tokens=4, block_size=4)
STATES = Geometry(bytes_per_token=10, state_bytes=1000)


def asked(*parts: tuple[int, int], **how: Any) -> TraceRequest:
    """A prompt of messages, each given as its token and its length; it may be cut behind each of them."""
    token_ids = np.concatenate([np.full(length, token, np.int32) for token, length in parts])
    ends = np.cumsum([length for _, length in parts])
    return TraceRequest(when=0.0, prompt=Prompt(token_ids, tuple(ends.tolist())), **how)


A, B, C = (1, 10), (2, 20), (3, 30)


def tail(token: int) -> tuple[int, int]:
    return 100 + token, 5


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", CATALOG)
def test_no_rule_passes_the_bound(name: str) -> None:
    trace = CATALOG[name](num_requests=40)
    bound = optimum(trace, Policy(scope=Scope("off"), ttl_s=1.0), CHECKPOINTS)
    for scope in (Scope("full"), Scope("auto", 30)):
        for geometry in (SLICEABLE, CHECKPOINTS):
            totals = simulate(trace, Policy(scope=scope), geometry)
            assert totals.restored_tokens <= bound.restored_tokens
            assert totals.hits <= bound.hits
    on_the_grid = simulate(trace, Policy(scope=Scope("full")), SLICEABLE)
    assert on_the_grid.hits == bound.hits
    assert bound.restored_tokens - on_the_grid.restored_tokens < 256 * bound.hits + 1


def test_the_bound_is_all_that_is_shared_with_any_prompt_before() -> None:
    random = np.random.default_rng(3)
    prompts: list[TokenIds] = []
    for _ in range(60):
        earlier = prompts[random.integers(len(prompts))] if prompts else as_token_ids([])
        new = random.integers(0, 3, random.integers(1, 20)).astype(np.int32)
        prompts.append(np.concatenate([earlier[: random.integers(len(earlier) + 1)], new]))
    requests = [TraceRequest(when=0.0, prompt=Prompt(token_ids)) for token_ids in prompts]
    shared = [
        max((common_prefix_length(token_ids, other) for other in prompts[:index]), default=0)
        for index, token_ids in enumerate(prompts)
    ]
    policy = Policy(scope=Scope("full"), block_size=16, min_tokens=5, seconds_per_token=0.5)
    totals = optimum(Trace.of("t", requests), policy, STATES)
    counted = [number for number in shared if number >= 5]
    assert (totals.hits, totals.restored_tokens, totals.seconds_saved) == (
        len(counted),
        sum(counted),
        sum(counted) / 2,
    )
    used = {
        token_ids[:n].tobytes() for token_ids, most in zip(prompts, shared, strict=True) for n in range(1, most + 1)
    }
    assert totals.written_tokens == len(used), "what is never used again is not written"
    assert totals.written_bytes == 10 * len(used)
    assert totals.peak_bytes == 10 * (totals.prompt_tokens - sum(shared))
    assert len(counted) > 30


@pytest.mark.parametrize("how", [{"save": False}, {"remembered": False}, {"scope": Scope("off")}, {"tenant": "me"}])
def test_what_is_not_kept_for_others_does_not_raise_the_bound(how: dict[str, Any]) -> None:
    kept = asked(A, B, tail(0))
    totals = optimum(Trace.of("t", [asked(A, B, C, tail(0), **how), kept, asked(A, B, C, tail(0))]), POLICY, STATES)
    assert totals.restored_tokens == 30


def test_the_bound_keeps_replies_where_decoding_leaves_what_a_prefill_does() -> None:
    asks = TraceRequest(when=0.0, prompt=Prompt(np.arange(20, dtype=np.int32)), reply=np.arange(20, 50, dtype=np.int32))
    turn = TraceRequest(when=1.0, prompt=Prompt(np.arange(60, dtype=np.int32)))
    trace = Trace.of("t", [asks, turn])
    policy = Policy(scope=Scope("full"), min_tokens=4, block_size=16)
    bound, daemon = optimum(trace, policy, TOKEN), simulate(trace, policy, TOKEN)
    assert (bound.restored_tokens, daemon.restored_tokens) == (50, 50)
    assert (bound.written_tokens, bound.written_bytes) == (50, 50 * TOKEN.bytes_per_token)
    assert optimum(trace, policy, SLICEABLE).restored_tokens == 20, "its replies are not kept"


def test_the_bound_heeds_no_scope_of_a_request_but_off() -> None:
    own = [asked(A, B, tail(0), scope=Scope("tokens", 8)) for _ in range(2)]
    assert optimum(Trace.of("t", own), POLICY, STATES).restored_tokens == 35
    off = [asked(A, B, tail(0), scope=Scope("off")) for _ in range(2)]
    assert optimum(Trace.of("t", off), POLICY, STATES).restored_tokens == 0


def most_restored(prompts: list[tuple[int, ...]], max_tokens: int) -> int:
    """Returns the most tokens that any sequence of stored prefixes restores, by trying all."""

    @cache
    def most(number: int, stored: frozenset[tuple[int, ...]]) -> int:
        if number == len(prompts):
            return 0
        prefixes = [prompts[number][:n] for n in range(1, len(prompts[number]) + 1)]
        restored = sum(prefix in stored for prefix in prefixes)
        at_hand = [*(stored | {*prefixes})]
        choices = [frozenset(some) for n in range(max_tokens + 1) for some in combinations(at_hand, n)]
        closed = [some for some in choices if all(len(one) == 1 or one[:-1] in some for one in some)]
        return restored + max(most(number + 1, some) for some in closed)

    return most(0, frozenset())


@settings(max_examples=examples(30))
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple), max_size=6), st.integers(0, 3))
def test_it_is_the_most_that_any_store_of_this_size_restores(prompts: list[tuple[int, ...]], max_tokens: int) -> None:
    trace = Trace.of("t", [TraceRequest(when=0.0, prompt=Prompt(as_token_ids(prompt))) for prompt in prompts])
    budget = next(n for n in range(2**20, 2**21) if usable_bytes(n) >= 10 * max_tokens)
    policy = Policy(scope=Scope("full"), min_tokens=1, block_size=1, budget_bytes=budget)
    totals = optimum(trace, policy, STATES)
    assert totals.restored_tokens == most_restored(prompts, max_tokens)
    assert totals.peak_bytes <= 10 * max_tokens


def test_it_is_known_after_any_number_of_requests() -> None:
    """The same future is known, whatever is counted."""
    trace = Trace.of("t", [asked(A, B, tail(n % 3)) for n in range(9)])
    counts = [optimum(trace, POLICY, STATES, until=n) for n in range(10)]
    assert [totals.requests for totals in counts] == list(range(10))
    assert [totals.restored_tokens for totals in counts[:5]] == [0, 0, 30, 60, 95]
    assert counts[9] == optimum(trace, POLICY, STATES)


ROOT = b"root"


def add(radix_tree: RadixTree, *tokens: int, root: bytes = ROOT) -> tuple[list[int], RadixNode | None]:
    way, left = radix_tree.add(root, as_token_ids(tokens))
    return [place.position for place in way], left


def test_roots_share_nothing() -> None:
    radix_tree = RadixTree()
    add(radix_tree, 1, 2, 3)
    assert add(radix_tree, 1, 2, 4, root=b"other") == ([3], None)


def test_what_was_not_passed_for_longest_is_forgotten() -> None:
    radix_tree = RadixTree(max_tokens=9)
    add(radix_tree, 1, 1, 1)
    add(radix_tree, 2, 2, 2)
    add(radix_tree, 3, 3, 3)
    add(radix_tree, 1, 1, 1)
    add(radix_tree, 4)
    assert add(radix_tree, 2, 2, 9) == ([3], None)
    assert add(radix_tree, 1, 1, 9)[1] is not None


@given(st.lists(st.lists(st.integers(-1, 0), max_size=8), max_size=12), st.integers(1, 30))
def test_places_are_where_prompts_end_and_part(prompts: list[list[int]], max_tokens: int) -> None:
    everything, bounded = RadixTree(), RadixTree(max_tokens)
    for number, tokens in enumerate(prompts):
        positions, left = add(everything, *tokens)
        shared = {common_prefix_length(as_token_ids(tokens), as_token_ids(other)) for other in prompts[:number]}
        assert positions == sorted((shared | {len(tokens)}) - {0})
        assert (left is None) or left.parent is not None
        add(bounded, *tokens)
        kept = sum(len(end.tokens) for end in _places(bounded))
        assert kept == bounded._num_tokens <= max(max_tokens, *map(len, prompts))


def _places(radix_tree: RadixTree) -> list[RadixNode]:
    found: list[RadixNode] = []
    waiting = list(radix_tree._roots.values())
    while waiting:
        place = waiting.pop()
        found.append(place)
        waiting.extend(place.children.values())
    return found
