"""The request bodies: OpenAI's fields, vLLM's sampling extensions and `prefix_cache`, strictly typed.

Unknown top-level fields are ignored, as other OpenAI-compatible servers do. Inside `prefix_cache` nothing is ignored.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, Tag, WithJsonSchema, field_validator
from pydantic_core import PydanticCustomError

from diskprefix.chat.messages import (
    REFUSED,
    Body,
    CacheControl,
    Conversation,
    JsonObject,
    Message,
    ToolAsSent,
    Unmarkable,
    by_json_type,
    without_marks,
)
from diskprefix.errors import InvalidRequest, SettingsError
from diskprefix.policy.scope import MAX_VALUE, parse_scope
from diskprefix.settings import parse_duration

MAX_COUNT = 2**31 - 1
"""Largest number of tokens in a field; larger than any model's positions or vocabulary."""
MAX_BIASES = 1024
"""Each biased token costs time at every step."""
MAX_STOPS, MAX_STOP_CHARS = 16, 1024
"""As long as a text may be the beginning of a stop string, it is not sent."""
MAX_SALT_CHARS = 256
MAX_CACHE_KEY_CHARS = 512

Count: TypeAlias = Annotated[int, Field(ge=1, le=MAX_COUNT)]

MIN_TTL_S, MAX_TTL_S = 1, 2**31 - 1
"""The longest time to live that the store can record."""


def _checked_salt(value: object) -> object:
    """The error does not repeat the salt: it may be a secret, and messages are logged."""
    if value is None or (isinstance(value, str) and 1 <= len(value) <= MAX_SALT_CHARS):
        return value
    raise PydanticCustomError(REFUSED, f"must be a text of 1 to {MAX_SALT_CHARS} characters")


Salt: TypeAlias = Annotated[
    Any,
    AfterValidator(_checked_salt),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": MAX_SALT_CHARS}),
]


class PrefixCacheOptions(Body, extra="forbid"):
    """Options of the disk cache for this request. A field that is not listed here is refused, and so is null."""

    scope: Annotated[
        Any,
        AfterValidator(lambda value: parse_scope(value, param="prefix_cache.scope")),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 1, "maximum": MAX_VALUE}]}),
    ] = Field(
        default=None,
        description="`off`, `full`, `auto`, `auto:N` (window of N recent prompts) or N (the first N prompt tokens).",
        examples=["auto:8", "full", 1000],
    )
    window: int = Field(  # type: ignore[assignment]  # absent is None, but null is refused
        default=None, ge=1, le=MAX_VALUE, description="Replaces the N of `auto:N`; for `auto` only.", examples=[8]
    )
    salt: Salt = Field(
        default=None,
        description="Only requests with the same salt find this request's state, and they find nothing else.",
        examples=["user-7f3a"],
    )
    reuse_generated: bool = Field(  # type: ignore[assignment]  # absent is None, but null is refused
        default=None,
        description="Keep the reply's state, and restore that of earlier replies, which is not exact bit for bit. "
        "Without effect where a model is exact at every token: then replies are kept by the scope.",
    )
    save: bool = Field(default=True, description="`false`: restore what is stored, but keep nothing of this request.")
    ttl: Annotated[
        Any,
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "number", "minimum": MIN_TTL_S, "maximum": MAX_TTL_S}]}),
    ] = Field(
        default=None,
        description="Time to live after the last use: `90s`, `15m`, `12h`, `7d`, `2w` or seconds, up to 68 years. Wins "
        "over `prompt_cache_retention`.",
        examples=["1h", 300],
    )

    @field_validator("ttl", mode="after")
    @classmethod
    def _in_seconds(cls, value: object) -> float:
        seconds: float | None = None
        if isinstance(value, str):
            with suppress(SettingsError):
                seconds = parse_duration(value, param="prefix_cache.ttl")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            seconds = value
        # Compared before the conversion, because JSON may hold integers that exceed every float.
        if seconds is None or not MIN_TTL_S <= seconds <= MAX_TTL_S:
            text = "must be a number of seconds or a time such as 90s, 15m, 12h or 7d, from 1 second to 68 years"
            raise PydanticCustomError(REFUSED, text)
        return float(seconds)


StopString: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stop: TypeAlias = Annotated[
    Annotated[StopString, Tag("~text")] | Annotated[list[StopString], Field(max_length=MAX_STOPS), Tag("~list")],
    by_json_type(f"a string or a list of up to {MAX_STOPS} strings"),
]


class ResponseFormat(Body):
    """The format of the reply."""

    type: Literal["text"] = Field(description="`text`; constrained JSON output is not supported.")


class StreamOptions(Body):
    """What a stream contains besides the text."""

    include_usage: bool | None = Field(
        default=None, description="Send one more chunk with `usage` (and no choices) before `[DONE]`."
    )


