"""The routes that generate, and the way of a request: `arrive`, `ask`, `render`, `submit`, `send`.

Each step takes one value and returns the next. They are the same for every API, whose `Dialect` makes the difference.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from diskprefix.api.anthropic import CountTokensRequest, Messages
from diskprefix.api.asked import Asked, constraint_of, thought_budget_of
from diskprefix.api.compaction import Compaction, CompactRequest
from diskprefix.api.dialect import BodyReader, Dialect, EarlyDialect, Head, ReplyWriter
from diskprefix.api.fields import RequestBody, cache_options, with_sampling
from diskprefix.api.openai import Completions
from diskprefix.api.openai_chat import Chat
from diskprefix.api.responses import ResponseRequest, Responses
from diskprefix.api.responses_items import ResponseStore
from diskprefix.chat.fill_in import FillIn
from diskprefix.chat.messages import Conversation
from diskprefix.chat.output.format import OutputFormat, PlainText
from diskprefix.chat.replay import Replayed
from diskprefix.engine.gauges import Activity
from diskprefix.engine.request import DoneEvent, GenerateRequest, SamplingParams
from diskprefix.errors import InvalidRequest
from diskprefix.nouns import CacheOptions
from diskprefix.server.daemon import Daemon
from diskprefix.server.described import described
from diskprefix.server.generation import Generation, Generations, together
from diskprefix.server.log_context import LogContext, log_context
from diskprefix.server.remembering import RememberingReader, known_parts, reply_memory, stored_turns
from diskprefix.server.serving import Serving
from diskprefix.server.streaming import EventStream, PatientResponse, first_signs
from diskprefix.store.notes import TenantNotes

B = TypeVar("B", bound=RequestBody)

MAX_LOGPROBS = 2**19
"""The most log probabilities of a reply, over all choices, tokens and alternatives. Each takes 200 to 300 bytes."""

router = APIRouter(tags=["completions"])


@router.post(
    "/v1/chat/completions",
    summary="Chat",
    **described(Chat.body, "A `chat.completion`, as in OpenAI's API, with `prefix_cache` and `timings`.", streams=True),
)
async def chat_completions(request: Request) -> Response:
    """Reply to a conversation. The part of the prompt that is stored on disk is restored instead of computed."""
    return await answer(request, Chat())


@router.post(
    "/v1/completions",
    summary="Text completion",
    **described(
        Completions.body, "A `text_completion`, as in OpenAI's API, with `prefix_cache` and `timings`.", streams=True
    ),
)
async def completions(request: Request) -> Response:
    """Continue a text or a list of token ids. No chat template is applied."""
    return await answer(request, Completions())


@router.post(
    "/v1/responses",
    summary="Response",
    **described(Responses.body, "A `response`, as in OpenAI's API, with `prefix_cache` and `timings`.", streams=True),
)
async def responses(request: Request) -> Response:
    """Reply to a conversation that is given as items, or that continues a stored response."""
    return await answer(request, Responses())


@router.post(
    "/v1/responses/compact",
    summary="A conversation in short",
    **described(CompactRequest, "A `response.compaction`: the newest messages of the user, and an item `compaction`."),
)
async def compact_response(request: Request) -> Response:
    """Let the model sum up a conversation. What comes back stands for it in later requests."""
    return await answer(request, Compaction())


@router.post(
    "/v1/messages",
    summary="Anthropic messages",
    **described(Messages.body, "A `message`, as in Anthropic's API, with `prefix_cache` and `timings`.", streams=True),
)
async def messages(request: Request) -> Response:
    """Reply to a conversation, in the form of Anthropic's API."""
    return await answer(request, Messages())


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request that was read, and what every step needs to serve it. It is made once."""

    request: Request
    daemon: Daemon
    context: LogContext
    serving: Serving
    dialect: BodyReader[Any]
    """A `Dialect`, if a reply is asked for."""
    body: RequestBody
    cache: CacheOptions

    held: AsyncExitStack
    """The caller's turns, for a large body and to read stored responses."""


