"""The requests that need a key, the answers to those without one, and the tenant of a request."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from diskprefix.nouns import SHARED, Tenant
from diskprefix.server.status import WELCOME
from tests.server.daemon_process import DaemonProcess, running_daemon, serve_flags, wait_until
from tests.server.scripted import AppServer, ScriptedEngine, scripted_app

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
ALICE, BOB, ADMIN = "alice-0123456789abcdef", "bob-0123456789abcdef", "admin-0123456789abcdef"
NAMELESS = "nameless-0123456789abcdef"
PROTECTED = (
    *("/props", "/metrics", "/docs", "/openapi.json", "/v1/models", "/v1/models/tiny-chat", "/v1/nothing"),
    *(
        "/health/",
        "/HEALTH",
        "/health/../props",
        "/docs/oauth2-redirect",
        "/static-offline-docs/favicon.png",
    ),
)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def write_keys(path: Path, *lines: str) -> Path:
    path.touch(0o600)
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def server(chat_model: Path, keys_file: Path, engine: ScriptedEngine) -> Iterator[AppServer]:
    with scripted_app(chat_model, engine, api_keys=keys_file) as running:
        yield running


def assert_unauthorized(answer: httpx.Response) -> None:
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")


@pytest.mark.parametrize(
    "headers", [{}, bearer("alice-0123456789abcdeF"), {"Authorization": ALICE}, {"X-API-Key": f"Bearer {ALICE}"}]
)
def test_every_route_but_health_needs_a_key(client: httpx.Client, headers: dict[str, str]) -> None:
    for path in PROTECTED:
        assert_unauthorized(client.get(path, headers=headers))
    for path in (CHAT, "/v1/completions"):
        assert_unauthorized(client.post(path, json=HELLO, headers=headers))
        assert_unauthorized(client.request("OPTIONS", path, headers=headers))
    assert client.get("/health", headers=headers).status_code == 200
    assert client.get("/", headers=headers).json() == WELCOME
    assert client.head("/", headers=headers).status_code == 200
    answers = [client.get(path, headers=headers) for path in ("/dashboard", "/favicon.ico")]
    assert [answer.status_code for answer in answers] == [307, 204]
    assert answers[0].headers["location"] == "./"


def test_a_key_comes_in_the_header_of_openai_or_of_anthropic(client: httpx.Client) -> None:
    for headers in (bearer(ALICE), {"X-API-Key": ALICE}, bearer(ALICE) | {"X-API-Key": "x"}):
        assert client.get("/v1/models", headers=headers).status_code == 200
    assert_unauthorized(client.get("/v1/models", headers=bearer("x") | {"X-API-Key": ALICE}))


def test_each_key_of_the_file_is_taken(client: httpx.Client) -> None:
    for key in (ALICE, BOB, ADMIN, NAMELESS):
        assert client.post(CHAT, json=HELLO, headers=bearer(key)).status_code == 200
        for path in ("/v1/models", "/docs", "/openapi.json"):
            assert client.get(path, headers=bearer(key)).status_code == 200


@pytest.mark.parametrize("path", ["/props", "/metrics"])
def test_what_is_counted_of_everybody_is_for_the_key_named_admin(client: httpx.Client, path: str) -> None:
    for key in (ALICE, NAMELESS):
        answer = client.get(path, headers=bearer(key))
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
    assert client.get(path, headers=bearer(ADMIN)).status_code == 200


@pytest.mark.parametrize("headers", [{}, bearer("wrong-0123456789abcdef"), bearer(ALICE)])
def test_health_tells_others_only_whether_requests_are_served(client: httpx.Client, headers: dict[str, str]) -> None:
    health = client.get("/health", headers=headers)
    assert {name: value for name, value in health.json().items() if value is not None} == {"status": "ok"}
    assert client.get("/health", headers=bearer(ADMIN)).json()["queue_depth"] == 0


def test_a_key_is_asked_for_before_the_body_is_read(server: AppServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            "Content-Length: 1000000\r\nExpect: 100-continue\r\n\r\n".encode()
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 401 ")


def arriving(server: AppServer, key: str) -> socket.socket:
    """A request with this key whose body is waited for."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall(
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        "Content-Length: 1000\r\nExpect: 100-continue\r\n\r\n".encode()
    )
    assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
    return connection


def test_one_key_cannot_take_the_whole_queue(chat_model: Path, keys_file: Path) -> None:
    with scripted_app(chat_model, api_keys=keys_file, max_queue=4) as server, server.client() as client:
        # One that would run, and half of those that could wait.
        held = [arriving(server, ALICE) for _ in range(3)]
        refused = client.post(CHAT, json=HELLO, headers=bearer(ALICE))
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "too_many_requests")
        assert error["message"].startswith("3 requests with this API key are not answered yet")
        assert client.post(CHAT, json=HELLO, headers=bearer(BOB)).status_code == 200
        held += [arriving(server, BOB) for _ in range(2)]
        assert client.post(CHAT, json=HELLO, headers=bearer(BOB)).status_code == 503, "the queue is full for all"
        for connection in held:
            connection.close()
        wait_until(
            lambda: client.post(CHAT, json=HELLO, headers=bearer(ALICE)).status_code == 200, "the places are free again"
        )


