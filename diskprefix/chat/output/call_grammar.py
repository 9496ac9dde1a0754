"""Grammars of forced calls, in a family's own syntax, as llguidance reads them (Lark)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from diskprefix.chat.messages import JsonObject
from diskprefix.chat.output.call_values import OfferedTools
from diskprefix.chat.output.families import Body, Written
from diskprefix.errors import InvalidRequest

_AS_TEMPLATES_WRITE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The layout of JSON for llguidance: that of jinja's tojson, which the model has seen in prompts."""

_MOST_CHARS = 1 << 19
"""The most characters of a grammar. The definitions of a schema are repeated for each argument."""
_NUMBER = " /[0-9]{1,2}/ "
_BLANKS = r"/\s{0,8}/"
_DEFINITIONS = ("$defs", "definitions")
_JOINED_BY = {"python": ", "}


def call_grammar(
    body: Body, written: Written, tools: Sequence[JsonObject], token_ids: Mapping[str, int], *, many: bool
) -> str:
    """Returns the grammar of one call of `tools`, or (`many`) of one or more.

    `token_ids` are the tags that are added tokens: a model must write the token, not its letters. llguidance takes all
    added tokens for special ones, so it would refuse the letters that it forced itself.
    """
    return _Grammar(body, written, tools, token_ids).text(many=many)


class _Grammar:
    def __init__(self, body: Body, written: Written, tools: Sequence[JsonObject], token_ids: Mapping[str, int]) -> None:
        self._body: Body = body
        self._written = written
        self._functions: list[JsonObject] = [tool["function"] for tool in tools]
        self._tools = OfferedTools(tools)
        self._token_ids = token_ids
        special = "|".join(map(re.escape, sorted(token_ids, key=len, reverse=True))) or r"(?!)"
        self._special = re.compile(f"({special})")
        self._rules: list[str] = []
        self._num_chars = 0

    def text(self, *, many: bool) -> str:
        calls = [self._call(index, function) for index, function in enumerate(self._functions)]
        written = self._written
        more = f"({self._literal(written.between)} call)*" if many else ""
        # A model that is done may write a line end before the reply's end.
        after = self._literal(written.after) or (_BLANKS if many else "")
        start = f"start: {self._literal(written.before)} call {more} {after}"
        return "\n".join([start, f"call: {' | '.join(calls)}", *self._rules]) + "\n"

    def _call(self, index: int, function: JsonObject) -> str:
        name = json.dumps(function["name"], ensure_ascii=False) if self._body == "objects" else function["name"]
        before, after = self._written.call.split("ARGUMENTS")
        schema = function.get("parameters") or {}
        if self._written.argument:
            arguments = self._arguments(index, schema)
        else:
            arguments = self._json(f"arguments_{index}", {"type": "object"} | schema)
        return self._rule(f"call_{index}", f"{self._literal(before, NAME=name)} {arguments} {self._literal(after)}")

    def _arguments(self, index: int, schema: JsonObject) -> str:
        """Returns the rule of arguments in the order of the schema. Those that are not required are optional."""
        properties = self._tools.properties(self._functions[index]["name"])
        required = set(schema.get("required") or ())
        separator = self._literal(_JOINED_BY.get(self._body, ""))
        definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
        first, rest = '""', '""'
        # From the last to the first: an argument needs a separator only if another one stands before it.
        for number, (key, value) in reversed(list(enumerate(properties.items()))):
            label = f"{index}_{number}"
            argument = self._argument(label, index, key, value | definitions if isinstance(value, dict) else {})
            optional = key not in required
            begins = f"{argument} {rest}"
            first = self._rule(f"first_{label}", f"{begins} | {first}" if optional else begins)
            follows = f"({separator} {argument})?" if optional else f"{separator} {argument}"
            rest = self._rule(f"rest_{label}", f"{follows} {rest}")
        return first

    def _argument(self, label: str, index: int, key: str, schema: JsonObject) -> str:
        is_text = self._body in ("parameters", "elements") and self._tools.is_text(self._functions[index]["name"], key)
        kind = "string" if is_text else _type_of(schema)
        # Split before text of the client is in it.
        before, after = (
            _filled(part, KEY=key, IS_TEXT=str(is_text).lower(), TYPE=kind)
            for part in self._written.argument.split("VALUE")
        )
        if not is_text:
            value = f"{self._json(f'value_{label}', schema)} {self._terminals(after)}"
        elif values := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
            value = f"({' | '.join(self._terminals(str(one)) for one in values)}) {self._terminals(after)}"
        else:
            value = self._free_text(label, after)
        return self._rule(f"argument_{label}", f"{self._terminals(before)} {value}")

    def _free_text(self, label: str, after: str) -> str:
        """Returns the rule of any text with its end."""
        if self._special.match(after):
            return f"{self._rule(f'text_{label}', '/(?s:.*)/')} {self._terminals(after)}"
        return self._rule(f"text_{label}[suffix={json.dumps(after)}]", "/(?s:.*)/", name=f"text_{label}")

    def _json(self, name: str, schema: Any) -> str:
        options = {"x-guidance": _AS_TEMPLATES_WRITE}
        return self._rule(name, f"%json {json.dumps(schema | options, ensure_ascii=False)}")

    def _rule(self, head: str, expression: str, *, name: str | None = None) -> str:
        self._num_chars += len(expression)
        if self._num_chars > _MOST_CHARS:
            raise InvalidRequest(f"tools: make a grammar of more than {_MOST_CHARS} characters", param="tools")
        self._rules.append(f"{head}: {expression}")
        return name or head

    def _literal(self, template: str, **values: str) -> str:
        """Returns a part of a template, with its values in place, as terminals."""
        return _NUMBER.join(self._terminals(_filled(part, **values)) for part in template.split("INDEX"))

    def _terminals(self, text: str) -> str:
        """Returns `text` as terminals; the empty text as none."""
        return " ".join(
            f"<[{self._token_ids[piece]}]>" if piece in self._token_ids else json.dumps(piece, ensure_ascii=False)
            for piece in self._special.split(text)
            if piece
        )


def _filled(template: str, **values: str) -> str:
    """Returns a part of a template with its values in place. Words in the values are not replaced."""
    if not values:
        return template
    return re.sub("|".join(sorted(values, key=len, reverse=True)), lambda found: values[found[0]], template)


def _type_of(schema: Any) -> str:
    """Returns the JSON type of an argument that is no text; "object" if it may have several."""
    declared = schema.get("type")
    return "number" if declared == "integer" else declared if isinstance(declared, str) else "object"
