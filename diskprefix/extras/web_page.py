"""Pages for browsers. Each is one HTML document, which contains its style and scripts and loads nothing else."""

from __future__ import annotations

import base64
import hashlib
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response

_DASHBOARD = Path(__file__).with_name("watch") / "dashboard" / "page"
_TALK = Path(__file__).with_name("talk") / "page"


@dataclass(frozen=True)
class WebPage:
    """A document, and the styles and scripts that are inserted in order. It has no data of the daemon."""

    index: Path
    styles: tuple[Path, ...]
    scripts: tuple[Path, ...]

    def response(self, *, is_several: bool = False) -> Response:
        """Returns the page. Its policy allows only its own script, and connections only to its own address.
        `is_several`: the daemon has several models."""
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
    # Each uses names of the scripts before it.
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
    """Returns whether a client accepts `text/html` at least as much as JSON, as browsers do. A malformed weight counts
    as 0."""
    weights: dict[str, float] = {}
    for part in headers.get("accept", "").lower().split(","):
        media_type, *parameters = (piece.strip() for piece in part.split(";"))
        weights[media_type] = 0.0
        with suppress(ValueError):
            weights[media_type] = float(next((text[2:] for text in parameters if text.startswith("q=")), "1"))
    return 0 < weights.get("text/html", 0.0) >= weights.get("application/json", 0.0)


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
