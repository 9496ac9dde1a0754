"""The routes that generate. The steps are the same for every API; what differs is its `Dialect`."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Literal, TypeVar

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from diskprefix.api.anthropic import CountTokensRequest, Messages
from diskprefix.api.anthropic_writer import AnthropicErrorBody, AnthropicEvent, AnthropicMessage, TokenCount
from diskprefix.api.asked import constraint_of
from diskprefix.api.dialect import Asked, Dialect, Head
from diskprefix.api.fields import CacheFields, RequestBody, cache_options
from diskprefix.api.openai import Completions
from diskprefix.api.openai_chat import Chat
from diskprefix.api.openai_replies import ChatCompletion, ChatCompletionChunk, Completion
from diskprefix.api.responses import ResponseRequest, Responses
from diskprefix.api.responses_store import ResponseStore
from diskprefix.api.responses_writer import ModelResponse, ResponseStreamEvent
from diskprefix.chat.content import holds_media
from diskprefix.chat.messages import Conversation
from diskprefix.chat.output.format import OutputFormat, PlainText
from diskprefix.chat.replay import Replayed
from diskprefix.engine.request import DoneEvent, GenerateRequest, SamplingParams, Stage
from diskprefix.errors import InvalidRequest
from diskprefix.nouns import CacheOptions, Prompt
from diskprefix.server.daemon import Daemon
from diskprefix.server.described import described, events, openai_events
from diskprefix.server.generation import Generation
from diskprefix.server.log_context import log_context
from diskprefix.server.remembering import RememberingReader, reply_memory, stored_encodings, stored_turns
from diskprefix.server.serving import Serving
from diskprefix.server.streaming import EventStream, PatientResponse, first_signs
from diskprefix.server.threads import QueuePlace
from diskprefix.store.notes import TenantNotes

B = TypeVar("B", bound=RequestBody)

MAX_LOGPROBS = 2**19
"""Of a reply: all choices, tokens and alternatives. Each takes 200 to 300 bytes until the reply is sent."""

router = APIRouter(tags=["completions"])


@router.post(
    "/v1/chat/completions",
    summary="Chat",
    **described(Chat.body, ChatCompletion, openai_events(ChatCompletionChunk)),
)
async def chat_completions(request: Request) -> Response:
    """Reply to a conversation. The part of the prompt that is stored on disk is restored instead of computed."""
    return await answer(request, Chat())


@router.post(
    "/v1/completions", summary="Text completion", **described(Completions.body, Completion, openai_events(Completion))
)
async def completions(request: Request) -> Response:
    """Continue a text or a list of token ids. No chat template is applied."""
    return await answer(request, Completions())


@router.post(
    "/v1/responses",
    summary="Response",
    **described(Responses.body, ModelResponse, events(ResponseStreamEvent)),
)
async def responses(request: Request) -> Response:
    """Reply to a conversation that is given as items, or that continues a stored response."""
    return await answer(request, Responses())


@router.post(
    "/v1/messages",
    summary="Anthropic messages",
    **described(Messages.body, AnthropicMessage, events(AnthropicEvent), AnthropicErrorBody),
)
async def messages(request: Request) -> Response:
    """Reply to a conversation, in the form of Anthropic's API."""
    return await answer(request, Messages())


async def answer(request: Request, dialect: Dialect[B]) -> Response:
    """Reads a request, submits it, and returns what sends the reply.

    Raises whatever keeps it from being submitted; an error after that, or after a long wait, is told in the reply.
    """
    daemon: Daemon = request.app.state.daemon
    context = log_context(request)
    context.wants_reply = True
    if daemon.tracing is not None:
        context.trace = daemon.tracing.begin(f"{request.method} {request.url.path}", request.headers)
    with daemon.arriving(context.caller.tenant) as place:
        body = await daemon.bodies.read_json(request, dialect.body, place)
        preparing = asyncio.create_task(_submitted(request, dialect, body, place.pop_all()))
    return await first_signs(preparing, is_stream=bool(body.stream))


