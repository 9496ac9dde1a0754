"""The page `/chat` in a real browser, over a kill and a restart of the daemon."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tests.closing import needs
from tests.extras.browsing import PHONE, WIDE, violations
from tests.server.daemon_process import DaemonProcess, serve_flags
from tests.server.test_auth import ALICE, write_keys

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


pytestmark = needs("chromium")


def opened(browser: Browser, url: str, **options: Any) -> Page:
    context = browser.new_context(**({"viewport": WIDE} | options))
    context.set_default_timeout(60_000)
    page = context.new_page()
    # Random weights end no reply by themselves.
    page.route(
        "**/v1/chat/completions",
        lambda route: route.continue_(post_data=json.dumps(route.request.post_data_json | {"max_tokens": 12})),
    )
    page.goto(f"{url}/chat")
    return page


def say(page: Page, text: str) -> str:
    """Sends a message, and returns what stands below the reply."""
    page.fill("#text", text)
    page.press("#text", "Enter")
    return figures(page)


def figures(page: Page) -> str:
    page.wait_for_selector("#send:visible")
    return page.locator("article").last.locator(".figures").inner_text()


def test_a_conversation_goes_on_after_the_daemon_was_killed(browser: Browser, chat_model: Path, tmp_path: Path) -> None:
    flags = serve_flags(chat_model, tmp_path / "kv", sampling="temperature=0")
    with DaemonProcess(*flags) as daemon:
        daemon.wait_ready()
        page = opened(browser, daemon.url)
        page.click("#about summary")
        page.fill("#system", "You know <b>all</b> rivers. " * 6)
        page.locator("#system").blur()
        assert "computed, none restored" in say(page, "Name three rivers, and `one` more.")
        assert page.locator("article.user code").inner_text() == "one"
        assert violations(page) == []
        first = page.locator("article.assistant .said").all_inner_texts()
        page.click("#again")
        assert re.search(r"\d+ of \d+ tokens restored from memory", figures(page))
        assert page.locator("article.assistant .said").all_inner_texts() == first
        daemon.wait_saved()
        assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
        with DaemonProcess(*flags, "--port", str(urlsplit(daemon.url).port)) as second:
            second.wait_ready()
            assert re.search(r"\d+ of \d+ tokens restored from disk", say(page, "And mountains?"))
            # It is there after the page is loaded anew, and goes when it is deleted.
            page.reload()
            assert page.locator("article").count() == 4
            page.once("dialog", lambda dialog: dialog.accept())
            page.click("#forget")
            assert page.locator("article").count() == 0
    page.context.close()


def test_it_asks_for_the_key_and_is_as_wide_as_a_phone(browser: Browser, chat_model: Path, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", f"alice {ALICE}")
    flags = [*serve_flags(chat_model, tmp_path / "kv"), "--api-keys", str(keys)]
    with DaemonProcess(*flags) as daemon:
        daemon.wait_ready()
        page = opened(browser, daemon.url, viewport=PHONE, color_scheme="dark")
        page.wait_for_selector("#login:visible")
        assert violations(page) == []
        page.fill("#key", ALICE)
        page.click("#login button")
        say(
            page,
            "averylongwordwithoutaplacetobreak" * 8
            + "\n```py\nprint('a line of code that is wider than a phone')\n```",
        )
        assert page.evaluate("() => document.documentElement.scrollWidth") <= PHONE["width"]
        assert violations(page) == []
    page.context.close()
