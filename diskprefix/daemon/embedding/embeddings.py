"""`POST /v1/embeddings` of OpenAI's API: vectors of length 1, read at the ends of many short prompts."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace
from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from diskprefix.daemon.api.body_errors import REFUSED
from diskprefix.daemon.api.fields import CacheFields, TextFields, cache_options
from diskprefix.daemon.chat.messages import JsonObject
from diskprefix.daemon.embedding.model_purpose import Purpose, read_purpose
from diskprefix.daemon.engine.gauges import Activity
from diskprefix.daemon.engine.request import DoneEvent, GenerateRequest, ReadEvent, Reading, SamplingParams
from diskprefix.daemon.server.daemon import Daemon
from diskprefix.daemon.server.generation import Generation, disconnected, together
from diskprefix.daemon.server.log_context import LogContext, log_context
from diskprefix.daemon.server.routes import Routes
from diskprefix.daemon.server.serving import Serving
from diskprefix.errors import ContextTooLong, InvalidRequest
from diskprefix.tenant_ids import group_of
from diskprefix.values import CacheOptions, Prompt, Scope

MAX_INPUTS, MAX_TOKENS = 2048, 300_000
"""The most inputs of a request, and tokens in all of them, as in OpenAI's API."""
_WAIT_S = 60.0

log = logging.getLogger("diskprefix")

Values: TypeAlias = npt.NDArray[np.float32]

routes = Routes("embeddings")

_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_INPUT = {"anyOf": [{"type": "string"}, _TOKENS, {"type": "array", "items": {"anyOf": [{"type": "string"}, _TOKENS]}}]}


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int and item >= 0 for item in value)


def _checked_input(value: Any) -> Any:
    if isinstance(value, str) or _is_tokens(value):
        return value
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_INPUTS:
        raise PydanticCustomError(
            REFUSED, f"must be a text, a list of token ids, or a list of 1 to {MAX_INPUTS} of these"
        )
    for index, item in enumerate(value):
        if not isinstance(item, str) and not _is_tokens(item):
            raise InvalidRequest.at(f"input.{index}", "must be a text, or a list of token ids that is not empty")
    return value


class EmbeddingsRequest(CacheFields, TextFields):
    """`POST /v1/embeddings`."""

    model_config = ConfigDict(json_schema_extra={"example": {"input": ["The Nile is a river.", "Oslo is a city."]}})

    model: str | None = Field(default=None, description="Name of the served model. Absent: the served model.")
    input: Annotated[Any, AfterValidator(_checked_input), WithJsonSchema(_INPUT)] = Field(
        description="A text, a list of token ids, or a list of these. A text ends as the model's tokenizer ends it."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="Numbers, or float32 (little-endian) in base64."
    )
    dimensions: int | None = Field(
        default=None, ge=1, le=2**31 - 1, description="Only the first so many numbers, again as a vector of length 1."
    )

    @property
    def truncates(self) -> bool:
        """True if an input that exceeds the positions is cut, instead of refused."""
        return False


class Vectors(NamedTuple):
    """The vectors of a request. `truncated` are the indices of the inputs that were cut."""

    body: EmbeddingsRequest
    serving: Serving
    values: list[Values]
    usage: JsonObject
    truncated: list[int]


@routes.add("POST /v1/embeddings", "Embeddings", EmbeddingsRequest)
async def embeddings(request: Request) -> Response:
    """A vector for each input: the model's last hidden states, pooled as its files say.

    Returns a list of the vectors, as in OpenAI's API.
    """
    body, serving, vectors, usage, _ = await read_vectors(request, EmbeddingsRequest)
    fields: JsonObject = {"object": "list", "model": serving.model_name, "usage": usage}
    daemon: Daemon = request.app.state.daemon
    content = await daemon.threads.run_for(request, "writing", _written, fields, body, vectors)
    return Response(content, media_type="application/json")


async def read_vectors(request: Request, kind: type[EmbeddingsRequest]) -> Vectors:
    """Reads a body of this kind and computes its vectors. Raises `InvalidRequest` and the errors of
    `Generation.next`."""
    daemon: Daemon = request.app.state.daemon
    context = log_context(request)
    context.wants_reply = True
    async with AsyncExitStack() as held:
        body = await daemon.bodies.read_json(request, kind, held)
        serving = await daemon.ready()
        serving.require_model(body.model)
        state = request.app.state
        state.purpose = state.purpose or await daemon.threads.run("inspecting", read_purpose, serving.engine.origin)
        purpose: Purpose = state.purpose
        purpose.require()
        cache = cache_options(body, scope=serving.scope, caller=context.caller.tenant, share=str(context.share))
        serving.engine.on_request()
        prompts, truncated = await daemon.threads.run_for(request, "rendering", _prompts, serving, purpose, body)
        await held.aclose()
        reading = Reading(pooling=purpose.pooling)
        make = partial(
            GenerateRequest,
            conversation=context.conversation,
            sampling=SamplingParams(max_tokens=0),
            cache=_options(cache, reading),
        )
        requests = [make(id=f"read-{uuid.uuid4().hex}", prompt=prompt, reading=reading) for prompt in prompts]
        results = await _Readings(request, context, daemon, serving).run(requests)
        usage = _count(context, [done for _, done in results])
        return Vectors(body, serving, [values for values, _ in results], usage, truncated)


