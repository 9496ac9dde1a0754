"""A reply, whatever its API: from the engine's events to content, reasoning and calls, as a stream or as a whole."""

from __future__ import annotations

import json
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from diskprefix.daemon.chat.output.format import (
    ContentDelta,
    OutputDelta,
    OutputParser,
    ReasoningDelta,
    ThoughtWatch,
    ToolCallBegin,
    ToolCallDelta,
)
from diskprefix.daemon.chat.replay import ReplyMemory, Turn
from diskprefix.daemon.engine.request import (
    DoneEvent,
    EchoEvent,
    Event,
    FinishEvent,
    ProgressEvent,
    TextEvent,
    TokenLogprob,
)
from diskprefix.daemon.json_values import whole_characters

EndReason: TypeAlias = Literal["stop", "length", "tool_calls"]


class CallBegin(ToolCallBegin, frozen=True):
    """The beginning of a tool call, with its id."""

    id: str


ReplyDelta: TypeAlias = ReasoningDelta | ContentDelta | CallBegin | ToolCallDelta


class DeltaEvent(Struct, frozen=True):
    """New parts of a choice, in order. Both may be empty at the beginning of a choice.

    `tokens` are the tokens that were sampled since the last event of this choice, if the client asked for log
    probabilities. Their text may be part of a later delta.
    """

    choice: int
    deltas: tuple[ReplyDelta, ...]
    tokens: tuple[TokenLogprob, ...] = ()
    prompt: tuple[TokenLogprob, ...] = ()
    """The tokens of the prompt, if they were asked for."""


class EndEvent(Struct, frozen=True):
    """The end of a choice. `stop` is the stop string that ended it, `reasoning_tokens` the length of its thought,
    `token_ids` are its sampled tokens."""

    choice: int
    reason: EndReason
    stop: str | None = None
    reasoning_tokens: int = 0
    token_ids: Sequence[int] = ()


ReplyEvent: TypeAlias = ProgressEvent | DeltaEvent | EndEvent | DoneEvent


def _as_written(number: str) -> msgspec.Raw:
    """Returns a number that is sent with its own digits. They may exceed a double, or an integer of 64 bits."""
    return msgspec.Raw(number.encode())


class WholeCall(Struct, frozen=True):
    """A tool call. `arguments` are the JSON text of an object, if the model wrote one."""

    id: str
    name: str
    arguments: str

    @property
    def parsed(self) -> dict[str, Any]:
        return arguments_of(self.arguments)


def arguments_of(text: str) -> dict[str, Any]:
    """Returns the arguments of a call, for `json_text`. Text that is no JSON object is wrapped as Anthropic's
    documentation says."""
    try:
        arguments = json.loads(whole_characters(text or "{}"), parse_float=_as_written, parse_int=_as_written)
    except (ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"INVALID_JSON": text}


