"""Numbers in schemas, with all their digits: what a grammar accepts, against an oracle that computes with fractions,
and as readers of doubles do."""

from __future__ import annotations

import json
import math
import random
import re
import struct
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from diskprefix.daemon.engine.constraints.constraint_grammar import explained, grammar_of, matcher_of, reason_against
from diskprefix.daemon.engine.constraints.schema_numbers import spelled
from diskprefix.daemon.engine.request import Constraint

BYTES = LLTokenizer("byte")
BIG = 2**53 + 1


def any_double(rng: random.Random) -> float:
    value = math.nan
    while not math.isfinite(value):
        (value,) = struct.unpack("<d", rng.randbytes(8))
    return value


DRAWN: list[Callable[[random.Random], float]] = [
    any_double,
    lambda rng: rng.uniform(-1, 1),
    lambda rng: rng.uniform(-1e6, 1e6),
    lambda rng: rng.uniform(-1, 1) * 10.0 ** rng.randint(-30, 30),
    lambda rng: rng.randint(-(2**53) - 9, 2**53 + 9),
    lambda rng: rng.choice([-1, 1]) * (2**53 + rng.randint(-9, 2**40)),
    lambda rng: rng.choice([-1, 1]) * rng.randint(10**17, 10**24),
    lambda rng: round(rng.uniform(-100, 100), rng.randint(0, 4)),
    lambda rng: rng.choice([0, -0.0, 0.1, 0.3, 1e23, 5e-324, 1.7976931348623157e308, 2.0**63, 1e-7, 1e22, 10**20]),
]


def drawn(rng: random.Random) -> float:
    return rng.choice(DRAWN)(rng)


def written(value: float) -> str:
    return json.dumps(value)


def matcher(schema: Any) -> LLMatcher:
    return matcher_of(BYTES, grammar_of(Constraint(kind="json_schema", source=json.dumps(schema)), "it"))


def takes(compiled: LLMatcher, text: str) -> bool:
    copy, tokens = compiled.deep_copy(), [*text.encode()]
    return copy.validate_tokens(tokens) == len(tokens) and copy.consume_tokens(tokens) and copy.is_accepting()


def reads(text: str) -> list[Fraction]:
    """A number as a reader of decimals and as a reader of doubles (of integers, with all digits) understands it."""
    value = json.loads(text)
    return [Fraction(Decimal(text)), Fraction(value)] if math.isfinite(value) else []


def keeps(text: str, schema: dict[str, Any]) -> bool:
    """Whether each reader of a number finds that it keeps a schema."""
    checks: dict[str, Callable[[Fraction, Fraction], bool]] = {
        "minimum": lambda value, bound: value >= bound,
        "maximum": lambda value, bound: value <= bound,
        "exclusiveMinimum": lambda value, bound: value > bound,
        "exclusiveMaximum": lambda value, bound: value < bound,
    }
    decimal, *doubles = reads(text)
    bounds = [(check, schema[key]) for key, check in checks.items() if key in schema]
    return (
        all(check(decimal, Fraction(Decimal(written(bound)))) for check, bound in bounds)
        and all(check(value, Fraction(bound)) for check, bound in bounds for value in doubles)
        and (schema.get("type") != "integer" or decimal.denominator == 1)
        and ("multipleOf" not in schema or decimal % Fraction(Decimal(written(schema["multipleOf"]))) == 0)
    )


@pytest.mark.cases(3)
@pytest.mark.parametrize("seed", range(8))
def test_nearly_each_double_has_a_text_that_llguidance_reads_as_it(seed: int) -> None:
    rng, missing = random.Random(seed), 0
    for _ in range(100):
        value = float(drawn(rng))
        if (text := spelled(value)) is None:
            missing += 1
            continue
        grammar = f'start: %json {{"const": {text}}}'
        digits = format(Decimal(repr(value)), "f")
        digits = re.sub(r"\.?0*$", "", digits) if "." in digits else digits
        assert takes(matcher_of(BYTES, grammar), digits), (value, text)
    assert missing <= 5


