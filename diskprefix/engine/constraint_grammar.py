"""Converts constraints to grammars of llguidance, and explains why one cannot be compiled."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TypeAlias

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from diskprefix.engine.request import Constraint
from diskprefix.errors import InvalidRequest
from diskprefix.printable import escaped

_MOST_CHARS = 1 << 19
"""The most characters of a schema or grammar."""
_MOST_PARTS = 10_000
"""The most schemas in a schema."""
_MOST_PATTERNS = 64
"""The most names in one `patternProperties`: each pair of them must be proven disjoint."""
_MOST_JOINED = 32
"""The most members of one `allOf`, which are multiplied out."""
_MOST_REPEATED = 100_000
"""The largest product of nested repetitions in a regex. A text that they force is written out at once."""
_MOST_TRIES = 256
"""The most parts of a schema that are compiled to find the one at fault."""
_MOST_MESSAGE_CHARS = 300
_IMPOSSIBLE = "Unsatisfiable schema"

LIMITS = LLParserLimits(verbose_errors=False)
"""llguidance's own bounds of time and memory. Its messages do not quote the whole grammar."""

_JSON_OPTIONS = {
    # Small models write white space for ever if they may. This is enough for any indented text.
    "whitespace_pattern": r"[ \t]|\r?\n[ \t]{0,40}",
    "whitespace_flexible": True,
    "lenient": False,
    "coerce_one_of": False,
}

_MOST_DIGITS = 9
_REGEX_PIECE = re.compile(r"\\.|\{\d*,(\d+)\}|\{(\d+),?\}|.", re.DOTALL)

Path = tuple[str | int, ...]
JsonSchema: TypeAlias = dict[str, Any]


def grammar_of(constraint: Constraint, param: str) -> str:
    """Returns the grammar of a constraint without `before`.

    Raises `InvalidRequest`, which names `param` or a path below it, for a constraint that cannot be read or exceeds the
    limits of this module. Others may still fail to compile: see `explained`.
    """
    source = constraint.source
    _require_short(source, param)
    try:
        match constraint.kind:
            case "json_object":
                return _json_grammar({"type": "object"})
            case "json_schema":
                schema = json.loads(source)
                _require_bounded(schema, param)
                return _json_grammar(schema)
            case "choice":
                return _choice_grammar(json.loads(source))
            case "lark":
                return source
    except (ValueError, RecursionError) as error:
        raise _invalid(param, str(error)) from error


def reason_against(tokenizer: LLTokenizer, constraint: Constraint, param: str) -> str:
    """Returns the reason why a constraint cannot be compiled, "" if it can. Raises the errors of `grammar_of`. May take
    any time and memory."""
    matcher = matcher_of(tokenizer, grammar_of(constraint, param))
    return matcher.get_error() if matcher.is_error() else ""


