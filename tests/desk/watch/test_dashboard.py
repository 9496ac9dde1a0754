"""`diskprefix dashboard`: what the browser is given, and what is printed."""

from __future__ import annotations

import os
import socket
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from diskprefix.daemon.server.process.token_file import published_token
from diskprefix.folders import cache_home
from tests.desk.conftest import Run
from tests.desk.small_daemon import small_daemon


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("DISPLAY", ":0")
    found: list[str] = []

    def open_it(address: str) -> bool:
        found.append(address)
        return True

    monkeypatch.setattr(webbrowser, "open", open_it)
    return found


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def test_the_browser_is_started_with_a_file_that_only_the_user_can_read(
    run: Run, opened: list[str], listener: socket.socket
) -> None:
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    for token, link in (
        ("abc", f"{url}/#token=abc"),
        ('a&#+<"b', f"{url}/#token=a%26%23%2B%3C%22b"),
        ("", f"{url}/"),
    ):
        with published_token(token, [listener]):
            ended = run("dashboard", "--url", f"{url}/v1")
            assert (ended.exit_code, ended.stdout, ended.stderr) == (0, "", "")
            page = Path(unquote(urlsplit(opened.pop()).path))
            assert (page.parent, page.stat().st_mode & 0o777) == (cache_home() / "daemons", 0o600)
            assert f'content="0; url={link}"' in page.read_text(encoding="utf-8")
            assert run("dashboard", "--url", url, "--print").stdout == f"{link}\n"
    assert run("dashboard", "--url", url, "--print").stdout == f"{url}/\n", "a daemon of another user"
    assert opened == []


def test_the_link_has_a_token_that_ends_with_the_daemon_and_not_the_key(run: Run, opened: list[str]) -> None:
    wrong = (401, {"error": {"message": "the API key is not one of this daemon's"}})
    replies = [(200, {"token": "of-a-page"}), wrong, (404, {}), (200, {"token": 5})]
    with small_daemon(**{"page-token": replies}) as daemon:
        key = ("--url", daemon.url, "--api-key", "the-key-of-admin")
        assert run("dashboard", *key, "--print").stdout == f"{daemon.url}/#token=of-a-page\n"
        assert daemon.keys == ["Bearer the-key-of-admin"]
        run("dashboard", *key).assert_refused(2, "--api-key: the API key is not one of this daemon's")
        for _ in range(2):
            run("dashboard", *key).assert_refused(1, f"what answers at {daemon.url} opens no page")
    assert opened == []


def test_the_chat_page_is_opened_with_the_token_too(run: Run, opened: list[str], listener: socket.socket) -> None:
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with published_token("abc", [listener]):
        assert run("chat", "--browser", "--url", url).exit_code == 0
        page = Path(unquote(urlsplit(opened.pop()).path)).read_text(encoding="utf-8")
        assert f'content="0; url={url}/chat#token=abc"' in page
        run("chat", "--browser", "--max-tokens", "9").assert_refused(2, "--browser: --max-tokens is set on the page")


def test_without_a_browser_the_link_is_printed(
    run: Run, opened: list[str], listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with published_token("abc", [listener]):
        for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
            monkeypatch.delenv(name, raising=False)
        assert run("dashboard", "--url", url).stdout == f"{url}/#token=abc\n"
        assert opened == [], "one in the terminal runs no scripts"
        monkeypatch.setenv("DISPLAY", ":0")
        monkeypatch.setattr(webbrowser, "open", lambda _address: False)
        assert run("dashboard", "--url", url).stdout == f"{url}/#token=abc\n"


def test_what_cannot_be_opened_is_one_line(run: Run, opened: list[str], listener: socket.socket) -> None:
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    run("dashboard", "--url", "ftp://x").assert_refused(2, "--url: 'ftp://x' is not a URL")
    with published_token("abc", [listener]):
        (cache_home() / "daemons/dashboard.html").mkdir()
        run("dashboard", "--url", url).assert_refused(
            2, "cannot write ", "`diskprefix dashboard --print` needs no file"
        )
        if os.geteuid() == 0:
            os.chown(cache_home(), 65534, -1)
            run("dashboard", "--url", url).assert_refused(2, "belongs to another user")
    listener.close()
    run("dashboard", "--url", url).assert_refused(1, f"no daemon answers at {url} (", "start one with")
    assert opened == []
