"""The grammar of scopes: how much of a prompt the disk cache keeps.

    off            neither restores nor saves
    full           the whole prompt
    auto, auto:N   a boundary inferred from the N most recent requests (30 when N is left out)
    N              the first N prompt tokens

Case and surrounding blanks are ignored. N is from 1 to 1 000 000. A scope of N tokens may also be an integer.
Everything else is refused: a typing error must never turn into another policy.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import cast

from diskprefix.errors import InvalidScope
from diskprefix.values import ACCEPTED, DEFAULT_WINDOW, Scope, ScopeKind, short_value

# ASCII, because \d would take the digits of every script.
_SCOPE = re.compile(
    r"(?P<word>off|full|auto)|auto:0*(?P<window>\d{1,7})|0*(?P<tokens>\d{1,7})", re.ASCII | re.IGNORECASE
)


def parse_scope(value: object, *, param: str) -> Scope:
    """Returns the scope that a flag, a setting or a JSON field holds: a string or an integer.

    Raises `InvalidScope` with this `param` and a message that says what is accepted.
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
    raise InvalidScope(f"{param}: {short_value(value)} is not a cache scope; {ACCEPTED}", param=param)
