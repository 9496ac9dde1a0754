"""A conversation with the model: the page `/chat`, and `diskprefix run` and `chat` in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI

_FOLDER = "diskprefix.extras.talk"
COMMANDS = {"run": f"{_FOLDER}.run_command:run", "chat": f"{_FOLDER}.chat_command:chat"}


def add_routes(app: FastAPI) -> None:
    """Adds the page."""
    from diskprefix.extras.talk.talk_routes import router

    app.include_router(router)
