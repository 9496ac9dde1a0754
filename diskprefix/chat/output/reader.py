"""Reads a text that comes in pieces. Methods that may need more text are generators that yield to wait for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

import regex

T = TypeVar("T")
Parsing: TypeAlias = Generator[None, None, T]
"""A part of a parser. It yields when it needs more text, and returns a T."""

Take: TypeAlias = Callable[[str], None]

_SPACE = re.compile(r"\s*")
_STRING = regex.compile(r'"(?:[^"\\]|\\.)*"', regex.DOTALL)
_SCALAR_END = regex.compile(r"[\s,;:\[\]{}\"<]")
_DELIMITERS = re.compile(r'["\\{}\[\]<`\x00-\x1f]')
_BRACKETS = re.compile(r"""["'\\()\[\]{}]""")
_SHORT, _SHARE = 256, 8
"""A longer text is parsed again only when it has grown by an eighth."""
_LITTLE, _MAX_IN_VAIN = 4096, 2
"""At most 4096 characters plus twice the reply are parsed as calls in vain."""


class Reader:
    """The text that is not used yet, of which `text[at:]` is unread. Positions are valid until `forget`."""

    def __init__(self) -> None:
        self.text = "\n"
        """Begins with the character before the unread text: a newline at the beginning of a reply."""
        self.at = 1
        self.ended = False
        self._coming: list[str] = []
        self._num_coming = 0
        self._num_read = 0
        self._num_in_vain = 0
        self._furthest = 1

    def add(self, text: str) -> bool:
        """Adds text. Returns whether to read on. Held text may be read again from its beginning, so a long one is only
        read again when it has grown by an eighth: all readings together cost as much as a few of the whole."""
        self._coming.append(text)
        self._num_coming += len(text)
        if self._num_coming * _SHARE < len(self.text) - _SHORT:
            return False
        self._join()
        return True

    def end(self) -> None:
        self.ended = True
        self._join()

    def _join(self) -> None:
        self._num_read += self._num_coming
        self.text = "".join([self.text, *self._coming])
        self._coming.clear()
        self._num_coming = 0

    def forget(self, *, at_line_start: bool = False) -> None:
        """Drops the text that was read. `at_line_start`: the unread text counts as the beginning of a line."""
        self.text = ("\n" if at_line_start else self.text[self.at - 1]) + self.text[self.at :]
        self.at = self._furthest = 1

    def back_to(self, at: int) -> None:
        """Goes back to a position, because no call follows it."""
        self._num_in_vain += max(0, self.at - at)
        self._furthest = max(self._furthest, self.at)
        self.at = at

    def give_up(self, at: int) -> None:
        """Goes back to a position, to look for other calls after it. If much text was read in vain, stays after that
        text instead, because nested values would be read over and over."""
        self.back_to(at)
        if self._num_in_vain > _MAX_IN_VAIN * self._num_read + _LITTLE:
            self.at = max(at, self._furthest)

    def more(self) -> Parsing[bool]:
        """Waits for more text. Returns False if no more comes."""
        if self.ended:
            return False
        yield
        return True

    def space(self) -> Parsing[None]:
        """Skips white space."""
        while True:
            found = _SPACE.match(self.text, self.at)
            assert found is not None
            self.at = found.end()
            if self.at < len(self.text) or not (yield from self.more()):
                return

    def peek(self) -> Parsing[str]:
        """Skips white space. Returns the next character, "" at the end, and does not read it."""
        yield from self.space()
        return self.text[self.at : self.at + 1]

    def match(self, pattern: regex.Pattern[str]) -> Parsing[regex.Match[str] | None]:
        """Reads a match of `pattern` at this position. Returns None, and reads nothing, without one. `pattern` must not
        end with a repetition, because a match ends as soon as it is whole."""
        while True:
            found = pattern.match(self.text, self.at, partial=not self.ended)
            if found is None:
                return None
            if not found.partial:
                self.at = found.end()
                return found
            yield from self.more()

    def looks_at(self, pattern: regex.Pattern[str]) -> Parsing[bool]:
        """Returns whether `pattern` matches at this position. Reads nothing."""
        at = self.at
        found = yield from self.match(pattern)
        self.at = at
        return found is not None

    def until(self, pattern: regex.Pattern[str], take: Take) -> Parsing[regex.Match[str] | None]:
        """Passes the text before a match of `pattern` to `take`. Returns the match, unread, or None at the end."""
        while True:
            found = self._search(pattern)
            end = len(self.text) if found is None else found.start()
            if end > self.at:
                take(self.text[self.at : end])
                self.at = end
            self.forget()
            if found is not None and not found.partial:
                return pattern.match(self.text, self.at)
            if not (yield from self.more()):
                return None

    def _search(self, pattern: regex.Pattern[str]) -> regex.Match[str] | None:
        """Returns the first match of `pattern`, or the text that may become one (`partial`)."""
        found = pattern.search(self.text, self.at, partial=not self.ended)
        if found is None or found.partial or self.ended:
            return found
        # A search prefers a whole match to an earlier one that may become whole.
        at, end = self.at, found.start()
        while (early := pattern.search(self.text, at, end, partial=True)) is not None and early.start() < end:
            growing = pattern.match(self.text, early.start(), partial=True)
            if growing is not None and growing.partial:
                return growing
            at = early.start() + 1
        return found

    def before(self, pattern: regex.Pattern[str], skipping: regex.Pattern[str] | None = None) -> Parsing[str | None]:
        """Reads the text before a match of `pattern`, else the rest. Returns None for an empty text.

        `skipping` matches `pattern`, or a string as the group `string`. Strings count if the reply ends without others.
        """
        while True:
            if skipping is None:
                found = pattern.search(self.text, self.at)
            else:
                matches = skipping.finditer(self.text, self.at)
                found = next((match for match in matches if match["string"] is None), None)
                if found is None and self.ended:
                    found = pattern.search(self.text, self.at)
            if found is not None or not (yield from self.more()):
                read = self.text[self.at : found.start() if found else None]
                self.at += len(read)
                return read or None

    def string(self) -> Parsing[str | None]:
        """Reads a JSON string after white space, with its quotes. Returns None if there is none."""
        yield from self.space()
        found = yield from self.match(_STRING)
        return None if found is None else found[0]

    def json(self, take: Take, *, forgets: bool = False) -> Parsing[bool]:
        """Reads a JSON value and hands its text to `take` as it comes. Returns whether it is complete.

        An object or an array is complete when its brackets are closed, and broken by a tag. Control characters in
        strings, which JSON forbids and small models write, are escaped. `forgets`: no caller goes back to a position
        before the value, so its text is not held.
        """
        first = yield from self.peek()
        if first == '"':
            text = yield from self.string()
            take(self._rest() if text is None else text)
            return text is not None
        if first and first in "{[":
            return (yield from self._nested(take, forgets))
        text = yield from self.before(_SCALAR_END)
        take(text or "")
        return text is not None

    def _rest(self) -> str:
        rest, self.at = self.text[self.at :], len(self.text)
        return rest

    def _nested(self, take: Take, forgets: bool) -> Parsing[bool]:
        depth, in_string, escaped = 0, False, 0
        while True:
            skip = self.at + escaped
            for found in _DELIMITERS.finditer(self.text, skip):
                char, at = found[0], found.start()
                if at < skip:
                    continue
                if in_string:
                    if char == "\\":
                        skip = at + 2
                    elif char == '"':
                        in_string = False
                    elif char < " ":
                        take(self.text[self.at : at] + f"\\u{ord(char):04x}")
                        self.at = at + 1
                elif char == '"':
                    in_string = True
                elif char in "{[":
                    depth += 1
                elif char in "}]":
                    depth -= 1
                    if not depth:
                        take(self.text[self.at : at + 1])
                        self.at = at + 1
                        return True
                elif char in "<`":
                    # No JSON continues like this: a tag follows, and the value is broken.
                    take(self.text[self.at : at])
                    self.at = at
                    return False
            escaped = max(0, skip - len(self.text))
            if self.at < len(self.text):
                take(self._rest())
            if forgets:
                self.forget()
            if not (yield from self.more()):
                return False

    def brackets(self) -> Parsing[str | None]:
        """Reads a Python expression in brackets as a whole. Returns None if it does not end."""
        depth, quote, at = 0, "", self.at
        while True:
            found = _BRACKETS.search(self.text, at)
            if found is None:
                at = max(at, len(self.text))
                if not (yield from self.more()):
                    self._rest()
                    return None
                continue
            char, at = found[0], found.end()
            if char == "\\":
                at += 1
            elif quote:
                quote = "" if char == quote else quote
            elif char in "\"'":
                quote = char
            elif char in "([{":
                depth += 1
            elif char in ")]}":
                depth -= 1
                if depth <= 0:
                    read, self.at = self.text[self.at : at], at
                    return read
