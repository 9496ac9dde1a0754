"""The tools while a real daemon serves from the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diskprefix.nouns import SHARED
from tests.cli.conftest import Run
from tests.server.daemon_process import DaemonProcess, ask, running_daemon, text_of
from tests.waiting import wait_for

QUESTION = "What do the birds in the harbor do when the tide goes out, and when does it come back? "


def asked(daemon: DaemonProcess, salt: str | None) -> dict[str, Any]:
    return ask(daemon, QUESTION, salt=salt)


def notices_purge(daemon: DaemonProcess, salt: str) -> None:
    """Waits until the daemon has dropped what memory kept: it looks for purges of other processes every second."""
    wait_for(lambda: asked(daemon, salt)["prefix_cache"].get("source") != "memory")


def restored(answer: dict[str, Any]) -> int:
    number: int = answer["prefix_cache"]["restored"]
    return number


def tenants(run: Run, folder: Path) -> set[str]:
    listed = run("inspect", "--json", "--kv-cache-dir", folder).json
    return {entry["tenant"] for entry in listed["entries"]}


@pytest.mark.slow
def test_tools_beside_a_daemon_change_no_answer(run: Run, chat_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    alice, bob = str(SHARED.with_salt("alice")), str(SHARED.with_salt("bob"))
    with running_daemon(chat_model, folder) as daemon:
        cold = {salt: asked(daemon, salt) for salt in ("alice", "bob", None)}
        daemon.wait_saved()
        assert all(restored(asked(daemon, salt)) > 0 for salt in cold)
        assert run("verify", "--kv-cache-dir", folder).exit_code == 0
        assert tenants(run, folder) == {alice, bob, ""}

        assert run("purge", "--salt", "alice", "--yes", "--kv-cache-dir", folder).exit_code == 0
        assert tenants(run, folder) == {bob, ""}
        assert restored(asked(daemon, "bob")) > 0
        notices_purge(daemon, "bob")
        again = asked(daemon, "alice")
        assert (restored(again), text_of(again)) == (0, text_of(cold["alice"]))
        daemon.wait_saved()
        assert tenants(run, folder) == {alice, bob, ""}
        assert restored(asked(daemon, "alice")) > 0

        asked(daemon, "carol")
        daemon.wait_saved()
        run("compact", "--kv-cache-dir", folder).assert_refused(4)
        assert run("backup", tmp_path / "copy", "--kv-cache-dir", folder).exit_code == 0

        assert run("purge", "--all", "--yes", "--kv-cache-dir", folder).exit_code == 0
        assert tenants(run, folder) == set()
        notices_purge(daemon, "carol")
        for salt, before in cold.items():
            again = asked(daemon, salt)
            assert (restored(again), text_of(again)) == (0, text_of(before))
        daemon.wait_saved()
        assert run("verify", "--fix", "--kv-cache-dir", folder).exit_code == 0
        assert all(text_of(asked(daemon, salt)) == text_of(before) for salt, before in cold.items())
        with daemon.client() as client:
            assert client.get("/props").json()["full_cache"]["state"]["error"] is None
        assert daemon.stop() == 0
    assert run("verify", "--kv-cache-dir", folder).exit_code == 0
    assert run("compact", "--kv-cache-dir", folder).exit_code == 0
    with running_daemon(chat_model, folder) as daemon:
        for salt, before in cold.items():
            again = asked(daemon, salt)
            assert restored(again) > 0
            assert text_of(again) == text_of(before)
        assert daemon.stop() == 0
    with running_daemon(chat_model, tmp_path / "copy") as daemon:
        assert restored(asked(daemon, "bob")) > 0


@pytest.mark.slow
def test_verify_reports_nothing_while_a_daemon_saves(run: Run, chat_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with running_daemon(chat_model, folder, kv_cache_budget="16MiB") as daemon:
        for n in range(6):
            ask(daemon, f"{n} {QUESTION}")
            report = run("verify", "--json", "--kv-cache-dir", folder).json
            assert report["problems"] == []
        assert daemon.stop() == 0
