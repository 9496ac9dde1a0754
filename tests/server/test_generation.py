"""Events that wait for a client: what is bounded, what is joined, and who else is served meanwhile."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from diskprefix.engine.request import ErrorEvent, Event, FinishEvent, GenerateRequest, TextEvent, TokenLogprob
from diskprefix.server import generation
from diskprefix.server.generation import EventBuffer
from tests.engine.driving import Cancelled
from tests.server.daemon_process import wait_until
from tests.server.scripted import AppServer, Emit, ScriptedEngine, done, say_hello, scripted_app

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
NUM_EVENTS = 1000
NUM_PUTS = 100_000
TEXT = "0123456789" * 100


def taken(events: list[Event | None], num_puts: int | None = None) -> list[Event | None]:
    """Returns the events of a buffer that all of `events` were put into before."""

    async def run() -> list[Event | None]:
        buffer = EventBuffer(asyncio.get_running_loop())
        fitted = [buffer.put(event) for event in events]
        if num_puts is not None:
            assert fitted == [True] * num_puts + [False] * (len(events) - num_puts)
        result = []
        while buffer._waiting:
            result.append(await buffer.get())
        return result

    return asyncio.run(run())


def test_waiting_texts_of_one_choice_are_joined_and_keep_their_order_among_the_others() -> None:
    a, b = TokenLogprob(1, "a", -1.0), TokenLogprob(2, "b", -2.0)
    events: list[Event | None] = [
        TextEvent(0, "a", (1,), (a,)),
        TextEvent(0, "b", (2,), (b,)),
        FinishEvent(0, "stop"),
        TextEvent(1, "c", (3,)),
        TextEvent(2, "d", (4,)),
        TextEvent(2, "", (5,)),
        None,
    ]
    assert taken(events) == [
        TextEvent(0, "ab", (1, 2), (a, b)),
        FinishEvent(0, "stop"),
        TextEvent(1, "c", (3,)),
        TextEvent(2, "d", (4, 5)),
        None,
    ]


def test_what_does_not_fit_becomes_an_error_and_nothing_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MAX_WAITING_BYTES", 10_000)
    text = "x" * (1000 - sys.getsizeof("") - generation._BYTES_PER_EVENT)
    *texts, last = taken([TextEvent(0, text, ())] * 12 + [done()], num_puts=10)
    assert texts == [TextEvent(0, text * 10, ())]
    assert isinstance(last, ErrorEvent)
    assert last.error.code == "client_too_slow"


class CountedText(str):
    """A text, or what is joined from it, that counts the characters that `+` copies."""

    num_copied: ClassVar[int]

    def __add__(self, other: str) -> CountedText:
        CountedText.num_copied += len(self) + len(other)
        assert CountedText.num_copied < 10 * NUM_PUTS, "the work grows faster than the number of texts"
        return CountedText(str(self) + str(other))


def test_putting_copies_nothing_of_what_waits_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MAX_WAITING_BYTES", 1 << 40)
    CountedText.num_copied = 0
    events: list[Event | None] = [TextEvent(0, CountedText("x"), (token,)) for token in range(NUM_PUTS)]
    assert taken(events, num_puts=NUM_PUTS) == [TextEvent(0, "x" * NUM_PUTS, tuple(range(NUM_PUTS)))]


def test_the_limit_counts_bytes_and_not_characters() -> None:
    text = "\N{GRINNING FACE}" * (generation.MAX_WAITING_BYTES // 4)
    assert sys.getsizeof(text) > generation.MAX_WAITING_BYTES
    taken([TextEvent(0, text, ())], num_puts=0)


def test_what_was_taken_makes_room() -> None:
    async def run() -> None:
        buffer = EventBuffer(asyncio.get_running_loop())
        text = TextEvent(0, "x" * (generation.MAX_WAITING_BYTES // 2 + 1), ())
        for _ in range(5):
            assert buffer.put(text)
            assert await buffer.get() == text
        assert buffer.put(text)
        assert not buffer.put(text)

    asyncio.run(run())


def stream_without_reading(server: AppServer, **fields: Any) -> socket.socket:
    connection = socket.socket()
    connection.settimeout(30)
    # Small buffers in the kernel: it soon takes no more.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    body = json.dumps(HELLO | {"stream": True} | fields).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def read_events(connection: socket.socket) -> list[Any]:
    received = b""
    while data := connection.recv(1 << 20):
        received += data
    lines = received.split(b"\r\n\r\n", 1)[1].replace(b"\r\n", b"\n").split(b"\n")
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


def test_a_client_that_reads_late_gets_the_whole_text_in_fewer_chunks_and_nobody_waits_for_it(chat_model: Path) -> None:
    emitted = threading.Event()

    def talk(_request: GenerateRequest, emit: Emit, _is_cancelled: Callable[[], bool]) -> None:
        for token in range(NUM_EVENTS):
            emit(TextEvent(0, TEXT, (token,)))
        emit(FinishEvent(0, "stop"))
        emit(done())
        emitted.set()

    engine = ScriptedEngine(talk)
    with scripted_app(chat_model, engine) as server, server.client() as client:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with stream_without_reading(server) as connection:
            assert emitted.wait(30)
            engine.script = say_hello
            assert client.post(CHAT, json=HELLO).status_code == 200
            chunks = read_events(connection)
    deltas = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
    assert "".join(deltas) == TEXT * NUM_EVENTS
    assert len(chunks) < NUM_EVENTS / 2
    assert chunks[-1]["prefix_cache"]["scope"] == "auto:30"


def test_a_client_that_lets_too_much_wait_is_cancelled_and_told_so(chat_model: Path) -> None:
    alternatives = tuple(TokenLogprob(token, "x", -1.0) for token in range(20))
    logprob = TokenLogprob(0, "x", -1.0, alternatives)

    def talk(_request: GenerateRequest, emit: Emit, is_cancelled: Callable[[], bool]) -> None:
        for token in range(100_000):
            if is_cancelled():
                raise Cancelled
            emit(TextEvent(0, "x", (token,), (logprob,)))

    engine = ScriptedEngine(talk)
    with scripted_app(chat_model, engine) as server, server.client() as client:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with stream_without_reading(server, logprobs=True, top_logprobs=20) as connection:
            assert engine.cancelled.wait(30)
            engine.script = say_hello
            assert client.post(CHAT, json=HELLO).status_code == 200
            *_, last = read_events(connection)
        assert last["error"]["code"] == "client_too_slow"


def test_a_client_that_never_reads_is_given_up(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diskprefix.server.process.listener.STALLED_S", 1)

    def talk(_request: GenerateRequest, emit: Emit, _is_cancelled: Callable[[], bool]) -> None:
        for token in range(NUM_EVENTS):
            emit(TextEvent(0, TEXT, (token,)))
        emit(done())

    engine = ScriptedEngine(talk)
    with scripted_app(chat_model, engine) as server, server.client() as client:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with stream_without_reading(server):
            assert engine.entered.wait(30)
            ended = f'diskprefix_http_requests_total{{route="{CHAT}"'
            wait_until(lambda: ended in client.get("/metrics").text, "the client is taken for gone")
