"""The page in a real browser: Debian's chromium, where it is installed."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import pytest

from diskprefix.daemon.server.process.token_file import page_link
from diskprefix.desk.watch.dashboard.dashboard_page import DASHBOARD_PAGE
from diskprefix.folders import cache_home
from tests.closing import needs
from tests.daemon.server.daemon_process import DaemonProcess, serve_flags, wait_until
from tests.daemon.server.test_auth import ADMIN, write_keys
from tests.desk.browsing import PHONE, WIDE, violations

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

CHAT = "/v1/chat/completions"
OWN_DATA = ("/dashboard/state", "/dashboard/entries", "/props")

pytestmark = needs("chromium")


@pytest.fixture(scope="module")
def daemon(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One whose picture has room for what these tests save."""
    with DaemonProcess(*serve_flags(chat_model, tmp_path_factory.mktemp("browser") / "kv")) as process:
        yield process.wait_ready()


@contextmanager
def opened(
    browser: Browser, daemon: DaemonProcess, prepare: Callable[[Page], None] = lambda _page: None, **options: Any
) -> Iterator[Page]:
    """The page once it shows the daemon's state. What the browser complains about fails the test."""
    context = browser.new_context(**({"viewport": WIDE} | options))
    # The daemon rests after it has read what is stored, longer where reading took longer.
    context.set_default_timeout(120_000)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    prepare(page)
    page.goto(page_link(daemon.url, daemon.token))
    assert page.url == f"{daemon.url}/", "the page has taken the token"
    page.wait_for_selector("#said:not(:empty)")
    yield page
    context.close()
    assert complaints == []


def held(page: Page) -> Page:
    """The page, which from here on shows what a test gives it, and not what the daemon says meanwhile."""
    page.evaluate("() => { window.given = { onState, showEntries }; onState = showEntries = () => {}; }")
    return page


def ask(daemon: DaemonProcess, text: str, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0} | fields
    with daemon.client() as client:
        return client.post(CHAT, json=body)


@pytest.mark.slow
def test_the_page_follows_the_requests(browser: Browser, daemon: DaemonProcess) -> None:
    text = "the page follows this prompt, which is long enough to be saved <b>and</b> has markup in it " * 20
    ask(daemon, text)
    daemon.wait_saved()
    with opened(browser, daemon) as page:
        assert page.inner_text("#status") == "ok"
        rows = page.locator("#ended tbody tr")
        assert rows.count() > 0
        ask(daemon, text)
        page.locator("#ended tbody tr:first-child", has_text="% from").wait_for()
        ask(daemon, "wrong", top_p=7)
        page.wait_for_selector("#ended tr.failed")
        assert "top_p" in page.inner_text("#problems")
        page.wait_for_selector("#ttft svg")
        trunk = page.locator("#icicle button", has_text="has markup in it").first
        trunk.click()
        assert "<b>and</b>" in page.inner_text("#trunk")
        trunk.press("ArrowLeft")


@pytest.mark.cases(1)
@pytest.mark.parametrize("typed", ["the token", "the text of its file", "the digits alone"])
def test_without_the_token_the_page_says_where_it_is(browser: Browser, daemon: DaemonProcess, typed: str) -> None:
    ask(daemon, "what the page says of the day needs a request")
    page = browser.new_page()
    page.goto(daemon.url)
    page.locator("#login", has_text="type this in a terminal").wait_for()
    assert page.inner_text("#unlock") == f"diskprefix dashboard --url {daemon.url}"
    assert page.inner_text("#login-why") == ""
    assert violations(page) == []
    page.fill("#key", "nonsense of a user")
    page.click("#login button[type=submit]")
    page.locator("#login-why", has_text="no key or token of this daemon").wait_for()
    [file] = (cache_home() / "daemons").glob(f"127.0.0.1_{urlsplit(daemon.url).port}")
    of_file, digits = file.read_text(encoding="ascii"), daemon.token.rpartition("-")[2]
    page.fill("#key", {"the token": daemon.token, "the digits alone": digits}.get(typed, of_file))
    page.click("#login button[type=submit]")
    page.wait_for_selector("#said:not(:empty)")
    page.close()


