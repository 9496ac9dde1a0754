"""The sending of a reply: at once, while nothing comes, and when it fails. The clock is made up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any, cast

import pytest
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from diskprefix.api.dialect import Head
from diskprefix.api.openai_chat import ChatWriter
from diskprefix.api.reply import ReplyReader
from diskprefix.chat.output.format import PlainText
from diskprefix.engine.request import Event, FinishEvent, ProgressEvent, TextEvent
from diskprefix.errors import DiskPrefixError, InvalidRequest, NotReady, QueueFull
from diskprefix.server.generation import Generation
from diskprefix.server.log_context import LogContext
from diskprefix.server.streaming import EventStream, HeldResponse, PatientResponse
from tests.server.scripted import done

HEAD = Head(id="chatcmpl-1", created=1, model="m", fingerprint="fp", prompt_tokens=10, request_id="req_1")
HELLO: list[Event] = [TextEvent(0, "Hello", (1,)), FinishEvent(0, "stop"), done()]
MOST_PATIENT_S = 10
"""So long a client waits for a byte."""


class Script:
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
        self.now_s += timeout_s if event is None else self._pace_s
        return event

    def clock(self) -> float:
        return self.now_s

    def close(self) -> None:
        self.is_closed = True


class Sent:
    """The messages that a response sends, with the times of the made-up clock."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.messages: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.context = LogContext()

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


def streamed(script: Script) -> Sent:
    return sent_by(script, lambda generation: EventStream(generation, reader(), writer(), script.clock))


def whole(script: Script) -> Sent:
    return sent_by(script, lambda generation: PatientResponse(generation, reader(), writer(), script.clock))


def sent_by(script: Script, response: Callable[[Generation], Any]) -> Sent:
    sent = Sent(script)
    scope = {"type": "http", "path": "/v1/chat/completions", "headers": [], "state": {"record": sent.context}}
    asyncio.run(response(cast("Generation", script))(scope, None, sent.send))
    assert script.is_closed
    return sent


def test_the_headers_and_a_comment_of_a_stream_go_out_before_anything_is_there() -> None:
    sent = streamed(Script(ClientDisconnect()))
    assert sent.status == 200
    assert sent.body.startswith(b": ")
    assert sent.body.endswith(b"\n\n")


SILENT: list[Event] = [TextEvent(0, "", (token,)) for token in range(300)]
"""Tokens whose text is held back."""


@pytest.mark.parametrize("respond", [streamed, whole])
@pytest.mark.parametrize(
    "script",
    [Script(*[None] * 30, *HELLO), Script(*SILENT, *HELLO, pace_s=1)],
    ids=["nothing comes", "all is held back"],
)
def test_a_byte_is_sent_while_there_is_nothing_to_say(script: Script, respond: Callable[[Script], Sent]) -> None:
    sent = respond(deepcopy(script))
    waits = [later - earlier for earlier, later in zip([0.0, *sent.times], sent.times, strict=False)]
    assert sum(waits) > 20 * MOST_PATIENT_S / 2
    assert max(waits) <= MOST_PATIENT_S


def test_a_keepalive_of_a_stream_is_a_comment_between_events() -> None:
    sent = streamed(Script(None, HELLO[0], None, *HELLO[1:]))
    blocks = sent.body.split(b"\n\n")[1:]
    kinds = [b"comment" if block.startswith(b":") else block[:6] for block in blocks if block]
    assert kinds == [b"comment", b"data: ", b"data: ", b"comment", b"data: ", b"data: "]
    assert blocks[-2] == b"data: [DONE]"
    assert sent.is_whole


@pytest.mark.parametrize("before", [[], [None], [HELLO[0]]])
def test_an_error_of_a_stream_is_an_event_without_done(before: list[Any]) -> None:
    sent = streamed(Script(*before, InvalidRequest("no", param="messages", code="bad")))
    last = json.loads(sent.body.split(b"\n\n")[-2].removeprefix(b"data: "))
    assert last == {"error": {"message": "no", "type": "invalid_request_error", "param": "messages", "code": "bad"}}
    assert b"[DONE]" not in sent.body
    assert sent.is_whole
    assert sent.context.error == "no"


def test_a_quick_reply_is_an_ordinary_response() -> None:
    sent = whole(Script(*HELLO))
    assert json.loads(sent.body)["choices"][0]["message"]["content"] == "Hello"
    assert dict(sent.messages[0]["headers"])[b"content-length"] == str(len(sent.body)).encode()


def test_an_early_error_has_its_status() -> None:
    sent = whole(Script(InvalidRequest("no", param="messages")))
    assert sent.status == 400
    assert json.loads(sent.body)["error"]["param"] == "messages"


def test_a_slow_reply_is_json_behind_blanks() -> None:
    sent = whole(Script(None, None, *HELLO))
    assert b"content-length" not in dict(sent.messages[0]["headers"])
    assert dict(sent.messages[0]["headers"])[b"content-type"] == b"application/json"
    assert sent.body.startswith(b"\n\n{")
    assert json.loads(sent.body)["choices"][0]["message"]["content"] == "Hello"
    assert sent.is_whole


def test_a_late_error_of_a_whole_reply_breaks_the_body_off() -> None:
    """A client takes that for a failure of the connection, and never for a reply."""
    sent = whole(Script(None, HELLO[0], DiskPrefixError("the daemon is stopping")))
    assert sent.status == 200
    assert sent.body.strip() == b""
    assert not sent.is_whole
    assert sent.context.error == "the daemon is stopping"


@pytest.mark.parametrize("respond", [streamed, whole])
@pytest.mark.parametrize("before", [[], [None], [HELLO[0]]])
def test_a_client_that_left_is_noted(respond: Callable[[Script], Sent], before: list[Any]) -> None:
    assert respond(Script(*before, ClientDisconnect())).context.status == 499


@pytest.mark.parametrize("respond", [streamed, whole])
@pytest.mark.parametrize("before", [[], [None]])
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
    error: DiskPrefixError, outcome: str, respond: Callable[[Script], Sent], before: list[Any]
) -> None:
    context = respond(Script(*before, error)).context
    context.wants_reply = True
    assert (context.outcome, context.status) == (outcome, error.http_status)


def test_a_request_that_cannot_be_served_after_a_long_wait_counts_as_refused() -> None:
    async def refused() -> Response:
        raise NotReady("the model could not be loaded")

    async def never() -> Any:
        await asyncio.Event().wait()

    async def test() -> None:
        context = LogContext(wants_reply=True)
        scope = {"type": "http", "path": "/v1/completions", "headers": [], "state": {"record": context}}
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        response = HeldResponse(asyncio.create_task(refused()), is_stream=False)
        await response(scope, never, send)
        assert sent[0]["status"] == 200
        assert (context.outcome, context.status) == ("rejected", 503)

    asyncio.run(test())


def test_progress_is_told_in_chunks_without_choices() -> None:
    sent = streamed(Script(ProgressEvent(100, 20, 60, 90, 12.345), *HELLO))
    first = json.loads(sent.body.split(b"\n\n")[1].removeprefix(b"data: "))
    assert first["choices"] == []
    assert first["object"] == "chat.completion.chunk"
    assert first["prompt_progress"] == {"total": 100, "cache": 20, "processed": 60, "time_ms": 12.35}
