"""The route `/infill` of llama.cpp's server, which the completion plugins of editors call."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI


def add_routes(app: FastAPI) -> None:
    """Adds `POST /infill`."""
    from diskprefix.extras.infill.infill import router

    app.include_router(router)
