"""The routes that generate. `answer` leads a request through its steps: `arrive`, `prepare`, `submit`.

Each step takes the result of the previous one. The steps are the same for every API; a `Dialect` holds the differences.
`prepare.py` reads the body and renders the prompts, `engine_request.py` makes the engine's request from them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from importlib import import_module
from typing import Generic, TypeAlias, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diskprefix.daemon.api.dialect import BodyReader, Dialect, EarlyDialect, Head, LoadingDialect, ReplyWriter
from diskprefix.daemon.api.fields import RequestBody, cache_options, with_sampling
from diskprefix.daemon.api.openai import Completions
from diskprefix.daemon.api.openai_chat import Chat
from diskprefix.daemon.api.parsed_request import ParsedRequest
from diskprefix.daemon.api.reply import ReplyReader
from diskprefix.daemon.chat.messages import Conversation
from diskprefix.daemon.engine.request import DoneEvent, GenerateRequest, SamplingParams
from diskprefix.daemon.server.ask_ahead import ask_ahead, render_opening
from diskprefix.daemon.server.daemon import Daemon
from diskprefix.daemon.server.engine_request import engine_request, reply_id
from diskprefix.daemon.server.generation import Generation, Generations, together
from diskprefix.daemon.server.log_context import log_context
from diskprefix.daemon.server.prepare import Arrival, Rendered, prepare
from diskprefix.daemon.server.recent import lost_tokens, program_of
from diskprefix.daemon.server.remembering import stored_turns
from diskprefix.daemon.server.routes import STREAMED, Routes
from diskprefix.daemon.server.share import session_of
from diskprefix.daemon.server.streaming import EventStream, Write, json_reply, respond_or_keep_alive
from diskprefix.prefixstore.store.notes import TenantNotes
from diskprefix.prefixstore.store.reads import Patience

B = TypeVar("B", bound=RequestBody)
M = TypeVar("M")

routes = Routes("completions")


def _late(module: str, name: str) -> Callable[[], type[BaseModel]]:
    """Returns a function that imports the body model of an API. It is called with the API's first request, because all
    body models together take longer to import than the rest of the server."""
    return lambda: cast("type[BaseModel]", getattr(import_module(f"diskprefix.daemon.api.{module}"), name))


@routes.add("POST /v1/chat/completions", "Chat", Chat.body, media_types=STREAMED)
async def chat_completions(request: Request) -> Response:
    """Reply to a conversation. The part of the prompt that is stored on disk is restored instead of computed.

    Returns a `chat.completion`, as in OpenAI's API, with `prefix_cache` and `timings`.
    """
    return await answer(request, Chat())


@routes.add("POST /v1/completions", "Text completion", Completions.body, media_types=STREAMED)
async def completions(request: Request) -> Response:
    """Continue a text or a list of token ids. No chat template is applied.

    Returns a `text_completion`, as in OpenAI's API, with `prefix_cache` and `timings`.
    """
    return await answer(request, Completions())


@routes.add("POST /v1/responses", "Response", _late("responses", "ResponseRequest"), media_types=STREAMED)
async def responses(request: Request) -> Response:
    """Reply to a conversation that is given as items, or that continues a stored response.

    Returns a `response`, as in OpenAI's API, with `prefix_cache` and `timings`.
    """
    from diskprefix.daemon.api.responses import Responses

    return await answer(request, Responses())


@routes.add("POST /v1/responses/compact", "Summary of a conversation", _late("compaction", "CompactRequest"))
async def compact_response(request: Request) -> Response:
    """Let the model sum up a conversation. Later requests send the result in place of the conversation.

    Returns a `response.compaction`: the newest messages of the user, and an item `compaction`.
    """
    from diskprefix.daemon.api.compaction import Compaction

    return await answer(request, Compaction())


@routes.add("POST /v1/messages", "Anthropic messages", _late("anthropic", "MessagesRequest"), media_types=STREAMED)
async def messages(request: Request) -> Response:
    """Reply to a conversation, in the form of Anthropic's API.

    Returns a `message`, as in Anthropic's API, with `prefix_cache` and `timings`.
    """
    from diskprefix.daemon.api.anthropic import Messages

    return await answer(request, Messages())


Reply: TypeAlias = tuple[Generation | Generations, ReplyReader, ReplyWriter, Write]
"""A submitted request, and the reader and the writers that turn its events into the reply."""


async def answer(request: Request, dialect: Dialect[B]) -> Response:
    """Reads a request, submits it, and returns the response that sends the reply.

    Raises errors from before the request is submitted. A later one, or one after a long wait, is sent in the reply.
    """
    daemon: Daemon = request.app.state.daemon
    context = log_context(request)
    context.wants_reply = True
    async with AsyncExitStack() as held:
        body = await daemon.bodies.read_json(request, dialect.body, held)
        is_stream = bool(body.stream) and body.ahead is None
        preparing = asyncio.create_task(_response(request, dialect, body, held.pop_all()))
    early = None
    if is_stream and isinstance(dialect, EarlyDialect):
        early = partial(daemon.threads.run, "writing", _early, daemon, dialect, body, reply_id(dialect, context))
    # A body may have megabytes of pictures, and the reply may take minutes.
    del body
    return await respond_or_keep_alive(preparing, is_stream=is_stream, early=early)


def _early(daemon: Daemon, dialect: EarlyDialect, body: RequestBody, id_: str) -> ReplyWriter | None:
    """Returns the writer of events before the reply. While the model loads, its name and its sampling are not known."""
    if daemon.serving is None:
        return dialect.early(body, id_, "")
    return dialect.early(with_sampling(body, daemon.sampling.values), id_, daemon.serving.model_name)


async def _response(request: Request, dialect: Dialect[B], body: B, held: AsyncExitStack) -> Response:
    """Takes a request through all steps. Closes `held` once the engine has the request."""
    async with held:
        arrival = await arrive(request, dialect, body)
        if isinstance(dialect, LoadingDialect):
            may_unload = arrival.serving.takes_any_name or arrival.daemon.settings.idle_unload > 0
            said = dialect.without_prompt(body, arrival.serving.model_name, may_unload=may_unload)
            if said is not None:
                arrival.context.wants_reply = False
                return JSONResponse(said)
        if body.ahead is not None:
            arrival.context.wants_reply = False
            _, asked = await prepare(arrival, partial(render_opening, label=body.ahead))
            ready = await arrival.daemon.threads.run("reading", arrival.patience.from_now(partial(ask_ahead, asked)))
            return JSONResponse(ready)
        arrival.serving.engine.on_request()
        rendered, made = await prepare(arrival, engine_request)
        reply, is_stream = await submit(rendered, made), bool(body.stream)
    del arrival, body, rendered, made
    return EventStream(*reply) if is_stream else await json_reply(*reply)


async def arrive(request: Request, dialect: BodyReader[B], body: B) -> Arrival:
    """Waits for the model. Raises `NotReady`, `ModelNotFound`, and the errors of `cache_options`."""
    daemon: Daemon = request.app.state.daemon
    context = log_context(request)
    serving = await daemon.ready()
    serving.require_model(body.model)
    cache = cache_options(
        body,
        scope=serving.scope,
        caller=context.caller.tenant,
        share=str(context.share),
        session=session_of(request.scope),
    )
    patience = Patience()
    return Arrival(
        request=request,
        daemon=daemon,
        context=context,
        serving=serving,
        dialect=dialect,
        body=with_sampling(body, daemon.sampling.values),
        cache=cache,
        patience=patience,
        turns=stored_turns(serving, cache, patience),
    )


async def submit(rendered: Rendered, made: tuple[ReplyReader, GenerateRequest]) -> Reply:
    """Submits the first prompt to the engine. Each further prompt is submitted when the previous one has ended.

    Raises `QueueFull` if the waiting pictures are too large, and `NotReady`.
    """
    arrival, prompts = rendered.arrival, rendered.prompts
    daemon, context, serving = arrival.daemon, arrival.context, arrival.serving
    reader, generate = made
    head = _head(rendered, generate)
    context.generation_id = generate.id
    program = program_of(arrival.request.headers.get("user-agent", ""))
    client = " ".join(filter(None, (context.caller.name, program)))
    tenant = arrival.cache.tenant
    epoch = serving.engine.cache.epoch(tenant)
    all_done: list[DoneEvent] = []

    def on_done(done: DoneEvent) -> None:
        all_done.append(done)
        context.done = together(all_done)
        daemon.metrics.count_generation(done)
        daemon.broken_lines.note(done.cache)
        if lost := lost_tokens(done.cache, client, time.time()):
            serving.engine.cache.count_lost(tenant, epoch, lost)

    def begin(index: int) -> Generation:
        id_ = f"{generate.id}-{index}" if index else generate.id
        request = replace(generate, id=id_, prompt=prompts[index].prompt)
        note_cancelled = partial(setattr, context, "cancelled_at")
        return Generation(serving.inbox, request, arrival.request.receive, on_done, note_cancelled)

    writer = arrival.dialect.writer(arrival.body, head)
    begins = [partial(begin, index) for index in range(len(prompts))]
    generation = begin(0) if len(prompts) == 1 else Generations(begins, rendered.parsed.sampling.n)
    write = partial(daemon.threads.run_for, arrival.request, "writing")
    return generation, reader, writer, write


def _head(rendered: Rendered, generate: GenerateRequest) -> Head:
    """Returns the values of the reply that are known now."""
    serving, context = rendered.arrival.serving, rendered.arrival.context
    wanted, room = rendered.parsed.sampling.max_tokens, min(rendered.rooms)
    return Head(
        id=generate.id,
        created=int(time.time()),
        model=serving.model_name,
        fingerprint=serving.fingerprint,
        prompt_tokens=sum(len(replayed.prompt.token_ids) for replayed in rendered.prompts),
        request_id=context.request_id,
        max_positions=rendered.max_positions,
        waited_ms=1e3 * (time.perf_counter() - context.began_at),
        clamped_to=None if wanted is None or wanted <= room else room,
        prompt=generate.prompt.token_ids,
    )


class _Counted(Struct, Generic[B], frozen=True):
    """Reads the conversation whose tokens are counted."""

    body: type[B]
    conversation: Callable[[B, Callable[[], TenantNotes]], Conversation]

    def read(self, body: B, _vocab_size: int, notes: Callable[[], TenantNotes]) -> ParsedRequest:
        return ParsedRequest(prompt=self.conversation(body, notes), sampling=SamplingParams())


@routes.add("POST /v1/messages/count_tokens", "Anthropic: count tokens", _late("anthropic", "CountTokensRequest"))
async def count_tokens(request: Request) -> Response:
    """`input_tokens` is the length of the prompt that `POST /v1/messages` makes of this body."""
    from diskprefix.daemon.api.anthropic import CountTokensRequest

    counted = _Counted(CountTokensRequest, lambda body, _: body.conversation)
    return JSONResponse({"input_tokens": await _length(request, counted)})


@routes.add(
    "POST /v1/responses/input_tokens", "Count the tokens of a response's input", _late("responses", "ResponseRequest")
)
async def count_input_tokens(request: Request) -> Response:
    """`input_tokens` is the length of the prompt that `POST /v1/responses` makes of this body."""
    from diskprefix.daemon.api.response_store import ResponseStore
    from diskprefix.daemon.api.responses import ResponseRequest, Responses

    counted = _Counted(ResponseRequest, lambda body, notes: Responses().conversation(body, ResponseStore(notes())))
    return JSONResponse({"object": "response.input_tokens", "input_tokens": await _length(request, counted)})


async def _length(request: Request, dialect: BodyReader[B]) -> int:
    """Returns the length of a prompt in tokens. Earlier replies count with their sampled tokens, as they do in a
    request for a reply."""
    daemon: Daemon = request.app.state.daemon
    async with AsyncExitStack() as held:
        body = await daemon.bodies.read_json(request, dialect.body, held)
        arrival = await arrive(request, dialect, body)
        _, length = await prepare(arrival, lambda rendered: len(rendered.prompts[0].prompt.token_ids), "counting")
    return length
