"""The requests that a web page could have sent, and the Host names that a daemon answers to."""

from __future__ import annotations

import socket

import httpx
import pytest
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from diskprefix.server.guards import BrowserGuard, is_loopback
from tests.server.daemon_process import DaemonProcess
from tests.server.scripted import AppServer

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


async def nothing(_scope: Scope, _receive: Receive, _send: Send) -> None:
    raise AssertionError("not called")


def refusal(
    bound: str, method: str, /, *, path: str = "/v1/models", has_keys: bool = False, **headers: str
) -> str | None:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return BrowserGuard(nothing, bound, has_keys=has_keys).refusal({"method": method, "path": path}, Headers(named))


@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "127.0.0.2"])
@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:8642", "localhost.", "127.0.0.1:1", "127.8.9.1", "[::1]", "[::1]:8642"]
)
def test_a_loopback_daemon_answers_to_loopback_names(bound: str, host: str) -> None:
    assert refusal(bound, "GET", host=host) is None
    assert refusal(bound, "POST", host=host, origin=f"http://{host}") is None


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8642", "localhost.evil.example", "127.0.0.1.nip.io", "192.168.0.1"),
        *("localhost@x.example", "[::2]", "[::1", "::1", "2130706433", "localhost:80:80", "localhost/x", "a b", ""),
    ],
)
def test_a_loopback_daemon_answers_to_no_other_name(host: str) -> None:
    for method in ("GET", "POST"):
        message = refusal("127.0.0.1", method, host=host)
        assert message is not None
        assert f"'{host}'" in message


def test_a_daemon_answers_to_the_name_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    assert refusal("MyBox", "GET", host="mybox:8642") is None
    assert refusal("MyBox", "GET", host="yourbox:8642") is not None


@pytest.mark.parametrize("bound", ["127.0.0.1", "0.0.0.0", "::", "192.0.2.1"])
def test_with_keys_any_name_is_taken_but_no_other_site(bound: str) -> None:
    for port in ("", ":8642"):
        host = f"models.example{port}"
        assert refusal(bound, "GET", has_keys=True, host=host) is None
        assert refusal(bound, "POST", has_keys=True, host=host, origin=f"https://{host}") is None
        assert refusal(bound, "POST", has_keys=True, host=host, origin="http://evil.example") is not None


@pytest.mark.parametrize("bound", ["0.0.0.0", "::", "192.0.2.1"])
@pytest.mark.parametrize("host", ["192.0.2.7:8642", "[2001:db8::1]", "diskprefix:8642", "localhost", "127.0.0.1"])
def test_an_exposed_daemon_answers_to_addresses_and_to_names_without_a_dot(bound: str, host: str) -> None:
    assert refusal(bound, "GET", host=host) is None
    assert refusal(bound, "POST", host=host, origin=f"http://{host}") is None
    assert refusal(bound, "POST", host=host, origin="http://evil.example") is not None


@pytest.mark.parametrize("bound", ["0.0.0.0", "::", "192.0.2.1"])
@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.nip.io", "192.0.2.1.evil.example:8642", "", "a b"])
def test_a_page_whose_name_leads_to_an_exposed_daemon_is_refused(bound: str, host: str) -> None:
    for method in ("GET", "POST"):
        message = refusal(bound, method, host=host, origin=f"http://{host}")
        assert message is not None
        assert "--api-keys" in message


def test_an_exposed_daemon_answers_to_the_machines_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Box.example")
    for host, is_taken in (("box.example", True), ("box.example.local", True), ("other.example", False)):
        assert (refusal("0.0.0.0", "POST", host=host) is None) == is_taken


def test_a_name_that_leads_nowhere_is_treated_as_local(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert is_loopback("nowhere.invalid")


@pytest.mark.parametrize(
    "origin",
    [
        *("https://evil.example", "null", "http://localhost.evil.example", "http://localhost@evil.example", ""),
        *("file://", "chrome-extension://localhost", "localhost", "http://"),
    ],
)
def test_a_foreign_origin_may_open_pages_but_neither_post_nor_read(origin: str) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "GET"):
        assert refusal("127.0.0.1", method, host="localhost:8642", origin=origin) is not None
    assert refusal("127.0.0.1", "GET", path="/chat", host="localhost:8642", origin=origin) is None


@pytest.mark.parametrize(("site", "allowed"), [("cross-site", 0), ("same-site", 0), ("same-origin", 1), ("none", 1)])
def test_what_the_browser_says_of_the_sender_counts(site: str, allowed: int) -> None:
    for method, path in [
        ("POST", "/"),
        *[("GET", path) for path in ("/dashboard/events", "/dashboard/entries", "/v1/models", "/props", "/metrics")],
        ("GET", "/v1/responses/resp_1"),
    ]:
        assert (refusal("127.0.0.1", method, path=path, host="localhost", sec_fetch_site=site) is None) == bool(allowed)
    for path in ("/", "/chat", "/dashboard", "/docs", "/health"):
        assert refusal("127.0.0.1", "GET", path=path, host="localhost", sec_fetch_site=site) is None


def test_http_1_0_without_a_host_is_served() -> None:
    assert refusal("127.0.0.1", "POST") is None


def test_a_name_in_a_refusal_is_cut_and_escaped() -> None:
    for headers in (
        {"host": "\x9b31m" + "x" * 5000},
        {"host": "localhost", "origin": "\x9b31m" + "x" * 5000},
        {"host": "localhost", "sec-fetch-site": "\x9b31m" + "x" * 5000},
    ):
        message = BrowserGuard(nothing, "127.0.0.1", has_keys=False).refusal(
            {"method": "POST", "path": "/v1/models"},
            Headers({name.replace("_", "-"): text for name, text in headers.items()}),
        )
        assert message is not None
        assert message.isprintable()
        assert len(message) < 300


@pytest.mark.parametrize("content_type", [None, "application/json", "text/plain", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize("mark", [{"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}])
def test_a_forged_post_is_refused_whatever_its_content_type(
    server: AppServer, content_type: str | None, mark: dict[str, str]
) -> None:
    kind = {"content-type": content_type} if content_type else {}
    with server.client() as client:
        answer = client.post(CHAT, content=b'{"messages": []}', headers=kind | mark)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "forbidden"


def test_the_daemons_own_docs_page_may_post(server: AppServer) -> None:
    marks = {"origin": server.url, "sec-fetch-site": "same-origin"}
    with server.client() as client:
        assert client.post(CHAT, json=HELLO, headers=marks).status_code == 200


def test_a_refusal_is_logged_with_its_reason(daemon: DaemonProcess) -> None:
    assert httpx.get(f"{daemon.url}/health", headers={"host": "logged.example"}).status_code == 403
    daemon.wait_for_line(r"GET /health 403 · the Host 'logged\.example' is not a name of this daemon")
