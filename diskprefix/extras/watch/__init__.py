"""The views for people: the dashboard, `diskprefix dashboard`, `inspect` and `top`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI

COMMANDS = {
    "inspect": "diskprefix.extras.watch.inspect.inspect_command:inspect",
    "dashboard": "diskprefix.extras.watch.dashboard.dashboard_command:dashboard",
    "top": "diskprefix.extras.watch.top:top",
}


def add_routes(app: FastAPI) -> None:
    """Adds the dashboard, and its page at `/` for browsers."""
    from diskprefix.extras.watch.dashboard import routes
    from diskprefix.extras.web_page import DASHBOARD_PAGE

    app.state.dashboard = routes.Dashboard(app.state.daemon)
    app.include_router(routes.router)
    page = routes.PageRoute("/", lambda: DASHBOARD_PAGE.response(), include_in_schema=False)
    # Before the daemon's own route.
    app.router.routes.insert(0, page)
