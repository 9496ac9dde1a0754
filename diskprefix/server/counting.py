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

from diskprefix.chat.messages import Conversation
from diskprefix.server.answer import cache_options_of, prompt_of
from diskprefix.server.daemon import Daemon
from diskprefix.server.described import described
from diskprefix.server.log_context import log_context
from diskprefix.server.protocols.anthropic_messages import CountTokensRequest
from diskprefix.server.protocols.anthropic_replies import AnthropicErrorBody, TokenCount
from diskprefix.server.protocols.dialect import Arrival
from diskprefix.server.protocols.fields import RequestBody
from diskprefix.server.protocols.responses.body import ResponseRequest
from diskprefix.server.protocols.responses.dialect import Responses

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

    def conversation(body: CountTokensRequest, _arrival: Arrival) -> Conversation:
        return body.conversation

    return JSONResponse({"input_tokens": await _length(request, CountTokensRequest, conversation)})


@router.post(
    "/v1/responses/input_tokens",
    summary="Count the tokens of a response's input",
    **described(ResponseRequest, InputTokens),
)
async def count_input_tokens(request: Request) -> Response:
    """The length of the prompt that `POST /v1/responses` makes of the same body, in tokens."""
    length = await _length(request, ResponseRequest, Responses().conversation)
    return JSONResponse(InputTokens(input_tokens=length).model_dump())


async def _length(request: Request, model: type[B], conversation: Callable[[B, Arrival], Conversation]) -> int:
    daemon: Daemon = request.app.state.daemon
    with daemon.arriving(log_context(request).caller.tenant) as place:
        body = await daemon.bodies.read_json(request, model, place)
        serving = await daemon.ready()
        serving.require_model(body.model)
        # What is remembered of earlier replies is part of the prompt, so this asks the cache as the request will.
        cache = cache_options_of(body, request)
        arrival = Arrival(serving=serving, tenant=cache.tenant)
        async with daemon.turns.of(place.caller) if body.reads_more else nullcontext():
            wanted = await daemon.threads.run(place.rendering, conversation, body, arrival)
            replayed = await prompt_of(wanted, daemon, serving, cache, place)
    return len(replayed.prompt.token_ids)
