"""Large bodies: what is read, parsed and rendered at one time is bounded, and small requests do not wait for it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from diskprefix.api.fields import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, Body
from diskprefix.errors import InvalidRequest, QueueFull
from diskprefix.json_values import MOST_PARTS, MOST_VALUES
from diskprefix.nouns import SHARED, Tenant
from diskprefix.server.body import Bodies
from diskprefix.server.threads import QueuePlace, Threads
from tests.server.scripted import AppServer

MIB = 1 << 20


class Anything(Body):
    a: Any = None


def request_of(*chunks: bytes, more: bool = False) -> Request:
    """A request whose body comes in these pieces; with `more`, it does not end."""
    sent = iter(chunks)

    async def receive() -> dict[str, Any]:
        piece = next(sent, None)
        if piece is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": piece, "more_body": more or piece is not chunks[-1]}

    return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)


def body_of(text: str, size: int) -> bytes:
    """A body of `size` bytes."""
    return b'{"a": "' + text.encode() * ((size - 9) // len(text)) + b'"}'


async def read(bodies: Bodies, body: bytes, place: QueuePlace) -> Anything:
    return await bodies.read_json(request_of(body), Anything, place)


def test_a_large_body_waits_until_the_one_before_is_rendered_and_a_small_one_does_not() -> None:
    async def scenario() -> None:
        bodies, first, second, small = (
            Bodies(2 * MIB, Threads()),
            QueuePlace(SHARED),
            QueuePlace(SHARED),
            QueuePlace(SHARED),
        )
        await read(bodies, body_of("x", 2 * MIB), first)
        waiting = asyncio.create_task(read(bodies, body_of("x", 2 * MIB), second))
        assert (await read(bodies, b'{"a": 1}', small)).a == 1
        assert not waiting.done()
        first.close()
        assert (await waiting).a
        second.close()

    asyncio.run(scenario())


def test_what_waits_for_memory_and_is_cancelled_takes_none() -> None:
    async def scenario() -> None:
        bodies, first, second = Bodies(2 * MIB, Threads()), QueuePlace(SHARED), QueuePlace(SHARED)
        await read(bodies, body_of("x", 2 * MIB), first)
        waiting = asyncio.create_task(read(bodies, body_of("x", 2 * MIB), QueuePlace(SHARED)))
        while not bodies._memory._waiting:
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        first.close()
        await read(bodies, body_of("x", 2 * MIB), second)

    asyncio.run(scenario())


def test_many_large_bodies_of_one_caller_delay_that_of_another_by_one() -> None:
    async def scenario() -> None:
        bodies, done = Bodies(2 * MIB, Threads()), list[str]()

        async def one(caller: Tenant, name: str) -> None:
            with QueuePlace(caller) as place:
                await read(bodies, body_of("x", 2 * MIB), place)
                done.append(name)

        first = QueuePlace(SHARED)
        await read(bodies, body_of("x", 2 * MIB), first)
        tasks = [asyncio.create_task(one(SHARED, "a")) for _ in range(4)]
        while len(bodies._memory._waiting) < 4:
            await asyncio.sleep(0)
        tasks.append(asyncio.create_task(one(Tenant(("b",)), "b")))
        while len(bodies._memory._waiting) < 5:
            await asyncio.sleep(0)
        first.close()
        await asyncio.gather(*tasks)
        assert "b" in done[:2]

    asyncio.run(scenario())


def test_bodies_that_arrive_slowly_leave_room_for_small_ones() -> None:
    async def scenario() -> None:
        bodies = Bodies(MIB, Threads())
        slow = [
            asyncio.create_task(bodies.read_json(request_of(b"x" * (MIB - 1), more=True), Anything, QueuePlace(SHARED)))
            for _ in range(4)
        ]
        while bodies._arriving_bytes.total() < 4 * (MIB - 1):
            await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await read(bodies, body_of("x", MIB // 2), QueuePlace(SHARED))
        assert (await read(bodies, b'{"a": 1}', QueuePlace(SHARED))).a == 1
        for task in slow:
            task.cancel()
        await asyncio.wait(slow)
        assert not bodies._arriving_bytes
        await read(bodies, body_of("x", MIB // 2), QueuePlace(SHARED))

    asyncio.run(scenario())


def test_a_large_body_is_read_more_slowly_while_the_engine_computes() -> None:
    async def room_after() -> float:
        bodies, started = Bodies(4 * MIB, Threads(), lambda: True), asyncio.get_running_loop().time()
        await read(bodies, body_of("x", 2 * MIB), QueuePlace(SHARED))
        return bodies._read_until - started

    assert asyncio.run(room_after()) >= 0.9 * 2 / 8


@pytest.mark.parametrize("value", ["[]", "{}", '""', '{"x":0}', "[[]]"])
def test_a_body_of_too_many_parts_is_refused_before_it_is_parsed(value: str) -> None:
    body = f'{{"a": [{",".join([value] * MOST_PARTS)}]}}'.encode()
    with pytest.raises(InvalidRequest, match=f"at most {MOST_PARTS} are read"):
        asyncio.run(read(Bodies(32 * MIB, Threads()), body, QueuePlace(SHARED)))


def test_a_body_of_too_many_numbers_is_refused_and_one_of_many_tokens_is_not() -> None:
    bodies = Bodies(32 * MIB, Threads())
    with pytest.raises(InvalidRequest, match=f"at most {MOST_VALUES} are read"):
        asyncio.run(read(bodies, json.dumps({"a": [1] * (MOST_VALUES + 1)}).encode(), QueuePlace(SHARED)))
    assert len(asyncio.run(read(bodies, json.dumps({"a": [1] * MIB}).encode(), QueuePlace(SHARED))).a) == MIB


@pytest.mark.parametrize("text", ["[],{}", '"[', "\\", '\\"', 'a\\\\"b,c: ["d"]'])
def test_what_stands_in_a_text_is_no_value(text: str) -> None:
    value = text * MOST_PARTS
    found = asyncio.run(
        read(Bodies(32 * MIB, Threads()), json.dumps({"a": [value, [value[:100]]]}).encode(), QueuePlace(SHARED))
    )
    assert found.a == [value, [value[:100]]]


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
