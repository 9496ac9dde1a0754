"""The objects that the server adds to replies, `prefix_cache` and `timings`; schemas of all replies for /docs.

Replies are dicts, which tests check against the types of the official clients. The documentation of the APIs
describes the fields that the schemas leave out.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from diskprefix.chat.messages import JsonObject
from diskprefix.chat.normalisers import menders, shape_of
from diskprefix.engine.request import DoneEvent
from diskprefix.nouns import CacheReport, MissReason, Reason, Saved, StateSource


class ChangeReply(BaseModel):
    """A change by a normaliser."""

    normaliser: str = Field(examples=["billing-header"])
    path: str = Field(description="Where it stood in the body.", examples=["messages.0.content"])


class BreakReply(BaseModel):
    """A line that differs from an earlier prompt, before text that is the same."""

    at: int = Field(description="The first token that differs.")
    line: str = Field(description="The line in which it stands; digits are shown as 0 and letters as a.")
    tokens: int = Field(description="About so many tokens behind it are those of the earlier prompt.")
    normalisers: list[str] = Field(description="Those that would change the line, were they on.")


class LeftOutReply(BaseModel):
    """Aged messages that are not part of the prompt."""

    messages: int = Field(description="How many.")
    first: str = Field(description="Where the first of them stood in the body.", examples=["messages.2"])
    last: str = Field(description="Where the last of them stood.")


class CacheReply(BaseModel):
    """The work of the disk cache for this request. `diskprefix/server/README.md` explains the words."""

    scope: str = Field(description="The scope that was used, in its canonical form.", examples=["auto:30"])
    restored: int = Field(description="Prompt tokens whose state was restored, not computed; 0 for a miss.")
    source: StateSource = Field(
        default="none",
        description="Where it came from: `disk`, or `memory` of an earlier request or before it is written.",
    )
    miss_reason: MissReason | None = Field(
        default=None,
        description="Present if nothing was restored, or too little of 512 or more tokens.",
    )
    diverged_at: int | None = Field(
        default=None, description="Present with `diverged`: the first token that differs from every recent prompt."
    )
    boundary: int = Field(description="Prompt tokens, from the first one on, that this request keeps in the cache.")
    boundary_reason: Reason = Field(description="Why so many.", examples=["continues"])
    saved: Saved = Field(
        description="`queued` for the writer, `stored` already, `dropped` (no room for it) or `none` (nothing to save)."
    )
    dropped_because: str | None = Field(default=None, description="Present with `dropped`: the reason, for people.")
    broken_by: BreakReply | None = Field(default=None, description="Present if less was found because of one line.")
    left_out: LeftOutReply | None = Field(default=None, description="Present if aged messages were left out.")
    changed: list[ChangeReply] = Field(default=[], description="Present if normalisers changed something.")
    replayed: int = Field(
        default=0,
        description="Present above 0: so many earlier replies stand in the prompt as the tokens sampled then.",
    )


class TimingsReply(BaseModel):
    """Milliseconds, except for tokens."""

    queue_ms: float
    lookup_ms: float
    restore_ms: float
    prefill_ms: float = Field(description="This request's part of the steps that computed its prompt.")
    others_ms: float = Field(
        description="The rest until the first token: steps for other requests, waits between threads, and sampling. "
        "Never below 0: `restore_ms` may go on behind the first token."
    )
    ttft_ms: float = Field(description="From arrival in the queue to the first token.")
    decode_ms: float
    decode_tokens_per_s: float
    drafted_tokens: int = Field(
        default=0, description="Present above 0: tokens that were guessed and computed, right or wrong."
    )
    accepted_tokens: int = Field(default=0, description="Present with it: those that were right.")
    max_tokens_clamped: int = Field(
        default=0,
        description="Present if prompt and `max_tokens` exceed the model's positions: a choice could have so many "
        "tokens.",
    )


def figures_reply(done: DoneEvent, clamped_to: int | None) -> dict[str, Any]:
    """Returns the objects that are ours: what the cache did, and where the time went, in milliseconds."""
    own = asdict(done.timings) | {"others_ms": done.timings.others_ms}
    timings: dict[str, Any] = {name: round(value, 2) for name, value in own.items()}
    if not done.timings.drafted_tokens:
        del timings["drafted_tokens"], timings["accepted_tokens"]
    if clamped_to is not None:
        timings["max_tokens_clamped"] = clamped_to
    return {"prefix_cache": _cache_reply(done), "timings": timings}


def written_tokens(done: DoneEvent) -> int:
    """Returns the number of prompt tokens that a request newly keeps.

    What was `dropped` is not counted: perhaps nothing of it can be restored.
    """
    if done.cache.saved != "queued":
        return 0
    return max(0, done.cache.selection.kept - done.usage.cached_tokens)


def _cache_reply(done: DoneEvent) -> dict[str, Any]:
    """Returns the response's `prefix_cache` object: short enough for one line of a screen."""
    report, selection = done.cache, done.cache.selection
    reply: dict[str, Any] = {"scope": str(selection.scope), "restored": report.restored}
    if report.restored or report.miss_reason is None:
        reply["source"] = report.source
    if report.miss_reason is not None:
        reply["miss_reason"] = report.miss_reason
    if report.diverged_at is not None:
        reply["diverged_at"] = report.diverged_at
    reply |= {"boundary": selection.kept, "boundary_reason": selection.reason, "saved": report.saved}
    if report.dropped_because is not None:
        reply["dropped_because"] = report.dropped_because
    if report.broken is not None:
        reply["broken_by"] = broken_by(report)
    if changes := report.rewriting.changes:
        reply["changed"] = [change._asdict() for change in changes]
    if (left_out := report.rewriting.left_out) is not None:
        reply["left_out"] = left_out._asdict()
    if report.replayed:
        reply["replayed"] = report.replayed
    return reply


