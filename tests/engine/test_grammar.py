"""Constraints that cannot be compiled: what the client is told, and that hostile ones cost little."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from diskprefix.engine.constrained_reply import ConstraintCompiler
from diskprefix.engine.constraint_grammar import repeated
from diskprefix.engine.request import Constraint
from diskprefix.errors import InvalidRequest

OBJECT = {"type": "object", "additionalProperties": False}


def refusal(compiler: ConstraintCompiler, kind: Any, source: str) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        compiler.check(Constraint(kind=kind, source=source), param="format.it")
    error = caught.value
    assert error.message.startswith(f"{error.param}: ")
    assert "\n" not in error.message
    assert len(error.message) < 500
    return error


@pytest.mark.parametrize(
    ("schema", "place", "message"),
    [
        ({"type": "array", "uniqueItems": True}, "", "uniqueItems"),
        ({"properties": {"a": {"items": {"not": {}}}}}, ".properties.a.items", "not"),
        ({"properties": {"a": {"anyOf": [{}, {"type": "flot"}]}}}, ".properties.a.anyOf.1", "flot"),
        ({"properties": {"a": {"pattern": "(?=x)"}}}, ".properties.a", "look"),
        ({"$defs": {"d": {"contains": {}}}, "properties": {"a": {"$ref": "#/$defs/d"}}}, ".$defs.d", "contains"),
        (
            {"$defs": {"d": {}}, "items": {"properties": {"a": {"$ref": "#/$defs/d"}, "b": {"not": {}}}}},
            ".items.properties.b",
            "not",
        ),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, ".properties.a", "none"),
        ({"properties": {"a": {"$ref": "https://example.com/a"}}}, ".properties.a", "example.com"),
        ({"properties": {"a": {"format": "no-such"}}}, ".properties.a", "no-such"),
        ({"properties": {"a": {"minLength": -1}}}, ".properties.a", "minLength"),
        (
            {**OBJECT, "properties": {"a": {"type": "integer", "minimum": 2, "maximum": 1}}, "required": ["a"]},
            ".properties.a",
            "minimum",
        ),
        ({"properties": {"a": {"oneOf": [{"type": "object"}, {}]}}}, ".properties.a", "oneOf"),
        ({"properties": {"a": {"type": "object", "minProperties": 2}}}, ".properties.a", "minProperties"),
        ({"properties": 3}, "", "properties"),
        ({"x-guidance": {"lenient": True}, "uniqueItems": True}, "", "uniqueItems"),
        (False, "", "object"),
    ],
    ids=json.dumps,
)
def test_a_schema_that_cannot_be_compiled_is_refused_with_its_place(
    compiler: ConstraintCompiler, schema: Any, place: str, message: str
) -> None:
    error = refusal(compiler, "json_schema", json.dumps(schema))
    assert error.param == f"format.it{place}"
    assert message in error.message


def test_of_two_places_at_fault_the_first_is_named(compiler: ConstraintCompiler) -> None:
    schema = {"properties": {"a": {}, "b": {"uniqueItems": True}, "c": {"uniqueItems": True}}}
    assert refusal(compiler, "json_schema", json.dumps(schema)).param == "format.it.properties.b"


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", "{"),
        ("json_schema", '"text"'),
        ("json_schema", '{"enum": [NaN]}'),
        ("choice", "[]"),
        ("choice", '["a", 1]'),
        ("choice", "a"),
        ("lark", ""),
        ("lark", "start: missing"),
        ("lark", "start: /(a/"),
        ("lark", "start: <|no_such_token|>"),
    ],
)
def test_what_cannot_be_read_is_refused(compiler: ConstraintCompiler, kind: Any, source: str) -> None:
    assert refusal(compiler, kind, source).param == "format.it"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#"}}}, "required": ["a"]},
        {"type": ["object", "null"], "required": ["a"], "minProperties": 1, "title": "t", "x-mine": 1, "default": {}},
        {"type": "integer"},
        {},
    ],
    ids=json.dumps,
)
def test_what_schemas_of_tools_hold_is_compiled(compiler: ConstraintCompiler, schema: Any) -> None:
    compiler.check(Constraint(kind="json_schema", source=json.dumps(schema)), param="format.it")


def test_keywords_that_change_nothing_are_no_error_and_constrain_nothing(compiler: ConstraintCompiler) -> None:
    with_notes = {**OBJECT, "description": "d", "deprecated": True, "examples": [{}], "$comment": "c"}
    compiler.check(Constraint(kind="json_schema", source=json.dumps(with_notes)), param="format.it")


DEEP = 100_000
REFUSED = {
    "deep lists": ("json_schema", '{"enum": ' + "[" * DEEP + "]" * DEEP + "}", "recursion"),
    "deep schema": ("json_schema", '{"items": ' * 5000 + "{}" + "}" * 5000, "recursion"),
    "a schema too deep for llguidance": ("json_schema", '{"items": ' * 300 + "{}" + "}" * 300, "recursion"),
    "reference to itself": ("json_schema", '{"$ref": "#"}', "no text satisfies it"),
    "references in a circle": (
        "json_schema",
        '{"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}',
        "no text satisfies it",
    ),
    "a product of choices": (
        "json_schema",
        json.dumps({"allOf": [{"anyOf": [{"minimum": i}, {"maximum": i}]} for i in range(30)]}),
        "too large",
    ),
    "a proof that takes minutes": (
        "json_schema",
        json.dumps({"allOf": [{"type": "string", "pattern": f"^.*a.{{{i}}}b.*$"} for i in range(30)]}),
        "too complex to be compiled",
    ),
    "pattern of many states": ("json_schema", json.dumps({"pattern": "((a{1000}){1000}){1000}"}), "repeats something"),
    "deep pattern": ("json_schema", json.dumps({"pattern": "(" * DEEP + "a" + ")" * DEEP}), "nested"),
    "too long": ("choice", json.dumps(["a" * 1000] * 1000), "characters; at most"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_constraints_are_refused(compiler: ConstraintCompiler, name: str) -> None:
    kind, source, message = REFUSED[name]
    assert message in refusal(compiler, kind, source).message


PATTERNS: dict[str, Any] = {f"^a{{{i}}}.*b{{{i}}}$": {} for i in range(1, 2001)}
LIMITED = {
    ".items.patternProperties": {"items": {"patternProperties": PATTERNS}},
    ".allOf": {"allOf": [{}] * 100},
    ".items.pattern": {"items": {"type": "string", "pattern": "(x[(]{3}|((a{100}){100}){100})*"}},
    ".patternProperties.(a{1000}){1000}": {"patternProperties": {"(a{1000}){1000}": {}}},
    "": {"anyOf": [{"const": i} for i in range(20_000)]},
}


@pytest.mark.parametrize("place", LIMITED)
def test_what_is_too_much_is_refused_by_its_number_with_its_place(compiler: ConstraintCompiler, place: str) -> None:
    error = refusal(compiler, "json_schema", json.dumps(LIMITED[place]))
    assert error.param == f"format.it{place}"
    assert re.search(r"\d+", error.message)


@pytest.mark.parametrize(
    ("pattern", "times"),
    [
        ("", 1),
        ("a*b+c?", 1),
        ("a{7}|b{9}", 9),
        ("((a{2}){3}|b{4}){5}", 30),
        ("a{2}{3}", 6),
        ("(a{2,}){,4}(b{3,5})", 8),
        (r"\(a{3}\){4}", 4),
        (r"[({\]]{3}[^)]{2}", 3),
        ("(a{0}){9}", 9),
        ("a{99999999999999999999}", 100_001),
        ("{}{a}{{2}", 2),
        (")))a{2}", 2),
    ],
)
def test_repetitions_in_repetitions_are_multiplied(pattern: str, times: int) -> None:
    assert repeated(pattern) == times


def test_of_several_schemas_the_one_at_fault_is_named(compiler: ConstraintCompiler) -> None:
    bad = {"properties": {"z": {"uniqueItems": True}}}
    with pytest.raises(InvalidRequest) as caught:
        compiler.check(
            Constraint(kind="lark", source=f"start: a\na: %json {json.dumps(bad)}"),
            param="tools",
            parts={"tools.0.parameters": "{}", "tools.1.parameters": json.dumps(bad)},
        )
    assert caught.value.param == "tools.1.parameters.properties.z"


def test_a_trial_whose_server_was_killed_is_made_again(compiler: ConstraintCompiler) -> None:
    constraint = Constraint(kind="choice", source='["ab"]')
    compiler.check(constraint, param="it")
    server = compiler._trials._server
    assert server is not None
    server.kill()
    compiler.check(constraint, param="it")
    assert compiler._trials._server is not server


LARGE = {
    "long text": ("json_schema", '{"minLength": 1000000000, "type": "string"}'),
    "long list": ("json_schema", '{"minItems": 1000000000, "type": "array"}'),
    "pattern that counts back": ("json_schema", json.dumps({"type": "string", "pattern": "(.*a.{500}){20}"})),
    "many choices": ("choice", json.dumps([f"option {i}" for i in range(3000)])),
    "many names": ("json_schema", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(500)}})),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_constraints_are_compiled(compiler: ConstraintCompiler, name: str) -> None:
    kind, source = LARGE[name]
    compiler.check(Constraint(kind=kind, source=source), param="format.it")  # type: ignore[arg-type]
