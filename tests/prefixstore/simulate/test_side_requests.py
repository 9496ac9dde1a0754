"""Requests beside a conversation (titles, summaries, sub-agents) cost it nothing: its turns hit as without them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import replace

from diskprefix.prefixstore.simulate.geometry import Geometry
from diskprefix.prefixstore.simulate.simulator import Policy, Simulator
from diskprefix.prefixstore.simulate.trace import TraceRequest
from diskprefix.tokens import TokenIds, as_token_ids, raw_boundaries
from diskprefix.values import Prompt, Scope
from tests.prefixstore.simulate.workloads import BEGIN, END

BLOCK = 16
TOKEN = Geometry(bytes_per_token=64, exact_at="token")
STATES = Geometry(bytes_per_token=64, state_bytes=1000)
OPENING = as_token_ids([BEGIN, 3])
POLICY = Policy(scope=Scope("auto", 6), block_size=BLOCK, min_tokens=BLOCK)
TURNS = 12


class Talk:
    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def message(self, num_tokens: int) -> TokenIds:
        text = self.random.integers(100, 50_000, num_tokens, dtype=np.int32)
        return np.concatenate([as_token_ids([BEGIN, 3]), text, as_token_ids([END])])


def prompt_of(*messages: TokenIds) -> Prompt:
    token_ids = np.concatenate([*messages, OPENING])
    return Prompt(token_ids, raw_boundaries(token_ids, (BEGIN, END)), system_end=len(messages[0]) + 1)


def session(kind: str, per_turn: int, reminder: int, tenant: str) -> Iterator[tuple[bool, TraceRequest]]:
    """The turns of an agent, each with whether it is one, and `per_turn` requests of a kind between them.

    Behind the newest message there is a reminder of `reminder` tokens, which the next turn does not have.
    """
    main, side = Talk(1), Talk(2)
    tools, title_system = main.message(300), side.message(20)
    messages, when = [np.concatenate([tools, main.message(60)])], 0.0
    for _ in range(TURNS):
        messages.append(main.message(int(main.random.integers(10, 50))))
        reply = main.message(int(main.random.integers(5, 40)))
        behind = [main.message(reminder)] if reminder else []
        yield True, TraceRequest(when, prompt_of(*messages, *behind), reply=reply[2:], tenant=tenant)
        for _ in range(per_turn):
            when += 1.0
            asked = {
                "title": [title_system, side.message(20)],
                "summary": [*messages, side.message(3)],
                "summary of the reply too": [*messages, reply, side.message(30)],
                "sub-agent with the same tools": [np.concatenate([tools, side.message(20)]), side.message(90)],
                "sub-agent of its own": [np.concatenate([side.message(20), tools]), side.message(90)],
            }[kind]
            yield False, TraceRequest(when, prompt_of(*asked), reply=side.message(5), tenant=tenant)
        messages.append(reply)
        when += 20.0


def restored_by_turns(
    requests: Iterator[tuple[bool, TraceRequest]], geometry: Geometry, budget_bytes: int | None = None
) -> list[int]:
    simulator = Simulator(replace(POLICY, budget_bytes=budget_bytes), geometry)
    outcomes = [(is_turn, simulator.step(request)) for is_turn, request in requests]
    return [outcome.restored for is_turn, outcome in outcomes if is_turn]


@pytest.mark.cases(6)
@pytest.mark.parametrize("tenant", ["", "with a key"])
@pytest.mark.parametrize("reminder", [0, 12])
@pytest.mark.parametrize("per_turn", [1, 10])
@pytest.mark.parametrize("geometry", [TOKEN, STATES], ids=["token", "states"])
@pytest.mark.parametrize(
    "kind",
    ["title", "summary", "summary of the reply too", "sub-agent with the same tools", "sub-agent of its own"],
)
def test_the_turns_of_a_conversation_hit_as_without_the_requests_beside_it(
    kind: str, geometry: Geometry, per_turn: int, reminder: int, tenant: str
) -> None:
    alone = restored_by_turns(session(kind, 0, reminder, tenant), geometry)
    beside = restored_by_turns(session(kind, per_turn, reminder, tenant), geometry)
    assert all(there >= without for there, without in zip(beside, alone, strict=True)), (alone, beside)


@pytest.mark.parametrize("geometry", [TOKEN, STATES], ids=["token", "states"])
def test_a_small_store_evicts_side_requests_before_conversation_turns(geometry: Geometry) -> None:
    kind, alone = "sub-agent of its own", Simulator(POLICY, geometry)
    without = [alone.step(request).restored for _, request in session(kind, 0, 0, "")]
    # There is room for five such conversations, and so for a part of the requests.
    budget_bytes = (5 * alone.totals.peak_bytes + (1 << 20)) * 10 // 9
    assert restored_by_turns(session(kind, 10, 0, ""), geometry, budget_bytes) == without
