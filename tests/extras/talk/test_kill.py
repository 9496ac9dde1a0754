from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.server.scripted import scripted_app


@pytest.mark.parametrize(("host", "is_killed"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_only_who_uses_this_machine_may_kill_a_daemon_without_keys(
    chat_model: Path, host: str, is_killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[tuple[int, int]] = []
    with scripted_app(chat_model, host=host) as server, server.client() as client, monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda *arguments: killed.append(arguments))
        answer = client.post("/chat/kill", json={})
    assert answer.status_code == (200 if is_killed else 403)
    assert killed == ([(os.getpid(), signal.SIGKILL)] if is_killed else [])
    assert ("command" in answer.json()) is is_killed
