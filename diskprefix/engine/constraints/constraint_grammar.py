"""Converts constraints to grammars of llguidance, explains why a constraint cannot be compiled, and loosens schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from diskprefix.engine.constraints.kept_schema import (
    MAX_CHARS,
    JsonSchema,
    Loosened,
    Path,
    definitions_of,
    json_rules,
    parts,
    replace_part,
    weaker,
)
from diskprefix.engine.constraints.schema_numbers import NotKept, why_impossible
from diskprefix.engine.request import Constraint
from diskprefix.errors import InvalidRequest
from diskprefix.printable import escaped

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_MAX_PARTS = 10_000
"""The maximum number of schemas inside a schema."""
_MAX_PATTERNS = 64
"""The maximum number of names in one `patternProperties`: each pair of names must be proven disjoint."""
_MAX_JOINED = 32
"""The maximum number of members of one `allOf`, because they are multiplied out."""
_MAX_REPEATED = 100_000
"""The largest product of nested repetitions in a regex. If they force a text, all of it is written out in one step."""
_MAX_TRIES = 256
"""The maximum number of parts of a schema that are compiled to find the part at fault."""
_MAX_MESSAGE_CHARS = 300
_IMPOSSIBLE = "Unsatisfiable schema"
_TOO_DEEP = "is nested too deeply, or its references lead through too many schemas"
_UNREADABLE = "failed to parse"
"""The message of llguidance for a schema that is nested too deeply. No part of it is at fault alone."""

_JSON_OPTIONS = {
    # Small models write white space forever if the grammar allows it. This is enough for any indented text.
    "whitespace_pattern": r"[ \t]|\r?\n[ \t]{0,40}",
    "whitespace_flexible": True,
    "lenient": False,
    "coerce_one_of": False,
}

_MAX_DIGITS = 9
_REGEX_PIECE = re.compile(r"\\.|\{\d*,(\d+)\}|\{(\d+),?\}|.", re.DOTALL)

_NO_FORCING = '%llguidance {"no_forcing": true}\n'
"""Allows any tokens that spell a fixed text. Otherwise llguidance allows only the tokens of its own encoding. That
encoding may have special tokens, which llguidance then refuses."""
_JSON_RULE = re.compile(r"^(\w+): %json (\{.*\})$", re.MULTILINE)
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
"""The place in the grammar that llguidance writes before the reason. It is removed, because the client does not see the
grammar."""


def grammar_of(constraint: Constraint, param: str) -> str:
    """Returns the grammar of a constraint without `before`.

    Raises `InvalidRequest`, which names `param` or a path below it, for a constraint that cannot be read or exceeds the
    limits of this module. Other constraints may still fail to compile: see `explained`.
    """
    _require_short(constraint.source, param)
    try:
        return _grammar(constraint, param)
    except (ValueError, RecursionError) as error:
        raise _invalid(param, _text_of(error)) from error


def _grammar(constraint: Constraint, param: str) -> str:
    match constraint.kind:
        case "json_object":
            return _json_grammar({"type": "object"})
        case "json_schema":
            schema = json.loads(constraint.source)
            for place, path, reason in _excesses(schema):
                raise _invalid(_joined(param, place + path), reason)
            return _json_grammar(schema)
        case "choice":
            return _choice_grammar(json.loads(constraint.source))
        case "lark":
            return _NO_FORCING + _JSON_RULE.sub(_json_rule, constraint.source)


def _json_rule(rule: re.Match[str]) -> str:
    return "\n".join(json_rules(rule[1], {"x-guidance": _JSON_OPTIONS} | json.loads(rule[2])))


def reason_against(tokenizer: LLTokenizer, constraint: Constraint, param: str) -> str:
    """Returns the reason why a constraint cannot be compiled, "" if it can. Raises the errors of `grammar_of`. May take
    any time and memory."""
    _require_short(constraint.source, param)
    try:
        matcher = matcher_of(tokenizer, _grammar(constraint, param))
    except NotKept as error:
        return str(error)
    except (ValueError, RecursionError) as error:
        raise _invalid(param, _text_of(error)) from error
    return matcher.get_error() if matcher.is_error() else ""


def excess_of(source: str) -> str:
    """Returns the reason why a schema, given as JSON text, exceeds the limits and is not compiled; "" if it does
    not."""
    try:
        return next((reason for *_, reason in _excesses(json.loads(source))), "")
    except (ValueError, RecursionError) as error:
        return _text_of(error)


def loosened(tokenizer: LLTokenizer, source: str) -> Loosened:
    """Returns a schema, given as JSON text, without the parts that cannot be compiled or guaranteed. May take any time
    and memory."""
    try:
        schema, left_out = json.loads(source), list[str]()
        # Bound: each round removes a keyword or a `oneOf`, or the whole schema.
        while schema and (fault := _fault(tokenizer, schema)):
            place, reason = fault
            part = schema
            for step in place:
                part = part[step]
            definitions = definitions_of(schema)
            kept = weaker(part, lambda weak: not _reason_of(definitions | weak) and not [*_excesses(weak)])  # noqa: B023
            schema = replace_part(schema, place if part else (), kept)
            left_out.append(f"{_joined('', place)[1:]}: {reason}")
    except (ValueError, RecursionError) as error:
        return Loosened("{}", [f": {_reason(_text_of(error))}"])
    return Loosened(json.dumps(schema), left_out)


def _fault(tokenizer: LLTokenizer, schema: JsonSchema) -> tuple[Path, str] | None:
    """Returns the path and the reason of a part that cannot be compiled or guaranteed; None if there is none."""
    for place, _, reason in _excesses(schema):
        return place, reason
    reason = reason_against(tokenizer, Constraint(kind="json_schema", source=json.dumps(schema)), "")
    return _innermost(schema, _reason(reason)) if reason else None


@cache
def limits() -> LLParserLimits:
    """Returns llguidance's own bounds of time and memory. Its messages do not quote the whole grammar."""
    # Imported here, because few requests have a constraint.
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False)


