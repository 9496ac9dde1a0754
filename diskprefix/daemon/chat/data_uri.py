"""Reads `data:` URIs as browsers do: their base64 may have line ends, no `=`, or the alphabet for URLs."""

from __future__ import annotations

import base64
import binascii
import re
from urllib.parse import unquote_to_bytes

from diskprefix.errors import InvalidRequest
from diskprefix.printable import shown

_SHOWN_CHARS = 40
_SHOWN_LETTERS = 5
_OTHER = re.compile(r"[^A-Za-z0-9+/]")
_OF_URLS = str.maketrans("-_", "+/", " \t\n\r\f")
"""The URL-safe alphabet of base64 → the standard alphabet. Blanks and line ends are removed."""


def data_uri(media_type: str, data: str) -> str:
    """Returns base64 as a `data:` URI. `data` is returned unchanged if it already is a URI: some clients send a URI
    where the API expects base64."""
    return data if data.lstrip()[:5].lower() == "data:" else f"data:{media_type};base64,{data}"


def content_of(uri: str, param: str) -> bytes:
    """Returns the content of a `data:` URI. Other URLs are never fetched: clients could read what the server can.
    Raises `InvalidRequest`, which names `param`."""
    scheme, _, rest = uri.partition(":")
    if scheme.strip().lower() != "data":
        problem = "URLs are not fetched; send the image itself, as data:image/png;base64,…"
        raise InvalidRequest.at(param, f"{problem} (got {shown(uri, _SHOWN_CHARS)})")
    header, comma, data = rest.partition(",")
    if not comma or not header.lower().replace(" ", "").endswith(";base64"):
        raise InvalidRequest.at(param, "must be a data: URI in base64 (data:image/png;base64,…)")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return _forgiving(data, param)


def _forgiving(data: str, param: str) -> bytes:
    """Decodes base64 with the algorithm "forgiving-base64 decode" of browsers (WHATWG Infra)."""
    if "%" in data:
        data = unquote_to_bytes(data).decode("latin-1")
    letters = data.translate(_OF_URLS)
    if not len(letters) % 4:
        letters = letters.removesuffix("=").removesuffix("=")
    if first := _OTHER.search(letters):
        wrong = [*dict.fromkeys(_OTHER.findall(letters, first.start(), first.start() + 1_000))]
        named = ", ".join(c if c.isprintable() else f"U+{ord(c):04X}" for c in wrong[:_SHOWN_LETTERS])
        raise InvalidRequest.at(param, f"is not valid base64: it has letters that base64 has not ({named})")
    if len(letters) % 4 == 1:
        problem = f"is not valid base64: {len(letters)} letters do not make whole bytes; it may be cut off"
        raise InvalidRequest.at(param, problem)
    return base64.b64decode(letters + "=" * (-len(letters) % 4))