class SamplingBody(Unmarkable):
    """The fields that both completion routes share."""

    model: str | None = Field(default=None, description="Name of the served model. Absent: the served model.")
    stream: bool | None = Field(default=None, description="Send the reply as server-sent events while it is made.")
    stream_options: StreamOptions | None = Field(default=None, description="Only with `stream: true`.")
    max_tokens: Count | None = Field(default=None, description="Most tokens of a choice. Absent: all that fit.")
    temperature: float | None = Field(default=None, ge=0, le=2, description="Below 0.00001 it is greedy; default 1.")
    top_p: float | None = Field(default=None, gt=0, le=1, description="Nucleus sampling: smallest set with this mass.")
    top_k: int | None = Field(default=None, ge=-1, le=MAX_COUNT, description="Only the k likeliest; 0 or -1: all.")
    min_p: float | None = Field(default=None, ge=0, le=1, description="Least probability, relative to the likeliest.")
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1, description="Makes sampling repeatable.")
    # Logits are multiplied and divided by it: outside of this range float32 may overflow to infinity and NaN.
    repetition_penalty: float | None = Field(
        default=None, ge=0.01, le=100, description="Above 1: tokens that were used before become less likely."
    )
    presence_penalty: float | None = Field(default=None, ge=-2, le=2, description="Flat penalty on tokens used before.")
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2, description="Penalty for every earlier use.")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        default=None, max_length=MAX_BIASES, description="Token id (as a string) → number added to its logit."
    )
    stop: Stop | None = Field(default=None, description="Text that ends the reply; it is not part of it.")
    n: int | None = Field(default=None, ge=1, le=16, description="How many choices to generate.")
    prefix_cache: PrefixCacheOptions | None = Field(default=None, description="The disk cache, for this request only.")
    prompt_cache_key: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_KEY_CHARS)] | None = Field(
        default=None, description="Names a group of requests, which have an `auto` window of their own. Not a salt."
    )
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(
        default=None, description="As `prefix_cache.ttl`: an hour (on disk all the same), or a day."
    )
    cache_salt: Salt = Field(default=None, description="As `prefix_cache.salt`; the name that vLLM gives it.")


class ChatRequest(SamplingBody):
    """`POST /v1/chat/completions`."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"messages": [{"role": "user", "content": "Name three rivers."}]}}
    )

    messages: list[Message] = Field(min_length=1, description="The conversation, oldest message first.")
    max_completion_tokens: Count | None = Field(default=None, description="Takes precedence over `max_tokens`.")
    logprobs: bool | None = Field(default=None, description="Return the log probability of every token of the reply.")
    top_logprobs: int | None = Field(default=None, ge=0, le=20, description="And of its most likely alternatives.")
    tools: list[ToolAsSent] | None = Field(default=None, description="Functions offered to the model by its template.")
    tool_choice: Literal["auto", "none"] | None = Field(default=None, description="`none` leaves the tools out.")
    response_format: ResponseFormat | None = Field(default=None, description="Only `text`.")
    modalities: list[Literal["text"]] | None = Field(default=None, description="Only `text`.")
    chat_template_kwargs: JsonObject | None = Field(default=None, description="Variables for the chat template.")
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

    @property
    def conversation(self) -> Conversation:
        """What the prompt is rendered from. `tool_choice: none` leaves the tools out."""
        tools = cast("list[JsonObject]", self.tools or []) if self.tool_choice != "none" else []
        marks = [
            (index, CacheControl.model_validate(marked["cache_control"]))
            for index, tool in enumerate(tools)
            for marked in (tool["function"], tool)
            if marked.get("cache_control") is not None
        ]
        return Conversation(
            messages=self.messages,
            tools=[without_marks(tool) for tool in tools] or None,
            tool_marks=marks,
            template_variables=self.chat_template_kwargs or {},
            add_generation_prompt=self.add_generation_prompt,
        )


def _only_prompt(value: object) -> object:
    """Returns the prompt of a list that holds one prompt, and any other value as it is."""
    if not (isinstance(value, list) and value and isinstance(value[0], str | list)):
        return value
    if len(value) > 1:
        raise PydanticCustomError(
            REFUSED, f"{len(value)} prompts in one request are not supported; send them one by one"
        )
    return value[0]


class CompletionRequest(SamplingBody):
    """`POST /v1/completions`."""

    model_config = ConfigDict(json_schema_extra={"example": {"prompt": "The three longest rivers are"}})

    prompt: Annotated[
        Annotated[str, Field(min_length=1), Tag("~text")] | Annotated[list[int], Field(min_length=1), Tag("~list")],
        by_json_type("a string or a list of token ids"),
        BeforeValidator(_only_prompt),
    ] = Field(description="Text, or token ids; or a list that holds exactly one of these.")
    logprobs: int | None = Field(default=None, ge=0, le=20, description="So many alternatives for every token.")
    echo: Literal[False] | None = Field(default=None, description="Not supported.")
    suffix: Literal[""] | None = Field(default=None, description="Not supported.")
    best_of: int | None = Field(default=None, ge=1, le=16, description="Not supported, unless equal to `n`.")
