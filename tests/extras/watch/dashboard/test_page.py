"""Who gets the page, and what it may do."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest
from starlette.datastructures import Headers

from diskprefix.extras.web_page import DASHBOARD_PAGE, wants_page

CHROME = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"


@pytest.mark.parametrize(
    ("accept", "is_wanted"),
    [
        (CHROME, True),
        ("text/html", True),
        ("TEXT/HTML ; q=0.5, application/json;q=0.4", True),
        ("text/html, application/json", True),
        ("text/html;q=0.5, application/json", False),
        ("text/html;q=0", False),
        ("text/html;q=x", False),
        ("*/*", False),
        ("application/json", False),
        ("text/*", False),
        ("", False),
        (None, False),
    ],
)
def test_a_browser_gets_the_page_and_a_program_json(accept: str | None, is_wanted: bool) -> None:
    assert wants_page(Headers({"accept": accept} if accept is not None else {})) is is_wanted


def test_only_the_page_s_own_style_and_script_run_and_nothing_is_fetched_from_elsewhere() -> None:
    answer = DASHBOARD_PAGE.response()
    html, policy = bytes(answer.body).decode(), answer.headers["content-security-policy"]
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        [text] = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in policy
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert "/*script*/" not in html
    assert not re.findall(r"(?:src|href)\s*=\s*[\"']?(?:https?:)?//", html)
    assert not re.findall(r"\son\w+\s*=|\sstyle\s*=", html.partition("<script>")[0]), "the policy would refuse these"


def test_the_page_is_asked_for_anew_tells_nobody_where_it_is_and_stands_in_no_frame() -> None:
    headers = DASHBOARD_PAGE.response().headers
    assert (headers["vary"], headers["cache-control"]) == ("Accept", "no-cache")
    assert (headers["referrer-policy"], headers["x-content-type-options"]) == ("no-referrer", "nosniff")
    for directive in ("frame-ancestors", "base-uri", "form-action"):
        assert f"{directive} 'none'" in headers["content-security-policy"]


def test_texts_of_requests_and_prompts_are_never_taken_for_markup() -> None:
    script = bytes(DASHBOARD_PAGE.response().body).decode().partition("<script>")[2]
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", script)
