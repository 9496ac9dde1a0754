"""The input of OpenAI's responses API: a list of items, and the messages that they become.

The items of one turn of the assistant become one message: its reasoning, then its text, then its tool calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias, cast

from msgspec.structs import replace
from pydantic import AfterValidator, Field, PlainSerializer, model_validator
from pydantic_core import PydanticCustomError

from diskprefix.daemon.api.body_errors import REFUSED
from diskprefix.daemon.api.dialect import Json
from diskprefix.daemon.api.fields import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    Body,
    ImageDetail,
    Markable,
    OneOf,
    TextOrObject,
    empty_as,
    mark_beside_text,
    optional,
    require_content,
)
from diskprefix.daemon.api.openai_messages import TEXT_ARGUMENT, Refusal, TextOrImageUrl, TextPartBody, image_part
from diskprefix.daemon.api.responses_tools import SEARCH, ToolAsSent, defined_by, full_name
from diskprefix.daemon.api.unread import Unread, read_messages
from diskprefix.daemon.chat.messages import (
    ContentPart,
    JsonObject,
    Message,
    NewTool,
    OtherPart,
    TextPart,
    ToolCall,
    joined,
)
from diskprefix.daemon.json_values import whole_characters


class ImageContent(Markable):
    """An image that is sent inside the request, for models that take images."""

    type: Literal["input_image"] = Field(description="`input_image`.")
    image_url: TextOrImageUrl = Field(description="`data:image/png;base64,…`. No other URL is fetched.")
    detail: ImageDetail = None

    def neutral(self, path: str) -> ContentPart:
        return image_part(self.image_url, path, f"{path}.image_url", self.detail)


PartBody: TypeAlias = Annotated[
    TextPartBody | Refusal | ImageContent | Unread,
    OneOf("a content part with a type such as input_text", or_unread=True),
]
Content: TypeAlias = Annotated[
    str | Annotated[list[PartBody], Field(max_length=MAX_PARTS)], OneOf("a string or a list of content parts")
]


class MessageItem(Markable):
    """A message."""

    type: Literal["message"] = Field(default="message", description="`message`; may be left out.")
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] = Field(
        description="Who speaks. `developer` becomes `system` unless the chat template writes it."
    )
    content: Annotated[Content | None, AfterValidator(require_content)] = optional(
        "Text, or a list of content parts. An assistant may have none.", validate_default=True
    )

    def neutral(self, path: str) -> Message:
        content = self.content or ()
        mark = self.mark or mark_beside_text([] if isinstance(content, str) else content)
        return Message(role=self.role, content=_parts(content, f"{path}.content"), mark=mark, path=path)


class CallItem(Body):
    """A call of a function by the assistant."""

    type: Literal["function_call"]
    id: str | None = None
    call_id: str = Field(min_length=1, description="The output of the function refers to it.")
    name: str = Field(min_length=1, description="Name of the function.")
    namespace: str | None = optional("The namespace that it was offered in.")
    arguments: Annotated[str, empty_as("")] = Field(default="", description="Its arguments as JSON text.")

    def neutral(self, path: str) -> Message:
        call = ToolCall(self.call_id, full_name(self.name, self.namespace), self.arguments)
        return Message(role="assistant", tool_calls=(call,), path=path)


def text_argument(arguments: str) -> str:
    """Returns the text for a custom tool from the arguments of its call. Other arguments are returned unchanged."""
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
    namespace: str | None = optional("The namespace that it was offered in.")
    input: Annotated[str, empty_as("")] = Field(default="", description="Its text.")

    def neutral(self, path: str) -> Message:
        call = ToolCall(self.call_id, full_name(self.name, self.namespace), {TEXT_ARGUMENT: self.input})
        return Message(role="assistant", tool_calls=(call,), path=path)


class OutputItem(Body):
    """The output of a function, a custom tool or a command. A command's output may name its call by `id` instead."""

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
    """An action on a computer, or a command. To the model it is a call of the function `computer` or `local_shell`."""

    type: Literal["computer_call", "local_shell_call"]
    id: str | None = None
    call_id: str = Field(min_length=1, description="The screenshot or the output after it refers to it.")
    action: JsonObject | None = optional("What it does.")
    actions: Annotated[list[JsonObject], Field(max_length=MAX_PARTS)] | None = optional("Or all that it does.")

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.action is None and self.actions is None:
            raise PydanticCustomError(REFUSED, "needs the field action or actions")
        return self

    def neutral(self, path: str) -> Message:
        action = {"actions": self.actions} if self.action is None else self.action
        call = ToolCall(self.call_id, self.type.removesuffix("_call"), action)
        return Message(role="assistant", tool_calls=(call,), path=path)


