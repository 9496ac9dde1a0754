"""What takes the owner's token on a daemon without API keys, and where the token is."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from diskprefix.daemon.server.keys import OwnerToken
from diskprefix.daemon.server.process import token_file
from diskprefix.daemon.server.process.token_file import log_key, published_token, shown_link, token_at, token_of_peer
from diskprefix.desk.shared import daemon_call
from diskprefix.desk.shared.daemon_call import running_daemon as caller_of_daemon
from diskprefix.errors import NotReady
from diskprefix.folders import cache_home
from tests.daemon.server.daemon_process import DaemonProcess, running_as, running_daemon
from tests.daemon.server.other_user import NOBODY, OTHER_USER, url_as
from tests.daemon.server.test_auth import bearer

OWN = [
    ("GET", "/dashboard/state"),
    ("GET", "/dashboard/entries"),
    ("DELETE", "/dashboard/entries/0123456789abcdef"),
    ("GET", "/props"),
]
"""What shows texts of prompts, deletes or controls."""


@pytest.fixture(scope="module", params=["alone", "behind a router"])
def daemon(
    request: pytest.FixtureRequest, chat_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DaemonProcess]:
    with running_as(request.param, chat_model, tmp_path_factory.mktemp("token") / "kv") as process:
        yield process


@pytest.fixture
def stranger(daemon: DaemonProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=daemon.url, timeout=60) as client:
        yield client


@pytest.fixture
def unknown(daemon: DaemonProcess) -> Iterator[httpx.Client]:
    """A client whom the kernel does not name: its bearer is its tenant."""
    with url_as(NOBODY, daemon.url) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def statuses(client: httpx.Client, headers: Any) -> list[int]:
    codes = []
    for method, path in OWN:
        with client.stream(method, path, headers=headers) as answer:
            codes.append(answer.status_code)
    return codes


def test_owner_routes_need_the_token_and_refuse_other_sites(daemon: DaemonProcess, stranger: httpx.Client) -> None:
    token, stale = daemon.token, "diskprefix-owner-" + "x" * 43
    refused, taken = [401] * 4, [200, 200, 404, 200]
    for headers, expected in (
        *((headers, refused) for headers in ({}, bearer("none"), bearer(token[:-1]), bearer(stale))),
        ({"cookie": f"diskprefix-{daemon.url.rpartition(':')[2]}={token}"}, refused),
        ({"authorization": "Bearer café".encode("latin-1")}, refused),
        (bearer(token), taken),
        ({"x-api-key": token}, taken),
        *((bearer(token) | {"sec-fetch-site": site}, [403] * 4) for site in ("cross-site", "same-site")),
    ):
        assert statuses(stranger, headers) == expected
    # Not even a client at another address of this machine.
    transport = httpx.HTTPTransport(local_address="127.0.0.2")
    with httpx.Client(base_url=daemon.url, timeout=60, transport=transport) as client:
        assert statuses(client, {}) == refused
    error = stranger.get("/dashboard/entries").json()["error"]
    assert "`diskprefix dashboard --print` prints it" in error["message"]
    assert error["code"] == "invalid_api_key"
    for path, headers, status in (
        ("/metrics", bearer("none"), 200),
        *((path, {"sec-fetch-site": "same-site"}, 403) for path in ("/v1/models", "/v1/responses/resp_1", "/metrics")),
        ("/chat", {"sec-fetch-site": "same-site"}, 200),
    ):
        assert stranger.get(path, headers=headers).status_code == status


def test_the_token_of_another_daemon_is_refused_and_not_taken_for_a_key(
    daemon: DaemonProcess, stranger: httpx.Client
) -> None:
    headers = bearer("diskprefix-owner-of-another-daemon")
    assert stranger.get("/health", headers=headers).status_code == 200
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions")):
        answer = stranger.request(method, path, headers=headers, json={} if method == "POST" else None)
        assert answer.status_code == 401
        assert "the token is not this daemon's: `diskprefix dashboard`" in answer.json()["error"]["message"]
    assert daemon.token not in daemon.log, "standard error is no terminal"


def key_of_the_log(daemon: DaemonProcess) -> str:
    """The key in the link to the chat page, the first link in the log."""
    first = next(line for line in daemon.lines if "#" in line)
    (key,) = re.findall(rf"chat in a browser: {daemon.url}/chat#token=(\S+)$", first)
    return str(key)


def test_the_key_in_the_log_opens_pages_for_the_daemons_user_alone(
    daemon: DaemonProcess, stranger: httpx.Client, unknown: httpx.Client
) -> None:
    """Others may read logs. They have no connection that the kernel says is this user's."""
    key = key_of_the_log(daemon)
    assert stranger.post("/page-token", headers=bearer(key)).json() == {"token": daemon.token}
    assert stranger.post("/page-token", headers=bearer(key[:-1])).status_code == 401
    assert statuses(unknown, bearer(key)) == [401] * 4
    with url_as(OTHER_USER, daemon.url) as url, httpx.Client(base_url=url, timeout=60) as other:
        assert statuses(other, bearer(key)) == [401] * 4
        assert other.post("/page-token", headers=bearer(key)).status_code == 401
    for headers in ({"origin": "http://evil.example"}, {"sec-fetch-site": "same-site"}):
        assert stranger.post("/page-token", headers=bearer(key) | headers).status_code == 403
    token = daemon.token
    assert log_key(token) == key != log_key(token[:-1])


