"""A conversation with the model in a browser: the page `/chat`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI


def add_routes(app: FastAPI) -> None:
    """Adds the page."""
    from diskprefix.extras.talk.talk_routes import router

    app.include_router(router)
