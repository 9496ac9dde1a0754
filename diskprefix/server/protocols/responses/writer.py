"""Writes the reply of OpenAI's responses API: the response, or the events of its stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from diskprefix.chat.output.events import ContentDelta, ReasoningDelta, ToolCallDelta
from diskprefix.engine.request import DoneEvent
from diskprefix.errors import DiskPrefixError
from diskprefix.server.errors import fault_of
from diskprefix.server.protocols.dialect import Head, Json, ServerSentEvent
from diskprefix.server.protocols.figures import figures_reply, written_tokens
from diskprefix.server.protocols.reply import (
    CallBegin,
    Choice,
    DeltaEvent,
    EndEvent,
    EndReason,
    Reply,
    ReplyDelta,
    ReplyEvent,
)
from diskprefix.server.protocols.responses.output import ItemStatus, OutputItems


class ResponseWriter:
    """`echo` is what the response repeats of the request. `keep` stores a response that is complete."""

    def __init__(
        self, head: Head, echo: Mapping[str, object], *, reasoning_is_summary: bool, keep: Callable[[Json], None] | None
    ) -> None:
        self._head = head
        self._echo = echo
        self._keep = keep
        self._items = OutputItems(head.id, reasoning_is_summary=reasoning_is_summary)
        self._num_events = 0
        self._end = EndEvent(0, "stop")

    def whole(self, reply: Reply) -> Json:
        choice = reply.choices[0]
        self._items.add(_deltas(choice), choice.tokens)
        self._end = EndEvent(0, choice.reason, choice.stop, choice.reasoning_tokens)
        self._items.end(_item_status(choice.reason))
        return self._complete(reply.done)

    def begin(self) -> Sequence[ServerSentEvent]:
        response = self._response("in_progress")
        return self._numbered(
            [{"type": "response.created", "response": response}, {"type": "response.in_progress", "response": response}]
        )

    def events(self, event: ReplyEvent) -> Sequence[ServerSentEvent]:
        if isinstance(event, DeltaEvent):
            return self._numbered(self._items.add(event.deltas, event.tokens))
        if isinstance(event, EndEvent):
            self._end = event
            return self._numbered(self._items.end(_item_status(event.reason)))
        if isinstance(event, DoneEvent):
            response = self._complete(event)
            return self._numbered([{"type": f"response.{response['status']}", "response": response}])
        return ()

    def keepalive(self) -> bytes:
        """An event: Codex does not count comments, and gives up after five minutes without an event."""
        event = {"type": "response.in_progress", "response": self._response("in_progress")}
        return b"".join(sent.encode() for sent in self._numbered([event]))

    def failure(self, error: DiskPrefixError) -> Sequence[ServerSentEvent]:
        fault = fault_of(error)
        # The only one of OpenAI's codes that says that the server failed.
        failed = self._response("failed") | {"error": {"code": "server_error", "message": fault.message}}
        return self._numbered([{"type": "response.failed", "response": failed}])

    def _numbered(self, events: Sequence[Json]) -> list[ServerSentEvent]:
        sent = []
        for event in events:
            sent.append(ServerSentEvent(event | {"sequence_number": self._num_events}, event["type"]))
            self._num_events += 1
        return sent

    def _complete(self, done: DoneEvent) -> Json:
        is_cut = self._end.reason == "length"
        response = self._response("incomplete" if is_cut else "completed") | {
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items.done,
            "usage": _usage(done, self._end.reasoning_tokens),
            **figures_reply(done, self._head.clamped_to),
        }
        if self._keep is not None:
            self._keep(response)
        return response

    def _response(self, status: str) -> Json:
        """Returns a response without output."""
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self._head.model,
            "output": [],
            "service_tier": "default",
            "store": self._keep is not None,
            "system_fingerprint": self._head.fingerprint,
            "usage": None,
            **self._echo,
        }


def _deltas(choice: Choice) -> list[ReplyDelta]:
    """Returns a whole reply as deltas."""
    deltas: list[ReplyDelta] = [ReasoningDelta(choice.reasoning)] if choice.reasoning else []
    deltas += [ContentDelta(choice.content)] if choice.content else []
    for index, call in enumerate(choice.calls):
        deltas += [CallBegin(index, call.id, call.name), ToolCallDelta(index, call.arguments)]
    return deltas


def _item_status(reason: EndReason) -> ItemStatus:
    return "incomplete" if reason == "length" else "completed"


def _usage(done: DoneEvent, reasoning_tokens: int) -> Json:
    usage = done.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": written_tokens(done)},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
