"""The input of OpenAI's responses API: a list of items, the messages that they become, and stored responses.

The items of one turn of the assistant become one message: its reasoning, then its text, then its tool calls.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from pydantic import AfterValidator, Field, TypeAdapter, model_validator

from diskprefix.api.dialect import Json, json_text
from diskprefix.api.fields import (
    MAX_MESSAGES,
    MAX_PARTS,
    AskedDetail,
    Body,
    Markable,
    OneOf,
    detail_of,
    empty_as,
    require_content,
)
from diskprefix.api.openai_messages import Refusal
from diskprefix.chat.messages import (
    ContentPart,
    ImagePart,
    JsonObject,
    Message,
    OtherPart,
    TextPart,
    ToolCall,
    joined,
)
from diskprefix.errors import InvalidRequest, ResponseNotFound, StoreUnavailable
from diskprefix.json_values import whole_characters
from diskprefix.printable import shown
from diskprefix.store.note_record import NoteKind
from diskprefix.store.notes import TenantNotes
from diskprefix.tokens import TokenIds
from diskprefix.units import format_size


class TextContent(Markable):
    """Text."""

    type: Literal["input_text", "output_text"] = Field(description="`input_text`, or `output_text` of an assistant.")
    text: str = Field(description="The text itself.")

    def neutral(self, path: str) -> ContentPart:
        return TextPart(self.text, f"{path}.text", self.mark)


class ImageContent(Body):
    """An image that is sent inside the request, for models that take images."""

    type: Literal["input_image"] = Field(description="`input_image`.")
    image_url: str = Field(description="`data:image/png;base64,…`. No other URL is fetched.")
    detail: AskedDetail | None = Field(
        default=None, description="`low`: at most 512 pixels wide and high; `auto`: 2048; `high`: as large as it is."
    )

    def neutral(self, path: str) -> ContentPart:
        return ImagePart(self.image_url, path, f"{path}.image_url", detail_of(self.detail))


class OtherContent(Body):
    """A content part that no model here takes. It is read so that the error can name its type."""

    type: Literal["input_text", "output_text", "refusal", "input_image", "input_audio", "input_file"]

    def neutral(self, path: str) -> ContentPart:
        return OtherPart(self.type.removeprefix("input_"), path)


PartBody: TypeAlias = Annotated[
    TextContent | Refusal | ImageContent | OtherContent,
    OneOf("a content part with a type such as input_text", OtherContent),
]
Content: TypeAlias = Annotated[
    str | Annotated[list[PartBody], Field(max_length=MAX_PARTS)], OneOf("a string or a list of content parts")
]


class MessageItem(Markable):
    """A message."""

    type: Literal["message"] = Field(default="message", description="`message`; may be left out.")
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] = Field(
        description="Who speaks. `developer` becomes `system` unless the chat template knows it."
    )
    content: Annotated[Content | None, AfterValidator(require_content)] = Field(
        default=None, validate_default=True, description="Text, or a list of content parts. An assistant may have none."
    )

    def neutral(self, path: str) -> Message:
        content = _parts(self.content or (), f"{path}.content")
        return Message(role=self.role, content=content, mark=self.mark, path=path)


def full_name(name: str, namespace: str | None) -> str:
    """Returns the name by which the model knows a function."""
    return name if namespace is None else f"{namespace}__{name}"


class CallItem(Body):
    """A call of a function by the assistant."""

    type: Literal["function_call"]
    id: str | None = None
    call_id: str = Field(min_length=1, description="The output of the function refers to it.")
    name: str = Field(min_length=1, description="Name of the function.")
    namespace: str | None = Field(default=None, description="The namespace that it was offered in.")
    arguments: Annotated[str, empty_as("")] = Field(default="", description="Its arguments as JSON text.")

    def neutral(self, path: str) -> Message:
        call = ToolCall(self.call_id, full_name(self.name, self.namespace), self.arguments)
        return Message(role="assistant", tool_calls=(call,), path=path)


TEXT_ARGUMENT = "input"
"""The name of the one argument of a custom tool, which the model knows as a function."""


def text_argument(arguments: str) -> str:
    """Returns the text for a custom tool that is the one argument of a call; other arguments as they are."""
    try:
        [text] = json.loads(whole_characters(arguments)).values()
    except (ValueError, AttributeError, RecursionError):
        return arguments
    return text if isinstance(text, str) else arguments


class CustomCallItem(Body):
    """A call of a custom tool by the assistant."""

    type: Literal["custom_tool_call"]
    id: str | None = None
    call_id: str = Field(min_length=1, description="The output of the tool refers to it.")
    name: str = Field(min_length=1, description="Name of the tool.")
    namespace: str | None = Field(default=None, description="The namespace that it was offered in.")
    input: Annotated[str, empty_as("")] = Field(default="", description="Its text.")

    def neutral(self, path: str) -> Message:
        call = ToolCall(self.call_id, full_name(self.name, self.namespace), {TEXT_ARGUMENT: self.input})
        return Message(role="assistant", tool_calls=(call,), path=path)


class OutputItem(Body):
    """The output of a function, of a custom tool or of a command. That of a command may name its call by `id` alone."""

    type: Literal["function_call_output", "custom_tool_call_output", "local_shell_call_output"]
    id: str | None = None
    call_id: str = Field(min_length=1, description="The call that it answers.")
    output: Annotated[Content, empty_as("")] = Field(default="", description="Text, or a list of content parts.")

    @model_validator(mode="before")
    @classmethod
    def _names_its_call(cls, item: JsonObject) -> JsonObject:
        is_command = item.get("type") == "local_shell_call_output"
        return {"call_id": item.get("id")} | item if is_command else item

    def neutral(self, path: str) -> Message:
        parts = _parts(self.output, f"{path}.output")
        return Message(role="tool", content=parts, tool_call_id=self.call_id, path=path)


class ActionItem(Body):
    """An action of the assistant on a computer, or a command. To the model it is a call of a function, `computer` or
    `local_shell`."""

    type: Literal["computer_call", "local_shell_call"]
    id: str | None = None
    call_id: str = Field(min_length=1, description="The screenshot or the output after it refers to it.")
    action: JsonObject = Field(description="What it does.")

    def neutral(self, path: str) -> Message:
        call = ToolCall(self.call_id, self.type.removesuffix("_call"), self.action)
        return Message(role="assistant", tool_calls=(call,), path=path)


class Screenshot(Body):
    type: Literal["computer_screenshot"]
    image_url: str = Field(description="`data:image/png;base64,…`. No other URL is fetched.")


class ScreenshotItem(Body):
    """The screenshot after an action on a computer."""

    type: Literal["computer_call_output"]
    id: str | None = None
    call_id: str = Field(min_length=1, description="The action that it follows.")
    output: Screenshot

    def neutral(self, path: str) -> Message:
        image = ImagePart(self.output.image_url, f"{path}.output", f"{path}.output.image_url")
        return Message(role="tool", content=(image,), tool_call_id=self.call_id, path=path)


class ReasoningPart(Body):
    type: Literal["summary_text", "reasoning_text", "text"]
    text: str


class ReasoningItem(Body):
    """Reasoning of the assistant. Templates that drop the reasoning of earlier turns drop it here, too."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS), empty_as([])] = Field(
        default=[], description="Used if there is no `content`."
    )
    content: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS)] | None = Field(
        default=None, description="The reasoning itself."
    )
    encrypted_content: str | None = Field(default=None, description="Ignored: this server does not encrypt.")

    def neutral(self, path: str) -> Message:
        text = "".join(part.text for part in self.content or self.summary)
        return Message(role="assistant", reasoning=text or None, path=path)


