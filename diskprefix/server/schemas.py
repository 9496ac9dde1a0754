"""The request bodies: OpenAI's fields, vLLM's sampling extensions and `prefix_cache`, strictly typed.

Top-level fields that are not listed are accepted and ignored, as other OpenAI-compatible servers do, so that clients
need not be changed. Inside `prefix_cache` nothing is ignored. Union members carry tags that begin with `~`; they say
which form was meant and are left out of the `param` of an error.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    field_validator,
)
from pydantic_core import PydanticCustomError

from diskprefix.errors import InvalidRequest, SettingsError
from diskprefix.policy.scope import MAX_VALUE, WINDOW_PARAM, Scope, parse_scope, parse_window
from diskprefix.settings import parse_duration

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool", "function"]
JsonObject: TypeAlias = dict[str, Any]


class Body(BaseModel):
    """A JSON object that is read strictly: no "5" for 5, no true for 1, no NaN."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


MAX_SALT_CHARS = 256
MAX_CACHE_KEY_CHARS = 512


def _checked_salt(value: object, param: str) -> str | None:
    """None stands for no salt. Raises `InvalidRequest`, which does not repeat the salt: it may be a secret, and
    messages are logged."""
    if value is None:
        return None
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_SALT_CHARS:
        raise InvalidRequest(f"{param}: must be a text of 1 to {MAX_SALT_CHARS} characters", param=param)
    return value


_SALT_SCHEMA = WithJsonSchema({"type": "string", "minLength": 1, "maxLength": MAX_SALT_CHARS})

MIN_TTL_S, MAX_TTL_S = 1, 2**31 - 1
"""The store holds no longer time (see `store.eviction.recorded_ttl`)."""


def _checked_ttl(value: object, param: str) -> float:
    """Seconds. Raises `InvalidRequest` for what is no time between a second and 68 years."""
    seconds: float | None = None
    if isinstance(value, str):
        with suppress(SettingsError):
            seconds = parse_duration(value, param=param)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = value
    # Compared before it is converted: JSON knows integers that no float holds.
    if seconds is None or not MIN_TTL_S <= seconds <= MAX_TTL_S:
        raise InvalidRequest(
            f"{param}: must be a number of seconds or a time such as 90s, 15m, 12h or 7d, from 1 second to 68 years",
            param=param,
        )
    return float(seconds)