@pytest.mark.slow
def test_a_request_that_was_stopped_is_no_failure_and_figures_for_few_are_behind_a_fold(
    browser: Browser, daemon: DaemonProcess
) -> None:
    ask(daemon, "a prompt beside those that are stopped, which is long enough to be saved. " * 3)
    stopped = {"status": 499, "route": CHAT, "error": None, "is_stopped": True, "prefix_cache": None, "timings": None}
    counts = ({"reply_tokens": 7}, {"reply_tokens": 0}, {"reply_tokens": 0, "prompt_tokens": 0})
    with daemon.client() as client, opened(browser, daemon) as page:
        state = client.get("/dashboard/state").json()
        drafted = {"drafted_tokens": 45, "accepted_tokens": 6}
        state["ended"] = [one | {"timings": one["timings"] | drafted} for one in state["ended"] if one["prefix_cache"]]
        state["ended"] = state["ended"][-1:]
        for number, own in enumerate(counts):
            ended = {"number": 10_000 + number, "ended_at": state["now"], "prompt_tokens": 900, "ready_tokens": 300}
            state["ended"].append(ended | stopped | own)
        held(page).evaluate("now => { state.fresh = true; given.onState(now); }", state)
        rows = [text for text in page.locator("#ended tbody tr").all_inner_texts() if "stopped" in text]
        ends = ("before it began", "at 300 of 900", "after 7 tokens of the reply")
        assert all(end in row for end, row in zip(ends, rows, strict=True)), rows
        assert page.locator("#ended tr.failed").count() == 0
        assert "499" not in page.inner_text("#all")
        for words in ("Write buffer", "draft tokens", "accepted"):
            assert words not in page.inner_text("#all")
        page.click("#further summary")
        assert "Write buffer" in page.inner_text("#further")
        assert "13.3 %" in page.inner_text("#decisions")
        assert violations(page) == []


@pytest.mark.slow
def test_no_server_at_another_port_gets_the_token(browser: Browser, daemon: DaemonProcess) -> None:
    got: list[str] = []

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            got.append(f"{self.path}\n{self.headers}")
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<script>if (!location.search) location = '/?again'</script>")

        def log_message(self, *_args: object) -> None:
            """Nobody reads it."""

    ask(daemon, "what the page says of the day needs a request")
    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as other, opened(browser, daemon) as page:
        threading.Thread(target=other.serve_forever).start()
        assert page.context.cookies() == []
        page.goto(f"http://127.0.0.1:{other.server_port}/")
        page.wait_for_url("**/?again")
        page.goto(f"{daemon.url}/chat")
        page.wait_for_selector("#all:visible")
        page.evaluate("port => { location = `http://127.0.0.1:${port}/?left`; }", other.server_port)
        page.wait_for_url("**/?left")
        other.shutdown()
    assert len(got) >= 3
    assert [one for one in got if daemon.token in one or "cookie" in one.lower()] == []


class Stranger(ThreadingHTTPServer):
    """Another user's program at the port of a daemon that has ended. Its answers make a page go on."""

    def __init__(self, port: int) -> None:
        self.got: list[tuple[str, str]] = []
        got = self.got

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                got.append((urlsplit(self.path).path, f"{self.path}\n{self.headers}\n{body.decode()}"))
                answer = json.dumps({"status": "ok", "data": [], "token": "x"}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_POST = do_GET

            def log_message(self, *_args: object) -> None:
                """Nobody reads it."""

        super().__init__(("127.0.0.1", port), Handler)

    def bearers(self, path: str = "/") -> set[str]:
        """What came as a key with requests for paths that begin so."""
        found = [re.findall(r"(?im)^authorization: bearer (\S+)", text) for to, text in self.got if to.startswith(path)]
        return {bearer for each in found for bearer in each}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "kind",
    ["alone", "with keys", *(pytest.param(f"router {end}", marks=pytest.mark.slow) for end in ("", "with keys"))],
)
def test_an_open_page_sends_no_token_to_another_program_on_the_port(
    browser: Browser, daemon: DaemonProcess, chat_model: Path, tmp_path: Path, kind: str
) -> None:
    flags = serve_flags(chat_model, tmp_path / "kv", **({"idle_unload": "1h"} if "router" in kind else {}))
    key = ADMIN if "keys" in kind else None
    if key is not None:
        flags += ["--api-keys", str(write_keys(tmp_path / "keys", f"admin {key}"))]
    context = browser.new_context()
    context.set_default_timeout(120_000)
    dashboard, chat = context.new_page(), context.new_page()
    with DaemonProcess(*flags) as ended:
        with ended.client(key) as client:
            client.get("/v1/models").raise_for_status()
        ended.wait_ready()
        token, port = ended.token, urlsplit(ended.url).port or 0
        dashboard.goto(page_link(ended.url, key or token))
        dashboard.locator("#status", has_text="ok").wait_for()
        # The other page has it from what was typed.
        chat.goto(f"{ended.url}/chat" if key else page_link(ended.url, token, "chat"))
        if key is not None:
            chat.fill("#key", key)
            chat.click("#login button[type=submit]")
        chat.wait_for_selector("#all:visible")
        assert ended.stop() == 0
    with Stranger(port) as stranger:
        threading.Thread(target=stranger.serve_forever).start()
        chat.fill("#text", "hello")
        chat.press("#text", "Enter")
        wait_until(
            lambda: stranger.bearers("/dashboard/") and stranger.bearers(CHAT), "both pages asked the stranger", 60
        )
        stranger.shutdown()
    context.close()
    assert key is None or not any(key in text for _, text in stranger.got)
    with DaemonProcess(*flags) as later:
        urls = [later.url, daemon.url]
        opened_by = [
            (url, path, bearer)
            for url in urls
            for path in OWN_DATA
            for bearer in stranger.bearers()
            if httpx.get(url + path, headers={"Authorization": f"Bearer {bearer}"}).status_code != 401
        ]
        assert opened_by == []


