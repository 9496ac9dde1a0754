"""The routes that generate, and the steps of a request: `arrive`, `prepare`, `submit`.

Each step takes the result of the step before. The steps are the same for every API. A `Dialect` has the differences.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from importlib import import_module
from typing import Any, Generic, TypeAlias, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diskprefix.api.dialect import BodyReader, Dialect, EarlyDialect, Head, LoadingDialect, ReplyWriter
from diskprefix.api.fields import MAX_CACHE_KEY_CHARS, RequestBody, cache_options, with_sampling
from diskprefix.api.openai import Completions
from diskprefix.api.openai_chat import Chat
from diskprefix.api.parsed_request import ParsedRequest, constraint_of, thought_budget_of
from diskprefix.api.reply import ReplyReader
from diskprefix.chat.fill_in import FillIn
from diskprefix.chat.messages import Conversation
from diskprefix.chat.output.choose_format import OutputFormat, PlainText
from diskprefix.chat.replay import RecordsUnread, Replayed
from diskprefix.engine.request import DoneEvent, Echo, GenerateRequest, SamplingParams
from diskprefix.errors import ContextTooLong, InvalidRequest
from diskprefix.server.daemon import Daemon
from diskprefix.server.generation import Generation, Generations, together
from diskprefix.server.log_context import LogContext, log_context
from diskprefix.server.recent import lost_tokens, program_of
from diskprefix.server.remembering import StoredTurns, known_parts, reply_memory, stored_turns
from diskprefix.server.routes import STREAMED, Routes
from diskprefix.server.serving import Serving
from diskprefix.server.streaming import EventStream, Write, json_reply, respond_or_keep_alive
from diskprefix.server.threads import Kind
from diskprefix.store.notes import TenantNotes
from diskprefix.store.reads import Patience
from diskprefix.values import CacheOptions, Scope

B = TypeVar("B", bound=RequestBody)
M = TypeVar("M")

MAX_LOGPROBS = 2**19
"""The most log probabilities of a reply, over all choices, tokens and alternatives. Each takes 200 to 300 bytes."""

SESSION_HEADERS = (
    *("x-claude-code-session-id", "session_id", "session-id", "conversation_id", "x-session-id"),
    *("x-opencode-session", "x-session-affinity", "x-qwen-code-session-id"),
)
"""The headers in which agents name a session: Claude Code, Codex, OpenCode, Qwen Code and others."""

routes = Routes("completions")


def _late(module: str, name: str) -> Callable[[], type[BaseModel]]:
    """Returns what imports the body of an API, with its first request: together they take longer to import than all
    else of the server."""
    return lambda: cast("type[BaseModel]", getattr(import_module(f"diskprefix.api.{module}"), name))


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
    from diskprefix.api.responses import Responses

    return await answer(request, Responses())


@routes.add("POST /v1/responses/compact", "Summary of a conversation", _late("compaction", "CompactRequest"))
async def compact_response(request: Request) -> Response:
    """Let the model sum up a conversation. Later requests send the result in place of the conversation.

    Returns a `response.compaction`: the newest messages of the user, and an item `compaction`.
    """
    from diskprefix.api.compaction import Compaction

    return await answer(request, Compaction())


@routes.add("POST /v1/messages", "Anthropic messages", _late("anthropic", "MessagesRequest"), media_types=STREAMED)
async def messages(request: Request) -> Response:
    """Reply to a conversation, in the form of Anthropic's API.

    Returns a `message`, as in Anthropic's API, with `prefix_cache` and `timings`.
    """
    from diskprefix.api.anthropic import Messages

    return await answer(request, Messages())


class Arrival(Struct, frozen=True, kw_only=True):
    """A request whose body was read, with all that the later steps need."""

    request: Request
    daemon: Daemon
    context: LogContext
    serving: Serving
    dialect: Any
    """A `Dialect` if a reply is asked for, else a `BodyReader`."""
    body: RequestBody
    cache: CacheOptions

    held: AsyncExitStack
    """The caller's turns, for a large body and to read stored responses."""
    patience: Patience
    """The time that the request may wait for the disk."""
    turns: StoredTurns | None
    """The turns from which its prompt may be made."""

    def notes(self) -> TenantNotes:
        """Returns the notes of its tenant."""
        return replace(self.serving.engine.cache.notes(self.cache.tenant), patience=self.patience)


