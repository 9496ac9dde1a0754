"""Values of a history that cannot be read here: they are left out of the prompt, and never refused.

New types of items and blocks appear monthly, and a client sends its history again in each request, so that an error
would never end. Only in the newest message of the user, and in system messages, are they refused, by their path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, get_args

from msgspec import Struct
from msgspec.structs import replace
from pydantic import BaseModel, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema

from diskprefix.daemon.api.body_errors import first_error
from diskprefix.daemon.chat.messages import Message, OtherPart, Role, TextPart
from diskprefix.errors import InvalidRequest
from diskprefix.printable import shown

T = TypeVar("T")

_KIND_CHARS = 48
_ROLES: Mapping[str, Role] = {role: role for role in get_args(Role)}
_SYSTEM = ("system", "developer")
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
    def is_of_new_type(self) -> bool:
        return self._get("type") not in (None, "message")

    @property
    def has_more_than_text(self) -> bool:
        return isinstance(self.sent, dict) and not self.sent.keys() <= {"role", "content"}

    @property
    def call_ids(self) -> frozenset[str]:
        """The ids of the calls in it, to which results refer."""
        lists = (each for name in ("tool_calls", "content") if isinstance(each := self._get(name), list))
        calls = [self.sent, *(call for each in lists for call in each)]
        ids = (call.get(name) for call in calls if isinstance(call, dict) for name in ("id", "call_id"))
        return frozenset(id_ for id_ in ids if isinstance(id_, str))

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
        kind = self.kind.removeprefix("input_")
        if self.kind in _MEDIA:
            return OtherPart(kind, path)
        said = text if isinstance(text, str) else None
        return OtherPart(kind, path, self.problem, self.at, said, call_ids=self.call_ids)

    def message(self, path: str) -> Message | None:
        """Returns a message that cannot be read, with its text alone; None for what is no message or has no text."""
        content = self.sent if isinstance(self.sent, str) else self._get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if not self.is_message or not texts or (self.is_of_new_type and self.role in _SYSTEM):
            return None
        content_parts = tuple(TextPart(text, f"{path}.content") for text in texts)
        return Message(role=self.role, content=content_parts, path=path)

    def _get(self, name: str) -> Any:
        return self.sent.get(name) if isinstance(self.sent, dict) else None


def read_or_none(value: T | Unread | None) -> T | None:
    """Returns the value of a field, None if it cannot be read."""
    return None if isinstance(value, Unread) else value


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


def _neutral(message: Any, path: str) -> Iterable[Message]:
    return (message.neutral(path),)


def read_messages(
    messages: Iterable[tuple[Any, str]], neutral: Callable[[Any, str], Iterable[Message]] = _neutral
) -> tuple[list[Message], list[OtherPart]]:
    """Returns messages or items, each of which comes with its path, as neutral messages, and what is left out. Of a
    message that cannot be read, the text stays.

    The user's newest message is the last one as it was sent, unless it has results of calls: its text may be new, but
    a client cannot take back what its tools return. Raises `InvalidRequest` for what cannot be read in it and in system
    messages, and if nothing can be read.
    """
    sent = [*messages]
    newest = max((at for at, (message, _) in enumerate(sent) if _is_users(message)), default=-1)
    read: list[Message] = []
    left_out: list[OtherPart] = []
    for at, (message, path) in enumerate(sent):
        if not isinstance(message, Unread):
            if at == newest or getattr(message, "role", "") in _SYSTEM:
                refuse_unread(message, path)
            left_out += (OtherPart(name, f"{path}.{name}") for name, _ in _unread_fields(message))
            new = neutral(message, path)
        elif at == newest or (message.is_message and message.role in _SYSTEM and not message.is_of_new_type):
            raise message.refusal(path)
        else:
            said = message.message(path)
            if said is None or message.has_more_than_text:
                left_out.append(message.neutral(path))
            new = [] if said is None else [said]
        read += new if at == newest else map(_in_history, new)
    if left_out and not read:
        raise next(message.refusal(path) for message, path in sent if isinstance(message, Unread))
    return read, left_out


def _is_users(message: Any) -> bool:
    if isinstance(message, Unread):
        return message.is_message and message.role == "user"
    return getattr(message, "role", "") == "user" and not getattr(message, "has_results", False)


def _in_history(message: Message) -> Message:
    if not message.pictures:
        return message
    parts = (part if isinstance(part, TextPart) else replace(part, in_history=True) for part in message.content)
    return replace(message, content=tuple(parts))


def refuse_unread(sent: object, path: str) -> None:
    """Raises the error of the first field that cannot be read, at any depth. Elements of lists are not looked at: what
    a content part is worth depends on the model."""
    if isinstance(sent, list):
        for index, each in enumerate(sent):
            refuse_unread(each, f"{path}.{index}")
    elif isinstance(sent, BaseModel):
        for name, unread in _unread_fields(sent):
            raise unread.refusal(f"{path}.{name}")
        for name in type(sent).model_fields:
            refuse_unread(getattr(sent, name), f"{path}.{name}")


def _unread_fields(sent: object) -> Iterator[tuple[str, Unread]]:
    names = type(sent).model_fields if isinstance(sent, BaseModel) else ()
    return ((name, value) for name in names if isinstance(value := getattr(sent, name), Unread))
