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
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast, get_args

from diskprefix.errors import InvalidScope

ScopeKind: TypeAlias = Literal["off", "full", "auto", "tokens"]

DEFAULT_WINDOW = 30
MAX_VALUE = 1_000_000

ACCEPTED = (
    f"accepted are off, full, auto, auto:N (N recent requests) and N (the first N prompt tokens), with N from 1 to "
    f"{MAX_VALUE}"
)

# ASCII, because \d would take the digits of every script.
_SCOPE = re.compile(
    r"(?P<word>off|full|auto)|auto:0*(?P<window>\d{1,7})|0*(?P<tokens>\d{1,7})", re.ASCII | re.IGNORECASE
)
_MAX_SHOWN_CHARS = 40


@dataclass(frozen=True)
class Scope:
    """A valid scope. `value` is the window of `auto` in requests, or the N of `tokens`; 0 for `off` and `full`.

    Raises `InvalidScope` for a combination that the grammar cannot express, so `parse_scope(str(scope)) == scope`.
    """

    kind: ScopeKind
    value: int = 0

    def __post_init__(self) -> None:
        least, most = {"off": (0, 0), "full": (0, 0)}.get(self.kind, (1, MAX_VALUE))
        if self.kind not in get_args(ScopeKind) or not least <= self.value <= most:
            raise InvalidScope(f"scope {self.kind} cannot have the value {_shown(self.value)}; {ACCEPTED}")

    def __str__(self) -> str:
        """The canonical text: `off`, `full`, `auto:30`, `1000`."""
        if self.kind == "auto":
            return f"auto:{self.value}"
        return str(self.value) if self.kind == "tokens" else self.kind

    def with_window(self, window: int) -> Scope:
        """This `auto` scope with another window. Raises `InvalidScope` for another scope and a window out of range."""
        if self.kind != "auto":
            raise InvalidScope(
                f"prefix_cache.window: only the scope auto has a window, but the scope is {self}; leave one out",
                param="prefix_cache.window",
            )
        return Scope("auto", window)


def parse_scope(value: object, *, param: str) -> Scope:
    """The scope that a flag, a setting or a JSON field holds: a string or an integer.

    Raises `InvalidScope` whose `param` is the one given and whose message says what is accepted.
    """
    match = _SCOPE.fullmatch(value.strip()) if isinstance(value, str) else None
    with suppress(InvalidScope):
        if isinstance(value, int) and not isinstance(value, bool):
            return Scope("tokens", value)
        if match and match["tokens"]:
            return Scope("tokens", int(match["tokens"]))
        if match:
            kind = cast(ScopeKind, (match["word"] or "auto").lower())
            return Scope(kind, int(match["window"] or DEFAULT_WINDOW) if kind == "auto" else 0)
    raise InvalidScope(f"{param}: {_shown(value)} is not a cache scope; {ACCEPTED}", param=param)


def _shown(value: object) -> str:
    """Short and on one line whatever a client sent; numbers of thousands of digits have no decimal text at all."""
    if isinstance(value, str):
        return repr(value if len(value) <= _MAX_SHOWN_CHARS else value[:_MAX_SHOWN_CHARS] + "…")
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value) if value.bit_length() <= 64 else "a number that large"
    return "what is neither a text nor an integer"
