"""The messages, content parts and tools of OpenAI's chat API, with `tool_choice` and `response_format`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, cast

from pydantic import AfterValidator, ConfigDict, Field

from diskprefix.daemon.api.fields import (
    AS_SENT,
    MAX_PARTS,
    Body,
    CacheControl,
    ImageDetail,
    Markable,
    MarkableStrictly,
    NamedTool,
    OneOf,
    TextOrObject,
    Typed,
    UnmarkableInMessage,
    detail_of,
    empty_as,
    mark_beside_text,
    optional,
    require_content,
)
from diskprefix.daemon.api.parsed_request import OF_ONE_OF, TextFormat, ToolChoice
from diskprefix.daemon.api.unread import OrUnread, Unread, read_messages, read_or_none
from diskprefix.daemon.chat.messages import (
    CacheMark,
    ContentPart,
    Conversation,
    ImagePart,
    JsonObject,
    Message,
    OtherPart,
    Role,
    TextPart,
    ToolCall,
)
from diskprefix.errors import InvalidRequest


class TextPartBody(Markable):
    """Text in the content of a message."""

    type: Literal["text", "input_text", "output_text"] = Field(description="`text`, or a name of it in other APIs.")
    text: str = Field(description="The text itself.")

    def neutral(self, path: str) -> ContentPart:
        return TextPart(self.text, f"{path}.text", self.mark)


class ImageUrl(UnmarkableInMessage):
    """An image that is sent inside the request."""

    url: str = Field(description="`data:image/png;base64,…`: PNG, JPEG, WebP, GIF or BMP. No other URL is fetched.")
    detail: ImageDetail = None


TextOrImageUrl: TypeAlias = Annotated[ImageUrl | str, OneOf("an object with a url, or a data: URI", ImageUrl)]
"""An image's URI, as an object (the chat API of OpenAI) or as a text (its Responses API, Mistral)."""


def image_part(sent: ImageUrl | str, path: str, uri_path: str, detail: ImageDetail = None) -> ImagePart:
    """Returns an image. `path` is the path of the content part in the body, `uri_path` the path of `sent`."""
    if isinstance(sent, str):
        return ImagePart(sent, path, uri_path, detail_of(detail))
    return ImagePart(sent.url, path, f"{uri_path}.url", detail_of(sent.detail or detail))


class ImagePartBody(Markable):
    """An image, for models that take images."""

    type: Literal["image_url"] = Field(description="`image_url`.")
    image_url: TextOrImageUrl

    def neutral(self, path: str) -> ContentPart:
        return image_part(self.image_url, path, f"{path}.image_url")


class Refusal(Body):
    """A refusal of the assistant."""

    type: Literal["refusal"]
    refusal: str

    def neutral(self, path: str) -> ContentPart:
        return TextPart(self.refusal, f"{path}.refusal")


PartBody: TypeAlias = Annotated[
    TextPartBody | ImagePartBody | Refusal | Unread,
    OneOf("a content part whose type is text or image_url", or_unread=True),
]
Content: TypeAlias = Annotated[
    str | Annotated[list[PartBody], Field(max_length=MAX_PARTS)], OneOf("a string or a list of content parts")
]


class FunctionCall(UnmarkableInMessage):
    """The function that the assistant called."""

    name: str = Field(min_length=1, description="Name of the function.")
    arguments: TextOrObject | None = optional("Its arguments: JSON text, as OpenAI sends it, or an object.")


class ToolCallBody(UnmarkableInMessage):
    """A tool call of an earlier assistant message."""

    id: str | None = optional("The `tool_call_id` of the tool's answer refers to it.")
    type: Literal["function"] = Field(default="function", description="`function`.")
    function: FunctionCall

    @property
    def neutral(self) -> ToolCall:
        return ToolCall(self.id, self.function.name, self.function.arguments or "")


TEXT_ARGUMENT = "input"
"""The name of a custom tool's only argument. The model gets a custom tool as a function."""


class CustomCall(UnmarkableInMessage):
    """The custom tool that the assistant called."""

    name: str = Field(min_length=1, description="Name of the tool.")
    input: Annotated[str, empty_as("")] = Field(default="", description="Its text.")


