"""Writes the reply of OpenAI's responses API: the response, or the events of its stream.

An item is a message, a reasoning or a call. One is open at a time: the next one closes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from msgspec import Struct, field

from diskprefix.daemon.api.dialect import Head, Json, ServerSentEvent
from diskprefix.daemon.api.error_forms import one_line
from diskprefix.daemon.api.figures import figures_reply, written_tokens
from diskprefix.daemon.api.reply import (
    CallBegin,
    DeltaEvent,
    EndEvent,
    EndReason,
    ReplyDelta,
    ReplyEvent,
    WholeChoice,
    WholeReply,
    arguments_of,
    logprob_reply,
)
from diskprefix.daemon.api.responses_items import compacted, item_id, text_argument
from diskprefix.daemon.api.responses_tools import SEARCH
from diskprefix.daemon.chat.output.format import ContentDelta, ReasoningDelta, ToolCallDelta
from diskprefix.daemon.engine.request import DoneEvent, TokenLogprob
from diskprefix.errors import DiskPrefixError

ItemStatus: TypeAlias = Literal["completed", "incomplete"]


class _PartNames(NamedTuple):
    """The names of an item's only part, in the item and in its events."""

    item: str
    field: str
    part: str
    part_event: str
    text_event: str


_MESSAGE = _PartNames("message", "content", "output_text", "content_part", "output_text")
_REASONING = _PartNames("reasoning", "content", "reasoning_text", "content_part", "reasoning_text")
_SUMMARY = _PartNames("reasoning", "summary", "summary_text", "reasoning_summary_part", "reasoning_summary_text")


class _OpenItem(Struct):
    item: Json
    index: int
    names: _PartNames | None
    """None for a call."""
    text: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)

    @property
    def is_search(self) -> bool:
        return bool(self.item["type"] == "tool_search_call")

    @property
    def place(self) -> Json:
        part = {} if self.names is None else {f"{self.names.field}_index": 0}
        return {"item_id": self.item["id"], "output_index": self.index, **part}

    @property
    def part(self) -> Json:
        """The part as it is now."""
        assert self.names is not None, "a call has no parts"
        more = {"annotations": [], "logprobs": [*self.logprobs]} if self.names is _MESSAGE else {}
        return {"type": self.names.part, "text": "".join(self.text), **more}


