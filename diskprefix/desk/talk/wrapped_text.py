"""Text that arrives in pieces, wrapped at words for a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from rich.cells import cell_len

_FENCE = re.compile(r" {0,3}(```|~~~)")
_CHARS_OF_FENCE = 6


class WrappedText:
    """Prints pieces of a text. A word that does not fit in the line of `width()` columns begins a new one.

    The last word is held back until it is complete; `end` prints it. Code between fences is printed as it is, so that
    it can be copied.
    """

    def __init__(self, width: Callable[[], int], write: Callable[[str], None]) -> None:
        self._width, self._write = width, write
        self._column = 0
        self._blanks = self._word = ""
        self._begin = ""
        """The first characters of the line, which may open or close a fence."""
        self._is_code = False

    def add(self, piece: str) -> None:
        """Prints the complete words of a piece."""
        if printed := "".join(self._printed(piece)):
            self._write(printed)

    def end(self) -> None:
        """Prints what was held back."""
        if held := self._take_word() + self._blanks:
            self._write(held)
        self._blanks = ""

    def _printed(self, piece: str) -> Iterator[str]:
        for char in piece:
            if char == "\n":
                yield f"{self._take_word()}{self._blanks}\n"
                self._is_code ^= _FENCE.match(self._begin) is not None
                self._column, self._blanks, self._begin = 0, "", ""
                continue
            if len(self._begin) < _CHARS_OF_FENCE:
                self._begin += char
            if self._is_code:
                yield char
            elif char in " \t":
                yield self._take_word()
                self._blanks += char
            elif cell_len(char) == 2:
                # Chinese and Japanese put no blanks between words, and a line may end after each character.
                yield self._take_word()
                self._word = char
                yield self._take_word()
            else:
                self._word += char

    def _take_word(self) -> str:
        """Returns the word with the blanks before it, or with a line break in their place."""
        if not self._word:
            return ""
        width, printed = max(1, self._width()), f"{self._blanks}{self._word}"
        end = self._column + cell_len(printed.expandtabs(8))
        if self._column and end > width:
            printed, end = f"\n{self._word}", cell_len(self._word)
        # The terminal breaks a word that is wider than itself.
        self._column = end if end <= width else (end - 1) % width + 1
        self._blanks = self._word = ""
        return printed
