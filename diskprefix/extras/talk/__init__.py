"""A conversation with the model: the page `/chat`, and `diskprefix run` and `chat` in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response


def add_routes(app: Starlette) -> None:
    """Adds the page."""
    from diskprefix.extras.web_page import CHAT_PAGE
    from diskprefix.server.routes import AppRoute

    async def page(_request: Request) -> Response:
        return CHAT_PAGE.response()

    app.routes.append(AppRoute("/chat", page))
