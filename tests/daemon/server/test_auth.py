"""Who may ask: the file of `--api-keys`, the requests that need a key, and those that a web page could have sent."""

from __future__ import annotations

import http.client
import itertools
import logging
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from diskprefix.daemon import rooms
from diskprefix.daemon.server import keys
from diskprefix.daemon.server.guards import BrowserGuard, is_loopback
from diskprefix.daemon.server.keys import ApiKeys, Caller, OwnerToken
from diskprefix.daemon.server.process.token_file import agents_key
from diskprefix.errors import SettingsError
from diskprefix.folders import cache_home
from diskprefix.user_key import user_key, user_tenant
from diskprefix.values import SHARED, Tenant
from tests.daemon.server.daemon_process import DaemonProcess, open_raw, running_daemon, wait_until
from tests.daemon.server.scripted import AppServer, ScriptedEngine, scripted_app

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
ALICE, BOB, ADMIN = "alice-0123456789abcdef", "bob-0123456789abcdef", "admin-0123456789abcdef"
NAMELESS = "nameless-0123456789abcdef#+/="


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def write_keys(path: Path, *lines: str) -> Path:
    path.touch(0o600)
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_keys(tmp_path / "keys", f"alice {ALICE}")


def caller_of(keys: ApiKeys, key: str) -> Caller:
    caller = keys.caller(f"Bearer {key}")
    assert caller is not None
    return caller


def test_a_key_line_has_an_optional_name_and_admin_sees_all(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text(
        f"\ufeff# ours\r\n\n  alice-at-school\t{ALICE}  \r\n   # {'x' * 20}\n{NAMELESS}\nAdmin {BOB}\nadmin {ADMIN}\n"
    )
    with caplog.at_level(logging.DEBUG):
        keys = ApiKeys(file)
    for key, name, sees_all in (
        (ALICE, "alice-at-school", False),
        # What a key without a name is called is no part of it.
        (NAMELESS, str(Tenant.of_key(NAMELESS))[:8], False),
        (BOB, "Admin", False),
        (ADMIN, "admin", True),
    ):
        caller = caller_of(keys, key)
        assert (caller.name, caller.tenant, caller.sees_all) == (name, Tenant.of_key(key), sees_all)
        # The key named admin gives the rights of the owner, and no key is another user of the machine.
        assert (caller.is_owner, caller.is_other_user) == (sees_all, False)
        assert key not in repr(vars(keys)) + caplog.text


@pytest.mark.parametrize(
    ("header", "is_taken"),
    [
        *((header, True) for header in (f"Bearer {ALICE}", f"bearer {ALICE}", f"BEARER   {ALICE} ")),
        *((header, False) for header in (None, "", "Bearer", "Bearer ", ALICE, f"Basic {ALICE}", f"Bearer{ALICE}")),
        *((f"Bearer {ALICE}{more}", False) for more in ("x", f" {ALICE}", ", x", "\n")),
        *((f"Bearer {key}", False) for key in (ALICE[:-1], ALICE.upper(), "alice", "\xff\xfe")),
        (f"Bearer\n{ALICE}", False),
    ],
)
def test_a_header_is_taken_whole_and_its_scheme_in_any_case(file: Path, header: str | None, is_taken: bool) -> None:
    assert (ApiKeys(file).caller(header) is not None) == is_taken


def test_a_pages_token_ends_with_the_process_and_the_key(file: Path) -> None:
    file.write_text(f"alice {ALICE}\nadmin {ADMIN}\n")
    keys, other = ApiKeys(file), ApiKeys(file)
    worker = ApiKeys(file, keys.page_secret)
    for key in (ALICE, ADMIN):
        caller = caller_of(keys, key)
        token = keys.page_token(caller)
        assert key not in token
        assert caller_of(keys, token) == caller_of(worker, token) == caller
        assert keys.page_token(caller_of(keys, token)) == token
        for wrong in (token[:-1], token + "0", token.replace("page", "owner"), token.upper()):
            assert keys.caller(f"Bearer {wrong}") is None
        assert other.caller(f"Bearer {token}") is None, "another start of the daemon"
    token = keys.page_token(caller_of(keys, ALICE))
    file.write_text(f"alice {BOB}\n")
    keys.read_again()
    assert keys.caller(f"Bearer {token}") is None
    assert caller_of(keys, BOB)


def refusal_of_file(file: Path) -> str:
    with pytest.raises(SettingsError) as caught:
        ApiKeys(file)
    message = caught.value.message
    assert caught.value.exit_code == 2
    assert message.startswith("--api-keys: ")
    assert str(file) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("swordfish", "at least 16 characters"),
        ("alice swordfish", "at least 16 characters"),
        ("swordfish-swordfish alice", "fewer than 16 characters"),
        (f"swordfish-123456 {ALICE}", "fewer than 16 characters"),
        (f"alice {ALICE} # swordfish", "a comment takes a line of its own"),
        ("swordfishswordfisch\xe4", "printable ASCII"),
        ("swordfish\x00swordfish", "printable ASCII"),
        (f"sword\x1bfish {ALICE}", "printable"),
        (f"again {BOB}", "in the file already"),
    ],
)
def test_a_wrong_line_is_named_by_its_number_and_never_shown(file: Path, line: str, reason: str) -> None:
    write_keys(file, "# comment", f"bob {BOB}", "", line, "carol carol-0123456789abcdef")
    message = refusal_of_file(file)
    assert f"{file}:4: " in message
    assert reason in message
    assert not any(secret in message for secret in ("sword", ALICE, BOB))


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "holds no key"), (b"# nothing\n\n", "holds no key"), (b"\xff\xfek", "UTF-8"), (b"#" * 1048577, "larger")],
    ids=["empty", "comment", "binary", "large"],
)
def test_an_invalid_key_file_is_refused(file: Path, content: bytes, reason: str) -> None:
    file.write_bytes(content)
    assert reason in refusal_of_file(file)