@dataclass(frozen=True)
class Question:
    """A request in neutral words."""

    arrival: Arrival
    asked: Asked

    @property
    def parts(self) -> list[Question]:
        """A question for each of the prompts."""
        prompts = (self.asked.prompt, *self.asked.more_prompts)
        return [Question(self.arrival, replace(self.asked, prompt=one, more_prompts=())) for one in prompts]


@dataclass(frozen=True)
class Rendered:
    """A request with its prompt as token ids."""

    arrival: Arrival
    asked: Asked
    replayed: Replayed

    @property
    def dialect(self) -> Dialect[Any]:
        return cast("Dialect[Any]", self.arrival.dialect)

    @property
    def room(self) -> int:
        """The number of tokens that the model's positions leave for the reply."""
        return self.arrival.serving.engine.max_positions - len(self.replayed.prompt.token_ids)


@dataclass(frozen=True)
class Submitted:
    """A request that the engine has, and the two that make its reply of the engine's events."""

    generation: Generation | Generations
    reader: RememberingReader
    writer: ReplyWriter
    is_stream: bool


async def answer(request: Request, dialect: Dialect[B]) -> Response:
    """Reads a request, submits it, and returns the response that sends the reply.

    Raises errors from before the request is submitted. A later one, or one after a long wait, is sent in the reply.
    """
    daemon: Daemon = request.app.state.daemon
    context = log_context(request)
    context.wants_reply = True
    async with AsyncExitStack() as held:
        body = await daemon.bodies.read_json(request, dialect.body, held)
        preparing = asyncio.create_task(_response(request, dialect, body, held.pop_all()))
    early = partial(dialect.early, body, _reply_id(dialect, context)) if isinstance(dialect, EarlyDialect) else None
    return await first_signs(preparing, is_stream=bool(body.stream), early=early)


def _reply_id(dialect: Dialect[Any], context: LogContext) -> str:
    """Returns the id of the reply, which is known before the engine has the request."""
    return dialect.id_prefix + context.request_id.removeprefix("req_")


async def _response(request: Request, dialect: Dialect[B], body: B, held: AsyncExitStack) -> Response:
    """Takes a request through all steps. `held` is closed when the engine has the request."""
    async with held:
        arrival = await arrive(request, dialect, body, held)
        arrival.serving.engine.give_way()
        question = await ask(arrival)
        return send(await submit([await render(one) for one in question.parts]))


async def arrive(request: Request, dialect: BodyReader[B], body: B, held: AsyncExitStack) -> Arrival:
    """Waits for the model. Raises `NotReady`, `ModelNotFound`, and the errors of `cache_options`."""
    daemon: Daemon = request.app.state.daemon
    context = log_context(request)
    serving = await daemon.ready()
    serving.require_model(body.model)
    return Arrival(
        request=request,
        daemon=daemon,
        context=context,
        serving=serving,
        dialect=dialect,
        body=with_sampling(body, daemon.sampling),
        cache=cache_options(body, scope=serving.scope, caller=context.caller.tenant),
        held=held,
    )


async def ask(arrival: Arrival) -> Question:
    """Lets the dialect read the body, in a thread. Raises `InvalidRequest`."""
    serving, daemon = arrival.serving, arrival.daemon
    if arrival.body.reads_more:
        await arrival.held.enter_async_context(daemon.stored_turns.of(arrival.context.caller.account))
    notes = partial(serving.engine.cache.notes, arrival.cache.tenant)
    read, vocab_size = arrival.dialect.read, serving.renderer.vocab_size
    asked = await daemon.threads.run("rendering", read, arrival.body, vocab_size, notes)
    return Question(arrival, asked)