def _prompts(serving: Serving, purpose: Purpose, body: EmbeddingsRequest) -> tuple[list[Prompt], list[int]]:
    """Returns the prompts of the inputs, and which of these were cut."""
    engine = serving.engine
    if not engine.runtime.has_hidden:
        how = "the engine shows no hidden states of this model, so it makes no embeddings"
        how += "; with --runtime plan it does, if it has a plan"
        raise InvalidRequest.at("model", how)
    size = engine.config.get_text_config(decoder=True).hidden_size
    if body.dimensions is not None and body.dimensions > size:
        raise InvalidRequest.at("dimensions", f"must be at most {size}, the size of this model's vectors")
    is_one = isinstance(body.input, str) or _is_tokens(body.input)
    items = {"input": body.input} if is_one else {f"input.{index}": item for index, item in enumerate(body.input)}
    prompts: list[Prompt] = []
    truncated: list[int] = []
    num_tokens = 0
    for index, (path, item) in enumerate(items.items()):
        make = partial(_prompt, serving, purpose, item, path, body.special_tokens_in_text or False)
        try:
            prompts.append(make())
        except ContextTooLong:
            if not body.truncates:
                raise
            prompts.append(make(engine.max_positions - 1))
            truncated.append(index)
        num_tokens += len(prompts[-1].token_ids)
        if num_tokens > MAX_TOKENS:
            problem = f"here the prompts of this request exceed {MAX_TOKENS} tokens; send the rest in another request"
            raise InvalidRequest.at(path, problem)
    if truncated:
        log.warning(
            "%d of %d texts to embed were cut at %d tokens, because the request has not `truncate: false`",
            len(truncated),
            len(prompts),
            engine.max_positions - 1,
        )
    return prompts, truncated


def _prompt(
    serving: Serving,
    purpose: Purpose,
    item: str | list[int],
    path: str,
    special_tokens: bool,
    at_most: int | None = None,
) -> Prompt:
    """Returns the prompt of an input. If it has more than `at_most` tokens, it loses its end, but not the tokens that
    end every text."""
    renderer = serving.renderer
    if not item:
        raise InvalidRequest.at(path, "must not be empty")
    make = partial(renderer.completion, item, special_tokens_in_text=special_tokens, param=path)
    prompt = make(at_most=at_most)
    if isinstance(item, list) or purpose.end_id is None or prompt.token_ids[-1] == purpose.end_id:
        return prompt
    if at_most is not None:
        prompt = make(at_most=at_most - 1)
    return renderer.completion([*prompt.token_ids.tolist(), purpose.end_id], param=path)


def _written(fields: JsonObject, body: EmbeddingsRequest, values: Sequence[Values]) -> bytes:
    """Returns the reply in JSON, written item by item, because `dumps` keeps other threads from running."""
    dumps = partial(json.dumps, ensure_ascii=False, separators=(",", ":"))
    items = (
        {"object": "embedding", "index": index, "embedding": vector(item_values, body)}
        for index, item_values in enumerate(values)
    )
    written = ",".join(dumps(item) for item in items)
    return f'{dumps(fields)[:-1]},"data":[{written}]}}'.encode()


def vector(values: Values, body: EmbeddingsRequest) -> list[float] | str:
    """Returns the requested numbers of a vector, with length 1."""
    wide = values[: body.dimensions].astype(np.float64)
    unit = (wide / (np.sqrt((wide * wide).sum()) or 1.0)).astype("<f4")
    return base64.b64encode(unit.tobytes()).decode() if body.encoding_format == "base64" else unit.tolist()


def _options(cache: CacheOptions, reading: Reading) -> CacheOptions:
    """Returns the cache options. Prompts are compared with other embeddings only; a mean needs all tokens computed."""
    if reading.pooling == "mean":
        cache = replace(cache, scope=Scope("off"))
    group = cache.group or group_of("embedding")
    return replace(cache, group=group, replay=False, computes_last=True)


def _count(context: LogContext, done: Sequence[DoneEvent]) -> JsonObject:
    """Sets the log's figures of all prompts, and returns their `usage`."""
    context.done = together(done)
    usage = context.done.usage
    cached = {"cached_tokens": usage.cached_tokens}
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens, "prompt_tokens_details": cached}


class _Readings:
    """The prompts of one request in the engine, as many at a time as it runs, so that other requests get a turn."""

    def __init__(self, request: Request, context: LogContext, daemon: Daemon, serving: Serving) -> None:
        self._context, self._daemon, self._inbox = context, daemon, serving.inbox
        self._gone = asyncio.create_task(disconnected(request.receive))
        self._free = asyncio.Semaphore(serving.engine.max_sequences)

    async def run(self, requests: Sequence[GenerateRequest]) -> list[tuple[Values, DoneEvent]]:
        """Returns the values of each prompt. The first error ends all of them."""
        tasks = [asyncio.create_task(self._read(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in (self._gone, *tasks):
                task.cancel()

    async def _read(self, request: GenerateRequest) -> tuple[Values, DoneEvent]:
        async with self._free:
            count = self._daemon.metrics.count_tokens
            generation = Generation(self._inbox, request, self._receive, count, self._on_cancelled)
            values = np.zeros(0, np.float32)
            with closing(generation):
                while not isinstance(event := await generation.next(_WAIT_S), DoneEvent):
                    if isinstance(event, ReadEvent):
                        values = event.values
                return values, event

    async def _receive(self) -> Message:
        await asyncio.shield(self._gone)
        return {"type": "http.disconnect"}

    def _on_cancelled(self, activity: Activity) -> None:
        self._context.cancelled_at = activity


def add_routes(app: Starlette) -> None:
    """Adds `POST /v1/embeddings`."""
    app.state.purpose = None
    app.routes.extend(routes)
