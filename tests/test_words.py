"""One noun has one meaning, one file name is one thing, and docstrings are plain English."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "diskprefix"
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}

SAME_FILES = {
    "__init__": "Python's name for a package",
}
"""File names that several packages may have, and why."""

QUESTIONS = {"What", "Which", "Whether", "How", "Why", "Who", "Where", "When"}
RIDDLES = re.compile(r"\b(of which nobody|of whom nobody|so many\b[^.]*\bso long|(is|are) told|what is stored of it)\b")


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the docstrings of a module, its classes and functions, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def faults(text: str) -> list[str]:
    """Returns the words of a docstring that it must not have."""
    first = text.split()[0]
    return [first] * (first in QUESTIONS) + [found[0] for found in RIDDLES.finditer(text)]


def doubled(names: list[str]) -> list[str]:
    return sorted(name for name, number in Counter(names).items() if number > 1)


def test_no_two_classes_have_one_name() -> None:
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    assert doubled([node.name for node in nodes if isinstance(node, ast.ClassDef)]) == []


def test_no_two_files_have_one_name() -> None:
    assert set(doubled([path.stem for path in TREES])) <= set(SAME_FILES)


@pytest.mark.parametrize("path", TREES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_docstrings_say_what_something_does_or_is(path: Path) -> None:
    assert [(line, faults(text)) for line, text in docstrings(TREES[path]) if faults(text)] == []


@pytest.mark.parametrize("text", ["What a page shows.", "Whether it is so.", "The caller, who is told of it."])
def test_the_rule_finds_riddles(text: str) -> None:
    assert faults(text)


@pytest.mark.parametrize("text", ["Returns what a page shows.", "A page."])
def test_the_rule_leaves_plain_words_alone(text: str) -> None:
    assert not faults(text)
