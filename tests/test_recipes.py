"""Each house's page has the recipes of what is added often, and each step names what there is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.source_files import MAY_GO, PACKAGE

ROOT = PACKAGE.parent
HOUSES = ("prefixstore", "runtime", "daemon", "desk", "bridges")
RECIPES = {
    "prefixstore": {"a field of a record", "a type of note"},
    "runtime": {"a runtime", "a quant"},
    "daemon": {"an option", "a metric", "a route"},
    "bridges": {"a bridge"},
}
"""Those that must be there. A house may have more."""
PAGES = [page for house in HOUSES if (page := PACKAGE / house / "README.md").is_file()]
RECIPE = re.compile(r"^### (.+)\n((?:(?!^#).*\n?)+)", re.MULTILINE)
STEP = re.compile(r"^(\d+)\. ", re.MULTILINE)
PATH = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|h|cpp|md|toml|env))`")
NAME = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)`")
"""A function, class, member, constant or word of a file."""


def recipes_of(page: Path) -> dict[str, str]:
    text = page.read_text(encoding="utf-8").partition("\n## Recipes\n")[2].partition("\n## ")[0]
    return {title.lower(): body for title, body in RECIPE.findall(text)}


CASES = [pytest.param(page, title, id=f"{page.parent.name}: {title}") for page in PAGES for title in recipes_of(page)]


def place(page: Path, path: str) -> Path | None:
    """Returns the file that a page names: from its own folder, or from the root."""
    return next((file for base in (page.parent, ROOT) if (file := base / path).is_file()), None)


def defined_in(file: Path) -> set[str]:
    """Returns what a file defines, and the words that stand alone in its strings, such as keys. For another language
    than Python, returns all words."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        return set(re.findall(r"\w+", text))
    names = set[str]()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                names.add(name)
            case ast.Constant(value=str(word)):
                names.add(word)
    return names


def missing(page: Path, recipe: str) -> Iterator[str]:
    """Yields the files of a recipe that are not there, and the names that no file defines which it names before, or in
    the same step."""
    defined = set[str]()
    for step in re.split(r"^(?=\d+\. )", recipe, flags=re.MULTILINE):
        for path in PATH.findall(step):
            file = place(page, path)
            if file is None:
                yield path
            else:
                defined |= defined_in(file)
        names = NAME.findall(PATH.sub("", step))
        yield from (name for name in names if not {*name.split(".")} <= defined)


def test_each_house_has_a_page_with_its_recipes() -> None:
    pages = {page.parent.name: recipes_of(page).keys() for page in PAGES}
    assert {house for house in HOUSES if house not in pages} <= {*MAY_GO}
    assert {house: names - pages[house] for house, names in RECIPES.items() if house in pages} == {
        house: set() for house in RECIPES if house in pages
    }


@pytest.mark.parametrize(("page", "title"), CASES)
def test_each_step_names_files_and_names_that_there_are(page: Path, title: str) -> None:
    recipe = recipes_of(page)[title]
    numbers = [int(number) for number in STEP.findall(recipe)]
    assert numbers == list(range(1, len(numbers) + 1)), "steps in order"
    assert numbers
    assert PATH.findall(recipe), "a recipe names the files to touch"
    assert list(missing(page, recipe)) == []


def test_a_step_about_something_that_is_gone_is_found() -> None:
    page = PACKAGE / "runtime/README.md"
    steps = "1. `TYPES` and `FORMS` in `../native/packing.py`, `pack` in `files/gone.py`.\n2. `NOWHERE`, `TYPES`.\n"
    assert list(missing(page, steps)) == ["files/gone.py", "FORMS", "NOWHERE"]
    steps = "1. A method of `Runtime.run`.\n2. `contract.py` has `Runtime`.\n"
    assert list(missing(page, steps)) == ["Runtime.run"], "a step stands with those before it"
