"""The choices of a response as the two APIs write them, in a whole response and in the chunks of a stream."""

from __future__ import annotations

from collections import defaultdict
from typing import Protocol

from diskprefix.engine.request import Event, FinishEvent, TextEvent, TokenLogprob
from diskprefix.server.replies import chat_logprobs, completion_logprobs
from diskprefix.server.streaming import Json


class ChoiceSerializer(Protocol):
    """Writes the choices of one response as one of the APIs wants them."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def choice(self, index: int, text: str, logprobs: list[TokenLogprob] | None, finish_reason: str | None) -> Json:
        """Returns a finished choice."""

    def chunk_choice(self, event: Event) -> Json | None:
        """Returns a choice in a chunk; None if `event` adds nothing to it."""


class ChatSerializer:
    """Writes messages and deltas, for `/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self) -> None:
        self._begun: set[int] = set()

    def choice(self, index: int, text: str, logprobs: list[TokenLogprob] | None, finish_reason: str | None) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None if logprobs is None else chat_logprobs(logprobs),
            "finish_reason": finish_reason,
        }

    def chunk_choice(self, event: Event) -> Json | None:
        if isinstance(event, FinishEvent):
            return {"index": event.choice, "delta": {}, "logprobs": None, "finish_reason": event.finish_reason}
        if not isinstance(event, TextEvent):
            return None
        first = event.choice not in self._begun
        if _is_empty(event) and not first:
            return None
        self._begun.add(event.choice)
        return {
            "index": event.choice,
            "delta": ({"role": "assistant"} if first else {}) | {"content": event.text},
            "logprobs": chat_logprobs(event.logprobs) if event.logprobs else None,
            "finish_reason": None,
        }


class CompletionSerializer:
    """Writes plain text, for `/v1/completions`."""

    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(self) -> None:
        self._sent_chars: dict[int, int] = defaultdict(int)

    def choice(self, index: int, text: str, logprobs: list[TokenLogprob] | None, finish_reason: str | None) -> Json:
        return {
            "index": index,
            "text": text,
            "logprobs": None if logprobs is None else completion_logprobs(logprobs, 0),
            "finish_reason": finish_reason,
        }

    def chunk_choice(self, event: Event) -> Json | None:
        if isinstance(event, FinishEvent):
            return {"index": event.choice, "text": "", "logprobs": None, "finish_reason": event.finish_reason}
        if not isinstance(event, TextEvent) or _is_empty(event):
            return None
        offset = self._sent_chars[event.choice]
        self._sent_chars[event.choice] += len(event.text)
        return {
            "index": event.choice,
            "text": event.text,
            "logprobs": completion_logprobs(event.logprobs, offset) if event.logprobs else None,
            "finish_reason": None,
        }


class Collected:
    """Collects the choices of a response that is not streamed."""

    def __init__(self, with_logprobs: bool) -> None:
        self._with_logprobs = with_logprobs
        self._text: dict[int, list[str]] = defaultdict(list)
        self._logprobs: dict[int, list[TokenLogprob]] = defaultdict(list)
        self._finish: dict[int, str] = {}

    def add(self, event: Event) -> None:
        if isinstance(event, TextEvent):
            self._text[event.choice].append(event.text)
            self._logprobs[event.choice].extend(event.logprobs)
        elif isinstance(event, FinishEvent):
            self._finish[event.choice] = event.finish_reason

    def choices(self, serializer: ChoiceSerializer) -> list[Json]:
        return [
            serializer.choice(
                index, "".join(self._text[index]), self._logprobs[index] if self._with_logprobs else None, reason
            )
            for index, reason in sorted(self._finish.items())
        ]


def _is_empty(event: TextEvent) -> bool:
    """Whether an event adds nothing: its text waits for the rest of a character or of a stop string."""
    return not event.text and not event.logprobs