@pytest.mark.slow
def test_a_new_link_in_the_same_tab_takes_the_place_of_an_old_token(browser: Browser, daemon: DaemonProcess) -> None:
    ask(daemon, "what the page says of the day needs a request")
    page = browser.new_page()
    page.goto(page_link(daemon.url, "diskprefix-owner-of-another-daemon"))
    page.locator("#login-why", has_text="no key or token of this daemon").wait_for()
    page.goto(page_link(daemon.url, daemon.token))
    page.wait_for_selector("#said:not(:empty)")
    assert page.url == f"{daemon.url}/"
    page.close()


@pytest.mark.slow
def test_a_prompt_is_deleted_after_a_question_only(browser: Browser, daemon: DaemonProcess) -> None:
    ask(daemon, "the page deletes this prompt, which is long enough to be saved, when it is told to. " * 3)
    daemon.wait_saved()
    with opened(browser, daemon) as page:
        trunk = page.locator("#icicle button", has_text="deletes this prompt").first
        trunk.click()
        page.once("dialog", lambda dialog: dialog.dismiss())
        page.click("#trunk button.danger")
        assert trunk.count() == 1
        page.once("dialog", lambda dialog: dialog.accept())
        page.click("#trunk button.danger")
        trunk.wait_for(state="detached")


@pytest.mark.slow
def test_a_tree_that_the_daemon_had_kept_is_asked_for_again(browser: Browser, daemon: DaemonProcess) -> None:
    ask(daemon, "the page shows this prompt, which was saved after the daemon had read what is stored. " * 3)
    daemon.wait_saved()
    kept = {"total": 0, "entries": [], "trees": [], "age_s": 9.0, "again_s": 0.0}

    def answer_once(page: Page) -> None:
        page.route("**/dashboard/entries", lambda route: route.fulfill(json=kept), times=1)

    with opened(browser, daemon, answer_once) as page:
        page.locator("#icicle p", has_text="Nothing is stored yet").wait_for()
        page.locator("#icicle button", has_text="saved after the daemon").first.wait_for()


PLACE = {"needed_bytes": 1 << 30, "is_pinned": False, "idle_unload_s": None, "num_active": 1}


@pytest.mark.slow
def test_of_several_models_the_chosen_one_is_shown(browser: Browser, daemon: DaemonProcess) -> None:
    names = {"org/ash:Q8_0": "ready", "birch": "ready", "cedar": "loading"}
    router = {"memory_limit": 4 << 30, "models": [PLACE | {"model": name, "phase": names[name]} for name in names]}
    several = DASHBOARD_PAGE.response(is_several=True)

    def stand_before(page: Page) -> None:
        page.route(
            daemon.url + "/", lambda route: route.fulfill(body=bytes(several.body), headers=dict(several.headers))
        )
        page.route("**/props", lambda route: route.fulfill(json=router))
        cards = [{"id": name, "needs_bytes": 1 << 30} for name in (*names, "oak", "elm")]
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": cards}))

    with opened(browser, daemon) as page:
        stand_before(page)
        page.goto(daemon.url)
        page.locator("#models tbody tr").nth(4).wait_for()
        assert "3.0 of 4.0 GiB" in page.inner_text("#models-memory")
        assert page.locator("#model option").all_inner_texts() == ["org/ash:Q8_0", "birch"]
        assert page.evaluate("several.model") == "org/ash:Q8_0"
        with page.expect_request("**/dashboard/state?since=0&model=birch"):
            page.locator("#model").select_option("birch")
        with page.expect_request("**/dashboard/entries?model=birch"):
            page.evaluate("readEntries()")
        page.wait_for_function("find('#status').textContent === 'ok'")
        router["models"] = []
        page.evaluate("() => { several.model = null; beginAnew(); }")
        page.locator("#status.idle", has_text="no model is loaded").wait_for()


