"""`POST /v1/completions`, which continues a text or token ids, and the parts of body and writer that chat also uses."""

from __future__ import annotations

import codecs
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator

from diskprefix.daemon.api.dialect import Head, Json, ServerSentEvent
from diskprefix.daemon.api.error_forms import openai_error
from diskprefix.daemon.api.fields import (
    Body,
    Limit,
    LimitOrNothing,
    OneOf,
    RequestBody,
    StopString,
    Unmarkable,
    optional,
    sampling_params,
)
from diskprefix.daemon.api.figures import figures_reply
from diskprefix.daemon.api.parsed_request import ParsedRequest
from diskprefix.daemon.api.reply import DeltaEvent, EndEvent, ReplyEvent, WholeChoice, WholeReply
from diskprefix.daemon.chat.fill_in import FillIn
from diskprefix.daemon.chat.output.format import ContentDelta
from diskprefix.daemon.engine.request import DoneEvent, ProgressEvent, SamplingParams, TokenLogprob
from diskprefix.errors import DiskPrefixError, InvalidRequest
from diskprefix.prefixstore.store.notes import TenantNotes
from diskprefix.values import MAX_STOPS

Stop: TypeAlias = Annotated[
    StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)],
    OneOf(f"a string or a list of up to {MAX_STOPS} strings"),
]


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = optional("Send one more chunk with `usage` (and no choices) before `[DONE]`.")


class OpenAIBody(RequestBody, Unmarkable):
    """The fields that both of OpenAI's bodies have."""

    stream_options: StreamOptions | None = optional("Only with `stream: true`.")
    max_tokens: Limit | None = optional("Most tokens of a choice. Absent, -1, or more than fit: as many as fit.")
    stop: Stop | None = optional("Text that ends the reply and is not part of it.")
    n: int | None = optional("How many choices to generate.", ge=1, le=16)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, vocab_size: int, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Raises `InvalidRequest` for unknown token ids, and for options of a stream without a stream."""
        self.require_stream(self.stream_options)
        return sampling_params(
            self,
            vocab_size,
            max_tokens=max_tokens,
            stop=self.stop,
            logprobs=logprobs,
            n=self.n,
        )


DONE = ServerSentEvent("[DONE]")


class EventWriter:
    """A writer of server-sent events, with the errors of OpenAI's API."""

    def begin(self) -> Sequence[ServerSentEvent]:
        return ()

    def keepalive(self) -> bytes:
        return b": keepalive\n\n"

    def failure(self, error: DiskPrefixError) -> Sequence[ServerSentEvent]:
        return [ServerSentEvent(openai_error(error))]


class OpenAIWriter(EventWriter, ABC):
    """Writes a reply in OpenAI's form. The abstract methods return the members of `choices`, without the index.

    The finish chunk of the last choice waits for the `DoneEvent`, because the last chunk of a stream has `prefix_cache`
    and `timings`. With `include_usage`, one more chunk without choices follows and has them.
    """

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, head: Head, *, include_usage: bool, with_logprobs: bool) -> None:
        self._head = head
        self._include_usage = include_usage
        self.with_logprobs = with_logprobs
        self._held: list[Json] = []
        self._reasoning_tokens = 0
        self._first_ended = False

    @abstractmethod
    def whole_choice(self, choice: WholeChoice) -> Json: ...

    @abstractmethod
    def chunk_choices(self, event: DeltaEvent) -> list[Json]:
        """Returns one object for each chunk."""

    @property
    @abstractmethod
    def empty_choice(self) -> Json: ...

    def keepalive(self) -> bytes:
        """Returns an empty chunk: some agents count no comments, and give up after a time without an event. It is one
        of the first choice, until that has ended."""
        return ServerSentEvent(self._chunk(None if self._first_ended else 0, self.empty_choice, None)).encode()

    def whole(self, reply: WholeReply) -> Json:
        choices = [
            {"index": choice.choice, **self.whole_choice(choice), "finish_reason": choice.reason}
            for choice in reply.choices
        ]
        return {
            **self._envelope(self.whole_object),
            "choices": choices,
            "usage": usage_reply(reply.done, reply.reasoning_tokens),
            **figures_reply(reply.done, self._head.clamped_to),
        }

    def events(self, event: ReplyEvent) -> Sequence[ServerSentEvent]:
        if isinstance(event, DoneEvent):
            return [*map(ServerSentEvent, self._last(event)), DONE]
        if isinstance(event, ProgressEvent):
            return [ServerSentEvent(self._chunk(None, {}, None) | {"prompt_progress": _progress(event)})]
        if isinstance(event, EndEvent):
            self._reasoning_tokens += event.reasoning_tokens
            self._first_ended |= event.choice == 0
            ready, self._held = self._held, [self._chunk(event.choice, self.empty_choice, event.reason)]
        else:
            new = [self._chunk(event.choice, choice, None) for choice in self.chunk_choices(event)]
            ready, self._held = [*self._held, *new], []
        return [ServerSentEvent(chunk) for chunk in ready]

    def _envelope(self, kind: str) -> Json:
        head = self._head
        return {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }

    def _chunk(self, index: int | None, choice: Json, reason: str | None) -> Json:
        choices = [] if index is None else [{"index": index, **choice, "finish_reason": reason}]
        usage = {"usage": None} if self._include_usage else {}
        return {**self._envelope(self.chunk_object), **usage, "choices": choices}

    def _last(self, done: DoneEvent) -> list[Json]:
        figures = figures_reply(done, self._head.clamped_to)
        if self._include_usage:
            return [
                *self._held,
                {**self._chunk(None, {}, None), "usage": usage_reply(done, self._reasoning_tokens), **figures},
            ]
        return [{**chunk, **figures} for chunk in self._held or [self._chunk(None, {}, None)]]