class CompactionItem(Body):
    """A conversation in short, from `POST /v1/responses/compact`. What it stands for comes before it no more."""

    type: Literal["compaction"]
    id: str | None = None
    encrypted_content: str = Field(description="As this server returned it. It is not encrypted.")

    def neutral(self, path: str) -> Message:
        """Raises `InvalidRequest` for an item of another server."""
        path = f"{path}.encrypted_content"
        if not self.encrypted_content.startswith(_OWN):
            raise InvalidRequest.at(path, "was not made by this server, which cannot decrypt it")
        text = f"What was said and done before, in short:\n\n{self.encrypted_content.removeprefix(_OWN)}"
        return Message(role="user", content=(TextPart(text, path),), path=path)


class TriggerItem(Body):
    """Asks for the conversation before it in short, as an item of type `compaction`. It is the last item."""

    type: Literal["compaction_trigger"]


class ReferenceItem(Body):
    """An item of a stored response, of its input or of its output, in whose place it stands."""

    type: Literal["item_reference"] = Field(default="item_reference", description="`item_reference`.")
    id: str = Field(min_length=1, description="Id of the item.")


class HostedItem(Body):
    """An item of a tool of OpenAI's, which is not offered to the model here. It is left out."""

    type: Literal[
        "web_search_call",
        "file_search_call",
        "image_generation_call",
        "code_interpreter_call",
        "shell_call",
        "shell_call_output",
        "apply_patch_call",
        "apply_patch_call_output",
        "mcp_list_tools",
        "mcp_call",
        "mcp_approval_request",
        "mcp_approval_response",
    ]


