"""Two daemons that share a bucket of a real object server, which fails now and then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.examples import thorough
from tests.object_server import object_server
from tests.server.daemon_process import DaemonProcess, running_daemon, wait_until
from tests.server.test_several_processes import ask, text_of


def state_of(daemon: DaemonProcess) -> dict[str, Any]:
    with daemon.client() as client:
        state: dict[str, Any] = client.get("/props").json()["full_cache"]["state"]["remote"]
    return state


def wait_shared(daemon: DaemonProcess, written: int) -> None:
    wait_until(lambda: state_of(daemon)["written"] > written and not state_of(daemon)["offered"], "it is shared")


@thorough
def test_two_daemons_share_a_bucket_and_no_fault_of_it_changes_an_answer(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("a key that both daemons share")
    (tmp_path / "key").chmod(0o600)
    flags: dict[str, Any] = {"namespace_key_file": tmp_path / "key", "remote_write": "all"}
    with object_server(tmp_path / "objects") as server:
        flags["remote_tier"] = server.url
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        with (
            running_daemon(chat_model, tmp_path / "one", **flags) as one,
            running_daemon(chat_model, tmp_path / "other", **flags) as other,
        ):
            first = ask(one, "Where does the river rise, and where does it end? ")
            wait_shared(one, 0)
            second = ask(other, "Where does the river rise, and where does it end? ")
            assert second["prefix_cache"]["source"] == "remote"
            # The prompt's last tokens are not worth a request.
            assert second["prefix_cache"]["restored"] >= first["usage"]["prompt_tokens"] - 32
            assert text_of(second) == text_of(first)
            assert state_of(other)["refused"] == dict.fromkeys(state_of(other)["refused"], 0)
            with other.client() as client:
                metrics = client.get("/metrics").text
            restored = second["prefix_cache"]["restored"]
            assert f'diskprefix_prompt_tokens_total{{source="remote"}} {restored}.0' in metrics
            assert 'diskprefix_remote_refused_objects_total{reason="mac"} 0.0' in metrics
            for fault in ("partial", "hang"):
                server.reset()
                question = f"What happens while the bucket answers with the fault {fault}? "
                first = ask(one, question)
                server.fault = fault
                assert text_of(ask(other, question)) == text_of(first)
            assert state_of(other)["failed"] + state_of(other)["late"] >= 2
            server.reset()