@pytest.mark.parametrize(
    ("mode", "is_credential", "is_taken"),
    [
        *((mode, False, False) for mode in (0o640, 0o604, 0o620, 0o602, 0o610)),
        *((mode, False, True) for mode in (0o600, 0o400)),
        *((mode, True, mode == 0o440) for mode in (0o440, 0o460, 0o444, 0o442)),
    ],
)
def test_a_key_file_must_be_private_except_systemd_credentials(
    file: Path, mode: int, is_credential: bool, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(file.parent) if is_credential else str(file.parent)[:-1])
    file.chmod(mode)
    if is_taken:
        assert caller_of(ApiKeys(file), ALICE)
    else:
        message = refusal_of_file(file)
        assert f"mode {mode:04o}" in message
        assert "chmod 600" in message


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file away")
def test_a_file_of_another_user_is_refused(file: Path) -> None:
    os.chown(file, 12345, -1)
    assert "uid 12345" in refusal_of_file(file)


@pytest.mark.parametrize(
    ("name", "reason"), [("nothing", "No such file"), ("", "Is a directory"), ("pipe", "is not a file")]
)
def test_a_path_that_is_no_file_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert reason in refusal_of_file(tmp_path / name)


PROTECTED = (
    *("/props", "/metrics", "/docs", "/openapi.json", "/v1/models", "/v1/models/tiny-chat", "/v1/nothing"),
    *("/health/", "/HEALTH", "/health/../props"),
)
UNAUTHORIZED = {"type": "invalid_request_error", "param": None, "code": "invalid_api_key"}


@pytest.fixture(scope="module")
def keyed(chat_model: Path, keys_file: Path, engine: ScriptedEngine) -> Iterator[AppServer]:
    with scripted_app(chat_model, engine, api_keys=keys_file) as running:
        yield running


@pytest.fixture
def client(keyed: AppServer) -> Iterator[httpx.Client]:
    with keyed.client() as client:
        yield client


def assert_unauthorized(answer: httpx.Response) -> None:
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    error = answer.json()["error"]
    assert error == UNAUTHORIZED | {"message": error["message"]}