async def _submitted(request: Request, dialect: Dialect[B], body: B, place: QueuePlace) -> Response:
    """Submits a request when the model is there. `place` is given back when the request has its place in the queue."""
    daemon: Daemon = request.app.state.daemon
    context = log_context(request)
    async with AsyncExitStack() as held:
        held.enter_context(place)
        serving = await daemon.ready()
        serving.require_model(body.model)
        serving.engine.give_way()
        cache = cache_options_of(body, request)
        if body.reads_more:
            # What is read may be a hundred times the body: one such request a caller at a time.
            await held.enter_async_context(daemon.turns.of(place.caller))
        notes = partial(serving.engine.cache.notes, cache.tenant)
        asked = await daemon.threads.run(place.rendering, dialect.read, body, serving.renderer.vocab_size, notes)
        began, trace = time.perf_counter(), context.trace
        replayed = await prompt_of(asked.prompt, daemon, serving, cache, place)
        # A constraint is compiled when its caller's turn comes; others' bodies do not wait for that.
        place.memory.close()
        if trace is not None:
            trace.add(Stage("template", began, time.perf_counter(), {"tokens": len(replayed.prompt.token_ids)}))
        on_stage = None if trace is None else trace.add
        make_request = partial(_request, serving, asked, replayed, cache, dialect, on_stage)
        if asked.is_constrained:
            made = await daemon.threads.compile(context.caller.tenant, request.is_disconnected, make_request)
        else:
            made = await daemon.threads.run(place.rendering, make_request)
        if made is None:
            raise ClientDisconnect
        reader, generate = made
    prompt = replayed.prompt
    if daemon.settings.log_prompts:
        context.prompt_text = await daemon.threads.run("rendering", serving.engine.tokenizer.decode, prompt.token_ids)
    head = Head(
        id=generate.id,
        created=int(time.time()),
        model=serving.model_name,
        fingerprint=serving.fingerprint,
        prompt_tokens=len(prompt.token_ids),
        request_id=context.request_id,
        clamped_to=_clamped_to(asked, prompt, serving.engine.max_positions),
        prompt=prompt.token_ids,
    )
    context.generation_id = generate.id
    writer, stream = dialect.writer(body, head), bool(body.stream)
    # With images in them, they are too large to be kept while the reply is generated.
    del body, asked

    def on_done(done: DoneEvent) -> None:
        context.done = done
        daemon.metrics.count_generation(done)
        daemon.breaks.note(done.cache)

    generation = Generation(serving.inbox, generate, request.receive, on_done)
    if stream:
        return EventStream(generation, reader, writer)
    return PatientResponse(generation, reader, writer)


def cache_options_of(body: CacheFields, request: Request) -> CacheOptions:
    """Returns what a request asks of the cache. Raises as `cache_options`, and `NotReady`."""
    daemon: Daemon = request.app.state.daemon
    return cache_options(
        body,
        scope=daemon.require_serving().scope,
        caller=log_context(request).caller.tenant,
        reuse_generated=daemon.settings.reuse_generated,
    )


async def prompt_of(
    wanted: Conversation | str | list[int], daemon: Daemon, serving: Serving, cache: CacheOptions, place: QueuePlace
) -> Replayed:
    """Renders the prompt in a thread, and waits until the tenant's stored prompts are known."""
    has_media = isinstance(wanted, Conversation) and holds_media(wanted.messages)

    def make_prompt() -> tuple[Replayed, Future[None] | None]:
        renderer, encodings = serving.renderer, stored_encodings(serving, cache)
        if isinstance(wanted, Conversation):
            replayed = renderer.replay(wanted, stored_turns(serving, cache), encodings)
        else:
            replayed = Replayed(renderer.completion(wanted, encodings))
        return replayed, None if replayed.prompt.media else serving.engine.cache.load(cache.tenant)

    replayed, loading = await daemon.threads.run("media" if has_media else place.rendering, make_prompt)
    if loading is not None:
        # It takes long for a tenant who was not here lately. Others may wait for it too when this client goes away.
        await asyncio.shield(asyncio.wrap_future(loading))
    return replayed


def _clamped_to(asked: Asked, prompt: Prompt, max_positions: int) -> int | None:
    """Returns how many tokens fit, if the request asks for more."""
    room, max_tokens = max_positions - len(prompt.token_ids), asked.sampling.max_tokens
    return None if max_tokens is None or max_tokens <= room else room


