"""The items of a reply while it is written, and the events of its stream.

An item is a message, a reasoning or a function call. One is open at a time: the next one closes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from diskprefix.chat.output.events import ContentDelta, ReasoningDelta
from diskprefix.engine.request import TokenLogprob
from diskprefix.server.protocols.dialect import Json
from diskprefix.server.protocols.reply import CallBegin, ReplyDelta
from diskprefix.server.protocols.responses.items import item_id

ItemStatus: TypeAlias = Literal["completed", "incomplete"]


@dataclass
class _OpenItem:
    item: Json
    index: int
    text: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)

    @property
    def place(self) -> Json:
        return {"item_id": self.item["id"], "output_index": self.index}


class OutputItems:
    """Makes items and events from deltas. The events lack `sequence_number`. `done` are the items that are closed."""

    def __init__(self, response_id: str, *, reasoning_is_summary: bool) -> None:
        self._response_id = response_id
        self._reasoning_is_summary = reasoning_is_summary
        self.done: list[Json] = []
        self._open: _OpenItem | None = None
        self._blanks: list[str] = []
        """White space that may be the beginning of a message, or nothing but what stands between calls."""
        self._tokens: list[TokenLogprob] = []
        """Those whose text has not become part of a message yet."""

    def add(self, deltas: Sequence[ReplyDelta], tokens: Sequence[TokenLogprob] = ()) -> list[Json]:
        """Returns the events of some deltas."""
        self._tokens += tokens
        events = []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                events += self._content(delta.text)
            elif isinstance(delta, ReasoningDelta):
                events += self._reasoning(delta.text)
            elif isinstance(delta, CallBegin):
                events += self._call(delta)
            else:
                events.append(self._piece("response.function_call_arguments.delta", delta.arguments))
        if deltas and not any(isinstance(delta, ContentDelta) for delta in deltas):
            self._tokens.clear()
        return events

    def end(self, status: ItemStatus) -> list[Json]:
        """Closes the last item, and returns its events. A reply without any item is an empty message."""
        begun = [] if self.done or self._open else self._begin_message()
        if begun and self._blanks:
            begun += self._text("")
        return [*begun, *self._close(status)]

    def _content(self, text: str) -> list[Json]:
        if self._is_open("message"):
            return self._text(text)
        if not text.strip():
            self._blanks.append(text)
            return []
        return [*self._close(), *self._begin_message(), *self._text(text)]

    def _text(self, text: str) -> list[Json]:
        assert self._open is not None, "a message is open"
        text = "".join([*self._blanks, text])
        self._blanks.clear()
        logprobs = [_logprob(token) | {"top_logprobs": [_logprob(top) for top in token.top]} for token in self._tokens]
        self._tokens.clear()
        self._open.logprobs += logprobs
        return [self._piece("response.output_text.delta", text) | {"content_index": 0, "logprobs": logprobs}]

    def _reasoning(self, text: str) -> list[Json]:
        begun = [] if self._is_open("reasoning") else [*self._close(), *self._begin_reasoning()]
        if self._reasoning_is_summary:
            return [*begun, self._piece("response.reasoning_summary_text.delta", text) | {"summary_index": 0}]
        return [*begun, self._piece("response.reasoning_text.delta", text) | {"content_index": 0}]

    def _call(self, begin: CallBegin) -> list[Json]:
        closed = self._close()
        call = {"call_id": begin.id, "name": begin.name, "arguments": ""}
        return [*closed, self._begin("function_call", call)]

    def _begin_message(self) -> list[Json]:
        added = self._begin("message", {"role": "assistant", "content": []})
        return [added, self._part_event("response.content_part.added", _text_part("", []))]

    def _begin_reasoning(self) -> list[Json]:
        added = self._begin("reasoning", {"summary": []})
        if self._reasoning_is_summary:
            part = {"type": "summary_text", "text": ""}
            return [added, self._part_event("response.reasoning_summary_part.added", part, "summary_index")]
        return [added, self._part_event("response.content_part.added", {"type": "reasoning_text", "text": ""})]

    def _begin(self, kind: str, fields: Json) -> Json:
        index = len(self.done)
        item = {"id": item_id(self._response_id, kind, index), "type": kind, "status": "in_progress", **fields}
        self._open = _OpenItem(item, index)
        return {"type": "response.output_item.added", "output_index": index, "item": item}

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open.item["type"] == kind

    def _piece(self, kind: str, text: str) -> Json:
        """Returns the event of more text of the open item."""
        assert self._open is not None, "pieces come after their beginning"
        self._open.text.append(text)
        return {"type": kind, **self._open.place, "delta": text}

    def _part_event(self, kind: str, part: Json, index: str = "content_index") -> Json:
        assert self._open is not None, "parts belong to an item"
        return {"type": kind, **self._open.place, index: 0, "part": part}

    def _close(self, status: ItemStatus = "completed") -> list[Json]:
        """Closes the open item, if there is one."""
        closing = self._open
        if closing is None:
            return []
        text = "".join(closing.text)
        if closing.item["type"] == "message":
            events, whole = self._close_message(text, closing.logprobs)
        elif closing.item["type"] == "reasoning":
            events, whole = self._close_reasoning(text)
        else:
            events = [{"type": "response.function_call_arguments.done", **closing.place, "arguments": text}]
            events[0]["name"] = closing.item["name"]
            whole = {"arguments": text}
        item = closing.item | {"status": status, **whole}
        self.done.append(item)
        self._open = None
        return [*events, {"type": "response.output_item.done", "output_index": closing.index, "item": item}]

    def _close_message(self, text: str, logprobs: list[Json]) -> tuple[list[Json], Json]:
        assert self._open is not None, "a message is open"
        done = {"type": "response.output_text.done", **self._open.place, "content_index": 0, "text": text}
        part = _text_part(text, logprobs)
        events = [done | {"logprobs": logprobs}, self._part_event("response.content_part.done", part)]
        return events, {"content": [part]}

    def _close_reasoning(self, text: str) -> tuple[list[Json], Json]:
        assert self._open is not None, "a reasoning is open"
        if self._reasoning_is_summary:
            part = {"type": "summary_text", "text": text}
            done = {"type": "response.reasoning_summary_text.done", **self._open.place, "summary_index": 0}
            last = self._part_event("response.reasoning_summary_part.done", part, "summary_index")
            return [done | {"text": text}, last], {"summary": [part]}
        part = {"type": "reasoning_text", "text": text}
        done = {"type": "response.reasoning_text.done", **self._open.place, "content_index": 0, "text": text}
        return [done, self._part_event("response.content_part.done", part)], {"content": [part]}


def _text_part(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _logprob(token: TokenLogprob) -> Json:
    # A token that is a part of a character decodes to U+FFFD, whose bytes are not those of the token.
    encoded = [] if "�" in token.text else list(token.text.encode("utf-8", "replace"))
    return {"token": token.text, "logprob": token.logprob, "bytes": encoded}
