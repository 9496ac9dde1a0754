"""The routes of responses but the one that generates, which is in `answer.py`: stored responses, and counting."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse

from diskprefix.errors import InvalidRequest
from diskprefix.server.answer import described, prompt_of
from diskprefix.server.body import read_json
from diskprefix.server.daemon import Daemon
from diskprefix.server.errors import ErrorBody
from diskprefix.server.log_context import log_context
from diskprefix.server.protocols.dialect import Arrival, Json
from diskprefix.server.protocols.fields import MAX_SALT_CHARS
from diskprefix.server.protocols.params import cache_options
from diskprefix.server.protocols.responses.body import ResponseRequest
from diskprefix.server.protocols.responses.dialect import Responses
from diskprefix.server.protocols.responses.replies import ModelResponse
from diskprefix.server.protocols.responses.stored import ResponseStore

router = APIRouter(prefix="/v1/responses", tags=["responses"])

_ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorBody} for status in (400, 401, 404, 503)}

Salt = Annotated[
    str | None, Query(min_length=1, max_length=MAX_SALT_CHARS, description="That of the request which was answered.")
]


class DeletedResponse(BaseModel):
    """What was deleted."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(BaseModel):
    """A page of items."""

    object: Literal["list"] = "list"
    data: list[Json]
    first_id: str | None = Field(description="Of this page; null if it is empty.")
    last_id: str | None
    has_more: bool


class InputTokens(BaseModel):
    """The length of a prompt."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


@router.post(
    "/input_tokens", summary="Count the tokens of a response's input", **described(ResponseRequest, InputTokens)
)
async def count_input_tokens(request: Request) -> JSONResponse:
    """Tell how many tokens the prompt has that `POST /v1/responses` makes of the same body. Nothing is computed."""
    daemon: Daemon = request.app.state.daemon
    caller = log_context(request).caller.tenant
    with daemon.arriving(caller) as serving:
        body = await read_json(request, ResponseRequest, daemon.settings.max_body_bytes)
        serving.require_model(body.model)
        # What is remembered of earlier replies is part of the prompt, so this asks the cache as the request will.
        cache = cache_options(body, scope=serving.scope, caller=caller, reuse_generated=daemon.settings.reuse_generated)
        conversation = await Responses().conversation(body, Arrival(serving=serving, tenant=cache.tenant))
        replayed = await prompt_of(conversation, daemon, serving, cache)
    return JSONResponse(InputTokens(input_tokens=len(replayed.prompt.token_ids)).model_dump())


def _store(request: Request, salt: str | None) -> ResponseStore:
    """Returns the stored responses of the caller. Raises `NotReady`."""
    daemon: Daemon = request.app.state.daemon
    tenant = log_context(request).caller.tenant
    serving = daemon.require_serving()
    return ResponseStore(serving.engine.cache.notes(tenant if salt is None else tenant.with_salt(salt)))


@router.get(
    "/{response_id}",
    summary="A stored response",
    response_model=None,
    responses={200: {"model": ModelResponse}, **_ERRORS},
)
async def get_response(
    request: Request, response_id: str, cache_salt: Salt = None, stream: Literal["false"] | None = None
) -> Json:
    """Return a response that was stored. `stream` is not supported."""
    del stream
    stored = await asyncio.to_thread(_store(request, cache_salt).get, response_id)
    return stored.response


@router.delete("/{response_id}", summary="Delete a stored response", responses=_ERRORS)
async def delete_response(request: Request, response_id: str, cache_salt: Salt = None) -> DeletedResponse:
    """Delete a stored response. The responses that continue it cannot be continued any more."""
    await asyncio.to_thread(_store(request, cache_salt).delete, response_id)
    return DeletedResponse(id=response_id)


@router.get("/{response_id}/input_items", summary="The input of a stored response", responses=_ERRORS)
async def list_input_items(
    request: Request,
    response_id: str,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
    cache_salt: Salt = None,
) -> ItemList:
    """List the items that a stored response was made from, with those of the responses that it continues."""
    items = await asyncio.to_thread(_store(request, cache_salt).items_of, response_id)
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise InvalidRequest("after: is not the id of an item of this response", param="after")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return ItemList(data=page, first_id=first, last_id=last, has_more=start + limit < len(items))
