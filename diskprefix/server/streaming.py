"""Writes a response as server-sent events: OpenAI's chunks in OpenAI's order."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from diskprefix.engine.request import DoneEvent, Event, FinishEvent
from diskprefix.errors import DiskPrefixError
from diskprefix.server.errors import error_body, one_line
from diskprefix.server.generation import Generation
from diskprefix.server.replies import cache_reply, timings_reply, usage_reply

log = logging.getLogger("diskprefix")

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"


def encode_event(payload: Json) -> bytes:
    """Returns one server-sent event. It is a single `data` line, because JSON text contains no raw newline."""
    return b"data: " + json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class ChunkWriter:
    """Turns events into chunks. `choice_of` writes the choices as one of the two APIs wants them.

    The finish chunk of the last choice waits for the `DoneEvent`, because the last chunk of a stream has `prefix_cache`
    and `timings`. With `include_usage`, one more chunk without choices follows and has them.
    """

    def __init__(self, envelope: Json, choice_of: Callable[[Event], Json | None], include_usage: bool) -> None:
        self._envelope = envelope
        self._choice_of = choice_of
        self._include_usage = include_usage
        self._held: Json | None = None

    def chunks(self, event: Event) -> list[Json]:
        """Returns the chunks that can be sent after `event`."""
        if isinstance(event, DoneEvent):
            return self._last(event)
        choice = self._choice_of(event)
        if choice is None:
            return []
        ready = self._release()
        if isinstance(event, FinishEvent):
            self._held = choice
        else:
            ready.append(self._chunk([choice]))
        return ready

    def _last(self, done: DoneEvent) -> list[Json]:
        figures = {"prefix_cache": cache_reply(done), "timings": timings_reply(done)}
        if self._include_usage:
            return [*self._release(), {**self._chunk([]), "usage": usage_reply(done), **figures}]
        choices = [self._held] if self._held else []
        return [{**self._chunk(choices), **figures}]

    def _release(self) -> list[Json]:
        held, self._held = self._held, None
        return [self._chunk([held])] if held else []

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._envelope, "choices": choices}
        if self._include_usage:
            chunk["usage"] = None
        return chunk


class EventStream(Response):
    """Streams a generation. An error after the headers becomes an `error` event, and `[DONE]` is not sent."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, first: Event, writer: ChunkWriter, on_done: Callable[[DoneEvent], None]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._first = first
        self._writer = writer
        self._on_done = on_done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in self._data():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientDisconnect:
            scope["state"]["record"].disconnected = True
        finally:
            self._generation.close()

    async def _data(self) -> AsyncIterator[bytes]:
        try:
            async for event in self._events():
                for chunk in self._writer.chunks(event):
                    yield encode_event(chunk)
            yield DONE
        except DiskPrefixError as error:
            log.error("a stream ended early: %s", one_line(error.message))
            yield encode_event(error_body(error))

    async def _events(self) -> AsyncIterator[Event]:
        yield self._first
        async for event in self._generation:
            if isinstance(event, DoneEvent):
                self._on_done(event)
            yield event
