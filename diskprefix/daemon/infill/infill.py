"""`POST /infill`: text for the gap between two texts, in the form of llama.cpp (its `tools/server/README.md`).

A plugin sends `n_predict: 0` to have its context computed ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from diskprefix.daemon.api.dialect import Head, Json, ServerSentEvent
from diskprefix.daemon.api.fields import MAX_PARTS, Body, LimitOrNothing
from diskprefix.daemon.api.figures import figures_reply
from diskprefix.daemon.api.openai import EventWriter, OpenAIBody
from diskprefix.daemon.api.parsed_request import ParsedRequest
from diskprefix.daemon.api.reply import DeltaEvent, EndEvent, ReplyEvent, WholeReply
from diskprefix.daemon.chat.fill_in import FillIn
from diskprefix.daemon.chat.output.format import ContentDelta
from diskprefix.daemon.engine.request import DoneEvent
from diskprefix.daemon.server.answer import answer
from diskprefix.daemon.server.routes import STREAMED, Routes
from diskprefix.prefixstore.store.notes import TenantNotes

routes = Routes("completions")


class FileBody(Body):
    """Another file, that the model may look at."""

    filename: str = Field(default="", description="Its name.")
    text: str = Field(description="Its text.")


class InfillRequest(OpenAIBody):
    """`POST /infill`."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"input_prefix": "def add(a, b):\n    ", "input_suffix": "\n", "n_predict": 16}}
    )

    input_prefix: str = Field(description="The text before the gap.")
    input_suffix: str = Field(description="The text behind the gap.")
    input_extra: Annotated[list[FileBody], Field(max_length=MAX_PARTS)] | None = Field(
        default=None, description="Other files, those that change least first."
    )
    prompt: str | None = Field(default=None, description="The beginning of what fills the gap.")
    n_predict: LimitOrNothing | None = Field(
        default=None, description="Most tokens of the reply; 0: the prompt is only kept; -1: any."
    )
    n: Literal[1] | None = Field(default=None, description="One choice.")


class Infill:
    body = InfillRequest
    id_prefix = "infill-"
    call_id_prefix = ""

    def read(self, body: InfillRequest, vocab_size: int, _notes: Callable[[], TenantNotes]) -> ParsedRequest:
        files = tuple((file.filename, file.text) for file in body.input_extra or ())
        begun, in_text = body.prompt or "", body.special_tokens_in_text or False
        limit = body.max_tokens if body.n_predict is None else body.n_predict
        return ParsedRequest(
            prompt=FillIn(body.input_prefix, body.input_suffix, "input_suffix", files, begun, in_text),
            sampling=body.sampling(vocab_size, limit, None),
            text_format=body.text_format_beside(None),
            limit_path="n_predict",
        )

    def writer(self, _body: InfillRequest, head: Head) -> InfillWriter:
        return InfillWriter(head)


class InfillWriter(EventWriter):
    def __init__(self, head: Head) -> None:
        self._head = head
        self._end: EndEvent | None = None

    def whole(self, reply: WholeReply) -> Json:
        [choice] = reply.choices
        self._end = EndEvent(0, choice.reason, choice.stop)
        return self._last(reply.done, choice.content)

    def events(self, event: ReplyEvent) -> Sequence[ServerSentEvent]:
        if isinstance(event, DoneEvent):
            return [ServerSentEvent(self._last(event, ""))]
        if isinstance(event, EndEvent):
            self._end = event
        if not isinstance(event, DeltaEvent):
            return ()
        text = "".join(delta.text for delta in event.deltas if isinstance(delta, ContentDelta))
        return [ServerSentEvent({"content": text, "stop": False})] if text else ()

    def _last(self, done: DoneEvent, content: str) -> Json:
        usage, end, figures = done.usage, self._end, figures_reply(done, self._head.clamped_to)
        by_word = end is not None and end.stop is not None
        return {
            "content": content,
            "stop": True,
            "stop_type": "word" if by_word else "eos" if end is not None and end.reason == "stop" else "limit",
            "stopping_word": end.stop if end is not None and by_word else "",
            "model": self._head.model,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.cached_tokens,
            "truncated": False,
            **figures,
            "timings": {**_as_llama_cpp(done), **figures["timings"]},
        }


def _as_llama_cpp(done: DoneEvent) -> dict[str, Any]:
    """Returns the times under llama.cpp's names, which plugins show. The first reply token belongs to neither phase."""
    usage, timings = done.usage, done.timings
    prompt, predicted = usage.prompt_tokens - usage.cached_tokens, max(0, usage.completion_tokens - 1)

    def rates(name: str, count: int, ms: float) -> dict[str, float]:
        return {
            f"{name}_n": count,
            f"{name}_ms": round(ms, 2),
            f"{name}_per_token_ms": round(ms / count, 3) if count else 0.0,
            f"{name}_per_second": round(1e3 * count / ms, 2) if ms else 0.0,
        }

    return {
        "cache_n": usage.cached_tokens,
        **rates("prompt", prompt, timings.prefill_ms),
        **rates("predicted", predicted, timings.decode_ms),
    }


@routes.add("POST /infill", "Fill a gap", InfillRequest, media_types=STREAMED)
async def infill(request: Request) -> Response:
    """Text for the gap between two texts, as code editors ask for it. No chat template is applied.

    Returns `content`, the text for the gap, and figures, as llama.cpp's server has them.
    """
    return await answer(request, Infill())


def add_routes(app: Starlette) -> None:
    """Adds `POST /infill`."""
    app.routes.extend(routes)
