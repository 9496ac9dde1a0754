"""The tools of a request, and arguments of calls that are not JSON: Python, elements, and objects with bare keys."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from msgspec import Struct, field

from diskprefix.daemon.chat.messages import JsonObject
from diskprefix.daemon.chat.output.loose_values import NAMES, LooseText
from diskprefix.daemon.json_values import values_as_written

_NUMBERS = {"integer", "number"}
_WHOLE = re.compile(r"(-?\d+)\.0+")
"""A whole number with a decimal point, which many clients do not read as an integer."""
_UNREADABLE = (ValueError, TypeError, RecursionError, MemoryError)
"""Raised for text that is not Python, or nested too deeply."""
BARE_KEY = re.compile(r"[A-Za-z_][\w.\-]*")
_WRAPPERS = {"print"}
"""Written around calls by Gemma."""


class OfferedTools:
    """The names and schemas of the tools of a request."""

    def __init__(self, tools: Sequence[JsonObject]) -> None:
        self._parameters: dict[str, JsonObject] = {
            tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools
        }

    def __contains__(self, name: object) -> bool:
        return name in self._parameters

    def __bool__(self) -> bool:
        return bool(self._parameters)

    @property
    def names(self) -> list[str]:
        """The names, longest first."""
        return sorted(self._parameters, key=len, reverse=True)

    def properties(self, name: str) -> dict[str, Any]:
        """Returns the schemas of the tool's arguments, in their order; none for an unknown tool."""
        properties = self._parameters.get(name, {}).get("properties")
        return properties if isinstance(properties, dict) else {}

    def is_text(self, name: str, key: str) -> bool:
        """Returns whether this argument is always text, so that it needs no quotes."""
        return _types(self.properties(name).get(key)) == {"string"}


def value_of(text: str, schema: object) -> object:
    """Returns the value of an argument without quotes, by the types in its schema, if it names any. A text that does
    not fit the schema stays text: the client can report the fault."""
    if types := _types(schema):
        return _typed(text, types)
    with suppress(ValueError, RecursionError):
        return values_as_written(text)
    return text


def _types(schema: object) -> set[str]:
    """Returns the JSON types that a schema names, none for a malformed one."""
    types, unseen = set[str](), [schema]
    for part in unseen:
        if not isinstance(part, dict):
            continue
        declared, values = part.get("type"), values_of(part)
        types.update(name for name in (declared if isinstance(declared, list) else [declared]) if isinstance(name, str))
        for name in ("anyOf", "oneOf", "allOf"):
            unseen += choices if isinstance(choices := part.get(name), list) else ()
        if declared is None and values and all(isinstance(value, str) for value in values):
            types.add("string")
        if part.get("nullable"):
            types.add("null")
    return types


def values_of(schema: JsonObject) -> list[object]:
    """Returns the values of `enum`, or the value of `const`; [] if there are none."""
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    return values if isinstance(values, list) else []


def _typed(text: str, types: set[str]) -> object:
    bare = text.strip()
    if types & _NUMBERS == {"integer"} and (whole := _WHOLE.fullmatch(bare)):
        bare = whole[1]
    if "null" in types and bare in ("null", "None"):
        return None
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower() == "true"
    try:
        value = values_as_written(bare)
    except RecursionError:
        return text
    except ValueError:
        value = _of_python(bare) if types & {"object", "array"} else None
    if isinstance(value, bool) or value is None:
        return text
    if isinstance(value, int | float) and types & _NUMBERS:
        return value
    if (isinstance(value, dict) and "object" in types) or (isinstance(value, list) and "array" in types):
        return value
    # Models quote strings where the schema allows other types too.
    return value if isinstance(value, str) and "string" in types and len(types) > 1 else text


def _of_python(text: str) -> object:
    """Returns the object or the list that `text` is in Python, None for other text."""
    with suppress(ValueError, RecursionError):
        return LooseText(text).whole() if text.startswith(("{", "[", "(")) else None
    return None


class ParsedCall(NamedTuple):
    """A call that was parsed as a whole."""

    name: str
    arguments: JsonObject


def python_calls(source: str, tools: OfferedTools) -> list[ParsedCall]:
    """Returns the calls in Python source, from expressions and lists of calls; none if it has other statements. In
    source that is not Python, strings may have line breaks and the quotes around them."""
    source = source.strip()
    try:
        statements, lines = ast.parse(source).body, source.encode().splitlines()
        return [call for statement in statements for call in _calls_of(_value_of(statement), lines, tools)]
    except SyntaxError:
        with suppress(ValueError, RecursionError):
            return [ParsedCall(*call) for call in LooseText(source).calls(tools.properties)]
        return []
    except _UNREADABLE:
        return []


