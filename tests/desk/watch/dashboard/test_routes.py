"""Who gets the dashboard's page, what it may do, and what its routes show of a real daemon, and to whom."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from diskprefix.daemon import rooms
from diskprefix.daemon.rooms import wants_page
from diskprefix.daemon.server.daemon import Daemon
from diskprefix.daemon.settings import Settings
from diskprefix.desk.watch.dashboard import watch
from diskprefix.desk.watch.dashboard.dashboard_page import DASHBOARD_PAGE
from tests.daemon.server.daemon_process import DaemonProcess, wait_until
from tests.daemon.server.scripted import AppServer, ScriptedEngine, scripted_app, until_cancelled
from tests.daemon.server.test_auth import ADMIN, ALICE, bearer, write_keys

CHAT = "/v1/chat/completions"
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
LONG = "What the harbour master knows of tides, cranes and berths, told from the beginning. " * 4


def ask(client: httpx.Client, text: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return client.post(CHAT, json={"messages": messages, "max_tokens": 4, "temperature": 0} | fields)


def test_a_browser_gets_the_page_and_other_clients_what_they_got_before(client: httpx.Client) -> None:
    page = client.get("/", headers=BROWSER)
    assert page.headers["content-type"].startswith("text/html")
    assert "content-security-policy" in page.headers
    for accept in ("*/*", "application/json"):
        answer = client.get("/", headers={"Accept": accept})
        assert answer.json() == rooms.welcome()
        assert answer.headers["vary"] == "Accept"
    head = client.head("/", headers=BROWSER)
    assert (head.status_code, head.content) == (200, b"")
    assert client.head("/").headers["content-type"] == "application/json"


def test_the_state_shows_what_the_last_requests_were_told(client: httpx.Client) -> None:
    before = client.get("/dashboard/state").json()["ended"]
    since = before[-1]["number"] if before else 0
    reply = ask(client, f"state {LONG}").json()
    assert ask(client, "hello", top_p=7).status_code == 400
    state = client.get("/dashboard/state", params={"since": since}).json()
    good, bad = state["ended"]
    assert (good["status"], bad["status"]) == (200, 400)
    assert (good["id"], good["prefix_cache"]) == (reply["id"], reply["prefix_cache"])
    assert good["prompt_tokens"] == reply["usage"]["prompt_tokens"]
    assert bad["error"].startswith("top_p: ")
    assert any("top_p: " in problem["what"] for problem in state["problems"])
    assert state["model"] is not None
    assert any(slot["tokens"] > 0 and not slot["busy"] for slot in state["memory"]["slots"])
    assert (state["status"], state["may_delete"]) == ("ok", True)
    assert client.get("/dashboard/state", params={"since": "x"}).json()["error"]["param"] == "since"


def test_a_saved_prompt_is_listed_with_its_tree_and_can_be_deleted(client: httpx.Client, daemon: DaemonProcess) -> None:
    text = f"entries {LONG}"
    assert ask(client, text).json()["prefix_cache"]["restored"] == 0
    daemon.wait_saved()

    def found() -> list[Any]:
        listed = client.get("/dashboard/entries").json()
        nodes = {node["id"]: node for tree in listed["trees"] for node in tree["nodes"]}
        for node in nodes.values():
            assert node["start"] == (nodes[node["parent"]]["end"] if node["parent"] else 0)
        return [entry for entry in listed["entries"] if entry["preview"] and "entries What" in entry["preview"]]

    [entry] = wait_until(found, "the entry is listed")
    deleted = client.delete(f"/dashboard/entries/{entry['id']}")
    assert (deleted.status_code, deleted.json()["entries"]) == (200, 1)
    assert found() == []
    assert ask(client, text).json()["prefix_cache"]["restored"] < entry["num_tokens"] // 2
    for unknown in (entry["id"][::-1], "zz"):
        answer = client.delete(f"/dashboard/entries/{unknown}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "entry_not_found")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "state"),
        ("GET", "entries"),
        ("DELETE", "entries/a"),
    ],
)
def test_everything_but_the_page_is_for_the_key_named_admin(keyed: AppServer, method: str, path: str) -> None:
    with keyed.client() as client:
        assert client.get("/", headers=BROWSER).headers["content-type"].startswith("text/html")
        assert client.request(method, f"/dashboard/{path}").status_code == 401
        assert client.request(method, f"/dashboard/{path}", headers=bearer(ALICE)).status_code == 403


@pytest.fixture(scope="module")
def keyed(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    keys = write_keys(tmp_path_factory.mktemp("keys") / "keys", f"admin {ADMIN}", f"alice {ALICE}")
    with scripted_app(chat_model, ScriptedEngine(until_cancelled), api_keys=keys) as running:
        yield running


def test_without_keys_other_machines_neither_read_texts_nor_delete(chat_model: Path) -> None:
    def is_private(host: str, keys: Path | None = None) -> bool:
        settings = Settings(model=str(chat_model), host=host, api_keys=keys)
        return watch.Watch(Daemon(settings, ScriptedEngine().load)).is_private

    assert is_private("127.0.0.1")
    assert is_private("::1")
    assert is_private("0.0.0.0", Path("keys"))
    with scripted_app(chat_model, host="0.0.0.0") as server, server.client() as client:
        assert client.get("/dashboard/state").json()["may_delete"] is False
        refused = client.delete("/dashboard/entries/00")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        assert "diskprefix purge" in refused.json()["error"]["message"]


CHROME = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"


@pytest.mark.parametrize(
    ("accept", "is_wanted"),
    [
        (CHROME, True),
        ("text/html", True),
        ("TEXT/HTML ; q=0.5, application/json;q=0.4", True),
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
    assert "<!--scripts-->" not in html
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