def test_a_client_that_sends_its_body_at_once_reads_the_refusal(client: httpx.Client) -> None:
    assert_unauthorized(client.post(CHAT, content=b"x" * 20_000_000))


def test_another_sites_page_is_refused_before_a_key_is_looked_at(client: httpx.Client) -> None:
    headers = bearer(ALICE) | {"Origin": "https://evil.example"}
    assert client.post(CHAT, json=HELLO, headers=headers).status_code == 403


def tenant_of(client: httpx.Client, engine: ScriptedEngine, key: str | None, **fields: Any) -> Tenant:
    answer = client.post(CHAT, json=HELLO | fields, headers=bearer(key) if key else {})
    assert answer.status_code == 200, answer.text
    return engine.requests[-1].cache.tenant


def test_the_tenant_is_the_keys_and_a_salt_is_added_to_it(client: httpx.Client, engine: ScriptedEngine) -> None:
    alice, bob = Tenant.of_key(ALICE), Tenant.of_key(BOB)
    assert tenant_of(client, engine, ALICE) == alice
    assert tenant_of(client, engine, BOB) == bob
    for salt in ("x", BOB, str(bob), str(bob.with_salt("x"))):
        assert tenant_of(client, engine, ALICE, cache_salt=salt) == alice.with_salt(salt)
        assert tenant_of(client, engine, ALICE, prefix_cache={"salt": salt}) == alice.with_salt(salt)


def test_without_a_file_of_keys_the_salt_alone_is_the_tenant(chat_model: Path) -> None:
    engine = ScriptedEngine()
    with scripted_app(chat_model, engine) as server, server.client() as client:
        for key in (None, ALICE):
            assert tenant_of(client, engine, key) == SHARED
            assert tenant_of(client, engine, key, cache_salt="x") == SHARED.with_salt("x")
        for path in ("/props", "/metrics", "/docs"):
            assert client.get(path).status_code == 200
        assert client.get("/health").json()["queue_depth"] == 0
        assert "securitySchemes" not in client.get("/openapi.json").json()["components"]


def test_openapi_says_that_a_key_is_needed(client: httpx.Client) -> None:
    schema = client.get("/openapi.json", headers=bearer(ALICE)).json()
    assert schema["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert schema["security"] == [{"key": []}]
    assert {} in schema["paths"]["/health"]["get"]["security"]
    asks = {
        path for path, methods in schema["paths"].items() if all("401" in one["responses"] for one in methods.values())
    }
    assert asks == schema["paths"].keys() - {"/", "/health"}


def test_a_daemon_does_not_start_over_a_file_that_others_may_read(chat_model: Path, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", ALICE)
    keys.chmod(0o644)
    with DaemonProcess(*serve_flags(chat_model, tmp_path / "kv", api_keys=keys)) as daemon:
        assert daemon.process.wait(120) == 2
        daemon.stop()
    assert daemon.lines == [f"error: --api-keys: others may read or write {keys} (mode 0644); run `chmod 600` on it"]


def test_a_hangup_reads_the_keys_again_and_the_log_shows_their_names_only(chat_model: Path, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", f"alice {ALICE}")
    with running_daemon(chat_model, tmp_path / "kv", api_keys=keys) as daemon:

        def status(key: str, **fields: Any) -> int:
            with daemon.client() as client:
                return client.post(CHAT, json=HELLO | fields, headers=bearer(key)).status_code

        assert (status(ALICE, cache_salt="swordfish"), status(BOB)) == (200, 401)
        assert status(ALICE, prefix_cache={"salt": ["swordfish"]}) == 400
        write_keys(keys, f"bob {BOB}", f"admin {ADMIN}")
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_for_line("2 API keys read again")
        assert (status(ALICE), status(BOB)) == (401, 200)
        write_keys(keys, "short")
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_for_line("stay in force")
        assert status(BOB) == 200
        with daemon.client() as client:
            settings = client.get("/props", headers=bearer(ADMIN)).json()["settings"]
        assert settings["api_keys"] == str(keys)
        daemon.wait_for_line(rf"POST {CHAT} 200 · key alice · prompt ")
        daemon.wait_for_line(rf"POST {CHAT} 401 · the API key is not one of this daemon's")
        wait_until(lambda: sum("key bob" in line for line in daemon.lines) == 2, "both requests are logged")
        assert daemon.stop() == 0
    for secret in (ALICE, BOB, ADMIN, "swordfish"):
        assert secret not in daemon.log