def _sampling(asked: Asked, num_room: int) -> SamplingParams:
    """Returns how the reply is sampled. With log probabilities, which are held until its end, one without a limit ends
    when they are as many as may be. Raises `InvalidRequest` if a limit is set that allows for more.
    """
    sampling = asked.sampling
    if sampling.logprobs is None:
        return sampling
    most = MAX_LOGPROBS // (sampling.n * (1 + sampling.logprobs))
    if sampling.max_tokens is None:
        return replace(sampling, max_tokens=most) if most < num_room else sampling
    if min(sampling.max_tokens, num_room) > most:
        of_choices = f" of {sampling.n} choices" if sampling.n > 1 else ""
        raise InvalidRequest(
            f"{asked.limit_path}: a reply may have {MAX_LOGPROBS} log probabilities; with {sampling.logprobs} "
            f"alternatives for every token{of_choices}, that is {most} tokens",
            param=asked.limit_path,
        )
    return sampling


def _request(
    serving: Serving,
    asked: Asked,
    replayed: Replayed,
    cache: CacheOptions,
    dialect: Dialect[B],
    on_stage: Callable[[Stage], None] | None,
) -> tuple[RememberingReader, GenerateRequest]:
    """Returns what the engine gets, and what reads the reply. Without a conversation, all of the reply is content.

    Raises `InvalidRequest` for a constraint that cannot be compiled, which may take seconds.
    """
    prompt, memory = replayed.prompt, reply_memory(serving, cache, replayed)
    is_chat, choice = isinstance(asked.prompt, Conversation), asked.tool_choice
    output_format: OutputFormat = serving.renderer.output_format if is_chat else PlainText()
    tools = choice.allowed(asked.prompt.tools or ()) if isinstance(asked.prompt, Conversation) else []
    prompt_end = serving.renderer.end_of(prompt)
    generate = GenerateRequest(
        id=f"{dialect.id_prefix}{uuid.uuid4().hex}",
        prompt=prompt,
        sampling=_sampling(asked, serving.engine.max_positions - len(prompt.token_ids)),
        cache=cache,
        constraint=constraint_of(asked, output_format, prompt_end, serving.engine.constraints.check),
        shown_special_tokens=output_format.special_tokens,
        reports_progress=asked.return_progress,
        on_stage=on_stage,
    )
    # Made here, in a thread: many names of tools take long.
    parsers = [output_format.parser(tools, prompt_end) for _ in range(asked.sampling.n)]
    return RememberingReader(parsers.pop, dialect.call_id_prefix, memory, many_calls=choice.many), generate


class InputTokens(BaseModel):
    """The length of a prompt."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


@router.post(
    "/v1/messages/count_tokens",
    summary="Anthropic: count tokens",
    **described(CountTokensRequest, TokenCount, error=AnthropicErrorBody),
)
async def count_tokens(request: Request) -> Response:
    """The length of the prompt that `POST /v1/messages` makes of the same body, in tokens."""

    def conversation(body: CountTokensRequest, _notes: TenantNotes) -> Conversation:
        return body.conversation

    return JSONResponse({"input_tokens": await _length(request, CountTokensRequest, conversation)})


@router.post(
    "/v1/responses/input_tokens",
    summary="Count the tokens of a response's input",
    **described(ResponseRequest, InputTokens),
)
async def count_input_tokens(request: Request) -> Response:
    """The length of the prompt that `POST /v1/responses` makes of the same body, in tokens."""

    def conversation(body: ResponseRequest, notes: TenantNotes) -> Conversation:
        return Responses().conversation(body, ResponseStore(notes))

    length = await _length(request, ResponseRequest, conversation)
    return JSONResponse(InputTokens(input_tokens=length).model_dump())


async def _length(request: Request, model: type[B], conversation: Callable[[B, TenantNotes], Conversation]) -> int:
    daemon: Daemon = request.app.state.daemon
    with daemon.arriving(log_context(request).caller.tenant) as place:
        body = await daemon.bodies.read_json(request, model, place)
        serving = await daemon.ready()
        serving.require_model(body.model)
        # What is remembered of earlier replies is part of the prompt, so this asks the cache as the request will.
        cache = cache_options_of(body, request)
        async with daemon.turns.of(place.caller) if body.reads_more else nullcontext():
            wanted = await daemon.threads.run(
                place.rendering, conversation, body, serving.engine.cache.notes(cache.tenant)
            )
            replayed = await prompt_of(wanted, daemon, serving, cache, place)
    return len(replayed.prompt.token_ids)
