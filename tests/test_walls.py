"""Houses import only the houses below them, in names of strings too, and nothing names what can be taken away."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from diskprefix import prefixstore
from tests.exceptions import exceptions
from tests.source_files import PACKAGE, TESTS, parts
from tests.test_packages import SOURCES, imported_names
from tests.test_project import PAGES, files_named
from tools.faults.walls import LIBRARIES

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


FACE = PACKAGE / "prefixstore/FACE.md"
"""What other houses may import of the store, and what each verb does to threads and memory."""
PAST_THE_FACE = {"daemon": 55, "runtime": 28, **exceptions("PAST_THE_FACE")}
"""How many names of `prefixstore` that are not on the page of its face each house imports. Only smaller. The desk may
look inside: its commands are the store's own tools."""


def names_of_the_face(page: str) -> set[str]:
    """Returns the names, relative to `diskprefix.prefixstore`, that a page lists as those of its face."""
    lists = re.findall(r"^\* \*\*From `([\w/]+)\.py`:\*\* ((?:`\w+`,?\s+)+)", page, re.MULTILINE)
    return {f"{file.replace('/', '.')}.{name}" for file, text in lists for name in re.findall(r"\w+", text)}


def names_imported(houses: Iterable[str]) -> dict[str, set[str]]:
    """Returns the names of the store that each house imports, relative to `diskprefix.prefixstore`."""
    names: dict[str, set[str]] = {house: set() for house in houses}
    for module, source in SOURCES.items():
        if (house := house_of(module)) in names:
            imported = (name for name in imported_names(source) if name.startswith("diskprefix.prefixstore."))
            names[house] |= {name.removeprefix("diskprefix.prefixstore.") for name in imported}
    return names


def test_houses_import_ever_fewer_names_from_inside_the_store() -> None:
    face = names_of_the_face(FACE.read_text(encoding="utf-8")) | {*dir(prefixstore)}
    names = names_imported(PAST_THE_FACE)
    assert {house: len(imported - face) for house, imported in names.items()} == PAST_THE_FACE


def test_the_page_of_the_face_lists_what_there_is_and_all_that_programs_use() -> None:
    face = names_of_the_face(FACE.read_text(encoding="utf-8"))
    for name in face:
        module, _, attribute = name.rpartition(".")
        assert hasattr(import_module(f"diskprefix.prefixstore.{module}"), attribute), name
    assert {f"{place}.{name}" for name, place in prefixstore._PLACES.items()} <= face


def test_names_of_the_face_are_read_from_its_page() -> None:
    page = "* **From `a/b.py`:** `C`, `d`,\n  `E`\n* **From `f.py`:** `g`\n\n| `h` |\n"
    assert names_of_the_face(page) == {"a.b.C", "a.b.d", "a.b.E", "f.g"}


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


def imported_at_once(source: str) -> set[str]:
    """Returns the packages that a module imports when it is imported itself."""
    waiting: list[ast.AST] = [ast.parse(source)]
    found = set[str]()
    while waiting:
        node = waiting.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue
            case ast.Import(names=names):
                found |= {name.name.partition(".")[0] for name in names}
            case ast.ImportFrom(module=str(name)):
                found.add(name.partition(".")[0])
        waiting += ast.iter_child_nodes(node)
    return found


def test_the_store_and_the_ground_are_imported_with_the_libraries_that_its_page_names() -> None:
    """`tools/bench walls` imports them, and runs the store's tests, in an environment that has no others."""
    houses = {"ground", "prefixstore"}
    found = set().union(*(imported_at_once(text) for name, text in SOURCES.items() if house_of(name) in houses))
    assert found - sys.stdlib_module_names - {"diskprefix"} == {*LIBRARIES}
    page = " ".join((PACKAGE / "prefixstore/README.md").read_text(encoding="utf-8").split())
    assert f"of libraries {', '.join(LIBRARIES[:-1])} and {LIBRARIES[-1]};" in page


# What can be taken away, and its tests: `tools/bench walls` takes each away and runs what is left.

ROOT = PACKAGE.parent
PARTS = parts()
_OF_A_PART = re.compile(rf"(?:(?:diskprefix|tests)[./])?({'|'.join(PARTS).replace('/', '[./]') or '(?!)'})(?:[./]|$)")
KNOWN_BY_NAME = {
    ("tests/desk/clients/test_launch.py", "desk/talk"),
    ("tests/faults/power/deeds.py", "desk/clients"),
    ("tests/desk/shared/test_own_daemon.py", "desk/watch"),
    ("tests/test_packages.py", "desk/warm"),
    ("tests/test_packages.py", "desk/watch"),
    ("tests/test_walls.py", "bridges"),
    ("tools/benchmarks/engines.py", "bridges"),
}
"""Names in strings, which are looked up only if there is the part."""


def part_of(name: object) -> str | None:
    """Returns the part that a module, or a file given from the root, belongs to; None for every other one."""
    match = _OF_A_PART.match(str(name))
    return match[1].replace(".", "/") if match else None


def parts_named(source: str) -> set[str]:
    """Returns the parts whose modules, or whose tests, a source imports or names in strings."""
    if not any(part.replace("/", ".") in source for part in PARTS):
        return set()  # Nothing needs to be parsed.
    return {part for name in (*modules_named(source), *imported_names(source)) if (part := part_of(name))}


def parts_on(page: Path) -> set[str]:
    """Returns the parts that a page has links to, or of which it names a file that is nowhere else."""
    text, found = page.read_text(encoding="utf-8"), set[str]()
    for target in re.findall(r"\]\(([^)#:]+)", text):
        found |= {part for part in [part_of(_from_root((page.parent / target).resolve()))] if part}
    for code in {*re.findall(r"`([\w./-]+\.\w+)`", text)} & ends_of_files():
        places = {part_of(_from_root(path)) for path in files_named(code, page)}
        found |= {part for part in places if part and len(places) == 1}
    return found


@cache
def ends_of_files() -> set[str]:
    """Returns all ends of the paths of files of parts, as pages may name them."""
    files = [
        file.relative_to(ROOT).parts for top in (PACKAGE, TESTS) for part in PARTS for file in (top / part).rglob("*")
    ]
    return {"/".join(names[start:]) for names in files for start in range(len(names))}


def _from_root(path: Path) -> Path:
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def test_nothing_imports_what_can_be_taken_away_but_itself_and_its_tests() -> None:
    found = set()
    for folder in ("diskprefix", "tests", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            own = _from_root(path)
            found |= {(str(own), part) for part in parts_named(path.read_text(encoding="utf-8")) - {part_of(own)}}
    assert found - KNOWN_BY_NAME == set()


def test_no_page_names_a_file_of_what_can_be_taken_away_but_its_own_pages() -> None:
    found = {(str(_from_root(page)), part) for page in PAGES for part in parts_on(page) - {part_of(_from_root(page))}}
    assert found == set()


def test_a_part_that_is_named_is_found(tmp_path: Path) -> None:
    sources = {"from tests.PART.test_it import X", "import diskprefix.PART.x", "from diskprefix import errors\nPART.x"}
    for part in PARTS:
        named = [parts_named(source.replace("PART", part.replace("/", "."))) for source in sorted(sources)]
        assert named == [set(), {part}, {part}]
        page = tmp_path / "page.md"
        page.write_text(f"[a link]({PACKAGE / part}#there), `nothing.py`", encoding="utf-8")
        assert parts_on(page) == {part}
