"""`POST /v1/chat/completions` and `POST /v1/completions`: the same steps, two APIs."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import defaultdict
from concurrent.futures import Future
from typing import Any, TypeAlias

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diskprefix.chat.content import holds_media
from diskprefix.engine.request import DoneEvent, GenerateRequest, TextEvent
from diskprefix.prompt import Prompt
from diskprefix.server.body import read_json
from diskprefix.server.daemon import Daemon
from diskprefix.server.errors import ErrorBody
from diskprefix.server.generation import Generation
from diskprefix.server.log_context import log_context
from diskprefix.server.params import cache_options, check_context, sampling_params
from diskprefix.server.replies import (
    CHAT,
    COMPLETIONS,
    Api,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Json,
    figures_reply,
    usage_reply,
    whole_choice,
)
from diskprefix.server.schemas import ChatRequest, CompletionRequest, SamplingBody
from diskprefix.server.serving import Serving
from diskprefix.server.streaming import ChunkWriter, EventStream

AnyRequest: TypeAlias = ChatRequest | CompletionRequest

router = APIRouter(tags=["completions"])


def _route(model: type[SamplingBody], whole: type[Any], chunk: type[Any]) -> dict[str, Any]:
    """Returns the OpenAPI description of a completion route. FastAPI cannot see the body: `read_json` reads it."""
    errors = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503)
    return {
        "response_model": None,
        "responses": {
            200: {
                "model": whole,
                "description": "The reply; with `stream: true` server-sent events, closed by `data: [DONE]`.",
                "content": {"text/event-stream": {"schema": {"$ref": f"#/components/schemas/{chunk.__name__}"}}},
            },
            **{status: {"model": ErrorBody} for status in errors},
        },
        "openapi_extra": {
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}},
            }
        },
    }


@router.post("/v1/chat/completions", summary="Chat", **_route(ChatRequest, ChatCompletion, ChatCompletionChunk))
async def chat_completions(request: Request) -> Response:
    """Reply to a conversation. The part of the prompt that is stored on disk is restored instead of computed."""
    return await _complete(request, ChatRequest, CHAT)


@router.post("/v1/completions", summary="Text completion", **_route(CompletionRequest, Completion, Completion))
async def completions(request: Request) -> Response:
    """Continue a text or a list of token ids. No chat template is applied."""
    return await _complete(request, CompletionRequest, COMPLETIONS)


async def _complete(request: Request, model: type[AnyRequest], api: Api) -> Response:
    daemon: Daemon = request.app.state.daemon
    with daemon.arriving(log_context(request).caller.tenant) as serving:
        body = await read_json(request, model, daemon.settings.max_body_bytes)
        generate = await _read(request, serving, body, api)
    stream = bool(body.stream)
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    # With images in it, the body is too large to be kept while the reply is generated.
    del body

    def on_done(done: DoneEvent) -> None:
        log_context(request).done = done
        daemon.metrics.count_generation(done)

    envelope = {
        "id": generate.id,
        "object": api.chunk_object if stream else api.whole_object,
        "created": int(time.time()),
        "model": serving.model_name,
        "system_fingerprint": serving.fingerprint,
    }
    generation = Generation(serving.inbox, generate, request.receive, on_done)
    try:
        await generation.start()
        if stream:
            return EventStream(generation, ChunkWriter(envelope, api, include_usage))
        return JSONResponse(envelope | await _whole(generation, api, generate.sampling.logprobs is not None))
    except BaseException:
        generation.close()
        raise


async def _read(request: Request, serving: Serving, body: AnyRequest, api: Api) -> GenerateRequest:
    daemon: Daemon = request.app.state.daemon
    serving.require_model(body.model)
    sampling = sampling_params(body, serving.renderer.vocab_size)
    cache = cache_options(
        body,
        scope=serving.scope,
        caller=log_context(request).caller.tenant,
        reuse_generated=daemon.settings.reuse_generated,
    )

    def make_prompt() -> tuple[Prompt, Future[None] | None]:
        if isinstance(body, ChatRequest):
            prompt = serving.renderer.chat(body.conversation)
        else:
            prompt = serving.renderer.completion(body.prompt)
        return prompt, None if prompt.media else serving.engine.cache.load(cache.tenant)

    has_media = isinstance(body, ChatRequest) and holds_media(body.messages)
    prompt, loading = await daemon.prepare(make_prompt, has_media=has_media)
    if loading is not None:
        # It takes long for a tenant who was not here lately. Others may wait for it too when this client goes away.
        await asyncio.shield(asyncio.wrap_future(loading))
    check_context(prompt, body, serving.engine.max_positions)
    return GenerateRequest(id=f"{api.id_prefix}{uuid.uuid4().hex}", prompt=prompt, sampling=sampling, cache=cache)


async def _whole(generation: Generation, api: Api, with_logprobs: bool) -> Json:
    """Returns what a response that is not streamed has besides the envelope."""
    texts: defaultdict[int, list[TextEvent]] = defaultdict(list)
    choices = {}
    async for event in generation:
        if isinstance(event, TextEvent):
            texts[event.choice].append(event)
        elif isinstance(event, DoneEvent):
            done = event
        else:
            choices[event.choice] = whole_choice(api, texts.pop(event.choice, []), event, with_logprobs)
    generation.close()
    listed = [choices[index] for index in sorted(choices)]
    return {"choices": listed, "usage": usage_reply(done), **figures_reply(done)}
