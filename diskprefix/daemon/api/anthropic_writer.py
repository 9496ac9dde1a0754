"""The replies of Anthropic's messages API: the whole message, the events of a stream and their order, usage, errors.

`message_start` has the usage of the prompt, and clients add it to the usage in `message_delta`. So it is sent when the
number of restored tokens is known, with pings before it: clients ignore a ping wherever it comes. In `message_delta`
the figures are final; they differ only if something could not be saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from diskprefix.daemon.api.dialect import Head, Json, ServerSentEvent
from diskprefix.daemon.api.error_forms import anthropic_error
from diskprefix.daemon.api.figures import figures_reply, written_tokens
from diskprefix.daemon.api.reply import EndEvent, ReplyDelta, ReplyEvent, WholeChoice, WholeReply
from diskprefix.daemon.chat.output.format import ContentDelta, ReasoningDelta, ToolCallDelta
from diskprefix.daemon.engine.request import DoneEvent, ProgressEvent
from diskprefix.errors import DiskPrefixError

StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageWriter:
    """Writes one message. The signature of a thought, which clients must send back, is the id of the message."""

    def __init__(self, head: Head, *, shows_thoughts: bool = True) -> None:
        self._head = head
        self._shows_thoughts = shows_thoughts
        self._has_begun = False
        self._num_blocks = 0
        self._open: str | None = None
        """The type of the open block, which has begun and not ended."""
        self._blanks: list[str] = []
        """White space before a block of text. A block of white space is not sent: clients may not send it back."""
        self._end: EndEvent | None = None

    def whole(self, reply: WholeReply) -> Json:
        [choice] = reply.choices
        return {
            **self._message(_usage_of(reply.done, reply.reasoning_tokens)),
            "content": self._content(choice),
            "stop_reason": self._stop_reason(choice),
            "stop_sequence": choice.stop,
            **figures_reply(reply.done, self._head.clamped_to),
        }

    def begin(self) -> Sequence[ServerSentEvent]:
        return ()

    def events(self, event: ReplyEvent) -> Sequence[ServerSentEvent]:
        if isinstance(event, ProgressEvent):
            return self._first_events(_usage(event.total, event.cached, max(0, event.kept - event.cached), 0))
        begun = self._first_events(_usage(self._head.prompt_tokens, 0, 0, 0))
        if isinstance(event, DoneEvent):
            return [*begun, *self._closed(), *self._last(event)]
        if isinstance(event, EndEvent):
            self._end = event
            return begun
        return [*begun, *(sent for delta in event.deltas for sent in self._delta(delta))]

    def keepalive(self) -> bytes:
        return _event("ping", {}).encode()

    def failure(self, error: DiskPrefixError) -> Sequence[ServerSentEvent]:
        return [_event("error", anthropic_error(error, self._head.request_id))]

    def _message(self, usage: Json) -> Json:
        head = self._head
        return {
            "id": head.id,
            "type": "message",
            "role": "assistant",
            "model": head.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _content(self, choice: WholeChoice) -> list[Json]:
        content: list[Json] = []
        if choice.reasoning:
            thought = choice.reasoning if self._shows_thoughts else ""
            content.append({"type": "thinking", "thinking": thought, "signature": self._head.id})
        if choice.content.strip():
            content.append({"type": "text", "text": choice.content})
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.parsed} for call in choice.calls
        ]
        return content

    def _stop_reason(self, end: EndEvent) -> StopReason:
        if end.stop is not None:
            return "stop_sequence"
        if end.reason == "length":
            return "max_tokens" if self._head.clamped_to is None else "model_context_window_exceeded"
        return "tool_use" if end.reason == "tool_calls" else "end_turn"

    def _first_events(self, usage: Json) -> list[ServerSentEvent]:
        if self._has_begun:
            return []
        self._has_begun = True
        return [_event("message_start", {"message": self._message(usage)})]

    def _delta(self, delta: ReplyDelta) -> list[ServerSentEvent]:
        if isinstance(delta, ReasoningDelta):
            begun = self._opened("thinking", {"thinking": "", "signature": ""})
            return [*begun, *self._added("thinking_delta", "thinking", delta.text)] if self._shows_thoughts else begun
        if isinstance(delta, ContentDelta):
            return self._text(delta.text)
        if isinstance(delta, ToolCallDelta):
            return self._added("input_json_delta", "partial_json", delta.arguments)
        return [*self._closed(), *self._opened("tool_use", {"id": delta.id, "name": delta.name, "input": {}})]

    def _text(self, text: str) -> list[ServerSentEvent]:
        if self._open != "text" and not text.strip():
            self._blanks.append(text)
            return []
        text = "".join([*self._blanks, text])
        self._blanks.clear()
        return [*self._opened("text", {"text": ""}), *self._added("text_delta", "text", text)]

    def _opened(self, kind: str, block: Json) -> list[ServerSentEvent]:
        """Returns the events that begin a block, none if a block of this kind is open."""
        if self._open == kind:
            return []
        closed, self._open = self._closed(), kind
        index = self._num_blocks
        self._num_blocks += 1
        return [*closed, _event("content_block_start", {"index": index, "content_block": {"type": kind, **block}})]

    def _added(self, kind: str, name: str, text: str) -> list[ServerSentEvent]:
        delta = {"type": kind, name: text}
        return [_event("content_block_delta", {"index": self._num_blocks - 1, "delta": delta})]

    def _closed(self) -> list[ServerSentEvent]:
        """Returns the events that end the open block."""
        if self._open is None:
            return []
        signed = self._added("signature_delta", "signature", self._head.id) if self._open == "thinking" else []
        self._open = None
        return [*signed, _event("content_block_stop", {"index": self._num_blocks - 1})]

    def _last(self, done: DoneEvent) -> list[ServerSentEvent]:
        assert self._end is not None, "every choice ends before its request is done"
        delta = {"stop_reason": self._stop_reason(self._end), "stop_sequence": self._end.stop}
        figures = figures_reply(done, self._head.clamped_to)
        return [
            _event("message_delta", {"delta": delta, "usage": _usage_of(done, self._end.reasoning_tokens), **figures}),
            _event("message_stop", {}),
        ]


def _event(name: str, fields: Json) -> ServerSentEvent:
    return ServerSentEvent({"type": name} | fields, name)


def _usage_of(done: DoneEvent, thinking_tokens: int) -> Json:
    usage = done.usage
    figures = _usage(usage.prompt_tokens, usage.cached_tokens, written_tokens(done), usage.completion_tokens)
    return figures | {"output_tokens_details": {"thinking_tokens": thinking_tokens}}


def _usage(prompt_tokens: int, read: int, created: int, output_tokens: int) -> Json:
    """Returns the figures. The first three add up to the prompt."""
    return {
        "input_tokens": prompt_tokens - read - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": read,
        "output_tokens": output_tokens,
    }
