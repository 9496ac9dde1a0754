"""`POST /v1/messages/count_tokens`: how many tokens the prompt of a request has. Nothing is computed."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diskprefix.server.answer import described, prompt_of
from diskprefix.server.body import read_json
from diskprefix.server.daemon import Daemon
from diskprefix.server.log_context import log_context
from diskprefix.server.protocols.anthropic_messages import CountTokensRequest
from diskprefix.server.protocols.anthropic_replies import AnthropicErrorBody, TokenCount
from diskprefix.server.protocols.params import cache_options

router = APIRouter(tags=["completions"])


@router.post(
    "/v1/messages/count_tokens",
    summary="Anthropic: count tokens",
    **described(CountTokensRequest, TokenCount, error=AnthropicErrorBody),
)
async def count_tokens(request: Request) -> Response:
    """The length of the prompt that `POST /v1/messages` makes of the same body, in tokens."""
    daemon: Daemon = request.app.state.daemon
    caller = log_context(request).caller.tenant
    with daemon.arriving(caller) as serving:
        body = await read_json(request, CountTokensRequest, daemon.settings.max_body_bytes)
        serving.require_model(body.model)
        # What is remembered of earlier replies is part of the prompt, so this asks the cache as the request will.
        cache = cache_options(body, scope=serving.scope, caller=caller, reuse_generated=daemon.settings.reuse_generated)
        replayed = await prompt_of(body.conversation, daemon, serving, cache)
    return JSONResponse({"input_tokens": len(replayed.prompt.token_ids)})