@pytest.mark.parametrize(
    "headers",
    [
        *({}, bearer(f"{ALICE[:-1]}F"), {"Authorization": ALICE}, {"X-API-Key": f"Bearer {ALICE}"}),
        bearer("x") | {"X-API-Key": ALICE},
    ],
)
def test_every_route_but_health_and_the_pages_needs_a_key(client: httpx.Client, headers: dict[str, str]) -> None:
    for path in PROTECTED:
        assert_unauthorized(client.get(path, headers=headers))
    for path in (CHAT, "/v1/completions"):
        assert_unauthorized(client.post(path, json=HELLO, headers=headers))
        assert_unauthorized(client.request("OPTIONS", path, headers=headers))
    health = client.get("/health", headers=headers).raise_for_status().json()
    assert {name: value for name, value in health.items() if value is not None} == {"status": "ok"}
    assert client.get("/", headers=headers).json() == rooms.welcome()
    assert client.head("/", headers=headers).status_code == 200
    answers = [client.get(path, headers=headers) for path in ("/dashboard", "/favicon.ico")]
    assert [answer.status_code for answer in answers] == [307, 204]
    assert answers[0].headers["location"] == "./"


@pytest.mark.parametrize(
    ("headers", "sees_all"),
    [
        *((headers, False) for headers in (bearer(ALICE), bearer(NAMELESS), {"X-API-Key": ALICE})),
        *((bearer(key) | {"X-API-Key": "x"}, key == ADMIN) for key in (BOB, ADMIN)),
    ],
)
def test_a_key_opens_all_routes_but_the_admins(client: httpx.Client, headers: dict[str, str], sees_all: bool) -> None:
    assert client.post(CHAT, json=HELLO, headers=headers).status_code == 200
    for path in ("/v1/models", "/docs", "/openapi.json"):
        assert client.get(path, headers=headers).status_code == 200
    assert client.get("/health", headers=headers).json()["queue_depth"] == (0 if sees_all else None)
    for path in ("/props", "/metrics"):
        answer = client.get(path, headers=headers)
        assert answer.status_code == (200 if sees_all else 403)
        assert sees_all or answer.json()["error"]["code"] == "forbidden"


def test_a_missing_key_is_refused_before_the_body_is_read(keyed: AppServer, client: httpx.Client) -> None:
    with open_raw(keyed.port, announced_bytes=1_000_000, Expect="100-continue") as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 401 ")
    assert_unauthorized(client.post(CHAT, content=b"x" * 20_000_000))
    # As urllib sends it. Its body is not read to the end, and it must not see a reset of the connection.
    closing = http.client.HTTPConnection("127.0.0.1", keyed.port, timeout=60)
    closing.request("POST", CHAT, b"x" * 20_000_000, {"Connection": "close"})
    assert closing.getresponse().status == 401
    closing.close()


def arriving(server: AppServer, key: str) -> socket.socket:
    """A request with this key whose body is waited for."""
    connection = open_raw(server.port, announced_bytes=1000, Expect="100-continue", Authorization=f"Bearer {key}")
    assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
    return connection


def test_one_key_cannot_take_the_whole_queue(chat_model: Path, keys_file: Path) -> None:
    with scripted_app(chat_model, api_keys=keys_file, max_queue=4) as server, server.client() as client:
        # In the conversation of the requests that arrive.
        client.headers["user-agent"] = ""

        def status(key: str) -> int:
            return client.post(CHAT, json=HELLO, headers=bearer(key)).status_code

        held = [arriving(server, ALICE) for _ in range(5)]
        assert status(ALICE) == 503, "she has taken all"
        assert status(BOB) == 200
        held += [arriving(server, BOB) for _ in range(2)]
        refused = client.post(CHAT, json=HELLO, headers=bearer(ALICE))
        assert (refused.status_code, int(refused.headers["retry-after"]) >= 1) == (429, True)
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "too_many_requests")
        assert error["message"].startswith("5 requests are not answered yet, and this client has its part of them")
        assert [status(key) for key in (BOB, NAMELESS)] == [429, 200]
        for connection in held:
            connection.close()
        wait_until(lambda: status(ALICE) == 200, "the places are free again")


def tenant_of(client: httpx.Client, engine: ScriptedEngine, key: str | None, **fields: Any) -> Tenant:
    client.post(CHAT, json=HELLO | fields, headers=bearer(key) if key else {}).raise_for_status()
    return engine.requests[-1].cache.tenant


