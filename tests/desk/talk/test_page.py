"""The page `/chat` in a real browser, over a kill and a restart of the daemon."""

from __future__ import annotations

import base64
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from diskprefix.desk.talk.chat_page import CHAT_PAGE
from diskprefix.runtime.fetch.embedded import EMBEDDED
from tests.cache_folder import USERS
from tests.closing import needs
from tests.daemon.server.daemon_process import DaemonProcess, cache_states, serve_flags
from tests.daemon.server.test_auth import ALICE, write_keys
from tests.desk.browsing import PHONE, WIDE, violations

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route


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
            page.locator("article.user .edit").last.click()
            page.locator("article.user textarea").fill("And lakes?")
            page.locator("article.user textarea").press("Enter")
            page.locator("article.user .said", has_text="And lakes?").wait_for()
            assert re.search(r"\d+ of \d+ tokens restored from", figures(page))
            # It is there after the page is loaded anew, and goes when it is deleted.
            page.reload()
            assert page.locator("article").count() == 4
            page.once("dialog", lambda dialog: dialog.accept())
            page.click("#chats .forget")
            assert page.locator("article").count() == 0
    page.context.close()


@pytest.mark.slow
def test_it_asks_for_the_key_and_is_as_wide_as_a_phone(browser: Browser, chat_model: Path, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", f"alice {ALICE}")
    flags = [*serve_flags(chat_model, tmp_path / "kv"), "--api-keys", str(keys)]
    with DaemonProcess(*flags) as daemon:
        daemon.wait_ready()
        page = opened(browser, daemon.url, viewport=PHONE, color_scheme="dark")
        page.wait_for_selector("#login:visible")
        assert violations(page) == []
        page.fill("#key", ALICE)
        page.click("#login [type=submit]")
        say(
            page,
            "averylongwordwithoutaplacetobreak" * 8
            + "\n```py\nprint('a line of code that is wider than a phone')\n```",
        )
        assert page.evaluate("() => document.documentElement.scrollWidth") <= PHONE["width"]
        assert violations(page) == []
    page.context.close()


def test_the_link_in_the_log_opens_the_chat_and_one_click_there_the_dashboard(
    browser: Browser, daemon: DaemonProcess
) -> None:
    link = daemon.wait_for_line(r"chat in a browser: (\S+)")[1]
    context = browser.new_context()
    page = context.new_page()
    page.goto(link)
    assert page.url == f"{daemon.url}/chat", "the page has taken the key"
    page.click("#dashboard")
    page.locator("#status", has_text="ok").wait_for()
    assert page.locator("#login").is_hidden()
    context.close()


def test_a_chat_without_a_key_names_the_command_in_place_of_a_link_to_a_locked_page(
    browser: Browser, daemon: DaemonProcess
) -> None:
    page = opened(browser, daemon.url)
    page.wait_for_selector("#all:visible")
    assert page.locator("#dashboard").is_hidden()
    assert page.locator("#closed").inner_text() == f"Dashboard: diskprefix dashboard --url {daemon.url}"
    assert violations(page) == []
    page.context.close()


EMBEDDED_FILES = [*(USERS / "diskprefix/models" / EMBEDDED.requirement).glob("*.gguf")]
WATCH = """() => {
  window.seen = [];
  const text = (name) => find(`article:last-child .${name}`)?.textContent ?? "";
  const observer = new MutationObserver(() => seen.push([text("said"), text("figures")]));
  observer.observe(find("#log"), { childList: true, subtree: true });
}"""
"""Notes the reply and the line below it each time that the page draws them."""


@pytest.mark.slow
@pytest.mark.skipif(not EMBEDDED_FILES, reason="the embedded model is not on this machine")
def test_the_demonstration_shows_what_was_restored_before_the_second_token(browser: Browser, tmp_path: Path) -> None:
    flags = ["--model", str(EMBEDDED_FILES[0]), "--kv-cache-dir", str(tmp_path / "kv")]
    page = browser.new_page()
    page.set_default_timeout(120_000)

    def ask_next() -> str:
        page.locator("#examples button").first.click()
        return figures(page)

    with DaemonProcess(*flags) as daemon:
        page.goto(f"{daemon.wait_ready().url}/chat")
        page.click("#long")
        assert "tokens computed, none restored (new) · first token after" in ask_next()
        daemon.wait_saved()
        daemon.stop(signal.SIGKILL)
    with DaemonProcess(*flags, "--port", str(urlsplit(daemon.url).port)) as second:
        second.wait_ready()
        page.evaluate(WATCH)
        ask_next()
        at_first = next(line for said, line in page.evaluate("() => seen") if said)
        assert re.match(r"1,\d{3} of 1,\d{3} tokens restored from disk · first token after [\d.]+ m?s", at_first)
        assert "tokens/s" not in at_first, "the reply goes on"
        ask_next()
        second.wait_saved()
        with second.client() as client:
            replies = [one["reply_tokens"] for one in client.get("/dashboard/state").json()["ended"]]
            assert len(replies) == 2
            assert max(replies) <= 100
            [state] = cache_states(client)
            assert state["saved_tokens"] < 1000, "what the first daemon saved is not saved again"
    page.close()


def answering(*texts: str) -> Callable[[Route], None]:
    times = {"ttft_ms": 90, "prefill_ms": 4000, "decode_tokens_per_s": 20.0}
    usage = {"prompt_tokens": 50, "completion_tokens": len(texts)}
    chunks: list[dict[str, Any]] = [{"choices": [{"delta": {"content": text}}]} for text in texts]
    chunks += [{"choices": [], "usage": usage, "prefix_cache": {"restored": 0, "miss_reason": "new"}, "timings": times}]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    return lambda route: route.fulfill(body=body)


@pytest.mark.slow
def test_a_reply_that_repeats_itself_is_stopped_and_a_running_prefill_has_a_line(browser: Browser) -> None:
    page = lone_page(browser)
    for repeated, others in ((["It is ", "closed on Sundays. "] * 30, ["Yes. "]), (["= "] * 250, [])):
        page.route("**/v1/chat/completions", answering(*others, *repeated))
        page.fill("#text", "When?")
        page.press("#text", "Enter")
        page.locator("article .figures", has_text="stopped: the reply repeats itself").wait_for()
        whole = "".join([*others, *repeated])
        said = page.locator("article.assistant .said").last.inner_text()
        assert whole.startswith(said.strip())
        assert len(said) < len(whole) - 20
        page.click("#again")
        figures(page)
        assert page.locator("article.assistant .said").last.inner_text().strip() == whole.strip()
        page.click("#new")
    rule = ["| a | b |\n", "|-", *["-"] * 77, "\n", *["| 1 | 2 |\n"] * 3, "for x in range(4):\n        pass\n"]
    page.route("**/v1/chat/completions", answering(*rule))
    assert "stopped" not in say(page, "A table")
    reading = "readingOf({ processed: 100, time_ms: 0 }, { processed: 300, total: 1000, time_ms: 2000 })"
    assert page.evaluate(reading) == "reading: 300 of 1,000 tokens · 100 tokens/s · about 7.0 s left"
    page.context.close()


def lone_page(browser: Browser, path: str = "/chat", *, takes: tuple[str, ...] = ("text",), **options: Any) -> Page:
    """The page without a daemon. `takes`: what its only model reads."""
    page = browser.new_context(**options).new_page()
    page.route("**/health", lambda route: route.fulfill(json={"status": "ok"}))
    card = {"id": "tiny", "architecture": {"input_modalities": takes}}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [card]}))
    chat = CHAT_PAGE.response()
    page.route(
        re.compile("/chat(\\?.*)?$"), lambda route: route.fulfill(body=bytes(chat.body), headers=dict(chat.headers))
    )
    page.goto(f"http://localhost:8642{path}")
    page.wait_for_selector("#say:visible")
    return page


