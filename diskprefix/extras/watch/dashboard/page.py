"""The page at `/`: one HTML document that contains its style and scripts. It has no data, and loads nothing else."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response

_FOLDER = Path(__file__).with_name("page")
_SCRIPTS = ("format.js", "daemon.js", "chart.js", "tree.js", "sections.js", "main.js")
"""The scripts in order. Each uses the ones before it."""


def page_response() -> Response:
    """Returns the page. Its policy allows only its own script, and connections only to its own address."""
    return _response(is_several=False)


def page_of_several() -> Response:
    """Returns the page of a daemon with several models, which asks the front what is loaded."""
    return _response(is_several=True)


def _response(*, is_several: bool) -> Response:
    html, policy = _page(is_several)
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Vary": "Accept",
    }
    return Response(html, media_type="text/html", headers=headers)


def wants_page(headers: Headers) -> bool:
    """Returns whether a client accepts `text/html` at least as much as JSON. Browsers do."""
    likes = _likes(headers.get("accept", ""))
    html = likes.get("text/html", 0.0)
    return html > 0 and html >= likes.get("application/json", 0.0)


def _likes(accept: str) -> dict[str, float]:
    """Returns the media types of an `Accept` header with their weights. A malformed weight counts as 0."""
    likes: dict[str, float] = {}
    for part in accept.lower().split(","):
        media_type, *parameters = (piece.strip() for piece in part.split(";"))
        weight = next((text[2:] for text in parameters if text.startswith("q=")), "1")
        try:
            likes[media_type] = float(weight)
        except ValueError:
            likes[media_type] = 0.0
    return likes


@cache
def _page(is_several: bool) -> tuple[bytes, str]:
    """Returns the document and its Content-Security-Policy, which names style and script by their hashes."""
    style = _read("style.css")
    script = "\n".join(["'use strict';", *map(_read, _SCRIPTS)])
    html = _read("index.html").replace("/*style*/", style).replace("/*script*/", script)
    if is_several:
        html = html.replace("<html ", "<html data-several ")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html.encode(), policy


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