@pytest.mark.cases(1)
@pytest.mark.parametrize(("viewport", "scheme"), [(WIDE, "dark"), (PHONE, "light")])
def test_the_page_offers_all_models_when_none_is_loaded(browser: Browser, viewport: Any, scheme: Any) -> None:
    context = browser.new_context(viewport=viewport, color_scheme=scheme)
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(f"{request.method} {urlsplit(request.url).path}"))
    several, places = DASHBOARD_PAGE.response(is_several=True), list[dict[str, Any]]()
    cards = [{"id": "org/ash:Q8_0", "needs_bytes": 3 << 30}, {"id": "birch", "problem": "birch cannot be read"}]

    def load(route: Route) -> None:
        places.append(PLACE | {"model": "org/ash:Q8_0", "phase": "loading"})
        route.fulfill(json={})

    page.route("http://localhost:8642/", lambda r: r.fulfill(body=bytes(several.body), headers=dict(several.headers)))
    page.route("**/props", lambda route: route.fulfill(json={"memory_limit": 4 << 30, "models": places}))
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": cards}))
    page.route("**/models/org%2Fash%3AQ8_0/load", load)
    page.goto("http://localhost:8642/")
    rows = page.locator("#models tbody tr")
    rows.nth(1).wait_for()
    assert "not loaded" in rows.first.inner_text()
    assert "needs 3.0 GiB" in rows.first.inner_text()
    assert "birch cannot be read" in rows.nth(1).inner_text()
    page.locator("#status.idle", has_text="no model is loaded").wait_for()
    assert violations(page) == []
    assert page.evaluate("() => document.documentElement.scrollWidth") <= viewport["width"]
    page.get_by_role("button", name="Load org/ash:Q8_0").click()
    page.get_by_role("button", name="Unload org/ash:Q8_0").wait_for()
    assert "loading" in rows.first.inner_text()
    assert {one for one in asked if "dashboard" in one} == set()
    context.close()


@pytest.mark.slow
def test_the_page_dims_its_figures_and_shows_the_start_command_after_a_kill(
    browser: Browser, chat_model: Path, tmp_path: Path
) -> None:
    flags = serve_flags(chat_model, tmp_path / "kv")
    with DaemonProcess(*flags) as killed:
        killed.wait_ready()
        ask(killed, "the page still shows the figures of this prompt when the daemon is gone. " * 3)
        context = browser.new_context()
        context.set_default_timeout(120_000)
        page = context.new_page()
        page.goto(page_link(killed.url, killed.token))
        page.wait_for_selector("#ended tbody tr")
        assert not page.is_visible("#stopped")
        killed.stop(signal.SIGKILL)
        page.locator("#h-stopped", has_text="s ago").wait_for()
        assert page.inner_text("#command").startswith("diskprefix serve --port 0 --model ")
        assert page.evaluate("() => Number(getComputedStyle(find('#all')).opacity)") < 1
        assert page.locator("#ended tbody tr").count() > 0
        with DaemonProcess(*flags, "--port", str(urlsplit(killed.url).port)) as second:
            second.wait_ready()
            page.locator("#login-why", has_text="The daemon was started again").wait_for()
            assert not page.is_visible("#stopped")
            assert page.inner_text("#unlock") == f"diskprefix dashboard --url {second.url}"
            page.goto(page_link(second.url, second.token))
            page.locator("#status", has_text="ok").wait_for()
        context.close()


LEVELS = ("error", "warning", "warning", "hint")


