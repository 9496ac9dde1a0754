"""Calls that are no JSON: what is read, and what is not."""

from __future__ import annotations

from typing import Any

import pytest

from diskprefix.chat.output.dialects import braces, elements, python_calls
from diskprefix.chat.output.tools import Tools
from tests.chat.output.replies import tool

TOOLS = Tools([tool("f", a={}, b={}), tool("x.call")])


@pytest.mark.parametrize(
    ("source", "calls"),
    [
        ("f(1, b=2)", [("f", {"a": 1, "b": 2})]),
        ("call = f(a=(true, false, null))", [("f", {"a": [True, False, None]})]),
        ("f(a={'k': -1}), f()", [("f", {"a": {"k": -1}}), ("f", {})]),
        (r'f(a="\ud83d\ude00", b="\'")', [("f", {"a": "😀", "b": "'"})]),
        ("y.call(a=1)", [("y", {"a": 1})]),
        ("x.call(a=1)", [("x.call", {"a": 1})]),
        ("f(1, 2, 3)", []),
        ("f(**{'a': 1})", []),
        ("f(a=1e999)", []),
        ("f(a=b'z')", []),
        ("f(a={1: 2})", []),
        ("f(a=g())", []),
        ("f(); import os", []),
        (f"f(a={'-' * 20_000}1)", []),
    ],
)
def test_python_is_read_only_if_it_is_calls_with_values_that_json_knows(source: str, calls: list[Any]) -> None:
    assert python_calls(source, TOOLS) == calls


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{a:`x "y" {z:`,"b:c":1}', {"a": 'x "y" {z:', "b:c": 1}),
        ("[1]", None),
        ("{a:" + "[" * 100_000, None),
    ],
)
def test_an_object_with_bare_keys_is_read_as_json_with_other_quotes(text: str, value: Any) -> None:
    assert braces(text, "`") == value


ITEM = {"properties": {"a": {"properties": {"item": {"type": "integer"}}}}}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("", {}, {}),
        ("#<a>#<item>1#</item>#</a>", {}, {"a": [1]}),
        ("#<a>#<item>1#</item>#</a>", ITEM, {"a": {"item": 1}}),
        ("#<a>#<b>1#</b>#</a>", {"properties": {"a": True}}, {"a": {"b": 1}}),
        ("#<a>#<b>1#</b>#</a>", {"properties": {"a": {"properties": 5}}}, {"a": {"b": 1}}),
        ("#<a>1#</b>", {}, None),
        ("#<a>1", {}, None),
        ("1#</a>", {}, None),
        ("#</a>", {}, None),
        ("text #<a>1#</a>", {}, None),
    ],
)
def test_elements_are_a_value_only_if_each_of_them_ends(text: str, schema: Any, value: Any) -> None:
    assert elements(text, "#", schema) == value