@pytest.mark.cases(1)
@pytest.mark.parametrize(("viewport", "scheme"), [(WIDE, "light"), (PHONE, "dark")])
def test_who_comes_for_the_first_time_finds_something_to_try(browser: Browser, viewport: Any, scheme: Any) -> None:
    page = lone_page(browser, viewport=viewport, color_scheme=scheme)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    asked: list[Any] = []

    def reply(route: Route) -> None:
        asked.append(route.request.post_data_json)
        found = {"restored": 1900 * (len(asked) > 1), "source": "disk", "miss_reason": "new"}
        times = {"ttft_ms": 90, "prefill_ms": 4000, "decode_tokens_per_s": 20.0}
        usage = {"prompt_tokens": 1950, "completion_tokens": 9}
        chunks = [
            {"choices": [{"delta": {"content": "From 9 to 4."}}]},
            {"choices": [], "usage": usage, "prefix_cache": found, "timings": times},
        ]
        route.fulfill(body="".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks))

    page.route("**/v1/chat/completions", reply)
    assert page.locator("#examples button").count() == 4
    box = page.locator("#say").bounding_box()
    assert box is not None
    assert box["y"] + box["height"] > viewport["height"] - 10, "the message is written at the bottom"
    assert violations(page) == []
    page.click("#about summary")
    page.fill("#temperature", "0")
    page.click("#long")
    assert len(page.input_value("#system").split()) > 1200
    for number, figure in enumerate(("none restored", "1,900 of 1,950 tokens restored from disk")):
        page.locator("#examples button").first.click()
        page.wait_for_selector("#try:visible")
        assert figure in figures(page)
        assert page.locator("#examples button").count() == 3 - number, "what was asked is not offered again"
    say(page, "A question of mine")
    page.fill("#length", "50")
    say(page, "Another")
    assert [(body["temperature"], body["max_tokens"]) for body in asked] == [(0, 100), (0, 100), (0, 1024), (0, 50)]
    assert asked[0]["messages"][0] == asked[1]["messages"][0]
    page.locator("article .copy").last.click()
    page.locator("article .copy", has_text="Copied").wait_for()
    assert page.evaluate("() => navigator.clipboard.readText()") == "From 9 to 4."
    assert violations(page) == []
    assert page.evaluate("() => document.documentElement.scrollWidth") <= viewport["width"]
    page.context.close()