def after_a_day(state: dict[str, Any]) -> dict[str, Any]:
    """The daemon's state after 300 requests of agents, every tenth of them cold."""
    cache = {"scope": "auto:30", "miss_reason": None, "boundary": 9000, "boundary_reason": "shared_prefix"}
    reply = {"route": CHAT, "status": 200, "error": None, "prompt_tokens": 9000, "reply_tokens": 120}
    ended = [
        reply
        | {"number": 10_000 + number, "ended_at": state["now"] - 200 * (300 - number)}
        | {"prefix_cache": cache | {"restored": 8900 if number % 10 else 24, "source": "disk", "saved": "stored"}}
        | {"timings": {"ttft_ms": 100 if number % 10 else 23_000, "decode_tokens_per_s": 21.5}}
        | {"outcome": "hit" if number % 10 else "miss"}
        for number in range(300)
    ]
    counts = {"requests": 300, "prompt_tokens": 1_000_000, "restored_tokens": 970_000, "saved_s": 660}
    problem = {"level": "warning", "what": "a client sent what is wrong", "todo": "change it", "count": 2, "last_at": 1}
    of_cache = {"savings": {"since": 0, "today": counts, "total": counts}}
    lost = [{"what": f"cause {n}", "advice": "do it", "last": "", "tokens": 9000 - n, "requests": 2} for n in range(2)]
    return state | {
        "ended": ended,
        "cache": state["cache"] | of_cache,
        "lost": lost,
        "problems": [problem | {"what": f"problem {number}", "level": level} for number, level in enumerate(LEVELS)],
    }


def of_forty_prompts(entries: dict[str, Any]) -> dict[str, Any]:
    """The saved prompts as 40 that share a trunk."""
    [tree] = entries["trees"]
    trunk = tree["nodes"][0] | {"id": "trunk", "parent": None, "num_entries": 40, "entries": []}
    leaf = trunk | {"parent": "trunk", "start": trunk["end"], "end": 2 * trunk["end"], "num_entries": 1}
    leaf["entries"] = [entries["entries"][0]["id"]]
    return entries | {"trees": [tree | {"nodes": [trunk, *(leaf | {"id": str(number)} for number in range(40))]}]}


@pytest.mark.slow
def test_a_day_fits_two_screens_and_begins_with_a_sentence(browser: Browser, daemon: DaemonProcess) -> None:
    ask(daemon, "a prompt for the page after a day, which is long enough to be saved and to have a trunk. " * 3)
    daemon.wait_saved()
    with daemon.client() as client, opened(browser, daemon) as page:
        page.wait_for_selector("#icicle button")
        saved = client.get("/dashboard/entries").json()
        held(page).evaluate("shown => given.showEntries(shown)", of_forty_prompts(saved))
        day = after_a_day(client.get("/dashboard/state").json())
        page.evaluate("now => { state.fresh = true; given.onState(now); }", day)
        sentence = (
            "97.0 % of today's prompt tokens restored, 11.0 min of computing saved. "
            "First token of a prompt of 9,000 tokens: 23.0 s computed, 100 ms restored."
        )
        assert page.inner_text("#said") == sentence
        assert page.evaluate("() => document.documentElement.scrollHeight") <= 2 * WIDE["height"]
        assert "cause 0" in page.inner_text("#lost")
        page.click("#more-lanes")
        assert page.locator("#icicle button").count() == 41
        begin = saved["entries"][0]["preview"][:20]
        assert page.locator("[data-trunk=trunk]").inner_text().startswith(begin), "the first words of what is shared"
        too_long = """() => [...document.querySelectorAll("#icicle button span")].filter((one) => {
          const text = one.getBoundingClientRect(), bar = one.parentNode.getBoundingClientRect();
          return text.right > bar.right + 1 || text.bottom > bar.bottom + 1; }).length"""
        assert page.evaluate(too_long) == 0, "texts stay in their bars"
        page.get_by_label("Dismiss: problem 1").click()
        page.evaluate("now => given.onState(now)", day)
        assert "problem 3" in page.inner_text("#problems")
        assert "problem 1" not in page.inner_text("#problems")
        page.evaluate("now => given.onState(now)", day | {"problems": []})
        page.evaluate("now => given.onState(now)", day)
        assert "problem 1" in page.inner_text("#problems"), "it was over, and came again"
        assert not page.get_by_label("Dismiss: problem 0").count(), "an error stays"


