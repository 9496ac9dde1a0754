"""What hostile clients send is served or refused, and another key is served meanwhile."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import httpx
import pytest

from tests.daemon.server import test_auth
from tests.daemon.server.daemon_process import DaemonProcess, running_daemon, serve_flags
from tests.daemon.server.hostile_requests import CHAT, REQUESTS, Hostile, chat
from tools.faults.hostile import bad_clients
from tools.faults.hostile.bad_clients import HUNG_UP, Caller, End
from tools.faults.hostile.crowd import bad_key, good_key
from tools.faults.hostile.program import write_keys
from tools.faults.hostile.requests import KINDS


@pytest.mark.cases(2)
@pytest.mark.parametrize("hostile", REQUESTS.values(), ids=REQUESTS)
def test_a_request_that_once_was_a_failure_is_served_or_refused(daemon: DaemonProcess, hostile: Hostile) -> None:
    with daemon.client() as client:
        try:
            answer = client.post(
                hostile.path,
                content=hostile.make(),
                headers={"content-type": "application/json", "host": hostile.host},
                timeout=hostile.patience_s or 60,
            )
        except httpx.ReadTimeout:
            assert hostile.patience_s is not None
        else:
            # A refusal that took seconds comes after the headers.
            is_late = answer.status_code == 200 and 200 not in hostile.statuses
            status = answer.json()["error"]["type"] if is_late else answer.status_code
            assert status in (*hostile.statuses, "invalid_request_error"), answer.text[:1000]
        assert client.get("/health", timeout=60).status_code == 200


@pytest.mark.slow
def test_hostile_bodies_are_refused_while_another_key_is_served(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bad_clients, "UNFINISHED_S", 2.0)
    kinds = ["31 MiB of a model's name", "256 unfinished bodies"]
    keys, models = write_keys(tmp_path / "keys", 1, kinds), tmp_path / "models.toml"
    models.write_text(f'[served]\nmodel = "{chat_model}"\npin = true\n')
    flags = serve_flags(chat_model, tmp_path / "kv", api_keys=keys)
    served: list[int] = []
    with DaemonProcess("--models-file", str(models), *flags[2:]) as daemon:
        port = int(daemon.url.rpartition(":")[2])
        good = Caller(port, good_key(0))
        hello = good.request(CHAT, chat(model="served"))

        async def run() -> list[End]:
            await good.ask(hello)
            attacks = [asyncio.ensure_future(KINDS[kind](Caller(port, bad_key(kind)))()) for kind in kinds]
            while not all(attack.done() for attack in attacks):
                served.append(int((await good.ask(hello)).how))
            return [attack.result() for attack in attacks]

        ends = asyncio.run(run())
        assert daemon.stop() == 0
    assert ends[0].how == "404"
    assert ends[1].how in ("429", HUNG_UP)
    assert set(served) == {200}


@pytest.mark.slow
def test_slow_schemas_stop_neither_other_callers_nor_the_shutdown(
    chat_model: Path, tmp_path: Path, keys_file: Path
) -> None:
    """More of them than the event loop's own executor has threads. Each would take minutes."""
    hostile = REQUESTS["allOf of 39 patterns"].make()
    with running_daemon(chat_model, tmp_path / "cache", api_keys=keys_file) as daemon:

        def attack() -> None:
            with daemon.client(test_auth.BOB) as client, pytest.raises(httpx.HTTPError):
                client.post(CHAT, content=hostile, timeout=0.5).raise_for_status()

        attackers = [threading.Thread(target=attack) for _ in range(12)]
        for attacker in attackers:
            attacker.start()
        with daemon.client(test_auth.ALICE) as client:
            reply = client.post(CHAT, content=chat(response_format={"type": "json_object"}))
            assert reply.status_code == 200, reply.text
        for attacker in attackers:
            attacker.join()
        assert daemon.stop() == 0
