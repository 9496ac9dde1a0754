"""What takes the owner's token on a daemon without API keys, and where the token is."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from diskprefix.extras.daemon_call import running_daemon as caller_of_daemon
from diskprefix.server.process import token_file
from diskprefix.server.process.token_file import kept, token_at, token_of_peer
from diskprefix.settings import cache_home
from tests.server.daemon_process import DaemonProcess, running_daemon, serve_flags
from tests.server.test_auth import bearer

OWN = [
    ("GET", "/dashboard/state"),
    ("GET", "/dashboard/events"),
    ("GET", "/dashboard/entries"),
    ("DELETE", "/dashboard/entries/0123456789abcdef"),
    ("GET", "/props"),
]
"""What shows texts of prompts, deletes or controls."""


@pytest.fixture(scope="module", params=["alone", "behind a front"])
def daemon(
    request: pytest.FixtureRequest, chat_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DaemonProcess]:
    more = {"idle_unload": "1h"} if request.param == "behind a front" else {}
    flags = serve_flags(chat_model, tmp_path_factory.mktemp("token") / "kv", **more)
    with DaemonProcess(*flags) as process:
        if not more:
            process.wait_ready()
        with process.client() as client:
            client.get("/v1/models").raise_for_status()
        yield process.wait_ready()


def token_of(daemon: DaemonProcess) -> str:
    return daemon.link.partition("?token=")[2]


@pytest.fixture
def stranger(daemon: DaemonProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=daemon.url, timeout=60) as client:
        yield client


def statuses(client: httpx.Client, headers: Any) -> list[int]:
    found = []
    for method, path in OWN:
        with client.stream(method, path, headers=headers) as answer:
            found.append(answer.status_code)
    return found


def test_what_shows_texts_deletes_or_controls_takes_the_token_by_header_or_cookie_and_from_no_other_site(
    daemon: DaemonProcess, stranger: httpx.Client
) -> None:
    token = token_of(daemon)
    cookie = f"diskprefix-{daemon.url.rpartition(':')[2]}"
    refused, taken = [401] * 5, [200, 200, 200, 404, 200]
    for headers, expected in (
        *((headers, refused) for headers in ({}, bearer("none"), bearer(token[:-1]), {"x-api-key": token})),
        ({"cookie": f"{cookie}=wrong; diskprefix={token}"}, refused),
        ({"cookie": f"{cookie}=café".encode("latin-1")}, refused),
        (bearer(token), taken),
        ({"cookie": f"a=b; {cookie}={token}"}, taken),
        (bearer("none") | {"cookie": f"{cookie}={token}"}, taken),
        *((bearer(token) | {"sec-fetch-site": site}, [403] * 5) for site in ("cross-site", "same-site")),
    ):
        assert statuses(stranger, headers) == expected
    # Not even a client at another address of this machine.
    transport = httpx.HTTPTransport(local_address="127.0.0.2")
    with httpx.Client(base_url=daemon.url, timeout=60, transport=transport) as client:
        assert statuses(client, {}) == refused
    error = stranger.get("/dashboard/entries").json()["error"]
    assert "open the link that `diskprefix serve` printed" in error["message"]
    assert error["code"] == "invalid_api_key"
    for path, headers, status in (
        ("/metrics", bearer("none"), 200),
        *((path, {"sec-fetch-site": "same-site"}, 403) for path in ("/v1/models", "/v1/responses/resp_1", "/metrics")),
        ("/chat", {"sec-fetch-site": "same-site"}, 200),
    ):
        assert stranger.get(path, headers=headers).status_code == status
    assert token not in daemon.log.replace(daemon.link, "")


def test_the_link_gives_the_browser_a_cookie_and_loses_the_token(daemon: DaemonProcess, stranger: httpx.Client) -> None:
    token = token_of(daemon)
    for path in ("/", "/chat", "/dashboard"):
        answer = stranger.get(path, params={"token": token})
        assert (answer.status_code, answer.headers["location"]) == (303, f".{path}")
        name = f"diskprefix-{daemon.url.rpartition(':')[2]}"
        assert answer.headers["set-cookie"] == f"{name}={token}; Path=/; HttpOnly; SameSite=Strict"
        assert answer.headers["cache-control"] == "no-store"
    assert stranger.get("/dashboard/state").status_code == 200, "the client has kept the cookie"
    stranger.cookies.clear()
    for wrong in ("", token + "x", "é"):
        answer = stranger.get("/", params={"token": wrong} if wrong else "token=%FF")
        assert (answer.status_code, "set-cookie" in answer.headers) == (401, False)
        assert "has a new one at each start" in answer.json()["error"]["message"]
    assert stranger.get("/v1/models", params={"token": token}).status_code == 200, "no page"


def test_a_command_of_the_same_user_finds_the_token_by_itself(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = caller_of_daemon(daemon.url, None)
    assert call("GET", "/dashboard/entries", None).status == 200
    assert caller_of_daemon(daemon.url, "none")("GET", "/dashboard/entries", None).status == 401
    # For another user the file does not exist.
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert call("GET", "/dashboard/entries", None).status == 401


def test_each_start_makes_a_token_of_its_own_which_only_the_user_can_read(chat_model: Path, tmp_path: Path) -> None:
    with running_daemon(chat_model, tmp_path / "kv") as first:
        port = int(first.url.rpartition(":")[2])
        file = cache_home() / "daemons" / f"127.0.0.1_{port}"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        assert file.read_text() == token_at("127.0.0.1", port) == token_of(first)
        assert first.stop(signal.SIGKILL) == -signal.SIGKILL
    assert file.exists()
    assert token_at("127.0.0.1", port) is None, "nobody is told the token of a daemon that has died"
    with running_daemon(chat_model, tmp_path / "kv", port=port) as second:
        assert token_at("127.0.0.1", port) == token_of(second) != token_of(first)
        with httpx.Client(base_url=second.url) as client:
            assert client.get("/props", headers=bearer(token_of(first))).status_code == 401
        assert second.stop() == 0
    assert not file.exists()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(token_file, "_OF_THE_SERVICE", tmp_path / "none")
    return tmp_path / "diskprefix/daemons"


def connected(listener: socket.socket, host: str) -> str | None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
        one.connect((host, listener.getsockname()[1]))
        return token_of_peer(one)


@pytest.mark.parametrize(
    ("bound", "asked"),
    [
        *(("127.0.0.1", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("0.0.0.0", "127.0.0.1")),
        *(("::1", "::1"), ("::", "::1"), ("::", "127.0.0.1")),
    ],
)
def test_the_token_is_for_the_addresses_on_which_the_daemon_listens(home: Path, bound: str, asked: str) -> None:
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    with socket.create_server((bound, 0), family=family, dualstack_ipv6=bound == "::") as listener:
        with kept("abc", [listener]):
            assert connected(listener, asked) == "abc"
        assert connected(listener, asked) is None
    assert list(home.iterdir()) == []


@pytest.mark.usefixtures("home")
def test_a_program_at_another_address_of_the_same_port_is_told_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as ours, kept("abc", [ours]):
        assert connected(ours, "127.0.0.1") == "abc"
        with socket.create_server(("127.0.0.2", ours.getsockname()[1])) as other:
            assert connected(other, "127.0.0.2") is None


def test_a_file_that_cannot_be_made_is_a_warning(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    home.parent.mkdir()
    home.write_text("a file")
    with socket.create_server(("127.0.0.1", 0)) as listener, kept("abc", [listener]):
        assert token_at(*listener.getsockname()) is None
    assert "commands must be told the token (--api-key)" in caplog.text
    home.unlink()

    def fail(_fd: object, _kind: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with socket.create_server(("127.0.0.1", 0)) as listener, kept("abc", [listener]):
        pass
    assert list(home.iterdir()) == []
