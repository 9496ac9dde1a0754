"""The routes of stored responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeVar

from msgspec.structs import replace
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from diskprefix.daemon.api.dialect import Json, json_text
from diskprefix.daemon.api.fields import MAX_SALT_CHARS
from diskprefix.daemon.server.body import read_parameters
from diskprefix.daemon.server.daemon import Daemon
from diskprefix.daemon.server.log_context import log_context
from diskprefix.daemon.server.routes import Routes
from diskprefix.errors import InvalidRequest
from diskprefix.prefixstore.store.note_record import NoteKind
from diskprefix.prefixstore.store.reads import Patience

if TYPE_CHECKING:
    from diskprefix.daemon.api.response_store import ResponseStore

routes = Routes("responses")


class StoredParameters(BaseModel, defer_build=True):
    """The parameters of all routes."""

    cache_salt: str | None = Field(
        default=None,
        alias="x-cache-salt",
        min_length=1,
        max_length=MAX_SALT_CHARS,
        description="The salt of the request that was answered. It is a header because proxies log queries.",
    )


class ResponseParameters(StoredParameters):
    stream: Literal["false"] | None = Field(default=None, description="Streams are not supported.")


class ItemsParameters(StoredParameters):
    limit: int = Field(default=20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


P = TypeVar("P", bound=StoredParameters)


async def _answer(request: Request, of: type[P], read: Callable[[ResponseStore, str, P], Json]) -> Response:
    """Runs `read` in a thread, in turns of the shares: a note of kilobytes may hold megabytes. Raises
    `DiskStalled`."""
    daemon: Daemon = request.app.state.daemon
    context, id_ = log_context(request), request.path_params["response_id"]
    parameters = read_parameters(request, of)
    serving = await daemon.ready()
    salt = parameters.cache_salt
    tenant = context.caller.tenant if salt is None else context.caller.tenant.with_salt(salt)
    patience = Patience()
    notes = replace(serving.engine.cache.notes(tenant), patience=patience)

    def work() -> bytes:
        from diskprefix.daemon.api.response_store import ResponseStore

        return json_text(read(ResponseStore(notes.holder(NoteKind.RESPONSE, id_)), id_, parameters))

    async with daemon.stored_turns.of(context.share, context.conversation):
        content = await daemon.threads.run("reading", patience.from_now(work))
    return Response(content, media_type="application/json")


@routes.add("GET /v1/responses/{response_id}", "A stored response", parameters=ResponseParameters, errors=[404])
async def get_response(request: Request) -> Response:
    """The `response` that was stored."""
    return await _answer(request, ResponseParameters, lambda store, id_, _: store.get(id_).response)


@routes.add("DELETE /v1/responses/{response_id}", "Delete a stored response", parameters=StoredParameters, errors=[404])
async def delete_response(request: Request) -> Response:
    """Delete a stored response. The responses that continue it cannot be continued any more.

    Returns `id`, and `deleted`.
    """

    def delete(store: ResponseStore, id_: str, _: StoredParameters) -> Json:
        store.delete(id_)
        return {"id": id_, "object": "response", "deleted": True}

    return await _answer(request, StoredParameters, delete)


@routes.add(
    "GET /v1/responses/{response_id}/input_items",
    "The input of a stored response",
    parameters=ItemsParameters,
    errors=[404],
)
async def list_input_items(request: Request) -> Response:
    """List the input items of a stored response, and of the responses that it continues.

    Returns a page: `data` with the items, `first_id`, `last_id` and `has_more`.
    """
    return await _answer(request, ItemsParameters, lambda store, id_, wanted: _page(store.items_of(id_), wanted))


def _page(items: list[Json], wanted: ItemsParameters) -> Json:
    """Returns a page of items."""
    limit, after = wanted.limit, wanted.after
    if wanted.order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise InvalidRequest.at("after", "is not the id of an item of this response")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    has_more = start + limit < len(items)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": has_more}
