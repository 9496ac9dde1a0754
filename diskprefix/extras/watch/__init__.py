"""The views for people: the dashboard, `diskprefix dashboard`, `inspect` and `top`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.applications import Starlette


def add_routes(app: Starlette) -> None:
    """Adds the dashboard, and its page at `/` for browsers."""
    from diskprefix.extras.watch.dashboard import dashboard_routes

    app.state.dashboard = dashboard_routes.Dashboard(app.state.daemon)
    app.routes.extend(dashboard_routes.routes)
    # Before the daemon's own route.
    app.routes.insert(0, dashboard_routes.PageRoute())
