"""The bodies of Anthropic's responses, with `prefix_cache` and `timings` added. /docs shows the models."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from diskprefix.server.protocols.anthropic_stream import StopReason
from diskprefix.server.protocols.figures import CacheReply, TimingsReply


class OutputTokensDetails(BaseModel):
    """What the tokens of the reply are."""

    thinking_tokens: int = Field(description="Those of the thought; a chunk that holds its end is not counted.")


class AnthropicUsage(BaseModel):
    """Token counts. The first three add up to the prompt."""

    input_tokens: int = Field(description="Prompt tokens that were neither restored nor newly kept.")
    cache_creation_input_tokens: int = Field(description="Prompt tokens that this request newly keeps.")
    cache_read_input_tokens: int = Field(description="Prompt tokens restored from the cache, not computed.")
    output_tokens: int
    output_tokens_details: OutputTokensDetails | None = Field(default=None, description="Absent in `message_start`.")


class ReplyBlock(BaseModel):
    """A part of the reply: `text`, `thinking` with `signature`, or `id`, `name` and `input` of a tool call."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class AnthropicMessage(BaseModel):
    """The answer of `POST /v1/messages` without `stream`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ReplyBlock]
    stop_reason: StopReason
    stop_sequence: str | None = Field(description="The stop sequence that ended the reply.")
    usage: AnthropicUsage
    prefix_cache: CacheReply
    timings: TimingsReply


class AnthropicEvent(BaseModel):
    """One event of a streamed message. `message_delta` has `usage`, `prefix_cache` and `timings`."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    ]
    index: int | None = Field(default=None, description="Of the content block.")
    message: dict[str, Any] | None = None
    content_block: ReplyBlock | None = None
    delta: dict[str, Any] | None = None
    usage: AnthropicUsage | None = None
    prefix_cache: CacheReply | None = None
    timings: TimingsReply | None = None


class TokenCount(BaseModel):
    """The answer of `POST /v1/messages/count_tokens`."""

    input_tokens: int = Field(description="Tokens of the whole prompt, with system, tools and everything else.")


class AnthropicErrorDetails(BaseModel):
    """What a program may need of an error."""

    error_code: str | None = Field(description="A stable machine-readable word, for example `invalid_scope`.")
    param: str | None = Field(description="Dotted path of the field at fault, for example `messages.0.role`.")


class AnthropicErrorDetail(BaseModel):
    """What went wrong."""

    type: str = Field(description="For example `invalid_request_error`.")
    message: str = Field(description="One line that says what is wrong and what to do.")
    details: AnthropicErrorDetails


class AnthropicErrorBody(BaseModel):
    """The body of every response with a status of 400 or more, as Anthropic writes it."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str
