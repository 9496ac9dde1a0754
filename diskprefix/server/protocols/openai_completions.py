"""`POST /v1/completions`: a text or token ids are continued as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, Tag
from pydantic_core import PydanticCustomError

from diskprefix.chat.output.events import ContentDelta
from diskprefix.engine.request import TokenLogprob
from diskprefix.errors import InvalidRequest
from diskprefix.server.protocols.dialect import Arrival, Asked, Head, Json
from diskprefix.server.protocols.openai_fields import OpenAIBody
from diskprefix.server.protocols.openai_stream import OpenAIWriter
from diskprefix.server.protocols.reply import Choice, DeltaEvent, EndEvent
from diskprefix.server.protocols.strict import REFUSED, by_json_type


def _only_prompt(value: object) -> object:
    """Returns the prompt of a list that holds one prompt, and any other value as it is."""
    if not (isinstance(value, list) and value and isinstance(value[0], str | list)):
        return value
    if len(value) > 1:
        raise PydanticCustomError(
            REFUSED, f"{len(value)} prompts in one request are not supported; send them one by one"
        )
    return value[0]


class CompletionRequest(OpenAIBody):
    """`POST /v1/completions`."""

    model_config = ConfigDict(json_schema_extra={"example": {"prompt": "The three longest rivers are"}})

    prompt: Annotated[
        Annotated[str, Field(min_length=1), Tag("~text")] | Annotated[list[int], Field(min_length=1), Tag("~list")],
        by_json_type("a string or a list of token ids"),
        BeforeValidator(_only_prompt),
    ] = Field(description="Text, or token ids; or a list that holds exactly one of these.")
    logprobs: int | None = Field(default=None, ge=0, le=20, description="So many alternatives for every token.")
    echo: Literal[False] | None = Field(default=None, description="Not supported.")
    suffix: Literal[""] | None = Field(default=None, description="Not supported.")
    best_of: int | None = Field(default=None, ge=1, le=16, description="Not supported, unless equal to `n`.")


class Completions:
    body = CompletionRequest
    id_prefix = "cmpl-"
    call_id_prefix = ""

    def read(self, body: CompletionRequest, arrival: Arrival) -> Asked:
        if body.best_of not in (None, body.n or 1):
            raise InvalidRequest("best_of: must be equal to n", param="best_of")
        sampling = body.sampling(arrival.serving.renderer.vocab_size, body.max_tokens, body.logprobs)
        return Asked(prompt=body.prompt, sampling=sampling, text_format=body.text_format_beside(None))

    def writer(self, body: CompletionRequest, head: Head) -> OpenAIWriter:
        return CompletionWriter(head, include_usage=body.include_usage, with_logprobs=body.logprobs is not None)


class CompletionWriter(OpenAIWriter):
    whole_object = chunk_object = "text_completion"

    def __init__(self, head: Head, *, include_usage: bool, with_logprobs: bool) -> None:
        super().__init__(head, include_usage=include_usage, with_logprobs=with_logprobs)
        self._sent_chars: dict[int, int] = {}
        """By choice."""

    def whole_choice(self, choice: Choice) -> Json:
        return {"text": choice.content, "logprobs": _logprobs(choice.tokens, 0) if self.with_logprobs else None}

    def chunk_choices(self, event: DeltaEvent) -> list[Json]:
        text = "".join(delta.text for delta in event.deltas if isinstance(delta, ContentDelta))
        sent = self._sent_chars.get(event.choice, 0)
        self._sent_chars[event.choice] = sent + len(text)
        return [{"text": text, "logprobs": _logprobs(event.tokens, sent) if event.tokens else None}]

    def end_choice(self, _event: EndEvent) -> Json:
        return {"text": "", "logprobs": None}


def _logprobs(tokens: Sequence[TokenLogprob], text_offset: int) -> Json:
    """Returns the log probabilities. `text_offset` is the number of characters before the first token."""
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