def test_without_keys_and_a_known_user_the_bearer_is_the_tenant() -> None:
    access = OwnerToken.drawn()
    tenants = {}
    for user in (None, os.geteuid(), os.geteuid() + 1):
        callers = [access.caller(text, user) for text in (None, f"Bearer {ALICE}")]
        assert all(caller is not None and not caller.is_owner for caller in callers)
        tenants[user] = [caller.tenant for caller in callers if caller is not None]
    own = user_tenant()
    other = own.of_other_user(os.geteuid() + 1)
    assert list(tenants.values()) == [[SHARED, Tenant.of_key(ALICE)], [own, own], [other, other]]
    assert other not in (own, own.of_other_user(os.geteuid() + 2), access.tenant.with_salt("x"))


def test_no_bearer_makes_the_tenant_of_a_user() -> None:
    access = OwnerToken.drawn()
    secret = (cache_home() / "key").read_text(encoding="utf-8").strip()
    of_users = [access.tenant, access.tenant.of_other_user(os.geteuid() + 1)]
    for key in (secret, user_key("127.0.0.1:8642"), agents_key(access.text), *map(str, of_users)):
        caller = access.caller(f"Bearer {key}")
        assert caller is not None
        assert caller.tenant == Tenant.of_key(key)
        assert caller.tenant not in of_users


def test_where_nobody_is_named_an_agents_key_ends_with_the_daemon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keys, "NAMES_USERS", False)
    first, second = OwnerToken.drawn(), OwnerToken.drawn()
    caught = f"Bearer {agents_key(first.text)}"
    agent, thief = first.caller(caught), second.caller(caught)
    assert agent is not None
    assert (agent.tenant, agent.is_owner) == (first.tenant, False)
    assert thief is not None
    assert first.tenant == second.tenant != thief.tenant


def test_without_keys_the_user_and_the_salt_are_the_tenant(server: AppServer, engine: ScriptedEngine) -> None:
    tenant = user_tenant()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for key in (None, ALICE, server.app.state.access.text):
            assert tenant_of(client, engine, key) == tenant
            assert tenant_of(client, engine, key, cache_salt="x") == tenant.with_salt("x")
            client.post(CHAT, json=HELLO, headers={"x-api-key": key} if key else {}).raise_for_status()
            assert engine.requests[-1].cache.tenant == tenant
        assert client.get("/health").json()["queue_depth"] == 0
        assert "securitySchemes" not in client.get("/openapi.json").json()["components"]


