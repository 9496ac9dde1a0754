"""The bodies of OpenAI's responses API, with `prefix_cache` and `timings` added. /docs shows the models."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from diskprefix.server.protocols.dialect import Json
from diskprefix.server.protocols.figures import CacheReply, TimingsReply


class InputDetails(BaseModel):
    cached_tokens: int = Field(description="Prompt tokens restored from the cache, not computed; 0 for a miss.")
    cache_write_tokens: int = Field(description="Prompt tokens that this request newly keeps.")


class OutputDetails(BaseModel):
    reasoning_tokens: int = Field(description="Tokens up to the end of the reasoning.")


class ResponseUsage(BaseModel):
    """Token counts of the request."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(BaseModel):
    """Why a stream ended early."""

    code: Literal["server_error"]
    message: str


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ModelResponse(BaseModel):
    """The answer of `POST /v1/responses` without `stream`. It repeats the fields of the request, too."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: int = Field(description="Seconds since 1970.")
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None = Field(description="Present if `max_output_tokens` cut the reply.")
    model: str
    output: list[Json] = Field(description="Items: messages, reasonings and function calls, in order.")
    previous_response_id: str | None
    store: bool = Field(description="Whether it is stored. A conversation that is too large is not.")
    system_fingerprint: str = Field(
        description="Identifies what determines the model's output: with equal fingerprints, greedy replies are equal."
    )
    usage: ResponseUsage | None
    prefix_cache: CacheReply | None = None
    timings: TimingsReply | None = None


class ResponseStreamEvent(BaseModel):
    """An event of a streamed response. The other fields depend on its type."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(examples=["response.output_text.delta"])
    sequence_number: int = Field(description="Counts the events of a stream from 0.")
