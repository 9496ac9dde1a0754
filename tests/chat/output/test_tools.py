"""What a text without quotes stands for, by the schema of its argument."""

from __future__ import annotations

from typing import Any

import pytest

from diskprefix.chat.output.tools import Tools, value_of
from tests.chat.output.replies import format_named, read, tool


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
    assert Tools([odd]).properties("f") == {}


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
