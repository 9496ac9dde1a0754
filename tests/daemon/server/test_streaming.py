"""The sending of a reply: at once, while nothing comes, and when it fails; and events that wait for a client: what is
bounded, what is joined, and who else is served meanwhile. The clock is made up."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from diskprefix.daemon.api.dialect import Head
from diskprefix.daemon.api.openai_chat import ChatWriter
from diskprefix.daemon.api.reply import EndEvent, ReplyReader
from diskprefix.daemon.chat.output.choose_format import PlainText
from diskprefix.daemon.engine.request import (
    ErrorEvent,
    Event,
    FinishEvent,
    GenerateRequest,
    ProgressEvent,
    TextEvent,
    TokenLogprob,
)
from diskprefix.daemon.server import generation, streaming
from diskprefix.daemon.server.generation import EventBuffer, Generation
from diskprefix.daemon.server.keys import Caller
from diskprefix.daemon.server.log_context import LogContext
from diskprefix.daemon.server.streaming import EventStream, KeepAliveResponse, json_reply, respond_or_keep_alive
from diskprefix.errors import DiskPrefixError, InvalidRequest, NotReady, QueueFull
from tests.daemon.engine.driving import Cancelled
from tests.daemon.server.daemon_process import open_raw, wait_until
from tests.daemon.server.scripted import (
    AppServer,
    Emit,
    Script,
    ScriptedEngine,
    done,
    events_of,
    read_all,
    say_hello,
    scripted_app,
)

HEAD = Head(id="chatcmpl-1", created=1, model="m", fingerprint="fp", prompt_tokens=10, request_id="req_1")
HELLO: list[Event] = [TextEvent(0, "Hello", (1,)), FinishEvent(0, "stop"), done()]
MOST_PATIENT_S = 10
"""So long a client waits for a byte."""


class Prepared:
    """Stands in for a `Generation`: events, errors that are raised, and None where nothing comes in time.

    Each event takes `pace_s` seconds.
    """

    def __init__(self, *events: Event | Exception | None, pace_s: float = 0) -> None:
        self._events = list(events)
        self._pace_s = pace_s
        self.now_s = 0.0
        self.is_closed = False

    async def next(self, timeout_s: float) -> Event | None:
        event = self._events.pop(0)
        if isinstance(event, Exception):
            raise event
        # For those who wait by the real clock.
        await asyncio.sleep(timeout_s if event is None and timeout_s < 1 else 0)
        self.now_s += timeout_s if event is None else self._pace_s
        return event

    def clock(self) -> float:
        return self.now_s

    def close(self) -> None:
        self.is_closed = True


class Sent:
    def __init__(self, script: Prepared) -> None:
        self._script = script
        self.messages: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.context = LogContext(caller=Caller(name="alice"))

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        self.times.append(self._script.now_s)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages[1:])

    @property
    def is_whole(self) -> bool:
        return not self.messages[-1].get("more_body", False)


def writer() -> ChatWriter:
    return ChatWriter(HEAD, include_usage=False, with_logprobs=False)


def reader() -> ReplyReader:
    return ReplyReader(lambda: PlainText().parser((), ""), "call_")


async def write(work: Callable[[], bytes]) -> bytes:
    return work()


def streamed(script: Prepared) -> Sent:
    return sent_by(script, lambda generation: EventStream(generation, reader(), writer(), write, script.clock))


def whole(script: Prepared) -> Sent:
    async def respond(scope: Scope, _receive: Receive, send: Send) -> None:
        preparing = asyncio.create_task(json_reply(cast("Generation", script), reader(), writer(), write))
        response = await respond_or_keep_alive(preparing, is_stream=False)
        await response(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(streaming, "KEEPALIVE_S", 0.01)
        return sent_by(script, lambda _: respond)


def sent_by(script: Prepared, response: Callable[[Generation], Any]) -> Sent:
    sent = Sent(script)
    scope = {"type": "http", "path": "/v1/chat/completions", "headers": [], "state": {"record": sent.context}}
    asyncio.run(response(cast("Generation", script))(scope, None, sent.send))
    assert script.is_closed
    return sent


SILENT: list[Event] = [TextEvent(0, "", (token,)) for token in range(300)]
"""Tokens whose text is held back."""


@pytest.mark.parametrize(
    "script",
    [Prepared(*[None] * 30, *HELLO), Prepared(*SILENT, *HELLO, pace_s=1)],
    ids=["nothing comes", "all is held back"],
)
def test_a_byte_is_sent_while_there_is_nothing_to_say(script: Prepared) -> None:
    sent = streamed(deepcopy(script))
    waits = [later - earlier for earlier, later in zip([0.0, *sent.times], sent.times, strict=False)]
    assert sum(waits) > 20 * MOST_PATIENT_S / 2
    assert max(waits) <= MOST_PATIENT_S


def test_a_keepalive_of_a_stream_is_an_empty_chunk_between_events() -> None:
    """OpenCode counts no comments, and ends a stream after a time without an event."""
    sent = streamed(Prepared(None, HELLO[0], None, *HELLO[1:]))
    blocks = sent.body.split(b"\n\n")[1:]
    assert blocks[-2] == b"data: [DONE]"
    chunks = [json.loads(block.removeprefix(b"data: ")) for block in blocks[:-2]]
    empty = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}
    assert [chunk["choices"] == [empty] for chunk in chunks] == [True, False, False, True, False]
    assert sent.is_whole


def test_a_keepalive_is_no_chunk_of_a_choice_that_has_ended() -> None:
    writer = ChatWriter(HEAD, include_usage=False, with_logprobs=False)
    sent = []
    for ended in ((), (1,), (0,)):
        for choice in ended:
            writer.events(EndEvent(choice, "stop"))
        chunk = json.loads(writer.keepalive().removeprefix(b"data: "))
        sent.append([each["index"] for each in chunk["choices"]])
    assert sent == [[0], [0], []]


@pytest.mark.parametrize("before", [[], [None], [HELLO[0]]])
def test_an_error_of_a_stream_is_an_event_without_done(before: list[Any]) -> None:
    sent = streamed(Prepared(*before, InvalidRequest("no", param="messages", code="bad")))
    last = json.loads(sent.body.split(b"\n\n")[-2].removeprefix(b"data: "))
    assert last == {"error": {"message": "no", "type": "invalid_request_error", "param": "messages", "code": "bad"}}
    assert b"[DONE]" not in sent.body
    assert sent.is_whole
    assert sent.context.error == "no"


@pytest.mark.parametrize("num_waits", [0, 2])
def test_a_slow_reply_is_json_after_blanks(num_waits: int) -> None:
    sent = whole(Prepared(*[None] * num_waits, *HELLO))
    headers = dict(sent.messages[0]["headers"])
    assert headers.get(b"content-length") == (None if num_waits else str(len(sent.body)).encode())
    assert headers[b"content-type"] == b"application/json"
    assert sent.body.lstrip(b"\n").startswith(b"{")
    assert sent.body.startswith(b"\n") == (num_waits > 0)
    assert json.loads(sent.body)["choices"][0]["message"]["content"] == "Hello"
    assert sent.is_whole


@pytest.mark.parametrize(
    ("error", "is_repeated"),
    [
        (InvalidRequest("no", param="messages", code="constraint_too_complex"), False),
        (DiskPrefixError("it failed"), True),
        (NotReady("the daemon is stopping"), True),
        (QueueFull("full", retry_after_s=1), True),
    ],
)
def test_a_late_error_is_json_and_one_that_may_pass_breaks_off_the_body(
    error: DiskPrefixError, is_repeated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients repeat a request whose connection broke."""
    sent = whole(Prepared(None, None, HELLO[0], error))
    assert (sent.status, sent.is_whole) == (200, not is_repeated)
    assert sent.body.startswith(b"\n")
    told = json.loads(sent.body)["error"]
    assert (told["message"], told["param"], told["code"]) == (error.message, error.param, error.code)
    assert sent.context.error == error.message
    assert f"{sent.context.request_id} of alice" in caplog.text