def test_a_page_without_requests_has_the_address_and_while_the_model_loads_how_far_it_is(
    browser: Browser, daemon: DaemonProcess
) -> None:
    with daemon.client() as client, opened(browser, daemon) as page:
        new = client.get("/dashboard/state").json() | {"requests": [], "ended": []}
        held(page).evaluate("now => { state.fresh = true; given.onState(now); }", new)
        assert page.inner_text("#url") == f"{daemon.url}/v1"
        assert not page.is_visible("#times")
        loading = {"status": "loading", "message": "measuring: 25 %", "model": None, "cache": None, "memory": None}
        page.evaluate("now => { state.fresh = true; given.onState(now); }", new | loading)
        assert page.locator("#progress [role=progressbar]").get_attribute("aria-valuenow") == "25"
        assert page.is_visible("#url")
        assert not page.is_visible("#all")
        assert violations(page) == []


def test_the_page_shows_prompts_that_are_computed_ahead_and_why_they_wait(
    browser: Browser, daemon: DaemonProcess
) -> None:
    asked = [
        {"label": "Claude <b>Code", "tokens": 18_692, "ready": 8100},
        {"label": "Codex", "tokens": None, "ready": 0},
    ]
    with daemon.client() as client, opened(browser, daemon) as page:
        new = client.get("/dashboard/state").json()
        assert new["ahead"]["asked"] == []
        held(page).evaluate("now => given.onState(now)", new)
        assert not page.is_visible("#ahead")
        page.evaluate("now => given.onState(now)", new | {"ahead": {"waiting": 3, "asked": asked, "paused": "battery"}})
        line = "Claude <b>Code 8,100 of 18,692 tokens, Codex not begun, 1 prompt (not on battery)."
        assert page.inner_text("#ahead") == f"While no request waits: {line}"
        assert violations(page) == []


def crowded(state: dict[str, Any]) -> dict[str, Any]:
    """The daemon's state with more of everything, and every text too long for a line of a telephone."""
    word = "averylongnamewithoutaplacetobreak" * 3
    now = state["now"]
    running: dict[str, Any] = dict.fromkeys(
        ("prompt_tokens", "restored_tokens", "ready_tokens", "reply_tokens"), 123_456_789
    )
    running |= {"scope": "auto:30", "elapsed_s": 1e5, "queue_s": 1.0, "ttft_s": 1e5, "tokens_per_s": 12345.6}
    failed = {"route": f"POST /v1/{word}", "status": 400, "error": word, "prefix_cache": None, "timings": None}
    ended: dict[str, Any] = {"ended_at": now, "prompt_tokens": 0, "reply_tokens": 0}
    slot = {"tokens": 1, "num_bytes": 1, "busy": True}
    return state | {
        "model": state["model"] | {"name": word},
        "message": word,
        "ahead": {"waiting": 1, "paused": word, "asked": [{"label": word, "tokens": 10**9, "ready": 10**8}]},
        "requests": [running | {"id": str(number), "state": "prefilling"} for number in range(3)],
        "ended": [*state["ended"], *(ended | failed | {"number": 10_000 + number} for number in range(20))],
        "memory": state["memory"] | {"slots": [slot] * 100},
        "cache": state["cache"] | {"codec": word},
        "lost": [{"what": word, "advice": word, "last": word, "tokens": 10**9, "requests": 10**6}] * 3,
        "problems": [{"level": "hint", "what": word, "todo": word, "count": 2, "last_at": None}] * 3,
    }


def crowded_trees(entries: dict[str, Any]) -> dict[str, Any]:
    """The saved prompts as those of several tenants and models with long names."""
    tree = entries["trees"][0]
    names = {"model": "averylongnameofamodel" * 4, "tenant_name": "another client (01234567)"}
    others = [names | {"root": str(n)} for n in range(3)]
    return entries | {"trees": [tree, *(tree | other for other in others)]}


