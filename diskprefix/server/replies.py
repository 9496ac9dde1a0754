"""The response bodies: OpenAI's objects, plus `prefix_cache` and `timings`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

from pydantic import BaseModel, Field

from diskprefix.cache_report import MissReason, Refused, Saved, Source
from diskprefix.engine.request import DoneEvent, FinishReason, TokenLogprob


class PromptTokensDetails(BaseModel):
    """Where the prompt's state came from."""

    cached_tokens: int = Field(description="Prompt tokens restored from the cache, not computed; 0 for a miss.")


class UsageReply(BaseModel):
    """Token counts of the request."""

    prompt_tokens: int
    completion_tokens: int = Field(description="Over all choices.")
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CacheReply(BaseModel):
    """What the disk cache did for this request."""

    scope: str = Field(description="The scope that was used, in its canonical form.", examples=["auto:30"])
    reason: str = Field(
        description="Why so much is kept, in a stable word. Something is with `full` and `tokens` (the scope says so), "
        "`marks` (the client does), `grows` (the prompt continues an earlier one), `likely` (prompts like it come "
        "again), `untried` (too few like it came to know), `best_match` (it was seen before), `support` (the window "
        "votes for it) and `system_guess` (a new system message); nothing with `off`, `nothing_new` (it is there "
        "already), `no_history`, `no_match`, `no_boundary`, `below_min_tokens`, `one_pass` (the model's state has no "
        "place to go on from), `bypassed` (the cache is not used), `read_only` (the request asks for that) and `gate` "
        "(computing is faster).",
        examples=["best_match"],
    )
    window: int = Field(description="How many recent prompts `auto` looks at, at most; 0 for other scopes.")
    recent: int = Field(description="How many recent prompts there were to look at.")
    common: int = Field(description="The longest prefix shared with one of them, in tokens.")
    seen: int = Field(description="How many tokens, in whole blocks, were seen before, in them or earlier.")
    lost: int = Field(description="What this prompt lacks of the one that it shares most with, at its end, in tokens.")
    continues: bool = Field(description="Whether it goes on from the end of an earlier prompt, as a conversation does.")
    trials: int = Field(description="How many earlier prompts of its kind could have come again by now.")
    again: int = Field(description="How many of them did.")
    price: int = Field(
        description="What a checkpoint must save to be worth its bytes, in tokens; 0 unless checkpoints are placed."
    )
    selected: int = Field(description="The boundary that the policy chose to save up to, in tokens.")
    aligned: int = Field(description="The same, floored to the prefill grid.")
    checkpoints: list[int] = Field(
        description="Where this request saves state that cannot be cut, in tokens; empty for models without any."
    )
    restored: int = Field(description="Prompt tokens that were restored.")
    matched: int = Field(description="Prompt tokens that were found in the store; at least as many as restored.")
    refused: Refused | None = Field(
        description="Why not all of them were restored: `no_logits` (at least one token must be computed), "
        "`no_checkpoint`, `one_pass`, `damaged` or `gate` (computing is faster); null if they were."
    )
    retained: dict[str, tuple[int, int]] = Field(
        description="Of which tokens the state was needed, as [first, end), by kind of state.",
        examples=[{"full": [0, 1280], "window_512": [769, 1280], "checkpoint": [1280, 1280]}],
    )
    exact: bool = Field(
        description="Whether what was restored is what a prefill computes, bit for bit; false only for a reply's state."
    )
    source: Source = Field(description="`disk`, `memory` (still in the writer's buffer) or `none`.")
    restore_ms: float
    saved: Saved = Field(
        description="`queued` for the writer, `stored` already there, `dropped` (buffer or budget full) or `none`."
    )
    miss_reason: MissReason | None = Field(description="Why nothing was restored; null for a hit.")
    diverged_at: int | None = Field(
        default=None,
        description="Present with `diverged`: the first token at which the prompt leaves everything seen before.",
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
    """Natural-log probabilities under the model's own distribution, before penalties and temperature."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """The same in the form of the older API."""

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
    system_fingerprint: str | None = Field(description="Names the model's numbers: equal prints, equal greedy replies.")
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
    report = asdict(done.cache)
    report["restore_ms"] = round(done.cache.restore_ms, 2)
    if report["diverged_at"] is None:
        del report["diverged_at"]
    return report


def timings_reply(done: DoneEvent) -> dict[str, float]:
    return {name: round(value, 2) for name, value in asdict(done.timings).items()}


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {
        "content": [{**_logprob(t), "top_logprobs": [_logprob(alternative) for alternative in t.top]} for t in tokens],
        "refusal": None,
    }


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    # A token that is only a part of a character decodes to U+FFFD, whose bytes would not be the token's.
    whole = "�" not in token.text
    return {
        "token": token.text,
        "logprob": token.logprob,
        "bytes": list(token.text.encode("utf-8", "replace")) if whole else None,
    }


def completion_logprobs(tokens: Sequence[TokenLogprob], text_offset: int) -> dict[str, Any]:
    """`text_offset`: characters of the choice that came before the first of `tokens`."""
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