def test_a_client_leaving_at_a_ready_response_closes_the_generation() -> None:
    script = Prepared(ClientDisconnect())

    async def respond(scope: Scope, _receive: Receive, send: Send) -> None:
        both = asyncio.Event()

        async def prepare() -> EventStream:
            await both.wait()
            return EventStream(cast("Generation", script), reader(), writer(), write, script.clock)

        async def receive() -> Message:
            await both.wait()
            return {"type": "http.disconnect"}

        held = KeepAliveResponse(asyncio.create_task(prepare()), is_stream=True)
        asyncio.get_running_loop().call_later(0.01, both.set)
        await held(scope, receive, send)

    assert sent_by(script, lambda _: respond).context.status == 499


ON_ITS_WAY = [(streamed, []), (streamed, [None]), (streamed, [HELLO[0]]), (whole, [None, None])]
"""An error of a whole reply before its first sign of life is raised."""


@pytest.mark.parametrize(("respond", "before"), ON_ITS_WAY)
def test_a_client_that_left_is_noted(respond: Callable[[Prepared], Sent], before: list[Any]) -> None:
    assert respond(Prepared(*before, ClientDisconnect())).context.status == 499


@pytest.mark.parametrize(("respond", "before"), ON_ITS_WAY)
@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (NotReady("the daemon is stopping"), "rejected"),
        (QueueFull("full", retry_after_s=1), "rejected"),
        (InvalidRequest("no"), "invalid"),
        (DiskPrefixError("it failed"), "failed"),
    ],
)
def test_an_error_counts_as_what_it_is_also_behind_a_status_of_200(
    error: DiskPrefixError, outcome: str, respond: Callable[[Prepared], Sent], before: list[Any]
) -> None:
    context = respond(Prepared(*before, error)).context
    context.wants_reply = True
    assert (context.outcome, context.status) == (outcome, error.http_status)


