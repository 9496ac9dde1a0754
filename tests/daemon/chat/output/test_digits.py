"""The digits of numbers in calls, in the syntax of each family: as the model wrote them, to the client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diskprefix.daemon.chat.output.call_grammar import CallGrammar
from diskprefix.daemon.chat.output.call_values import OfferedTools
from diskprefix.daemon.chat.output.families import FAMILIES, THOUGHTS, Family
from diskprefix.daemon.chat.output.format import ToolCallDelta
from diskprefix.daemon.chat.output.parsers import ChannelParser, FamilyParser
from diskprefix.daemon.engine.constraints.constraint_grammar import grammar_of, matcher_of
from diskprefix.daemon.engine.request import Constraint
from tests.daemon.engine.constraints.test_schema_numbers import BYTES

NUMBERS = ["0.12345678901234567", "-12345.678901234567", "9007199254740993", "1e+23"]


def tools_with(number: str) -> list[dict[str, Any]]:
    value = {"const": json.loads(number)}
    parameters = {"type": "object", "properties": {"x": value}, "required": ["x"], "additionalProperties": False}
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def forced_text(grammar: str) -> str:
    """The text of a grammar that leaves no choice but the length of blanks, which is the least."""
    matcher, text = matcher_of(BYTES, grammar_of(Constraint(kind="lark", source=grammar), "it")), bytearray()
    for _ in range(1000):
        if matcher.is_stopped() or matcher.is_accepting():
            break
        mask = matcher.compute_logit_bias()
        [byte, *_] = sorted(
            (byte for byte in range(256) if mask[byte]), key=lambda number: (chr(number).isspace(), number)
        )
        text.append(byte)
        assert matcher.consume_token(byte)
    return text.decode()


def read(family: Family, tools: list[dict[str, Any]], text: str) -> Any:
    """Returns the arguments of a call as a client gets them, with numbers as they are written."""
    if family.channels:
        parser: Any = ChannelParser(family, family.channels, OfferedTools(tools), "")
    else:
        parser = FamilyParser(family, THOUGHTS[:1], OfferedTools(tools), "")
    deltas = [*parser.feed(text), *parser.finish()]
    arguments = "".join(delta.arguments for delta in deltas if isinstance(delta, ToolCallDelta))
    return json.loads(arguments, parse_float=str, parse_int=str)


@pytest.mark.cases(93)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_of_a_call_has_the_digits_of_its_schema(family: Family, number: str) -> None:
    tools = tools_with(number)
    text = forced_text(CallGrammar(family, tools, {}).forced(many=False))
    assert read(family, tools, text)["x"] in (number, repr(json.loads(number))), text


WRITTEN = ["0.12345678901234567890", "123456789012345678901234567890", "-1.50", "1E5"]


@pytest.mark.cases(112)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("number", WRITTEN)
def test_a_number_reaches_the_client_as_the_model_wrote_it(family: Family, number: str) -> None:
    tools = tools_with("7654321")
    text = forced_text(CallGrammar(family, tools, {}).forced(many=False)).replace("7654321", number)
    assert read(family, tools, text) == {"x": number}, text