class WholeChoice(EndEvent, frozen=True):
    """One of the replies to a request, as a whole."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[WholeCall, ...] = ()
    tokens: tuple[TokenLogprob, ...] = ()
    prompt: tuple[TokenLogprob, ...] = ()
    """The tokens of the prompt, if they were asked for."""


class WholeReply(Struct, frozen=True):
    """All choices, by index, and the figures of the request."""

    choices: list[WholeChoice]
    done: DoneEvent

    @property
    def reasoning_tokens(self) -> int:
        return sum(choice.reasoning_tokens for choice in self.choices)


class ReplyReader:
    """Turns the engine's events of one request into events of a reply. `new_parser` makes the parser of one choice.

    With a `memory`, each choice is remembered when it ends, before the client gets its end, unless its tokens hold text
    that the client does not get.
    """

    def __init__(
        self,
        new_parser: Callable[[], OutputParser],
        call_id_prefix: str,
        memory: ReplyMemory | None = None,
        *,
        many_calls: bool = True,
    ) -> None:
        self._new_parser = new_parser
        self._call_id_prefix = call_id_prefix
        self._memory = memory
        self._many_calls = many_calls
        self._parsers: dict[int, OutputParser] = {}
        self._shortened: set[int] = set()
        """The choices with calls that are left out."""
        self._called: set[int] = set()
        """The choices that called a tool."""
        self._thoughts: defaultdict[int, ThoughtWatch] = defaultdict(ThoughtWatch)
        self._reasoning_tokens: defaultdict[int, int] = defaultdict(int)
        self._token_ids: defaultdict[int, list[int]] = defaultdict(list)
        self._to_remember: defaultdict[int, list[ReplyDelta]] = defaultdict(list)
        """The deltas of each choice so far, if there is a memory."""

    def read(self, event: Event) -> list[ReplyEvent]:
        """Returns the events of the reply that follow from an event of the engine."""
        if isinstance(event, TextEvent):
            return self._text(event)
        if isinstance(event, FinishEvent):
            return self._finish(event)
        if isinstance(event, EchoEvent):
            return [DeltaEvent(event.choice, (), prompt=event.tokens)]
        return [event] if isinstance(event, ProgressEvent | DoneEvent) else []

    def _text(self, event: TextEvent) -> list[ReplyEvent]:
        if is_first := event.choice not in self._parsers:
            self._parsers[event.choice] = self._new_parser()
        parser = self._parsers[event.choice]
        deltas = self._deltas(event.choice, parser.feed(event.text))
        # If an event ends in reasoning, all of its tokens count as reasoning, otherwise none.
        if self._thoughts[event.choice].see(deltas, parser):
            self._reasoning_tokens[event.choice] += len(event.token_ids)
        self._token_ids[event.choice] += event.token_ids
        return [DeltaEvent(event.choice, deltas, event.logprobs)] if deltas or event.logprobs or is_first else []

    def _finish(self, event: FinishEvent) -> list[ReplyEvent]:
        parser = self._parsers.get(event.choice)
        is_whole = event.finish_reason == "stop" and event.stop is None
        deltas = self._deltas(event.choice, parser.finish(is_whole=is_whole)) if parser else ()
        reason: EndReason = event.finish_reason
        if reason == "stop" and event.choice in self._called:
            reason = "tool_calls"
        token_ids = self._token_ids[event.choice]
        if self._memory is not None and event.stop is None and event.choice not in self._shortened:
            all_deltas = self._to_remember[event.choice]
            call_ids = [delta.id for delta in all_deltas if isinstance(delta, CallBegin)]
            self._memory.remember(Turn.of_deltas(all_deltas), call_ids, token_ids)
        held: list[ReplyEvent] = [DeltaEvent(event.choice, deltas)] if deltas else []
        return [*held, EndEvent(event.choice, reason, event.stop, self._reasoning_tokens[event.choice], token_ids)]

    def _deltas(self, choice: int, deltas: list[OutputDelta]) -> tuple[ReplyDelta, ...]:
        named: list[ReplyDelta] = []
        for delta in deltas:
            if isinstance(delta, ToolCallBegin | ToolCallDelta) and delta.index and not self._many_calls:
                self._shortened.add(choice)
            elif isinstance(delta, ToolCallBegin):
                self._called.add(choice)
                named.append(CallBegin(delta.index, delta.name, f"{self._call_id_prefix}{uuid.uuid4().hex[:24]}"))
            else:
                named.append(delta)
        if self._memory is not None:
            self._to_remember[choice] += named
        return tuple(named)


def whole_reply(events: Sequence[ReplyEvent]) -> WholeReply:
    """Returns the reply that a list of events describes. The last event is the `DoneEvent`."""
    parts: defaultdict[int, list[DeltaEvent]] = defaultdict(list)
    for event in events:
        if isinstance(event, DeltaEvent):
            parts[event.choice].append(event)
    ends = sorted((event for event in events if isinstance(event, EndEvent)), key=lambda end: end.choice)
    done = events[-1]
    assert isinstance(done, DoneEvent), "the reply is not over"
    return WholeReply([whole_choice(end, parts[end.choice]) for end in ends], done)


def whole_choice(end: EndEvent, events: Sequence[DeltaEvent]) -> WholeChoice:
    """Returns a choice that ended, from its events (all, or the last ones)."""
    deltas = [delta for event in events for delta in event.deltas]
    ids = [delta.id for delta in deltas if isinstance(delta, CallBegin)]
    turn = Turn.of_deltas(deltas)
    return WholeChoice(
        **asdict(end),
        content=turn.content,
        reasoning=turn.reasoning,
        calls=tuple(WholeCall(id_, *call) for id_, call in zip(ids, turn.calls, strict=True)),
        tokens=tuple(token for event in events for token in event.tokens),
        prompt=tuple(token for event in events for token in event.prompt),
    )


def logprob_reply(token: TokenLogprob) -> dict[str, Any]:
    """Returns a token with its alternatives, as OpenAI's APIs show them."""

    def entry(token: TokenLogprob) -> dict[str, Any]:
        return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data)}

    return {**entry(token), "top_logprobs": [entry(alternative) for alternative in token.top]}
