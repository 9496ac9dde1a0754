"""Stored responses of OpenAI's responses API, and the conversations that they continue."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
from pydantic import TypeAdapter

from diskprefix.daemon.api.dialect import Json, json_text
from diskprefix.daemon.api.responses_items import Item, ReferenceItem, SpokenItem, item_id, response_of
from diskprefix.daemon.api.unread import Unread
from diskprefix.errors import InvalidRequest, ResponseNotFound, StoreUnavailable
from diskprefix.prefixstore.store.note_record import NoteKind
from diskprefix.prefixstore.store.notes import TenantNotes
from diskprefix.printable import shown
from diskprefix.tokens import TokenIds
from diskprefix.units import format_size

log = logging.getLogger("diskprefix")

MAX_STORED_BYTES = 4 << 20
"""The largest stored response, before compression. Compressing it takes about 20 ms."""

MAX_CONVERSATION_BYTES = 16 << 20
"""The most bytes of stored responses and items that a request may load. They take twenty times as much memory."""

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
ItemAt: TypeAlias = tuple[SpokenItem | Unread, str]
"""An item and its path."""


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A stored response. `input` has the items of its own request, without the items of the `previous` response."""

    response: Json
    input: list[Json]
    previous: str | None = None

    @property
    def input_items(self) -> list[Json]:
        """The items of the input. Items without an id get one from this server."""
        id_ = self.response["id"]
        return [
            {"id": item_id(id_, item["type"], index, is_input=True), **item} for index, item in enumerate(self.input)
        ]

    @property
    def items(self) -> list[Json]:
        return [*self.input_items, *self.response["output"]]


@dataclass
class ResponseStore:
    """One tenant's stored responses, for one request. Reading waits for the disk, and raises `DiskStalled` if the disk
    does not answer. After other failures, the store counts as empty."""

    notes: TenantNotes
    _num_bytes: int = field(default=0, init=False)
    """The bytes of the responses read so far, and of the items that the request refers to."""
    _items: dict[str, dict[str, Json]] = field(default_factory=dict, init=False)
    """Items by the ids of the response and of the item, for responses that the request refers to."""

    def get(self, id_: str) -> StoredResponse:
        """Raises `ResponseNotFound`, also for a response of another tenant."""
        stored = _stored(self.notes.get(NoteKind.RESPONSE, id_))
        if stored is None:
            raise ResponseNotFound(f"response {shown(id_)!r} is not stored here")
        return stored

    def delete(self, id_: str) -> None:
        """Raises `ResponseNotFound`, or `StoreUnavailable` if the response may come back when the process is killed."""
        was_there = self.notes.delete(NoteKind.RESPONSE, id_)
        if not self.notes.settle(NoteKind.RESPONSE, id_):
            raise StoreUnavailable(f"response {shown(id_)!r} is not removed from the disk yet; try again")
        if not was_there:
            raise ResponseNotFound(f"response {shown(id_)!r} is not stored here")

    def put(self, response: Json, input_json: bytes, prompt: TokenIds | None = None) -> None:
        """Stores a response, with the JSON text of the items of its input. It is deleted with its `prompt`."""
        head = json_text({"response": response, "previous": response["previous_response_id"]})
        content = head[:-1] + b',"input":' + input_json + b"}"
        is_stored = len(content) <= MAX_STORED_BYTES and self.notes.put(
            NoteKind.RESPONSE, response["id"], content, prompt
        )
        if not is_stored:
            log.warning("[server] %s is not stored: it is too large, or the store fails", response["id"])

    def items_of(self, id_: str) -> list[Json]:
        """Returns the items of the conversation that a stored response answers, oldest first.

        Raises `ResponseNotFound`, with the code `previous_response_not_found` if an earlier response is gone.
        """
        response = self.get(id_)
        return [*self._conversation(response.previous), *response.input_items]

    def history(self, id_: str) -> list[ItemAt]:
        """Returns the items that a response with this `previous_response_id` continues."""
        return [(item, "previous_response_id") for item in _parsed(self._conversation(id_))]

    def referred(self, item: ReferenceItem, path: str) -> ItemAt:
        """Returns the item that a reference names. Raises `InvalidRequest` if it is not stored."""
        response_id, param = response_of(item.id), f"{path}.id"
        if response_id not in self._items:
            stored = self._counted(response_id, param)
            self._items[response_id] = {} if stored is None else {item["id"]: item for item in stored.items}
        stored_item = self._items[response_id].get(item.id)
        if stored_item is None:
            raise InvalidRequest.at(param, f"item {shown(item.id)!r} is not stored here")
        self._count(len(json_text(stored_item)), param)
        return _parsed([stored_item])[0], path

    def _conversation(self, id_: str | None) -> list[Json]:
        """Returns the items up to and including a response's output. Raises `InvalidRequest` if some are gone."""
        turns: list[list[Json]] = []
        first = id_
        while id_ is not None:
            stored = self._counted(id_, "previous_response_id")
            if stored is None:
                which = f"response {shown(id_)!r} is not stored here"
                if id_ != first:
                    which += f" any more, and {shown(first or '')!r} continues it"
                raise InvalidRequest.at("previous_response_id", which, code="previous_response_not_found")
            turns.append(stored.items)
            id_ = stored.previous
        return [item for turn in reversed(turns) for item in turn]

    def _counted(self, id_: str, param: str) -> StoredResponse | None:
        """Returns a stored response. Raises `InvalidRequest` at `param` if all responses read are too large
        together."""
        content = self.notes.get(NoteKind.RESPONSE, id_)
        self._count(len(content or b""), param)
        return _stored(content)

    def _count(self, num_bytes: int, param: str) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > MAX_CONVERSATION_BYTES:
            raise InvalidRequest.at(
                param,
                "the stored responses that this request continues or refers to have more than "
                f"{format_size(MAX_CONVERSATION_BYTES)}; send what is still needed as input",
            )


def _stored(content: bytes | None) -> StoredResponse | None:
    try:
        return None if content is None else msgspec.json.decode(content, type=StoredResponse)
    except msgspec.DecodeError as error:
        log.warning("[server] a stored response cannot be read: %s", error)
        return None


def _parsed(items: list[Json]) -> list[SpokenItem | Unread]:
    """Returns stored items as models. They were checked when the client sent them."""
    return [item for item in _ITEMS.validate_python(items) if isinstance(item, SpokenItem | Unread)]