def test_openapi_says_that_a_key_is_needed(client: httpx.Client) -> None:
    schema = client.get("/openapi.json", headers=bearer(ALICE)).json()
    assert schema["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert schema["security"] == [{"key": []}]
    assert {} in schema["paths"]["/health"]["get"]["security"]
    paths = schema["paths"]
    asks = {path for path, methods in paths.items() if all("401" in route["responses"] for route in methods.values())}
    assert asks == paths.keys() - {"/", "/health"}


def test_a_hangup_reads_the_keys_again_and_the_log_shows_their_names_only(chat_model: Path, file: Path) -> None:
    with running_daemon(chat_model, file.parent / "kv", api_keys=file) as daemon:

        def status(key: str, **fields: Any) -> int:
            with daemon.client() as client:
                return client.post(CHAT, json=HELLO | fields, headers=bearer(key)).status_code

        assert (status(ALICE, cache_salt="swordfish"), status(BOB)) == (200, 401)
        assert status(ALICE, prefix_cache={"salt": ["swordfish"]}) == 400
        write_keys(file, f"bob {BOB}", f"admin {ADMIN}")
        assert status(BOB) == 401, "not before it is asked for"
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_for_line("2 API keys read again")
        assert (status(ALICE), status(BOB)) == (401, 200)
        write_keys(file, "short")
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_for_line("at least 16 characters, .* stay in force")
        assert status(BOB) == 200
        with daemon.client() as client:
            settings = client.get("/props", headers=bearer(ADMIN)).json()["settings"]
        assert settings["api_keys"] == str(file)
        daemon.wait_for_line(rf"POST {CHAT} 200 · key alice · prompt ")
        daemon.wait_for_line(rf"POST {CHAT} 401 · the API key is not one of this daemon's")
        wait_until(lambda: sum("key bob" in line for line in daemon.lines) == 2, "both requests are logged")
        assert daemon.stop() == 0
    for secret in (ALICE, BOB, ADMIN, "swordfish"):
        assert secret not in daemon.log


async def nothing(_scope: Scope, _receive: Receive, _send: Send) -> None:
    raise AssertionError("not called")


def refusal(bound: str, method: str, *, path: str = "/v1/models", has_keys: bool = False, **sent: str) -> str | None:
    headers = Headers({name.replace("_", "-"): value for name, value in sent.items()})
    return BrowserGuard(nothing, bound, has_keys=has_keys).refusal({"method": method, "path": path}, headers)


LOOPBACK, EXPOSED = ["127.0.0.1", "localhost", "127.0.0.2"], ["0.0.0.0", "::", "192.0.2.1"]
OURS = ["localhost", "LocalHost:8642", "localhost.", "127.0.0.1:1", "127.8.9.1", "[::1]", "[::1]:8642"]
FOREIGN = ["evil.example", "evil.example:8642", "localhost.evil.example", "127.0.0.1.nip.io", "a b", ""]
MALFORMED = ["2130706433", "[::1", "::1", "localhost@x.example", "localhost:80:80", "localhost/x"]


@pytest.mark.parametrize(
    ("bounds", "has_keys", "is_ours", "hosts"),
    [
        (LOOPBACK, False, True, OURS),
        (LOOPBACK, False, False, [*FOREIGN, *MALFORMED, "192.168.0.1", "[::2]"]),
        (EXPOSED, False, True, ["192.0.2.7:8642", "[2001:db8::1]", "diskprefix:8642", "localhost", "127.0.0.1"]),
        (EXPOSED, False, True, ["host.docker.internal:8642", "host.containers.internal"]),
        (EXPOSED, False, False, [*FOREIGN, "192.0.2.1.evil.example:8642", "other.local", "x.internal"]),
        (LOOPBACK, False, False, ["host.docker.internal"]),
        (LOOPBACK + EXPOSED, True, True, ["models.example", "models.example:8642", "other.local", "x.internal"]),
    ],
    ids=["loopback", "loopback, foreign", "exposed", "containers", "exposed, foreign", "no containers", "keys"],
)
def test_the_host_must_be_the_daemons_unless_it_has_keys(
    bounds: list[str], has_keys: bool, is_ours: bool, hosts: list[str]
) -> None:
    """An exposed one answers to all addresses, and to names without a dot, which no page of a stranger has."""
    for bound, host in itertools.product(bounds, hosts):
        for method, more in (("GET", {}), ("POST", {}), ("POST", {"origin": f"http://{host}"})):
            message = refusal(bound, method, has_keys=has_keys, host=host, **more)
            assert (message is None) == is_ours, (bound, host, more)
            assert message is None or (f"'{host}'" in message and "--api-keys" in message)
        assert refusal(bound, "POST", has_keys=has_keys, host=host, origin="http://evil.example") is not None


@pytest.mark.parametrize(
    ("bound", "address", "host", "is_ours"),
    [
        ("MyBox", "127.0.1.1", "mybox:8642", True),
        ("MyBox", "127.0.1.1", "yourbox:8642", False),
        ("0.0.0.0", "0.0.0.0", "box.example", True),
        ("0.0.0.0", "0.0.0.0", "box.example.local", True),
        ("0.0.0.0", "0.0.0.0", "other.example", False),
    ],
)
def test_a_daemon_accepts_its_host_and_the_machines_name(
    bound: str, address: str, host: str, is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    monkeypatch.setattr(socket, "gethostname", lambda: "Box.example")
    assert (refusal(bound, "POST", host=host) is None) == is_ours


def test_a_name_that_leads_nowhere_is_treated_as_local(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert is_loopback("nowhere.invalid")


READING = ("/v1/models", "/props", "/metrics", "/v1/responses/resp_1", "/dashboard/state", "/dashboard/entries")
PAGES = ("/", "/chat", "/dashboard", "/docs", "/health")


@pytest.mark.parametrize(
    ("mark", "is_ours"),
    [
        *(({"origin": origin}, False) for origin in ("https://evil.example", "null", "http://localhost.evil.example")),
        *(({"origin": origin}, False) for origin in ("http://localhost@evil.example", "", "file://", "localhost")),
        *(({"origin": origin}, False) for origin in ("chrome-extension://localhost", "http://")),
        *(({"sec_fetch_site": site}, False) for site in ("cross-site", "same-site")),
        *(({"sec_fetch_site": site}, True) for site in ("same-origin", "none")),
        ({}, True),
    ],
)
def test_another_site_may_only_link_to_pages(mark: Any, is_ours: bool) -> None:
    changing = [(method, "/") for method in ("POST", "PUT", "DELETE", "PATCH")]
    for method, path in [*changing, *(("GET", path) for path in READING)]:
        reason = refusal("127.0.0.1", method, path=path, host="localhost:8642", **mark)
        assert (reason is None) == is_ours
        assert reason is None or "let the page's server call it" in reason
    for path in PAGES:
        assert refusal("127.0.0.1", "GET", path=path, host="localhost:8642", **mark) is None


HOSTS = ["localhost", "localhost:80", "localhost:8642", "LOCALHOST:8643", "127.0.0.1:8642", "[::1]:8642", "[::1]"]
AUTHORITIES = [*HOSTS, "localhost.:8642", "localhost:443", "evil.example:8642", "localhost:", "localhost:123456"]
SCHEMES = ("http://", "https://", "file://", "")
ORIGINS = ["null", "", *(f"{scheme}{name}" for scheme in SCHEMES for name in AUTHORITIES)]


@pytest.mark.parametrize("site", [None, "none", "same-origin", "same-site", "cross-site", "nonsense"])
@pytest.mark.parametrize(("bound", "has_keys"), [("127.0.0.1", False), ("0.0.0.0", False), ("127.0.0.1", True)])
def test_another_port_or_scheme_is_another_site_without_keys(bound: str, has_keys: bool, site: str | None) -> None:
    own = 0
    for host, origin in itertools.product(HOSTS, ORIGINS):
        sent = {"host": host, "origin": origin} | ({} if site is None else {"sec_fetch_site": site})
        page, here = urlsplit(origin), urlsplit(f"http://{host}")
        try:
            port = page.port or {"http": 80, "https": 443}.get(page.scheme)
        except ValueError:
            port = -1
        is_own = page.hostname is not None and page.hostname.rstrip(".") == here.hostname and port != -1
        is_own &= page.scheme in ("http", "https")
        if not has_keys:
            is_own &= (page.scheme, port) == ("http", here.port or 80)
        own += is_own
        is_served = is_own and site in (None, "none", "same-origin")
        assert (refusal(bound, "POST", has_keys=has_keys, **sent) is None) == is_served, sent
    assert own >= len(HOSTS)


def test_http_1_0_without_a_host_is_served() -> None:
    assert refusal("127.0.0.1", "POST") is None


@pytest.mark.parametrize("field", ["host", "origin", "sec_fetch_site"])
def test_a_name_in_a_refusal_is_cut_and_escaped(field: str) -> None:
    sent: Any = {"host": "localhost"} | {field: "\x9b31m" + "x" * 5000}
    message = refusal("127.0.0.1", "POST", **sent)
    assert message is not None
    assert message.isprintable()
    assert len(message) < 300


@pytest.mark.parametrize("content_type", [None, "application/json", "text/plain", "application/x-www-form-urlencoded"])
def test_a_forged_post_is_refused_before_its_key_is_checked(
    client: httpx.Client, keyed: AppServer, content_type: str | None
) -> None:
    kind = {"content-type": content_type} if content_type else {}
    for mark in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
        for key in ({}, bearer(ALICE)):
            answer = client.post(CHAT, content=b'{"messages": []}', headers=kind | mark | key)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
    own = {"origin": keyed.url, "sec-fetch-site": "same-origin"}
    assert client.post(CHAT, json=HELLO, headers=own | bearer(ALICE)).status_code == 200, "the daemon's own page"


def test_a_refusal_is_logged_with_its_reason(daemon: DaemonProcess) -> None:
    assert httpx.get(f"{daemon.url}/health", headers={"host": "logged.example"}).status_code == 403
    daemon.wait_for_line(r"GET /health 403 · the Host 'logged\.example' is not a name of this daemon")
