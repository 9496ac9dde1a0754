"""Random JSON schemas whose values are small, so that a model with random weights comes to an end.

They use every keyword that replies can be constrained by, in the ways in which schemas of tools and replies use them.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

Schema = dict[str, Any]

_DEPTH = 3
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "duration")
_PATTERNS = (
    r"^[A-Z]{2}-[0-9]{1,4}$",
    r"^(red|green|blue)$",
    r"^#[0-9a-f]{6}$",
    r"^v\d{1,2}\.\d{1,2}$",
    r"^[^\"]{1,6}$",
)


def random_schema(seed: int) -> Schema:
    rng = random.Random(seed)
    schema = _object(rng, _DEPTH)
    if rng.random() < 0.3:
        schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    if rng.random() < 0.3:
        name = _name(rng)
        schema["$defs"] = {name: _any(rng, 1)}
        schema["properties"]["by_reference"] = {"$ref": f"#/$defs/{quote(name)}"}
        schema.setdefault("required", []).append("by_reference")
    return schema


def _any(rng: random.Random, depth: int) -> Schema:
    kinds: list[Callable[[random.Random, int], Schema]] = [
        _string,
        _string,
        _number,
        _integer,
        _literal,
        _enum,
        _several_types,
    ]
    if depth > 0:
        kinds += [_object, _object, _array, _array, _any_of, _all_of, _map]
    return rng.choice(kinds)(rng, depth - 1)


def _name(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase + '_é "', k=rng.randint(1, 8)))


def _text(rng: random.Random) -> str:
    return "".join(rng.choices('ab \n"\\é😀{}[],:1', k=rng.randint(0, 6)))


def _object(rng: random.Random, depth: int) -> Schema:
    names = sorted({_name(rng) for _ in range(rng.randint(0, 4))})
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(rng, depth) for name in names},
        "additionalProperties": False,
    }
    if names and rng.random() < 0.8:
        schema["required"] = rng.sample(names, rng.randint(1, len(names)))
    if rng.random() < 0.2:
        schema |= {"title": _text(rng), "description": _text(rng)}
    return schema


def _map(rng: random.Random, depth: int) -> Schema:
    return {
        "type": "object",
        "patternProperties": {r"^[a-z]{1,3}$": _any(rng, depth)},
        "additionalProperties": False,
        "maxProperties": rng.randint(1, 3),
    }


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    schema: Schema = {
        "type": "array",
        "items": _any(rng, depth),
        "minItems": least,
        "maxItems": least + rng.randint(0, 3),
    }
    if rng.random() < 0.3:
        schema["prefixItems"] = [_any(rng, depth) for _ in range(rng.randint(1, 2))]
        schema["maxItems"] = len(schema["prefixItems"]) + least
    return schema


def _string(rng: random.Random, _depth: int) -> Schema:
    least = rng.randint(0, 4)
    return rng.choice(
        [
            {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 12)},
            {"type": "string", "maxLength": 30},
            {"type": "string", "pattern": rng.choice(_PATTERNS)},
            {"type": "string", "format": rng.choice(_FORMATS), "maxLength": 40},
        ]
    )


def _integer(rng: random.Random, _depth: int) -> Schema:
    low = rng.randint(-1000, 1000)
    schema: Schema = {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 10**6)}
    if rng.random() < 0.3:
        step = rng.choice([2, 3, 10])
        schema |= {"multipleOf": step, "maximum": low + step + 10}
    if rng.random() < 0.2:
        schema["exclusiveMinimum"] = schema.pop("minimum") - 1
    return schema


def _number(rng: random.Random, _depth: int) -> Schema:
    low = round(rng.uniform(-100, 100), 2)
    return rng.choice(
        [
            {"type": "number", "minimum": low, "maximum": low + 10},
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low + 1.5},
            {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 100},
        ]
    )


def _literal(rng: random.Random, _depth: int) -> Schema:
    return rng.choice([{"type": "boolean"}, {"type": "null"}, {"const": _text(rng)}, {"const": {"a": [1, None]}}])


def _enum(rng: random.Random, _depth: int) -> Schema:
    values = [_text(rng), rng.randint(-5, 5), 1.5, True, None, [_text(rng)], {_name(rng): _text(rng)}]
    return {"enum": rng.sample(values, rng.randint(1, len(values)))}


def _several_types(rng: random.Random, _depth: int) -> Schema:
    return {"type": ["string", "null", "boolean"], "maxLength": rng.randint(0, 9)}


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth) for _ in range(rng.randint(2, 3))]}


def _all_of(rng: random.Random, depth: int) -> Schema:
    """Two objects, of which each lets the other's names in."""
    parts = [
        {"type": "object", "properties": {f"{side}{_name(rng)}": _any(rng, depth)}, "required": []}
        for side in ("left_", "right_")
    ]
    for part in parts:
        part["required"] = list(part["properties"])
    names = {name: True for part in parts for name in part["properties"]}
    return {"allOf": parts, "properties": names, "additionalProperties": False}
