"""The tools while a real daemon serves from the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diskprefix.nouns import SHARED
from tests.cli.conftest import Run
from tests.server.daemon_process import DaemonProcess, running_daemon

QUESTION = "What do the birds in the harbor do when the tide goes out, and when does it come back? " * 3


def ask(daemon: DaemonProcess, salt: str | None = None, question: str = QUESTION) -> dict[str, Any]:
    cache = {"scope": "full"} | ({"salt": salt} if salt else {})
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 8, "temperature": 0}
    with daemon.client() as client:
        reply = client.post("/v1/chat/completions", json=body | {"prefix_cache": cache})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def restored(answer: dict[str, Any]) -> int:
    number: int = answer["prefix_cache"]["restored"]
    return number


def tenants(run: Run, folder: Path) -> set[str]:
    listed = json.loads(run("inspect", "--json", "--kv-cache-dir", folder).stdout)
    return {entry["tenant"] for entry in listed["entries"]}


@pytest.mark.slow
def test_tools_beside_a_daemon_change_no_answer(run: Run, chat_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    alice, bob = str(SHARED.with_salt("alice")), str(SHARED.with_salt("bob"))
    with running_daemon(chat_model, folder) as daemon:
        cold = {salt: ask(daemon, salt) for salt in ("alice", "bob", None)}
        daemon.wait_saved()
        assert all(restored(ask(daemon, salt)) > 0 for salt in cold)
        assert run("verify", "--kv-cache-dir", folder).exit_code == 0
        assert tenants(run, folder) == {alice, bob, ""}

        assert run("purge", "--salt", "alice", "--yes", "--kv-cache-dir", folder).exit_code == 0
        assert tenants(run, folder) == {bob, ""}
        assert restored(ask(daemon, "bob")) > 0
        again = ask(daemon, "alice")
        assert (restored(again), text_of(again)) == (0, text_of(cold["alice"]))
        daemon.wait_saved()
        assert tenants(run, folder) == {alice, bob, ""}
        assert restored(ask(daemon, "alice")) > 0

        refused = run("compact", "--kv-cache-dir", folder)
        assert (refused.exit_code, refused.stderr.count("\n")) == (4, 1)
        assert run("backup", tmp_path / "copy", "--kv-cache-dir", folder).exit_code == 0

        assert run("purge", "--all", "--yes", "--kv-cache-dir", folder).exit_code == 0
        assert tenants(run, folder) == set()
        for salt, before in cold.items():
            again = ask(daemon, salt)
            assert (restored(again), text_of(again)) == (0, text_of(before))
        daemon.wait_saved()
        assert run("verify", "--fix", "--kv-cache-dir", folder).exit_code == 0
        assert all(text_of(ask(daemon, salt)) == text_of(before) for salt, before in cold.items())
        with daemon.client() as client:
            assert client.get("/props").json()["full_cache"]["state"]["error"] is None
        assert daemon.stop() == 0
    assert run("verify", "--kv-cache-dir", folder).exit_code == 0
    assert run("compact", "--kv-cache-dir", folder).exit_code == 0
    with running_daemon(chat_model, folder) as daemon:
        for salt, before in cold.items():
            again = ask(daemon, salt)
            assert restored(again) > 0
            assert text_of(again) == text_of(before)
        assert daemon.stop() == 0
    with running_daemon(chat_model, tmp_path / "copy") as daemon:
        assert restored(ask(daemon, "bob")) > 0


@pytest.mark.slow
def test_verify_reports_nothing_while_a_daemon_saves(run: Run, chat_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with running_daemon(chat_model, folder, kv_cache_budget="16MiB") as daemon:
        for n in range(6):
            ask(daemon, question=f"{n} {QUESTION}")
            report = json.loads(run("verify", "--json", "--kv-cache-dir", folder).stdout)
            assert report["problems"] == []
        assert daemon.stop() == 0