class Rendered(Struct, frozen=True):
    """A request in neutral words, with its prompts as token ids."""

    arrival: Arrival
    parsed: ParsedRequest
    prompts: Sequence[Replayed]

    @property
    def max_positions(self) -> int:
        return self.arrival.serving.engine.max_positions

    @property
    def rooms(self) -> list[int]:
        """The numbers of tokens that the model's positions leave for the replies."""
        positions = min(self.max_positions, self.parsed.num_ctx or self.max_positions)
        return [positions - len(replayed.prompt.token_ids) for replayed in self.prompts]


Reply: TypeAlias = tuple[Generation | Generations, ReplyReader, ReplyWriter, Write]
"""A request that the engine has, and what turns its events into the reply."""


async def answer(request: Request, dialect: Dialect[B]) -> Response:
    """Reads a request, submits it, and returns the response that sends the reply.

    Raises errors from before the request is submitted. A later one, or one after a long wait, is sent in the reply.
    """
    daemon: Daemon = request.app.state.daemon
    context = log_context(request)
    context.wants_reply = True
    async with AsyncExitStack() as held:
        body = await daemon.bodies.read_json(request, dialect.body, held)
        is_stream = bool(body.stream)
        preparing = asyncio.create_task(_response(request, dialect, body, held.pop_all()))
    early = None
    if is_stream and isinstance(dialect, EarlyDialect):
        early = partial(daemon.threads.run, "writing", dialect.early, body, _reply_id(dialect, context))
    # A body may have megabytes of pictures, and the reply may take minutes.
    del body
    return await respond_or_keep_alive(preparing, is_stream=is_stream, early=early)


def _reply_id(dialect: Dialect[Any], context: LogContext) -> str:
    """Returns the id of the reply, which is known before the engine has the request."""
    return dialect.id_prefix + context.request_id.removeprefix("req_")


async def _response(request: Request, dialect: Dialect[B], body: B, held: AsyncExitStack) -> Response:
    """Takes a request through all steps. Closes `held` once the engine has the request."""
    async with held:
        arrival = await arrive(request, dialect, body, held)
        if isinstance(dialect, LoadingDialect):
            may_unload = arrival.serving.takes_any_name or arrival.daemon.settings.idle_unload > 0
            said = dialect.without_prompt(body, arrival.serving.model_name, may_unload=may_unload)
            if said is not None:
                arrival.context.wants_reply = False
                return JSONResponse(said)
        arrival.serving.engine.give_way()
        reply, is_stream = await submit(*await prepare(arrival, _engine_request)), bool(body.stream)
    del arrival, body
    return EventStream(*reply) if is_stream else await json_reply(*reply)


async def arrive(request: Request, dialect: BodyReader[B], body: B, held: AsyncExitStack) -> Arrival:
    """Waits for the model. Raises `NotReady`, `ModelNotFound`, and the errors of `cache_options`."""
    daemon: Daemon = request.app.state.daemon
    context = log_context(request)
    serving = await daemon.ready()
    serving.require_model(body.model)
    cache = cache_options(body, scope=serving.scope, caller=context.caller.tenant, session=_session_of(request))
    patience = Patience()
    return Arrival(
        request=request,
        daemon=daemon,
        context=context,
        serving=serving,
        dialect=dialect,
        body=with_sampling(body, daemon.sampling),
        cache=cache,
        held=held,
        patience=patience,
        turns=stored_turns(serving, cache, patience),
    )