def usage_reply(done: DoneEvent, reasoning_tokens: int) -> Json:
    usage = done.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def _progress(event: ProgressEvent) -> Json:
    """Returns the progress in the form of llama.cpp's server, with the source of restored tokens."""
    return {
        "total": event.total,
        "cache": event.cached,
        "processed": event.processed,
        "time_ms": round(event.elapsed_ms, 2),
        **({"source": event.source} if event.cached else {}),
    }


def early_head(reply_id: str, model: str) -> Head:
    """Returns the values of a reply whose prompt is not ready, and whose `model` may still be loaded."""
    return Head(id=reply_id, created=int(time.time()), model=model)


MAX_PROMPTS = 256
"""The most prompts of a request."""
_MAX_TOKENS = 16
"""The default limit of a choice's tokens, as in OpenAI's API."""

TokenList: TypeAlias = Annotated[list[int], Field(min_length=1)]
OnePrompt: TypeAlias = Annotated[str | TokenList, OneOf("a string or a list of token ids")]


def _kind_of_prompt(value: object) -> str | None:
    if isinstance(value, str):
        return "~text"
    if not isinstance(value, list):
        return None
    return "~several" if value and isinstance(value[0], str | list) else "~tokens"


class CompletionRequest(OpenAIBody, json_schema_extra={"example": {"prompt": "The three longest rivers are"}}):
    """`POST /v1/completions`."""

    prompt: Annotated[
        Annotated[str, Tag("~text")]
        | Annotated[TokenList, Tag("~tokens")]
        | Annotated[list[OnePrompt], Field(max_length=MAX_PROMPTS), Tag("~several")],
        Discriminator(
            _kind_of_prompt,
            custom_error_type="type",
            custom_error_message="Input should be a string or a list of token ids, or a list of such prompts",
        ),
    ] = Field(description=f"Text, or token ids; or a list of up to {MAX_PROMPTS} such prompts.")
    max_tokens: LimitOrNothing | None = optional(f"Most tokens of a choice; 0: none; -1: any. Absent: {_MAX_TOKENS}.")
    logprobs: int | None = optional("Number of alternatives for every token, beside the token.", ge=0, le=20)
    echo: bool | None = optional(
        "`true`: the reply begins with the prompt; with `logprobs`, its tokens have log probabilities. No stream."
    )
    suffix: str | None = optional("Text after the gap that the reply fills; `prompt` is text.")
    best_of: int | None = optional("Not supported, unless equal to `n`.", ge=1, le=16)

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, list) and isinstance(self.prompt[0], str | list):
            return self.prompt
        return [self.prompt]

    @model_validator(mode="after")
    def _has_a_text(self) -> CompletionRequest:
        for index, prompt in enumerate(self.prompts):
            if not (prompt or self.suffix):
                raise InvalidRequest.at("prompt" if prompt is self.prompt else f"prompt.{index}", "must not be empty")
        return self


