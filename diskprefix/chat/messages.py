"""The messages, content parts, tools and marks of a conversation, strictly typed in the form of OpenAI's API.

Members of a union have tags that begin with `~`, which are left out of the `param` of an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool", "function"]
JsonObject: TypeAlias = dict[str, Any]

REFUSED = "refused"
"""The type of errors whose message says all, and must not be completed with the value at fault."""


class Body(BaseModel):
    """A JSON object that is read strictly: "5" is not taken for 5, nor true for 1, and NaN is refused."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class CacheControl(Body, extra="forbid"):
    """A mark in the form of Anthropic's API. A field that is not listed here is refused."""

    type: Literal["ephemeral"] = Field(description="`ephemeral`.")
    ttl: Literal["5m", "1h"] | None = Field(default=None, description="Time to live after the last use.")

    @property
    def ttl_s(self) -> float | None:
        """The time to live in seconds; None leaves it to the daemon."""
        return None if self.ttl is None else {"5m": 300.0, "1h": 3600.0}[self.ttl]


class Markable(Body):
    """An object that may carry a mark."""

    cache_control: CacheControl | None = Field(
        default=None, description="Asks the disk cache to keep the prompt up to the end of this object."
    )


def _no_mark(value: object) -> object:
    if value is not None:
        raise PydanticCustomError(REFUSED, "is not allowed here; mark a message, a content part or a tool")
    return value


class Unmarkable(Body):
    """An object that cannot carry a mark. A mark on it is refused, because it would have no effect."""

    cache_control: Annotated[None, BeforeValidator(_no_mark)] = Field(default=None, description="Not allowed here.")


class TextPart(Markable):
    """Text in the content of a message."""

    type: Literal["text"] = Field(description="`text`.")
    text: str = Field(description="The text itself.")


class ImageUrl(Unmarkable):
    """An image that is sent inside the request."""

    url: str = Field(description="`data:image/png;base64,…`: PNG, JPEG, WebP, GIF or BMP. No other URL is fetched.")
    detail: Literal["auto", "low", "high"] | None = Field(default=None, description="Accepted and ignored.")


class ImagePart(Markable):
    """An image, for models that take images."""

    type: Literal["image_url"] = Field(description="`image_url`.")
    image_url: ImageUrl


class InputAudio(Unmarkable):
    """A sound that is sent inside the request."""

    data: str = Field(description="A WAV file with PCM samples, in base64.")
    format: Literal["wav"] = Field(description="`wav`; convert other sounds.")


class AudioPart(Markable):
    """A sound, for models that take audio."""

    type: Literal["input_audio"] = Field(description="`input_audio`.")
    input_audio: InputAudio


class OtherPart(Body):
    """A content part of a kind that no model here takes. It is read so that the error can name its type."""

    type: Literal["text", "image_url", "input_audio", "video_url", "file"]


def by_json_type(expected: str) -> Discriminator:
    """Chooses a member of a union by the JSON type of the value: `~text`, `~list` or `~object`.

    `expected` completes the error for other types: "must be ...".
    """
    tags: dict[type, str] = {str: "~text", list: "~list", dict: "~object"}
    return Discriminator(
        lambda value: tags.get(type(value)),
        custom_error_type="type",
        custom_error_message=f"Input should be {expected}",
    )


def _kind_of_part(value: object) -> str | None:
    """Returns the tag of a content part; None for a value that is not an object.

    An object of an unknown type becomes an `OtherPart`, whose error names the type.
    """
    kinds = {"text": "~text", "image_url": "~image", "input_audio": "~audio"}
    return kinds.get(str(value.get("type")), "~other") if isinstance(value, dict) else None


ContentPart: TypeAlias = Annotated[
    Annotated[TextPart, Tag("~text")]
    | Annotated[ImagePart, Tag("~image")]
    | Annotated[AudioPart, Tag("~audio")]
    | Annotated[OtherPart, Tag("~other")],
    Discriminator(
        _kind_of_part,
        custom_error_type="type",
        custom_error_message="Input should be a content part whose type is text, image_url or input_audio",
    ),
]
Content: TypeAlias = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[ContentPart], Tag("~list")],
    by_json_type("a string or a list of content parts"),
]
Arguments: TypeAlias = Annotated[
    Annotated[str, Tag("~text")] | Annotated[JsonObject, Tag("~object")],
    by_json_type("JSON text or an object"),
]


class FunctionCall(Unmarkable):
    """The function that the assistant called."""

    name: str = Field(min_length=1, description="Name of the function.")
    arguments: Arguments = Field(description="Its arguments: JSON text, as OpenAI sends it, or an object.")


class ToolCall(Unmarkable):
    """A tool call of an earlier assistant message."""

    id: str | None = Field(default=None, description="The `tool_call_id` of the tool's answer refers to it.")
    type: Literal["function"] = Field(default="function", description="Always `function`.")
    function: FunctionCall


class Message(Markable):
    """One message of the conversation."""

    role: Role = Field(description="Who speaks. `developer` becomes `system` unless the chat template knows it.")
    content: Content | None = Field(
        default=None, description="Text, or a list of content parts. An assistant message with tool calls needs none."
    )
    name: str | None = Field(default=None, description="Name of the speaker, for chat templates that render it.")
    tool_calls: list[ToolCall] | None = Field(default=None, description="Tool calls of an assistant message.")
    tool_call_id: str | None = Field(default=None, description="In a tool message: the call that it answers.")
    reasoning_content: str | None = Field(default=None, description="As `name`: the reasoning of the assistant.")


class ToolFunction(Markable, extra="allow"):
    """A function that the model may call. A mark on it counts as a mark on its tool."""

    name: str = Field(min_length=1, description="Name of the function.")
    description: str | None = Field(default=None, description="What it does, for the model to read.")
    parameters: JsonObject | None = Field(default=None, description="JSON schema of its arguments.")


class Tool(Markable, extra="allow"):
    """A tool. The chat template gets it as the client sent it, without `cache_control`."""

    type: Literal["function"] = Field(description="Always `function`.")
    function: ToolFunction


def _as_sent(value: JsonObject, check: ValidatorFunctionWrapHandler) -> JsonObject:
    check(value)
    return value


def without_marks(tool: JsonObject) -> JsonObject:
    """Returns `tool` without marks. Marks are not part of the prompt, and must not change it."""
    unmarked = {name: value for name, value in tool.items() if name != "cache_control"}
    function = {name: value for name, value in tool["function"].items() if name != "cache_control"}
    return unmarked | {"function": function}


ToolAsSent: TypeAlias = Annotated[Tool, WrapValidator(_as_sent)]
"""A tool that is checked as a `Tool` but kept as the client's dict, because the order of its keys is part of the
prompt."""


@dataclass(frozen=True)
class Conversation:
    """What a prompt is rendered from. `tools` have no marks; `tool_marks` holds them, each with the index of its tool.

    `template_variables` are handed to the chat template by name. With `add_generation_prompt` the prompt ends with the
    beginning of a reply.
    """

    messages: list[Message]
    tools: list[JsonObject] | None = None
    tool_marks: list[tuple[int, CacheControl]] = field(default_factory=list)
    template_variables: JsonObject = field(default_factory=dict)
    add_generation_prompt: bool = True
