"""A reply, whatever its API: from the engine's events to content, reasoning and calls, as a stream or as a whole."""

from __future__ import annotations

import json
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from diskprefix.chat.output.format import (
    ContentDelta,
    OutputDelta,
    OutputParser,
    ReasoningDelta,
    ThoughtWatch,
    ToolCallBegin,
    ToolCallDelta,
)
from diskprefix.engine.request import DoneEvent, Event, FinishEvent, ProgressEvent, TextEvent, TokenLogprob
from diskprefix.json_values import whole_characters

EndReason: TypeAlias = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class CallBegin:
    """A tool call begins. `index` counts the calls of a choice."""

    index: int
    id: str
    name: str


ReplyDelta: TypeAlias = ReasoningDelta | ContentDelta | CallBegin | ToolCallDelta


@dataclass(frozen=True)
class DeltaEvent:
    """New parts of a choice, in order. Both may be empty at the beginning of a choice.

    `tokens` are the tokens that were sampled since the last event of this choice, if their log probabilities were
    asked for. Their text may be part of a later delta.
    """

    choice: int
    deltas: tuple[ReplyDelta, ...]
    tokens: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class EndEvent:
    """The end of a choice. `stop` is the stop string that ended it, `reasoning_tokens` the length of its thought."""

    choice: int
    reason: EndReason
    stop: str | None = None
    reasoning_tokens: int = 0


ReplyEvent: TypeAlias = ProgressEvent | DeltaEvent | EndEvent | DoneEvent


@dataclass(frozen=True)
class WholeCall:
    """A tool call. `arguments` are the JSON text of an object, if the model wrote one."""

    id: str
    name: str
    arguments: str

    @property
    def parsed(self) -> dict[str, Any]:
        """The arguments. Text that is no JSON object is wrapped as Anthropic's documentation says."""
        try:
            arguments = json.loads(whole_characters(self.arguments or "{}"))
        except (ValueError, RecursionError):
            arguments = None
        return arguments if isinstance(arguments, dict) else {"INVALID_JSON": self.arguments}


@dataclass(frozen=True)
class WholeChoice:
    """One of the replies to a request, as a whole."""

    index: int
    content: str
    reasoning: str
    calls: tuple[WholeCall, ...]
    tokens: tuple[TokenLogprob, ...]
    reason: EndReason
    stop: str | None = None
    reasoning_tokens: int = 0


@dataclass(frozen=True)
class WholeReply:
    """All choices, by index, and what the request took."""

    choices: list[WholeChoice]
    done: DoneEvent

    @property
    def reasoning_tokens(self) -> int:
        return sum(choice.reasoning_tokens for choice in self.choices)


class ReplyReader:
    """Turns the engine's events of one request into those of a reply. `new_parser` makes the parser of one choice."""

    def __init__(self, new_parser: Callable[[], OutputParser], call_id_prefix: str, *, many_calls: bool = True) -> None:
        self._new_parser = new_parser
        self._call_id_prefix = call_id_prefix
        self._many_calls = many_calls
        self._parsers: dict[int, OutputParser] = {}
        self.shortened: set[int] = set()
        """The choices of which some calls are left out."""
        self._called: set[int] = set()
        """The choices that called a tool."""
        self._thoughts: defaultdict[int, ThoughtWatch] = defaultdict(ThoughtWatch)
        self._reasoning_tokens: defaultdict[int, int] = defaultdict(int)

    def read(self, event: Event) -> list[ReplyEvent]:
        """Returns the events of the reply that follow from an event of the engine."""
        if isinstance(event, TextEvent):
            return self._text(event)
        if isinstance(event, FinishEvent):
            return self._finish(event)
        return [event] if isinstance(event, ProgressEvent | DoneEvent) else []

    def _text(self, event: TextEvent) -> list[ReplyEvent]:
        is_first = event.choice not in self._parsers
        parser = self._parsers.setdefault(event.choice, self._new_parser()) if is_first else self._parsers[event.choice]
        deltas = self._deltas(event.choice, parser.feed(event.text))
        self._count_reasoning(event, deltas)
        return [DeltaEvent(event.choice, deltas, event.logprobs)] if deltas or event.logprobs or is_first else []

    def _finish(self, event: FinishEvent) -> list[ReplyEvent]:
        parser = self._parsers.get(event.choice)
        deltas = self._deltas(event.choice, parser.finish()) if parser else ()
        reason: EndReason = event.finish_reason
        if reason == "stop" and event.choice in self._called:
            reason = "tool_calls"
        held: list[ReplyEvent] = [DeltaEvent(event.choice, deltas)] if deltas else []
        return [*held, EndEvent(event.choice, reason, event.stop, self._reasoning_tokens[event.choice])]

    def _count_reasoning(self, event: TextEvent, deltas: Sequence[ReplyDelta]) -> None:
        """Counts all tokens of an event that ends in reasoning, and none of the others."""
        if self._thoughts[event.choice].see(deltas):
            self._reasoning_tokens[event.choice] += len(event.token_ids)

    def _deltas(self, choice: int, deltas: list[OutputDelta]) -> tuple[ReplyDelta, ...]:
        named: list[ReplyDelta] = []
        for delta in deltas:
            if isinstance(delta, ToolCallBegin | ToolCallDelta) and delta.index and not self._many_calls:
                self.shortened.add(choice)
                continue
            if isinstance(delta, ToolCallBegin):
                self._called.add(choice)
                call_id = f"{self._call_id_prefix}{uuid.uuid4().hex[:24]}"
                named.append(CallBegin(delta.index, call_id, delta.name))
            else:
                named.append(delta)
        return tuple(named)


def whole_reply(events: Sequence[ReplyEvent]) -> WholeReply:
    """Puts all events of a reply together. The last one is its `DoneEvent`."""
    parts: defaultdict[int, list[DeltaEvent]] = defaultdict(list)
    for event in events:
        if isinstance(event, DeltaEvent):
            parts[event.choice].append(event)
    ends = sorted((event for event in events if isinstance(event, EndEvent)), key=lambda end: end.choice)
    done = events[-1]
    assert isinstance(done, DoneEvent), "the reply is not over"
    return WholeReply([whole_choice(end, parts[end.choice]) for end in ends], done)


def whole_choice(end: EndEvent, events: Sequence[DeltaEvent]) -> WholeChoice:
    """Returns a choice that ended, of its events or the last of them."""
    deltas = [delta for event in events for delta in event.deltas]
    arguments: defaultdict[int, list[str]] = defaultdict(list)
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            arguments[delta.index].append(delta.arguments)
    return WholeChoice(
        end.choice,
        content="".join(delta.text for delta in deltas if isinstance(delta, ContentDelta)),
        reasoning="".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta)),
        calls=tuple(
            WholeCall(delta.id, delta.name, "".join(arguments[delta.index]))
            for delta in deltas
            if isinstance(delta, CallBegin)
        ),
        tokens=tuple(token for event in events for token in event.tokens),
        reason=end.reason,
        stop=end.stop,
        reasoning_tokens=end.reasoning_tokens,
    )


def logprob_reply(token: TokenLogprob) -> dict[str, Any]:
    """Returns a token with its alternatives, as OpenAI's APIs show them."""

    def entry(token: TokenLogprob) -> dict[str, Any]:
        return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data)}

    return {**entry(token), "top_logprobs": [entry(alternative) for alternative in token.top]}
