"""Values of a history that cannot be read here: they are left out of the prompt, and never refused.

New types of items and blocks appear monthly, and a client sends its history again in each request, so that an error
would never end. Only the newest message of the user is refused, by its path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

from msgspec import Struct
from pydantic import GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema

from diskprefix.api.body_errors import first_error
from diskprefix.chat.messages import Message, OtherPart, Role, TextPart
from diskprefix.errors import InvalidRequest
from diskprefix.printable import shown

_KIND_CHARS = 48
_ROLES: Mapping[str, Role] = {role: role for role in get_args(Role)}
_MEDIA = frozenset({"input_audio", "video_url", "audio_url", "file", "input_file"})
"""Types of content parts that other servers take."""


class Unread(Struct, frozen=True):
    """A value as the client sent it, and why it cannot be read: `problem` is that of the field `at` in it."""

    sent: Any
    at: str
    problem: str

    @property
    def kind(self) -> str:
        """The client's word for it: its type."""
        kind = self._get("type")
        return shown(kind, _KIND_CHARS) if isinstance(kind, str) and kind else "message"

    @property
    def is_message(self) -> bool:
        return self._get("role") is not None or self._get("type") is None

    @property
    def role(self) -> Role:
        """The role of a message. One of an unknown role counts as the user's."""
        role = self._get("role")
        return _ROLES.get(role, "user") if isinstance(role, str) else "user"

    def refusal(self, path: str) -> InvalidRequest:
        """Returns the error of the value at `path`."""
        return InvalidRequest.at(f"{path}.{self.at}" if self.at else path, self.problem)

    def neutral(self, path: str) -> OtherPart:
        """Returns the value as a part of the content of a message. An object of a new type may have a text."""
        text = self.sent if isinstance(self.sent, str) else self._get("text")
        if self.kind in _MEDIA:
            return OtherPart(self.kind.removeprefix("input_"), path)
        return OtherPart(
            self.kind.removeprefix("input_"), path, self.refusal(path), text if isinstance(text, str) else None
        )

    def message(self, path: str) -> Message | None:
        """Returns a message that cannot be read, with its text alone; None for what is no message or has no text."""
        content = self.sent if isinstance(self.sent, str) else self._get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if not self.is_message or not texts:
            return None
        content_parts = tuple(TextPart(text, f"{path}.content") for text in texts)
        return Message(role=self.role, content=content_parts, path=path)

    def _get(self, name: str) -> Any:
        return self.sent.get(name) if isinstance(self.sent, dict) else None


class OrUnread(Struct, frozen=True):
    """Reads a value as `model`, and as `Unread` what it refuses."""

    model: Any

    def __get_pydantic_core_schema__(self, _source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return or_unread(handler.generate_schema(self.model))


def or_unread(schema: CoreSchema, known: Callable[[Any], str | None] = lambda _value: None) -> CoreSchema:
    """Returns a schema that reads a value of any form. `known` says what is wrong with the type of a value, None if
    nothing is: a quick answer for what is not known. Too long lists are refused."""

    def read(value: Any, check: core_schema.ValidatorFunctionWrapHandler) -> Any:
        if (problem := known(value)) is not None:
            return Unread(value, "type", problem)
        try:
            return check(value)
        except ValidationError as error:
            at, problem, kind = first_error(error)
            if kind == "too_long":
                raise
            return Unread(value, at, problem)

    def write(value: Any, write_read: core_schema.SerializerFunctionWrapHandler) -> Any:
        return value.sent if isinstance(value, Unread) else write_read(value)

    return core_schema.no_info_wrap_validator_function(
        read, schema, serialization=core_schema.wrap_serializer_function_ser_schema(write, schema=schema)
    )


def read_messages(messages: Iterable[tuple[Any, str]]) -> tuple[list[tuple[Any, str]], list[OtherPart]]:
    """Returns the messages or items that can be read, each with its path, and what is left out. One that cannot be read
    and has a text is a neutral `Message`.

    Raises `InvalidRequest` for a system message that cannot be read, for one of the user that no other message of the
    user follows, and if nothing can be read.
    """
    sent = [*messages]
    users = [not isinstance(message, Unread) and getattr(message, "role", "") == "user" for message, _ in sent]
    newest = max((at for at, is_users in enumerate(users) if is_users), default=-1)
    kept: list[tuple[Any, str]] = []
    left_out: list[OtherPart] = []
    for at, (message, path) in enumerate(sent):
        if not isinstance(message, Unread):
            kept.append((message, path))
            continue
        if message.is_message and (message.role in ("system", "developer") or (message.role == "user" and at > newest)):
            raise message.refusal(path)
        said = message.message(path)
        if said is None:
            left_out.append(message.neutral(path))
        else:
            kept.append((said, path))
    if left_out and not kept:
        raise next(message.refusal(path) for message, path in sent)
    return kept, left_out