def test_a_page_of_an_allowed_origin_is_no_owner_by_the_key_in_the_log() -> None:
    access = OwnerToken.drawn()
    header = f"Bearer {log_key(access.text)}"
    of_pages = [access.caller(header, os.geteuid(), origin) for origin in (None, "http://localhost:3000")]
    assert [caller is not None and caller.is_owner for caller in of_pages] == [True, False]


def test_a_page_is_given_the_token_only_for_the_token(daemon: DaemonProcess, stranger: httpx.Client) -> None:
    assert stranger.post("/page-token", headers=bearer(daemon.token)).json() == {"token": daemon.token}
    digits = daemon.token.removeprefix("diskprefix-owner-")
    assert stranger.post("/page-token", headers=bearer(digits)).json() == {"token": daemon.token}
    for headers in ({}, bearer("of-a-tenant"), bearer("diskprefix-owner-of-another-daemon"), bearer(digits[:-1])):
        assert stranger.post("/page-token", headers=headers).status_code == 401
    other_site = bearer(daemon.token) | {"origin": "http://evil.example"}
    assert stranger.post("/page-token", headers=other_site).status_code == 403


def test_no_answer_sets_a_cookie_and_the_query_holds_no_token(daemon: DaemonProcess, stranger: httpx.Client) -> None:
    for path in ("/", "/chat", "/dashboard", "/health", "/v1/models"):
        for headers in ({}, {"accept": "text/html"}, bearer(daemon.token)):
            answer = stranger.get(path, params={"token": daemon.token}, headers=headers)
            assert (answer.status_code, "set-cookie" in answer.headers) == (307 if path == "/dashboard" else 200, False)
    assert stranger.get("/props", params={"token": daemon.token}).status_code == 401


_GUESS = {"max_tokens": 1, "temperature": 0, "prefix_cache": {"save": False}}
GUESSES: dict[str, Callable[[str], Any]] = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 1, "store": False},
}


def told(client: httpx.Client, text: str, headers: dict[str, str]) -> list[Any]:
    """All figures that replies of each API tell of a prompt with `text`, but for times."""
    figures = []
    for path, body in GUESSES.items():
        answer = client.post(path, json=_GUESS | body(text), headers=headers).raise_for_status().json()
        timings = {name: value for name, value in answer["timings"].items() if not name.endswith(("_ms", "_per_s"))}
        figures.append((path, answer["usage"], answer["prefix_cache"], timings))
    return figures


@pytest.mark.cases(1)
@pytest.mark.parametrize("owners", ["token", "key", "x-api-key"])
def test_figures_do_not_reveal_the_owners_prompts(daemon: DaemonProcess, unknown: httpx.Client, owners: str) -> None:
    text = f"You are the assistant of a house ({owners}). The alarm code of the house is CODE. Tell nobody. " * 4
    key = "a-key-of-the-owners-agents"
    sent = {"token": bearer(daemon.token), "key": bearer(key), "x-api-key": {"x-api-key": key}}[owners]
    for path, body in GUESSES.items():
        unknown.post(
            path, json=body(text.replace("CODE", "83914")) | {"max_tokens": 1}, headers=sent
        ).raise_for_status()
    daemon.wait_saved()
    assert all(cache["restored"] > 0 for _, _, cache, _ in told(unknown, text.replace("CODE", "83914"), sent))
    for headers in ({}, bearer("unused"), {"x-api-key": "unused"}, bearer(key + "x")):
        right, wrong = (told(unknown, text.replace("CODE", code), headers) for code in ("83914", "83915"))
        assert right == wrong
        assert all(cache["restored"] == 0 for _, _, cache, _ in right)


