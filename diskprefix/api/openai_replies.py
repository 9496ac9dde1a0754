"""The bodies of OpenAI's responses, with `prefix_cache` and `timings` added. /docs shows the models."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from diskprefix.api.figures import CacheReply, TimingsReply
from diskprefix.api.reply import EndReason


class PromptTokensDetails(BaseModel):
    """How much of the prompt was restored."""

    cached_tokens: int = Field(description="Prompt tokens restored from the cache, not computed; 0 for a miss.")


class CompletionTokensDetails(BaseModel):
    """What the tokens of the reply are."""

    reasoning_tokens: int = Field(description="Those of the reasoning; a chunk that holds its end is not counted.")


class UsageReply(BaseModel):
    """Token counts of the request."""

    prompt_tokens: int
    completion_tokens: int = Field(description="Over all choices.")
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(BaseModel):
    """An alternative at one position."""

    token: str
    logprob: float
    bytes: list[int] | None = Field(description="UTF-8 bytes of the token; null for a part of a character.")


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Natural logarithms of probabilities, from the model's own distribution, before penalties and temperature."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """The same as `ChatLogprobs`, in the form of the older API."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int] = Field(description="Where each token begins in the choice's text, in characters.")


class CalledFunction(BaseModel):
    """A function that the model calls."""

    name: str | None = Field(default=None, description="Of a stream, only the first chunk of a call has it.")
    arguments: str = Field(description="JSON text, or a piece of it.")


class ToolCallReply(BaseModel):
    """A tool call, or what a chunk adds to it."""

    index: int | None = Field(default=None, description="Of the call; in chunks only.")
    id: str | None = Field(default=None, description="Of a stream, only the first chunk of a call has it.")
    type: Literal["function"] | None = None
    function: CalledFunction


class AssistantMessage(BaseModel):
    """The reply, or what a chunk adds to it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = Field(default=None, description="What the model thought; absent if nothing.")
    reasoning: str | None = Field(default=None, description="The same, for clients that know it by this name.")
    tool_calls: list[ToolCallReply] | None = None
    refusal: None = None


class Choice(BaseModel):
    """One of the `n` replies, or what a chunk adds to it."""

    index: int
    finish_reason: EndReason | None


class ChatChoice(Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatChunkChoice(Choice):
    delta: AssistantMessage
    logprobs: ChatLogprobs | None


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None


class Reply(BaseModel):
    """What the responses of both APIs have. Of a stream, only the last chunk has `prefix_cache` and `timings`."""

    id: str
    created: int = Field(description="Seconds since 1970.")
    model: str
    system_fingerprint: str = Field(
        description="Identifies what determines the model's output: with equal fingerprints, greedy replies are equal."
    )
    usage: UsageReply | None = None
    prefix_cache: CacheReply | None = None
    timings: TimingsReply | None = None


class ChatCompletion(Reply):
    """The answer of `POST /v1/chat/completions` without `stream`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatCompletionChunk(Reply):
    """One event of a streamed chat reply."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class Completion(Reply):
    """The answer of `POST /v1/completions`, and the form of its streamed chunks."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
