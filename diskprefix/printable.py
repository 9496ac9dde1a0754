"""Makes text from outside safe for a log line, a terminal and an error message.

A newline in a client's text could forge a line of the log, and an escape character could control the terminal.
"""

from __future__ import annotations

SHOWN_CHARS = 100
"""The maximum number of characters of a client's text in a message."""


def escaped(text: str) -> str:
    """Returns `text` on one line. Characters that are not printable (newlines, ESC, direction marks) are escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def shown(text: str, limit: int = SHOWN_CHARS) -> str:
    """Returns `escaped(text)`, cut to `limit` characters."""
    line = escaped(text[: limit + 1])
    return line if len(line) <= limit and len(text) <= limit else f"{line[: limit - 1]}…"


def printable_only(text: str) -> str:
    """Returns `text` without characters that are not printable. Blanks of any kind become one space."""
    return "".join(char for char in " ".join(text.split()) if char.isprintable())


def first_line(error: BaseException, limit: int = 300) -> str:
    """Returns the first line of an error's message that is not blank, without a final dot; else the error's class."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)[:limit].rstrip(".")