class OutputItems:
    """Makes items and events, without `sequence_number`, from deltas. `done` are the closed items. With `compacts`, the
    text of the reply becomes one item of type `compaction`."""

    def __init__(
        self,
        response_id: str,
        *,
        reasoning_is_summary: bool = False,
        compacts: bool = False,
        namespaces: Mapping[str, str] | None = None,
        custom: Collection[str] = (),
        searches: bool = False,
    ) -> None:
        self._response_id = response_id
        self._namespaces = namespaces or {}
        self._custom = custom
        self._searches = searches
        self._summary: list[str] | None = [] if compacts else None
        self._reasoning = _SUMMARY if reasoning_is_summary else _REASONING
        self.done: list[Json] = []
        self._open: _OpenItem | None = None
        self._blanks: list[str] = []
        """White space that may begin a message, or only separate calls."""
        self._tokens: list[TokenLogprob] = []
        """Tokens whose text is not yet part of a message."""

    def add(self, deltas: Sequence[ReplyDelta], tokens: Sequence[TokenLogprob] = ()) -> list[Json]:
        """Returns the events of some deltas."""
        if self._summary is not None:
            self._summary += [delta.text for delta in deltas if isinstance(delta, ContentDelta)]
            return []
        self._tokens += tokens
        events = []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                events += self._content(delta.text)
            elif isinstance(delta, ReasoningDelta):
                begun = [] if self._is_open(self._reasoning) else self._begin_part(self._reasoning, {"summary": []})
                events += [*begun, self._piece(delta.text)]
            elif isinstance(delta, CallBegin) and self._searches and delta.name == SEARCH:
                search = {"call_id": delta.id, "execution": "client", "arguments": {}}
                events += self._begin("tool_search_call", search)
            elif isinstance(delta, CallBegin):
                is_custom = delta.name in self._custom
                call = {"call_id": delta.id, "name": delta.name, "input" if is_custom else "arguments": ""}
                if namespace := self._namespaces.get(delta.name):
                    call |= {"name": delta.name.removeprefix(f"{namespace}__"), "namespace": namespace}
                events += self._begin("custom_tool_call" if is_custom else "function_call", call)
            elif self._open is not None and (self._open.is_search or "input" in self._open.item):
                # The delta is a part of JSON, whose value is known only at the end.
                self._open.text.append(delta.arguments)
            else:
                events.append(self._piece(delta.arguments))
        if deltas and not any(isinstance(delta, ContentDelta) for delta in deltas):
            self._tokens.clear()
        return events

    def end(self, status: ItemStatus) -> list[Json]:
        """Closes the last item, and returns its events. A reply without any item is an empty message."""
        if self._summary is not None:
            return self._compaction("".join(self._summary).strip())
        begun = [] if self.done or self._open else self._begin_message()
        if begun and self._blanks:
            begun += self._text("")
        return [*begun, *self._close(status)]

    def _compaction(self, summary: str) -> list[Json]:
        if not summary:
            raise DiskPrefixError("the model wrote no summary of the conversation")
        id_ = item_id(self._response_id, "compaction", 0)
        item = {"id": id_, "type": "compaction", "encrypted_content": compacted(summary)}
        self.done.append(item)
        kinds = ("response.output_item.added", "response.output_item.done")
        return [{"type": kind, "output_index": 0, "item": item} for kind in kinds]

    def _content(self, text: str) -> list[Json]:
        if self._is_open(_MESSAGE):
            return self._text(text)
        if not text.strip():
            self._blanks.append(text)
            return []
        return [*self._begin_message(), *self._text(text)]

    def _text(self, text: str) -> list[Json]:
        assert self._open is not None, "a message is open"
        text = "".join([*self._blanks, text])
        self._blanks.clear()
        logprobs = [logprob_reply(token) for token in self._tokens]
        self._tokens.clear()
        self._open.logprobs += logprobs
        return [self._piece(text) | {"logprobs": logprobs}]

    def _begin_message(self) -> list[Json]:
        return self._begin_part(_MESSAGE, {"role": "assistant", "content": []})

    def _begin_part(self, names: _PartNames, fields: Json) -> list[Json]:
        """Begins an item and its part."""
        return [*self._begin(names.item, fields, names), self._part_event("added")]

    def _begin(self, kind: str, fields: Json, names: _PartNames | None = None) -> list[Json]:
        """Closes the open item and begins another."""
        closed, index = self._close(), len(self.done)
        item = {"id": item_id(self._response_id, kind, index), "type": kind, "status": "in_progress", **fields}
        self._open = _OpenItem(item, index, names)
        return [*closed, {"type": "response.output_item.added", "output_index": index, "item": item}]

    def _is_open(self, names: _PartNames) -> bool:
        return self._open is not None and self._open.names is names

    def _piece(self, text: str) -> Json:
        """Returns the event of more text of the open item."""
        assert self._open is not None, "pieces come after their beginning"
        self._open.text.append(text)
        return {"type": f"response.{_text_event(self._open.names)}.delta", **self._open.place, "delta": text}

    def _part_event(self, what: Literal["added", "done"]) -> Json:
        assert self._open is not None, "parts belong to an item"
        assert self._open.names is not None, "a call has no parts"
        kind = f"response.{self._open.names.part_event}.{what}"
        return {"type": kind, **self._open.place, "part": self._open.part}

    def _close(self, status: ItemStatus = "completed") -> list[Json]:
        """Closes the open item, if there is one."""
        closing = self._open
        if closing is None:
            return []
        text, names = "".join(closing.text), closing.names
        done = {"type": f"response.{_text_event(names)}.done", **closing.place}
        if closing.is_search:
            whole: Json = {"arguments": arguments_of(text)}
            events: list[Json] = []
        elif "input" in closing.item:
            whole = {"input": text_argument(text)}
            kind = "response.custom_tool_call_input"
            events = [closing.place | {"type": f"{kind}.delta", "delta": whole["input"]}]
            events.append(closing.place | {"type": f"{kind}.done"} | whole)
        elif names is None:
            whole = {"arguments": text}
            events = [done | whole | {"name": closing.item["name"]}]
        else:
            whole = {names.field: [closing.part]}
            content = {"text": text, "logprobs": closing.logprobs} if names is _MESSAGE else {"text": text}
            events = [done | content, self._part_event("done")]
        item = closing.item | {"status": status, **whole}
        self.done.append(item)
        self._open = None
        return [*events, {"type": "response.output_item.done", "output_index": closing.index, "item": item}]