@pytest.mark.cases(3)
@pytest.mark.parametrize("seed", range(8))
def test_a_constant_is_written_as_itself_alone(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        value = drawn(rng)
        compiled = matcher({"enum": [value, [value]]})
        both = [takes(compiled, text) for text in (written(value), format(Decimal(written(value)), "f"), str(value))]
        plain = Decimal(written(value))
        assert any(both) or takes(compiled, format(plain.normalize(), "f")), value
        other = math.nextafter(value, math.inf) if isinstance(value, float) else value + 1
        if other != value:
            assert not takes(compiled, written(other)), value
            if math.isfinite(other):
                assert not takes(compiled, format(Decimal(written(other)), "f")), value


def near(rng: random.Random, bound: float) -> list[str]:
    """Numbers around a bound: neighbours, and texts with more digits than a double has."""
    texts = []
    plain = Decimal(written(bound))
    for value in (
        bound,
        *(math.nextafter(float(bound), way) for way in (math.inf, -math.inf)),
        int(bound) - 1,
        int(bound) + 1,
    ):
        if math.isfinite(value):
            text = format(Decimal(written(value)), "f")
            texts += [text, f"{text}{'' if '.' in text else '.'}0{rng.randint(1, 9)}", written(value)]
    return [*texts, format(plain, "f"), "0", "-0", "0.0", "1", "-1.5", "1e5"]


KEYS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


@pytest.mark.cases(5)
@pytest.mark.parametrize("seed", range(30))
def test_no_number_outside_of_bounds_is_taken(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(15):
        first = drawn(rng)
        second = drawn(rng) if rng.random() < 0.5 else math.nextafter(float(first), math.inf)
        low, high = sorted((first, second if math.isfinite(second) else first))
        schema: dict[str, Any] = {"type": rng.choice(["integer", "number"])}
        if rng.random() < 0.8:
            schema[rng.choice(KEYS[::2])] = low
        if rng.random() < 0.8:
            schema[rng.choice(KEYS[1::2])] = high
        source = json.dumps(schema)
        if reason := reason_against(BYTES, Constraint(kind="json_schema", source=source), "it"):
            assert not any(keeps(text, schema) for bound in (low, high) for text in near(rng, bound)), (schema, reason)
            continue
        compiled = matcher(schema)
        assert not compiled.is_error(), schema
        for text in {text for bound in (low, high) for text in near(rng, bound)}:
            assert not takes(compiled, text) or keeps(text, schema), (schema, text)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "integer", "minimum": 10**20, "maximum": 5}, "minimum 100000000000000000000 and maximum 5"),
    ({"type": "integer", "minimum": 1e20, "maximum": 5}, "minimum 100000000000000000000 and maximum 5"),
    ({"type": "number", "exclusiveMinimum": 0.3, "exclusiveMaximum": 0.30000000000000004}, "no number that a double"),
    ({"type": "number", "multipleOf": 0.1234567891234}, "multipleOf 0.1234567891234 has too many digits"),
    ({"type": "integer", "multipleOf": 3 * 10**9}, "multipleOf 3000000000 has too many digits"),
    ({"allOf": [{"const": 10**20}]}, "digits of a number"),
    ({"type": "integer", "minimum": 10**500}, "a bound has more than"),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_what_no_grammar_keeps_is_refused_by_its_path_with_its_own_digits(schema: dict[str, Any], message: str) -> None:
    whole = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    constraint = Constraint(kind="json_schema", source=json.dumps(whole))
    error = explained(BYTES, constraint, "it", reason_against(BYTES, constraint, "it"))
    assert (error.param or "").startswith("it.properties.a")
    assert message in error.message


@pytest.mark.parametrize(
    "beside",
    [
        {"allOf": [{"maximum": 2**71}]},
        {"anyOf": [{"maximum": 2**71}]},
        {"not": {"const": 2**70 + 1}},
        {"if": {"minimum": 1}, "then": {"maximum": 2**71}},
        {"$ref": "#/$defs/most", "$defs": {"most": {"maximum": 2**71}}},
    ],
    ids=lambda value: next(iter(value)),
)
def test_a_schema_beside_a_number_with_a_rule_of_its_own_is_not_dropped(beside: dict[str, Any]) -> None:
    constraint = Constraint(kind="json_schema", source=json.dumps({"type": "integer", "minimum": 2**70} | beside))
    assert reason_against(BYTES, constraint, "it")


TAKEN: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "integer", "minimum": BIG, "maximum": BIG}, [str(BIG)], [str(BIG - 1), str(BIG + 1)]),
    ({"type": "number", "minimum": BIG, "maximum": BIG}, [str(BIG)], [str(BIG - 1), str(BIG + 1)]),
    ({"type": "integer", "minimum": 10**20}, [str(10**20), str(10**25)], [str(10**20 - 1), str(2**63 - 1)]),
    ({"type": ["integer", "null"], "maximum": -(10**20)}, [str(-(10**20)), "null"], ["0", str(1 - 10**20)]),
    ({"type": "number", "minimum": 1e300}, ["2" + "0" * 300 + ".5"], ["9" * 300, "1e5"]),
    ({"type": "number", "exclusiveMinimum": 0.3}, ["0.30000000000000004"], ["0.3", "0.30000000000000000001"]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1e-200}, ["0." + "0" * 250 + "1"], ["0", "0.1"]),
    ({"type": "number", "maximum": 0.12345678901234568}, ["0.12345678901234568"], ["0.1234567890123457"]),
    ({"type": "number", "minimum": 0.3, "maximum": 0.3, "multipleOf": 0.1}, ["0.3"], ["0.2", "0.4"]),
    ({"type": "number", "multipleOf": 0.07}, ["0.07", "0.14", "7"], ["0.01", "0.08"]),
    ({"type": "integer", "multipleOf": 3 * 10**9, "minimum": 0, "maximum": 10**10}, ["0", str(3 * 10**9)], ["1"]),
    ({"enum": [1, 5, BIG], "minimum": 2}, ["5", str(BIG)], ["1", str(BIG - 1)]),
    ({"type": "number", "minimum": -(10**500), "maximum": 10**500}, ["0", "-1.5", "1000000"], ["x"]),
    ({"type": "integer", "minimum": -(10**500), "maximum": 10**500}, ["0", "-1", "1000000"], ["x"]),
    ({"type": "integer", "const": 1e20}, ["1e+20"], [str(2**63 - 1)]),
]


@pytest.mark.parametrize(("schema", "taken", "refused"), TAKEN, ids=lambda value: json.dumps(value)[:70])
def test_what_fits_is_taken(schema: dict[str, Any], taken: list[str], refused: list[str]) -> None:
    for whole, around in ((schema, "{}"), ({"type": "array", "items": schema, "minItems": 1}, "[{}]")):
        compiled = matcher(whole)
        assert not compiled.is_error(), compiled.get_error()
        assert [text for text in taken if not takes(compiled, around.format(text))] == []
        assert [text for text in refused if takes(compiled, around.format(text))] == []
