"""The fields that OpenAI's two older APIs share, chat and text completions."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field, Tag

from diskprefix.engine.request import SamplingParams
from diskprefix.errors import InvalidRequest
from diskprefix.server.protocols.fields import (
    MAX_STOPS,
    Count,
    RequestBody,
    StopString,
    Unmarkable,
)
from diskprefix.server.protocols.params import sampling_params
from diskprefix.server.protocols.strict import Body, by_json_type

Stop: TypeAlias = Annotated[
    Annotated[StopString, Tag("~text")] | Annotated[list[StopString], Field(max_length=MAX_STOPS), Tag("~list")],
    by_json_type(f"a string or a list of up to {MAX_STOPS} strings"),
]


class StreamOptions(Body):
    """What a stream contains besides the text."""

    include_usage: bool | None = Field(
        default=None, description="Send one more chunk with `usage` (and no choices) before `[DONE]`."
    )


class OpenAIBody(RequestBody, Unmarkable):
    """What both bodies have."""

    stream_options: StreamOptions | None = Field(default=None, description="Only with `stream: true`.")
    max_tokens: Count | None = Field(
        default=None, description="Most tokens of a choice. Absent, or more than fit: as many as fit."
    )
    stop: Stop | None = Field(default=None, description="Text that ends the reply; it is not part of it.")
    n: int | None = Field(default=None, ge=1, le=16, description="How many choices to generate.")

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, vocab_size: int, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Raises `InvalidRequest` for unknown token ids, and for options of a stream without a stream."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options: needs stream: true", param="stream_options")
        stop = self.stop or ()
        return sampling_params(
            self,
            vocab_size,
            max_tokens=max_tokens,
            stop=(stop,) if isinstance(stop, str) else stop,
            logprobs=logprobs,
            n=self.n,
        )
