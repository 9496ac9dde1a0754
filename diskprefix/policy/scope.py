"""The scope grammar: how much of a prompt the disk cache keeps.

    off            neither restores nor saves
    full           the whole prompt
    auto, auto:N   a boundary inferred from the N most recent requests (30 when N is left out)
    N              the first N prompt tokens

Upper and lower case are the same, blanks around a scope are ignored, N runs from 1 to 1 000 000. A scope of N tokens
may also be given as an integer. Everything else is refused: a typing error must never turn into another policy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from diskprefix.errors import InvalidScope

ScopeKind: TypeAlias = Literal["off", "full", "auto", "tokens"]

DEFAULT_WINDOW = 30
MAX_VALUE = 1_000_000
WINDOW_PARAM = "prefix_cache.window"

WORDS: tuple[Literal["off", "full"], ...] = ("off", "full")
"""The scopes without a number."""
ACCEPTED = (
    f"accepted are {', '.join(WORDS)}, auto, auto:N (N recent requests) and N (the first N prompt tokens), "
    f"with N from 1 to {MAX_VALUE}"
)

# ASCII, because \d would take the digits of every script.
_SCOPE = re.compile(
    rf"(?P<word>{'|'.join(WORDS)})|(?P<auto>auto)(?::(?P<window>\d+))?|(?P<tokens>\d+)", re.ASCII | re.IGNORECASE
)
_MAX_SHOWN_CHARS = 40
_JSON_NAMES: dict[type, str] = {
    bool: "a boolean",
    float: "a number with a fraction",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


@dataclass(frozen=True)
class Scope:
    """A valid scope. `value` is the window of `auto` in requests, or the N of `tokens`; 0 for `off` and `full`.

    Raises `InvalidScope` for a combination that the grammar cannot express, so `parse_scope(str(scope)) == scope`.
    """

    kind: ScopeKind
    value: int = 0

    def __post_init__(self) -> None:
        numbered = self.kind in ("auto", "tokens")
        known = numbered or self.kind in WORDS
        if not known or not (1 <= self.value <= MAX_VALUE if numbered else self.value == 0):
            raise InvalidScope(f"scope {self.kind} cannot have the value {_shown(self.value)}; {ACCEPTED}")

    def __str__(self) -> str:
        """The canonical text: `off`, `full`, `auto:30`, `1000`."""
        if self.kind == "auto":
            return f"auto:{self.value}"
        return str(self.value) if self.kind == "tokens" else self.kind

    def with_window(self, window: int) -> Scope:
        """This `auto` scope with another window.

        Raises `InvalidScope` with param `prefix_cache.window` for another scope and for a window out of range.
        """
        window = parse_window(window, param=WINDOW_PARAM)
        if self.kind != "auto":
            raise InvalidScope(
                f"{WINDOW_PARAM}: only the scope auto has a window, but the scope is {self}; leave one of the two out",
                param=WINDOW_PARAM,
            )
        return Scope("auto", window)


def parse_scope(value: object, *, param: str) -> Scope:
    """The scope that a flag, a setting or a JSON field holds: a string or an integer.

    Raises `InvalidScope` whose `param` is the one given and whose message says what is accepted.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if 1 <= value <= MAX_VALUE:
            return Scope("tokens", int(value))
        raise _refused(value, param)
    match = _SCOPE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise _refused(value, param)
    if match["word"]:
        return Scope(WORDS[WORDS.index(match["word"].lower())])
    number = _number(match["window"] or match["tokens"] or str(DEFAULT_WINDOW))
    if number is None:
        raise _refused(value, param)
    return Scope("auto" if match["auto"] else "tokens", number)


def parse_window(value: object, *, param: str) -> int:
    """A window in requests: an integer from 1 to 1 000 000 and nothing else, not even a numeric string.

    Raises `InvalidScope` whose `param` is the one given.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_VALUE:
        return int(value)
    raise InvalidScope(
        f"{param}: {_shown(value)} is not a window; accepted is an integer from 1 to {MAX_VALUE}", param=param
    )


def _number(digits: str) -> int | None:
    """None outside 1..MAX_VALUE. The length is looked at first: int() refuses texts of thousands of digits."""
    significant = digits.lstrip("0")
    if not significant or len(significant) > len(str(MAX_VALUE)):
        return None
    return number if (number := int(significant)) <= MAX_VALUE else None


def _refused(value: object, param: str) -> InvalidScope:
    return InvalidScope(f"{param}: {_shown(value)} is not a cache scope; {ACCEPTED}", param=param)


def _shown(value: object) -> str:
    """Short and on one line whatever a client sent; numbers of thousands of digits have no decimal text at all."""
    if isinstance(value, str):
        return repr(value if len(value) <= _MAX_SHOWN_CHARS else value[:_MAX_SHOWN_CHARS] + "…")
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value) if value.bit_length() <= 64 else "a number that large"
    return _JSON_NAMES.get(type(value), f"a value of type {type(value).__name__}")
