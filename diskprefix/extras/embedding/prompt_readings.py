"""Computes many short prompts of one request, and reads something at the end of each."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from diskprefix.api.fields import CacheFields, cache_options
from diskprefix.chat.messages import JsonObject
from diskprefix.engine.gauges import Activity
from diskprefix.engine.request import DoneEvent, GenerateRequest, ReadEvent, Reading, SamplingParams
from diskprefix.errors import InvalidRequest
from diskprefix.extras.embedding.model_purpose import Purpose
from diskprefix.nouns import CacheOptions, Prompt, Scope
from diskprefix.server.daemon import Daemon
from diskprefix.server.generation import Generation, together
from diskprefix.server.log_context import LogContext, log_context
from diskprefix.server.serving import Serving
from diskprefix.server.streaming import disconnected
from diskprefix.tenant_ids import group_of

MAX_INPUTS, MAX_TOKENS = 2048, 300_000
"""The most inputs of a request, and tokens of all its prompts, as OpenAI has them."""
_WAIT_S = 60.0

Values: TypeAlias = npt.NDArray[np.float32]


class ReadingBody(CacheFields):
    """The fields of requests whose prompts have no reply."""

    model: str | None = Field(default=None, description="Name of the served model. Absent: the served model.")


B = TypeVar("B", bound=ReadingBody)


Prompts: TypeAlias = Iterable[tuple[str, Prompt]]
"""Prompts with their paths in the body."""
Make: TypeAlias = Callable[[Serving, Purpose, B], tuple[Prompts, Reading]]
Write: TypeAlias = Callable[[B, list[Values]], tuple[JsonObject, str, Iterable[JsonObject]]]


async def answer_with_readings(request: Request, model: type[B], make: Make[B], write: Write[B]) -> Response:
    """Reads the body, computes the prompts that `make` returns for it, and sends what `write` makes of the values read
    at their ends: fields, the name of a list, and its items. Both are called in a thread. Raises what they raise, and
    the errors of a request for a reply."""
    daemon: Daemon = request.app.state.daemon
    context = log_context(request)
    context.wants_reply = True
    async with AsyncExitStack() as held:
        body = await daemon.bodies.read_json(request, model, held)
        serving = await daemon.ready()
        serving.require_model(body.model)
        purpose: Purpose = request.app.state.purpose
        purpose.require()
        cache = cache_options(body, scope=serving.scope, caller=context.caller.tenant)
        serving.engine.give_way()
        prompts, reading = await daemon.threads.run("rendering", _rendered, partial(make, serving, purpose, body))
        # It takes long for a tenant who was not here lately.
        await asyncio.shield(asyncio.wrap_future(serving.engine.cache.load(cache.tenant)))
        await held.aclose()
        options = _options(cache, reading)
        requests = [
            GenerateRequest(
                id=f"read-{uuid.uuid4().hex}",
                prompt=prompt,
                sampling=SamplingParams(max_tokens=0),
                cache=options,
                reading=reading,
            )
            for prompt in prompts
        ]
        found = await _Readings(request, context, daemon, serving).run(requests)
        usage = _count(context, [done for _, done in found])
        fields: JsonObject = {"model": serving.model_name, "usage": usage}
        work = partial(write, body, [values for values, _ in found])
        content = await daemon.threads.run("rendering", _written, fields, work)
    return Response(content, media_type="application/json")


def _rendered(make: Callable[[], tuple[Prompts, Reading]]) -> tuple[list[Prompt], Reading]:
    made, reading = make()
    prompts: list[Prompt] = []
    num_tokens = 0
    for path, prompt in made:
        num_tokens += len(prompt.token_ids)
        if num_tokens > MAX_TOKENS:
            problem = f"here the prompts of this request exceed {MAX_TOKENS} tokens; send the rest in another request"
            raise InvalidRequest.at(path, problem)
        prompts.append(prompt)
    return prompts, reading


def _written(fields: JsonObject, write: Callable[[], tuple[JsonObject, str, Iterable[JsonObject]]]) -> bytes:
    """Returns the reply in JSON, written item by item: other threads do not run during a call of `dumps`."""
    dumps = partial(json.dumps, ensure_ascii=False, separators=(",", ":"))
    own, name, items = write()
    written = ",".join(dumps(item) for item in items)
    return f'{dumps(own | fields)[:-1]},"{name}":[{written}]}}'.encode()


def _options(cache: CacheOptions, reading: Reading) -> CacheOptions:
    """Returns how the prompts are cached. They are compared with their like only. A mean needs all tokens computed."""
    if reading.pooling == "mean":
        cache = replace(cache, scope=Scope("off"))
    group = cache.group or group_of("embedding")
    return replace(cache, group=group, replay=False, leaves_last=True)


def _count(context: LogContext, done: Sequence[DoneEvent]) -> JsonObject:
    """Sets what the log says of all prompts, and returns their `usage`."""
    context.done = together(done)
    usage = context.done.usage
    cached = {"cached_tokens": usage.cached_tokens}
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens, "prompt_tokens_details": cached}


class _Readings:
    """The prompts of one request in the engine. As many at a time as it runs, so that others get their turn."""

    def __init__(self, request: Request, context: LogContext, daemon: Daemon, serving: Serving) -> None:
        self._context, self._daemon, self._inbox = context, daemon, serving.inbox
        self._gone = asyncio.create_task(disconnected(request.receive))
        self._free = asyncio.Semaphore(serving.engine.max_sequences)

    async def run(self, requests: Sequence[GenerateRequest]) -> list[tuple[Values, DoneEvent]]:
        """Returns the values of each prompt. The first error ends all of them."""
        tasks = [asyncio.create_task(self._read(one)) for one in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in (self._gone, *tasks):
                task.cancel()

    async def _read(self, request: GenerateRequest) -> tuple[Values, DoneEvent]:
        async with self._free:
            generation = Generation(self._inbox, request, self._receive, self._on_done, self._on_cancelled)
            try:
                values = np.zeros(0, np.float32)
                while not isinstance(event := await generation.next(_WAIT_S), DoneEvent):
                    if isinstance(event, ReadEvent):
                        values = event.values
                return values, event
            finally:
                generation.close()

    async def _receive(self) -> Message:
        await asyncio.shield(self._gone)
        return {"type": "http.disconnect"}

    def _on_done(self, done: DoneEvent) -> None:
        self._daemon.metrics.count_tokens(done)

    def _on_cancelled(self, activity: Activity) -> None:
        self._context.cancelled_at = activity