def _session_of(request: Request) -> str | None:
    """Returns what names the session of an agent, None if nothing does."""
    named = (request.headers.get(header, "") for header in SESSION_HEADERS)
    return next((name for name in named if 0 < len(name) <= MAX_CACHE_KEY_CHARS), None)


async def prepare(arrival: Arrival, make: Callable[[Rendered], M], kind: Kind = "rendering") -> tuple[Rendered, M]:
    """Reads the body, renders its prompts, and returns them with the result of `make`.

    For one prompt of text, all of this takes one turn of the caller for work of this `kind`. Each of several prompts
    takes a turn, and pictures and constraints have threads of their own. So has what waits for the disk, without a
    turn. Raises `InvalidRequest`, `DiskStalled`, and `ClientDisconnect`.
    """
    threads = arrival.daemon.threads
    write = _render_counted if kind == "counting" else render

    async def run(kind: Kind, work: Callable[..., Any], *values: Any) -> Any:
        # Bound: `StoredTurns` raises it a few times at most.
        while True:
            try:
                return await threads.run_for(arrival.request, kind, work, *values)
            except RecordsUnread:
                assert arrival.turns is not None
                await threads.run("reading", arrival.turns.read)

    def read() -> ParsedRequest:
        parsed: ParsedRequest = arrival.dialect.read(arrival.body, arrival.serving.renderer.vocab_size, arrival.notes)
        return parsed

    stored: ParsedRequest | None = None
    if arrival.body.needs_stored_items:
        began = time.monotonic()
        await arrival.held.enter_async_context(arrival.daemon.stored_turns.of(arrival.context.caller.account))
        # Whoever had the turn before may have waited for the disk.
        arrival.patience.spend(time.monotonic() - began)
        stored = await threads.run("reading", read)

    def begin() -> tuple[ParsedRequest, Rendered | None, M | None]:
        parsed = read() if stored is None else stored
        if arrival.body.prompt_cache_options is not None and arrival.body.prompt_cache_options.prewarm:
            parsed = parsed.without_reply()
        if parsed.more_prompts or _has_pictures(parsed.prompt):
            return parsed, None, None
        rendered = Rendered(arrival, parsed, [write(arrival, parsed.prompt)])
        return parsed, rendered, None if parsed.is_constrained else make(rendered)

    parsed, rendered, made = await run(kind, begin)
    if rendered is None:
        kind = "images" if _has_pictures(parsed.prompt) else kind
        prompts = [await run(kind, write, arrival, wanted) for wanted in (parsed.prompt, *parsed.more_prompts)]
        rendered = Rendered(arrival, parsed, prompts)
    if made is None:
        # The turn is given back first: other callers do not wait for a constraint to compile.
        await arrival.held.aclose()
        made = await run("compiling" if parsed.is_constrained else kind, make, rendered)
    return rendered, made


def render(arrival: Arrival, wanted: Conversation | str | list[int] | FillIn) -> Replayed:
    """Renders a prompt. May take long. Raises `InvalidRequest`, and `RecordsUnread`."""
    serving, cache = arrival.serving, arrival.cache
    renderer, known = serving.renderer, known_parts(serving, cache)
    if isinstance(wanted, Conversation):
        return renderer.replay(wanted, arrival.turns, known, cache.tenant)
    return Replayed(renderer.completion(wanted, known))


def _render_counted(arrival: Arrival, wanted: Conversation | str | list[int] | FillIn) -> Replayed:
    """Renders a prompt that may exceed the model's positions: a client that asks for its length wants to know by how
    much. Raises the same as `render`."""
    try:
        return render(arrival, wanted)
    except ContextTooLong:
        assert isinstance(wanted, Conversation)
        return arrival.serving.renderer.counting.replay(wanted, arrival.turns, owner=arrival.cache.tenant)


def _has_pictures(wanted: Conversation | str | list[int] | FillIn) -> bool:
    return isinstance(wanted, Conversation) and wanted.has_pictures


