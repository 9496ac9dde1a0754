"""The page `/chat`."""

from __future__ import annotations

from pathlib import Path

from diskprefix.desk.shared.web_page import SHARED, WebPage

_PAGE = Path(__file__).parent / "page"

CHAT_PAGE = WebPage(
    "diskprefix chat",
    (("/", '<a href="/" id="dashboard" hidden>Dashboard</a><span id="closed" hidden>Dashboard: <code></code></span>'),),
    _PAGE / "index.html",
    styles=(SHARED / "base.css", _PAGE / "talk.css"),
    scripts=(
        *(SHARED / name for name in ("format.js", "daemon.js")),
        *(_PAGE / name for name in ("document.js", "markdown.js", "markup.js", "attached.js", "talk.js")),
    ),
    libraries=tuple(_PAGE / "vendored" / name for name in ("marked.umd.js", "purify.min.js", "highlight.min.js")),
)
