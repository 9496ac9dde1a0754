"""Lark grammars for llguidance: forced tool calls, and calls that have begun, in a family's own syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import regex

from diskprefix.daemon.chat.messages import JsonObject
from diskprefix.daemon.chat.output.call_patterns import compiled_for
from diskprefix.daemon.chat.output.call_values import BARE_KEY, OfferedTools, values_of
from diskprefix.daemon.chat.output.families import Family
from diskprefix.errors import InvalidRequest
from diskprefix.values import NO_ASKER, Asker

_AS_TEMPLATES_WRITE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The layout of jinja's tojson, which the model has seen in prompts."""
_MAX_CHARS = 1 << 19
"""The most characters of a grammar. The definitions of a schema are repeated for each argument."""
_NUMBER = " /[0-9]{1,2}/ "
_BLANKS = r"/\s{0,8}/"
_DEFINITIONS = ("$defs", "definitions")
_JOINED_BY = {"python": ", ", "braces": ","}


class CallGrammar:
    """The grammars of calls of `tools` in the syntax of `family`.

    `token_ids` has the tags that are added tokens. A model must write the token, not its letters: llguidance considers
    all added tokens special, so it would refuse letters that it forced itself.
    """

    def __init__(
        self, family: Family, tools: Sequence[JsonObject], token_ids: Mapping[str, int], asker: Asker = NO_ASKER
    ) -> None:
        self._asker = asker
        self._family = family
        self._functions: list[JsonObject] = [tool["function"] for tool in tools]
        self._tools = OfferedTools(tools)
        self._token_ids = token_ids
        special = "|".join(map(re.escape, sorted(token_ids, key=len, reverse=True))) or r"(?!)"
        self._special = re.compile(f"({special})")
        self._rules: list[str] = []
        self._arguments_rules: dict[int, str] = {}
        self._num_chars = 0

    def forced(self, *, many: bool) -> str:
        """Returns the grammar of one call, or with `many` of one or more calls."""
        family = self._family
        calls = [self._call(index, family.whole_call, f"call_{index}") for index in range(len(self._functions))]
        many = many and not family.only_one
        more = f"({self._literal(family.between)} call)*" if many else ""
        # A model may write a line end after its last call.
        after = self._literal(family.after) or (_BLANKS if many else "")
        start = f"start: {self._literal(family.before)} call {more} {after}"
        return "\n".join([start, f"call: {' | '.join(calls)}", *self._rules]) + "\n"

    @property
    def beginning(self) -> regex.Pattern[str]:
        """The pattern of a text with which a call begins: a tag, as a group, or an object up to its arguments."""
        tags = (f"({re.escape(tag)})" for tag in self._tags)
        return compiled_for(self._asker, "|".join([*tags, _object_head(self._functions)]))

    def begun(self) -> str:
        """Returns the grammar of calls, beginning with the text that `beginning` matches. The number of the group
        stands for a tag, because no grammar accepts the letters of a special token."""
        starts = [f'"{number}" {self._opened(number, tag)}' for number, tag in enumerate(self._tags, start=1)]
        for index, function in enumerate(self._functions):
            # No template writes such calls, so the model chooses their layout.
            arguments = self._rule(f"object_{index}", f"%json {json.dumps(_object(function), ensure_ascii=False)}")
            starts.append(rf'/{_written(_object_head([function]))}/ /"\s*:/ {_BLANKS} {arguments} {_BLANKS} "}}"')
        return "\n".join([f"start: {' | '.join(starts)}", *self._rules]) + "\n"

    def forbidden(self) -> str:
        """Returns the grammar of any text without the beginning of a call. If a call begins with several added tokens,
        the tokens that thoughts and messages also need are allowed."""
        begins = [re.escape(tag) for tag in self._family.begins]
        if self._functions:
            begins.append(_object_head(self._functions))
        if self._family.body == "python":
            begins.append(rf"\[\s*({'|'.join(re.escape(function['name']) for function in self._functions)})\s*\(")
        opening = set(self._special.findall("".join(self._family.begins)))
        tokens = " | ".join(f"<[{token_id}]>" for tag, token_id in self._token_ids.items() if tag not in opening)
        # Two texts are never adjacent: together they could form the beginning of a call.
        more = f"(({tokens}) TEXT?)*" if tokens else ""
        return f"start: TEXT? {more}\nTEXT: /(?s:.+)/ & ~/(?s:.*)({_written('|'.join(begins))})(?s:.*)/\n"

    @property
    def _tags(self) -> list[str]:
        """The tags that open calls and that the chat template writes."""
        written = self._family.before + self._family.whole_call
        return [tag for tag in self._family.begins if tag in written]

    def _opened(self, number: int, tag: str) -> str:
        """Returns the rule of the text after an opening tag. Templates differ in the blanks there."""
        family = self._family
        rest, of_each = family.before.partition(tag)[2], family.whole_call
        if tag not in family.before:
            rest, of_each = "", (of_each if tag in family.begin else family.call).partition(tag)[2]
        calls = [self._call(index, of_each.strip(), f"call_{number}_{index}") for index in range(len(self._functions))]
        call = f"{_BLANKS} {self._rule(f'calls_{number}', ' | '.join(calls))}"
        if tag not in family.before:
            return call
        between, after = self._literal(family.between.rstrip()), self._literal(family.after.strip())
        blanks = _BLANKS if after else ""
        return f"{_BLANKS} {self._literal(rest.strip())} {call} ({blanks} {between} {call})* {blanks} {after}"

    def _call(self, index: int, template: str, name: str) -> str:
        """Returns the rule of a call in the form of `template`, which may be only the part after a tag."""
        before, after = template.split("ARGUMENTS")
        head = self._literal(before, NAME=self._name(self._functions[index]))
        return self._rule(name, f"{head} {self._arguments_of(index)} {self._literal(after)}")

    def _arguments_of(self, index: int) -> str:
        function = self._functions[index]
        if index not in self._arguments_rules:
            if self._family.argument:
                rule = self._arguments(index, function.get("parameters") or {})
            else:
                rule = self._json(f"arguments_{index}", _object(function))
            self._arguments_rules[index] = f'"{{" {rule} "}}"' if self._family.body == "braces" else rule
        return self._arguments_rules[index]

    def _name(self, function: JsonObject) -> str:
        is_json = self._family.body == "objects"
        return json.dumps(function["name"], ensure_ascii=False) if is_json else str(function["name"])

    def _arguments(self, index: int, schema: JsonObject) -> str:
        """Returns the rule of arguments, in the order that templates use: the schema's, or alphabetical in braces.
        Arguments are optional unless `required` lists them."""
        properties = self._tools.properties(self._functions[index]["name"])
        if self._family.body == "braces":
            properties = dict(sorted(properties.items()))
        named = schema.get("required")
        required = {key for key in named if isinstance(key, str)} if isinstance(named, list) else set()
        separator = self._literal(_JOINED_BY.get(self._family.body, ""))
        definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
        first, rest = '""', '""'
        # From the last to the first: an argument needs a separator only after another argument.
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
        body, argument = self._family.body, self._family.argument
        is_text = body != "python" and self._tools.is_text(self._functions[index]["name"], key)
        kind = "string" if is_text else _type_of(schema)
        if body == "braces":
            key = key if BARE_KEY.fullmatch(key) else json.dumps(key)
            argument = (
                argument.replace("VALUE", f"{self._family.quotes}VALUE{self._family.quotes}") if is_text else argument
            )
        # Split before the client's text is inserted.
        before, after = (
            _filled(part, KEY=key, IS_TEXT=str(is_text).lower(), TYPE=kind) for part in argument.split("VALUE")
        )
        if not is_text:
            value = f"{self._json(f'value_{label}', schema)} {self._terminals(after)}"
        elif values := values_of(schema):
            ends = re.compile(self._ends_of_text(after))
            texts = [self._terminals(text) for text in map(str, values) if not ends.search(text + after.strip())]
            if not texts:
                raise InvalidRequest.at("tools", f"no call of this model can hold a value of {key!r}")
            value = f"({' | '.join(texts)}) {self._terminals(after)}"
        else:
            value = self._free_text(label, after)
        return self._rule(f"argument_{label}", f"{self._terminals(before)} {value}")

    def _ends_of_text(self, after: str) -> str:
        """Returns the regular expression of what ends a text before its tag, for the reader: the tag, if an argument or
        the end of the call follows, and where models omit the tag these two alone."""
        family = self._family
        opening, tail = family.argument.partition("KEY")[0], family.call.split("ARGUMENTS")[1].strip()
        first = family.call.partition("NAME")[0].strip()
        nexts = "|".join(map(re.escape, filter(None, (opening, tail, first, *family.ends, *family.begins))))
        ends = [rf"{re.escape(after.strip())}\s*({nexts})"]
        if after.startswith("\n"):
            ends += [rf"\n{re.escape(opening)}", rf"{re.escape(tail)}\s*({'|'.join(map(re.escape, family.ends))})"]
        return "|".join(ends)

    def _free_text(self, label: str, after: str) -> str:
        """Returns the rule of any text that does not end earlier for the reader, and of its end."""
        name = f"TEXT_{label}"
        if self._special.match(after) is not None:
            text = self._rule(name, f"/(?s:.*)/ & ~/(?s:.*)({_written(re.escape(after.strip()))})(?s:.*)/")
            return f"{text} {self._terminals(after)}"
        text = self._rule(name, f"/(?s:.*)/ & ~/(?s:.*)({_written(self._ends_of_text(after))})(?s:.*)/")
        return self._rule(f"text_{label}[suffix={json.dumps(after)}]", text, name=f"text_{label}")

    def _json(self, name: str, schema: Any) -> str:
        options = {"x-guidance": _AS_TEMPLATES_WRITE}
        return self._rule(name, f"%json {json.dumps(schema | options, ensure_ascii=False)}")

    def _rule(self, head: str, expression: str, *, name: str | None = None) -> str:
        self._num_chars += len(expression)
        if self._num_chars > _MAX_CHARS:
            raise InvalidRequest.at("tools", f"make a grammar of more than {_MAX_CHARS} characters")
        self._rules.append(f"{head}: {expression}")
        return name or head

    def _literal(self, template: str, **values: str) -> str:
        """Returns a part of a template, with its values in place, as terminals."""
        return _NUMBER.join(self._terminals(_filled(part, **values)) for part in template.split("INDEX"))

    def _terminals(self, text: str) -> str:
        """Returns `text` as terminals; "" for an empty text."""
        return " ".join(
            f"<[{self._token_ids[piece]}]>" if piece in self._token_ids else json.dumps(piece, ensure_ascii=False)
            for piece in self._special.split(text)
            if piece
        )