async def submit(rendered: Rendered, made: tuple[ReplyReader, GenerateRequest]) -> Reply:
    """Submits the first prompt to the engine. Each further prompt is submitted when the one before it has ended.

    Raises `QueueFull` if the waiting pictures are too large, and `NotReady`.
    """
    arrival, prompts, sampling = rendered.arrival, rendered.prompts, rendered.parsed.sampling
    daemon, context, serving = arrival.daemon, arrival.context, arrival.serving
    reader, generate = made
    room = min(rendered.rooms)
    head = Head(
        id=generate.id,
        created=int(time.time()),
        model=serving.model_name,
        fingerprint=serving.fingerprint,
        prompt_tokens=sum(len(replayed.prompt.token_ids) for replayed in prompts),
        request_id=context.request_id,
        max_positions=rendered.max_positions,
        waited_ms=1e3 * (time.perf_counter() - context.began_at),
        clamped_to=None if sampling.max_tokens is None or sampling.max_tokens <= room else room,
        prompt=generate.prompt.token_ids,
    )
    context.generation_id = generate.id
    program = program_of(arrival.request.headers.get("user-agent", ""))
    client = " ".join(filter(None, (context.caller.name, program)))
    tenant, epoch = arrival.cache.tenant, serving.engine.cache.epoch
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
    generation = begin(0) if len(prompts) == 1 else Generations(begins, sampling.n)
    write = partial(daemon.threads.run_for, arrival.request, "writing")
    return generation, reader, writer, write


def _engine_request(rendered: Rendered) -> tuple[ReplyReader, GenerateRequest]:
    """Returns the engine's request for the first prompt, and the reader of the reply, which has the choices of all
    prompts. Without a conversation, all of the reply is content.

    Raises `InvalidRequest` for a constraint that cannot be compiled, which may take seconds.
    """
    arrival, parsed, replayed = rendered.arrival, rendered.parsed, rendered.prompts[0]
    num_choices = parsed.sampling.n * len(rendered.prompts)
    serving, choice = arrival.serving, parsed.tool_choice
    is_chat = isinstance(parsed.prompt, Conversation)
    tenant = arrival.cache.tenant
    output_format: OutputFormat = serving.renderer.output_format.of(tenant) if is_chat else PlainText()
    prompt_end = serving.renderer.end_of(replayed.prompt)
    encode = partial(serving.engine.tokenizer.encode, add_special_tokens=False)
    ends = serving.renderer.fill_in_ends(parsed.prompt) if isinstance(parsed.prompt, FillIn) else ()
    if parsed.num_ctx is not None and parsed.num_ctx <= (num_tokens := len(replayed.prompt.token_ids)):
        problem = f"is {parsed.num_ctx}, and the prompt has {num_tokens} tokens, none of which is left out"
        raise InvalidRequest.at("options.num_ctx", f"{problem}; this model takes {rendered.max_positions} here")
    sampling = _sampling(parsed, max(rendered.rooms), num_choices)
    is_scored = parsed.echo and sampling.logprobs is not None
    if is_scored:
        _require_few_scores(rendered)
    check = partial(serving.engine.constraints.check, owner=tenant)
    constraint = constraint_of(parsed, output_format, prompt_end, check)
    generate = GenerateRequest(
        id=_reply_id(arrival.dialect, arrival.context),
        prompt=replayed.prompt,
        # Special tokens are no text, so those that end the reply are stop strings.
        sampling=replace(sampling, stop=(*sampling.stop, *ends)),
        cache=replace(arrival.cache, scope=Scope("off")) if is_scored else arrival.cache,
        echo=Echo(logprobs=sampling.logprobs) if parsed.echo else None,
        constraint=None if constraint is None else replace(constraint, owner=tenant),
        thought_budget=thought_budget_of(parsed, output_format, prompt_end, encode, serving.engine.end_ids),
        shown_special_tokens=output_format.special_tokens.union(ends),
        reports_progress=parsed.return_progress,
        patience=arrival.patience,
    )
    asked = parsed.prompt if isinstance(parsed.prompt, Conversation) else None
    memory = None if asked is None else reply_memory(serving, arrival.cache, asked, replayed)
    # Made here, in a thread: many names of tools take long.
    parsers = [output_format.parser(parsed.tools, prompt_end) for _ in range(num_choices)]
    return ReplyReader(parsers.pop, arrival.dialect.call_id_prefix, memory, many_calls=choice.many), generate


