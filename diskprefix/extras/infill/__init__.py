"""The route `/infill` of llama.cpp's server, which the completion plugins of editors call."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.applications import Starlette


def add_routes(app: Starlette) -> None:
    """Adds `POST /infill`."""
    from diskprefix.extras.infill.infill import routes

    app.routes.extend(routes)
