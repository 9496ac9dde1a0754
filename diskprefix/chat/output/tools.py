"""The tools of a request: which names are known, and what type an argument has that is written without one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from diskprefix.chat.messages import JsonObject

_NUMBERS = {"integer", "number"}


class Tools:
    """Names and schemas of the tools of a request."""

    def __init__(self, tools: Sequence[JsonObject]) -> None:
        functions = [tool["function"] for tool in tools]
        self._parameters: dict[str, JsonObject] = {
            function["name"]: function.get("parameters") or {} for function in functions
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
        """Whether this argument is text whatever is written, so that it needs no quotes."""
        known = self.properties(name)
        return set(_types(known[key])) == {"string"} if key in known else False

    def value(self, name: str, key: str, text: str) -> object:
        """Returns the value that `text` stands for where values are written without quotes.

        A text that does not fit the schema stays text: whoever runs the tool can say what is wrong with it.
        """
        return value_of(text, self.properties(name).get(key))


def value_of(text: str, schema: object) -> object:
    """Returns the value that `text` stands for, by its schema if that names types. See `Tools.value`."""
    types = set(_types(schema))
    return _typed(text, types) if types else _untyped(text)


def _types(schema: object) -> Iterator[str]:
    """The JSON types that a schema allows, as far as it names them."""
    if not isinstance(schema, dict):
        return
    declared = schema.get("type")
    yield from [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else ()
    for name in ("anyOf", "oneOf", "allOf"):
        for choice in schema.get(name) or ():
            yield from _types(choice)
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if declared is None and values and all(isinstance(value, str) for value in values):
        yield "string"
    if schema.get("nullable"):
        yield "null"


def _typed(text: str, types: set[str]) -> object:
    bare = text.strip()
    if "null" in types and bare in ("null", "None"):
        return None
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower() == "true"
    try:
        value = json.loads(bare)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, bool) or value is None:
        return text
    if isinstance(value, int | float) and types & _NUMBERS:
        return value
    if (isinstance(value, dict) and "object" in types) or (isinstance(value, list) and "array" in types):
        return value
    # Models quote strings where other types are allowed too.
    return value if isinstance(value, str) and "string" in types and len(types) > 1 else text


def _untyped(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