def matcher_of(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Returns a matcher of a grammar at its beginning, with the first mask computed. It may be in an error state."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    # A grammar that no text satisfies compiles, but has no first token.
    matcher.compute_bitmask()
    return matcher


def explained(constraint: Constraint, param: str, reason: str) -> InvalidRequest:
    """Returns the error of a constraint that llguidance cannot compile for `reason`. For a schema, it names the
    innermost part that alone fails for the same reason."""
    place: Path = ()
    reason = _reason(reason)
    if constraint.kind == "json_schema":
        place, reason = _innermost(json.loads(constraint.source), reason)
    return _invalid(_joined(param, place), reason)


def _invalid(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest.at(param, _reason(reason))


def _reason(text: str) -> str:
    """Returns the most useful line of a message: the one with the error, or the first one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["cannot be compiled"]
    line = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    if line == "NoExtensionBias":
        line = "no text satisfies it"
    return escaped(line)[:_MOST_MESSAGE_CHARS].rstrip(".:")


def _json_grammar(schema: Any) -> str:
    if not isinstance(schema, dict):
        raise ValueError("a schema must be an object")
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_OPTIONS)  # type: ignore[arg-type]


def _choice_grammar(choices: Any) -> str:
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("must be a list of one string or more")
    return grammar_from("choice", json.dumps(choices))


def _require_short(source: str, param: str) -> None:
    if len(source) > _MOST_CHARS:
        raise _invalid(param, f"has {len(source)} characters; at most {_MOST_CHARS} are compiled")


def _require_bounded(schema: Any, param: str) -> None:
    """Raises `InvalidRequest`, with the path of the part, for a schema that is too costly or not guaranteed."""
    num_parts = 0

    def check(part: Any, place: str) -> None:
        nonlocal num_parts
        if not isinstance(part, dict):
            return
        num_parts += 1
        if num_parts > _MOST_PARTS:
            raise _invalid(param, f"has more than {_MOST_PARTS} parts")
        _require_distinct_keys(part, place)
        _require_few_members(part, place)
        for path, inner in _parts(part):
            check(inner, _joined(place, path))

    check(schema, param)


def _require_distinct_keys(schema: JsonSchema, place: str) -> None:
    """Raises `InvalidRequest` for a schema that counts the keys of an object: llguidance lets a reply repeat a key."""
    least, required = schema.get("minProperties", 0), schema.get("required", ())
    if isinstance(least, int) and isinstance(required, list | tuple) and least > max(1, len(required)):
        raise _invalid(place, "minProperties above 1 cannot be guaranteed; name the properties in required")


def _require_few_members(schema: JsonSchema, place: str) -> None:
    for key, most in (("patternProperties", _MOST_PATTERNS), ("allOf", _MOST_JOINED)):
        members = schema.get(key)
        if isinstance(members, dict | list) and len(members) > most:
            raise _invalid(_joined(place, (key,)), f"has {len(members)} members; at most {most} are compiled")
    patterns = schema.get("patternProperties")
    for pattern in patterns if isinstance(patterns, dict) else ():
        _require_few_repetitions(pattern, _joined(place, ("patternProperties", pattern)))
    if isinstance(pattern := schema.get("pattern"), str):
        _require_few_repetitions(pattern, _joined(place, ("pattern",)))


def _require_few_repetitions(pattern: str, place: str) -> None:
    if repeated(pattern) > _MOST_REPEATED:
        raise _invalid(place, f"repeats something more than {_MOST_REPEATED} times, with repetitions in repetitions")


def repeated(pattern: str) -> int:
    """Returns the largest product of nested repetitions in a regex, 30 for `((a{2}){3}|b{4}){5}`. `*` counts as 1."""
    groups, last, is_class = [1], 1, False
    for found in _REGEX_PIECE.finditer(pattern):
        piece, counts = found[0], found[1] or found[2]
        if is_class:
            is_class = piece != "]"
        elif piece == "[":
            is_class, last = True, 1
        elif piece == "(":
            groups.append(1)
        elif piece == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] = max(groups[-1], last)
        elif counts:
            # A number with more digits exceeds the limit in any case.
            last = min(last * max(1, int(counts[:_MOST_DIGITS])), _MOST_REPEATED + 1)
            groups[-1] = max(groups[-1], last)
        else:
            last = 1
    return max(groups)


def _joined(param: str, path: Path) -> str:
    return ".".join([param, *map(str, path)])


def _innermost(schema: Any, reason: str) -> tuple[Path, str]:
    """Returns the path and the reason of the innermost part of a schema that alone fails for `reason`."""
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    path: Path = ()
    parts = _parts(schema)
    for _ in range(_MOST_TRIES):
        if (found := next(parts, None)) is None:
            break
        step, part = found
        own = _reason_of(definitions | part) if isinstance(part, dict) else ""
        # An impossible part makes those around it impossible, with another message.
        if own == reason or (own.startswith(_IMPOSSIBLE) and reason.startswith(_IMPOSSIBLE)):
            path, reason, parts = path + step, own, _parts(part)
    return path, reason


def _reason_of(schema: dict[str, Any]) -> str:
    """Returns the reason why a schema cannot be compiled, "" if it can."""
    message = LLMatcher.validate_grammar(_json_grammar(schema), limits=LIMITS)
    return _reason(message) if message else ""


def _parts(schema: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Yields the schemas inside a schema, each with its path."""
    for key, value in schema.items():
        if key in ("items", "additionalItems", "additionalProperties") and isinstance(value, dict):
            yield (key,), value
        elif key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
            yield from (((key, name), part) for name, part in value.items())
        elif key in ("allOf", "anyOf", "oneOf", "prefixItems", "items") and isinstance(value, list):
            yield from (((key, index), part) for index, part in enumerate(value))
