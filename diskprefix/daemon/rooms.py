"""The rooms of the desk: folders that add commands, routes and pages to the daemon, each of which can be taken away.

A room is a folder of `diskprefix/desk`, whose `__init__.py` says what it adds:

* `PLACE`, a number: where its commands stand in the help.
* `COMMANDS`: the name of a command, and its module and function.
* `ROUTES`: modules with `routes` and `add_routes(app)`.
* `PAGES`: the path of a page for browsers, and its module and variable.

The names of modules are relative to the room. Rooms are found by their folders, which takes 2 to 6 ms, and not by entry
points: importing `importlib.metadata` alone takes 73 to 102 ms.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from types import ModuleType

    from starlette.datastructures import Headers
    from starlette.responses import Response

_DESK = Path(__file__).parents[1] / "desk"


class BrowserPage(Protocol):
    """A page for browsers."""

    def response(self, *, is_several: bool = False) -> Response:
        """Returns the page. `is_several`: the daemon has several models."""


@cache
def rooms() -> tuple[ModuleType, ...]:
    """Returns the rooms in the order of the help. Imports their `__init__.py` alone."""
    # A folder that is taken away may keep its compiled modules.
    names = sorted(file.parent.name for file in _DESK.glob("*/__init__.py"))
    modules = [importlib.import_module(f"diskprefix.desk.{name}") for name in names]
    return tuple(sorted((room for room in modules if hasattr(room, "PLACE")), key=lambda room: int(room.PLACE)))


def commands() -> dict[str, str]:
    """Returns the module and function of each command of the rooms, as `module:function`."""
    return _named("COMMANDS")


def modules_of_routes() -> list[Any]:
    """Returns the modules of the rooms that have `routes`, and `add_routes(app)` for the Starlette application."""
    return [
        importlib.import_module(f"{room.__name__}.{name}") for room in rooms() for name in getattr(room, "ROUTES", ())
    ]


def pages() -> Mapping[str, str]:
    """Returns the module and variable of each page by its path."""
    return _named("PAGES")


def page_at(path: str) -> BrowserPage | None:
    """Returns the page at a path, None if no room has one there."""
    if path not in pages():
        return None
    page: BrowserPage = loaded(pages()[path])
    return page


def wants_page(headers: Headers) -> bool:
    """Returns whether a client names `text/html` among what it accepts, as browsers do."""
    return "text/html" in headers.get("accept", "").lower()


def welcome() -> dict[str, str]:
    """Returns the answer of `GET /` to programs: where to look. The dashboard, which browsers get at `/`, has a path of
    its own too."""
    names = (path.strip("/") or "dashboard" for path in pages())
    return {"name": "diskprefix", "docs": "/docs"} | {name: f"/{name}" for name in names}


def loaded(target: str) -> Any:
    """Imports and returns what `module:name` names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _named(what: str) -> dict[str, str]:
    return {name: f"{room.__name__}.{target}" for room in rooms() for name, target in getattr(room, what, {}).items()}
