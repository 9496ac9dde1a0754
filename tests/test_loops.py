"""Each loop between a request and the disk has an upper bound, which is evident or argued beside it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.source_files import PACKAGE, modules_in

FILES = modules_in("prefixstore/cache", "prefixstore/kv", "prefixstore/store", "daemon/engine")
MARK = "# Bound: "
TAKES, ADDS = ("pop", "popleft", "popitem", "remove"), ("append", "appendleft", "extend", "insert", "add", "update")
ENDLESS = ("count", "cycle", "repeat")
"""Iterators of `itertools` that may not end."""


def called_on(node: ast.AST) -> tuple[str, str]:
    """Returns the text of an object and the name of its method that a node calls; empty texts for other nodes."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return ast.unparse(node.func.value), node.func.attr
    return "", ""


def is_evident(loop: ast.While) -> bool:
    """Tells whether a loop takes from a container that it looks at and adds nothing to it, or counts a number up to a
    bound or down to it."""
    looked_at = {ast.unparse(node) for node in ast.walk(loop.test) if isinstance(node, ast.Name | ast.Attribute)}
    inside = [node for statement in loop.body for node in ast.walk(statement)]
    calls = [called_on(node) for node in inside]
    grows = {name for name, method in calls if method in ADDS}
    grows |= {ast.unparse(node.target) for node in inside if isinstance(node, ast.AugAssign)}
    takes = {name for name, method in calls if method in TAKES}
    if looked_at & takes and not looked_at & grows:
        return True
    counted = {ast.unparse(node.target) for node in loop.body if isinstance(node, ast.AugAssign)}
    return isinstance(loop.test, ast.Compare) and len(looked_at & counted) == 1 and not looked_at & takes


def is_argued(lines: list[str], number: int) -> bool:
    """Tells whether the comment directly above a line (from 1) argues its bound."""
    above = number - 2
    while above >= 0 and lines[above].lstrip().startswith("#"):
        if lines[above].lstrip().startswith(MARK):
            return True
        above -= 1
    return False


def recursive_calls(tree: ast.AST, *, in_class: bool = False) -> Iterator[tuple[ast.AST, ast.Call]]:
    """Yields each function that calls itself by its name, with the call."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            own = (f"self.{node.name}", f"cls.{node.name}") if in_class else (node.name,)
            for call in ast.walk(node):
                if isinstance(call, ast.Call):
                    # Also as an argument: `map(self._part, parts)`.
                    named = [call.func, *call.args]
                    if any(isinstance(name, ast.Name | ast.Attribute) and ast.unparse(name) in own for name in named):
                        yield node, call
        yield from recursive_calls(node, in_class=isinstance(node, ast.ClassDef))


def unbounded(source: str) -> list[int]:
    """Returns the lines of the loops, endless iterators and recursions that have no bound beside them."""
    lines, tree, found = source.splitlines(), ast.parse(source), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.While) and not is_evident(node) and not is_argued(lines, node.lineno):
            found.add(node.lineno)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).removeprefix("itertools.")
            is_endless = (name == "iter" and len(node.args) == 2) or (name in ENDLESS and len(node.args) < 2)
            if is_endless and not is_argued(lines, node.lineno):
                found.add(node.lineno)
    for function, _ in recursive_calls(tree):
        body = lines[function.lineno - 1 : function.end_lineno]  # type: ignore[attr-defined]
        if not any(line.lstrip().startswith(MARK) for line in body):
            found.add(function.lineno)  # type: ignore[attr-defined]
    return sorted(found)


def test_each_loop_has_an_upper_bound() -> None:
    """Evident in its condition, or in a comment above it that begins with "Bound:"."""
    assert {str(file.relative_to(PACKAGE)): lines for file in FILES if (lines := unbounded(file.read_text()))} == {}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("while True:\n    step()\n", [1]),
        ("# Bound: a round removes a node.\nwhile True:\n    step()\n", []),
        ("# Bound: a round removes a node.\n# And more.\nwhile True:\n    step()\n", []),
        ("# Bound: of something else.\nstep()\nwhile True:\n    step()\n", [3]),
        ("while todo:\n    todo.pop()\n", []),
        ("while len(todo) > 1:\n    todo.popitem()\n", []),
        ("while todo:\n    todo.extend(more(todo.pop()))\n", [1]),
        ("while todo:\n    todo += more(todo.pop())\n", [1]),
        ("while todo:\n    step()\n", [1]),
        ("while done < stop:\n    done += 1\n", []),
        ("while done < stop:\n    if ready:\n        done += 1\n", [1]),
        ("while name != root:\n    name = parent[name]\n", [1]),
        ("for line in iter(read, b''):\n    step()\n", [1]),
        ("for number in itertools.count():\n    step()\n", [1]),
        ("def walk(node):\n    return [walk(child) for child in node]\n", [1]),
        ("class Tree:\n    def walk(self, node):\n        return map(self.walk, node)\n", [2]),
        ("class Store:\n    def purge(self):\n        return purge(self)\n", []),
    ],
)
def test_a_loop_without_a_bound_is_found(source: str, lines: list[int]) -> None:
    assert unbounded(source) == lines
