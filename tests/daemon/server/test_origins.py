"""Pages of allowed origins get replies and models, each as a tenant of its own, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from diskprefix.daemon.router.router_server import RouterServer
from diskprefix.daemon.server.guards import AllowedOrigins
from diskprefix.daemon.settings import Settings
from diskprefix.errors import SettingsError
from tests.daemon.server.scripted import ScriptedEngine, scripted_app
from tests.daemon.server.test_auth import ALICE, bearer, write_keys
from tests.daemon.server.test_bad_requests import ROUTES

ALLOWED = "http://localhost:3000, chrome-extension://abcdef,moz-extension://*,http://127.0.0.1:*,https://notes.example"
THEIRS = (
    *("http://localhost:3000", "chrome-extension://abcdef", "moz-extension://2f6b-11", "http://127.0.0.1:5173"),
    *("http://127.0.0.1", "https://notes.example", "https://notes.example:443"),
)
OTHERS = (
    *("null", "http://localhost:3001", "https://localhost:3000", "chrome-extension://abcdee", "https://evil.example"),
    *("http://notes.example", "https://notes.example:8443", "http://localhost:3000.evil.example", "moz-extension://"),
    *("http://localhost:3000@evil.example", "*", "http://*", "file://", "http://localhost:3000/"),
)
SERVED = [
    "/v1/chat/completions",
    *("/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/responses/input_tokens"),
    *("/api/chat", "/api/generate"),
]
CLOSED = [
    *(("GET", path) for path in ("/props", "/metrics", "/dashboard/state", "/v1/responses/resp_1", "/openapi.json")),
    *(("POST", path) for path in ("/tokenize", "/apply-template", "/models/m/unload", "/page-token")),
    *(("DELETE", path) for path in ("/v1/responses/resp_1", "/v1/models")),
]


@pytest.fixture(scope="module")
def client(agent_model: Path, engine: ScriptedEngine) -> Iterator[httpx.Client]:
    with scripted_app(agent_model, engine, allowed_origins=ALLOWED) as server, server.client() as client:
        # The usual client sends the owner's token.
        del client.headers["authorization"]
        yield client


def preflight(client: httpx.Client, path: str, origin: str) -> httpx.Response:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    return client.options(path, headers={"origin": origin} | asked)


@pytest.mark.parametrize("origin", THEIRS)
def test_a_page_of_an_allowed_origin_asks_and_reads(client: httpx.Client, origin: str) -> None:
    sent = {"origin": origin, "sec-fetch-site": "cross-site"}
    for path in SERVED:
        asked = preflight(client, path, origin)
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, origin)
        assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
        answer = client.post(path, json=ROUTES[path], headers=sent)
        assert answer.status_code == 200, answer.text
        assert (answer.headers["access-control-allow-origin"], answer.headers["vary"]) == (origin, "Origin")
        assert "access-control-allow-credentials" not in answer.headers
    assert client.get("/v1/models", headers=sent).status_code == 200
    refused = client.post(SERVED[0], json={}, headers=sent)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (400, origin)


def test_only_allowed_origins_get_access_to_a_private_network(client: httpx.Client) -> None:
    """Private Network Access: a browser asks so before a page of a public address may reach this machine."""
    asked = {"access-control-request-method": "POST", "access-control-request-private-network": "true"}
    allowed, other = (
        client.options(SERVED[0], headers={"origin": origin} | asked)
        for origin in ("https://notes.example", "https://evil.example")
    )
    assert (allowed.status_code, allowed.headers["access-control-allow-private-network"]) == (200, "true")
    assert (other.status_code, "access-control-allow-private-network" in other.headers) == (403, False)


@pytest.mark.parametrize("origin", OTHERS)
def test_a_page_of_another_origin_is_refused(client: httpx.Client, origin: str) -> None:
    answers = [
        preflight(client, SERVED[0], origin),
        client.post(SERVED[0], json=ROUTES[SERVED[0]], headers={"origin": origin}),
        client.get("/v1/models", headers={"origin": origin}),
    ]
    assert [answer.status_code for answer in answers] == [403] * 3
    assert not any("access-control-allow-origin" in answer.headers for answer in answers)


@pytest.mark.parametrize(("method", "path"), CLOSED)
def test_an_allowed_origin_gets_nothing_but_replies_and_models(client: httpx.Client, method: str, path: str) -> None:
    headers = {"origin": THEIRS[0]}
    assert client.request(method, path, headers=headers).status_code == 403


def test_an_origin_is_a_tenant_of_its_own_without_keys(client: httpx.Client, engine: ScriptedEngine) -> None:
    tenants = []
    senders: list[dict[str, str]] = [{}, *({"origin": origin} for origin in THEIRS[:3])]
    for sent in (*senders, {"origin": THEIRS[0]} | bearer("ollama"), bearer("ollama")):
        assert client.post(SERVED[0], json=ROUTES[SERVED[0]], headers=sent).status_code == 200
        tenants.append(str(engine.requests[-1].cache.tenant))
    assert len(set(tenants[:4])) == 4
    assert tenants[4] == tenants[1], "a bearer that a page makes up leads to no other tenant"
    assert tenants[5] != tenants[4]
    stored = client.post("/v1/responses", json={"input": "a secret"}).json()["id"]
    sent = {"input": "go on", "previous_response_id": stored}
    assert client.post("/v1/responses", json=sent).status_code == 200
    foreign = client.post("/v1/responses", json=sent, headers={"origin": THEIRS[0]})
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (400, "previous_response_not_found")


def test_with_keys_any_origin_may_be_allowed_but_null(
    agent_model: Path, engine: ScriptedEngine, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    write_keys(keys, f"alice {ALICE}")
    with scripted_app(agent_model, engine, allowed_origins="*", api_keys=keys) as server, server.client() as client:
        sent = bearer(ALICE) | {"origin": "https://any.example"}
        assert preflight(client, SERVED[0], "https://any.example").status_code == 200
        assert client.post(SERVED[0], json=ROUTES[SERVED[0]], headers=sent).status_code == 200
        of_page = engine.requests[-1].cache.tenant
        assert client.post(SERVED[0], json=ROUTES[SERVED[0]], headers=bearer(ALICE)).status_code == 200
        assert engine.requests[-1].cache.tenant == of_page
        assert client.post(SERVED[0], json=ROUTES[SERVED[0]], headers=sent | {"origin": "null"}).status_code == 403
        assert client.get("/v1/models", headers={"origin": "https://any.example"}).status_code == 401


WRONG = ["*", "null", "localhost:3000", "http://*", "https://*:443", "http://a/b", "http://a b", "x" * 5000]


@pytest.mark.parametrize("origins", [*WRONG, f"http://localhost:3000,{WRONG[0]}"])
def test_a_wrong_list_of_origins_is_refused_at_the_start(origins: str) -> None:
    with pytest.raises(SettingsError, match="--allowed-origins: ") as caught:
        Settings(allowed_origins=origins)
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("origins", ["", ALLOWED])
def test_the_router_answers_pages_of_allowed_origins_too(origins: str) -> None:
    fakes: Any = object()
    server = RouterServer(fakes, fakes, Settings(allowed_origins=origins))
    assert isinstance(server.config.app, AllowedOrigins) == bool(origins)