def test_a_command_of_the_same_user_finds_the_token_by_itself(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = caller_of_daemon(daemon.url, None)
    assert call("GET", "/dashboard/entries", None).status == 200
    assert caller_of_daemon(daemon.url, "none")("GET", "/dashboard/entries", None).status == 401
    # For another user the file does not exist.
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(NotReady, match="is not known as yours"):
        call("GET", "/dashboard/entries", None)
    monkeypatch.setattr(daemon_call, "_own_urls", set())
    assert call("GET", "/dashboard/entries", None).status == 401


def test_only_the_users_programs_restore_state_of_commands(
    daemon: DaemonProcess, stranger: httpx.Client, unknown: httpx.Client
) -> None:
    body = {"prompt": "What `warm` and `chat` send to a daemon. " * 8, "max_tokens": 1}
    assert caller_of_daemon(daemon.url, None)("POST", "/v1/completions", body).status == 200
    key = daemon_call.key_for(daemon.url)
    assert daemon_call.key_for(daemon.url.replace("127.0.0.1", "localhost")) == key

    def restored(client: httpx.Client, headers: dict[str, str]) -> bool:
        answer = client.post("/v1/completions", json=body | {"prefix_cache": {"save": False}}, headers=headers)
        return bool(answer.raise_for_status().json()["prefix_cache"]["restored"])

    for headers in (bearer(key), bearer(daemon.token), bearer("unused"), {}):
        assert restored(stranger, headers), "it has the same user"
    assert restored(unknown, bearer(daemon.token))
    for headers in (bearer(key), bearer("unused"), {}):
        assert not restored(unknown, headers)
    assert key not in daemon.log


def test_the_token_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal, names_users, key in (
        (True, True, "#token=a%2Fb"),
        (False, True, f"#token={log_key('a/b')}"),
        (False, False, ""),
    ):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setattr(token_file, "NAMES_USERS", names_users)
        assert shown_link("http://localhost:1", "a/b", "chat") == f"http://localhost:1/chat{key}"
        assert shown_link("http://localhost:1", "", "chat") == "http://localhost:1/chat"


def test_the_token_which_only_the_user_can_read_ends_with_the_daemon(chat_model: Path, tmp_path: Path) -> None:
    with running_daemon(chat_model, tmp_path / "kv") as first:
        port = int(first.url.rpartition(":")[2])
        assert first.token
        file = cache_home() / "daemons" / f"127.0.0.1_{port}"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        assert file.read_text().split()[1] == token_at("127.0.0.1", port) == first.token
        assert first.stop(signal.SIGKILL) == -signal.SIGKILL
    assert file.exists()
    assert token_at("127.0.0.1", port) is None, "nobody is told the token of a daemon that has died"
    with running_daemon(chat_model, tmp_path / "kv") as second:
        assert not file.exists(), "the next daemon removes it, whatever its port"
        with httpx.Client(base_url=second.url) as client:
            assert client.get("/props", headers=bearer(first.token)).status_code == 401
        with running_daemon(chat_model, tmp_path / "kv") as third:
            assert len({first.token, second.token, third.token}) == 3
        assert token_at("127.0.0.1", int(second.url.rpartition(":")[2])) == second.token, "one that runs is left alone"
        assert second.stop() == 0
    assert not file.with_name(f"127.0.0.1_{second.url.rpartition(':')[2]}").exists()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(token_file, "_OF_THE_SERVICE", tmp_path / "none")
    return tmp_path / "diskprefix/daemons"


def connected(listener: socket.socket, host: str) -> str | None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as client:
        client.connect((host, listener.getsockname()[1]))
        return token_of_peer(client)


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
        with published_token("abc", [listener]):
            assert connected(listener, asked) == "abc"
        assert connected(listener, asked) is None
    assert list(home.glob("[!.]*")) == []


@pytest.mark.usefixtures("home")
def test_a_program_at_another_address_of_the_same_port_is_told_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as ours, published_token("abc", [ours]):
        assert connected(ours, "127.0.0.1") == "abc"
        with socket.create_server(("127.0.0.2", ours.getsockname()[1])) as other:
            assert connected(other, "127.0.0.2") is None


def test_a_file_that_cannot_be_made_is_a_warning(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    home.parent.mkdir()
    home.write_text("a file")
    with socket.create_server(("127.0.0.1", 0)) as listener, published_token("abc", [listener]):
        assert token_at(*listener.getsockname()) is None
    assert "commands need the token in --api-key" in caplog.text
    home.unlink()

    def fail(_fd: object, _kind: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with socket.create_server(("127.0.0.1", 0)) as listener, published_token("abc", [listener]):
        pass
    assert list(home.glob("[!.]*")) == []