class CustomCallBody(UnmarkableInMessage):
    """A call of a custom tool in an earlier assistant message."""

    id: str | None = optional("The `tool_call_id` of the tool's answer refers to it.")
    type: Literal["custom"] = Field(description="`custom`.")
    custom: CustomCall

    @property
    def neutral(self) -> ToolCall:
        return ToolCall(self.id, self.custom.name, {TEXT_ARGUMENT: self.custom.input})


AnyCallBody: TypeAlias = Annotated[
    ToolCallBody | CustomCallBody | Unread, OneOf("a call", default=lambda _value: "function", or_unread=True)
]


OptionalText: TypeAlias = Annotated[str | Unread | None, OrUnread(str | None)]


class MessageBody(Markable):
    """One message of the conversation."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"role": {"enum": ["assistant", "tool", "function"]}}},
                {"properties": {"content": {"not": {"type": "null"}}}, "required": ["content"]},
            ]
        }
    )

    role: Role = Field(description="Who speaks. `developer` becomes `system` unless the chat template writes it.")
    content: Annotated[Content | None, AfterValidator(require_content)] = optional(
        "Text, or a list of content parts. An assistant's message and a tool's may have none.", validate_default=True
    )
    refusal: OptionalText = optional("The assistant's refusal, if there is no `content`.")
    name: OptionalText = optional("Name of the speaker, for chat templates that render it.")
    tool_calls: list[AnyCallBody] | None = optional("Tool calls of an assistant message.", max_length=MAX_PARTS)
    tool_call_id: str | None = optional("In a tool message: the call that it answers.")
    reasoning_content: OptionalText = optional("The reasoning of the assistant.")
    reasoning: OptionalText = optional("Another name for `reasoning_content`.")

    @property
    def is_begun(self) -> bool:
        """Returns whether the message is an assistant's text alone, which the reply may continue."""
        has_text = any(part.text for part in self.neutral("").texts)
        return self.role == "assistant" and has_text and not self.tool_calls

    def neutral(self, path: str) -> Message:
        """Returns the message. `path` is its path in the body."""
        content = read_or_none(self.refusal) if self.content is None else self.content
        reasoning = read_or_none(self.reasoning_content)
        parts: tuple[ContentPart, ...] = ()
        if isinstance(content, str):
            parts = (TextPart(content, f"{path}.content"),)
        elif content is not None:
            parts = tuple(part.neutral(f"{path}.content.{index}") for index, part in enumerate(content))
        calls = [*enumerate(self.tool_calls or ())]
        unread = (call.neutral(f"{path}.tool_calls.{at}") for at, call in calls if isinstance(call, Unread))
        return Message(
            role=self.role,
            content=(*parts, *unread),
            name=read_or_none(self.name),
            tool_calls=tuple(call.neutral for _, call in calls if not isinstance(call, Unread)),
            tool_call_id=self.tool_call_id,
            reasoning=read_or_none(self.reasoning) if reasoning is None else reasoning,
            mark=self.mark or mark_beside_text([] if isinstance(content, str | None) else content),
            path=path,
        )


class ToolFunction(NamedTool, extra="allow"):
    """A function that the model may call. A mark on it counts as a mark on its tool."""

    parameters: JsonObject | None = optional("JSON schema of its arguments.")


class Tool(MarkableStrictly, extra="allow"):
    """A tool. The chat template gets it unchanged, without `cache_control`."""

    type: Literal["function"] = Field(description="Always `function`.")
    function: ToolFunction


def without_marks(tool: JsonObject) -> JsonObject:
    """Returns `tool` without marks. Marks are not part of the prompt, and must not change it."""
    unmarked = {name: value for name, value in tool.items() if name != "cache_control"}
    function = {name: value for name, value in tool["function"].items() if name != "cache_control"}
    return unmarked | {"function": function}


ToolAsSent: TypeAlias = Annotated[Tool, AS_SENT]