class OtherItem(Body):
    """An item of a hosted tool. It is read so that the error can name its type."""

    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "local_shell_call",
        "local_shell_call_output",
        "computer_call",
        "computer_call_output",
        "reasoning",
        "item_reference",
    ]


def _type_of_item(value: JsonObject) -> str:
    """Returns the type of an item without one: a message, or a reference if it has an id alone."""
    return "item_reference" if "role" not in value and "id" in value else "message"


SpokenItem: TypeAlias = (
    MessageItem | CallItem | CustomCallItem | OutputItem | ActionItem | ScreenshotItem | ReasoningItem | CompactionItem
)
Item: TypeAlias = Annotated[
    SpokenItem | HostedItem | ReferenceItem | TriggerItem | OtherItem,
    OneOf("an item, which is an object", OtherItem, _type_of_item),
]
Input: TypeAlias = Annotated[
    str | Annotated[list[Item], Field(max_length=MAX_MESSAGES)], OneOf("a string or a list of items")
]

_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
    "computer_call": "cc",
    "computer_call_output": "cco",
    "reasoning": "rs",
    "compaction": "cmp",
}
_OWN = "diskprefix: "
"""The beginning of what this server wrote in short: other servers encrypt it, and no model could read that."""


def compacted(summary: str) -> str:
    """Returns the `encrypted_content` of an item of type `compaction`."""
    return _OWN + summary


def item_id(response_id: str, kind: str, index: int, *, is_input: bool = False) -> str:
    """Returns the id of an item of a response: it holds that of the response, so that a reference finds the item."""
    return f"{_ID_PREFIXES[kind]}_{response_id.removeprefix('resp_')}_{'i' if is_input else ''}{index}"


def response_of(id_: str) -> str:
    """Returns the id of the response that an item belongs to, if this server made the item's id."""
    return f"resp_{id_.partition('_')[2].partition('_')[0]}"


def stored_form(item: SpokenItem) -> Json:
    """Returns an item in the form in which the API lists it: with a list of content parts."""
    form: dict[str, Any] = item.model_dump(exclude_none=True)
    if isinstance(item, MessageItem):
        form["status"] = "completed"
        if isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            form["content"] = [{"type": kind, "text": item.content}]
        if item.role == "assistant":
            form["content"] = [part | {"annotations": []} for part in form.get("content", ())]
    return form


def messages_of(items: Iterable[tuple[SpokenItem, str]]) -> list[Message]:
    """Returns the messages of a conversation. Each item comes with the path where the client said it."""
    runs: list[list[Message]] = []
    names: dict[str | None, str] = {}
    for item, path in items:
        message = item.neutral(path)
        names |= {call.id: call.name for call in message.tool_calls}
        if message.role == "tool":
            message = replace(message, name=names.get(message.tool_call_id))
        if runs and _continues(runs[-1][-1], message):
            runs[-1].append(message)
        else:
            runs.append([message])
    return [joined(run) for run in runs]


def _continues(before: Message, message: Message) -> bool:
    """Returns whether two items of the assistant are one turn: they keep the order of reasoning, text and calls."""
    is_turn = before.role == message.role == "assistant"
    return is_turn and bool(message.tool_calls or not (before.content or before.tool_calls))


def _parts(content: str | Sequence[PartBody], path: str) -> tuple[ContentPart, ...]:
    if isinstance(content, str):
        return (TextPart(content, path),)
    return tuple(part.neutral(f"{path}.{index}") for index, part in enumerate(content))


log = logging.getLogger("diskprefix")

_DELETION_S = 30.0
"""The time for a deletion to be written."""
MAX_STORED_BYTES = 4 << 20
"""The largest stored response, before compression. Compressing it takes about 20 ms."""