def test_the_tree_of_the_served_model_with_the_most_hits_is_shown_first(
    browser: Browser, daemon: DaemonProcess
) -> None:
    ask(daemon, "a prompt of the served model, which is long enough to be saved and to have a trunk. " * 3)
    daemon.wait_saved()
    with daemon.client() as client, opened(browser, daemon) as page:
        page.wait_for_selector("#icicle button")
        shown = client.get("/dashboard/entries").json()
        [own] = shown["trees"]
        other = own | {"root": "other", "model": "another", "tenant_name": "no key"}
        busy = own | {"root": "busy", "tenant_name": "key alice"}
        busy["nodes"] = [node | {"hits": node["hits"] + 9} for node in own["nodes"]]
        of_all = shown | {"trees": [other, own, busy]}
        held(page).evaluate("shown => given.showEntries(shown, state.now.model.name)", of_all)
        model, labels = own["model"], page.locator("#tree-of option")
        assert labels.all_inner_texts() == [f"key alice, {model}", f"your programs, {model}", "no key, another"]
        assert page.locator("#tree-of").input_value() == "0"
        page.select_option("#tree-of", "1")
        idle = busy | {"nodes": own["nodes"][:1]}
        page.evaluate("shown => given.showEntries(shown, state.now.model.name)", of_all | {"trees": [idle, own]})
        assert page.locator("#tree-of").evaluate("one => one.selectedOptions[0].text") == "your programs", "it stays"


def test_a_crowded_page_is_no_wider_than_a_telephone(browser: Browser, daemon: DaemonProcess) -> None:
    ask(daemon, "a prompt for the crowded page, which is long enough to be saved and to have a trunk. " * 3)
    daemon.wait_saved()
    with daemon.client() as client, opened(browser, daemon, viewport=PHONE) as page:
        page.wait_for_selector("#icicle button")
        held(page).evaluate("shown => given.showEntries(shown)", crowded_trees(client.get("/dashboard/entries").json()))
        page.locator("#icicle button").first.click()
        page.evaluate("now => given.onState(now)", crowded(client.get("/dashboard/state").json()))
        too_wide = """() => [...document.querySelectorAll("body *")].filter((one) =>
          one.getBoundingClientRect().right > innerWidth && !one.closest(".scroll, #icicle, pre, .unseen"))
          .map((one) => one.outerHTML.slice(0, 100))"""
        page.click("#further summary")
        assert page.evaluate(too_wide) == []
        too_narrow = """() => [...document.querySelectorAll("#main *")].filter((one) =>
          !one.children.length && one.innerText?.length > 9 && one.clientHeight > 8 * Math.max(one.clientWidth, 9))
          .map((one) => one.outerHTML.slice(0, 100))"""
        assert page.evaluate(too_narrow) == [], "a letter a line"
        assert page.evaluate("() => document.documentElement.scrollWidth") <= PHONE["width"]
        row = page.locator("#live tbody tr").first
        assert "first token" in row.locator("td").nth(3).evaluate("(one) => getComputedStyle(one, '::before').content")
        assert row.evaluate("(one) => getComputedStyle(one).display") == "grid", "a request is a card"


@pytest.mark.slow
def test_the_shortest_trunk_can_be_clicked(browser: Browser, daemon: DaemonProcess) -> None:
    for name in ("one", "another"):
        ask(daemon, f"both prompts begin so: {name} is long enough to be saved and to continue a short trunk. " * 3)
    daemon.wait_saved()
    with daemon.client() as client, opened(browser, daemon, viewport=PHONE) as page:

        def shared() -> tuple[Any, list[Any], Any] | None:
            entries = client.get("/dashboard/entries").json()
            for nodes in (tree["nodes"] for tree in entries["trees"]):
                parents = {node["parent"] for node in nodes}
                if trunk := next((one for one in nodes if not one["parent"] and one["id"] in parents), None):
                    return entries, nodes, trunk
            return None

        # The daemon rests after it has read what is stored, so its answer may be older than the prompts.
        entries, nodes, trunk = wait_until(shared, "the prompts are listed", 120)
        for node in nodes:
            node["end"] += 0 if node is trunk else 10_000
        page.wait_for_selector("#icicle button")
        held(page).evaluate("shown => given.showEntries(shown)", entries)
        page.locator(f"[data-trunk='{trunk['id']}']").click()
        assert page.inner_text("#trunk dd").startswith(f"0 to {trunk['end']},")


@pytest.mark.cases(1)
@pytest.mark.parametrize(("viewport", "scheme"), [(WIDE, "light"), (PHONE, "dark")])
def test_nothing_keeps_people_from_using_it(
    browser: Browser, daemon: DaemonProcess, viewport: dict[str, int], scheme: str
) -> None:
    ask(daemon, "a prompt for the page to show, which is long enough to be saved and to have a trunk. " * 3)
    with opened(browser, daemon, viewport=viewport, color_scheme=scheme) as page:
        page.wait_for_selector("#icicle button")
        assert violations(page) == []
        assert page.evaluate("() => document.documentElement.scrollWidth") <= viewport["width"]
