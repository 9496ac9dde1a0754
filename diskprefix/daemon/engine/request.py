"""Values that pass between the server and the engine: a request in, events out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from diskprefix.daemon.engine.thought_limit import ThoughtBudget
from diskprefix.errors import DiskPrefixError
from diskprefix.prefixstore.store.reads import Patience
from diskprefix.values import NO_ASKER, Asker, CacheOptions, CacheOutcome, CacheReport, Prompt, StateSource, outcome_of

if TYPE_CHECKING:
    import regex

FinishReason: TypeAlias = Literal["stop", "length"]


class SamplingParams(Struct, frozen=True, kw_only=True):
    """Sampling parameters: the parameters of OpenAI, and `top_k`, `min_p` and `repetition_penalty` of vLLM. A
    `temperature` of 0 is greedy. With `max_tokens` of 0 the prompt is computed and saved, and there is no reply.
    `stop` is None if the request says nothing of it. `logprobs` k reports the chosen token and its k
    most likely alternatives."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] | None = None
    logprobs: int | None = None
    n: int = 1


class FreeText(Struct, frozen=True, kw_only=True):
    """Free text before the constrained text: a thought. It ends with the first occurrence of `end`. A reply has free
    text if it begins with `begin`; every reply has it if `begin` is None."""

    end: str
    begin: str | None = None


class Constraint(Struct, frozen=True, kw_only=True):
    """A constraint of a reply, after the free text `before`.

    `source` is the JSON text of the schema, the grammar (llguidance's Lark), or a JSON list of the strings to choose
    from; "" for any JSON object.

    With `begins`, the reply is free text except for constrained texts. A constrained text begins with a match of this
    pattern, outside a thought. If a group of the pattern matched, the group's number stands in the source for the
    matched text. `make_source` makes the source on another thread when such a text begins. If it raises a
    `DiskPrefixError`, the whole reply is free.
    """

    kind: Literal["json_schema", "json_object", "lark", "choice"]
    source: str = ""
    before: FreeText | None = None
    begins: regex.Pattern[str] | None = None
    make_source: Callable[[], str] | None = None
    asker: Asker = NO_ASKER
    """Whose request it is: compiled constraints are not shared between tenants."""


class Reading(Struct, frozen=True, kw_only=True):
    """The values to read from a prompt without a reply: the last hidden state of its last token, or the mean of the
    last hidden states of all tokens."""

    pooling: Literal["last", "mean"]


class Echo(Struct, frozen=True, kw_only=True):
    """A request for the tokens of the prompt. Unless `logprobs` is None, the tokens come with their log probabilities,
    and with the log probabilities of the `logprobs` likeliest tokens at each place."""

    logprobs: int | None


class GenerateRequest(Struct, frozen=True, kw_only=True):
    id: str
    prompt: Prompt
    sampling: SamplingParams
    cache: CacheOptions
    conversation: str = ""
    """The conversation of the request, for turns within its share."""
    constraint: Constraint | None = None
    thought_budget: ThoughtBudget | None = None
    reading: Reading | None = None
    """With a reading, `sampling.max_tokens` is 0. Pooling needs computed tokens: `cache.computes_last` is set, and for
    a mean the scope is off."""
    echo: Echo | None = None
    """With log probabilities the scope is off, because all tokens of the prompt must be computed."""
    shown_special_tokens: frozenset[str] = frozenset()
    """The special tokens that appear in the text of events. All others have no text."""
    reports_progress: bool = False
    """True if the client wants `ProgressEvent`s."""
    patience: Patience = field(default_factory=Patience)
    """The time that the request may still wait for the disk."""

    @property
    def scores_prompt(self) -> bool:
        """True if the tokens of the prompt get log probabilities."""
        return self.echo is not None and self.echo.logprobs is not None

    @property
    def share(self) -> str:
        """The share that the request counts for, in turns for memory and rows."""
        return self.cache.share

    @property
    def turn(self) -> tuple[str, str]:
        """The share and its conversation."""
        return self.share, self.conversation


class TokenLogprob(Struct, frozen=True):
    """The natural-log probability of one token under the model's own distribution, before penalties and temperature.
    `data` are the bytes of the token; they may be a part of a character."""

    token_id: int
    data: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        """The text of the token, with U+FFFD for a part of a character."""
        return self.data.decode("utf-8", "replace")


class TextEvent(Struct, frozen=True):
    """The new text of one choice. It may be empty while a multi-byte character or a stop string is incomplete."""

    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class ProgressEvent(Struct, frozen=True):
    """The progress of a prompt of `total` tokens: `cached` were restored from `source`, `processed` were restored or
    computed, and the first `kept` will be saved. `elapsed_ms` runs since the engine accepted the request."""

    total: int
    cached: int
    processed: int
    kept: int
    elapsed_ms: float
    source: StateSource = "none"


class ReadEvent(Struct, frozen=True):
    """The values of a request's `Reading`: float32, shape [hidden_size]."""

    values: npt.NDArray[np.float32]


class EchoEvent(Struct, frozen=True):
    """The tokens of the prompt of one choice. The first token has no log probability; its value is 0."""

    choice: int
    tokens: tuple[TokenLogprob, ...]


class FinishEvent(Struct, frozen=True):
    """The end of one choice. `stop` is the stop string that ended it."""

    choice: int
    finish_reason: FinishReason
    stop: str | None = None


class Usage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Timings(Struct, frozen=True, kw_only=True):
    """The times of a request. `ttft_ms` runs from the arrival in the queue to the first sampled token, or to the end of
    the prompt if no token is sampled. `late_restore_ms`: an exact repeat gets its first token from the stored logits,
    while the state is still restored; `restore_ms` is the part before that token. `drafted_tokens` were guessed and
    computed; `accepted_tokens` of them are in the reply (`engine.speculation`). `drafted_by` names the proposers:
    ngram, model or mtp, with commas between. `draft_ms` is the time of guessing. `image_tokens` are the tokens of
    pictures in the prompt. `images_encoded` pictures were encoded in `encode_ms`, and `images_restored` were read from
    the store; the other pictures were not needed."""

    queue_ms: float
    lookup_ms: float
    restore_ms: float
    prefill_ms: float
    ttft_ms: float
    decode_ms: float
    decode_tokens_per_s: float
    late_restore_ms: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_by: str = ""
    draft_ms: float = 0.0
    encode_ms: float = 0.0
    image_tokens: int = 0
    images_encoded: int = 0
    images_restored: int = 0

    @property
    def others_ms(self) -> float:
        """The rest of `ttft_ms`: steps for other requests, waits between threads, and sampling. Never below 0."""
        known_ms = self.queue_ms + self.lookup_ms + self.restore_ms + self.encode_ms + self.prefill_ms
        return max(0.0, self.ttft_ms - known_ms)


class DoneEvent(Struct, frozen=True):
    """The last event of a request that ended well."""

    usage: Usage
    cache: CacheReport
    timings: Timings

    @property
    def outcome(self) -> CacheOutcome:
        """The cache outcome of the request, which decides the kind of its time to the first token."""
        return outcome_of(self.usage.prompt_tokens, self.cache.restored)


class ErrorEvent(Struct, frozen=True):
    """The last event of a request that failed. A cancelled request has no last event."""

    error: DiskPrefixError


Event: TypeAlias = ProgressEvent | TextEvent | ReadEvent | EchoEvent | FinishEvent | DoneEvent | ErrorEvent
