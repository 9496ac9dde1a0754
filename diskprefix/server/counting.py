"""`POST /v1/messages/count_tokens` and `/v1/responses/input_tokens`: how many tokens the prompt of a request has.

Nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal, TypeVar

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diskprefix.api.anthropic import CountTokensRequest
from diskprefix.api.anthropic_writer import AnthropicErrorBody, TokenCount
from diskprefix.api.fields import RequestBody
from diskprefix.api.responses import ResponseRequest, Responses
from diskprefix.api.responses_store import ResponseStore
from diskprefix.chat.messages import Conversation
from diskprefix.server.answer import cache_options_of, prompt_of
from diskprefix.server.daemon import Daemon
from diskprefix.server.described import described
from diskprefix.server.log_context import log_context
from diskprefix.store.notes import TenantNotes

B = TypeVar("B", bound=RequestBody)

router = APIRouter(tags=["completions"])


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