MAX_CONVERSATION_BYTES = 16 << 20
"""The most bytes of stored responses and items that one request continues or refers to.
They take twenty times as much memory, and on disk they may be a thousandth of it."""

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
Said: TypeAlias = tuple[SpokenItem, str]
"""An item and its path."""


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`input` are the items of the request itself, without those of the response before."""

    response: Json
    input: list[Json]
    previous: str | None = None

    @property
    def input_items(self) -> list[Json]:
        """The items of the input. Those that came without an id have one of this server's."""
        id_ = self.response["id"]
        return [
            {"id": item_id(id_, item["type"], index, is_input=True), **item} for index, item in enumerate(self.input)
        ]

    @property
    def items(self) -> list[Json]:
        return [*self.input_items, *self.response["output"]]


@dataclass
class ResponseStore:
    """One tenant's stored responses, for one request. Reading waits for the disk. A store that fails holds none."""

    notes: TenantNotes
    _num_bytes: int = field(default=0, init=False)
    """The bytes that were read so far, and those of items that were referred to."""
    _items: dict[str, dict[str, Json]] = field(default_factory=dict, init=False)
    """Items by the ids of the response and of the item, for responses that were referred to."""

    def get(self, id_: str) -> StoredResponse:
        """Raises `ResponseNotFound`, also for a response of another tenant."""
        found = _stored(self.notes.get(NoteKind.RESPONSE, id_))
        if found is None:
            raise ResponseNotFound(f"response {shown(id_)!r} is not stored here")
        return found

    def delete(self, id_: str) -> None:
        """Raises `ResponseNotFound`, or `StoreUnavailable` if the response may come back when the process is killed."""
        was_there = self.notes.delete(NoteKind.RESPONSE, id_)
        if not self.notes.settle(NoteKind.RESPONSE, id_, _DELETION_S):
            raise StoreUnavailable(f"response {shown(id_)!r} is not removed from the disk yet; try again")
        if not was_there:
            raise ResponseNotFound(f"response {shown(id_)!r} is not stored here")

    def put(self, response: Json, input_json: bytes, prompt: TokenIds | None = None) -> None:
        """Store a response. `input_json` is the JSON text of the items of its input, `prompt` what was made of the
        whole conversation: the response goes with it."""
        head = json_text({"response": response, "previous": response["previous_response_id"]})
        content = head[:-1] + b',"input":' + input_json + b"}"
        is_kept = len(content) <= MAX_STORED_BYTES and self.notes.put(
            NoteKind.RESPONSE, response["id"], content, prompt
        )
        if not is_kept:
            log.warning("[server] %s is not stored: it is too large, or the store fails", response["id"])

    def items_of(self, id_: str) -> list[Json]:
        """Returns the items of the conversation that a stored response was made from, the oldest first.

        Raises `ResponseNotFound`, with the code `previous_response_not_found` if one before it is gone.
        """
        response = self.get(id_)
        return [*self._conversation(response.previous), *response.input_items]

    def history(self, id_: str) -> list[Said]:
        """Returns the items that a response with this `previous_response_id` continues."""
        return [(item, "previous_response_id") for item in _parsed(self._conversation(id_))]

    def referred(self, item: ReferenceItem, path: str) -> Said:
        """Returns the item that a reference stands for. Raises `InvalidRequest` if it is not stored."""
        response_id, param = response_of(item.id), f"{path}.id"
        if response_id not in self._items:
            stored = self._counted(response_id, param)
            self._items[response_id] = {} if stored is None else {one["id"]: one for one in stored.items}
        found = self._items[response_id].get(item.id)
        if found is None:
            raise InvalidRequest.at(param, f"item {shown(item.id)!r} is not stored here")
        self._count(len(json_text(found)), param)
        return _parsed([found])[0], path

    def _conversation(self, id_: str | None) -> list[Json]:
        """Returns the items up to and with a response's output. Raises `InvalidRequest` if a part of them is gone."""
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
        """Returns a stored response. Raises `InvalidRequest` at `param` if all that were read are too large."""
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


def _parsed(items: list[Json]) -> list[SpokenItem]:
    """Stored items were checked when they came."""
    return [item for item in _ITEMS.validate_python(items) if isinstance(item, SpokenItem)]
