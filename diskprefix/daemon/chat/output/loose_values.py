"""Values as models write them: JSON, Python, strings whose quotes are in the text too, and texts without quotes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Any

from diskprefix.daemon.chat.messages import JsonObject
from diskprefix.daemon.json_values import values_as_written

NAMES: dict[str, object] = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_KEY = r"[A-Za-z_][\w.\-]*"
_QUOTED_KEY = r"(?:'[^'\n]*'|\"[^\"\n]*\")"
_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_BARE_KEY = re.compile(_KEY)
_WORD = re.compile(r"\w+")
_ITEM = r"['\"\[({]|-?\d|(?:true|false|null|True|False|None)\b"
_BEFORE = r"(?<=\S)\s*"
"""White space after a value. The lookbehind keeps searches linear."""
_ESCAPES = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(\n)|(['\"\\/nrtbf0]))")
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "0": "\0"}
_CALL = re.compile(rf"\s*({_KEY})\s*\(")
_ARGUMENT = re.compile(rf"\s*({_KEY})\s*=\s*")
_NOTHING = re.compile(r"(?<![\s\])}])[\s\])}]*\Z")
_IN_OBJECT = re.compile(rf"{_BEFORE}(?:,\s*(?:{_QUOTED_KEY}|{_KEY})\s*:|(?:,\s*)?\}})")
_AFTER_KEY = re.compile(rf"{_BEFORE}:")


class LooseText:
    """A text with values, which are read one after the other. Raises `ValueError` for what cannot be read, and
    `RecursionError`. The work is linear.

    A quote ends a string only if what follows can follow a value there: a comma and the next key or item, or the end of
    the object, list or call. So a text may hold quotes. `quotes` are other quotes than those of Python. Objects may
    have keys without quotes. With `bare`, which returns the value of such a text by its schema, so may values.
    """

    def __init__(self, text: str, quotes: str = "", bare: Callable[[str, object], object] | None = None) -> None:
        self._text = text
        self._at = 0
        self._quotes = [quotes, "'", '"'] if quotes else ["'", '"']
        self._bare = bare
        item = rf"{re.escape(quotes)}|{_ITEM}" if quotes else _ITEM
        if bare is not None:
            item = r"[^\s,]"
        self._in_list = re.compile(rf"{_BEFORE}(?:,\s*(?:{item})|(?:,\s*)?[\])])")

    def whole(self, schemas: JsonObject | None = None) -> Any:
        """Returns the value that the text is, with nothing but closing brackets after it. `schemas` are those of an
        object's members: texts without quotes become values of their types."""
        value = self._value(_NOTHING, schemas)
        if self._text[self._at :].strip(" \t\r\n])}"):
            raise ValueError("more than a value")
        return value

    def calls(self, keys_of: Any) -> list[tuple[str, JsonObject]]:
        """Returns Python calls with named arguments, in a list or not. `keys_of` returns the arguments of a tool."""
        calls = []
        self._skip("[")
        while match := _CALL.match(self._text, self._at):
            self._at = match.end()
            calls.append((match[1], self._named_arguments(keys_of(match[1]))))
            self._skip(",;")
        if self._text[self._at :].strip(" \t\r\n];"):
            raise ValueError("more than calls")
        return calls

    def _named_arguments(self, keys: Collection[str]) -> JsonObject:
        key = "|".join(map(re.escape, keys)) or _KEY
        follows = re.compile(rf"{_BEFORE}(?:,\s*(?:{key})\s*=|(?:,\s*)?\)\s*(?:(?:\]\s*)?\Z|(?:[,;]\s*)?{_KEY}\s*\())")
        arguments: JsonObject = {}
        while not self._skip(")", most=1):
            if (match := _ARGUMENT.match(self._text, self._at)) is None or match[1] in arguments:
                raise ValueError("no argument")
            self._at = match.end()
            arguments[match[1]] = self._value(follows)
            self._skip(",", most=1)
        return arguments

    def _value(self, follows: re.Pattern[str], schemas: JsonObject | None = None, schema: object = None) -> Any:
        self._space()
        for quote in self._quotes:
            if self._text.startswith(quote, self._at):
                return self._string(quote, follows)
        char = self._text[self._at : self._at + 1]
        if char == "{":
            return self._object(schemas or {})
        if char in ("[", "("):
            return self._list("]" if char == "[" else ")")
        return self._unquoted(follows, schema)

    def _object(self, schemas: JsonObject) -> JsonObject:
        self._at += 1
        members: JsonObject = {}
        while not self._skip("}", most=1):
            self._space()
            key = self._key()
            if key in members or not self._skip(":", most=1):
                raise ValueError("no member")
            members[key] = self._value(_IN_OBJECT, schema=schemas.get(key))
            if not self._skip(",", most=1) and self._text[self._at : self._at + 1] != "}":
                raise ValueError("no end of a member")
        return members

    def _key(self) -> str:
        for quote in self._quotes:
            if self._text.startswith(quote, self._at):
                return self._string(quote, _AFTER_KEY)
        if (match := _BARE_KEY.match(self._text, self._at)) is None:
            raise ValueError("no key")
        self._at = match.end()
        return match[0]

    def _list(self, end: str) -> list[Any]:
        self._at += 1
        items = []
        while not self._skip(end, most=1):
            items.append(self._value(self._in_list))
            if not self._skip(",", most=1) and self._text[self._at : self._at + 1] != end:
                raise ValueError("no end of an item")
        return items

    def _string(self, quote: str, follows: re.Pattern[str]) -> str:
        start = self._at + len(quote)
        if len(quote) == 1 and self._text.startswith(quote * 2, start):
            quote, start = quote * 3, start + 2
        end = self._text.find(quote, start)
        while end >= 0 and not self._ends_string(end, len(quote), start, follows):
            end = self._text.find(quote, end + 1)
        if end < 0:
            raise ValueError("a string without an end")
        self._at = end + len(quote)
        self._space()
        inner = self._text[start:end]
        return _unescaped(inner) if quote[0] in "'\"" else inner

    def _ends_string(self, at: int, length: int, start: int, follows: re.Pattern[str]) -> bool:
        """Returns whether the quote at `at` ends the string. In objects and lists, whose ends texts often have, an
        escaped quote does not."""
        if follows.match(self._text, at + length) is None:
            return False
        first = at
        while length == 1 and first > start and self._text[first - 1] == "\\":
            first -= 1
        return (at - first) % 2 == 0 or follows not in (_IN_OBJECT, self._in_list)

    def _unquoted(self, follows: re.Pattern[str], schema: object) -> Any:
        """Returns a number, a constant, or a text without quotes."""
        word = _WORD.match(self._text, self._at)
        if word is not None and word[0] in NAMES and follows.match(self._text, word.end()):
            self._at = word.end()
            return NAMES[word[0]]
        if self._bare is not None and (end := follows.search(self._text, self._at)) is not None:
            text, self._at = self._text[self._at : end.start()], end.start()
            if not text or any(char in text for char in "{}[]"):
                raise ValueError("no value")
            return self._bare(text, schema)
        if (match := _NUMBER.match(self._text, self._at)) and follows.match(self._text, match.end()):
            self._at = match.end()
            return values_as_written(match[0])
        raise ValueError("no value")

    def _space(self) -> None:
        match = _SPACE.match(self._text, self._at)
        assert match is not None
        self._at = match.end()

    def _skip(self, chars: str, *, most: int = 1000) -> int:
        """Skips white space and up to `most` of `chars`. Returns how many of them."""
        self._space()
        count = 0
        while count < most and self._text[self._at : self._at + 1] in tuple(chars):
            self._at += 1
            count += 1
            self._space()
        return count


def _unescaped(text: str) -> str:
    """Returns the text of a string of JSON or Python. Other backslashes stay."""
    if "\\" not in text:
        return text
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return _ESCAPES.sub(_character, text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _character(match: re.Match[str]) -> str:
    if code := match[1] or match[2]:
        return chr(int(code, 16))
    return "" if match[3] else _ESCAPED.get(match[4], match[4])
