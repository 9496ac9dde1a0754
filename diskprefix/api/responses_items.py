"""The input of OpenAI's responses API: a list of items, and the messages that they become.

What an assistant did in one turn comes as several items, and becomes one message: its reasoning, then its text, then
its tool calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from diskprefix.api.dialect import Json
from diskprefix.api.fields import MAX_MESSAGES, MAX_PARTS, Body, Markable, by_json_type
from diskprefix.api.openai_messages import InputAudio
from diskprefix.chat.messages import (
    AudioPart,
    CacheMark,
    ContentPart,
    ImagePart,
    Message,
    OtherPart,
    TextPart,
    ToolCall,
)


class TextContent(Markable):
    """Text."""

    type: Literal["input_text", "output_text"] = Field(description="`input_text`, or `output_text` of an assistant.")
    text: str = Field(description="The text itself.")


class Refusal(Body):
    """What an assistant said instead of an answer."""

    type: Literal["refusal"]
    refusal: str


class ImageContent(Body):
    """An image that is sent inside the request, for models that take images."""

    type: Literal["input_image"] = Field(description="`input_image`.")
    image_url: str = Field(description="`data:image/png;base64,…`. No other URL is fetched.")
    detail: str | None = Field(default=None, description="Accepted and ignored.")


class AudioContent(Body):
    """A sound that is sent inside the request, for models that take audio."""

    type: Literal["input_audio"] = Field(description="`input_audio`.")
    input_audio: InputAudio


class OtherContent(Body):
    """A content part that no model here takes. It is read so that the error can name its type."""

    type: Literal["input_text", "output_text", "refusal", "input_image", "input_audio", "input_file"]


def _tag(value: object, tags: dict[str, str], default: str | None) -> str | None:
    """Returns the tag of an object by its type; None for a value that is no object."""
    if not isinstance(value, dict):
        return None
    kind = value.get("type", default)
    return tags.get(kind, "~other") if isinstance(kind, str) else "~other"


_CONTENT_TAGS = {
    "input_text": "~text",
    "output_text": "~text",
    "refusal": "~refusal",
    "input_image": "~image",
    "input_audio": "~audio",
}
PartBody: TypeAlias = Annotated[
    Annotated[TextContent, Tag("~text")]
    | Annotated[Refusal, Tag("~refusal")]
    | Annotated[ImageContent, Tag("~image")]
    | Annotated[AudioContent, Tag("~audio")]
    | Annotated[OtherContent, Tag("~other")],
    Discriminator(
        lambda value: _tag(value, _CONTENT_TAGS, None),
        custom_error_type="type",
        custom_error_message="Input should be a content part with a type such as input_text",
    ),
]
Content: TypeAlias = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[PartBody], Field(max_length=MAX_PARTS), Tag("~list")],
    by_json_type("a string or a list of content parts"),
]


class MessageItem(Markable):
    """A message."""

    type: Literal["message"] = Field(default="message", description="`message`; may be left out.")
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] = Field(
        description="Who speaks. `developer` becomes `system` unless the chat template knows it."
    )
    content: Content = Field(description="Text, or a list of content parts.")


class CallItem(Body):
    """A call of a function by the assistant."""

    type: Literal["function_call"]
    id: str | None = None
    call_id: str = Field(min_length=1, description="The output of the function refers to it.")
    name: str = Field(min_length=1, description="Name of the function.")
    arguments: str = Field(description="Its arguments as JSON text.")


class OutputItem(Body):
    """What a function returned."""

    type: Literal["function_call_output"]
    id: str | None = None
    call_id: str = Field(min_length=1, description="The call that it answers.")
    output: Content = Field(description="Text, or a list of content parts.")


class ReasoningPart(Body):
    type: Literal["summary_text", "reasoning_text", "text"]
    text: str


class ReasoningItem(Body):
    """What the assistant thought. Templates that drop the reasoning of earlier turns drop it here, too."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS)] = Field(
        default=[], description="Used if there is no `content`."
    )
    content: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS)] | None = Field(
        default=None, description="The reasoning itself."
    )
    encrypted_content: str | None = Field(default=None, description="Ignored: this server does not encrypt.")


class ReferenceItem(Body):
    """An item of a stored response, of its input or of its output, in whose place it stands."""

    type: Literal["item_reference"] = Field(default="item_reference", description="`item_reference`.")
    id: str = Field(min_length=1, description="Id of the item.")


class OtherItem(Body):
    """An item of a hosted tool. It is read so that the error can name its type."""

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"]


