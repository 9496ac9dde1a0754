"""The page at `/`."""

from __future__ import annotations

from pathlib import Path

from diskprefix.desk.shared.web_page import SHARED, WebPage

_PAGE = Path(__file__).parent / "page"

DASHBOARD_PAGE = WebPage(
    "diskprefix",
    (("/chat", '<a href="/chat">Chat</a>'),),
    _PAGE / "index.html",
    styles=(SHARED / "base.css", _PAGE / "style.css"),
    # Each uses names of the scripts before it.
    scripts=(
        *(SHARED / name for name in ("format.js", "daemon.js")),
        *(_PAGE / name for name in ("chart.js", "tree.js", "sections.js", "main.js")),
    ),
)