def _object_head(functions: Sequence[JsonObject]) -> str:
    """Returns the regular expression of a call without tags, up to the key of its arguments. Stops before the closing
    quote, because one token may end the key and begin the arguments."""
    names = "|".join(re.escape(json.dumps(function["name"], ensure_ascii=False)) for function in functions)
    return rf'\{{\s*"name"\s*:\s*(?:{names})\s*,\s*"(?:arguments|parameters)'


def _object(function: JsonObject) -> JsonObject:
    """Returns the schema of a function's arguments, which are an object. Clients cannot choose the layout of the
    text."""
    schema = {"type": "object"} | (function.get("parameters") or {})
    return {key: value for key, value in schema.items() if key != "x-guidance"}


def _written(pattern: str) -> str:
    """Returns a regular expression in Lark's syntax, for use between slashes."""
    return pattern.replace("/", r"\/").replace("\\\n", "\\n")


def _filled(template: str, **values: str) -> str:
    """Returns a part of a template with its placeholders replaced. Placeholders in the values stay."""
    if not values:
        return template
    return re.sub("|".join(sorted(values, key=len, reverse=True)), lambda match: values[match[0]], template)


def _type_of(schema: Any) -> str:
    """Returns the JSON type of an argument that is not text, "object" if there may be several."""
    declared = schema.get("type")
    return "number" if declared == "integer" else declared if isinstance(declared, str) else "object"