def _checked_boolean(value: object, param: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{param}: must be true or false", param=param)
    return value


class PrefixCacheOptions(Body):
    """How the disk cache treats this request. A field that is not listed here is refused."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    scope: Annotated[
        Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 1, "maximum": MAX_VALUE}]})
    ] = Field(
        default=None,
        description="`off`, `full`, `auto`, `auto:N` (window of N recent prompts) or N (the first N prompt tokens). "
        "Absent: the daemon's own scope.",
        examples=["auto:8", "full", 1000],
    )
    window: Annotated[Any, WithJsonSchema({"type": "integer", "minimum": 1, "maximum": MAX_VALUE})] = Field(
        default=None, description="Replaces the N of `auto:N`; for the scope `auto` only.", examples=[8]
    )

    salt: Annotated[Any, _SALT_SCHEMA] = Field(
        default=None,
        description="Keeps the state of this request apart: only requests with the same salt find it, and they find "
        "nothing else. With API keys it separates the users of one key.",
        examples=["user-7f3a"],
    )
    reuse_generated: Annotated[Any, WithJsonSchema({"type": "boolean"})] = Field(
        default=None,
        description="Keep the state of the reply, and restore that of earlier replies, which is not the cold run's bit "
        "for bit. Absent: as the daemon was told.",
    )
    save: Annotated[Any, WithJsonSchema({"type": "boolean", "default": True})] = Field(
        default=True, description="`false`: restore what is stored, but keep nothing of this request."
    )
    ttl: Annotated[
        Any,
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "number", "minimum": MIN_TTL_S, "maximum": MAX_TTL_S}]}),
    ] = Field(
        default=None,
        description="How long what this request keeps, or restores, is kept after its last use: `90s`, `15m`, `12h`, "
        "`7d`, `2w` or a number of seconds, up to 68 years. What the budget needs is evicted before. Wins over "
        "`prompt_cache_retention`. Absent: as the daemon was told.",
        examples=["1h", 300],
    )

    @field_validator("scope", mode="after")
    @classmethod
    def _scope_follows_the_grammar(cls, value: object) -> object:
        parse_scope(value, param="prefix_cache.scope")
        return value

    @field_validator("window", mode="after")
    @classmethod
    def _window_is_a_number_of_requests(cls, value: object) -> object:
        return parse_window(value, param=WINDOW_PARAM)

    @field_validator("salt", mode="after")
    @classmethod
    def _salt_is_a_text(cls, value: object) -> str | None:
        return _checked_salt(value, "prefix_cache.salt")

    @field_validator("reuse_generated", mode="after")
    @classmethod
    def _reuse_generated_is_a_boolean(cls, value: object) -> bool:
        return _checked_boolean(value, "prefix_cache.reuse_generated")

    @field_validator("save", mode="after")
    @classmethod
    def _save_is_a_boolean(cls, value: object) -> bool:
        return _checked_boolean(value, "prefix_cache.save")

    @field_validator("ttl", mode="after")
    @classmethod
    def _ttl_is_a_duration(cls, value: object) -> float:
        return _checked_ttl(value, "prefix_cache.ttl")

    def reuses_generated(self, default: bool) -> bool:
        """Whether this request keeps and restores replies; `default` is what the daemon was told."""
        return default if self.reuse_generated is None else bool(self.reuse_generated)

    def applied_to(self, default: Scope) -> Scope:
        """The scope of this request. Raises `InvalidScope` for a window beside a scope that has none."""
        scope = default if self.scope is None else parse_scope(self.scope, param="prefix_cache.scope")
        return scope if self.window is None else scope.with_window(self.window)


class CacheControl(Body):
    """A mark, in Anthropic's form: the prompt up to here is to be kept. A field that is not listed here is refused."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    type: Literal["ephemeral"] = Field(description="`ephemeral`.")
    ttl: Literal["5m", "1h"] | None = Field(
        default=None, description="How long it is kept after its last use. Absent: as the daemon was told."
    )

    @property
    def ttl_s(self) -> float | None:
        return None if self.ttl is None else {"5m": 300.0, "1h": 3600.0}[self.ttl]


class Markable(Body):
    """What a conversation is made of."""

    cache_control: CacheControl | None = Field(
        default=None, description="Asks the disk cache to keep the prompt up to the end of this, for later requests."
    )


def _no_mark(value: object) -> object:
    if value is not None:
        raise PydanticCustomError(
            "misplaced_mark", "is not taken here: messages, content parts and tools can be marked"
        )
    return value


class Unmarkable(Body):
    """Where a client may take a mark to be possible: it is refused, so that nobody waits for what it would keep."""

    cache_control: Annotated[None, BeforeValidator(_no_mark)] = Field(
        default=None, description="Not supported here: mark a message, a content part or a tool."
    )


class TextPart(Markable):
    """A piece of a message's content that is text."""

    type: Literal["text"] = Field(description="`text`.")
    text: str = Field(description="The text itself.")


class ImageUrl(Unmarkable):
    """An image, inside the request."""

    url: str = Field(
        description="`data:image/png;base64,…`: PNG, JPEG, WebP, GIF or BMP. Other URLs are refused, never fetched."
    )
    detail: Literal["auto", "low", "high"] | None = Field(default=None, description="Accepted and ignored.")


class ImagePart(Markable):
    """An image, for models that take images."""

    type: Literal["image_url"] = Field(description="`image_url`.")
    image_url: ImageUrl


class InputAudio(Unmarkable):
    """A sound, inside the request."""

    data: str = Field(description="A WAV file with PCM samples, in base64.")
    format: str = Field(description="`wav`.")


class AudioPart(Markable):
    """A sound, for models that take audio."""

    type: Literal["input_audio"] = Field(description="`input_audio`.")
    input_audio: InputAudio


def _known_type(kind: str) -> str:
    if kind not in ("video_url", "file"):
        raise PydanticCustomError("type", "Input should be text, image_url or input_audio")
    return kind


class OtherPart(Body):
    """What is known only to be refused by its name."""

    type: Annotated[str, AfterValidator(_known_type), WithJsonSchema({"enum": ["video_url", "file"]})] = Field(
        description="`video_url` or `file`: not taken by any model here."
    )


def _form_of(value: object) -> str | None:
    """Which member of a union of JSON types a value means."""
    forms: dict[type, str] = {str: "~text", list: "~list", dict: "~object"}
    return forms.get(type(value))


def _string_or_list(expected: str) -> Discriminator:
    return Discriminator(_form_of, custom_error_type="type", custom_error_message=f"Input should be {expected}")


def _kind_of_part(value: object) -> str | None:
    """None for what is no object. An object of any other type is an `OtherPart`, which names the type at fault."""
    kinds = {"text": "~text", "image_url": "~image", "input_audio": "~audio"}
    if isinstance(value, dict):
        kind = value.get("type")
        return kinds.get(kind, "~other") if isinstance(kind, str) else "~other"
    return kinds.get(value.type, "~other") if isinstance(value, Body) and hasattr(value, "type") else None


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
    _string_or_list("a string or a list of content parts"),
]
StopString: TypeAlias = Annotated[str, Field(min_length=1)]
Stop: TypeAlias = Annotated[
    Annotated[StopString, Tag("~text")] | Annotated[list[StopString], Field(max_length=16), Tag("~list")],
    _string_or_list("a string or a list of up to 16 strings"),
]


