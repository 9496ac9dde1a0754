"""Houses import only the houses below them, in names of strings too."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest

from diskprefix import prefixstore
from tests.exceptions import exceptions
from tests.test_packages import SOURCES, imported_names

_STREET = ("ground", "prefixstore", "runtime", "daemon", "desk")
BELOW = {house: frozenset(_STREET[: number + 1]) for number, house in enumerate(_STREET)}
"""For each house, those that its modules may import, its own among them."""
BELOW["bridges"] = frozenset({"ground", "prefixstore", "bridges"})
DOORS = {"__init__", "__main__"}
"""The modules through which a program enters. They import what they open."""


def house_of(module: str) -> str:
    """Returns the house of a module, whose name is relative to `diskprefix`."""
    first = module.partition(".")[0]
    return first if first in BELOW else "ground"


def modules_named(source: str) -> Iterator[str]:
    """Yields the modules that a source imports, and those whose names stand in its strings, as of a command."""
    for name in imported_names(source):
        bare = name.removeprefix("diskprefix.")
        if bare != name:
            yield bare if bare in SOURCES else bare.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = re.fullmatch(r"(?:diskprefix\.)?([a-z_]+(?:\.\w+)+)(?::\w+)?", node.value)
            if named and named[1] in SOURCES:
                yield named[1]


def upward(module: str, source: str) -> set[tuple[str, str]]:
    below = BELOW[house_of(module)]
    return {(module, other) for other in modules_named(source) if other and house_of(other) not in below}


PAST_THE_FACE = {"daemon": 56, "runtime": 30, **exceptions("PAST_THE_FACE")}
"""How many names from inside `prefixstore` each house imports, beside those of `prefixstore/__init__.py`. Only smaller.
The desk may look inside: its commands are the store's own tools."""


def test_houses_import_ever_fewer_names_from_inside_the_store() -> None:
    face, names = {f"diskprefix.prefixstore.{name}" for name in dir(prefixstore)}, defaultdict[str, set[str]](set)
    for module, source in SOURCES.items():
        if (house := house_of(module)) in PAST_THE_FACE:
            imported = (name for name in imported_names(source) if name.startswith("diskprefix.prefixstore."))
            names[house].update(set(imported) - face)
    assert {house: len(found) for house, found in names.items()} == PAST_THE_FACE


def test_houses_import_only_those_below() -> None:
    found = {arrow for module, source in SOURCES.items() if module not in DOORS for arrow in upward(module, source)}
    assert found == set()


@pytest.mark.parametrize(
    ("module", "source", "other"),
    [
        ("prefixstore.kv.pages", "from diskprefix.daemon.app import serve", "daemon.app"),
        ("daemon.hooks", "name = 'desk.shared'", "desk.shared"),
        ("units", "def f():\n    import diskprefix.runtime.contract", "runtime.contract"),
        ("bridges.vllm.connector", "from diskprefix.runtime import contract", "runtime.contract"),
    ],
)
def test_an_arrow_up_is_found(module: str, source: str, other: str) -> None:
    assert upward(module, source) == {(module, other)}