class Screenshot(Body):
    type: Literal["computer_screenshot"]
    image_url: TextOrImageUrl = Field(description="`data:image/png;base64,…`. No other URL is fetched.")


class ScreenshotItem(Body):
    """The screenshot after an action on a computer."""

    type: Literal["computer_call_output"]
    id: str | None = None
    call_id: str = Field(min_length=1, description="The action that it follows.")
    output: Screenshot

    def neutral(self, path: str) -> Message:
        image = image_part(self.output.image_url, f"{path}.output", f"{path}.output.image_url")
        return Message(role="tool", content=(image,), tool_call_id=self.call_id, path=path)


SentTools: TypeAlias = Annotated[
    list[ToolAsSent], Field(max_length=MAX_TOOLS), PlainSerializer(lambda tools: tools), empty_as([])
]


class ToolsItem(Body):
    """Tools that are offered from here on: Codex sends its tools so."""

    type: Literal["additional_tools"]
    id: str | None = None
    tools: SentTools = Field(default=[], description="As `tools` of the request.")

    @property
    def served(self) -> list[NewTool]:
        """Those that are served here."""
        return defined_by(cast("list[JsonObject]", self.tools))

    def neutral(self, path: str) -> Message:
        return Message(role="system", new_tools=self.served, path=path)


class SearchItem(Body):
    """A search of the assistant for tools. To the model it is a call of the function `tool_search`."""

    type: Literal["tool_search_call"]
    id: str | None = None
    call_id: str | None = optional("The output after it refers to it.")
    arguments: Annotated[TextOrObject, empty_as({})] = Field(default={}, description="Its arguments.")

    def neutral(self, path: str) -> Message:
        return Message(role="assistant", tool_calls=(ToolCall(self.call_id, SEARCH, self.arguments),), path=path)


class FoundToolsItem(Body):
    """The tools that a search has found. They are offered from here on."""

    type: Literal["tool_search_output"]
    id: str | None = None
    call_id: str | None = optional("The search that it answers.")
    tools: SentTools = Field(default=[], description="As `tools` of the request.")

    def neutral(self, path: str) -> Message:
        tools = defined_by(cast("list[JsonObject]", self.tools))
        text = TextPart("\n".join(tool.name for tool in tools), path)
        return Message(role="tool", content=(text,), tool_call_id=self.call_id, new_tools=tools, path=path)


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
    content: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS)] | None = optional("The reasoning itself.")
    encrypted_content: str | None = optional("Ignored: this server does not encrypt.")

    def neutral(self, path: str) -> Message:
        text = "".join(part.text for part in self.content or self.summary)
        return Message(role="assistant", reasoning=text or None, path=path)


class CompactionItem(Body):
    """A summary made by `POST /v1/responses/compact`. The items it replaces are no longer sent. That of another server,
    which only that server can decrypt, becomes a note."""

    type: Literal["compaction"]
    id: str | None = None
    encrypted_content: str = Field(description="As this server returned it. It is not encrypted.")

    @property
    def is_own(self) -> bool:
        return self.encrypted_content.startswith(_OWN)

    def neutral(self, path: str) -> Message:
        path = f"{path}.encrypted_content"
        text = f"What was said and done before, in short:\n\n{self.encrypted_content.removeprefix(_OWN)}"
        text = text if self.is_own else "[compaction left out: only the server that made it can read it]"
        return Message(role="user", content=(TextPart(text, path),), path=path)


