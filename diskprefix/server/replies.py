"""The bodies of responses: OpenAI's objects, with `prefix_cache` and `timings` added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

from pydantic import BaseModel, Field

from diskprefix.cache_report import MissReason, Saved, Source
from diskprefix.engine.request import DoneEvent, FinishReason, TokenLogprob
from diskprefix.policy.select import Reason


class PromptTokensDetails(BaseModel):
    """How much of the prompt was restored."""

    cached_tokens: int = Field(description="Prompt tokens restored from the cache, not computed; 0 for a miss.")


class UsageReply(BaseModel):
    """Token counts of the request."""

    prompt_tokens: int
    completion_tokens: int = Field(description="Over all choices.")
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CacheReply(BaseModel):
    """What the disk cache did for this request. The debug log has more."""

    scope: str = Field(description="The scope that was used, in its canonical form.", examples=["auto:30"])
    restored: int = Field(description="Prompt tokens whose state was restored, not computed; 0 for a miss.")
    source: Source = Field(
        default="none", description="Present for a hit: `disk`, or `memory` for what was still waiting to be written."
    )
    miss_reason: MissReason | None = Field(
        default=None,
        description="Present for a miss: why nothing was restored. `not_stored`: no block of the prompt is stored. "
        "`diverged`: it differs from every recent prompt within its first block. `too_short`: it has fewer tokens than "
        "the minimum. `no_checkpoint`: its blocks are stored, but no checkpoint to continue from. `whole_prompt_only`: "
        "this model's state can be restored for an exact repeat only. `faster_to_compute`: computing is faster here. "
        "`off`: the scope is off. `media`: the prompt holds images or sounds. `unsupported`: the model cannot be "
        "cached. `error`: the cache failed; the daemon's log says how.",
    )
    diverged_at: int | None = Field(
        default=None,
        description="Present with `diverged`: the index of the first token that differs from every recent prompt.",
    )
    boundary: int = Field(description="Prompt tokens, from the first one on, that this request keeps in the cache.")
    boundary_reason: Reason = Field(
        description="Why so many. Something is kept with `full` and `tokens` (the scope says so), `marks` (the client "
        "marked it), `continues` (the prompt continues an earlier one), `likely_repeat` (most prompts like it came "
        "again), `learning` (too few like it were seen to know), `shared_prefix` (an earlier prompt shares it), "
        "`best_checkpoints` (these checkpoints are expected to save most) and `new_system_prompt`. Nothing is kept "
        "with `off`, `already_saved`, `no_history` (no recent prompts), `no_match` (not even the first token was seen "
        "before), `no_safe_boundary` (the shared prefix has no position to cut at), `below_min_tokens`, "
        "`whole_prompt_only`, `media`, `unsupported`, `read_only` (the request asks to save nothing) and "
        "`faster_to_compute`.",
        examples=["continues"],
    )
    saved: Saved = Field(
        description="`queued` for the writer, `stored` already, `dropped` (no room for it) or `none` (nothing to save)."
    )
    exact: bool = Field(
        default=True,
        description="Present if false: the restored state is that of a reply as it was decoded, which need not be, "
        "bit for bit, what a prefill computes.",
    )


class TimingsReply(BaseModel):
    """Where the time went. `ttft_ms` runs from arrival in the engine's queue to the first token."""

    queue_ms: float
    lookup_ms: float
    restore_ms: float
    prefill_ms: float
    ttft_ms: float
    decode_ms: float
    decode_tokens_per_s: float


class TopLogprob(BaseModel):
    """An alternative at one position."""

    token: str
    logprob: float
    bytes: list[int] | None = Field(description="UTF-8 bytes of the token; null for a part of a character.")


class ChatTokenLogprob(TopLogprob):
    """The token that was chosen at one position, and its alternatives."""

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


class AssistantMessage(BaseModel):
    """The reply."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One of the `n` replies."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    """The answer of `POST /v1/chat/completions` without `stream`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(description="Seconds since 1970.")
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    system_fingerprint: str | None = Field(
        description="Identifies what determines the model's output: with equal fingerprints, greedy replies are equal."
    )
    prefix_cache: CacheReply
    timings: TimingsReply


class Delta(BaseModel):
    """What a chunk adds to a choice."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    """A choice in a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatCompletionChunk(BaseModel):
    """One event of a streamed chat reply. The last one before `[DONE]` carries `prefix_cache` and `timings`."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageReply | None = None
    system_fingerprint: str | None = None
    prefix_cache: CacheReply | None = None
    timings: TimingsReply | None = None


class CompletionChoice(BaseModel):
    """One of the `n` continuations, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


class Completion(BaseModel):
    """The answer of `POST /v1/completions`, and the form of its streamed chunks."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReply | None = None
    system_fingerprint: str | None = None
    prefix_cache: CacheReply | None = None
    timings: TimingsReply | None = None


class ModelCard(BaseModel):
    """The served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "diskprefix"
    max_model_len: int | None = Field(default=None, description="Positions: prompt and reply together, in tokens.")


class ModelList(BaseModel):
    """The answer of `GET /v1/models`: the one served model."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def usage_reply(done: DoneEvent) -> dict[str, Any]:
    usage = done.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def cache_reply(done: DoneEvent) -> dict[str, Any]:
    """The response's `prefix_cache` object: short enough for one line of a screen."""
    report, selection = done.cache, done.cache.selection
    reply: dict[str, Any] = {"scope": str(selection.scope), "restored": report.restored}
    if report.miss_reason is None:
        reply["source"] = report.source
    else:
        reply["miss_reason"] = report.miss_reason
    if report.diverged_at is not None:
        reply["diverged_at"] = report.diverged_at
    reply |= {"boundary": selection.kept, "boundary_reason": selection.reason, "saved": report.saved}
    return reply if report.exact else reply | {"exact": False}


def timings_reply(done: DoneEvent) -> dict[str, float]:
    return {name: round(value, 2) for name, value in asdict(done.timings).items()}


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {
        "content": [{**_logprob(t), "top_logprobs": [_logprob(alternative) for alternative in t.top]} for t in tokens],
        "refusal": None,
    }


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    # A token that is a part of a character decodes to U+FFFD, whose bytes are not those of the token.
    whole = "�" not in token.text
    return {
        "token": token.text,
        "logprob": token.logprob,
        "bytes": list(token.text.encode("utf-8", "replace")) if whole else None,
    }


def completion_logprobs(tokens: Sequence[TokenLogprob], text_offset: int) -> dict[str, Any]:
    """Returns the log probabilities of a choice. `text_offset` is the number of characters before the first token."""
    offsets = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{alternative.text: alternative.logprob for alternative in token.top} for token in tokens],
        "text_offset": offsets,
    }
