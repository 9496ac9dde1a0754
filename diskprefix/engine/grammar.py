"""From a constraint to the grammar that llguidance reads, and what is wrong with one that cannot be compiled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher, LLParserLimits, grammar_from

from diskprefix.engine.request import Constraint
from diskprefix.errors import InvalidRequest
from diskprefix.printable import escaped

_MOST_CHARS = 1 << 19
"""Of a schema or grammar."""
_MOST_TRIES = 256
"""Parts of a schema that are compiled to find the one at fault."""
_MOST_MESSAGE_CHARS = 300
_IMPOSSIBLE = "Unsatisfiable schema"

LIMITS = LLParserLimits(verbose_errors=False)
"""llguidance's own bounds of time and memory; its messages without the whole grammar."""

_JSON_OPTIONS = {
    # A model that writes white space for ever would never end. This is enough for any indented text.
    "whitespace_pattern": r"[ \t]|\r?\n[ \t]{0,40}",
    "whitespace_flexible": True,
    "lenient": False,
    "coerce_one_of": False,
}

Path = tuple[str | int, ...]


def grammar_of(constraint: Constraint, param: str) -> str:
    """Returns the grammar of a constraint without `before`.

    Raises `InvalidRequest`, which names `param`, for what cannot be read. The rest may still fail to compile: see
    `explained`.
    """
    source = constraint.source
    if len(source) > _MOST_CHARS:
        raise _invalid(param, f"has {len(source)} characters; at most {_MOST_CHARS} are compiled")
    try:
        match constraint.kind:
            case "json_object":
                return _json_grammar({"type": "object"})
            case "json_schema":
                schema = json.loads(source)
                _require_distinct_keys(schema, param)
                return _json_grammar(schema)
            case "regex":
                return LLMatcher.grammar_from_regex(source)
            case "choice":
                return _choice_grammar(json.loads(source))
            case "grammar":
                return grammar_from("grammar", source)
    except (ValueError, RecursionError) as error:
        raise _invalid(param, str(error)) from error


def explained(constraint: Constraint, param: str, reason: str) -> InvalidRequest:
    """Returns the error of a constraint that cannot be compiled for `reason`, which llguidance gave.

    Of a schema it names the innermost part that cannot be compiled for this reason even alone.
    """
    place: Path = ()
    reason = _reason(reason)
    if constraint.kind == "json_schema":
        place, reason = _innermost(json.loads(constraint.source), reason)
    return _invalid(_joined(param, place), reason)


def _invalid(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {_reason(reason)}", param=param)


def _reason(text: str) -> str:
    """Returns the line of a message that says most: in one of several lines, that is the one with the error."""
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


def _require_distinct_keys(schema: Any, param: str) -> None:
    """Raises `InvalidRequest` for a schema that counts the keys of an object: llguidance lets a reply repeat one."""
    if not isinstance(schema, dict):
        return
    least, required = schema.get("minProperties", 0), schema.get("required", ())
    if isinstance(least, int) and isinstance(required, list | tuple) and least > max(1, len(required)):
        raise _invalid(param, "minProperties above 1 cannot be guaranteed; name the properties in required")
    for path, part in _parts(schema):
        _require_distinct_keys(part, _joined(param, path))


def _joined(param: str, path: Path) -> str:
    return ".".join([param, *map(str, path)])


def _innermost(schema: Any, reason: str) -> tuple[Path, str]:
    """Returns the path and the reason of the innermost part of a schema that cannot be compiled for `reason` alone."""
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    path: Path = ()
    parts = _parts(schema)
    for _ in range(_MOST_TRIES):
        if (found := next(parts, None)) is None:
            break
        step, part = found
        own = _reason_of(definitions | part) if isinstance(part, dict) else ""
        # What makes one part impossible makes those around it impossible, in other words.
        if own == reason or (own.startswith(_IMPOSSIBLE) and reason.startswith(_IMPOSSIBLE)):
            path, reason, parts = path + step, own, _parts(part)
    return path, reason


def _reason_of(schema: dict[str, Any]) -> str:
    """Returns why a schema cannot be compiled, "" if it can."""
    message = LLMatcher.validate_grammar(_json_grammar(schema), limits=LIMITS)
    return _reason(message) if message else ""


def _parts(schema: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Yields the schemas that a schema is made of, each with its path."""
    for key, value in schema.items():
        if key in ("items", "additionalItems", "additionalProperties") and isinstance(value, dict):
            yield (key,), value
        elif key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
            yield from (((key, name), part) for name, part in value.items())
        elif key in ("allOf", "anyOf", "oneOf", "prefixItems", "items") and isinstance(value, list):
            yield from (((key, index), part) for index, part in enumerate(value))