def marks_of(tools: list[JsonObject]) -> Iterator[tuple[int, CacheMark]]:
    """Returns the marks on tools and their functions, each with the index of its tool."""
    for index, tool in enumerate(tools):
        for marked in (tool["function"], tool):
            if marked.get("cache_control") is not None:
                yield index, CacheControl.model_validate(marked["cache_control"]).mark


MessageOrUnread: TypeAlias = Annotated[MessageBody | Unread, OrUnread(MessageBody)]


def neutral_messages(messages: Sequence[MessageBody | Unread]) -> tuple[list[Message], list[OtherPart]]:
    """Returns the messages of a body, and what of them is left out. Raises the errors of `read_messages`."""
    sent = ((message, f"messages.{index}") for index, message in enumerate(messages))
    return read_messages(sent)


def conversation_of(
    messages: Sequence[Message], tools: Sequence[Tool] | None, left_out: Sequence[OtherPart] = (), **more: Any
) -> Conversation:
    """Returns the conversation for the chat template. `more` are its other fields."""
    sent = cast("list[JsonObject]", tools or [])
    return Conversation(
        messages=messages,
        left_out=left_out,
        tools=[without_marks(tool) for tool in sent] or None,
        tool_marks=tuple(marks_of(sent)),
        tool_paths=[f"tools.{index}.function.parameters" for index in range(len(sent))],
        **more,
    )


class NamedFunction(Body):
    name: str = Field(min_length=1, description="Name of an offered function.")


class FunctionReference(Body):
    """One of the offered functions."""

    type: Literal["function"] = Field(description="Always `function`.")
    function: NamedFunction


class AllowedTools(Body):
    """Some of the offered functions. The prompt lists all of them, so it does not depend on the choice."""

    mode: Literal["auto", "required"] = Field(description="Whether one of them must be called.")
    tools: list[FunctionReference] = Field(min_length=1, description="The functions that may be called.")


class ToolChoiceBody(Typed):
    """The function that must be called, or the functions that may be called."""

    needs: ClassVar = {"function": ("function",), "allowed_tools": ("allowed_tools",)}
    type: Literal["function", "allowed_tools"] = Field(description="Which of the other fields is given.")
    function: NamedFunction | None = optional("The function that must be called.")
    allowed_tools: AllowedTools | None = optional("The functions that may be called.")

    def neutral(self, *, many: bool) -> ToolChoice:
        if self.function is not None:
            return ToolChoice("required", frozenset({self.function.name}), many=False)
        assert self.allowed_tools is not None, "one of both is given"
        names = frozenset(tool.function.name for tool in self.allowed_tools.tools)
        return ToolChoice(self.allowed_tools.mode, names, many=many)


ToolChoiceField: TypeAlias = Annotated[
    Literal["auto", "none", "required"] | ToolChoiceBody, OneOf("auto, none, required or an object", ToolChoiceBody)
]


class JsonSchemaFormat(Body):
    """A reply that follows a JSON schema."""

    schema_: JsonObject = Field(alias="schema", description="The JSON schema. Every reply follows it.")
    strict: bool | None = optional(OF_ONE_OF)


class ResponseFormat(Typed):
    """The format of the reply's text."""

    needs: ClassVar = {"json_schema": ("json_schema",)}
    type: Literal["text", "json_object", "json_schema"] = Field(description="`text` is any text.")
    json_schema: JsonSchemaFormat | None = optional("With the type `json_schema`.")
    schema_: JsonObject | None = optional(
        "With the type `json_object`: its JSON schema, as in llama.cpp.", alias="schema"
    )

    @property
    def text_format(self) -> TextFormat | None:
        """Raises `InvalidRequest` for a schema beside another type."""
        path = "response_format"
        if self.type != "json_schema":
            return TextFormat.of_json(self.type, self.schema_, path, ".schema")
        if self.schema_ is not None:
            problem = "needs the type json_object; write json_schema.schema with the type json_schema"
            raise InvalidRequest.at(f"{path}.schema", problem)
        assert self.json_schema is not None, "the type needs it"
        return TextFormat.of_json(
            self.type, self.json_schema.schema_, path, ".json_schema.schema", strict=self.json_schema.strict
        )
