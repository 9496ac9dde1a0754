"""No function over a client's JSON takes more than linear time, and each takes any JSON where a client may send any."""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diskprefix.daemon.api.openai_chat import ChatRequest
from diskprefix.daemon.server.body import parse_json
from diskprefix.errors import InvalidRequest
from tests.client_json import BIG, NESTED, WALKS, WIDE, WORD, TooMuch, Work, nested, random_json
from tests.examples import examples
from tests.exceptions import exceptions
from tests.source_files import PACKAGE, modules_in

LEVELS, PARTS = 9, 32
"""The sizes of the small value. The body of a request has less than 200 levels."""
TIMES, SLACK = 4, 1.5
"""How much larger the large value is, and how much more its work may grow."""


def values(size: int) -> Iterator[tuple[str, Any]]:
    """Returns values whose sizes grow as `size`, with a name each."""
    for name in NESTED:
        yield f"nested by {name}", nested(name, size * LEVELS)
        yield f"nested by {name}, a big integer inside", nested(name, size * LEVELS, BIG)
    for name, make in WIDE.items():
        yield f"wide by {name}", make(size * PARTS)


@pytest.mark.cases(1)
@pytest.mark.parametrize("walk", WALKS)
def test_the_work_grows_as_the_value(walk: str) -> None:
    run = WALKS[walk]
    run(WORD)
    too_much = []
    for (name, small), (_, large) in zip(values(1), values(TIMES), strict=True):
        work = Work().of(run, small)
        try:
            Work(limit=TIMES * SLACK * work).of(run, large)
        except TooMuch:
            too_much.append(name)
    assert too_much == []


@pytest.mark.cases(8)
@pytest.mark.parametrize("walk", WALKS)
def test_each_takes_any_json_where_a_schema_may_stand(walk: str) -> None:
    chosen = random.Random(6)
    hostile: list[Any] = [{"required": [[1]], "properties": {"a": {}}}, {"properties": {"a": {"required": [{}]}}}]
    for value in hostile + [random_json(chosen) for _ in range(examples(80))]:
        WALKS[walk](value)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", NESTED)
def test_the_deepest_json_that_a_body_may_hold_is_taken_by_each(name: str) -> None:
    """Deeper JSON is refused where a body is parsed, before any of them runs."""

    def refusal_of(depth: int) -> str:
        body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"x": nested(name, depth)}}
        try:
            parse_json(json.dumps(body).encode(), ChatRequest)
        except InvalidRequest as error:
            return error.message
        return ""

    deepest = next(depth for depth in range(1, 201) if refusal_of(depth + 1))
    assert re.match(r"chat_template_kwargs\.x\..*: has more than 200 objects and lists", refusal_of(deepest + 1))
    assert deepest > 40
    for walk in WALKS.values():
        walk(nested(name, deepest))


CHECKED = (
    "daemon/api",
    "daemon/chat",
    "daemon/engine/constraints",
    "daemon/server",
    "daemon/catalogue",
    "daemon/compression",
    "daemon/embedding",
    "daemon/infill",
    "daemon/ollama",
    "daemon/router",
    "prefixstore/packs",
    "prefixstore/recording",
    "prefixstore/remote",
    "prefixstore/simulate",
    "runtime/library",
    "runtime/pictures",
    "desk",
    "bridges",
)
OF_OTHERS = {
    **exceptions("CALL_THEMSELVES"),
    "daemon/api/fields.py": {"_as_json"},  # the models of our own bodies
    "daemon/chat/client_text.py": {"_alternatives"},  # the texts of the model's tokens
    "daemon/chat/template.py": {"differ"},  # likewise
    "daemon/server/openapi.py": {"_type"},  # the schemas of our own bodies
}
"""Functions that call themselves for what no client sends."""


def recursive_functions(path: Path) -> set[str]:
    """Returns the names of the functions in a file that call themselves, or hand themselves to another function."""
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    methods = {id(node) for of_class in nodes if isinstance(of_class, ast.ClassDef) for node in of_class.body}
    found = set[str]()
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            inside = [*ast.walk(node)]
            names = {(inner.id, type(inner.ctx)) for inner in inside if isinstance(inner, ast.Name)}
            of_self = {
                inner.func.attr
                for inner in inside
                if isinstance(inner, ast.Call)
                and isinstance(inner.func, ast.Attribute)
                and isinstance(inner.func.value, ast.Name)
                and inner.func.value.id == "self"
            }
            is_used = (node.name, ast.Load) in names and (node.name, ast.Store) not in names
            if node.name in of_self if id(node) in methods else is_used:
                found.add(node.name)
    return found


@pytest.mark.slow
def test_each_function_that_calls_itself_is_among_those_that_are_measured() -> None:
    """Such a function walks something nested. A new one that walks a client's JSON needs a walk in `client_json.py`."""
    work = Work()
    for walk in WALKS.values():
        for value in [nested(name, 2, BIG) for name in NESTED] + [make(3) for make in WIDE.values()]:
            work.of(walk, value)
    ran = {(code.co_filename, code.co_name) for code in work.ran}
    found = {(path, name) for path in modules_in(*CHECKED) for name in recursive_functions(path)}
    assert len(found) > 5
    unmeasured = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path, name in found
        if (str(path), name) not in ran and name not in OF_OTHERS.get(str(path.relative_to(PACKAGE)), ())
    }
    assert unmeasured == set()