_ITEM_TAGS = {
    "message": "~message",
    "function_call": "~call",
    "function_call_output": "~output",
    "reasoning": "~reasoning",
    "item_reference": "~reference",
}


def _kind_of_item(value: object) -> str | None:
    # Without a type it is a message, or, if it has an id alone, a reference.
    is_reference = isinstance(value, dict) and "role" not in value and "id" in value
    return _tag(value, _ITEM_TAGS, "item_reference" if is_reference else "message")


SpokenItem: TypeAlias = MessageItem | CallItem | OutputItem | ReasoningItem
Item: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("~message")]
    | Annotated[CallItem, Tag("~call")]
    | Annotated[OutputItem, Tag("~output")]
    | Annotated[ReasoningItem, Tag("~reasoning")]
    | Annotated[ReferenceItem, Tag("~reference")]
    | Annotated[OtherItem, Tag("~other")],
    Discriminator(
        _kind_of_item, custom_error_type="type", custom_error_message="Input should be an item, which is an object"
    ),
]
Input: TypeAlias = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[Item], Field(max_length=MAX_MESSAGES), Tag("~list")],
    by_json_type("a string or a list of items"),
]

_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


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
            form["content"] = [part | {"annotations": []} for part in form["content"]]
    return form


@dataclass
class _Turn:
    """What the assistant did since somebody else spoke, as far as it becomes one message."""

    path: str
    reasoning: list[str] = field(default_factory=list)
    content: list[ContentPart] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    mark: CacheMark | None = None

    def may_take(self, item: SpokenItem) -> bool:
        """Whether an item of the assistant comes where it would stand in the message."""
        return isinstance(item, CallItem) or not (self.content or self.calls)

    @property
    def message(self) -> Message:
        return Message(
            role="assistant",
            content=tuple(self.content),
            tool_calls=tuple(self.calls),
            reasoning="\n".join(self.reasoning) if self.reasoning else None,
            mark=self.mark,
            path=self.path,
        )


def messages_of(items: Iterable[tuple[SpokenItem, str]]) -> list[Message]:
    """Returns the messages of a conversation. Each item comes with the path where the client said it."""
    messages: list[Message] = []
    turn: _Turn | None = None
    names: dict[str, str] = {}
    for item, path in items:
        is_assistant = isinstance(item, CallItem | ReasoningItem) or (
            isinstance(item, MessageItem) and item.role == "assistant"
        )
        if turn is not None and not (is_assistant and turn.may_take(item)):
            messages.append(turn.message)
            turn = None
        if is_assistant:
            turn = turn or _Turn(path)
            _add(turn, item, path)
        elif isinstance(item, OutputItem):
            messages.append(_result(item, names.get(item.call_id), path))
        elif isinstance(item, MessageItem):
            parts = _parts(item.content, f"{path}.content")
            messages.append(Message(role=item.role, content=parts, mark=item.mark, path=path))
        if isinstance(item, CallItem):
            names[item.call_id] = item.name
    return messages if turn is None else [*messages, turn.message]


def _add(turn: _Turn, item: SpokenItem, path: str) -> None:
    if isinstance(item, CallItem):
        turn.calls.append(ToolCall(item.call_id, item.name, item.arguments))
    elif isinstance(item, ReasoningItem):
        text = "".join(part.text for part in item.content or item.summary)
        turn.reasoning += [text] if text else []
    elif isinstance(item, MessageItem):
        turn.content += _parts(item.content, f"{path}.content")
        turn.mark = item.mark


def _result(item: OutputItem, name: str | None, path: str) -> Message:
    return Message(
        role="tool", content=_parts(item.output, f"{path}.output"), name=name, tool_call_id=item.call_id, path=path
    )


def _parts(content: str | Sequence[Any], path: str) -> tuple[ContentPart, ...]:
    if isinstance(content, str):
        return (TextPart(content, path),)
    return tuple(_part(part, f"{path}.{index}") for index, part in enumerate(content))


def _part(part: Any, path: str) -> ContentPart:
    if isinstance(part, TextContent):
        return TextPart(part.text, f"{path}.text", part.mark)
    if isinstance(part, Refusal):
        return TextPart(part.refusal, f"{path}.refusal")
    if isinstance(part, ImageContent):
        return ImagePart(part.image_url, path, f"{path}.image_url")
    if isinstance(part, AudioContent):
        return AudioPart(part.input_audio.data, path, f"{path}.input_audio.data")
    return OtherPart(part.type.removeprefix("input_"), path)
