"""What the replies of OpenAI's two older APIs have in common: the envelope, the order of chunks, usage, errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from diskprefix.engine.request import DoneEvent, ProgressEvent
from diskprefix.errors import DiskPrefixError
from diskprefix.server.errors import fault_of, openai_error
from diskprefix.server.protocols.dialect import Head, Json, ServerSentEvent
from diskprefix.server.protocols.figures import figures_reply
from diskprefix.server.protocols.reply import Choice, DeltaEvent, EndEvent, Reply, ReplyEvent

DONE = ServerSentEvent("[DONE]")


class OpenAIWriter(ABC):
    """Writes a reply in OpenAI's form. `whole_choice` and the others return what is in `choices` besides the index.

    The finish chunk of the last choice waits for the `DoneEvent`, because the last chunk of a stream has `prefix_cache`
    and `timings`. With `include_usage`, one more chunk without choices follows and has them.
    """

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, head: Head, *, include_usage: bool, with_logprobs: bool) -> None:
        self._head = head
        self._include_usage = include_usage
        self.with_logprobs = with_logprobs
        self._held: list[Json] = []
        self._reasoning_tokens = 0

    @abstractmethod
    def whole_choice(self, choice: Choice) -> Json: ...

    @abstractmethod
    def chunk_choices(self, event: DeltaEvent) -> list[Json]:
        """Returns one object for each chunk."""

    @abstractmethod
    def end_choice(self, event: EndEvent) -> Json: ...

    def whole(self, reply: Reply) -> Json:
        choices = [
            {"index": choice.index, **self.whole_choice(choice), "finish_reason": choice.reason}
            for choice in reply.choices
        ]
        return {
            **self._envelope(self.whole_object),
            "choices": choices,
            "usage": usage_reply(reply.done, reply.reasoning_tokens),
            **figures_reply(reply.done, self._head.clamped_to),
        }

    def begin(self) -> Sequence[ServerSentEvent]:
        return ()

    def events(self, event: ReplyEvent) -> Sequence[ServerSentEvent]:
        if isinstance(event, DoneEvent):
            return [*map(ServerSentEvent, self._last(event)), DONE]
        if isinstance(event, ProgressEvent):
            return [ServerSentEvent(self._chunk(None, {}, None) | {"prompt_progress": _progress(event)})]
        if isinstance(event, EndEvent):
            self._reasoning_tokens += event.reasoning_tokens
            ready, self._held = self._held, [self._chunk(event.choice, self.end_choice(event), event.reason)]
        else:
            new = [self._chunk(event.choice, choice, None) for choice in self.chunk_choices(event)]
            ready, self._held = [*self._held, *new], []
        return [ServerSentEvent(chunk) for chunk in ready]

    def keepalive(self) -> bytes:
        return b": keepalive\n\n"

    def failure(self, error: DiskPrefixError) -> Sequence[ServerSentEvent]:
        return [ServerSentEvent(openai_error(fault_of(error)))]

    def _envelope(self, kind: str) -> Json:
        head = self._head
        return {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }

    def _chunk(self, index: int | None, choice: Json, reason: str | None) -> Json:
        choices = [] if index is None else [{"index": index, **choice, "finish_reason": reason}]
        usage = {"usage": None} if self._include_usage else {}
        return {**self._envelope(self.chunk_object), **usage, "choices": choices}

    def _last(self, done: DoneEvent) -> list[Json]:
        figures = figures_reply(done, self._head.clamped_to)
        if self._include_usage:
            return [
                *self._held,
                {**self._chunk(None, {}, None), "usage": usage_reply(done, self._reasoning_tokens), **figures},
            ]
        return [{**chunk, **figures} for chunk in self._held or [self._chunk(None, {}, None)]]


def usage_reply(done: DoneEvent, reasoning_tokens: int) -> Json:
    usage = done.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def _progress(event: ProgressEvent) -> Json:
    """As llama.cpp's server has it."""
    return {
        "total": event.total,
        "cache": event.cached,
        "processed": event.processed,
        "time_ms": round(event.elapsed_ms, 2),
    }
