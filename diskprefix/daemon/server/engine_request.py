"""Makes the engine's request from a rendered one, and the reader of its reply."""

from __future__ import annotations

from functools import partial
from typing import Any

from msgspec.structs import replace

from diskprefix.daemon.api.dialect import Dialect
from diskprefix.daemon.api.parsed_request import ParsedRequest, constraint_of, note_num_ctx, thought_budget_of
from diskprefix.daemon.api.reply import ReplyReader
from diskprefix.daemon.chat.fill_in import FillIn
from diskprefix.daemon.chat.messages import Conversation
from diskprefix.daemon.chat.output.choose_format import OutputFormat, PlainText
from diskprefix.daemon.engine.request import Echo, GenerateRequest, SamplingParams
from diskprefix.daemon.server.log_context import LogContext
from diskprefix.daemon.server.prepare import Rendered
from diskprefix.daemon.server.remembering import reply_memory
from diskprefix.errors import InvalidRequest
from diskprefix.values import Scope

MAX_LOGPROBS = 2**19
"""The most log probabilities of a reply, over all choices, tokens and alternatives. Each takes 200 to 300 bytes."""


def engine_request(rendered: Rendered) -> tuple[ReplyReader, GenerateRequest]:
    """Returns the engine's request for the first prompt, and the reader for the choices of all prompts. Without a
    conversation, the whole reply is content.

    Raises `InvalidRequest` for a constraint that cannot be compiled, which may take seconds.
    """
    arrival, parsed, replayed = rendered.arrival, rendered.parsed, rendered.prompts[0]
    num_choices = parsed.sampling.n * len(rendered.prompts)
    serving, choice = arrival.serving, parsed.tool_choice
    is_chat = isinstance(parsed.prompt, Conversation)
    asker = arrival.cache.asker
    output_format: OutputFormat = serving.renderer.output_format.of(asker) if is_chat else PlainText()
    prompt_end = serving.renderer.end_of(replayed.prompt)
    encode = partial(serving.engine.tokenizer.encode, add_special_tokens=False)
    ends = serving.renderer.fill_in_ends(parsed.prompt) if isinstance(parsed.prompt, FillIn) else ()
    if parsed.num_ctx is not None and parsed.num_ctx <= (num_tokens := len(replayed.prompt.token_ids)):
        problem = f"is {parsed.num_ctx}, and the prompt has {num_tokens} tokens, none of which is left out"
        raise InvalidRequest.at("options.num_ctx", f"{problem}; this model takes {rendered.max_positions} here")
    if parsed.num_ctx is not None and parsed.num_ctx > rendered.max_positions:
        note_num_ctx(parsed.num_ctx, rendered.max_positions)
    sampling = _sampling(parsed, arrival.daemon.sampling.stop, max(rendered.rooms), num_choices)
    is_scored = parsed.echo and sampling.logprobs is not None
    if is_scored:
        _require_few_scores(rendered)
    check = partial(serving.engine.constraints.check_constraint, asker=asker)
    constraint = constraint_of(parsed, output_format, prompt_end, check)
    generate = GenerateRequest(
        id=reply_id(arrival.dialect, arrival.context),
        prompt=replayed.prompt,
        conversation=arrival.context.conversation,
        # Special tokens that end a fill-in are shown as text (below), so that they work as stop strings.
        sampling=replace(sampling, stop=(*(sampling.stop or ()), *ends)),
        cache=replace(arrival.cache, scope=Scope("off")) if is_scored else arrival.cache,
        echo=Echo(logprobs=sampling.logprobs) if parsed.echo else None,
        constraint=None if constraint is None else replace(constraint, asker=asker),
        thought_budget=thought_budget_of(parsed, output_format, prompt_end, encode, serving.engine.end_ids),
        shown_special_tokens=output_format.special_tokens.union(ends),
        reports_progress=parsed.return_progress,
        patience=arrival.patience,
    )
    asked = parsed.prompt if isinstance(parsed.prompt, Conversation) else None
    memory = None if asked is None else reply_memory(serving, arrival.cache, asked, replayed)
    # Made here, in a thread: with many tools this takes long.
    parsers = [output_format.parser(parsed.tools, prompt_end) for _ in range(num_choices)]
    return ReplyReader(parsers.pop, arrival.dialect.call_id_prefix, memory, many_calls=choice.many), generate


def _sampling(parsed: ParsedRequest, stop: tuple[str, ...], num_room: int, num_choices: int) -> SamplingParams:
    """Returns the sampling parameters, with the model's own `stop` if the request says none. These end free text only:
    they would cut calls and constrained text. Log probabilities are held until a reply ends, so they limit its tokens.

    Raises `InvalidRequest` if the client's own limit allows for too many log probabilities.
    """
    sampling = parsed.sampling
    if sampling.stop is None and not parsed.tools and not parsed.is_constrained:
        sampling = replace(sampling, stop=stop)
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


def reply_id(dialect: Dialect[Any], context: LogContext) -> str:
    """Returns the id of the reply, which is known before the engine has the request."""
    return dialect.id_prefix + context.request_id.removeprefix("req_")