def matcher_of(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Returns a matcher of a grammar at its beginning, with the first mask computed. It may be in an error state."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    # A grammar that no text satisfies can be compiled, but has no first token.
    matcher.compute_bitmask()
    return matcher


def explained(constraint: Constraint, param: str, reason: str) -> InvalidRequest:
    """Returns the error of a constraint that llguidance cannot compile for `reason`. For a schema, it names the
    innermost part that alone fails for the same reason."""
    place: Path = ()
    reason = _reason(reason)
    if constraint.kind == "json_schema" and not reason.startswith(_UNREADABLE):
        place, reason = _innermost(json.loads(constraint.source), reason)
    return _invalid(_joined(param, place), reason)


def _text_of(error: Exception) -> str:
    """Returns the problem of a schema that an error describes."""
    return _TOO_DEEP if isinstance(error, RecursionError) else str(error)


def _invalid(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest.at(param, _reason(reason))


def _reason(text: str) -> str:
    """Returns the most useful line of a message: the line with the error, otherwise the first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["cannot be compiled"]
    line = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    line = _PLACE.sub("", line)
    if line == "NoExtensionBias":
        line = "no text satisfies it"
    return escaped(line)[:_MAX_MESSAGE_CHARS].rstrip(".:")


def _json_grammar(schema: Any) -> str:
    if not isinstance(schema, dict):
        raise ValueError("a schema must be an object")
    return _NO_FORCING + "\n".join(json_rules("start", schema | {"x-guidance": _JSON_OPTIONS}))


def _choice_grammar(choices: Any) -> str:
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("must be a list of one string or more")
    return f"{_NO_FORCING}start: {' | '.join(json.dumps(choice, ensure_ascii=False) for choice in choices)}"


def _require_short(source: str, param: str) -> None:
    if len(source) > MAX_CHARS:
        raise _invalid(param, f"has {len(source)} characters; at most {MAX_CHARS} are compiled")


def _excesses(schema: Any) -> Iterator[tuple[Path, Path, str]]:
    """Yields the path of each part that is too costly or not guaranteed, the path from this part to the value at fault,
    and the reason."""
    unseen: list[tuple[Path, Any]] = [((), schema)]
    for num_parts, (place, part) in enumerate(unseen):
        if num_parts > _MAX_PARTS:
            yield (), (), f"has more than {_MAX_PARTS} parts"
            return
        if isinstance(part, dict):
            yield from ((place, path, reason) for path, reason in _excesses_of(part))
            unseen += ((place + path, inner) for path, inner in parts(part))


def _excesses_of(schema: JsonSchema) -> Iterator[tuple[Path, str]]:
    least, required = schema.get("minProperties", 0), schema.get("required", ())
    if isinstance(least, int) and isinstance(required, list | tuple) and least > max(1, len(required)):
        # llguidance lets a reply repeat a key.
        yield (), "minProperties above 1 cannot be guaranteed; name the properties in required"
    for key, most in (("patternProperties", _MAX_PATTERNS), ("allOf", _MAX_JOINED)):
        members = schema.get(key)
        if isinstance(members, dict | list) and len(members) > most:
            yield (key,), f"has {len(members)} members; at most {most} are compiled"
    named = schema.get("patternProperties")
    patterns: list[tuple[Path, Any]] = [(("pattern",), schema.get("pattern"))]
    patterns += [(("patternProperties", name), name) for name in (named if isinstance(named, dict) else ())]
    for path, pattern in patterns:
        if isinstance(pattern, str) and repeated(pattern) > _MAX_REPEATED:
            yield path, f"repeats something more than {_MAX_REPEATED} times, with repetitions in repetitions"


def repeated(pattern: str) -> int:
    """Returns the largest product of nested repetitions in a regex, 30 for `((a{2}){3}|b{4}){5}`. `*` counts as 1."""
    groups, last, is_class = [1], 1, False
    for match in _REGEX_PIECE.finditer(pattern):
        piece, counts = match[0], match[1] or match[2]
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
            last = min(last * max(1, int(counts[:_MAX_DIGITS])), _MAX_REPEATED + 1)
            groups[-1] = max(groups[-1], last)
        else:
            last = 1
    return max(groups)


def _joined(param: str, path: Path) -> str:
    return ".".join([param, *map(str, path)])


def _innermost(schema: Any, reason: str) -> tuple[Path, str]:
    """Returns the path and the reason of the innermost part of a schema that alone fails for `reason`."""
    definitions = definitions_of(schema)
    path: Path = ()
    innermost, inside = schema, parts(schema)
    for _ in range(_MAX_TRIES):
        if (following := next(inside, None)) is None:
            break
        step, part = following
        own = _reason_of(definitions | part) if isinstance(part, dict) else ""
        # An impossible part makes the schemas around it impossible, with another message.
        if own == reason or (own.startswith(_IMPOSSIBLE) and reason.startswith(_IMPOSSIBLE)):
            path, reason, innermost, inside = path + step, own, part, parts(part)
    return path, why_impossible(innermost) or reason


def _reason_of(schema: dict[str, Any]) -> str:
    """Returns the reason why a schema cannot be compiled, "" if it can."""
    from llguidance import LLMatcher

    try:
        message = LLMatcher.validate_grammar(_json_grammar(schema), limits=limits())
    except (ValueError, RecursionError) as error:
        return _text_of(error)
    return _reason(message) if message else ""