def broken_by(report: CacheReport) -> dict[str, Any]:
    """Returns what kept a report's prompt from being restored further. Its `broken` must not be None."""
    assert report.broken is not None
    return {
        "at": report.broken.at,
        "line": shape_of(report.broken_line),
        "tokens": report.broken.num_tokens,
        "normalisers": menders(report.broken_line, report.rewriting),
    }


class _Documented(BaseModel):
    """A reply for /docs. Replies are dicts; their other fields are those of the API that is imitated."""

    model_config = ConfigDict(extra="allow")


class OpenAIReply(_Documented):
    """A reply of OpenAI's two older APIs. Of a stream, only the last chunk has `prefix_cache` and `timings`."""

    id: str
    created: int = Field(description="Seconds since 1970.")
    model: str
    system_fingerprint: str = Field(
        description="Identifies what determines the model's output: with equal fingerprints, greedy replies are equal."
    )
    choices: list[JsonObject] = Field(description="As in OpenAI's API, with the thought as `reasoning_content`.")
    usage: JsonObject | None = Field(default=None, description="Counts of tokens, as in OpenAI's API.")
    prefix_cache: CacheReply | None = None
    timings: TimingsReply | None = None


class ChatCompletion(OpenAIReply):
    """The answer of `POST /v1/chat/completions` without `stream`."""

    object: Literal["chat.completion"]


class ChatCompletionChunk(OpenAIReply):
    """One event of a streamed chat reply."""

    object: Literal["chat.completion.chunk"]


class Completion(OpenAIReply):
    """The answer of `POST /v1/completions`, and the form of its streamed chunks."""

    object: Literal["text_completion"]


class ModelResponse(_Documented):
    """The answer of `POST /v1/responses` without `stream`. It repeats the fields of the request, too."""

    id: str
    object: Literal["response"]
    created_at: int = Field(description="Seconds since 1970.")
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[JsonObject] = Field(description="Items: messages, reasonings and function calls, in order.")
    store: bool = Field(description="Whether it is stored. A conversation that is too large is not.")
    usage: JsonObject | None = Field(description="Counts of tokens, as in OpenAI's API.")
    prefix_cache: CacheReply | None = None
    timings: TimingsReply | None = None


class CompactedResponse(_Documented):
    """The answer of `POST /v1/responses/compact`."""

    id: str
    object: Literal["response.compaction"]
    created_at: int = Field(description="Seconds since 1970.")
    output: list[JsonObject] = Field(description="The newest messages of the user, and an item of type `compaction`.")
    usage: JsonObject = Field(description="Counts of tokens, as in OpenAI's API.")
    prefix_cache: CacheReply
    timings: TimingsReply


class ResponseEvent(_Documented):
    """An event of a streamed response. The other fields depend on its type."""

    type: str = Field(examples=["response.output_text.delta"])
    sequence_number: int = Field(description="Counts the events of a stream from 0.")


class AnthropicMessage(_Documented):
    """The answer of `POST /v1/messages` without `stream`."""

    id: str
    type: Literal["message"]
    model: str
    content: list[JsonObject] = Field(description="Blocks: `text`, `thinking` and `tool_use`.")
    stop_reason: str
    usage: JsonObject = Field(description="Counts of tokens. The three counts of input add up to the prompt.")
    prefix_cache: CacheReply
    timings: TimingsReply


class AnthropicEvent(_Documented):
    """One event of a streamed message. `message_delta` has `usage`, `prefix_cache` and `timings`."""

    type: str = Field(examples=["content_block_delta"])
    prefix_cache: CacheReply | None = None
    timings: TimingsReply | None = None


class TokenCount(BaseModel):
    """The answer of `POST /v1/messages/count_tokens`."""

    input_tokens: int = Field(description="Tokens of the whole prompt, with system, tools and everything else.")


class AnthropicErrorBody(_Documented):
    """The body of every response with a status of 400 or more, as Anthropic writes it."""

    type: Literal["error"]
    error: JsonObject = Field(
        description="`type` and `message`. `details` has `param` and `error_code`, a stable word as `invalid_scope`."
    )
    request_id: str
