"""Text that somebody else wrote, made fit for a log line, a terminal and an error message.

A newline in a client's text forges a line of the log, and an escape character steers the terminal that shows it.
"""

from __future__ import annotations

SHOWN_CHARS = 100
"""How much of a client's text a message repeats."""


def escaped(text: str) -> str:
    """`text` on one line: what is not printable (newlines, ESC, marks of direction) as Python writes it."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def shown(text: str, limit: int = SHOWN_CHARS) -> str:
    """`escaped`, and cut to `limit` characters."""
    line = escaped(text[: limit + 1])
    return line if len(line) <= limit and len(text) <= limit else f"{line[: limit - 1]}…"


def printable_only(text: str) -> str:
    """`text` without what is not printable; blanks of any kind count as one space."""
    return "".join(char for char in " ".join(text.split()) if char.isprintable())
