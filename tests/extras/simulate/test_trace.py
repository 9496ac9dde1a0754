from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from diskprefix.extras.simulate.trace import BlockRequest, Trace, TraceRequest, block_tokens_of, block_trace
from diskprefix.tokens import as_token_ids, common_prefix_length
from diskprefix.values import Prompt


def request(when: float, *token_ids: int) -> TraceRequest:
    return TraceRequest(when=when, prompt=Prompt(as_token_ids(token_ids)))


def tokens(trace: Trace) -> list[list[int]]:
    return [request.prompt.token_ids.tolist() for request in trace]


def test_a_trace_can_be_iterated_again_and_several_times_at_once() -> None:
    trace = Trace.of("t", [request(0, 1), request(1, 2, 3)])
    assert tokens(trace) == tokens(trace) == [[1], [2, 3]]
    assert [(a.when, b.when) for a, b in zip(trace, trace, strict=True)] == [(0, 0), (1, 1)]


def block_request(when: float, ids: list[int], num_tokens: int) -> BlockRequest:
    return BlockRequest(when=when, block_ids=np.array(ids, np.int64), num_tokens=num_tokens)


def test_requests_come_in_order_of_time() -> None:
    trace = block_trace("t", [block_request(2.0, [1], 4), block_request(1.0, [2], 3)], 4)
    assert [(request.when, len(request.prompt.token_ids)) for request in trace] == [(1.0, 3), (2.0, 4)]


@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=6), st.integers(0, 3)), max_size=8
    )
)
def test_prompts_share_the_tokens_of_the_blocks_that_they_share(prompts: list[tuple[list[int], int]]) -> None:
    requests = [block_request(i, ids, 4 * len(ids) - cut) for i, (ids, cut) in enumerate(prompts)]
    tokens = [request.prompt.token_ids for request in block_trace("t", requests, 4)]
    for (ids, _), mine in zip(prompts, tokens, strict=True):
        for (other_ids, _), other in zip(prompts, tokens, strict=True):
            same = next((i for i, (a, b) in enumerate(zip(ids, other_ids, strict=False)) if a != b), 6)
            assert common_prefix_length(mine, other) == min(4 * same, len(mine), len(other))


def test_large_ids_wrap_without_meeting_small_ones() -> None:
    numbers = np.array([0, 1, 2**23 - 1], np.int64)
    tokens = block_tokens_of(numbers, 512, 3 * 512)
    assert tokens.dtype == np.int32
    assert len(np.unique(tokens)) == 3 * 512
