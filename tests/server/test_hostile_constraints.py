"""Constraints that would take minutes to be compiled, sent to a daemon: others are served, and it ends when told."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import pytest

from tests.server.daemon_process import running_daemon
from tests.server.test_auth import ALICE, BOB, write_keys

SCHEMA = {"allOf": [{"type": "string", "pattern": f"^.*a.{{{i}}}b.*$"} for i in range(30)]}
BODY = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 2,
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
}
NUM_HOSTILE = 12
"""More than the event loop's own executor has threads."""


@pytest.mark.slow
def test_a_caller_who_has_schemas_compiled_stops_neither_others_nor_the_shutdown(
    chat_model: Path, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys", f"alice {ALICE}", f"bob {BOB}")
    with running_daemon(chat_model, tmp_path / "cache", api_keys=keys) as daemon:

        def attack() -> None:
            with daemon.client(BOB) as client, pytest.raises(httpx.HTTPError):
                client.post("/v1/chat/completions", json=BODY, timeout=0.5).raise_for_status()

        attackers = [threading.Thread(target=attack) for _ in range(NUM_HOSTILE)]
        for attacker in attackers:
            attacker.start()
        with daemon.client(ALICE) as client:
            reply = client.post("/v1/chat/completions", json=BODY | {"response_format": {"type": "json_object"}})
            assert reply.status_code == 200, reply.text
        for attacker in attackers:
            attacker.join()
        assert daemon.stop() == 0