def _value_of(statement: ast.stmt) -> ast.expr:
    if isinstance(statement, ast.Expr | ast.Assign):
        return statement.value
    raise ValueError("no expression")


def _calls_of(node: ast.expr, lines: list[bytes], tools: OfferedTools) -> list[ParsedCall]:
    if isinstance(node, ast.List | ast.Tuple):
        return [call for element in node.elts for call in _calls_of(element, lines, tools)]
    if not isinstance(node, ast.Call):
        raise ValueError("no call")
    name = ast.unparse(node.func)
    if name in _WRAPPERS and name not in tools:
        return [call for argument in node.args for call in _calls_of(argument, lines, tools)]
    # Llama 3.1 calls its own tools with get_weather.call(…).
    name = name.removesuffix(".call") if name not in tools else name
    keys = list(tools.properties(name))
    arguments = {key: _literal(value, lines) for key, value in zip(keys, node.args, strict=False)}
    if len(arguments) < len(node.args):
        raise ValueError("more arguments than the tool has")
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("**")
        arguments[keyword.arg] = _literal(keyword.value, lines)
    return [ParsedCall(name, arguments)]


def _literal(node: ast.expr, lines: list[bytes]) -> Any:
    """Returns the value of a literal in `lines` of source. A string that is also valid JSON is read as JSON."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        if node.end_lineno != node.lineno:
            return node.value
        try:
            # `ast.get_source_segment` would split the whole source into lines for each string.
            return json.loads(lines[node.lineno - 1][node.col_offset : node.end_col_offset])
        except ValueError:
            return node.value
    if isinstance(node, ast.Name) and node.id in NAMES:
        return NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(element, lines) for element in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _literal(value, lines) for key, value in zip(node.keys, node.values, strict=True)}
    value = ast.literal_eval(node)
    json.dumps(value, allow_nan=False)
    if isinstance(value, float) and node.end_lineno == node.lineno:
        # In Python, `.5` and `1_000.0` are numbers too.
        with suppress(ValueError):
            return values_as_written(lines[node.lineno - 1][node.col_offset : node.end_col_offset])
    return value


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a key that is no text")


class _Element(Struct):
    """An element: `<key>text</key>`, or with other elements instead of the text."""

    key: str
    text: str = ""
    children: list[_Element] = field(default_factory=list)

    def value(self, schema: Any) -> object:
        """Returns the value. Elements with equal names become a list, and so do elements named item."""
        schema = schema if isinstance(schema, dict) else {}
        properties = schema.get("properties")
        known = properties if isinstance(properties, dict) else {}
        if not self.children:
            return value_of(self.text, schema) if self.key else {}
        if "item" not in known and {child.key for child in self.children} == {"item"}:
            return [child.value(schema.get("items")) for child in self.children]
        members: dict[str, list[object]] = {}
        for child in self.children:
            value = child.value(known.get(child.key, schema.get("additionalProperties")))
            members.setdefault(child.key, []).append(value)
        return {key: values[0] if len(values) == 1 else values for key, values in members.items()}


def elements(text: str, prefix: str, schema: JsonObject) -> object:
    """Returns the value of elements whose tags begin with `prefix`; None if one of them does not end."""
    before, *tags = re.split(rf"{re.escape(prefix)}<(/?)([\w.\-]+)>", text)
    open_ones = [_Element("")]
    for slash, key, after in zip(tags[::3], tags[1::3], tags[2::3], strict=True):
        if not slash:
            open_ones.append(_Element(key, after))
            open_ones[-2].children.append(open_ones[-1])
        elif open_ones.pop().key != key or not open_ones or after.strip():
            return None
    try:
        return open_ones[0].value(schema) if len(open_ones) == 1 and not before.strip() else None
    except RecursionError:
        return None


def braces(text: str, quotes: str, schemas: JsonObject) -> JsonObject | None:
    """Returns the object `{key:value}`, whose strings are in JSON, between two `quotes`, or without any: then they are
    values of the types in `schemas`. None if it cannot be read."""
    try:
        value = LooseText(text, quotes, value_of).whole(schemas)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
