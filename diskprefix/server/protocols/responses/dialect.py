"""`POST /v1/responses`: a conversation as items, with stored responses that can be continued."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import partial

import msgspec

from diskprefix.chat.messages import Conversation, Message, TextPart
from diskprefix.errors import InvalidRequest
from diskprefix.server.protocols.dialect import Arrival, Asked, Head
from diskprefix.server.protocols.params import sampling_params
from diskprefix.server.protocols.responses.body import ResponseRequest
from diskprefix.server.protocols.responses.items import (
    MessageItem,
    ReferenceItem,
    SpokenItem,
    messages_of,
    stored_form,
)
from diskprefix.server.protocols.responses.stored import MAX_STORED_BYTES, ResponseStore, Said
from diskprefix.server.protocols.responses.writer import ResponseWriter
from diskprefix.units import format_size

log = logging.getLogger("diskprefix")


class Responses:
    """The API for one request."""

    body = ResponseRequest
    id_prefix = "resp_"
    call_id_prefix = "call_"

    def __init__(self) -> None:
        self._store: ResponseStore | None = None
        self._echo: Mapping[str, msgspec.Raw] = {}
        self._input: bytes | None = None
        """JSON text of the items of the request itself, if the response is to be stored."""

    def read(self, body: ResponseRequest, arrival: Arrival) -> Asked:
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("stream_options: needs stream: true", param="stream_options")
        self._echo = body.echo
        if (num_bytes := sum(len(bytes(value)) for value in self._echo.values())) > MAX_STORED_BYTES:
            limit = format_size(MAX_STORED_BYTES)
            said = f"the response repeats them, and would have {format_size(num_bytes)}; send {limit} at most"
            largest = max(self._echo, key=lambda name: len(bytes(self._echo[name])))
            raise InvalidRequest(f"{largest}: {said}", param=largest)
        sampling = sampling_params(
            body, arrival.serving.renderer.vocab_size, max_tokens=body.max_output_tokens, logprobs=body.logprobs
        )
        return Asked(
            prompt=self.conversation(body, arrival),
            sampling=sampling,
            tool_choice=body.choice,
            text_format=body.text_format,
            limit_path="max_output_tokens",
        )

    def conversation(self, body: ResponseRequest, arrival: Arrival) -> Conversation:
        """Returns what the prompt is rendered from. Waits for the disk.

        Raises `InvalidRequest` for what is not stored.
        """
        self._store = ResponseStore(arrival.serving.engine.cache.notes(arrival.tenant))
        return self.conversation_with(self._store, body)

    def conversation_with(self, store: ResponseStore, body: ResponseRequest) -> Conversation:
        """Does what `conversation` does, with the stored responses of `store`."""
        return Conversation(
            messages=[*_instructions(body), *messages_of(self._items(body, store))],
            tools=body.offered.functions or None,
            tool_marks=body.offered.marks,
            tool_paths=body.offered.paths,
            reasoning_effort=body.effort,
            path="input",
        )

    def writer(self, body: ResponseRequest, head: Head) -> ResponseWriter:
        keep = None
        if self._store is not None and self._input is not None:
            keep = partial(self._store.put, input_json=self._input, prompt=head.prompt)
        return ResponseWriter(head, self._echo, reasoning_is_summary=body.summary is not None, keep=keep)

    def _items(self, body: ResponseRequest, store: ResponseStore) -> list[Said]:
        """Returns the items of the conversation. Raises `InvalidRequest` for what is not stored."""
        earlier = [] if body.previous_response_id is None else store.history(body.previous_response_id)
        said: list[Said] = []
        if isinstance(body.input, str):
            said.append((MessageItem(role="user", content=body.input), "input"))
        for index, item in enumerate(body.input or () if not isinstance(body.input, str) else ()):
            path = f"input.{index}"
            if isinstance(item, ReferenceItem):
                said.append(store.referred(item, path))
            elif isinstance(item, SpokenItem):
                said.append((item, path))
        if not earlier and not said:
            raise InvalidRequest("input: must not be empty", param="input")
        if body.is_stored:
            self._input = _storable([item for item, _ in said])
        return [*earlier, *said]


def _storable(items: list[SpokenItem]) -> bytes | None:
    """Returns the JSON text of items, or None if it is too large to be stored."""
    text = json.dumps([stored_form(item) for item in items], ensure_ascii=False).encode("utf-8", "surrogatepass")
    if len(text) <= MAX_STORED_BYTES:
        return text
    log.info("[server] a response is not stored: its input has %s", format_size(len(text)))
    return None


def _instructions(body: ResponseRequest) -> list[Message]:
    if body.instructions is None:
        return []
    return [Message(role="system", content=(TextPart(body.instructions, "instructions"),), path="instructions")]
