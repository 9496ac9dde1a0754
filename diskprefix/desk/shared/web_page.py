"""Pages for browsers. Each is one HTML document, which contains its style and scripts and loads nothing else."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

from msgspec import Struct
from starlette.responses import Response

from diskprefix.daemon import rooms

SHARED = Path(__file__).parent / "page"
"""The parts that several pages have."""


class WebPage(Struct, frozen=True):
    """A document: its `title`, `links` to other pages by their paths, each of which is shown if there is that page, the
    content in `index`, and the styles and scripts in their order. It has no data of the daemon. `libraries` are scripts
    of others, which run before its own."""

    title: str
    links: tuple[tuple[str, str], ...]
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


@cache
def _document(page: WebPage, is_several: bool) -> tuple[bytes, str]:
    """Returns the document and its Content-Security-Policy, which names style and scripts by their hashes. Elements are
    made from text by DOMPurify alone."""
    style = "".join(map(_read, page.styles))
    scripts = [*map(_read, page.libraries), "\n".join(["'use strict';", *map(_read, page.scripts)])]
    html = _read(SHARED / "frame.html")
    if is_several:
        # Before the scripts are inserted: the replacement must not change a script, or its hash would be wrong.
        html = html.replace("<html ", "<html data-several ")
    link = "".join(text for path, text in page.links if path in rooms.pages())
    parts = {"<!--title-->": page.title, "<!--link-->": link, "<!--content-->": _read(page.index)}
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