def _text_event(names: _PartNames | None) -> str:
    return "function_call_arguments" if names is None else names.text_event


class ResponseWriter:
    """Writes a response. `echo` has the fields of the request that the response repeats. `keep` stores a response."""

    def __init__(
        self,
        head: Head,
        echo: Mapping[str, object],
        items: OutputItems,
        *,
        keep: Callable[[Json], None] | None = None,
        num_events: int = 0,
    ) -> None:
        self.head = head
        self._echo = echo
        self._keep = keep
        self._items = items
        self.num_events = num_events
        """The number of events sent, also by an earlier writer."""
        self._end = EndEvent(0, "stop")

    def whole(self, reply: WholeReply) -> Json:
        [choice] = reply.choices
        self._items.add(_deltas(choice), choice.tokens)
        self._end = choice
        self._items.end(_item_status(choice.reason))
        return self._complete(reply.done)

    def begin(self) -> Sequence[ServerSentEvent]:
        if self.num_events:
            return ()
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
        """Returns an event: Codex ignores comments, and gives up after five minutes without an event."""
        event = {"type": "response.in_progress", "response": self._response("in_progress")}
        return b"".join(sent.encode() for sent in self._numbered([event]))

    def failure(self, error: DiskPrefixError) -> Sequence[ServerSentEvent]:
        # The only one of OpenAI's codes that says that the server failed.
        failed = self._response("failed") | {"error": {"code": "server_error", "message": one_line(error.message)}}
        return self._numbered([{"type": "response.failed", "response": failed}])

    def _numbered(self, events: Sequence[Json]) -> list[ServerSentEvent]:
        sent = []
        for event in events:
            sent.append(ServerSentEvent(event | {"sequence_number": self.num_events}, event["type"]))
            self.num_events += 1
        return sent

    def _complete(self, done: DoneEvent) -> Json:
        usage = done.usage
        is_cut = self._end.reason == "length" and usage.completion_tokens > 0
        counts = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
        response = self._response("incomplete" if is_cut else "completed") | {
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items.done,
            "usage": _counts(*counts, written_tokens(done), self._end.reasoning_tokens),
            **figures_reply(done, self.head.clamped_to),
        }
        if self._keep is not None:
            self._keep(response)
        return response

    def _response(self, status: str) -> Json:
        """Returns a response without output."""
        return {
            "id": self.head.id,
            "object": "response",
            "created_at": self.head.created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self.head.model,
            "output": [],
            "service_tier": "default",
            "store": self._keep is not None,
            "system_fingerprint": self.head.fingerprint,
            # The usage so far: Open Responses requires the field, and OpenAI's schema accepts no null.
            "usage": _counts(self.head.prompt_tokens),
            **self._echo,
        }


def _deltas(choice: WholeChoice) -> list[ReplyDelta]:
    """Returns a whole reply as deltas."""
    deltas: list[ReplyDelta] = [ReasoningDelta(choice.reasoning)] if choice.reasoning else []
    deltas += [ContentDelta(choice.content)] if choice.content else []
    for index, call in enumerate(choice.calls):
        deltas += [CallBegin(index, call.name, call.id), ToolCallDelta(index, call.arguments)]
    return deltas


def _item_status(reason: EndReason) -> ItemStatus:
    return "incomplete" if reason == "length" else "completed"


def _counts(prompt: int, completion: int = 0, cached: int = 0, written: int = 0, reasoning: int = 0) -> Json:
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": prompt + completion,
    }
