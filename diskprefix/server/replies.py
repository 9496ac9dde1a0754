"""The bodies of responses: OpenAI's objects, with `prefix_cache` and `timings` added. /docs shows the models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, Field

from diskprefix.cache_report import MissReason, Saved, Source
from diskprefix.engine.request import DoneEvent, FinishEvent, FinishReason, TextEvent, Timings, TokenLogprob
from diskprefix.policy.select import Reason

Json: TypeAlias = dict[str, Any]


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
    """What the disk cache did for this request. `diskprefix/server/README.md` explains the words."""

    scope: str = Field(description="The scope that was used, in its canonical form.", examples=["auto:30"])
    restored: int = Field(description="Prompt tokens whose state was restored, not computed; 0 for a miss.")
    source: Source = Field(default="none", description="Present for a hit: `disk`, or `memory` before it was written.")
    miss_reason: MissReason | None = Field(default=None, description="Present for a miss.")
    diverged_at: int | None = Field(
        default=None, description="Present with `diverged`: the first token that differs from every recent prompt."
    )
    boundary: int = Field(description="Prompt tokens, from the first one on, that this request keeps in the cache.")
    boundary_reason: Reason = Field(description="Why so many.", examples=["continues"])
    saved: Saved = Field(
        description="`queued` for the writer, `stored` already, `dropped` (no room for it) or `none` (nothing to save)."
    )
    exact: bool = Field(
        default=True, description="Present if false: the state of a reply was restored, which a prefill may not equal."
    )


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


class AssistantMessage(BaseModel):
    """The reply, or what a chunk adds to it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None


class Choice(BaseModel):
    """One of the `n` replies, or what a chunk adds to it."""

    index: int
    finish_reason: FinishReason | None


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
    timings: Timings | None = None


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


class ModelCard(BaseModel):
    """The served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "diskprefix"
    max_model_len: int = Field(description="Positions: prompt and reply together, in tokens.")


class ModelList(BaseModel):
    """The answer of `GET /v1/models`: the one served model."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def usage_reply(done: DoneEvent) -> Json:
    usage = done.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def figures_reply(done: DoneEvent) -> Json:
    """Returns the objects that are ours: what the cache did, and where the time went, in milliseconds."""
    timings = {name: round(value, 2) for name, value in asdict(done.timings).items()}
    return {"prefix_cache": _cache_reply(done), "timings": timings}


def _cache_reply(done: DoneEvent) -> Json:
    """Returns the response's `prefix_cache` object: short enough for one line of a screen."""
    report, selection = done.cache, done.cache.selection
    reply: Json = {"scope": str(selection.scope), "restored": report.restored}
    if report.miss_reason is None:
        reply["source"] = report.source
    else:
        reply["miss_reason"] = report.miss_reason
    if report.diverged_at is not None:
        reply["diverged_at"] = report.diverged_at
    reply |= {"boundary": selection.kept, "boundary_reason": selection.reason, "saved": report.saved}
    return reply if report.exact else reply | {"exact": False}


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> Json:
    return {
        "content": [{**_logprob(t), "top_logprobs": [_logprob(alternative) for alternative in t.top]} for t in tokens],
        "refusal": None,
    }


def _logprob(token: TokenLogprob) -> Json:
    # A token that is a part of a character decodes to U+FFFD, whose bytes are not those of the token.
    encoded = None if "�" in token.text else list(token.text.encode("utf-8", "replace"))
    return {"token": token.text, "logprob": token.logprob, "bytes": encoded}


def completion_logprobs(tokens: Sequence[TokenLogprob], text_offset: int) -> Json:
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


@dataclass(frozen=True, kw_only=True)
class Api:
    """What differs between the responses of the two APIs.

    `part` gets the text of a chunk, and whether it is the first of its choice; `logprobs` the tokens, and how many
    characters of the choice come before them.
    """

    id_prefix: str
    whole_object: str
    chunk_object: str
    whole: Callable[[str], Json]
    part: Callable[[str, bool], Json]
    end: Json
    logprobs: Callable[[Sequence[TokenLogprob], int], Json]


CHAT = Api(
    id_prefix="chatcmpl-",
    whole_object="chat.completion",
    chunk_object="chat.completion.chunk",
    whole=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    part=lambda text, first: {"delta": ({"role": "assistant"} if first else {}) | {"content": text}},
    end={"delta": {}},
    logprobs=lambda tokens, _text_offset: chat_logprobs(tokens),
)
COMPLETIONS = Api(
    id_prefix="cmpl-",
    whole_object="text_completion",
    chunk_object="text_completion",
    whole=lambda text: {"text": text},
    part=lambda text, _first: {"text": text},
    end={"text": ""},
    logprobs=completion_logprobs,
)


def whole_choice(api: Api, texts: Sequence[TextEvent], finish: FinishEvent, with_logprobs: bool) -> Json:
    """Returns a choice of a response that is not streamed, from all its events."""
    tokens = [token for event in texts for token in event.logprobs]
    return {
        "index": finish.choice,
        **api.whole("".join(event.text for event in texts)),
        "logprobs": api.logprobs(tokens, 0) if with_logprobs else None,
        "finish_reason": finish.finish_reason,
    }