def asking(page: Page, *texts: str) -> list[Any]:
    """Answers with the texts, one for each request, and returns the list that gets the messages of the requests."""
    asked: list[Any] = []

    def reply(route: Route) -> None:
        body: Any = route.request.post_data_json
        asked.append(body["messages"])
        answering(texts[len(asked) - 1])(route)

    page.route("**/v1/chat/completions", reply)
    return asked


@pytest.mark.slow
def test_an_edited_message_replaces_what_followed_it(browser: Browser) -> None:
    page = lone_page(browser)
    asked = asking(page, "First.", "Second.", "Third.")
    for text in ("One", "Two"):
        say(page, text)
    page.locator("article.user .edit").first.click()
    page.get_by_role("button", name="Cancel").click()
    assert page.locator("article").count() == 4
    page.locator("article.user .edit").last.click()
    assert violations(page) == []
    field = page.locator("article.user textarea")
    assert field.input_value() == "Two"
    field.fill("Two and a half")
    field.press("Enter")
    page.locator("article", has_text="Third.").wait_for()
    assert "50 tokens computed" in figures(page)
    assert [message["content"] for message in asked[2]] == ["One", "First.", "Two and a half"]
    assert asked[2][:-1] == asked[1][:-1], "the prompt begins as the one before"
    assert page.locator("article .said").all_inner_texts() == ["One", "First.", "Two and a half", "Third."]
    page.context.close()


def test_the_address_may_fill_the_box_and_sends_nothing(browser: Browser) -> None:
    hostile = "%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E"
    page = lone_page(browser, f"/chat?prompt=What%20is%20a%20prefix%3F%0A{hostile}#token=x")
    asked = asking(page, "Unasked")
    page.wait_for_timeout(200)
    assert asked == []
    assert page.input_value("#text") == "What is a prefix?\n<img src=x onerror=alert(1)>"
    assert page.url == "http://localhost:8642/chat", "loading it anew does not fill it again"
    assert page.locator("article").count() == 0
    page.context.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize(("viewport", "scheme"), [(WIDE, "light"), (PHONE, "dark")])