class TriggerItem(Body):
    """Asks for a summary of the conversation before it, as an item of type `compaction`. It counts as the last item
    only."""

    type: Literal["compaction_trigger"]


class ReferenceItem(Body):
    """Stands for an item in the input or output of a stored response."""

    type: Literal["item_reference"] = Field(default="item_reference", description="`item_reference`.")
    id: str = Field(min_length=1, description="Id of the item.")


SpokenItem: TypeAlias = (
    MessageItem
    | CallItem
    | CustomCallItem
    | OutputItem
    | ActionItem
    | ScreenshotItem
    | ToolsItem
    | SearchItem
    | FoundToolsItem
    | ReasoningItem
    | CompactionItem
)
Item: TypeAlias = Annotated[
    SpokenItem | ReferenceItem | TriggerItem | Unread,
    # An item without a type is a message, or a reference if it has an id alone.
    OneOf(
        "an item, which is an object",
        default=lambda value: "item_reference" if "role" not in value and "id" in value else "message",
        or_unread=True,
    ),
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
    "additional_tools": "at",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "reasoning": "rs",
    "compaction": "cmp",
}
_OWN = "diskprefix: "
"""The beginning of this server's summaries. Other servers encrypt theirs, so that no model here can read them."""


def compacted(summary: str) -> str:
    """Returns the `encrypted_content` of an item of type `compaction`."""
    return _OWN + summary


def item_id(response_id: str, kind: str, index: int, *, is_input: bool = False) -> str:
    """Returns the id of an item of a response. It contains the response's id, so that a reference finds the item."""
    return f"{_ID_PREFIXES.get(kind, 'item')}_{response_id.removeprefix('resp_')}_{'i' if is_input else ''}{index}"


def response_of(id_: str) -> str:
    """Returns the id of the response that an item belongs to, if this server made the item's id."""
    return f"resp_{id_.partition('_')[2].partition('_')[0]}"


def stored_form(item: SpokenItem | Unread) -> Json:
    """Returns an item in the form in which the API lists it: with a list of content parts."""
    if isinstance(item, Unread):
        return {"type": "message"} | (item.sent if isinstance(item.sent, dict) else {"content": item.sent})
    form: dict[str, Any] = item.model_dump(exclude_none=True)
    if isinstance(item, MessageItem):
        form["status"] = "completed"
        if isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            form["content"] = [{"type": kind, "text": item.content}]
        if item.role == "assistant":
            parts = form.get("content", ())
            form["content"] = [part | {"annotations": []} if isinstance(part, dict) else part for part in parts]
    return form


def messages_of(items: Iterable[tuple[SpokenItem | Unread, str]]) -> tuple[list[Message], list[OtherPart]]:
    """Returns the messages of a conversation, and what is left out of it. Each item comes with its path in the body.
    Raises the errors of `read_messages`."""
    runs: list[list[Message]] = []
    names: dict[str | None, str] = {}
    # Tools that are not served are named with the other tools.
    items = [(item, path) for item, path in items if not isinstance(item, ToolsItem) or item.served]
    messages, left_out = read_messages(items)
    left_out += (
        OtherPart(item.type, path) for item, path in items if isinstance(item, CompactionItem) and not item.is_own
    )
    for message in messages:
        names |= {call.id: call.name for call in message.tool_calls}
        if message.role == "tool":
            message = replace(message, name=names.get(message.tool_call_id))
        if runs and _continues(runs[-1][-1], message):
            runs[-1].append(message)
        else:
            runs.append([message])
    return [joined(run) for run in runs], left_out


def _continues(before: Message, message: Message) -> bool:
    """Returns whether two items belong to one turn of the assistant: reasoning, then text, then calls."""
    is_turn = before.role == message.role == "assistant"
    return is_turn and bool(message.tool_calls or not (before.content or before.tool_calls))


def _parts(content: str | Sequence[PartBody], path: str) -> tuple[ContentPart, ...]:
    if isinstance(content, str):
        return (TextPart(content, path),)
    return tuple(part.neutral(f"{path}.{index}") for index, part in enumerate(content))
