"""Which machine gets a request, and which requests are one conversation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from diskprefix.extras.simulate.spread import Conversations, spreader
from diskprefix.extras.simulate.synthetic import interleaved
from diskprefix.extras.simulate.trace import BlockRequest, TraceRequest, block_trace
from diskprefix.nouns import Prompt


def asked(*parts: tuple[int, int], **how: Any) -> TraceRequest:
    """A prompt of messages, each given as its token and its length."""
    token_ids = np.concatenate([np.full(length, token, np.int32) for token, length in parts])
    return TraceRequest(when=0.0, prompt=Prompt(token_ids), **how)


def numbers(*requests: TraceRequest) -> list[int]:
    conversations = Conversations()
    return [conversations.number_of(request) for request in requests]


SYSTEM = (1, 40)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 100])
def test_a_prompt_that_begins_with_the_whole_of_an_earlier_one_goes_on_from_it(length: int) -> None:
    first, second = asked(SYSTEM, (2, length)), asked(SYSTEM, (3, length))
    turn = asked(SYSTEM, (2, length), (4, 30))
    assert numbers(first, second, turn, turn, asked(SYSTEM, (3, length), (4, 30), (5, 1))) == [0, 1, 0, 0, 1]


def test_of_several_the_longest_counts() -> None:
    found = numbers(asked((1, 20)), asked((2, 20)), asked((1, 20), (3, 5)), asked((1, 20), (3, 5), (4, 1)))
    assert found == [0, 1, 0, 0]
    assert numbers(asked((1, 60)), asked((1, 20)), asked((1, 60), (2, 3)), asked((1, 20), (2, 3))) == [0, 1, 0, 1]
    assert numbers(asked((1, 20), (3, 5)), asked((1, 20)), asked((1, 20), (3, 6)), asked((1, 20), (3, 4))) == [
        0,
        1,
        0,
        1,
    ]


def test_an_edited_prompt_begins_a_conversation() -> None:
    assert numbers(asked(SYSTEM, (2, 9)), asked(SYSTEM, (2, 8), (3, 30))) == [0, 1]


def test_tenants_have_conversations_of_their_own() -> None:
    assert numbers(asked(SYSTEM), asked(SYSTEM, tenant="me"), asked(SYSTEM, (2, 9), tenant="me")) == [0, 1, 1]


def test_what_a_client_calls_one_conversation_is_one() -> None:
    mine, yours = {"group": b"mine"}, {"group": b"yours"}
    found = numbers(asked(SYSTEM, **mine), asked(SYSTEM, **yours), asked((2, 5), **mine), asked(SYSTEM, **yours))
    assert found == [0, 1, 0, 1]
    assert numbers(asked(SYSTEM, **mine), asked(SYSTEM, **mine, tenant="me")) == [0, 1]


def test_block_ids_tell_of_full_blocks_only() -> None:
    # The third block of the first prompt is not full, and has another id in the next turn.
    ids = [[1, 2, 3], [1, 4, 5], [1, 2, 6, 7], [1, 2]]
    requests = [BlockRequest(float(n), np.array(each), 40 * len(each) - 10) for n, each in enumerate(ids)]
    assert numbers(*block_trace("t", requests, 40)) == [0, 1, 0, 2]
    short = [BlockRequest(float(n), np.array([n]), 30) for n in range(2)]
    assert numbers(*block_trace("t", short, 40)) == [0, 1]


def test_turns_of_one_conversation_stay_on_their_machine() -> None:
    trace = interleaved(num_requests=60)
    send, conversations = spreader("conversation", 3), Conversations()
    for request in trace:
        assert send(request) == conversations.number_of(request) % 3


def test_tenants_stay_on_their_machine_and_random_ones_reach_all() -> None:
    send = spreader("tenant", 8)
    of_tenant = [send(asked(SYSTEM, tenant=f"tenant {n}")) for n in range(100)]
    assert set(of_tenant) == set(range(8))
    assert of_tenant == [send(asked((2, n + 1), tenant=f"tenant {n}")) for n in range(100)]
    anywhere = [spreader("random", 8) for _ in range(2)]
    first, again = ([send(asked(SYSTEM)) for _ in range(200)] for send in anywhere)
    assert set(first) == set(range(8))
    assert first == again, "each time the same"
