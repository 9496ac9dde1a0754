from __future__ import annotations

import pytest

from diskprefix.prompt import Prompt
from diskprefix.simulate.trace import Trace, TraceRequest
from diskprefix.tokens import as_token_ids


def request(when: float, *token_ids: int) -> TraceRequest:
    return TraceRequest(when=when, prompt=Prompt(as_token_ids(token_ids)))


def tokens(trace: Trace) -> list[list[int]]:
    return [request.prompt.token_ids.tolist() for request in trace]


def test_a_trace_can_be_iterated_again_and_several_times_at_once() -> None:
    trace = Trace.of("t", [request(0, 1), request(1, 2, 3)])
    assert tokens(trace) == tokens(trace) == [[1], [2, 3]]
    assert [(a.when, b.when) for a, b in zip(trace, trace, strict=True)] == [(0, 0), (1, 1)]


@pytest.mark.parametrize(("wanted", "there"), [(0, 0), (1, 1), (2, 2), (5, 2)])
def test_the_head_of_a_trace_is_as_long_as_it_says(wanted: int, there: int) -> None:
    head = Trace.of("t", [request(0, 1), request(1, 2)]).head(wanted)
    assert len(head) == len(list(head)) == there
    assert head.name == "t"
