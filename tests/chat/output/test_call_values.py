"""Values of arguments without quotes, by their schema, and calls that are not JSON."""

from __future__ import annotations

from typing import Any

import pytest

from diskprefix.chat.output.call_values import OfferedTools, braces, elements, python_calls, value_of
from tests.chat.output.replies import format_named, read, tool

TOOLS = OfferedTools([tool("f", a={}, b={}), tool("x.call")])


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("7", {"type": "integer"}, 7),
        ("true", {"type": "integer"}, "true"),
        ("true", {"type": ["boolean", "string"]}, True),
        ("null", {"type": "string"}, "null"),
        ("null", {"type": "string", "nullable": True}, None),
        ('"a"', {"type": "string"}, '"a"'),
        ('"a"', {"type": ["string", "null"]}, "a"),
        ("7", {"enum": ["7", "8"]}, "7"),
        ("7", {"type": "integer", "enum": [7]}, 7),
        ("7", {"type": "integer", "enum": ["7"]}, 7),
        ("7", {"anyOf": [{"type": "string"}]}, "7"),
        ("[1]", {"type": "array"}, [1]),
        ("[1]", {"type": "object"}, "[1]"),
        ("7", True, 7),
        ("Oslo", {}, "Oslo"),
    ],
)
def test_a_text_is_a_value_of_a_type_that_the_schema_allows_and_else_stays_text(
    text: str, schema: Any, value: object
) -> None:
    assert value_of(text, schema) == value


def test_a_tool_whose_schema_lists_no_properties_has_none() -> None:
    odd = tool("f")
    odd["function"]["parameters"]["properties"] = ["a"]
    assert OfferedTools([odd]).properties("f") == {}


NS = "]<]minimax[>["


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("glm", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>", "</arg_value>\n</tool_call>"),
        ("glm-4.7", "<tool_call>f<arg_key>b</arg_key><arg_value>", "</arg_value></tool_call>"),
        ("gemma-4", "<|tool_call>call:f{b:", "}<tool_call|>"),
        ("pythonic", "[f(b=", ")]"),
        ("minimax-3", f'{NS}<tool_call>\n{NS}<invoke name="f">', f"{NS}</invoke>\n{NS}</tool_call>"),
    ],
)
def test_arguments_that_are_nested_too_deeply_stay_text(name: str, begin: str, end: str) -> None:
    opened, closed = (f"{NS}<b>", f"{NS}</b>") if name == "minimax-3" else ("[", "]")
    tools = [tool("f", a={"type": "array"}, b={})]
    for depth in (*range(900, 1010), 20_000):
        reply = read(format_named(name), [f"{begin}{opened * depth}{closed * depth}{end}"], tools)
        assert opened in reply.content or [name for name, _ in reply.calls] == ["f"]


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
