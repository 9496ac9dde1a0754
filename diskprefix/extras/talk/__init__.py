"""A conversation with the model: the page `/chat`, and `diskprefix chat` in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI

COMMANDS = {"chat": "diskprefix.extras.talk.chat_command:chat"}


def add_routes(app: FastAPI) -> None:
    """Adds the page."""
    from diskprefix.extras.talk.talk_routes import router

    app.include_router(router)
