"""The origins of web pages, extensions and desktop programs that may use a daemon from a browser."""

from __future__ import annotations

import re

from msgspec import Struct

from diskprefix.errors import SettingsError

_ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>\*|\[[0-9a-f:.]+\]|[^\[\]/:*@?#\s]+)(?::(?P<port>\d{1,5}|\*))?", re.ASCII
)
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_MOST = 64


class Origins(Struct, frozen=True):
    """The allowed origins, as scheme, host and port; `*` stands for any. With `any_page`, all are but `null`."""

    patterns: frozenset[tuple[str, str, str]] = frozenset()
    any_page: bool = False

    @classmethod
    def parse(cls, text: str, *, param: str) -> Origins:
        """Returns the origins in `ORIGIN,…`. Raises `SettingsError`."""
        items = [item for item in map(str.strip, text.lower().split(",")) if item]
        if len(items) > _MOST:
            raise SettingsError(f"{param}: {len(items)} origins; {_MOST} are the most")
        patterns = set[tuple[str, str, str]]()
        for item in items:
            if item == "*":
                continue
            parts = _parts(item)
            if parts is None or (parts[1] == "*" and parts[0] in _DEFAULT_PORTS):
                raise SettingsError(
                    f"{param}: {item[:60]!r} is no origin; write http://localhost:3000, http://localhost:*, "
                    "chrome-extension://ID or moz-extension://*, several with commas"
                )
            patterns.add(parts)
        return cls(frozenset(patterns), any_page="*" in items)

    def allow(self, origin: str) -> bool:
        """Returns whether a page of this origin may use the daemon. `null` is the origin of any page that hides its
        own."""
        parts = _parts(origin)
        if parts is None:
            return False
        scheme, host, port = parts
        wanted = {(scheme, name, number) for name in (host, "*") for number in (port, "*")}
        return self.any_page or not wanted.isdisjoint(self.patterns)


def _parts(origin: str) -> tuple[str, str, str] | None:
    """Returns scheme, host and port of an origin; None for other text, such as `null`."""
    match = _ORIGIN.fullmatch(origin)
    if match is None:
        return None
    return match["scheme"], match["host"], match["port"] or _DEFAULT_PORTS.get(match["scheme"], "")
