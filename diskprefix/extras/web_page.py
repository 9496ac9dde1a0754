"""Pages for browsers: one HTML document each, which contains its style and its scripts, and loads nothing else."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response

_DASHBOARD = Path(__file__).with_name("watch") / "dashboard" / "page"
_TALK = Path(__file__).with_name("talk") / "page"


@dataclass(frozen=True)
class WebPage:
    """A document with places for the styles and the scripts, each in order. It has no data of the daemon."""

    index: Path
    styles: tuple[Path, ...]
    scripts: tuple[Path, ...]

    def response(self, *, is_several: bool = False) -> Response:
        """Returns the page. Its policy allows only its own script, and connections only to its own address. With
        `is_several` it is that of a daemon with several models."""
        html, policy = _document(self, is_several)
        headers = {
            "Content-Security-Policy": policy,
            "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Vary": "Accept",
        }
        return Response(html, media_type="text/html", headers=headers)


DASHBOARD_PAGE = WebPage(
    _DASHBOARD / "index.html",
    styles=(_DASHBOARD / "base.css", _DASHBOARD / "style.css"),
    # Each uses the ones before it.
    scripts=tuple(
        _DASHBOARD / name for name in ("format.js", "daemon.js", "chart.js", "tree.js", "sections.js", "main.js")
    ),
)
CHAT_PAGE = WebPage(
    _TALK / "index.html",
    styles=(_DASHBOARD / "base.css", _TALK / "talk.css"),
    scripts=(
        *(_DASHBOARD / name for name in ("format.js", "daemon.js")),
        *(_TALK / name for name in ("document.js", "markup.js", "talk.js")),
    ),
)


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
def _document(page: WebPage, is_several: bool) -> tuple[bytes, str]:
    """Returns the document and its Content-Security-Policy, which names style and script by their hashes."""
    style = "".join(map(_read, page.styles))
    script = "\n".join(["'use strict';", *map(_read, page.scripts)])
    html = _read(page.index).replace("/*style*/", style).replace("/*script*/", script)
    if is_several:
        html = html.replace("<html ", "<html data-several ")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html.encode(), policy


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
