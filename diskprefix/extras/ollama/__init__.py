"""Ollama's API: `/api/chat`, `/api/generate`, `/api/embed` and the lists of models."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.applications import Starlette


def add_routes(app: Starlette) -> None:
    """Adds the routes below `/api/`."""
    from diskprefix.extras.ollama import ollama_routes
    from diskprefix.extras.ollama.ollama_models import facts_of

    daemon = app.state.daemon
    daemon.at_load.append(lambda serving: setattr(app.state, "file_facts", facts_of(serving.engine.origin)))
    app.routes.extend(ollama_routes.routes)
