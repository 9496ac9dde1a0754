"""Each keyword that takes a number, with all its digits, through each field of each API that takes a schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diskprefix.daemon.api.parsed_request import _checked_calls, _checked_text
from diskprefix.daemon.chat.output.choose_format import OutputFormat
from diskprefix.daemon.chat.output.families import FAMILIES
from diskprefix.daemon.engine.constraints.constraint_grammar import grammar_of, matcher_of
from tests.daemon.api.test_parsed_request import APIS, APIS_READ, CHAT_FORMAT, OWN_FORMAT, TEXT_FORMAT, tools
from tests.daemon.engine.constraints.test_schema_numbers import BIG, BYTES, takes

HERE: dict[str, Any] = {"type": "object", "properties": {"b": {}, "a": {"type": "integer"}}, "required": ["a"]}
"""The schema in the bodies of `FIELDS`, in whose place another one is put."""
FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"response_format": CHAT_FORMAT}),
    ("chat", {"response_format": {"type": "json_object", "schema": HERE}}),
    ("chat", {"structured_outputs": {"json": HERE}}),
    ("messages", {"output_config": {"format": OWN_FORMAT}}),
    ("messages", {"output_format": OWN_FORMAT}),
    ("responses", {"text": {"format": TEXT_FORMAT}}),
]
KEYWORDS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"const": 0.012345678901234567}, ["0.012345678901234567"], ["0.012345678901234568", "0.012345678901234566"]),
    ({"enum": [BIG, -7.123456789012345]}, [str(BIG), "-7.123456789012345"], [str(BIG - 1), "-7.123456789012346"]),
    ({"type": "number", "minimum": 1234.5678901234567}, ["1234.5678901234567"], ["1234.5678901234566"]),
    ({"type": "integer", "minimum": BIG, "maximum": BIG}, [str(BIG)], [str(BIG - 1), str(BIG + 1)]),
    ({"type": "integer", "minimum": 10**20}, [str(10**20)], [str(10**20 - 1)]),
    ({"type": "number", "maximum": 1234.5678901234567, "minimum": 0}, ["1234.5678901234567"], ["1234.567890123457"]),
    ({"type": "number", "exclusiveMinimum": 0.3}, ["0.30000000000000004"], ["0.3", "0.30000000000000001"]),
    ({"type": "number", "exclusiveMaximum": 0.3}, ["0.29", "0.2"], ["0.3", "0.30"]),
    ({"type": "number", "multipleOf": 0.07}, ["0.21"], ["0.2"]),
]


def with_schema(api: str, fields: dict[str, Any], schema: dict[str, Any]) -> Any:
    model, base = APIS[api]
    text = json.dumps(base | fields)
    assert json.dumps(HERE) in text
    return model.model_validate_json(text.replace(json.dumps(HERE), json.dumps(schema)))


def around(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": part}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("api", "fields"), FIELDS, ids=lambda value: value if isinstance(value, str) else next(iter(value))
)
@pytest.mark.parametrize(("part", "taken", "refused"), KEYWORDS, ids=lambda value: json.dumps(value)[:60])
def test_a_text_keeps_the_numbers_of_its_schema(
    api: str, fields: dict[str, Any], part: dict[str, Any], taken: list[str], refused: list[str]
) -> None:
    wanted = with_schema(api, fields, around(part)).text_format
    constraint = _checked_text(wanted, None, lambda *_args, **_options: {})
    compiled = matcher_of(BYTES, grammar_of(constraint, "it"))
    assert [text for text in taken if not takes(compiled, f'{{"a": {text}}}')] == []
    assert [text for text in refused if takes(compiled, f'{{"a": {text}}}')] == []


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(("part", "taken", "refused"), KEYWORDS, ids=lambda value: json.dumps(value)[:60])
def test_a_call_keeps_the_numbers_of_its_tools_schema(
    api: str, part: dict[str, Any], taken: list[str], refused: list[str]
) -> None:
    key = "input_schema" if api == "messages" else "parameters"
    [offered, *_] = tools(api)
    (offered["function"] if api == "chat" else offered)[key] = HERE
    asked = APIS_READ[api].read(with_schema(api, {"tools": [offered]}, around(part)), 300, lambda: None)
    family = next(family for family in FAMILIES if family.body == "objects" and not family.channels)
    format = OutputFormat(family)
    grammar = lambda offered: format.call_grammar(offered, many=False)  # noqa: E731
    constraint = _checked_calls(asked.prompt, asked.tool_choice, grammar, None, lambda *_args, **_options: {})
    compiled, [before, after] = matcher_of(BYTES, grammar_of(constraint, "it")), family.whole_call.split("ARGUMENTS")
    call = f'{family.before}{before.replace("NAME", json.dumps("read"))}{{"a": NUMBER}}{after}'
    assert [text for text in taken if not takes(compiled, call.replace("NUMBER", text))] == []
    assert [text for text in refused if takes(compiled, call.replace("NUMBER", text))] == []
