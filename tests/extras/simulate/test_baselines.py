"""Whole snapshots under exact keys, and the bound that no rule passes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from diskprefix.extras.simulate.baselines import upper_bound, whole_snapshots
from diskprefix.extras.simulate.geometry import CHECKPOINTS, SLICEABLE, TOKEN, Geometry
from diskprefix.extras.simulate.simulator import Policy, Totals, simulate
from diskprefix.extras.simulate.trace import Trace, TraceRequest
from diskprefix.nouns import Prompt, Scope
from diskprefix.tokens import TokenIds, as_token_ids, common_prefix_length
from tests.extras.simulate.workloads import CATALOG

POLICY = Policy(scope=Scope("full"), min_tokens=4, block_size=4)
STATES = Geometry(bytes_per_token=10, state_bytes=1000)


def asked(*parts: tuple[int, int], **how: Any) -> TraceRequest:
    """A prompt of messages, each given as its token and its length; it may be cut behind each of them."""
    token_ids = np.concatenate([np.full(length, token, np.int32) for token, length in parts])
    ends = np.cumsum([length for _, length in parts])
    return TraceRequest(when=0.0, prompt=Prompt(token_ids, tuple(ends.tolist())), **how)


def replay(*requests: TraceRequest, budget_bytes: int | None = None, min_tokens: int = 4) -> Totals:
    policy = Policy(scope=Scope("full"), budget_bytes=budget_bytes, min_tokens=min_tokens, seconds_per_token=0.5)
    return whole_snapshots(Trace.of("t", requests), policy, STATES)


A, B, C = (1, 10), (2, 20), (3, 30)


def tail(token: int) -> tuple[int, int]:
    return 100 + token, 5


def test_what_is_shared_is_saved_by_the_second_prompt_and_restored_by_the_third() -> None:
    totals = replay(asked(A, B, tail(0)), asked(A, B, tail(1)), asked(A, B, tail(2)))
    assert (totals.requests, totals.prompt_tokens, totals.hits) == (3, 105, 1)
    assert (totals.restored_tokens, totals.seconds_saved) == (30, 15.0)
    assert (totals.written_tokens, totals.written_bytes, totals.peak_bytes) == (30, 1300, 1300)
    assert (totals.selected_tokens, totals.write_amplification) == (60, 1.0)


def test_the_boundary_is_the_last_safe_one_in_what_is_shared() -> None:
    partly = np.concatenate([np.full(10, 1, np.int32), np.full(15, 2, np.int32), np.full(9, 7, np.int32)])
    request = TraceRequest(when=0.0, prompt=Prompt(partly, (10, 34)))
    assert replay(asked(A, B), request).written_tokens == 10


def test_a_snapshot_serves_its_own_boundary_alone() -> None:
    totals = replay(asked(A, B, C), asked(A, B, tail(0)), asked(A, B, C, tail(1)))
    assert totals.hits == 0
    assert totals.written_tokens == 30 + 60, "the longer one is written whole"


def test_what_is_evicted_and_written_again_amplifies() -> None:
    pair = asked(A, B, tail(0)), asked(A, B, tail(1))
    other = asked(C, tail(2)), asked(C, tail(3))
    totals = replay(*pair, *other, asked(A, B, tail(4)), budget_bytes=1400)
    assert (totals.hits, totals.evictions, totals.dropped) == (0, 2, 0)
    assert (totals.written_bytes, totals.peak_bytes, totals.write_amplification) == (3900, 1300, 1.5)


def test_the_least_recently_used_goes_first() -> None:
    a, b, c = ([asked((token, 10), tail(n)) for n in range(4)] for token in (11, 12, 13))
    used = a[0], a[1], b[0], b[1], a[2], c[0], c[1]
    totals = replay(*used, a[3], budget_bytes=2200)
    assert (totals.hits, totals.evictions) == (2, 1), "a, used since, is kept, and b goes"
    assert replay(*used, b[2], budget_bytes=2200).hits == 1


def test_what_is_larger_than_the_budget_is_not_written() -> None:
    totals = replay(asked(A, B), asked(A, B), budget_bytes=1299)
    assert (totals.dropped, totals.written_tokens, totals.evictions) == (1, 0, 0)


def test_less_than_the_minimum_is_neither_saved_nor_remembered() -> None:
    assert replay(asked(A, tail(0)), asked(A, tail(1)), min_tokens=11).written_tokens == 0
    assert replay(asked(A), asked(A, tail(1)), min_tokens=10).written_tokens == 10
    assert replay(asked(A), asked(A, tail(1)), min_tokens=11).selected_tokens == 0


def test_the_window_is_that_of_30_prompts() -> None:
    between = [asked((1000 + n, 10)) for n in range(30)]
    assert replay(asked(A, tail(0)), *between[:29], asked(A, tail(1))).written_tokens == 10
    assert replay(asked(A, tail(0)), *between, asked(A, tail(1))).written_tokens == 0
    short = [asked((1000 + n, 3)) for n in range(30)]
    assert replay(asked(A, tail(0)), *short, asked(A, tail(1))).written_tokens == 10, "short prompts are not in it"


def test_tenants_share_nothing() -> None:
    mine, other = [asked(A, tail(n), tenant="me") for n in range(2)], [asked(A, tail(n)) for n in range(3)]
    totals = replay(*mine, other[0], other[1], other[2])
    assert (totals.hits, totals.written_tokens) == (1, 20)


@pytest.mark.parametrize("how", [{"save": False}, {"remembered": False}, {"scope": Scope("off")}])
def test_who_does_not_save_writes_nothing_and_is_not_remembered(how: dict[str, Any]) -> None:
    totals = replay(asked(A, tail(0)), asked(A, tail(1), **how))
    assert (totals.requests, totals.written_tokens) == (2, 0)
    assert replay(asked(A, tail(0), **how), asked(A, tail(1))).written_tokens == 0


def test_reading_needs_no_right_to_save() -> None:
    saved = asked(A, tail(0)), asked(A, tail(1))
    assert replay(*saved, asked(A, tail(2), save=False)).hits == 1
    assert replay(*saved, asked(A, tail(2), scope=Scope("off"))).hits == 0


@pytest.mark.parametrize("name", CATALOG)
def test_no_rule_passes_the_bound(name: str) -> None:
    trace = CATALOG[name](num_requests=40)
    bound = upper_bound(trace, Policy(scope=Scope("off"), budget_bytes=2**24, ttl_s=1.0), CHECKPOINTS)
    assert bound.evictions == 0
    rules = [partial(simulate, policy=Policy(scope=scope)) for scope in (Scope("full"), Scope("auto", 30))]
    for rule in [*rules, partial(whole_snapshots, policy=Policy(scope=Scope("full")))]:
        for geometry in (SLICEABLE, CHECKPOINTS):
            totals = rule(trace, geometry=geometry)
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
    totals = upper_bound(Trace.of("t", requests), policy, STATES)
    counted = [number for number in shared if number >= 5]
    assert (totals.hits, totals.restored_tokens, totals.seconds_saved) == (
        len(counted),
        sum(counted),
        sum(counted) / 2,
    )
    assert totals.written_tokens == totals.prompt_tokens - sum(shared)
    assert totals.written_bytes == totals.peak_bytes == 10 * totals.written_tokens
    assert len(counted) > 30


@pytest.mark.parametrize("how", [{"save": False}, {"remembered": False}, {"scope": Scope("off")}, {"tenant": "me"}])
def test_what_is_not_kept_for_others_does_not_raise_the_bound(how: dict[str, Any]) -> None:
    kept = asked(A, B, tail(0))
    totals = upper_bound(Trace.of("t", [asked(A, B, C, tail(0), **how), kept, asked(A, B, C, tail(0))]), POLICY, STATES)
    assert totals.restored_tokens == 30


def test_the_bound_keeps_replies_where_decoding_leaves_what_a_prefill_does() -> None:
    asks = TraceRequest(when=0.0, prompt=Prompt(np.arange(20, dtype=np.int32)), reply=np.arange(20, 50, dtype=np.int32))
    turn = TraceRequest(when=1.0, prompt=Prompt(np.arange(60, dtype=np.int32)))
    trace = Trace.of("t", [asks, turn])
    policy = Policy(scope=Scope("full"), min_tokens=4, block_size=16)
    bound, daemon = upper_bound(trace, policy, TOKEN), simulate(trace, policy, TOKEN)
    assert (bound.restored_tokens, daemon.restored_tokens) == (50, 50)
    assert (bound.written_tokens, bound.written_bytes) == (60, 60 * TOKEN.bytes_per_token)
    assert upper_bound(trace, policy, SLICEABLE).restored_tokens == 20, "its replies are not kept"


def test_the_bound_heeds_no_scope_of_a_request_but_off() -> None:
    own = [asked(A, B, tail(0), scope=Scope("tokens", 8)) for _ in range(2)]
    assert upper_bound(Trace.of("t", own), POLICY, STATES).restored_tokens == 35
    off = [asked(A, B, tail(0), scope=Scope("off")) for _ in range(2)]
    assert upper_bound(Trace.of("t", off), POLICY, STATES).restored_tokens == 0
