"""Reads tool calls in the syntaxes of `families.toml`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress

from diskprefix.chat.output.call_patterns import CallPatterns
from diskprefix.chat.output.call_values import OfferedTools, ParsedCall, braces, elements, python_calls, value_of
from diskprefix.chat.output.families import Family
from diskprefix.chat.output.format import OutputDelta, ToolCallBegin, ToolCallDelta
from diskprefix.chat.output.reader import Parsing, Reader, Take
from diskprefix.json_values import written

_NAME_KEYS = {"name", "tool_name", "function", "function_name", "tool"}
_ARGUMENT_KEYS = {"arguments", "parameters", "args", "params", "input"}
_OTHER_KEYS = {"id", "type", "tool_call_id", "call_id", "index"}


class CallDeltas:
    """Emits the deltas of the calls of one reply, and counts the calls."""

    def __init__(self, emit: Callable[[OutputDelta], None]) -> None:
        self._emit = emit
        self.count = 0

    def begin(self, name: str) -> None:
        """Begins a call. The next arguments belong to it."""
        self._emit(ToolCallBegin(self.count, name))
        self.count += 1

    def arguments(self, text: str) -> None:
        """Adds JSON text to the arguments of the newest call."""
        if text:
            self._emit(ToolCallDelta(self.count - 1, text))

    def whole(self, call: ParsedCall) -> bool:
        """Emits a whole call. Returns False if its arguments are nested too deeply."""
        try:
            arguments = written(call.arguments)
        except RecursionError:
            return False
        self.begin(call.name)
        self.arguments(arguments)
        return True


class CallReader:
    """Reads calls of one family from `reader` and hands them to `calls`."""

    def __init__(self, reader: Reader, family: Family, tools: OfferedTools, calls: CallDeltas) -> None:
        self._reader = reader
        self._family = family
        self._tools = tools
        self._calls = calls
        self._patterns = CallPatterns(family)

    def group(self) -> Parsing[bool]:
        """Reads the calls after an opening tag, and the closing tag if there is one. Returns whether any was read."""
        start = self._calls.count
        if self._family.body == "python":
            yield from self._reader.space()
            reader, patterns = self._reader, self._patterns
            rest = reader.before(patterns.ends, patterns.ends_or_strings) if self._family.ends else reader.brackets()
            self._all(python_calls((yield from rest) or "", self._tools))
        else:
            more = bool(self._family.ends or self._family.bare)
            while (yield from self._call()) and more:
                pass
        if self._calls.count == start:
            return False
        yield from self._reader.space()
        yield from self._reader.match(self._patterns.ends)
        return True

    def _call(self) -> Parsing[bool]:
        start = self._reader.at
        yield from self._reader.space()
        if self._patterns.head and (match := (yield from self._reader.match(self._patterns.head))):
            done = yield from self._after_head(match["name"].strip())
        else:
            done = yield from self.objects(known_only=False)
        if not done:
            self._reader.back_to(start)
        return done

    def _after_head(self, name: str) -> Parsing[bool]:
        body, reader = self._family.body, self._reader
        if body in ("braces", "elements"):
            return (yield from self._whole(name))
        if body == "parameters":
            self._calls.begin(name)
            yield from self._parameters(name)
        elif (first := (yield from reader.peek())) == "{":
            self._calls.begin(name)
            yield from self._arguments()
        elif first == "(":
            source = yield from reader.brackets()
            return self._all(python_calls(f"{name}{source or ''}", self._tools))
        elif reader.at < len(reader.text) and not (yield from reader.match(self._patterns.tail)):
            return False
        else:
            return self._all([ParsedCall(name, {})])
        yield from reader.space()
        while (yield from reader.match(self._patterns.tail)):
            yield from reader.space()
        return True

    def objects(self, *, known_only: bool) -> Parsing[bool]:
        """Reads calls that are JSON objects, in a row or in an array. Returns whether there was a call. With
        `known_only`, an object is a call only if it has arguments and the name of a tool of the request."""
        reader, has_call = self._reader, False
        if in_array := (yield from reader.peek()) == "[":
            reader.at += 1
        while True:
            start = reader.at
            if has_call and (yield from reader.peek()) in {",", ";"}:
                reader.at += 1
            is_object = (yield from reader.peek()) == "{"
            if not is_object or not (yield from self._object(known_only)):
                reader.back_to(start)
                break
            has_call = True
        if has_call and in_array and (yield from reader.peek()) == "]":
            reader.at += 1
        return has_call

    def _object(self, known_only: bool, *, is_inner: bool = False) -> Parsing[bool]:
        """Reads an object. Returns whether a call has begun. `is_inner`: the object is inside another object, as in
        {"function": {…}}."""
        reader = self._reader
        name, early, begun = "", "", False
        reader.at += 1
        while (following := (yield from reader.peek())) and following in ',"':
            if following == ",":
                reader.at += 1
            key = _text((yield from reader.string()))
            if key is None or (yield from reader.peek()) != ":":
                return begun
            reader.at += 1
            if begun:
                yield from reader.json(_discard)
            elif self._family.call.startswith("{NAME"):
                begun = yield from self._begin(key)
            elif key in _NAME_KEYS and not name:
                if not is_inner and (yield from reader.peek()) == "{":
                    begun = yield from self._object(known_only, is_inner=True)
                    if not begun:
                        return False
                    continue
                name = _text((yield from reader.string())) or ""
                if known_only and name not in self._tools:
                    return False
                begun = bool(early) and (yield from self._begin(name, early))
            elif key in _ARGUMENT_KEYS and not name and not early:
                pieces: list[str] = []
                yield from reader.json(pieces.append)
                early = "".join(pieces)
            elif key in _ARGUMENT_KEYS and name:
                begun = yield from self._begin(name)
            elif known_only and key not in _OTHER_KEYS:
                return False
            else:
                yield from reader.json(_discard)
        if following == "}":
            reader.at += 1
            if name and not begun and not known_only:
                self._calls.whole(ParsedCall(name, {}))
                return True
        return begun

    def _begin(self, name: str, arguments: str = "") -> Parsing[bool]:
        """Begins a call. Reads its arguments if they are not given."""
        self._calls.begin(name)
        if arguments:
            self._calls.arguments(_unquoted(arguments))
        else:
            yield from self._arguments()
        return True

    def _arguments(self) -> Parsing[None]:
        """Reads arguments in JSON. An object is emitted as it arrives."""
        reader = self._reader
        reader.forget()
        if (yield from reader.peek()) == "{":
            yield from reader.json(self._calls.arguments, forgets=True)
        else:
            pieces: list[str] = []
            yield from reader.json(pieces.append)
            self._calls.arguments(_unquoted("".join(pieces)))

    def _parameters(self, name: str) -> Parsing[None]:
        """Reads arguments with tags of their own. Text is emitted as it arrives."""
        reader, before = self._reader, "{"
        while True:
            reader.forget()
            yield from reader.space()
            if (match := (yield from reader.match(self._patterns.argument))) is None:
                break
            key = match["key"].strip()
            self._calls.arguments(f"{before}{written(key)}: ")
            before = ", "
            kind = match.groupdict().get("kind")
            is_text = kind in ("true", "string") or (kind is None and self._tools.is_text(name, key))
            if not (yield from (self._text_value() if is_text else self._value(name, key))):
                return
        self._calls.arguments("{}" if before == "{" else "}")

    def _text_value(self) -> Parsing[bool]:
        """Reads a text with its end tag. Returns whether the tag was there."""
        self._calls.arguments('"')
        is_complete = yield from self._up_to_end(lambda text: self._calls.arguments(written(text)[1:-1]))
        self._calls.arguments('"' if is_complete else "")
        return is_complete

    def _value(self, name: str, key: str) -> Parsing[bool]:
        pieces: list[str] = []
        is_complete = yield from self._up_to_end(pieces.append)
        text = "".join(pieces)
        try:
            self._calls.arguments(written(value_of(text, self._tools.properties(name).get(key))))
        except RecursionError:
            self._calls.arguments(written(text))
        return is_complete

    def _up_to_end(self, take: Take) -> Parsing[bool]:
        match = yield from self._reader.until(self._patterns.argument_end, take)
        if match is not None:
            self._reader.at = match.end()
        return match is not None

    def _whole(self, name: str) -> Parsing[bool]:
        """Reads arguments that are parsed as a whole."""
        reader, quotes = self._reader, self._family.quotes
        arguments: object = None
        if self._family.body == "braces":
            arguments = braces(
                (yield from reader.before(self._patterns.ends, self._patterns.ends_or_strings)) or "", quotes
            )
        else:
            text = (yield from reader.before(self._patterns.tail)) or ""
            if (yield from reader.match(self._patterns.tail)):
                arguments = elements(text, quotes, {"properties": self._tools.properties(name)})
        return isinstance(arguments, dict) and self._all([ParsedCall(name, arguments)])

    def _all(self, calls: Sequence[ParsedCall]) -> bool:
        """Emits calls that were parsed as a whole. Returns whether any was emitted."""
        return sum(map(self._calls.whole, calls)) > 0


def _discard(text: str) -> None:
    """Ignores the text of a value, such as an id or a type."""


def _text(quoted: str | None) -> str | None:
    """Returns the text of a JSON string, None if there is none."""
    with suppress(ValueError):
        return None if quoted is None else str(json.loads(quoted, strict=False))
    return None


def _unquoted(arguments: str) -> str:
    """Returns arguments as the JSON text of an object, from null or from a string with such text; others unchanged."""
    if arguments.startswith('"'):
        text = (_text(arguments) or "").strip()
        return text if text.startswith("{") else arguments if text else "{}"
    return "{}" if arguments in ("null", "") else arguments
