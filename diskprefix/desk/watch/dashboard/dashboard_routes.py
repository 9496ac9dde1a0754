"""The data of the dashboard, for callers who may see everything."""

from __future__ import annotations

from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse

from diskprefix.daemon.api.error_forms import HttpError
from diskprefix.daemon.server.body import read_parameters
from diskprefix.daemon.server.daemon import Daemon
from diskprefix.daemon.server.log_context import log_context
from diskprefix.daemon.server.routes import Routes
from diskprefix.desk.watch.dashboard.entries import SavedPrompts
from diskprefix.desk.watch.dashboard.watch import Watch

routes = Routes("dashboard")


class Dashboard:
    """The objects that the routes share."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.watch = Watch(daemon)
        self.saved_prompts = SavedPrompts(daemon.threads)


def _dashboard(request: Request) -> Dashboard:
    """Returns the dashboard. Raises an error unless the caller is the owner."""
    log_context(request).caller.require_owner()
    dashboard: Dashboard = request.app.state.dashboard
    return dashboard


class StateParameters(BaseModel, defer_build=True):
    """`GET /dashboard/state`."""

    since: int = Field(default=0, ge=0, description="The number of the last request in `ended` that the caller has.")


@routes.add("GET /dashboard/state", "State", parameters=StateParameters, errors=[401])
async def state(request: Request) -> JSONResponse:
    """The daemon now: its requests, its memory, its store, its problems.

    Values that are unknown while the model loads are null or empty.
    """
    watch = _dashboard(request).watch
    since = read_parameters(request, StateParameters).since
    return JSONResponse(await watch.state() | {"ended": watch.ended(since)})


@routes.add("GET /dashboard/entries", "Saved prompts", errors=[401])
async def entries(request: Request) -> JSONResponse:
    """The saved prompts, and the tree of what they share. Read from the store, at most every few seconds.

    Returns `total`, `entries`, the latest first, and `trees` of their blocks, each of one model and tenant. A tree has
    the id of its `tenant`, and a `tenant_name` for people.
    """
    dashboard = _dashboard(request)
    serving = await dashboard.daemon.ready()
    store, names = serving.engine.cache.store, request.app.state.access.tenant_names
    return JSONResponse(await dashboard.saved_prompts.entries(store, names, with_texts=dashboard.watch.is_private))


@routes.add("DELETE /dashboard/entries/{entry_id}", "Delete a saved prompt", errors=[401, 404])
async def delete_entry(request: Request) -> JSONResponse:
    """Remove a saved prompt, with the blocks that nothing else needs. Without API keys, only on a loopback address.

    Returns counts of what was deleted.
    """
    dashboard, entry_id = _dashboard(request), request.path_params["entry_id"]
    if not dashboard.watch.is_private:
        raise HttpError(
            403, "a daemon without API keys that other machines reach deletes nothing: use `diskprefix purge` there"
        )
    serving = await dashboard.daemon.ready()
    purged = await dashboard.saved_prompts.delete(serving.engine.cache.store, serving.engine.cache.delete, entry_id)
    return JSONResponse({"id": entry_id, "deleted": True} | purged.counts())


def add_routes(app: Starlette) -> None:
    """Adds the data of the dashboard."""
    app.state.dashboard = Dashboard(app.state.daemon)
    app.routes.extend(routes)
