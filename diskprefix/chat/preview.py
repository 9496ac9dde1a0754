"""What a person reads of a prompt in `inspect`: its beginning, and what it ends with."""

from __future__ import annotations

from collections.abc import Sequence

from diskprefix.chat.messages import JsonObject
from diskprefix.printable import printable_only

_CHARS = 100
_SCANNED_CHARS = 10_000


def preview_of_chat(messages: Sequence[JsonObject]) -> str:
    """Returns the beginnings of the first message and of the newest message of the user."""
    newest = next((m for m in reversed(messages) if m["role"] == "user"), messages[-1])
    return _preview(messages[0]["content"], newest["content"] if newest is not messages[0] else "")


def preview_of_text(text: str) -> str:
    """Returns the beginning and the end of a text."""
    return _preview(text, text[_CHARS:][-_CHARS:])


def _preview(first: str, last: str) -> str:
    parts = [printable_only(text[:_SCANNED_CHARS])[:_CHARS] for text in (first, last)]
    return " … ".join(part for part in parts if part)
