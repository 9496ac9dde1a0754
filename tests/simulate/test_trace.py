from __future__ import annotations

import numpy as np
import pytest

from diskprefix.policy.scope import Scope
from diskprefix.prompt import Mark, Prompt
from diskprefix.simulate.trace import Trace, TraceRequest, spooled
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


def test_a_spooled_trace_is_the_same_in_order_of_time() -> None:
    prompt = Prompt(as_token_ids([7, -8, 2**31 - 1]), (1, 3), 1, marks=(Mark(2, 300.0),))
    late = TraceRequest(
        when=9.0,
        prompt=prompt,
        output_tokens=4,
        scope=Scope("full"),
        group=b"12345678",
        tenant="t",
        save=False,
        ttl_s=60.0,
        remembered=False,
    )
    trace = spooled("spooled", iter([late, request(1, 5), request(1)]))
    assert (trace.name, len(trace), tokens(trace)) == ("spooled", 3, [[5], [], [7, -8, 2**31 - 1]])
    again = list(trace)[2]
    assert np.array_equal(again.prompt.token_ids, prompt.token_ids)
    assert again.prompt.token_ids.dtype == np.int32
    rest = ("when", "output_tokens", "scope", "group", "tenant", "save", "ttl_s", "remembered")
    assert [getattr(again, name) for name in rest] == [getattr(late, name) for name in rest]
    structure = ("boundaries", "system_end", "marks")
    assert [getattr(again.prompt, name) for name in structure] == [getattr(prompt, name) for name in structure]


def test_a_spooled_trace_outlives_its_name_while_it_is_read() -> None:
    requests = iter(spooled("spooled", [request(0, 1), request(1, 2)]))
    assert [request.prompt.token_ids.tolist() for request in requests] == [[1], [2]]
