"""Pages for browsers. Each is one HTML document, which contains its style and scripts and loads nothing else."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

from msgspec import Struct
from starlette.datastructures import Headers
from starlette.responses import Response

_DASHBOARD = Path(__file__).parents[1] / "desk/watch/dashboard/page"
_TALK = Path(__file__).parents[1] / "desk/talk/page"


class WebPage(Struct, frozen=True):
    """A document: its `title`, a `link` to the other page, the content in `index`, and the styles and scripts in their
    order. It has no data of the daemon. `libraries` are scripts of others, which run before its own."""

    title: str
    link: str
    index: Path
    styles: tuple[Path, ...]
    scripts: tuple[Path, ...]
    libraries: tuple[Path, ...] = ()

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
            # Else browsers look up the hosts of links that a reply shows.
            "X-DNS-Prefetch-Control": "off",
        }
        return Response(html, media_type="text/html", headers=headers)


DASHBOARD_PAGE = WebPage(
    "diskprefix",
    '<a href="/chat">Chat</a>',
    _DASHBOARD / "index.html",
    styles=(_DASHBOARD / "base.css", _DASHBOARD / "style.css"),
    # Each uses names of the scripts before it.
    scripts=tuple(
        _DASHBOARD / name for name in ("format.js", "daemon.js", "chart.js", "tree.js", "sections.js", "main.js")
    ),
)
CHAT_PAGE = WebPage(
    "diskprefix chat",
    '<a href="/" id="dashboard" hidden>Dashboard</a><span id="closed" hidden>Dashboard: <code></code></span>',
    _TALK / "index.html",
    styles=(_DASHBOARD / "base.css", _TALK / "talk.css"),
    scripts=(
        *(_DASHBOARD / name for name in ("format.js", "daemon.js")),
        *(_TALK / name for name in ("document.js", "markdown.js", "markup.js", "attached.js", "talk.js")),
    ),
    libraries=tuple(_TALK / "vendored" / name for name in ("marked.umd.js", "purify.min.js", "highlight.min.js")),
)


def wants_page(headers: Headers) -> bool:
    """Returns whether a client names `text/html` among what it accepts, as browsers do."""
    return "text/html" in headers.get("accept", "").lower()


@cache
def _document(page: WebPage, is_several: bool) -> tuple[bytes, str]:
    """Returns the document and its Content-Security-Policy, which names style and scripts by their hashes. Elements are
    made from text by DOMPurify alone."""
    style = "".join(map(_read, page.styles))
    scripts = [*map(_read, page.libraries), "\n".join(["'use strict';", *map(_read, page.scripts)])]
    html = _read(_DASHBOARD / "frame.html")
    if is_several:
        # Before the scripts are inserted: the replacement must not change a script, or its hash would be wrong.
        html = html.replace("<html ", "<html data-several ")
    parts = {"<!--title-->": page.title, "<!--link-->": page.link, "<!--content-->": _read(page.index)}
    written = "\n".join(f"<script>{script}</script>" for script in scripts)
    for place, text in (parts | {"/*style*/": style, "<!--scripts-->": written}).items():
        html = html.replace(place, text)
    hashes = " ".join(f"'{_hash(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src {hashes}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    )
    return html.encode(), policy


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
