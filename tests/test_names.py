"""A verb of the core has its object: no name of one word has many definitions, so a search for a call leads to one."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import pytest

from tests.source_files import modules_in

CORE = modules_in("prefixstore/cache", "daemon/engine", "prefixstore/kv", "prefixstore/store")
MOST_DEFINITIONS = 5
EXCEPT = {"close", "run"}
"""Verbs whose object is always what they are called on."""

Classes = Mapping[str, ast.ClassDef]


def is_one_word(name: str) -> bool:
    """Returns whether a function's name is a verb or noun without an object."""
    return not name.startswith("__") and "_" not in name.strip("_") and name.strip("_") not in EXCEPT


def functions_in(node: ast.AST) -> set[str]:
    children = ast.iter_child_nodes(node)
    return {child.name for child in children if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)}


def bases_of(owner: ast.ClassDef, classes: Classes) -> Iterator[ast.ClassDef]:
    """Yields the classes that a class inherits from, the nearest first."""
    for base in owner.bases:
        name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
        if name in classes and classes[name] is not owner:
            yield classes[name]
            yield from bases_of(classes[name], classes)


def is_protocol(owner: ast.ClassDef) -> bool:
    return any(ast.unparse(base).partition("[")[0] == "Protocol" for base in owner.bases)


def defining_class(owner: ast.ClassDef, name: str, classes: Classes) -> ast.ClassDef:
    """Returns the class that says what a method does: the farthest base with it, or a protocol all of whose methods
    `owner` has."""
    ancestors = [owner, *bases_of(owner, classes)]
    methods = {method for ancestor in ancestors for method in functions_in(ancestor)}
    served = [other for other in classes.values() if is_protocol(other) and functions_in(other) <= methods]
    ancestors += [base for protocol in served for base in (protocol, *bases_of(protocol, classes))]
    return [ancestor for ancestor in ancestors if name in functions_in(ancestor)][-1]


def names_above(most: int, sources: Iterable[str]) -> dict[str, int]:
    """Returns the names of one word with more definitions than `most`. A method counts once with what it overrides and
    with the protocol that it is a part of."""
    trees = [ast.parse(source) for source in sources]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    owners: dict[str, set[ast.AST]] = defaultdict(set)
    for node in nodes:
        for name in filter(is_one_word, functions_in(node)):
            owner = defining_class(node, name, classes) if isinstance(node, ast.ClassDef) else node
            owners[name.strip("_")].add(owner)
    return {name: len(places) for name, places in sorted(owners.items()) if len(places) > most}


def test_a_name_without_an_object_has_few_definitions() -> None:
    """Else name the object too: `take_pages`, not `take`."""
    assert names_above(MOST_DEFINITIONS, [file.read_text(encoding="utf-8") for file in CORE]) == {}


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ("class A:\n def take(self): ...\nclass B:\n def _take(self): ...\ndef take(): ...\n", 3),
        ("class A:\n def take(self):\n  def take(): ...\n", 2),
        ("class A:\n def take_pages(self): ...\nclass B:\n def take_rows(self): ...\n", 0),
        ("class A:\n def close(self): ...\n def __enter__(self): ...\nclass B:\n def close(self): ...\n", 0),
        ("class A:\n def take(self): ...\nclass B(A):\n def take(self): ...\nclass C(B):\n def take(self): ...\n", 1),
        ("class P(Protocol):\n def take(self): ...\n def give(self): ...\nclass A:\n def take(self): ...\n", 2),
        ("class P(Protocol):\n def take(self): ...\nclass A:\n def take(self): ...\n def give(self): ...\n", 1),
    ],
)
def test_definitions_are_counted_by_their_meaning(source: str, number: int) -> None:
    assert names_above(0, [source]).get("take", 0) == number
