"""The routes of stored responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query
from starlette.requests import Request
from starlette.responses import Response

from diskprefix.api.dialect import Json, json_text
from diskprefix.api.fields import MAX_SALT_CHARS
from diskprefix.api.responses_items import ResponseStore
from diskprefix.errors import InvalidRequest
from diskprefix.server.daemon import Daemon
from diskprefix.server.described import replies
from diskprefix.server.log_context import log_context
from diskprefix.store.note_record import NoteKind

router = APIRouter(prefix="/v1/responses", tags=["responses"])

Salt = Annotated[
    str | None,
    Header(
        alias="x-cache-salt",
        min_length=1,
        max_length=MAX_SALT_CHARS,
        description="That of the request which was answered. Not in the query, which proxies log.",
    ),
]


async def _answer(request: Request, id_: str, salt: str | None, read: Callable[[ResponseStore], Json]) -> Response:
    """Reads and writes in a thread, one request a caller at a time: a note of kilobytes may hold megabytes. Of several
    models, the one that replied may not be loaded."""
    daemon: Daemon = request.app.state.daemon
    caller = log_context(request).caller
    serving = await daemon.ready()
    tenant = caller.tenant if salt is None else caller.tenant.with_salt(salt)
    notes = serving.engine.cache.notes(tenant)

    def work() -> bytes:
        return json_text(read(ResponseStore(notes.holder(NoteKind.RESPONSE, id_))))

    async with daemon.stored_turns.of(caller.account):
        content = await daemon.threads.run_for(request, "rendering", work)
    return Response(content, media_type="application/json")


@router.get(
    "/{response_id}",
    summary="A stored response",
    **replies("The `response`.", 400, 404),
)
async def get_response(
    request: Request, response_id: str, cache_salt: Salt = None, stream: Literal["false"] | None = None
) -> Response:
    """Return a response that was stored. `stream` is not supported."""
    del stream
    return await _answer(request, response_id, cache_salt, lambda store: store.get(response_id).response)


@router.delete(
    "/{response_id}",
    summary="Delete a stored response",
    **replies("`id`, and `deleted`.", 400, 404),
)
async def delete_response(request: Request, response_id: str, cache_salt: Salt = None) -> Response:
    """Delete a stored response. The responses that continue it cannot be continued any more."""

    def delete(store: ResponseStore) -> Json:
        store.delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    return await _answer(request, response_id, cache_salt, delete)


@router.get(
    "/{response_id}/input_items",
    summary="The input of a stored response",
    **replies("A page: `data` with the items, `first_id`, `last_id` and `has_more`.", 400, 404),
)
async def list_input_items(
    request: Request,
    response_id: str,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
    cache_salt: Salt = None,
) -> Response:
    """List the items that a stored response was made from, with those of the responses that it continues."""
    return await _answer(
        request, response_id, cache_salt, lambda store: _page(store.items_of(response_id), limit, order, after)
    )


def _page(items: list[Json], limit: int, order: Literal["asc", "desc"], after: str | None) -> Json:
    """Returns a page of items."""
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise InvalidRequest.at("after", "is not the id of an item of this response")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    has_more = start + limit < len(items)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": has_more}
