"""The fields that several APIs share, strictly typed: sampling, the cache, marks.

Unknown top-level fields are ignored, as other servers do. Inside `prefix_cache` nothing is ignored. Members of a union
have tags that begin with `~`, which are left out of the `param` of an error.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import PydanticCustomError

from diskprefix.cache.policy.scope import parse_scope
from diskprefix.chat.messages import CacheMark
from diskprefix.errors import InvalidRequest, SettingsError
from diskprefix.nouns import MAX_VALUE
from diskprefix.server.protocols.strict import REFUSED, Body
from diskprefix.server.protocols.structured_outputs import StructuredOutputs, TextFormat
from diskprefix.units import parse_duration


class CacheControl(Body):
    """A mark in the form of Anthropic's API."""

    type: Literal["ephemeral"] = Field(description="`ephemeral`.")
    ttl: Literal["5m", "1h"] | None = Field(default=None, description="Time to live after the last use.")

    @property
    def mark(self) -> CacheMark:
        return CacheMark(None if self.ttl is None else {"5m": 300.0, "1h": 3600.0}[self.ttl])


class Markable(Body):
    """An object that may carry a mark."""

    cache_control: CacheControl | None = Field(
        default=None, description="Asks the disk cache to keep the prompt up to the end of this object."
    )

    @property
    def mark(self) -> CacheMark | None:
        return None if self.cache_control is None else self.cache_control.mark


def _no_mark(value: object) -> object:
    if value is not None:
        raise PydanticCustomError(REFUSED, "is not allowed here; mark a message, a content part or a tool")
    return value


class Unmarkable(Body):
    """An object that cannot carry a mark. A mark on it is refused, because it would have no effect."""

    cache_control: Annotated[None, BeforeValidator(_no_mark)] = Field(default=None, description="Not allowed here.")


MAX_COUNT = 2**31 - 1
"""Largest number of tokens in a field; larger than any model's positions or vocabulary."""
MAX_BIASES = 1024
"""Each biased token costs time at every step."""
MAX_STOPS, MAX_STOP_CHARS = 16, 1024
"""As long as a text may be the beginning of a stop string, it is not sent."""
MAX_MESSAGES, MAX_PARTS, MAX_TOOLS = 8192, 1024, 1024
"""Most messages or items of a conversation, content parts of a message, and tools. Chat templates write each of them,
and what each adds is looked for in the prompt."""
MAX_NAME_CHARS = 128
"""Most characters of a tool's name. OpenAI and Anthropic take no longer ones, and MCP advises against them."""
MAX_SALT_CHARS = 256
MAX_CACHE_KEY_CHARS = 512

ToolName: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=MAX_COUNT)]

Effort: TypeAlias = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
    Field(description="Told to chat templates that know it; `none` also turns thinking off."),
]

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
    replay: bool = Field(
        default=True,
        description="`false`: the chat template writes all earlier replies anew, and this reply is not remembered.",
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


class CacheFields(Body):
    """What a request asks of the cache, in any API."""

    prefix_cache: PrefixCacheOptions | None = Field(default=None, description="The disk cache, for this request only.")
    prompt_cache_key: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_KEY_CHARS)] | None = Field(
        default=None, description="Names a group of requests, which have an `auto` window of their own. Not a salt."
    )
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(
        default=None, description="As `prefix_cache.ttl`: an hour (on disk all the same), or a day."
    )
    cache_salt: Salt = Field(default=None, description="As `prefix_cache.salt`; the name that vLLM gives it.")


class SamplingFields(Body):
    """How tokens are chosen, in any API: OpenAI's fields and vLLM's."""

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


StopString: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class RequestBody(CacheFields, SamplingFields):
    """What the body of every request for a reply has, in any API."""

    model: str | None = Field(default=None, description="Name of the served model. Absent: the served model.")
    stream: bool | None = Field(default=None, description="Send the reply as server-sent events while it is made.")
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="What the text of the reply must be: vLLM's field."
    )

    @property
    def reads_more(self) -> bool:
        """Whether the prompt is made of things, too, that are stored."""
        return False

    def text_format_beside(self, own: TextFormat | None) -> TextFormat | None:
        """Returns what the text must be. `own` is what the API's own field says.

        Raises `InvalidRequest` if both say something.
        """
        if own is not None and self.structured_outputs is not None:
            raise InvalidRequest(f"structured_outputs: is not allowed beside {own.path}", param="structured_outputs")
        return own if self.structured_outputs is None else self.structured_outputs.text_format
