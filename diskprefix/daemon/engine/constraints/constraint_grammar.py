"""Converts constraints to grammars of llguidance, tries them, explains why one is refused, and loosens schemas."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from diskprefix.daemon.engine.constraints.kept_schema import (
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
from diskprefix.daemon.engine.constraints.schema_numbers import NotKept, why_impossible
from diskprefix.daemon.engine.request import Constraint
from diskprefix.errors import InvalidRequest
from diskprefix.printable import escaped

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

Forbidden: TypeAlias = npt.NDArray[np.bool_]
"""A mask of shape [vocab_size], True for tokens that must not come next."""

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
_REPLIES, _REPLY_TOKENS, _REPLIES_CPU_S = 4, 256, 0.5
"""The replies that are written to try a grammar, the most tokens of each, and the processor seconds after which no
further token is written."""
_TRIAL_EFFORT = 0.25
"""The share of a reply's effort for a token that a trial may take: other texts than those that it writes take more."""
_IMPOSSIBLE = "Unsatisfiable schema"
_TOO_DEEP = "is nested too deeply, or its references lead through too many schemas"
_UNREADABLE = "failed to parse"
"""The message of llguidance for a schema that is nested too deeply. No part of it is at fault alone."""
_LATE = "is too complex for the text of a reply: "

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
    """Returns the reason why a constraint cannot be compiled or a reply to it cannot be written, "" if both can. Raises
    the errors of `grammar_of`. May take any time and memory."""
    _require_short(constraint.source, param)
    try:
        return _reason_in(tokenizer, _grammar(constraint, param))
    except NotKept as error:
        return str(error)
    except (ValueError, RecursionError) as error:
        raise _invalid(param, _text_of(error)) from error


def _reason_in(tokenizer: LLTokenizer, grammar: str) -> str:
    matcher = matcher_of(tokenizer, grammar, _TRIAL_EFFORT)
    if matcher.is_error():
        return matcher.get_error()
    # A grammar can be compiled although a later mask exceeds llguidance's limits.
    until, choose = time.process_time() + _REPLIES_CPU_S, random.Random(0)
    for _ in range(_REPLIES):
        if reason := _reason_of_reply(tokenizer, matcher.deep_copy(), choose, until):
            return f"{_LATE}{_reason(reason)}"
    return ""


def _reason_of_reply(tokenizer: LLTokenizer, matcher: LLMatcher, choose: random.Random, until: float) -> str:
    """Writes a reply of any allowed tokens. Returns the reason why it cannot go on, "" if it can. Every second token
    ends a text or another value where it may, so that the reply gets further than its first text."""
    quotes, ends = (tokenizer.tokenize_str(text) for text in ('"', ",]}"))
    for _ in range(_REPLY_TOKENS):
        if matcher.is_stopped() or time.process_time() > until:
            break
        forbidden = forbidden_by(matcher, tokenizer.vocab_size)
        allowed: list[int] = []
        if choose.random() < 0.5:
            allowed = [token for token in quotes if not forbidden[token]]
            allowed = allowed or [token for token in ends if not forbidden[token]]
        if not matcher.consume_tokens([choose.choice(allowed or np.flatnonzero(~forbidden).tolist())]):
            break
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
            definitions, writer = definitions_of(schema), _writer(tokenizer, reason)
            kept = weaker(
                part,
                lambda weak: not _reason_of(definitions | weak, writer) and not [*_excesses(weak)],  # noqa: B023
            )
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
    return _innermost(tokenizer, schema, _reason(reason)) if reason else None


@cache
def limits(effort: float = 1.0) -> LLParserLimits:
    """Returns llguidance's own bounds of time and memory, with `effort` times the work of its lexer for each token. Its
    messages do not quote the whole grammar."""
    # Imported here, because few requests have a constraint.
    from llguidance import LLParserLimits

    own = LLParserLimits(verbose_errors=False)
    return LLParserLimits(step_lexer_fuel=int(effort * own.step_lexer_fuel), verbose_errors=False)


def matcher_of(tokenizer: LLTokenizer, grammar: str, effort: float = 1.0) -> LLMatcher:
    """Returns a matcher of a grammar at its beginning, with the first mask computed. It may be in an error state. See
    `limits` for `effort`."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits(effort))
    # A grammar that no text satisfies can be compiled, but has no first token.
    matcher.compute_bitmask()
    return matcher


def forbidden_by(matcher: LLMatcher, vocab_size: int) -> Forbidden:
    """Returns the mask of the next token. If the mask is too complex to compute, it allows only the end, which the
    matcher then refuses."""
    allowed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(~allowed, count=vocab_size, bitorder="little").view(np.bool_)


def explained(tokenizer: LLTokenizer, constraint: Constraint, param: str, reason: str) -> InvalidRequest:
    """Returns the error of a constraint that `reason_against` refuses for `reason`. For a schema, it names the
    innermost part that alone fails for the same reason."""
    place: Path = ()
    reason = _reason(reason)
    if constraint.kind == "json_schema" and not reason.startswith(_UNREADABLE):
        place, reason = _innermost(tokenizer, json.loads(constraint.source), reason)
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
    # As a terminal: rows of the parser have a limit of items, which many choices exceed.
    texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return f"{_NO_FORCING}start: CHOICE\nCHOICE: {texts}"


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


def _innermost(tokenizer: LLTokenizer, schema: Any, reason: str) -> tuple[Path, str]:
    """Returns the path and the reason of the innermost part of a schema that alone fails for `reason`."""
    definitions, writer = definitions_of(schema), _writer(tokenizer, reason)
    path: Path = ()
    innermost, inside = schema, parts(schema)
    for _ in range(_MAX_TRIES):
        if (following := next(inside, None)) is None:
            break
        step, part = following
        own = _reason_of(definitions | part, writer) if isinstance(part, dict) else ""
        # The message may be another one: an impossible part makes the schemas around it impossible.
        if own == reason or any(own.startswith(kind) and reason.startswith(kind) for kind in (_IMPOSSIBLE, _LATE)):
            path, reason, innermost, inside = path + step, own, part, parts(part)
    return path, why_impossible(innermost) or reason


def _writer(tokenizer: LLTokenizer, reason: str) -> LLTokenizer | None:
    """Returns the tokenizer if replies must be written to see whether a part of a schema fails for `reason`."""
    return tokenizer if reason.startswith(_LATE) else None


def _reason_of(schema: dict[str, Any], tokenizer: LLTokenizer | None) -> str:
    """Returns the reason why a schema cannot be compiled or, with a tokenizer, why a reply to it cannot be written; ""
    if it can."""
    from llguidance import LLMatcher

    try:
        grammar = _json_grammar(schema)
        message = _reason_in(tokenizer, grammar) if tokenizer else LLMatcher.validate_grammar(grammar, limits=limits())
    except (ValueError, RecursionError) as error:
        return _text_of(error)
    return _reason(message) if message else ""
