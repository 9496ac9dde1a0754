"""Finds the known name that a misspelt one is like."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_LIKE = 0.6
_MOST_CHARS = 256
"""A longer name is like no other: comparing it takes long, and it may come from outside."""


def nearest(name: str, known: Iterable[str], least_likeness: float = _LIKE) -> str | None:
    """Returns the known name that `name` is most like, whatever the case, or None if none is. The likeness is
    `difflib`'s, from 0 to 1."""
    if len(name) > _MOST_CHARS:
        return None
    by_letters = {each.casefold(): each for each in known}
    near = get_close_matches(name.casefold(), by_letters, n=1, cutoff=least_likeness)
    return by_letters[near[0]] if near else None


def meant(name: str, known: Iterable[str]) -> str:
    """Returns ` (meant: NEAREST?)` for the end of a message about an unknown name, "" if none is like it."""
    near = nearest(name, known)
    return f" (meant: {near}?)" if near else ""
