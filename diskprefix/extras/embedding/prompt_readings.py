"""Computes many short prompts of one request, and reads something at the end of each."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.types import Message

from diskprefix.api.fields import CacheFields, cache_options
from diskprefix.chat.messages import JsonObject
from diskprefix.engine.gauges import Activity
from diskprefix.engine.request import DoneEvent, GenerateRequest, ReadEvent, Reading, SamplingParams, Usage
from diskprefix.errors import InvalidRequest
from diskprefix.nouns import CacheOptions, Prompt, Scope
from diskprefix.server.daemon import Daemon
from diskprefix.server.generation import Generation
from diskprefix.server.log_context import LogContext, log_context
from diskprefix.server.serving import Serving
from diskprefix.tenant_ids import group_of

MAX_INPUTS = 2048
"""The most inputs of a request, as OpenAI has it."""
_WAIT_S = 60.0

Values: TypeAlias = npt.NDArray[np.float32]


class ReadingBody(CacheFields):
    """The fields of requests whose prompts have no reply."""

    model: str | None = Field(default=None, description="Name of the served model. Absent: the served model.")


B = TypeVar("B", bound=ReadingBody)


class TokenUsage(BaseModel):
    """The tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: JsonObject = Field(description="`cached_tokens`: those that were restored.")


@dataclass(frozen=True)
class Findings:
    """The values that were read at the end of each prompt, in their order."""

    serving: Serving
    values: list[Values]
    usage: Usage

    @property
    def token_usage(self) -> JsonObject:
        total = self.usage.prompt_tokens
        cached = {"cached_tokens": self.usage.cached_tokens}
        return {"prompt_tokens": total, "total_tokens": total, "prompt_tokens_details": cached}


async def read_prompts(
    request: Request, model: type[B], make: Callable[[Serving, B, str], tuple[list[Prompt], Reading]]
) -> tuple[B, Findings]:
    """Reads the body, and computes the prompts that `make` returns for it. That gets `--pooling`, too, and is called in
    a thread. Raises what `make` raises, and the errors of a request for a reply."""
    daemon: Daemon = request.app.state.daemon
    context = log_context(request)
    context.wants_reply = True
    with daemon.arriving(context.caller.tenant) as place:
        body = await daemon.bodies.read_json(request, model, place)
        serving = await daemon.ready()
        serving.require_model(body.model)
        cache = cache_options(body, scope=serving.scope, caller=context.caller.tenant, reuse_generated=False)
        serving.engine.give_way()
        pooling = daemon.settings.pooling
        prompts, reading = await daemon.threads.run(place.rendering, make, serving, body, pooling)
        # It takes long for a tenant who was not here lately.
        await asyncio.shield(asyncio.wrap_future(serving.engine.cache.load(cache.tenant)))
    options = _options(cache, reading)
    sampling = SamplingParams(max_tokens=0)
    requests = [
        GenerateRequest(id=f"read-{uuid.uuid4().hex}", prompt=prompt, sampling=sampling, cache=options, reading=reading)
        for prompt in prompts
    ]
    found = await _Readings(request, context, daemon, serving).run(requests)
    return body, Findings(serving, [values for values, _ in found], _count(context, [done for _, done in found]))


def _options(cache: CacheOptions, reading: Reading) -> CacheOptions:
    """Returns how the prompts are cached. They are compared with their like only. A mean needs all tokens computed."""
    if reading.pooling == "mean":
        cache = replace(cache, scope=Scope("off"))
    group = cache.group or group_of("embedding")
    return replace(cache, group=group, replay=False, leaves_last=reading.pooling is not None)


def _count(context: LogContext, done: Sequence[DoneEvent]) -> Usage:
    """Sets what the log says of all prompts, and returns their tokens."""
    usage = Usage(
        prompt_tokens=sum(one.usage.prompt_tokens for one in done),
        completion_tokens=0,
        cached_tokens=sum(one.usage.cached_tokens for one in done),
    )
    most = max(done, key=lambda one: one.cache.restored)
    context.done = DoneEvent(usage, replace(most.cache, restored=usage.cached_tokens), most.timings)
    return usage


class _Readings:
    """The prompts of one request in the engine. As many at a time as it runs, so that others get their turn."""

    def __init__(self, request: Request, context: LogContext, daemon: Daemon, serving: Serving) -> None:
        self._context, self._daemon, self._inbox = context, daemon, serving.inbox
        self._gone = asyncio.create_task(_until_gone(request))
        self._free = asyncio.Semaphore(max(1, min(serving.engine.max_sequences, serving.inbox.max_queue)))

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
        self._daemon.metrics.count_generation(done)

    def _on_cancelled(self, activity: Activity) -> None:
        self._context.cancelled_at = activity


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def require_text(text: str, path: str) -> str:
    """Returns a text. Raises `InvalidRequest` if it is empty."""
    if not text:
        raise InvalidRequest.at(path, "must not be empty")
    return text