def _sampling(parsed: ParsedRequest, num_room: int, num_choices: int) -> SamplingParams:
    """Returns the sampling parameters. Log probabilities are held until a reply ends, so they limit its tokens.

    Raises `InvalidRequest` if the client's own limit allows for too many log probabilities.
    """
    sampling = parsed.sampling
    if parsed.num_ctx is not None and num_room > 0:
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens or num_room, num_room))
    if sampling.logprobs is None:
        return sampling
    limit = MAX_LOGPROBS // (num_choices * (1 + sampling.logprobs))
    if sampling.max_tokens is None:
        return replace(sampling, max_tokens=limit) if limit < num_room else sampling
    if min(sampling.max_tokens, num_room) > limit:
        of_choices = f" of {num_choices} choices" if num_choices > 1 else ""
        raise InvalidRequest.at(
            parsed.limit_path,
            f"a reply may have {MAX_LOGPROBS} log probabilities; with {sampling.logprobs} alternatives for every token"
            f"{of_choices}, that is {limit} tokens",
        )
    return sampling


def _require_few_scores(rendered: Rendered) -> None:
    """Raises `InvalidRequest` for too many log probabilities of prompts: they are held until the reply ends."""
    most = MAX_LOGPROBS // (1 + (rendered.parsed.sampling.logprobs or 0))
    num_tokens = sum(len(replayed.prompt.token_ids) for replayed in rendered.prompts)
    if num_tokens > most:
        problem = f"with echo and logprobs, the prompts of a request may have {most} tokens (they have {num_tokens})"
        raise InvalidRequest.at("prompt", problem)


class _Counted(Struct, Generic[B], frozen=True):
    """Reads the conversation of a body, whose length is asked for."""

    body: type[B]
    conversation: Callable[[B, Callable[[], TenantNotes]], Conversation]

    def read(self, body: B, _vocab_size: int, notes: Callable[[], TenantNotes]) -> ParsedRequest:
        return ParsedRequest(prompt=self.conversation(body, notes), sampling=SamplingParams())


@routes.add("POST /v1/messages/count_tokens", "Anthropic: count tokens", _late("anthropic", "CountTokensRequest"))
async def count_tokens(request: Request) -> Response:
    """`input_tokens` is the length of the prompt that `POST /v1/messages` makes of the same body."""
    from diskprefix.api.anthropic import CountTokensRequest

    counted = _Counted(CountTokensRequest, lambda body, _: body.conversation)
    return JSONResponse({"input_tokens": await _length(request, counted)})


@routes.add(
    "POST /v1/responses/input_tokens", "Count the tokens of a response's input", _late("responses", "ResponseRequest")
)
async def count_input_tokens(request: Request) -> Response:
    """`input_tokens` is the length of the prompt that `POST /v1/responses` makes of the same body."""
    from diskprefix.api.response_store import ResponseStore
    from diskprefix.api.responses import ResponseRequest, Responses

    counted = _Counted(ResponseRequest, lambda body, notes: Responses().conversation(body, ResponseStore(notes())))
    return JSONResponse({"object": "response.input_tokens", "input_tokens": await _length(request, counted)})


async def _length(request: Request, dialect: BodyReader[B]) -> int:
    """Returns the length of a prompt, in which earlier replies are replaced by their tokens as for a reply."""
    daemon: Daemon = request.app.state.daemon
    async with AsyncExitStack() as held:
        body = await daemon.bodies.read_json(request, dialect.body, held)
        arrival = await arrive(request, dialect, body, held)
        _, length = await prepare(arrival, lambda rendered: len(rendered.prompts[0].prompt.token_ids), "counting")
    return length