class Completions:
    body = CompletionRequest
    id_prefix = "cmpl-"
    call_id_prefix = ""

    def read(self, body: CompletionRequest, vocab_size: int, _notes: Callable[[], TenantNotes]) -> ParsedRequest:
        if body.best_of not in (None, body.n or 1):
            raise InvalidRequest.at("best_of", "must be equal to n")
        max_tokens = _MAX_TOKENS if body.max_tokens is None else body.max_tokens
        if body.special_tokens_in_text is False and not body.suffix:
            raise InvalidRequest.at("special_tokens_in_text", "needs a suffix; a prompt without one spells tokens")
        if body.echo:
            for name, value in (("stream", body.stream), ("suffix", body.suffix), ("n", (body.n or 1) > 1)):
                if value:
                    raise InvalidRequest.at(name, "is not allowed beside echo")
        first, *more = [self._prompt(prompt, body) for prompt in body.prompts]
        return ParsedRequest(
            prompt=first,
            more_prompts=tuple(more),
            sampling=body.sampling(vocab_size, max_tokens, body.logprobs),
            text_format=body.text_format_beside(None),
            echo=body.echo or False,
        )

    @staticmethod
    def _prompt(prompt: str | list[int], body: CompletionRequest) -> str | list[int] | FillIn:
        if not body.suffix:
            return prompt
        if not isinstance(prompt, str):
            raise InvalidRequest.at("suffix", "needs a prompt that is text, not token ids")
        return FillIn(prompt, body.suffix, "suffix", special_tokens_in_text=body.special_tokens_in_text or False)

    def early(self, body: CompletionRequest, reply_id: str, model: str) -> OpenAIWriter:
        return self.writer(body, early_head(reply_id, model))

    def writer(self, body: CompletionRequest, head: Head) -> OpenAIWriter:
        writer = CompletionWriter(head, include_usage=body.include_usage, with_logprobs=body.logprobs is not None)
        writer.echoed = body.prompts if body.echo else ()
        return writer


class CompletionWriter(OpenAIWriter):
    whole_object = chunk_object = "text_completion"

    def __init__(self, head: Head, *, include_usage: bool, with_logprobs: bool) -> None:
        super().__init__(head, include_usage=include_usage, with_logprobs=with_logprobs)
        self._offsets: defaultdict[int, _Offsets] = defaultdict(_Offsets)
        self.echoed: Sequence[str | list[int]] = ()
        """The prompts that the choices begin with, if the client asked for `echo`."""

    def whole_choice(self, choice: WholeChoice) -> Json:
        logprobs = _logprobs((*choice.prompt, *choice.tokens), _Offsets()) if self.with_logprobs else None
        if logprobs is not None and choice.prompt:
            # No token precedes the first one, so it has no probability.
            logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None
        return {"text": self._echo(choice) + choice.content, "logprobs": logprobs}

    def _echo(self, choice: WholeChoice) -> str:
        """Returns the text of a choice's prompt, "" without `echo`."""
        prompt = self.echoed[choice.choice] if self.echoed else ""
        if isinstance(prompt, str):
            return prompt
        return b"".join(token.data for token in choice.prompt).decode("utf-8", "replace")

    def chunk_choices(self, event: DeltaEvent) -> list[Json]:
        text = "".join(delta.text for delta in event.deltas if isinstance(delta, ContentDelta))
        logprobs = _logprobs(event.tokens, self._offsets[event.choice]) if event.tokens else None
        return [{"text": text, "logprobs": logprobs}]

    @property
    def empty_choice(self) -> Json:
        return {"text": "", "logprobs": None}


class _Offsets:
    """Counts the characters of a text before each of its tokens. Several tokens may share a character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def before(self, token: TokenLogprob) -> int:
        """Returns the number of complete characters before the next token."""
        if token.data and token.data[0] & 0xC0 != 0x80:
            # An incomplete character becomes U+FFFD in the text.
            self._num_chars += len(self._decoder.decode(b"", final=True))
        num_chars = self._num_chars
        self._num_chars += len(self._decoder.decode(token.data))
        return num_chars


def _logprobs(tokens: Sequence[TokenLogprob], offsets: _Offsets) -> Json:
    return {
        "tokens": [_named(token) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        # The sampled token need not be among the likeliest.
        "top_logprobs": [{_named(other): other.logprob for other in (*token.top, token)} for token in tokens],
        "text_offset": [offsets.before(token) for token in tokens],
    }


def _named(token: TokenLogprob) -> str:
    """Returns the text of a token. A part of a character is written as bytes, in OpenAI's form."""
    try:
        return token.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)
