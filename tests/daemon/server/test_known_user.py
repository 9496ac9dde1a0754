"""Without API keys, the kernel says whose tenant a request has, and nothing more."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from diskprefix.daemon.server.process.token_file import agents_key
from diskprefix.desk.shared.daemon_call import key_for
from diskprefix.desk.shared.daemon_call import running_daemon as caller_of_daemon
from diskprefix.folders import cache_home
from tests.daemon.server.daemon_process import DaemonProcess, running_as, serve_flags
from tests.daemon.server.other_user import NOBODY, OTHER_USER, url_as
from tests.daemon.server.test_auth import bearer
from tests.daemon.server.test_owner_token import OWN

COMPLETIONS = "/v1/completions"
PLACEHOLDERS = ["unused", "ollama", "sk-1234", "none", "EMPTY"]


@pytest.fixture(scope="module", params=["alone", "behind a router"])
def daemon(
    request: pytest.FixtureRequest, chat_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DaemonProcess]:
    with running_as(request.param, chat_model, tmp_path_factory.mktemp("user") / "kv") as process:
        yield process


def asked(client: httpx.Client, prompt: str, *headers: dict[str, str], **cache: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "prefix_cache": {"save": False} | cache}
    sent = {name: value for header in headers for name, value in header.items()}
    answer: dict[str, Any] = client.post(COMPLETIONS, json=body, headers=sent).raise_for_status().json()
    return answer


def restored(client: httpx.Client, prompt: str, *headers: dict[str, str], **cache: Any) -> int:
    return int(asked(client, prompt, *headers, **cache)["prefix_cache"]["restored"])


def test_the_users_programs_restore_a_commands_state_with_any_bearer(daemon: DaemonProcess) -> None:
    prompt = "What `warm` and `chat` have computed, and a program asks for. " * 8
    body = {"prompt": prompt, "max_tokens": 1}
    assert caller_of_daemon(daemon.url, None)("POST", COMPLETIONS, body).status == 200
    daemon.wait_saved()
    with httpx.Client(base_url=daemon.url, timeout=60) as client:
        for headers in ({}, *map(bearer, PLACEHOLDERS), {"x-api-key": "unused"}):
            assert restored(client, prompt, headers) > 0
            assert restored(client, prompt, headers, salt="of a user") == 0


@pytest.mark.cases(1)
def test_another_user_learns_no_more_of_a_right_guess_than_of_a_wrong_one(daemon: DaemonProcess) -> None:
    secret, wrong = ("The alarm code of the house is CODE. Tell nobody. ".replace("CODE", code) * 8 for code in "48")
    with httpx.Client(base_url=daemon.url, timeout=60) as own:
        asked(own, secret, save=True)
        daemon.wait_saved()
        assert restored(own, secret) > 0
        in_common = restored(own, wrong)
    with (
        url_as(OTHER_USER, daemon.url) as url,
        httpx.Client(base_url=url, timeout=60) as other,
        daemon.client() as own,
    ):
        for headers in ({}, bearer("unused"), {"diskprefix-share": "user 0"}, {"Diskprefix-Share": "user 0"}):
            guesses = []
            for guess in (secret, wrong):
                before = counters(own)
                answer = asked(other, guess, headers)
                timings = {name: value for name, value in answer["timings"].items() if not name.endswith(("_ms", "_s"))}
                grown = {name: value - before.get(name, 0) for name, value in counters(own).items()}
                guesses.append((answer["usage"], answer["prefix_cache"], timings, grown))
            assert guesses[0] == guesses[1]
            assert guesses[0][1]["restored"] == 0
        asked(other, wrong, bearer("unused"), save=True)
        daemon.wait_saved()
        assert restored(other, wrong, bearer("ollama")) > 0, "it has a tenant of its own"
    with httpx.Client(base_url=daemon.url, timeout=60) as own:
        for headers in ({}, {"diskprefix-share": f"user {OTHER_USER}"}):
            assert restored(own, wrong, headers) == in_common


def counters(client: httpx.Client) -> dict[str, float]:
    """The counters of all requests that show no time."""
    lines = [line for line in client.get("/metrics").text.splitlines() if "_total" in line and not line.startswith("#")]
    parts = [line.rpartition(" ") for line in lines if "seconds" not in line]
    return {name: float(value) for name, _, value in parts}


def test_no_route_shows_another_user_what_was_asked(daemon: DaemonProcess) -> None:
    with (
        url_as(OTHER_USER, daemon.url) as url,
        daemon.client() as owner,
        httpx.Client(base_url=daemon.url, timeout=60) as own,
        httpx.Client(base_url=url, timeout=60) as other,
    ):
        routes = owner.get("/openapi.json").json()["paths"].items()
        paths = [path for path, methods in routes if "get" in methods and "{" not in path]
        assert {"/metrics", "/health", "/v1/models"} <= {*paths}

        def shown() -> dict[str, str]:
            # When the model may be unloaded tells that somebody is active, which everybody may know.
            return {path: re.sub(r'"expires_at":"[^"]+"', "", other.get(path).text) for path in paths}

        before = shown()
        asked(own, "What nobody else should hear of. " * 8, save=True)
        daemon.wait_saved()
        assert shown() == before
        assert other.get("/metrics").status_code == 401
        for reader, headers in ((own, {}), (other, bearer(daemon.token))):
            assert reader.get("/metrics", headers=headers).status_code == 200


def test_a_user_whom_the_kernel_does_not_name_is_the_tenant_of_its_bearer(daemon: DaemonProcess) -> None:
    prompt = "What came through a proxy of nobody's. " * 8
    with url_as(NOBODY, daemon.url) as url, httpx.Client(base_url=url, timeout=60) as client:
        asked(client, prompt, bearer("a-long-secret"), save=True)
        daemon.wait_saved()
        assert restored(client, prompt, bearer("a-long-secret")) > 0
        for headers in ({}, bearer("unused"), {"diskprefix-share": "user 0"}):
            assert restored(client, prompt, headers) == 0


@pytest.mark.parametrize(
    ("user", "interface"), [(OTHER_USER, ()), (OTHER_USER, ("lo",)), (NOBODY, ()), (NOBODY, ("lo",))]
)
def test_a_caught_key_of_an_agent_is_worth_nothing(
    daemon: DaemonProcess, user: int, interface: tuple[str, ...]
) -> None:
    key, secret = key_for(daemon.url), (cache_home() / "key").read_text(encoding="utf-8").strip()
    prompt = f"What an agent of the owner asks, and {user} of {interface} should not know. " * 8
    with httpx.Client(base_url=daemon.url, timeout=60, headers=bearer(key)) as agent:
        asked(agent, prompt, save=True)
        body = {"input": "My code is 4711.", "max_output_tokens": 16}
        stored = f"/v1/responses/{agent.post('/v1/responses', json=body).raise_for_status().json()['id']}"
        daemon.wait_saved()
        assert restored(agent, prompt) > 0
        assert agent.get(stored).status_code == 200
    with url_as(user, daemon.url, *interface) as url, httpx.Client(base_url=url, timeout=60) as other:
        for headers in (*map(bearer, (key, secret, *map(agents_key, (secret, daemon.token)))), {}):
            assert restored(other, prompt, headers) == 0
            assert other.get(stored, headers=headers).status_code == 404
            assert other.get(f"{stored}/input_items", headers=headers).status_code == 404


def test_the_kernels_word_gives_no_right_of_the_owner(daemon: DaemonProcess) -> None:
    with httpx.Client(base_url=daemon.url, timeout=60) as client:
        for headers in ({}, bearer("unused"), {"diskprefix-share": "user 0"}):
            assert [client.request(method, path, headers=headers).status_code for method, path in OWN] == [401] * 4
        page = {"origin": "http://evil.example"}
        assert client.post(COMPLETIONS, json={"prompt": "x"}, headers=page).status_code == 403
        assert client.post(COMPLETIONS, json={"prompt": "x"}, headers={"host": "evil.example"}).status_code == 403


def test_a_daemon_on_ipv6_and_ipv4_has_one_tenant_for_both(chat_model: Path, tmp_path: Path) -> None:
    prompt = "The same user over both kinds of addresses. " * 8
    with DaemonProcess(*serve_flags(chat_model, tmp_path / "kv", host="localhost")) as daemon:
        port = int(daemon.wait_ready().url.rpartition(":")[2])
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            asked(client, prompt, save=True)
            daemon.wait_saved()
            assert restored(client, prompt, bearer("unused")) > 0
    with DaemonProcess(*serve_flags(chat_model, tmp_path / "kv", host="::1")) as daemon:
        port = int(daemon.wait_ready().url.rpartition(":")[2])
        assert socket.has_ipv6
        with httpx.Client(base_url=f"http://[::1]:{port}", timeout=60) as client:
            assert restored(client, prompt, bearer("ollama")) > 0