Arguments: TypeAlias = Annotated[
    Annotated[str, Tag("~text")] | Annotated[JsonObject, Tag("~object")],
    Discriminator(_form_of, custom_error_type="type", custom_error_message="Input should be JSON text or an object"),
]


class FunctionCall(Unmarkable):
    """The function that the assistant called."""

    name: str = Field(min_length=1, description="Name of the function.")
    arguments: Arguments = Field(description="Its arguments: JSON text as OpenAI sends it, or an object.")


class ToolCall(Unmarkable):
    """A tool call of an earlier assistant message."""

    id: str | None = Field(default=None, description="Matched by `tool_call_id` of the tool's answer.")
    type: Literal["function"] = Field(default="function", description="Always `function`.")
    function: FunctionCall


class Message(Markable):
    """One message of the conversation."""

    role: Role = Field(
        description="Who speaks. `developer` is rendered as `system` where the template knows no better."
    )
    content: Content | None = Field(
        default=None,
        description="Text, or a list of parts: text and, where the model takes them, images and audio. May be null in "
        "an assistant message with tool calls.",
    )
    name: str | None = Field(default=None, description="Name of the speaker, for templates that render it.")
    tool_calls: list[ToolCall] | None = Field(default=None, description="Tool calls of an assistant message.")
    tool_call_id: str | None = Field(default=None, description="In a tool message: the call that it answers.")
    reasoning_content: str | None = Field(
        default=None, description="Thinking of an assistant message, for templates that render it."
    )


class ToolFunction(Markable):
    """A function that the model may call. A mark on it is one on its tool."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    name: str = Field(min_length=1, description="Name of the function.")
    description: str | None = Field(default=None, description="What it does, for the model to read.")
    parameters: JsonObject | None = Field(default=None, description="JSON schema of its arguments.")


class Tool(Markable):
    """A tool, handed to the chat template exactly as it was sent, but for `cache_control`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    type: Literal["function"] = Field(description="Always `function`.")
    function: ToolFunction


def _as_sent(value: JsonObject, check: ValidatorFunctionWrapHandler) -> JsonObject:
    check(value)
    return value


def _without_marks(tool: JsonObject) -> JsonObject:
    """A mark is no part of the prompt: setting one, or moving it, must not make it another prompt."""
    unmarked = _unmarked(tool)
    return {name: _unmarked(value) if name == "function" else value for name, value in unmarked.items()}


def _unmarked(value: JsonObject) -> JsonObject:
    return {name: inner for name, inner in value.items() if name != "cache_control"}


ToolAsSent: TypeAlias = Annotated[Tool, WrapValidator(_as_sent)]
"""Checked as a `Tool`, but kept as the client's dict: the order of its keys is part of the prompt."""


