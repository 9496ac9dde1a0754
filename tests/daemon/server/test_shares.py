"""One user with unfinished bodies, prompts asked ahead and responses under salts holds up nothing of another user: none
of the other's requests is refused, dropped or lost."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from diskprefix.daemon.engine.idle import ahead_jobs
from diskprefix.daemon.router.passing import _headers_up
from diskprefix.daemon.server.share import (
    MAX_SESSION_CHARS,
    SHARE_HEADER,
    UNNAMED,
    Share,
    conversation_of,
    share_of_connection,
)
from tests.daemon.server.daemon_process import open_raw, running_as
from tests.daemon.server.other_user import OTHER_USER, url_as
from tests.daemon.server.scripted import real_app
from tests.daemon.server.test_auth import ALICE, BOB, bearer, write_keys

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SKIPPED_BYTES = 100_000
"""The bytes of each response that the model does not see."""


def response_of(client: httpx.Client, text: str, num_bytes: int = 0, **fields: Any) -> str:
    """Stores a response, of which so many bytes are not rendered, and returns its id."""
    encrypted = os.urandom(num_bytes // 2).hex()
    skipped = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": encrypted}
    items = [*([skipped] if num_bytes else []), {"role": "user", "content": text}]
    answer = client.post(RESPONSES, json={"input": items, "max_output_tokens": 1, **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def ask_ahead(client: httpx.Client, label: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": f"You are the agent {label}. " * 40}, {"role": "user", "content": "Hi"}]
    answer = client.post(CHAT, json={"messages": messages, "prefix_cache": {"ahead": label}})
    body: dict[str, Any] = answer.raise_for_status().json()
    return body


def require_room_beside_a_crowd(
    own: httpx.Client, other: httpx.Client, port: int, num_bodies: int, num_responses: int, **headers: str
) -> None:
    """`other` is the crowd's, as is a connection to the `port` with these headers."""
    kept = response_of(own, "This must stay.")
    assert ask_ahead(own, "mine")["waits"]
    with ExitStack() as stack:
        for _ in range(num_bodies):
            stack.enter_context(open_raw(port, None, announced_bytes=1000, **headers))
        for number in range(9):
            ask_ahead(other, f"theirs {number}")
        for number in range(num_responses):
            response_of(other, f"{number}", SKIPPED_BYTES, cache_salt=f"salt {number % 16}")
            body = {"messages": [{"role": "user", "content": f"Question {number}"}], "max_tokens": 1}
            assert own.post(CHAT, json=body).status_code == 200
            assert own.get("/v1/models").status_code == 200
    mine = ask_ahead(own, "mine")
    assert mine["waits"] or mine["ready_tokens"] > 0
    assert own.get(f"{RESPONSES}/{kept}").status_code == 200
    response_of(own, "Go on.", previous_response_id=kept)


def test_a_key_holds_up_nothing_of_another(chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Prompts ahead wait for all of the test.
    monkeypatch.setattr(ahead_jobs, "runs_on_battery", lambda: True)
    keys = write_keys(tmp_path / "keys", f"alice {ALICE}", f"bob {BOB}")
    options: dict[str, Any] = {"ahead": "auto", "kv_cache_gate": "off", "max_queue": 6, "api_keys": keys}
    with (
        real_app(chat_model, tmp_path / "kv", kv_cache_budget=16 << 20, **options) as server,
        server.client() as own,
        server.client() as other,
    ):
        own.headers.update(bearer(ALICE))
        other.headers.update(bearer(BOB))
        num_bodies = server.daemon.in_flight.max_requests
        require_room_beside_a_crowd(own, other, server.port, num_bodies - 1, 30, **bearer(BOB))
        assert server.engine.cache.writer.flush(10)
        assert server.engine.cache.writer.notes.removed > 0
        waits = {asked["label"]: asked["waits"] for asked in server.engine.ahead.figures["asked"]}
        assert waits == {"mine": True, "theirs 0": False} | {f"theirs {number}": True for number in range(1, 9)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["alone", "behind a router"])
def test_a_user_of_the_machine_holds_up_nothing_of_another(chat_model: Path, tmp_path: Path, kind: str) -> None:
    with running_as(kind, chat_model, tmp_path / "kv", ahead="auto") as daemon, ExitStack() as stack:
        url = stack.enter_context(url_as(OTHER_USER, daemon.url))
        own, other = (stack.enter_context(httpx.Client(base_url=at, timeout=60)) for at in (daemon.url, url))
        require_room_beside_a_crowd(own, other, int(urlsplit(url).port or 0), 70, 120)
        open_ones = [open_raw(int(urlsplit(url).port or 0), announced_bytes=1000) for _ in range(100)]
        for number in range(20):
            body = {"messages": [{"role": "user", "content": f"Another question {number}"}], "max_tokens": 1}
            assert own.post(CHAT, json=body).status_code == 200
        for connection in open_ones:
            connection.close()


@pytest.mark.parametrize(
    ("address", "user", "share"),
    [
        ("127.0.0.1", 1000, Share("user", "1000")),
        (None, 0, Share("user", "0")),
        (None, None, UNNAMED),
        ("::ffff:127.0.0.1", None, UNNAMED),
        ("::ffff:192.0.2.7", None, Share("address", "192.0.2.7")),
        ("2001:db8::1", None, Share("address", "20010db800000000::")),
    ],
)
def test_a_share_is_the_user_or_else_the_address(address: str | None, user: int | None, share: Share) -> None:
    assert Share.of_connection(address, user) == share
    assert Share.parse(str(share)) == share
    behind = {"state": {"is_behind_router": True}, "headers": [(b"diskprefix-share", str(share).encode())]}
    assert share_of_connection(behind) == share
    sent_by_a_client = behind | {"state": {"share": UNNAMED}}
    assert share_of_connection(sent_by_a_client) == UNNAMED


def test_a_conversation_is_the_session_or_else_the_program() -> None:
    agent = (b"user-agent", b"claude-cli/2.1")
    assert conversation_of({"headers": [agent]}) == "claude-cli/2.1"
    assert conversation_of({"headers": [agent, (b"x-claude-code-session-id", b"s1")]}) == "s1"
    assert conversation_of({"headers": []}) == ""
    assert len(conversation_of({"headers": [(b"user-agent", b"x" * 100_000)]})) == MAX_SESSION_CHARS


def test_the_router_alone_names_the_share_to_a_worker() -> None:
    sent = [(b"diskprefix-share", b"key admin"), (b"host", b"localhost")]
    up = _headers_up({"headers": sent, "state": {"share": Share("user", "1000")}})
    assert [value for name, value in up if name == SHARE_HEADER] == [b"user 1000"]
