"""Finds more routes, and the names of models, above the server. Their modules are imported by name, at their first
use, so that no start waits for them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from diskprefix.daemon import rooms

if TYPE_CHECKING:
    from diskprefix.daemon.settings import Settings


def modules_of_routes() -> list[Any]:
    """Returns the modules that have `routes` and `add_routes`."""
    names = (
        "daemon.server.page_routes",
        "daemon.infill.infill",
        "daemon.embedding.embeddings",
        "daemon.ollama.ollama_routes",
    )
    return [*rooms.modules_of_routes(), *map(_module, names)]


def add_routes(app: Any) -> None:
    """Adds their routes to the Starlette application. `app.state.daemon` is the daemon."""
    for module in modules_of_routes():
        module.add_routes(app)


def known_names(settings: Settings) -> Iterator[tuple[str, Path | None]]:
    """Yields the names of the models that are known besides a single served one, each with its folder or file."""
    return cast("Iterator[tuple[str, Path | None]]", _module("daemon.catalogue.catalogue").known_names(settings))


def _module(name: str) -> Any:
    return importlib.import_module(f"diskprefix.{name}")