async def render(question: Question) -> Rendered:
    """Renders the prompt in a thread."""
    arrival, wanted = question.arrival, question.asked.prompt
    serving, cache = arrival.serving, arrival.cache

    def make_prompt() -> Replayed:
        renderer, known = serving.renderer, known_parts(serving, cache)
        if isinstance(wanted, Conversation):
            return renderer.replay(wanted, stored_turns(serving, cache), known)
        return Replayed(renderer.completion(wanted, known))

    has_pictures = isinstance(wanted, Conversation) and wanted.has_pictures
    replayed = await arrival.daemon.threads.run("images" if has_pictures else "rendering", make_prompt)
    return Rendered(arrival, question.asked, replayed)


async def submit(parts: Sequence[Rendered]) -> Submitted:
    """Gives the request to the engine: that of the first prompt, and those of others when the one before has ended.

    Raises `QueueFull` if the waiting pictures are too large, `NotReady`, `InvalidRequest` for a constraint that cannot
    be compiled, and `ClientDisconnect`.
    """
    rendered = parts[0]
    arrival, prompt, sampling = rendered.arrival, rendered.replayed.prompt, rendered.asked.sampling
    daemon, context, serving = arrival.daemon, arrival.context, arrival.serving
    # A constraint is compiled when its caller's turn comes. The bodies of others do not wait for that.
    await arrival.held.aclose()
    make_request = partial(_engine_request, rendered, sampling.n * len(parts), max(part.room for part in parts))
    if rendered.asked.is_constrained:
        made = await daemon.threads.compile(context.caller.account, arrival.request.is_disconnected, make_request)
    else:
        made = await daemon.threads.run("rendering", make_request)
    if made is None:
        raise ClientDisconnect
    reader, generate = made
    least = min(part.room for part in parts)
    head = Head(
        id=generate.id,
        created=int(time.time()),
        model=serving.model_name,
        fingerprint=serving.fingerprint,
        prompt_tokens=sum(len(part.replayed.prompt.token_ids) for part in parts),
        request_id=context.request_id,
        clamped_to=None if sampling.max_tokens is None or sampling.max_tokens <= least else least,
        prompt=prompt.token_ids,
    )
    context.generation_id = generate.id
    all_done: list[DoneEvent] = []

    def on_done(done: DoneEvent) -> None:
        all_done.append(done)
        context.done = together(all_done)
        daemon.metrics.count_generation(done)
        daemon.breaks.note(done.cache)

    def on_cancelled(activity: Activity) -> None:
        context.cancelled_at = activity

    def begin(request: GenerateRequest) -> Generation:
        return Generation(serving.inbox, request, arrival.request.receive, on_done, on_cancelled)

    writer = rendered.dialect.writer(arrival.body, head)
    requests = [
        generate if part is rendered else replace(generate, id=f"{generate.id}-{index}", prompt=part.replayed.prompt)
        for index, part in enumerate(parts)
    ]
    begins = [partial(begin, request) for request in requests]
    generation = begin(generate) if len(parts) == 1 else Generations(begins, sampling.n)
    return Submitted(generation, reader, writer, bool(arrival.body.stream))


def send(submitted: Submitted) -> Response:
    """Returns the response that sends the reply."""
    response = EventStream if submitted.is_stream else PatientResponse
    return response(submitted.generation, submitted.reader, submitted.writer)


