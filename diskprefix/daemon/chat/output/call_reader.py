"""Reads tool calls in the syntaxes of `families.toml`."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import regex

from diskprefix.daemon.chat.messages import JsonObject
from diskprefix.daemon.chat.output.call_patterns import (
    ARGUMENT_KEYS,
    KNOWN_KEYS,
    NAME_KEYS,
    OTHER_KEYS,
    CallPatterns,
    any_of,
    patterns_of,
)
from diskprefix.daemon.chat.output.call_values import OfferedTools, ParsedCall, braces, elements, python_calls, value_of
from diskprefix.daemon.chat.output.families import Family
from diskprefix.daemon.chat.output.format import OutputDelta, ToolCallBegin, ToolCallDelta
from diskprefix.daemon.chat.output.loose_values import LooseText
from diskprefix.daemon.chat.output.reader import Parsing, Reader, Take
from diskprefix.daemon.json_values import written

WRAPPERS = (
    *("tools", "tool", "tool_call", "tool_calls", "function_call", "function_calls"),
    *("response", "json", "JSON", "xml"),
)
"""Names of tags that small models write around calls, in spite of their template."""
WRAPPER_END = any_of(["```", *(f"</{name}>" for name in WRAPPERS)])
_NAME = regex.compile(r"[^\s\"'{}\\]+")
_FENCE = regex.compile(r"```")
_GOES_ON = regex.compile(r"(?:,\s*)?(?:[\"'\]}\\]|(?:\[\s*)?(?=\{))|:")
"""What follows an object that was closed too early, or another object."""
_MEMBER = regex.compile(r'(?:,\s*)?(?:\[\s*)?\{\s*(?:\}|"[^"\\\n]*"\s*:)')
"""The beginning of an object."""
_OBJECT = regex.compile(r'\{\s*["}]')


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
        self.in_thought = False
        """True in a thought, where any text ends a call: a call counts only if nothing follows it."""
        self._in_array = False
        """True after the bracket of a list of objects."""
        self._in_fence = False
        """True after the fence around objects."""
        self._is_open = False
        """True while the arguments, an object, lack their closing brace: its members may still come."""
        self._last = ""
        """The last character of open arguments."""

    @cached_property
    def _patterns(self) -> CallPatterns:
        return patterns_of(self._family)

    def group(self) -> Parsing[bool]:
        """Reads the calls after an opening tag, and the closing tag if there is one. Returns whether any was read."""
        start = self._calls.count
        if self._family.body == "python":
            yield from self._reader.space()
            reader, patterns = self._reader, self._patterns
            rest = reader.before(patterns.ends, patterns.ends_or_strings) if self._family.ends else reader.brackets()
            source = yield from rest
            yield from reader.space()
            if (yield from self._ends_whole()):
                self._all(python_calls(source or "", self._tools))
        else:
            more = bool(self._family.ends or self._family.bare)
            while (yield from self._call()) and more:
                pass
        if self._calls.count == start:
            return False
        yield from self._reader.space()
        yield from self._reader.match(self._patterns.ends)
        return True

    def _ends_whole(self) -> Parsing[bool]:
        """Returns whether calls that are read as a whole end here: with their tag, or where the model ended the reply.
        If the family has no tag, text may follow on another line."""
        if not self._family.ends:
            return self._reader.begins_line
        return self._reader.is_over or (yield from self._reader.looks_at(self._patterns.ends))

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
            done = yield from self._parameters(name)
        elif (yield from reader.peek()) == "(":
            source = yield from reader.brackets()
            return self._all(python_calls(f"{name}{source or ''}", self._tools))
        elif (yield from reader.looks_at(_OBJECT)):
            self._calls.begin(name)
            reader.forget()
            if (yield from reader.json(self._calls.arguments, forgets=True, closes=False)):
                yield from self.stray_braces()
                yield from self._end_arguments()
            done = True
        elif (yield from reader.peek()) == "{":
            value = yield from self._loose(self._patterns.over, self._patterns.over_or_strings)
            done = isinstance(value, dict) and self._all([ParsedCall(name, value)])
        elif not (reader.is_over or (yield from reader.looks_at(self._patterns.closed))):
            return False
        else:
            done = self._all([ParsedCall(name, {})])
        if done:
            yield from reader.space()
            while (yield from reader.match(self._patterns.tail)):
                yield from reader.space()
        return done

    def _is_over(self) -> Parsing[bool]:
        """Returns whether the call is over: its end or another call follows, or the model ended the reply."""
        yield from self._reader.space()
        return self._reader.is_over or (yield from self._reader.looks_at(self._patterns.over))

    def stray_braces(self) -> Parsing[None]:
        """Skips braces that close nothing."""
        while (yield from self._reader.peek()) == "}":
            self._reader.at += 1

    def _ends_here(self, *, is_closed: bool = True, known_only: bool = False) -> Parsing[bool]:
        """Returns whether the object of a call is over. `is_closed`: its brace was read. Then text may follow that does
        not go on as JSON: without a tag at the end behind the list or on another line, and without any tag anywhere. In
        a list or fence, only another object or its end may follow."""
        reader = self._reader
        start = reader.at
        yield from reader.space()
        if ends_list := self._in_array and (yield from reader.peek()) == "]":
            reader.at += 1
            yield from reader.space()
        ends_fence = (yield from reader.match(_FENCE)) is not None
        yield from reader.space()
        after = self._patterns.after_object if is_closed else self._patterns.over
        ends = reader.is_over or self.in_thought or (yield from reader.looks_at(after))
        may_go_on = known_only or (not self._patterns.has_end and (ends_list or reader.begins_line))
        if not ends and is_closed and may_go_on:
            is_inside = not ends_fence and (self._in_fence or (self._in_array and not ends_list))
            goes_on = (
                not (yield from reader.looks_at(WRAPPER_END)) if is_inside else (yield from reader.looks_at(_GOES_ON))
            )
            ends = not goes_on or (yield from reader.looks_at(_MEMBER))
        reader.at = start
        return ends

    def _end_arguments(self, *, is_closed: bool = True, known_only: bool = False) -> Parsing[None]:
        """Closes the arguments, if their call is over. Otherwise the text up to its end is added to them, so that no
        client takes them for whole."""
        if (yield from self._ends_here(is_closed=is_closed, known_only=known_only)):
            self._calls.arguments("}")
        else:
            yield from self._reader.until(self._patterns.over, self._calls.arguments)

    def objects(self, *, known_only: bool, in_fence: bool = False) -> Parsing[bool]:
        """Reads calls that are JSON objects, in a row or in an array, `in_fence` after the fence around them. Returns
        whether there was a call. With `known_only`, an object is a call only if it has arguments and the name of a tool
        of the request."""
        reader, has_call = self._reader, False
        self._in_fence = in_fence
        self._in_array = (yield from reader.peek()) == "["
        if self._in_array:
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
        if has_call and self._in_array and (yield from reader.peek()) == "]":
            reader.at += 1
        if has_call or known_only or (yield from reader.peek()) not in {"{", "["}:
            return has_call
        value = yield from self._loose(self._patterns.ends, self._patterns.ends_or_strings)
        calls = [self._call_of(each) for each in (value if isinstance(value, list) else [value])]
        return None not in calls and self._all([call for call in calls if call is not None])

    def _loose(self, end: regex.Pattern[str], end_or_string: regex.Pattern[str]) -> Parsing[object]:
        """Returns the value up to a match of `end` that is not in a string, which is not JSON. None if it cannot be
        read."""
        text = yield from self._reader.before(end, end_or_string)
        if self._reader.is_over or (yield from self._reader.looks_at(end)):
            with suppress(ValueError, RecursionError):
                return LooseText(text or "").whole()
        return None

    def _call_of(self, value: object) -> ParsedCall | None:
        """Returns the call that a value is, None if it is none."""
        members: JsonObject = value if isinstance(value, dict) else {}
        if self._family.call.startswith("{NAME"):
            members = {"name": next(iter(members), None), "arguments": next(iter(members.values()), None)}
        name = _named(members)
        while isinstance(name, dict):
            members, name = name, _named(name)
        arguments: Any = next((member for key, member in members.items() if key in ARGUMENT_KEYS), {})
        if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(arguments, dict):
            return None
        others = {key: value for key, value in members.items() if key not in KNOWN_KEYS}
        return ParsedCall(name, arguments | others)

    def _object(self, known_only: bool, *, is_inner: bool = False) -> Parsing[bool]:
        """Reads an object. Returns whether a call has begun. `is_inner`: the object is inside another object, as in
        {"function": {…}}. Members beside the arguments, which models write there by mistake, are arguments too."""
        reader = self._reader
        name, early, begun = "", "", False
        others: list[str] = []
        reader.at += 1
        while (following := (yield from reader.peek())) and following in ',"':
            start = reader.at
            if following == ",":
                reader.at += 1
            key = _text((yield from reader.string()))
            if key is None or (yield from reader.peek()) != ":":
                reader.at = start
                break
            reader.at += 1
            if not (yield from reader.peek()):
                break
            if begun:
                if not (yield from self._member(key)):
                    return True
            elif self._family.call.startswith("{NAME"):
                if not (begun := (yield from self._begin(key))):
                    return False
            elif key in NAME_KEYS and not name:
                if not is_inner and (yield from reader.peek()) == "{":
                    begun = yield from self._object(known_only, is_inner=True)
                    if not begun:
                        return False
                    continue
                name = _text((yield from reader.string())) or ""
                if known_only and name not in self._tools:
                    return False
                if early and not (begun := (yield from self._begin(name, early, others))):
                    return False
            elif key in ARGUMENT_KEYS and not name and not early:
                pieces: list[str] = []
                if not (yield from reader.json(pieces.append)):
                    return False
                early = "".join(pieces)
            elif key in ARGUMENT_KEYS and name:
                if not (begun := (yield from self._begin(name, "", others))):
                    return False
            elif known_only and key not in OTHER_KEYS:
                return False
            else:
                pieces = []
                if not (yield from reader.json(pieces.append)):
                    return False
                if key not in KNOWN_KEYS:
                    others.append(f"{written(key)}: {''.join(pieces)}")
        unbegun = "" if begun else name
        return begun | (yield from self._end_object(unbegun, others, is_inner=is_inner, known_only=known_only))

    def _end_object(self, name: str, others: Sequence[str], *, is_inner: bool, known_only: bool) -> Parsing[bool]:
        """Reads the end of an object, which is that of its open arguments too. Returns whether a call without arguments
        begins there: that of a tool `name`, "" if a call has begun or none was named."""
        reader, was_open = self._reader, self._is_open
        if is_closed := (yield from reader.peek()) == "}":
            reader.at += 1
            if not is_inner:
                yield from self.stray_braces()
            if name and not known_only and (yield from self._ends_here()):
                self._calls.begin(name)
                self._calls.arguments(f"{{{', '.join(others)}}}")
                return True
        if was_open:
            self._is_open = False
            if is_inner and is_closed:
                self._calls.arguments("}")
            else:
                yield from self._end_arguments(is_closed=is_closed, known_only=known_only)
        return False

    def _begin(self, name: str, arguments: str = "", others: Sequence[str] = ()) -> Parsing[bool]:
        """Begins a call with JSON arguments. Reads them if they are not given; an object is emitted as it arrives.
        Returns False if there are none. `others` are members that belong to them."""
        reader = self._reader
        if not arguments and (yield from reader.peek()) != "{":
            pieces: list[str] = []
            if not (yield from reader.json(pieces.append)):
                return False
            arguments = "".join(pieces)
        elif not arguments and not (yield from reader.looks_at(_OBJECT)):
            return False
        self._calls.begin(name)
        self._last = ""
        if not arguments:
            reader.forget()
            self._is_open = yield from reader.json(self._take, forgets=True, closes=False)
        else:
            arguments = _unquoted(arguments)
            self._is_open = arguments.startswith("{") and arguments.endswith("}")
            self._take(arguments[:-1] if self._is_open else arguments)
        for member in others if self._is_open else ():
            self._take(f"{self._separator}{member}")
        return True

    def _take(self, text: str) -> None:
        """Adds to arguments that are an open object."""
        self._calls.arguments(text)
        self._last = text.rstrip()[-1:] or self._last

    @property
    def _separator(self) -> str:
        return "" if self._last == "{" else ", "

    def _member(self, key: str) -> Parsing[bool]:
        """Reads the value of a member after the arguments. Returns whether it is complete."""
        if not self._is_open or key in KNOWN_KEYS:
            return (yield from self._reader.json(_discard))
        self._take(f"{self._separator}{written(key)}: ")
        self._is_open = yield from self._reader.json(self._take)
        return self._is_open

    def _parameters(self, name: str) -> Parsing[bool]:
        """Reads arguments with tags of their own. Text is emitted as it arrives. Returns whether the call has begun."""
        reader, given = self._reader, set[str]()
        while True:
            yield from reader.space()
            while (yield from reader.match(self._patterns.stray)):
                yield from reader.space()
            if (match := (yield from reader.match(self._patterns.argument))) is None:
                break
            if not given:
                self._calls.begin(name)
            key = match["key"].strip()
            self._calls.arguments(f"{', ' if given else '{'}{written(key)}: ")
            given.add(key)
            kind = match.groupdict().get("kind")
            is_text = kind in ("true", "string") or (kind is None and self._tools.is_text(name, key))
            reader.forget()
            if not (yield from (self._text_value(name, given) if is_text else self._value(name, key, given))):
                return True
            reader.forget()
        if not given:
            is_whole = name in self._tools and (reader.is_over or (yield from reader.looks_at(self._patterns.closed)))
            return is_whole and self._all([ParsedCall(name, {})])
        if (yield from self._is_over()):
            self._calls.arguments("}")
        else:
            # Not whole, so that no client executes it without what cannot be read.
            yield from reader.until(self._patterns.over, self._calls.arguments)
        return True

    def _text_value(self, name: str, given: Collection[str]) -> Parsing[bool]:
        """Reads a text with its end tag. Returns whether the tag was there."""
        self._calls.arguments('"')
        is_complete = yield from self._up_to_end(lambda text: self._calls.arguments(written(text)[1:-1]), name, given)
        self._calls.arguments('"' if is_complete else "")
        return is_complete

    def _value(self, name: str, key: str, given: Collection[str]) -> Parsing[bool]:
        pieces: list[str] = []
        is_complete = yield from self._up_to_end(pieces.append, name, given)
        text = "".join(pieces)
        try:
            self._calls.arguments(written(value_of(text, self._tools.properties(name).get(key))))
        except RecursionError:
            self._calls.arguments(written(text))
        return is_complete

    def _up_to_end(self, take: Take, name: str, given: Collection[str]) -> Parsing[bool]:
        """Passes a value to `take`. Returns whether it has an end. A tag of an argument that is there already, or one
        without the end of this one that the tool does not have, is a part of the value."""
        reader, patterns, known = self._reader, self._patterns, self._tools.properties(name)
        while (match := (yield from reader.until(patterns.argument_end, take, patterns.last_argument_end))) is not None:
            following = (match["next"] or "").strip()
            reader.at = match.end()
            if following not in given and (not following or match[0].strip() or following in known or not known):
                return True
            take(match[0])
        return False

    def _whole(self, name: str) -> Parsing[bool]:
        """Reads arguments that are parsed as a whole."""
        reader, quotes = self._reader, self._family.quotes
        arguments: object = None
        if self._family.body == "braces":
            text = (yield from reader.before(self._patterns.ends, self._patterns.ends_or_strings)) or ""
            if (yield from self._ends_whole()):
                arguments = braces(text, quotes, self._tools.properties(name))
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


def _named(members: JsonObject) -> object:
    """Returns the name in an object that may be a call, or the object in its place; None if it has neither."""
    return next((member for key, member in members.items() if key in NAME_KEYS), None)


def _text(quoted: str | None) -> str | None:
    """Returns the text of a JSON string, None if there is none."""
    with suppress(ValueError):
        return None if quoted is None else str(json.loads(quoted, strict=False))
    return None


def _unquoted(arguments: str) -> str:
    """Returns arguments as the JSON text of an object, from null or from a string with such text; others unchanged."""
    if (text := _text(arguments)) is not None and arguments.startswith('"'):
        text = text.strip()
        return text if text.startswith("{") else arguments if text else "{}"
    return "{}" if arguments in ("null", "") else arguments
