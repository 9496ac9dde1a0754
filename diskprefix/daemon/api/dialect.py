"""The interface of an API: a `Dialect` reads a body into a neutral form, a `ReplyWriter` writes the reply.

`daemon/server/answer.py` leads a request through all other steps, and knows no API.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import msgspec
from msgspec import Struct

from diskprefix.daemon.api.fields import RequestBody
from diskprefix.daemon.api.parsed_request import ParsedRequest
from diskprefix.daemon.api.reply import ReplyEvent, WholeReply
from diskprefix.daemon.chat.messages import JsonObject
from diskprefix.errors import DiskPrefixError
from diskprefix.prefixstore.store.notes import TenantNotes
from diskprefix.tokens import TokenIds

Json: TypeAlias = dict[str, Any]
B = TypeVar("B", bound=RequestBody)


class Head(Struct, frozen=True, kw_only=True):
    """Values of a reply that are known before it begins."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    fingerprint: str = ""
    prompt_tokens: int = 0
    request_id: str = ""
    max_positions: int = 0
    """The most tokens of prompt and reply together that the model accepts here."""
    waited_ms: float = 0.0
    """The time from the request's arrival until the engine got it: reading, rendering, and waiting for the model."""
    clamped_to: int | None = None
    """Most tokens of a choice, if the request asked for more than the model has positions for."""
    prompt: TokenIds | None = None
    """The token ids of the prompt. A stored reply is deleted with its prompt."""


def json_text(value: object) -> bytes:
    """Returns JSON without blanks. msgspec is ten times as fast as json, and holds the interpreter's lock for less
    time."""
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError):
        # msgspec accepts no integers beyond 64 bits, which a schema may hold.
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def line_text(value: object) -> bytes:
    """Returns JSON that every client reads as one line. Some clients end lines as Python's `str.splitlines` does, at
    three characters that JSON text may contain: they are escaped."""
    text = json_text(value)
    if b"\xc2\x85" in text or b"\xe2\x80" in text:
        for end in "\u0085\u2028\u2029":
            text = text.replace(end.encode(), b"\\u%04x" % ord(end))
    return text


class ServerSentEvent(Struct, frozen=True):
    """An event of a stream. `data` that is an object is written as JSON; without `name` it is an unnamed event."""

    data: JsonObject | str
    name: str | None = None

    def encode(self) -> bytes:
        """Returns its bytes. JSON text contains no raw newline, so there is a single `data` line."""
        name = f"event: {self.name}\n".encode() if self.name else b""
        data = self.data
        return b"%bdata: %b\n\n" % (name, data.encode() if isinstance(data, str) else line_text(data))


class JsonLine(Struct, frozen=True):
    """An event of a stream of lines (NDJSON)."""

    data: JsonObject

    def encode(self) -> bytes:
        return line_text(self.data) + b"\n"


StreamEvent: TypeAlias = ServerSentEvent | JsonLine


class ReplyWriter(Protocol):
    """Writes one reply: `whole`, or as a stream `begin`, `events` for each neutral event, and in the end `end`."""

    def whole(self, reply: WholeReply) -> Json:
        """Returns the body of a response that is not streamed."""

    def begin(self) -> Sequence[StreamEvent]:
        """Returns the events to send at once, before anything is computed. The stream's first bytes are sent anyway."""

    def events(self, event: ReplyEvent) -> Sequence[StreamEvent]:
        """Returns the events to send after `event`; after the `DoneEvent`, which comes last, all that remain."""

    def keepalive(self) -> bytes:
        """Returns a sign of life, for a stream that has begun and has nothing to send."""

    def failure(self, error: DiskPrefixError) -> Sequence[StreamEvent]:
        """Returns the events that end a failed stream."""


class BodyReader(Protocol[B]):
    """Reads the bodies of one route."""

    @property
    def body(self) -> type[B]:
        """The model of the request's body."""

    def read(self, body: B, vocab_size: int, notes: Callable[[], TenantNotes], /) -> ParsedRequest:
        """Returns a body in the neutral form. `notes` opens the tenant's notes in the store.

        May take long, and wait for the disk. Raises `InvalidRequest`, with the path of the field.
        """


class Dialect(BodyReader[B], Protocol[B]):
    """An API whose requests ask for replies."""

    id_prefix: str
    """The beginning of the ids of replies."""
    call_id_prefix: str
    """The beginning of the ids of tool calls."""

    def writer(self, body: B, head: Head) -> ReplyWriter:
        """Returns the writer of the reply. It must not hold `body`, which is too large with images in it."""


@runtime_checkable
class EarlyDialect(Protocol):
    """An API whose streams have events of their own while the model loads, as clients ignore comments."""

    def early(self, body: Any, reply_id: str, model: str, /) -> ReplyWriter | None:
        """Returns the writer of these events, which the reply's writer continues; None for a refused request. `model`
        is the served one, "" if that is not known yet."""


@runtime_checkable
class LoadingDialect(Protocol):
    """An API in which a request without a prompt only has the model loaded."""

    def without_prompt(self, body: Any, model: str, /, *, may_unload: bool) -> Json | None:
        """Returns the answer to a request without a prompt, else None. `may_unload`: `keep_alive` has an effect."""