def test_conversations_are_found_by_their_words(browser: Browser, viewport: Any, scheme: Any) -> None:
    page = lone_page(browser, viewport=viewport, color_scheme=scheme)
    asking(page, "It is a lamp.", "Under the sea.")

    def show_list() -> None:
        if viewport is PHONE:
            page.click("#more")

    say(page, "What is a lighthouse?")
    show_list()
    page.click("#new")
    say(page, "Where are the corals?")
    show_list()
    titles = page.locator("#chats .open")
    assert set(titles.all_inner_texts()) == {"What is a lighthouse?", "Where are the corals?"}
    page.fill("#search", "LAMP")
    assert titles.all_inner_texts() == ["What is a lighthouse?"]
    assert violations(page) == []
    assert page.evaluate("() => document.documentElement.scrollWidth") <= viewport["width"]
    titles.first.click()
    assert page.locator("article .said").last.inner_text() == "It is a lamp."
    show_list()
    page.fill("#search", "whale")
    assert page.inner_text("#none") == "No conversation has these words."
    page.fill("#search", "sea")
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#chats .forget")
    page.fill("#search", "")
    assert titles.all_inner_texts() == ["What is a lighthouse?"]
    assert page.locator("article .said").last.inner_text() == "It is a lamp.", "another one was deleted"
    page.context.close()


DROP = """(files) => {
  const data = new DataTransfer();
  for (const [name, type, bytes] of files) data.items.add(new File([new Uint8Array(bytes)], name, { type }));
  find("#log").dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
}"""
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.mark.cases(1)
@pytest.mark.parametrize("takes", [("text",), ("text", "image")])
def test_dropped_texts_and_pictures_go_with_the_next_message(browser: Browser, takes: tuple[str, ...]) -> None:
    page = lone_page(browser, takes=takes)
    asked = asking(page, "I see.", "Again.")
    notes = "# Notes\n```\ncode\n```\n"
    files = [["notes.md", "text/markdown", [*notes.encode()]], ["p.png", "image/png", [*PNG]]]
    page.evaluate(DROP, [*files, ["a.zip", "application/zip", [80, 75, 0, 255]]])
    page.locator("#kept", has_text="a.zip: it is no text in UTF-8").wait_for()
    refused = "p.png: this model takes no pictures"
    assert (refused in page.inner_text("#kept")) is ("image" not in takes)
    assert page.locator("#attached li").count() == len(takes)
    assert violations(page) == []
    say(page, "What is this?")
    text = f"notes.md:\n````\n{notes}````\n\nWhat is this?"
    [sent] = asked[0]
    if "image" in takes:
        picture = {"url": f"data:image/png;base64,{base64.b64encode(PNG).decode()}"}
        assert sent["content"] == [{"type": "image_url", "image_url": picture}, {"type": "text", "text": text}]
        assert page.locator("article img").evaluate("(one) => one.decode().then(() => one.naturalWidth)") == 1
        assert page.locator("article img").get_attribute("alt") == "p.png"
    else:
        assert sent["content"] == text
    assert page.locator("article.user pre").inner_text() == notes.strip()
    assert page.locator("#attached li").count() == 0
    assert violations(page) == []
    page.click("#about summary")
    for name, kind, content in (("a.txt", "text/plain", b"A text."), ("a.zip", "application/zip", b"PK\0\xff")):
        page.set_input_files("#file", {"name": name, "mimeType": kind, "buffer": content})
    page.locator("#kept", has_text="a.zip: it is no text in UTF-8").wait_for()
    assert page.input_value("#system") == "a.txt:\nA text."
    page.context.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize("begun", ["Half an", ""])
def test_a_reply_that_breaks_off_says_so_and_what_came_of_it_is_no_error(browser: Browser, begun: str) -> None:
    page = lone_page(browser)
    chunk = json.dumps({"choices": [{"delta": {"content": begun}}]})
    page.route("**/v1/chat/completions", lambda r: r.fulfill(body=f"data: {chunk}\n\n") if begun else r.abort())
    page.fill("#text", "Go")
    page.press("#text", "Enter")
    page.wait_for_selector("#again:visible")
    last = page.locator("article").last
    assert "“Answer again” asks once more when" in last.inner_text()
    assert ("the connection broke after 7 characters" in last.inner_text()) == bool(begun)
    assert last.locator(".error").count() == (0 if begun else 1)
    assert violations(page) == []
    page.route("**/v1/chat/completions", answering("A whole answer."))
    page.click("#again")
    page.locator("article .said", has_text="A whole answer.").wait_for()
    assert page.locator("article.assistant").count() == 1
    page.context.close()