class ResponseFormat(Body):
    """The form of the reply."""

    type: Literal["text"] = Field(description="`text`; constrained JSON output is not supported.")


class StreamOptions(Body):
    """What a stream carries besides the text."""

    include_usage: bool | None = Field(
        default=None, description="Send one more chunk with `usage` (and no choices) before `[DONE]`."
    )


class SamplingBody(Unmarkable):
    """The fields that both kinds of completion share."""

    model: str | None = Field(
        default=None, description="Name of the served model (see `/v1/models`). Absent: the served model."
    )
    stream: bool | None = Field(default=None, description="Send the reply as server-sent events while it is made.")
    stream_options: StreamOptions | None = Field(default=None, description="Only with `stream: true`.")
    max_tokens: int | None = Field(
        default=None, ge=1, description="Most tokens to generate for a choice. Absent: up to the model's positions."
    )
    temperature: float | None = Field(default=None, ge=0, le=2, description="0 is greedy; default 1.")
    top_p: float | None = Field(default=None, gt=0, le=1, description="Nucleus sampling: smallest set with this mass.")
    top_k: int | None = Field(default=None, ge=-1, description="Only the k most likely tokens; 0 or -1: all of them.")
    min_p: float | None = Field(default=None, ge=0, le=1, description="Least probability, relative to the likeliest.")
    seed: int | None = Field(
        default=None, ge=-(2**63), le=2**63 - 1, description="Makes sampling repeatable. Absent: drawn for the request."
    )
    repetition_penalty: float | None = Field(default=None, gt=0, description="Above 1: repeats become less likely.")
    presence_penalty: float | None = Field(default=None, ge=-2, le=2, description="Flat penalty on tokens used before.")
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2, description="Penalty for every earlier use.")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        default=None, description="Token id (as a string) → number added to its logit."
    )
    stop: Stop | None = Field(default=None, description="Text that ends the reply; it is not part of it.")
    n: int | None = Field(default=None, ge=1, le=16, description="How many choices to generate.")
    user: str | None = Field(default=None, description="Accepted and ignored.")
    prefix_cache: PrefixCacheOptions | None = Field(default=None, description="The disk cache, for this request only.")
    prompt_cache_key: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_CACHE_KEY_CHARS,
        description="Names a group of requests: the window of `auto` holds recent prompts of the same group only. It "
        "does not keep their state apart (see `cache_salt`).",
        examples=["support-agent-v3"],
    )
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(
        default=None,
        description="How long what this request keeps is kept after its last use: `in_memory` an hour (it is on disk "
        "all the same), `24h` a day. Absent: as the daemon was told.",
    )
    cache_salt: Annotated[Any, _SALT_SCHEMA] = Field(
        default=None, description="As `prefix_cache.salt`; the name that vLLM gives it."
    )

    @field_validator("cache_salt", mode="after")
    @classmethod
    def _cache_salt_is_a_text(cls, value: object) -> str | None:
        return _checked_salt(value, "cache_salt")