def test_progress_is_told_in_chunks_without_choices() -> None:
    sent = streamed(Prepared(ProgressEvent(100, 20, 60, 90, 12.345, "disk"), *HELLO))
    first = events_of(sent.body.decode())[0]
    assert (first["choices"], first["object"]) == ([], "chat.completion.chunk")
    told = {"total": 100, "cache": 20, "processed": 60, "time_ms": 12.35, "source": "disk"}
    assert first["prompt_progress"] == told


CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hello"}]}
NUM_EVENTS = 1000
NUM_PUTS = 100_000
TEXT = "0123456789" * 100


def taken(events: list[Event | None], num_puts: int | None = None) -> list[Event | None]:
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


def test_waiting_texts_of_a_choice_are_joined_in_order() -> None:
    a, b = TokenLogprob(1, b"a", -1.0), TokenLogprob(2, b"b", -2.0)
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


def test_an_event_that_does_not_fit_becomes_the_last_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MAX_WAITING_BYTES", 10_000)
    text = "x" * (1000 - sys.getsizeof("") - generation._BYTES_PER_EVENT)
    *texts, last = taken([TextEvent(0, text, ())] * 12 + [done()], num_puts=10)
    assert texts == [TextEvent(0, text * 10, ())]
    assert isinstance(last, ErrorEvent)
    assert last.error.code == "client_too_slow"
    wide = "\N{GRINNING FACE}" * 2500
    assert sys.getsizeof(wide) > generation.MAX_WAITING_BYTES > len(wide)
    taken([TextEvent(0, wide, ())], num_puts=0)


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


def test_taken_events_make_room() -> None:
    async def run() -> None:
        buffer = EventBuffer(asyncio.get_running_loop())
        text = TextEvent(0, "x" * (generation.MAX_WAITING_BYTES // 2 + 1), ())
        for _ in range(5):
            assert buffer.put(text)
            assert await buffer.get() == text
        assert buffer.put(text)
        assert not buffer.put(text)

    asyncio.run(run())


@contextmanager
def small_buffers(model: Path, script: Script) -> Iterator[tuple[AppServer, ScriptedEngine]]:
    engine = ScriptedEngine(script)
    with scripted_app(model, engine) as server:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield server, engine


def stream_without_reading(server: AppServer, **fields: Any) -> socket.socket:
    return open_raw(server.port, BODY | {"stream": True} | fields, Connection="close")


def read_events(connection: socket.socket) -> list[Any]:
    return events_of(read_all(connection).decode())


def many_texts(_request: GenerateRequest, emit: Emit, _is_cancelled: Callable[[], bool]) -> None:
    for token in range(NUM_EVENTS):
        emit(TextEvent(0, TEXT, (token,)))
    emit(FinishEvent(0, "stop"))
    emit(done())


def test_a_slow_reader_gets_all_text_in_fewer_chunks(chat_model: Path) -> None:
    emitted = threading.Event()

    def talk(*request: Any) -> None:
        many_texts(*request)
        emitted.set()

    with (
        small_buffers(chat_model, talk) as (server, engine),
        server.client() as client,
        stream_without_reading(server) as connection,
    ):
        assert emitted.wait(30)
        engine.script = say_hello
        assert client.post(CHAT, json=BODY).status_code == 200
        chunks = read_events(connection)
    deltas = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
    assert "".join(deltas) == TEXT * NUM_EVENTS
    assert len(chunks) < NUM_EVENTS / 2
    assert chunks[-1]["prefix_cache"]["scope"] == "auto:30"


def test_a_client_that_lets_too_much_wait_is_cancelled_and_told_so(chat_model: Path) -> None:
    alternatives = tuple(TokenLogprob(token, b"x", -1.0) for token in range(20))

    def talk(_request: GenerateRequest, emit: Emit, is_cancelled: Callable[[], bool]) -> None:
        for token in range(100_000):
            if is_cancelled():
                raise Cancelled
            emit(TextEvent(0, "x", (token,), (TokenLogprob(0, b"x", -1.0, alternatives),)))

    with (
        small_buffers(chat_model, talk) as (server, engine),
        server.client() as client,
        stream_without_reading(server, logprobs=True, top_logprobs=20) as connection,
    ):
        assert engine.cancelled.wait(30)
        engine.script = say_hello
        assert client.post(CHAT, json=BODY).status_code == 200
        *_, last = read_events(connection)
    assert last["error"]["code"] == "client_too_slow"


def test_a_client_that_never_reads_is_given_up(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diskprefix.daemon.server.process.listener.STALLED_S", 1)
    with (
        small_buffers(chat_model, many_texts) as (server, engine),
        server.client() as client,
        stream_without_reading(server),
    ):
        assert engine.entered.wait(30)
        ended = f'diskprefix_http_requests_total{{route="{CHAT}"'
        wait_until(lambda: ended in client.get("/metrics").text, "the client is taken for gone")
