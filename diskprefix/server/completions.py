"""`POST /v1/chat/completions` and `POST /v1/completions`: the same steps, two serializers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diskprefix.chat.content import holds_media
from diskprefix.chat.template import PromptRenderer
from diskprefix.engine.request import DoneEvent, Event, GenerateRequest, SamplingParams
from diskprefix.prompt import Prompt
from diskprefix.server.body import read_json
from diskprefix.server.daemon import Daemon
from diskprefix.server.errors import ErrorBody
from diskprefix.server.generation import Generation
from diskprefix.server.log_context import log_context
from diskprefix.server.params import cache_options, chat_params, check_context, completion_params
from diskprefix.server.replies import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    cache_reply,
    timings_reply,
    usage_reply,
)
from diskprefix.server.schemas import ChatRequest, CompletionRequest, SamplingBody
from diskprefix.server.serializers import ChatSerializer, ChoiceSerializer, Collected, CompletionSerializer
from diskprefix.server.serving import Serving
from diskprefix.server.streaming import ChunkWriter, EventStream, Json

B = TypeVar("B", bound=SamplingBody)

router = APIRouter(tags=["completions"])


class _Output(NamedTuple):
    """Who answers a request, and whether as a stream."""

    serving: Serving
    stream: bool
    include_usage: bool


def _route(model: type[SamplingBody], whole: type[Any], chunk: type[Any]) -> dict[str, Any]:
    """Returns the OpenAPI description of a completion route. FastAPI cannot see the body: `read_json` reads it."""
    errors = {
        400: "The request cannot be served; `error.param` names the field.",
        401: "No API key, or not one of `--api-keys`.",
        403: "Sent by another site's web page, or to a `Host` that is not the daemon's.",
        404: "The request names another model than the served one.",
        408: "The body did not arrive in time.",
        413: "The body is larger than `--max-body-bytes`.",
        415: "The body is not sent as JSON.",
        429: "Too many requests with this API key are waiting; see `Retry-After`.",
        500: "A failure of the daemon; its log has the details.",
        503: "The queue is full, too many connections are open, the model is loading or the daemon is stopping; see "
        "`Retry-After`.",
    }
    stream_schema = {"schema": {"$ref": f"#/components/schemas/{chunk.__name__}"}}
    return {
        "response_model": None,
        "responses": {
            200: {
                "model": whole,
                "description": f"The reply; with `stream: true` server-sent events of `{chunk.__name__}` objects, "
                "closed by `data: [DONE]`.",
                "content": {"text/event-stream": stream_schema},
            },
            **{status: {"model": ErrorBody, "description": text} for status, text in errors.items()},
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
    return await _complete(request, ChatRequest, ChatSerializer(), chat_params, _render_chat)


@router.post("/v1/completions", summary="Text completion", **_route(CompletionRequest, Completion, Completion))
async def completions(request: Request) -> Response:
    """Continue a text or a list of token ids. No chat template is applied."""
    return await _complete(request, CompletionRequest, CompletionSerializer(), completion_params, _render_completion)


def _render_chat(renderer: PromptRenderer, body: ChatRequest) -> Prompt:
    return renderer.chat(body.conversation)


def _render_completion(renderer: PromptRenderer, body: CompletionRequest) -> Prompt:
    return renderer.completion(body.one_prompt)


async def _complete(
    request: Request,
    model: type[B],
    serializer: ChoiceSerializer,
    params_of: Callable[[B, int], SamplingParams],
    render: Callable[[PromptRenderer, B], Prompt],
) -> Response:
    generate, output = await _read(request, model, serializer, params_of, render)
    return await _answer(request, generate, serializer, output)


async def _read(
    request: Request,
    model: type[B],
    serializer: ChoiceSerializer,
    params_of: Callable[[B, int], SamplingParams],
    render: Callable[[PromptRenderer, B], Prompt],
) -> tuple[GenerateRequest, _Output]:
    """Returns the request for the engine, and how the response is to be written.

    The body is released here: with images in it, it is too large to be kept while the reply is generated.
    """
    daemon: Daemon = request.app.state.daemon
    caller = log_context(request).caller.tenant
    with daemon.arriving(caller) as serving:
        body = await read_json(request, model, daemon.settings.max_body_bytes)
        serving.require_model(body.model)
        sampling = params_of(body, serving.renderer.vocab_size)
        cache = cache_options(body, scope=serving.scope, caller=caller, reuse_generated=daemon.settings.reuse_generated)
        has_media = isinstance(body, ChatRequest) and holds_media(body.messages)

        def make_prompt() -> Prompt:
            prompt = render(serving.renderer, body)
            if not prompt.media:
                # Not on the engine's thread: it takes long for a tenant who was not here lately.
                serving.engine.cache.load(cache.tenant)
            return prompt

        prompt = await daemon.prepare(make_prompt, has_media=has_media)
    check_context(prompt, body, serving.engine.max_positions)
    generate = GenerateRequest(
        id=f"{serializer.id_prefix}{uuid.uuid4().hex}",
        prompt=prompt,
        sampling=sampling,
        cache=cache,
    )
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    return generate, _Output(serving, bool(body.stream), include_usage)


async def _answer(
    request: Request, generate: GenerateRequest, serializer: ChoiceSerializer, output: _Output
) -> Response:
    daemon: Daemon = request.app.state.daemon
    serving = output.serving

    def on_done(done: DoneEvent) -> None:
        log_context(request).done = done
        daemon.metrics.count_generation(done)

    envelope = {
        "id": generate.id,
        "object": serializer.chunk_object if output.stream else serializer.whole_object,
        "created": int(time.time()),
        "model": serving.model_name,
        "system_fingerprint": serving.fingerprint,
    }
    generation = Generation(serving.scheduler, generate, request.receive)
    try:
        # Waits for the first event before the headers are sent, because an error can still become an HTTP status then.
        first = await generation.next()
        if output.stream:
            return EventStream(
                generation, first, ChunkWriter(envelope, serializer.chunk_choice, output.include_usage), on_done
            )
        return await _whole(generation, first, envelope, serializer, generate.sampling.logprobs is not None, on_done)
    except BaseException:
        generation.close()
        raise


async def _whole(
    generation: Generation,
    first: Event,
    envelope: Json,
    serializer: ChoiceSerializer,
    with_logprobs: bool,
    on_done: Callable[[DoneEvent], None],
) -> JSONResponse:
    collected = Collected(with_logprobs)
    collected.add(first)
    async for event in generation:
        collected.add(event)
        if isinstance(event, DoneEvent):
            on_done(event)
            done = event
    generation.close()
    return JSONResponse(
        {
            **envelope,
            "choices": collected.choices(serializer),
            "usage": usage_reply(done),
            "prefix_cache": cache_reply(done),
            "timings": timings_reply(done),
        }
    )
