"""The views for people: the dashboard, `diskprefix inspect` and `diskprefix top`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI

COMMANDS = {
    "inspect": "diskprefix.extras.watch.inspect.inspect_command:inspect",
    "top": "diskprefix.extras.watch.top:top",
}


def add_routes(app: FastAPI) -> None:
    """Adds the dashboard."""
    from diskprefix.extras.watch.dashboard import routes

    app.state.dashboard = routes.Dashboard(app.state.daemon)
    app.include_router(routes.router)