def _engine_request(rendered: Rendered, num_choices: int, room: int) -> tuple[RememberingReader, GenerateRequest]:
    """Returns the engine's request, and the reader of the reply, which has `num_choices` over all prompts.
    `room` is the number of tokens that one of them may have. Without a conversation, all of the reply is content.

    Raises `InvalidRequest` for a constraint that cannot be compiled, which may take seconds.
    """
    arrival, asked, replayed = rendered.arrival, rendered.asked, rendered.replayed
    serving, choice = arrival.serving, asked.tool_choice
    is_chat = isinstance(asked.prompt, Conversation)
    output_format: OutputFormat = serving.renderer.output_format if is_chat else PlainText()
    tools = choice.allowed(asked.prompt.tools or ()) if isinstance(asked.prompt, Conversation) else []
    prompt_end = serving.renderer.end_of(replayed.prompt)
    encode = partial(serving.engine.tokenizer.encode, add_special_tokens=False)
    ends = serving.renderer.fill_in_ends(asked.prompt) if isinstance(asked.prompt, FillIn) else ()
    sampling = _sampling(asked, room, num_choices)
    generate = GenerateRequest(
        id=_reply_id(rendered.dialect, arrival.context),
        prompt=replayed.prompt,
        # Special tokens are no text, so those that end the reply are stop strings.
        sampling=replace(sampling, stop=(*sampling.stop, *ends)),
        cache=arrival.cache,
        constraint=constraint_of(asked, output_format, prompt_end, serving.engine.constraints.check),
        thought_budget=thought_budget_of(asked.thinking_budget, output_format, prompt_end, encode),
        shown_special_tokens=output_format.special_tokens.union(ends),
        reports_progress=asked.return_progress,
    )
    memory = reply_memory(serving, arrival.cache, replayed)
    # Made here, in a thread: many names of tools take long.
    parsers = [output_format.parser(tools, prompt_end) for _ in range(num_choices)]
    return RememberingReader(parsers.pop, rendered.dialect.call_id_prefix, memory, many_calls=choice.many), generate


def _sampling(asked: Asked, num_room: int, num_choices: int) -> SamplingParams:
    """Returns how the reply is sampled. Log probabilities are held until the end of a reply, so they limit its tokens.

    Raises `InvalidRequest` if the client's own limit allows for too many log probabilities.
    """
    sampling = asked.sampling
    if sampling.logprobs is None:
        return sampling
    most = MAX_LOGPROBS // (num_choices * (1 + sampling.logprobs))
    if sampling.max_tokens is None:
        return replace(sampling, max_tokens=most) if most < num_room else sampling
    if min(sampling.max_tokens, num_room) > most:
        of_choices = f" of {num_choices} choices" if num_choices > 1 else ""
        raise InvalidRequest.at(
            asked.limit_path,
            f"a reply may have {MAX_LOGPROBS} log probabilities; with {sampling.logprobs} alternatives for every token"
            f"{of_choices}, that is {most} tokens",
        )
    return sampling


class _CountedMessages:
    body = CountTokensRequest

    def read(self, body: CountTokensRequest, _vocab_size: int, _notes: Callable[[], TenantNotes]) -> Asked:
        return Asked(prompt=body.conversation, sampling=SamplingParams())


class _CountedInput:
    body = ResponseRequest

    def read(self, body: ResponseRequest, _vocab_size: int, notes: Callable[[], TenantNotes]) -> Asked:
        return Asked(prompt=Responses().conversation(body, ResponseStore(notes())), sampling=SamplingParams())


@router.post(
    "/v1/messages/count_tokens",
    summary="Anthropic: count tokens",
    **described(CountTokensRequest, "`input_tokens`: the tokens of the whole prompt."),
)
async def count_tokens(request: Request) -> Response:
    """The length of the prompt that `POST /v1/messages` makes of the same body, in tokens."""
    return JSONResponse({"input_tokens": await _length(request, _CountedMessages())})


@router.post(
    "/v1/responses/input_tokens",
    summary="Count the tokens of a response's input",
    **described(ResponseRequest, "A `response.input_tokens`: the tokens of the whole prompt."),
)
async def count_input_tokens(request: Request) -> Response:
    """The length of the prompt that `POST /v1/responses` makes of the same body, in tokens."""
    return JSONResponse({"object": "response.input_tokens", "input_tokens": await _length(request, _CountedInput())})


async def _length(request: Request, dialect: BodyReader[B]) -> int:
    """Returns the length of a prompt. Earlier replies are part of it, so the cache is asked as for a reply."""
    daemon: Daemon = request.app.state.daemon
    async with AsyncExitStack() as held:
        body = await daemon.bodies.read_json(request, dialect.body, held)
        rendered = await render(await ask(await arrive(request, dialect, body, held)))
    return len(rendered.replayed.prompt.token_ids)
