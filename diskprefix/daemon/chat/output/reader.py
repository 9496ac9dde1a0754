"""Reads a text that arrives in pieces. Methods that may need more text are generators that yield to wait for it."""

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
_DELIMITERS = re.compile(r'["\\{}\[\]<`\x00-\x1f]|True|False|None')
_NAMES = {"True": "true", "False": "false", "None": "null"}
_BEGUN = re.compile(r"(?:,\s*|T(?:ru?)?|F(?:a(?:ls?)?)?|N(?:on?)?)\Z")
"""At the end of the text so far: a comma, which may be the last one, or a part of a name."""
_BRACKETS = re.compile(r"""["'\\()\[\]{}]""")
_SHORT, _SHARE = 256, 8
"""A longer text is parsed again only when it has grown by an eighth."""
_LITTLE, _MAX_IN_VAIN = 4096, 2
"""The limit of text that is parsed for calls without finding one: 4096 characters plus twice the reply."""


class Reader:
    """The text that is still needed. `text[at:]` is unread. Positions are valid until `forget`."""

    def __init__(self) -> None:
        self.text = "\n"
        """Begins with the character before the unread text: a newline at the beginning of a reply."""
        self.at = 1
        self._has_ended = False
        self._is_whole = False
        self._coming: list[str] = []
        self._num_coming = 0
        self._num_read = 0
        self._num_in_vain = 0
        self._furthest = 1
        self._copied: list[str] | None = None
        self._bound, self._beyond = "", ""
        """The text that ends what is read, "" for none, and the text from there on."""
        self._is_bound = False
        """True while the text ends at the bound."""

    @property
    def begins_line(self) -> bool:
        """True if only blanks are between this position and a line break, or the end of the reply."""
        at = self.at
        while at > 1 and self.text[at - 1] in " \t":
            at -= 1
        return self.text[at - 1] == "\n" or (self.ended and self.at == len(self.text))

    def add(self, text: str) -> bool:
        """Adds text. Returns whether to read on. Held text may be read again from its beginning, so a long text is read
        again only when it has grown by an eighth: all readings together cost as much as a few readings of the whole."""
        self._coming.append(text)
        self._num_coming += len(text)
        if self._num_coming * _SHARE < len(self.text) - _SHORT:
            return False
        self._join()
        return True

    def end(self, *, is_whole: bool) -> None:
        self._has_ended, self._is_whole = True, is_whole
        self._join()

    @property
    def ended(self) -> bool:
        """True once no more text comes."""
        return self._has_ended or self._is_bound

    @property
    def is_whole(self) -> bool:
        """True once the model has ended the reply."""
        return self._is_whole or self._is_bound

    def begin_bound(self, tag: str) -> None:
        """From here on, reads as if the model had ended the reply before `tag`."""
        self._bound = tag
        self._join()

    def end_bound(self) -> None:
        """Reads beyond the tag again."""
        self._bound, self._is_bound = "", False
        self._join()

    @property
    def is_over(self) -> bool:
        """True if the model ended the reply at this position."""
        return self.is_whole and self.at == len(self.text)

    def _join(self) -> None:
        self._num_read += self._num_coming
        self._beyond = "".join([self._beyond, *self._coming])
        self._coming.clear()
        self._num_coming = 0
        if self._is_bound:
            return
        text = self.text + self._beyond
        end = self._end_of(text)
        self.text, self._beyond = text[:end], text[end:]

    def _end_of(self, text: str) -> int:
        """Returns where the text that may be read ends: before the bound, or what may be its beginning."""
        if not self._bound:
            return len(text)
        at = text.find(self._bound, self.at)
        self._is_bound = at >= 0
        if self._is_bound:
            return at
        begun = range(0 if self._has_ended else len(self._bound) - 1, 0, -1)
        return len(text) - next((length for length in begun if text.endswith(self._bound[:length], self.at)), 0)

    def forget(self, *, at_line_start: bool = False) -> None:
        """Drops the text that was read. `at_line_start`: the unread text counts as the beginning of a line."""
        if self._copied is not None:
            self._copied.append(self.text[1 : self.at])
        self.text = ("\n" if at_line_start else self.text[self.at - 1]) + self.text[self.at :]
        self.at = self._furthest = 1

    def begin_copy(self) -> None:
        """Begins to copy the text that is read from here on."""
        self.forget()
        self._copied = []

    def end_copy(self) -> str:
        """Returns the text that was read since `begin_copy`."""
        self.forget()
        copied, self._copied = "".join(self._copied or ()), None
        return copied

    def back_to(self, at: int) -> None:
        """Goes back to a position that no call follows."""
        self._num_in_vain += max(0, self.at - at)
        self._furthest = max(self._furthest, self.at)
        self.at = at

    def give_up(self, at: int) -> None:
        """Goes back to a position, to look for other calls after it. If much text was read without finding a call,
        stays after that text instead, because nested values would be read again and again."""
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
            match = _SPACE.match(self.text, self.at)
            assert match is not None
            self.at = match.end()
            if self.at < len(self.text) or not (yield from self.more()):
                return

    def peek(self) -> Parsing[str]:
        """Skips white space. Returns the next character, "" at the end, and does not read it."""
        yield from self.space()
        return self.text[self.at : self.at + 1]

    def match(self, pattern: regex.Pattern[str]) -> Parsing[regex.Match[str] | None]:
        """Reads a match of `pattern` at this position. Without a match, reads nothing and returns None. `pattern` must
        not end with a repetition, because a match ends as soon as it is whole."""
        while True:
            match = pattern.match(self.text, self.at, partial=not self.ended)
            if match is None:
                return None
            if not match.partial:
                self.at = match.end()
                return match
            yield from self.more()

    def looks_at(self, pattern: regex.Pattern[str]) -> Parsing[bool]:
        """Returns whether `pattern` matches at this position. Reads nothing."""
        at = self.at
        match = yield from self.match(pattern)
        self.at = at
        return match is not None

    def until(
        self, pattern: regex.Pattern[str], take: Take, last: regex.Pattern[str] | None = None
    ) -> Parsing[regex.Match[str] | None]:
        """Passes the text before a match of `pattern` to `take`. Returns the match, unread, or None at the end. `last`
        is the pattern for the text that the model ended the reply with, if that is another."""
        while True:
            if self.is_whole:
                pattern = last or pattern
            match = self._search(pattern)
            end = len(self.text) if match is None else match.start()
            if end > self.at:
                take(self.text[self.at : end])
                self.at = end
            self.forget()
            if match is not None and not match.partial:
                return pattern.match(self.text, self.at)
            if not (yield from self.more()):
                return None

    def _search(self, pattern: regex.Pattern[str]) -> regex.Match[str] | None:
        """Returns the first match of `pattern`, or a partial match, which more text may complete."""
        match = pattern.search(self.text, self.at, partial=not self.ended)
        if match is None or match.partial or self.ended:
            return match
        # A search prefers a whole match to an earlier partial match.
        at, end = self.at, match.start()
        while (early := pattern.search(self.text, at, end, partial=True)) is not None and early.start() < end:
            growing = pattern.match(self.text, early.start(), partial=True)
            if growing is not None and growing.partial:
                return growing
            at = early.start() + 1
        return match

    def before(self, pattern: regex.Pattern[str], skipping: regex.Pattern[str] | None = None) -> Parsing[str | None]:
        """Reads the text before a match of `pattern`, or the rest without a match. Returns None for an empty text.

        `skipping` matches `pattern`, or a string as the group `string`. A match inside a string counts only if the
        reply ends without another one.
        """
        while True:
            if skipping is None:
                match = pattern.search(self.text, self.at)
            else:
                matches = skipping.finditer(self.text, self.at)
                match = next((match for match in matches if match["string"] is None), None)
                if match is None and self.ended:
                    match = pattern.search(self.text, self.at)
            if match is not None or not (yield from self.more()):
                read = self.text[self.at : match.start() if match else None]
                self.at += len(read)
                return read or None

    def string(self) -> Parsing[str | None]:
        """Reads a JSON string after white space, with its quotes. Returns None if there is none."""
        yield from self.space()
        match = yield from self.match(_STRING)
        return None if match is None else match[0]

    def json(self, take: Take, *, forgets: bool = False, closes: bool = True) -> Parsing[bool]:
        """Reads a JSON value and hands its text to `take` as it arrives. Returns whether it is complete.

        An object or an array is complete when its brackets are closed; a tag breaks it off. What JSON forbids and
        models write becomes JSON: control characters in strings, a comma before a closing bracket, Python's names.
        `forgets`: no caller goes back to a position before the value, so its text is not held. Without `closes`, the
        last bracket is read, but not passed on.
        """
        first = yield from self.peek()
        if first == '"':
            text = yield from self.string()
            take(self._rest() if text is None else text)
            return text is not None
        if first and first in "{[":
            return (yield from self._nested(take, forgets, closes))
        text = yield from self.before(_SCALAR_END)
        take(_NAMES.get(text or "", text or ""))
        return text is not None

    def _rest(self) -> str:
        rest, self.at = self.text[self.at :], len(self.text)
        return rest

    def _nested(self, take: Take, forgets: bool, closes: bool) -> Parsing[bool]:
        depth, in_string, escaped = 0, False, 0
        while True:
            skip = self.at + escaped
            for match in _DELIMITERS.finditer(self.text, skip):
                char, at = match[0], match.start()
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
                elif char in _NAMES:
                    take(self.text[self.at : at] + _NAMES[char])
                    self.at = match.end()
                elif char in "{[":
                    depth += 1
                elif char in "}]":
                    depth -= 1
                    before = self.text[self.at : at]
                    if before.rstrip().endswith(","):
                        before = before.rstrip()[:-1]
                    take(before + (char if depth or closes else ""))
                    self.at = at + 1
                    if not depth:
                        return True
                elif char in "<`":
                    # No JSON continues like this: a tag follows, and breaks the value off.
                    take(self.text[self.at : at])
                    self.at = at
                    return False
            escaped = max(0, skip - len(self.text))
            begun = None if in_string or escaped or self.ended else _BEGUN.search(self.text, self.at)
            if self.at < (end := begun.start() if begun else len(self.text)):
                take(self.text[self.at : end])
                self.at = end
            if forgets:
                self.forget()
            if not (yield from self.more()):
                return False

    def brackets(self) -> Parsing[str | None]:
        """Reads a Python expression in brackets as a whole. Returns None if it does not end."""
        depth, quote, at = 0, "", self.at
        while True:
            match = _BRACKETS.search(self.text, at)
            if match is None:
                at = max(at, len(self.text))
                if not (yield from self.more()):
                    self._rest()
                    return None
                continue
            char, at = match[0], match.end()
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
