"""The three limits: bytes of a body, requests in flight, and turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from diskprefix.api.error_forms import HttpError
from diskprefix.api.fields import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, Body
from diskprefix.errors import InvalidRequest, QueueFull
from diskprefix.json_values import MOST_PARTS, MOST_VALUES
from diskprefix.nouns import SHARED, Tenant
from diskprefix.server import body as body_module
from diskprefix.server import limits
from diskprefix.server.body import LARGE_BYTES, Bodies
from diskprefix.server.keys import Caller
from diskprefix.server.limits import InFlight, Turns, whole_body
from diskprefix.server.log_context import LogContext
from diskprefix.server.threads import Threads
from diskprefix.settings import Settings
from tests.server.scripted import AppServer

MIB = 1 << 20
ALICE, BOB = Tenant.of_key("alice"), Tenant.of_key("bob")
POST = {"method": "POST", "path": "/v1/chat/completions"}


@pytest.mark.parametrize("declared", [{}, {"content-length": "11"}])
def test_a_body_above_the_limit_is_a_413_and_a_declared_one_is_not_read(
    declared: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_BODY_BYTES", 10)
    taken = list[bytes]()

    async def pieces(*sent: bytes) -> AsyncIterator[bytes]:
        for piece in sent:
            taken.append(piece)
            yield piece

    assert asyncio.run(whole_body({"content-length": "10"}, pieces(b"01234", b"56789"))) == b"0123456789"
    taken.clear()
    with pytest.raises(HttpError) as refused:
        asyncio.run(whole_body(declared, pieces(b"01234", b"56789", b"0", b"1")))
    assert (refused.value.http_status, len(taken)) == (413, 0 if declared else 3)


def test_a_key_has_half_of_the_places_that_wait_and_all_that_run() -> None:
    in_flight = InFlight(Settings(max_queue=4, max_sequences=2))
    held = [in_flight.counted(POST, ALICE) for _ in range(4)]
    with pytest.raises(QueueFull, match=r"^4 requests with this API key") as refused:
        in_flight.counted(POST, ALICE)
    assert (refused.value.http_status, refused.value.code, refused.value.retry_after_s > 0) == (
        429,
        "too_many_requests",
        True,
    )
    others = [in_flight.counted(POST, BOB) for _ in range(2)]
    with pytest.raises(QueueFull, match=r"^6 requests are not answered yet") as full:
        in_flight.counted(POST, SHARED)
    assert (full.value.http_status, full.value.code) == (503, "queue_full")
    for one in (held.pop(), others.pop()):
        with one:
            pass
    with in_flight.counted(POST, ALICE):
        assert in_flight.num == 5
    assert in_flight.num == 4


def test_a_key_without_a_request_in_flight_has_a_place_whatever_others_do() -> None:
    in_flight = InFlight(Settings(max_queue=4, max_sequences=2))
    for bad in ("a", "b"):
        for _ in range(3):
            in_flight.counted(POST, Tenant.of_key(bad))
    with in_flight.counted(POST, BOB):
        assert in_flight.num == 7
        with pytest.raises(QueueFull, match=r"^6 requests are not answered yet"):
            in_flight.counted(POST, BOB)


@pytest.mark.parametrize(
    ("method", "path", "is_counted"),
    [
        ("GET", "/health", False),
        ("GET", "/v1/models", False),
        ("GET", "/v1/responses/resp_1", True),
        ("DELETE", "/v1/responses/resp_1", True),
        ("POST", "/tokenize", True),
    ],
)
def test_what_takes_memory_is_counted(method: str, path: str, is_counted: bool) -> None:
    in_flight = InFlight(Settings())
    with in_flight.counted({"method": method, "path": path}, SHARED):
        assert in_flight.num == is_counted


def test_without_keys_the_queue_is_for_all() -> None:
    in_flight = InFlight(Settings(max_queue=4, max_sequences=2))
    for _ in range(6):
        in_flight.counted(POST, SHARED)
    with pytest.raises(QueueFull):
        in_flight.counted(POST, SHARED)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def taking(turns: Turns, began: list[str], go_on: asyncio.Event) -> Callable[[str], asyncio.Task[None]]:
    async def work(name: str) -> None:
        async with turns.of(name[0]):
            began.append(name)
            await go_on.wait()

    return lambda name: asyncio.create_task(work(name))


def test_a_caller_has_one_turn_at_a_time_and_who_had_none_for_longest_is_next() -> None:
    async def scenario() -> list[str]:
        began, go_on = list[str](), asyncio.Event()
        take = taking(Turns(1), began, go_on)
        tasks = [take(name) for name in ("a1", "a2", "a3", "b1", "b2", "c1")]
        await settle()
        assert began == ["a1"]
        go_on.set()
        await asyncio.gather(*tasks)
        return began

    assert asyncio.run(scenario()) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_several_callers_work_together_each_on_one_thing() -> None:
    async def scenario() -> None:
        began, go_on = list[str](), asyncio.Event()
        take = taking(Turns(2), began, go_on)
        tasks = [take(name) for name in ("a1", "a2", "b1", "c1")]
        await settle()
        assert began == ["a1", "b1"]
        go_on.set()
        await asyncio.gather(*tasks)

    asyncio.run(scenario())


def test_who_leaves_while_waiting_or_working_leaves_the_turn_to_others() -> None:
    async def scenario() -> None:
        began, go_on = list[str](), asyncio.Event()
        take = taking(Turns(1), began, go_on)
        first, second, third = (take(name) for name in ("a1", "b1", "c1"))
        await settle()
        second.cancel()
        first.cancel()
        await settle()
        assert began == ["a1", "c1"]
        go_on.set()
        await third
        # One that is given a turn and cancelled at the same moment gives it back.
        turns = Turns(1)
        await turns.take("a")
        waiting, last = (asyncio.create_task(turns.take(name)) for name in "bc")
        await settle()
        turns.give_back("a")
        waiting.cancel()
        await last

    asyncio.run(scenario())


class Anything(Body):
    a: Any = None


def request_of(body: bytes, caller: Tenant = SHARED) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    state = {"record": LogContext(caller=Caller(tenant=caller))}
    return Request({"type": "http", "method": "POST", "path": "/", "headers": [], "state": state}, receive)


def body_of(size: int) -> bytes:
    return b'{"a": "' + b"x" * (size - 9) + b'"}'


def test_a_large_body_waits_until_the_one_before_is_rendered_and_others_do_not() -> None:
    async def scenario() -> None:
        bodies, first = Bodies(Threads()), AsyncExitStack()
        await bodies.read_json(request_of(body_of(LARGE_BYTES + 1), ALICE), Anything, first)
        second = AsyncExitStack()
        waiting = asyncio.create_task(bodies.read_json(request_of(body_of(LARGE_BYTES + 1), BOB), Anything, second))
        assert (await bodies.read_json(request_of(body_of(LARGE_BYTES), ALICE), Anything, AsyncExitStack())).a
        assert not waiting.done()
        await first.aclose()
        assert (await waiting).a
        await second.aclose()

    asyncio.run(scenario())


def test_beside_the_engine_large_bodies_are_read_slowly_and_a_pause_follows_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def seconds(is_computing: bool) -> tuple[float, float, float]:
        loop, bodies = asyncio.get_running_loop(), Bodies(Threads(), lambda: is_computing)
        clock, later = [0.0], list[float]()
        parse = body_module._parse

        async def sleep(seconds: float) -> None:
            clock[0] += seconds

        def parse_slowly(body: bytes, model: type[Anything]) -> Anything:
            clock[0] += 10 if len(body) > LARGE_BYTES else 0
            return parse(body, model)

        monkeypatch.setattr(body_module, "_parse", parse_slowly)
        monkeypatch.setattr(asyncio, "sleep", sleep)
        monkeypatch.setattr(loop, "time", lambda: clock[0])
        monkeypatch.setattr(loop, "call_later", lambda delay_s, *_: later.append(delay_s))
        await bodies.read_json(request_of(body_of(LARGE_BYTES)), Anything, AsyncExitStack())
        small_s = clock[0]
        async with AsyncExitStack() as held:
            await bodies.read_json(request_of(body_of(8 * MIB)), Anything, held)
            large_s = clock[0] - 10
            # The request waits for the model.
            clock[0] += 100
        monkeypatch.undo()
        return small_s, large_s, later[-1]

    assert asyncio.run(seconds(False)) == (0.0, 8 / 64, 10.0)
    assert asyncio.run(seconds(True)) == (0.0, 1.0, 70.0)


def read(body: bytes) -> Anything:
    async def once() -> Anything:
        async with AsyncExitStack() as held:
            return await Bodies(Threads()).read_json(request_of(body), Anything, held)

    return asyncio.run(once())


@pytest.mark.parametrize("value", ["[]", "{}", '""', '{"x":0}', "[[]]"])
def test_a_body_of_too_many_parts_is_refused_before_it_is_parsed(value: str) -> None:
    with pytest.raises(InvalidRequest, match=f"at most {MOST_PARTS} are read"):
        read(f'{{"a": [{",".join([value] * MOST_PARTS)}]}}'.encode())


def test_a_body_of_too_many_numbers_is_refused_and_one_of_many_tokens_is_not() -> None:
    with pytest.raises(InvalidRequest, match=f"at most {MOST_VALUES} are read"):
        read(json.dumps({"a": [1] * (MOST_VALUES + 1)}).encode())
    assert len(read(json.dumps({"a": [1] * MIB}).encode()).a) == MIB


@pytest.mark.parametrize("text", ["[],{}", '"[', "\\", '\\"', 'a\\\\"b,c: ["d"]'])
def test_what_stands_in_a_text_is_no_value(text: str) -> None:
    value = text * MOST_PARTS
    assert read(json.dumps({"a": [value, [value[:100]]]}).encode()).a == [value, [value[:100]]]


USER = {"role": "user", "content": "x"}
FUNCTION = {"type": "function", "function": {"name": "f"}}
TEXT = {"type": "text", "text": "x"}
TOO_MANY = [
    ("/v1/chat/completions", "messages", {"messages": [USER] * (MAX_MESSAGES + 1)}),
    ("/v1/chat/completions", "messages.0.content", {"messages": [USER | {"content": [TEXT] * (MAX_PARTS + 1)}]}),
    ("/v1/chat/completions", "tools", {"messages": [USER], "tools": [FUNCTION] * (MAX_TOOLS + 1)}),
    ("/v1/messages", "messages", {"max_tokens": 1, "messages": [USER] * (MAX_MESSAGES + 1)}),
    ("/v1/messages", "system", {"max_tokens": 1, "messages": [USER], "system": [TEXT] * (MAX_PARTS + 1)}),
    ("/v1/responses", "input", {"input": [USER] * (MAX_MESSAGES + 1)}),
    ("/v1/responses", "tools", {"input": "x", "tools": [{"type": "function", "name": "f"}] * (MAX_TOOLS + 1)}),
]


@pytest.mark.parametrize(("path", "field", "body"), TOO_MANY, ids=lambda value: value if isinstance(value, str) else "")
def test_too_many_messages_parts_and_tools_are_refused_by_name(
    server: AppServer, path: str, field: str, body: dict[str, Any]
) -> None:
    with server.client() as client:
        answer: httpx.Response = client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{field}: must have at most ")
