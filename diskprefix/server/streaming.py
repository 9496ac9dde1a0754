"""Writes a response as server-sent events: OpenAI's chunks in OpenAI's order."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from diskprefix.engine.request import DoneEvent, FinishEvent, TextEvent
from diskprefix.errors import DiskPrefixError
from diskprefix.server.errors import error_body, one_line
from diskprefix.server.generation import Generation, ReplyEvent
from diskprefix.server.log_context import CLIENT_CLOSED_REQUEST, log_context
from diskprefix.server.replies import Api, Json, figures_reply, usage_reply

log = logging.getLogger("diskprefix")


def encode_event(payload: Json) -> bytes:
    """Returns one server-sent event. It is a single `data` line, because JSON text contains no raw newline."""
    return b"data: " + json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class ChunkWriter:
    """Turns events into chunks.

    The finish chunk of the last choice waits for the `DoneEvent`, because the last chunk of a stream has `prefix_cache`
    and `timings`. With `include_usage`, one more chunk without choices follows and has them.
    """

    def __init__(self, envelope: Json, api: Api, include_usage: bool) -> None:
        self._envelope = envelope | ({"usage": None} if include_usage else {})
        self._api = api
        self._include_usage = include_usage
        self._sent_chars: dict[int, int] = {}
        """By choice; only of choices that have begun."""
        self._held: list[Json] = []

    def chunks(self, event: ReplyEvent) -> list[Json]:
        """Returns the chunks that can be sent after `event`."""
        if isinstance(event, DoneEvent):
            return self._last(event)
        choice = self._choice(event)
        if choice is None:
            return []
        ready, self._held = [*self._held, self._chunk([choice])], []
        if isinstance(event, FinishEvent):
            self._held = [ready.pop()]
        return ready

    def _choice(self, event: TextEvent | FinishEvent) -> Json | None:
        """Returns the choice of a chunk; None while its text waits for the rest of a character or of a stop string."""
        index = event.choice
        if isinstance(event, FinishEvent):
            return {"index": index, **self._api.end, "logprobs": None, "finish_reason": event.finish_reason}
        first = index not in self._sent_chars
        if not (event.text or event.logprobs or first):
            return None
        sent = self._sent_chars.get(index, 0)
        self._sent_chars[index] = sent + len(event.text)
        logprobs = self._api.logprobs(event.logprobs, sent) if event.logprobs else None
        return {"index": index, **self._api.part(event.text, first), "logprobs": logprobs, "finish_reason": None}

    def _last(self, done: DoneEvent) -> list[Json]:
        figures = figures_reply(done)
        if self._include_usage:
            return [*self._held, {**self._chunk([]), "usage": usage_reply(done), **figures}]
        return [{**chunk, **figures} for chunk in self._held or [self._chunk([])]]

    def _chunk(self, choices: list[Json]) -> Json:
        return {**self._envelope, "choices": choices}


class EventStream(Response):
    """Streams a generation. An error after the headers becomes an `error` event, and `[DONE]` is not sent."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, writer: ChunkWriter) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in self._data():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientDisconnect:
            log_context(Request(scope)).status = CLIENT_CLOSED_REQUEST
        finally:
            self._generation.close()

    async def _data(self) -> AsyncIterator[bytes]:
        try:
            async for event in self._generation:
                for chunk in self._writer.chunks(event):
                    yield encode_event(chunk)
            yield b"data: [DONE]\n\n"
        except DiskPrefixError as error:
            log.error("a stream ended early: %s", one_line(error.message))
            yield encode_event(error_body(error))