class ChatRequest(SamplingBody):
    """`POST /v1/chat/completions`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "messages": [{"role": "user", "content": "Name three rivers."}],
                    "max_tokens": 64,
                    "prefix_cache": {"scope": "auto:8"},
                }
            ]
        }
    )

    messages: list[Message] = Field(min_length=1, description="The conversation, oldest message first.")
    max_completion_tokens: int | None = Field(default=None, ge=1, description="As `max_tokens`, and wins over it.")
    logprobs: bool | None = Field(default=None, description="Return the log probability of every token of the reply.")
    top_logprobs: int | None = Field(
        default=None, ge=0, le=20, description="And of its most likely alternatives; needs `logprobs: true`."
    )
    tools: list[ToolAsSent] | None = Field(
        default=None, description="Functions offered to the model by its chat template."
    )
    tool_choice: Annotated[Any, WithJsonSchema({"enum": ["auto", "none", None]})] = Field(
        default=None, description="`auto`, or `none` to leave the tools out. Forcing a call is not supported."
    )
    parallel_tool_calls: bool | None = Field(default=None, description="Accepted and ignored.")
    response_format: ResponseFormat | None = Field(default=None, description="Only `text`.")
    modalities: list[Literal["text"]] | None = Field(default=None, description="Only `text`.")
    chat_template_kwargs: JsonObject | None = Field(
        default=None, description="Variables for the chat template, for example `enable_thinking`."
    )
    add_generation_prompt: bool = Field(default=True, description="End the prompt with the start of a reply.")
    functions: None = Field(default=None, description="Not supported (deprecated by OpenAI): use `tools`.")
    function_call: None = Field(default=None, description="Not supported (deprecated by OpenAI): use `tool_choice`.")

    @field_validator("messages", mode="after")
    @classmethod
    def _only_a_tool_call_needs_no_content(cls, messages: list[Message]) -> list[Message]:
        for index, message in enumerate(messages):
            if message.content is None and not (message.role == "assistant" and message.tool_calls):
                param = f"messages.{index}.content"
                raise InvalidRequest(f"{param}: is required in a message of role {message.role}", param=param)
        return messages

    @field_validator("tool_choice", mode="after")
    @classmethod
    def _a_tool_call_cannot_be_forced(cls, choice: object) -> object:
        if choice in (None, "auto", "none"):
            return choice
        raise InvalidRequest("tool_choice: only auto and none are supported", param="tool_choice")

    @property
    def offered_tools(self) -> list[JsonObject] | None:
        """The tools as the client sent them, without marks; None where there are none, or `tool_choice` is `none`."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [_without_marks(tool) for tool in cast("list[JsonObject]", self.tools)]

    @property
    def tool_marks(self) -> list[tuple[int, CacheControl]]:
        """The marks of the `offered_tools`, each with the index of its tool: there may be two on one."""
        if not self.tools or self.tool_choice == "none":
            return []
        return [
            (index, CacheControl.model_validate(marked["cache_control"]))
            for index, tool in enumerate(cast("list[JsonObject]", self.tools))
            for marked in (tool["function"], tool)
            if marked.get("cache_control") is not None
        ]


def _prompt_form(value: object) -> str | None:
    """Text, token ids, or a list of either."""
    if isinstance(value, str):
        return "~text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else 0
    if isinstance(first, str):
        return "~texts"
    return "~batch" if isinstance(first, list) else "~ids"


AnyPrompt: TypeAlias = str | list[str] | list[int] | list[list[int]]


class CompletionRequest(SamplingBody):
    """`POST /v1/completions`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"prompt": "The three longest rivers are", "max_tokens": 64}]}
    )

    prompt: Annotated[
        Annotated[str, Tag("~text")]
        | Annotated[list[str], Tag("~texts")]
        | Annotated[list[int], Tag("~ids")]
        | Annotated[list[list[int]], Tag("~batch")],
        Discriminator(
            _prompt_form,
            custom_error_type="type",
            custom_error_message="Input should be a string or a list of token ids",
        ),
    ] = Field(description="Text, or token ids; or a list that holds exactly one of these.")
    logprobs: int | None = Field(
        default=None, ge=0, le=20, description="Return log probabilities, with so many alternatives for every token."
    )
    echo: Literal[False] | None = Field(default=None, description="Not supported.")
    suffix: Literal[""] | None = Field(default=None, description="Not supported.")
    best_of: int | None = Field(default=None, ge=1, description="Not supported, unless equal to `n`.")

    @property
    def one_prompt(self) -> str | list[int]:
        """The prompt without the list around it."""
        if isinstance(self.prompt, list) and isinstance(self.prompt[0], str | list):
            return self.prompt[0]
        return self.prompt

    @field_validator("prompt", mode="after")
    @classmethod
    def _exactly_one_prompt(cls, prompt: AnyPrompt) -> AnyPrompt:
        is_batch = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
        if is_batch and len(prompt) > 1:
            raise InvalidRequest(
                f"prompt: {len(prompt)} prompts in one request are not supported; send them one by one", param="prompt"
            )
        if not prompt or (is_batch and not prompt[0]):
            raise InvalidRequest("prompt: must not be empty", param="prompt")
        return prompt
