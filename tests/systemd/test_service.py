"""The daemon under a stand-in for systemd's manager: its port is passed to it, it hangs, is killed and recovers."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.daemon_process import serve_flags, wait_until
from tests.systemd.manager import Manager

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Name three rivers and tell me where each begins. " * 3}],
    "max_tokens": 4,
    "temperature": 0,
}


def hang_once(flag: Path) -> None:
    """From now on, the step of decoding that finds a file sleeps for an hour. It removes the file first."""
    loop: Any = importlib.import_module("diskprefix.engine.loop")
    forward = loop.forward

    def hanging(model: Any, step: Any, *others: Any) -> Any:
        if sum(chunk.num_rows for chunk in step) == 1 and flag.exists():
            flag.unlink()
            time.sleep(3600)
        return forward(model, step, *others)

    loop.forward = hanging


@pytest.fixture
def manager(chat_model: Path, tmp_path: Path) -> Iterator[Manager]:
    keys = tmp_path / "keys"
    keys.write_text("admin 0123456789abcdef\n", encoding="utf-8")
    keys.chmod(0o600)
    arguments = ["serve", "--port", "1", *serve_flags(chat_model, tmp_path / "kv", api_keys=keys)]
    manager = Manager(arguments, tmp_path, 2.0, hang_once, tmp_path / "hang")
    yield manager
    manager.close()


def post(url: str, key: str = "0123456789abcdef", **more: str) -> httpx.Response:
    return httpx.post(url + CHAT, json=BODY | more, headers={"Authorization": f"Bearer {key}"}, timeout=60)


def test_a_service_waits_with_its_port_reloads_hangs_recovers_and_stops(manager: Manager, tmp_path: Path) -> None:
    url = manager.url
    with ThreadPoolExecutor(1) as clients:
        # Before the process has done anything: the connection waits in the socket that it was given.
        first = clients.submit(post, url).result()
    assert first.status_code == 200
    assert manager.said("READY") == ["1"]
    [ready] = [message for message in manager.messages if "READY" in message]
    assert ready["STATUS"].startswith(f"serving tiny-chat on {url}, cache full in ")
    assert manager.said("STATUS").index(ready["STATUS"]) > 0, "it said before what it was loading"
    manager.wait_for("STATUS", f"serving tiny-chat on {url}; 0 running, 0 waiting")

    (tmp_path / "keys").write_text("admin fedcba9876543210\n", encoding="utf-8")
    before_us = time.monotonic_ns() // 1000
    manager.reload()
    manager.wait_for("RELOADING")
    manager.wait_for("READY", count=2)
    [began_us] = manager.said("MONOTONIC_USEC")
    assert before_us <= int(began_us) <= time.monotonic_ns() // 1000
    assert post(url).status_code == 401
    key = "fedcba9876543210"
    assert post(url, key).status_code == 200

    (tmp_path / "hang").touch()
    with pytest.raises(httpx.TransportError):
        post(url, key)
    wait_until(lambda: manager.exit_codes, "the watchdog kills it")
    assert manager.exit_codes == [-signal.SIGABRT]
    assert "the engine has hung in one step for" in manager.log
    assert "in hanging" in manager.log, "where it hangs"
    again = post(url, key)
    assert (again.status_code, again.json()["prefix_cache"]["source"]) == (200, "disk")
    assert again.json()["choices"] == first.json()["choices"]

    assert manager.stop() == 0
    assert manager.said("STOPPING") == ["1"]
    assert manager.said("STATUS")[-1] == "stopping: writing what is not on disk yet"
    assert os.path.exists(tmp_path / "kv" / "data.mdb")


def test_a_service_of_several_models_reloads_its_list_and_keys_outlives_a_worker_that_hangs_and_stops(
    chat_model: Path, tmp_path: Path
) -> None:
    """With a spare. The watchdog's messages come from the front, whatever a worker does."""
    keys, catalogue = tmp_path / "keys", tmp_path / "models.toml"
    keys.write_text("admin 0123456789abcdef\n", encoding="utf-8")
    keys.chmod(0o600)
    catalogue.write_text(f'[ash]\nmodel = "{chat_model}"\n', encoding="utf-8")
    flags = serve_flags(catalogue, tmp_path / "kv", api_keys=keys)
    arguments = ["serve", "--port", "1", "--standby", "--models-file", *flags[1:]]
    manager = Manager(arguments, tmp_path, 2.0, hang_once, tmp_path / "hang")
    try:
        url = manager.url
        with ThreadPoolExecutor(1) as clients:
            first = clients.submit(post, url, model="ash").result()
        assert first.status_code == 200
        assert (manager.said("READY"), manager.said("STATUS")[0]) == (["1"], "serving ash")
        assert post(url, model="birch").status_code == 404

        keys.write_text("admin fedcba9876543210\n", encoding="utf-8")
        catalogue.write_text(f'[ash]\nmodel = "{chat_model}"\n[birch]\nmodel = "{chat_model}"\n', encoding="utf-8")
        manager.reload()
        manager.wait_for("RELOADING")
        manager.wait_for("READY", count=2)
        assert post(url, model="ash").status_code == 401
        key = "fedcba9876543210"
        assert post(url, key, model="birch").status_code == 200

        (tmp_path / "hang").touch()
        assert post(url, key, model="ash").status_code == 503
        wait_until(lambda: "the worker gave no sign of life" in manager.log, "the front kills the worker")
        again = post(url, key, model="ash")
        assert (again.status_code, again.json()["choices"]) == (200, first.json()["choices"])
        assert again.json()["prefix_cache"]["source"] == "disk"
        assert manager.exit_codes == [], "the service itself goes on"

        assert manager.stop() == 0
        assert manager.said("STOPPING") == ["1"]
        assert manager.said("STATUS")[-1] == "stopping"
    finally:
        manager.close()
