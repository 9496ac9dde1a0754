"""The daemon under a stand-in for systemd's manager: its port is passed to it, it hangs, is killed and recovers."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
import pytest

from diskprefix.daemon.cli import main
from diskprefix.daemon.router import worker_program, workers
from tests import forked
from tests.daemon.server.daemon_process import CHAT, clean_environment, serve_flags, wait_until
from tests.daemon.server.test_auth import bearer, write_keys

OLD, NEW = "0123456789abcdef", "fedcba9876543210"
WATCHDOG_S = 2.0


class Manager:
    """One service with socket activation, `Type=notify`, `WatchdogSec=` and `Restart=on-failure`: holds a port, starts
    the daemon with it, hears what it says, kills it when the watchdog is not served, and starts it again.

    The daemon hangs once in a step of decoding after `hang` was called.
    """

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.messages: list[dict[str, str]] = []
        self.exit_codes: list[int] = []
        self._log, self._flag = folder / "log", folder / "hang"
        self.hang = self._flag.touch
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self._arguments = arguments
        self._heard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._heard.bind(str(folder / "notify"))
        self._heard.settimeout(0.05)
        self._environment = clean_environment(
            NOTIFY_SOCKET=str(folder / "notify"), WATCHDOG_USEC=str(int(WATCHDOG_S * 1e6)), LISTEN_FDS="1"
        )
        self._is_stopping = False
        self._fed_at: float | None = None
        self.process = self._start()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def said(self, name: str) -> list[str]:
        return [message[name] for message in self.messages if name in message]

    def wait_for(self, name: str, value: str = "1", count: int = 1) -> None:
        wait_until(lambda: self.said(name).count(value) >= count, f"{name}={value}")

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def stop(self) -> int:
        self._is_stopping = True
        self.signal(signal.SIGTERM)
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.exit_codes[-1]

    def close(self) -> None:
        self._is_stopping = True
        if self.process.is_alive():
            self.process.kill()
        self._thread.join(60)
        self._heard.close()
        self.listener.close()

    def _start(self) -> BaseProcess:
        return forked.start(_serve, self._arguments, self._environment, self.listener, self._flag, errors=self._log)

    def _watch(self) -> None:
        while True:
            self._hear()
            if self._fed_at is not None and time.monotonic() - self._fed_at > WATCHDOG_S:
                self._fed_at = None
                self.signal(signal.SIGABRT)
            if self.process.exitcode is not None:
                self.exit_codes.append(self.process.exitcode)
                self._fed_at = None
                if self._is_stopping or self.process.exitcode == 0:
                    self._hear()
                    return
                self.process = self._start()

    def _hear(self) -> None:
        try:
            text = self._heard.recv(65536).decode()
        except TimeoutError:
            return
        message = dict(line.split("=", 1) for line in text.split("\n"))
        self.messages.append(message)
        # systemd waits for the watchdog once the service is ready.
        if "WATCHDOG" in message and self.said("READY"):
            self._fed_at = time.monotonic()


def _serve(arguments: list[str], environment: dict[str, str], listener: socket.socket, flag: Path) -> None:
    os.environ.clear()
    os.environ.update(environment, LISTEN_PID=str(os.getpid()))
    # The first descriptor that systemd passes.
    if listener.fileno() != 3:
        os.dup2(listener.fileno(), 3)
        listener.close()
    else:
        listener.detach()
    _hang_once(flag)
    code = (
        f"import pathlib; from tests.systemd import test_service; test_service.serve_one(pathlib.Path({str(flag)!r}))"
    )
    workers.program = [sys.executable, "-c", code]
    main(arguments)


def serve_one(flag: Path) -> None:
    """The program of a worker."""
    _hang_once(flag)
    worker_program.main(worker_program.serve_model)


def _hang_once(flag: Path) -> None:
    """From now on, the step of decoding that finds a file sleeps for an hour. It removes the file first."""
    loop: Any = importlib.import_module("diskprefix.daemon.engine.loop")
    forward = loop.forward

    def hanging(model: Any, step: Any, *others: Any) -> Any:
        if sum(chunk.num_rows for chunk in step) == 1 and flag.exists():
            flag.unlink()
            time.sleep(3600)
        return forward(model, step, *others)

    loop.forward = hanging


@pytest.fixture(params=["one model", "several models"])
def manager(request: pytest.FixtureRequest, chat_model: Path, tmp_path: Path) -> Iterator[Manager]:
    """Several models have a router: the watchdog's messages come from it, whatever a worker does."""
    keys = write_keys(tmp_path / "keys", f"admin {OLD}")
    served: list[str | Path] = ["--model", chat_model]
    if request.param == "several models":
        served = ["--models-file", list_models(tmp_path, chat_model, "ash")]
    flags = serve_flags(chat_model, tmp_path / "kv", api_keys=keys)
    manager = Manager(["serve", "--port", "1", *map(str, served), *flags[2:]], tmp_path)
    yield manager
    manager.close()


def list_models(folder: Path, model: Path, *names: str) -> Path:
    file = folder / "models.toml"
    file.write_text("".join(f'[{name}]\nmodel = "{model}"\n' for name in names), encoding="utf-8")
    return file


@pytest.mark.cases(1)
def test_a_service_waits_with_its_port_reloads_hangs_recovers_and_stops(
    manager: Manager, request: pytest.FixtureRequest, chat_model: Path, tmp_path: Path
) -> None:
    url, is_router = manager.url, "several models" in request.node.name

    def post(key: str, model: str = "ash") -> httpx.Response:
        said = "Name three rivers and tell me where each begins. " * 3
        body = {"messages": [{"role": "user", "content": said}], "max_tokens": 4, "temperature": 0}
        body |= {"model": model} if is_router else {}
        return httpx.post(url + CHAT, json=body, headers=bearer(key), timeout=60)

    with ThreadPoolExecutor(1) as clients:
        # Before the process has done anything: the connection waits in the socket that it was given.
        first = clients.submit(post, OLD).result()
    assert first.status_code == 200
    assert manager.said("READY") == ["1"]
    [ready] = [message["STATUS"] for message in manager.messages if "READY" in message]
    if is_router:
        assert ready == manager.said("STATUS")[0] == "serving ash"
        assert post(OLD, "birch").status_code == 404
    else:
        assert ready.startswith(f"serving tiny-chat on {url}, cache full in ")
        assert manager.said("STATUS").index(ready) > 0, "it said before what it was loading"
        manager.wait_for("STATUS", f"serving tiny-chat on {url}; 0 running, 0 waiting")

    write_keys(tmp_path / "keys", f"admin {NEW}")
    list_models(tmp_path, chat_model, "ash", "birch")
    before_us = time.monotonic_ns() // 1000
    manager.signal(signal.SIGHUP)
    manager.wait_for("RELOADING")
    manager.wait_for("READY", count=2)
    [began_us] = manager.said("MONOTONIC_USEC")
    assert before_us <= int(began_us) <= time.monotonic_ns() // 1000
    assert post(OLD).status_code == 401
    assert post(NEW, "birch").status_code == 200

    manager.hang()
    if is_router:
        assert post(NEW).status_code == 503
        wait_until(lambda: "the worker gave no sign of life" in manager.log, "the router kills the worker")
    else:
        with pytest.raises(httpx.TransportError):
            post(NEW)
        wait_until(lambda: manager.exit_codes, "the watchdog kills it")
        assert "the engine has hung in one step for" in manager.log
        assert "in hanging" in manager.log, "where it hangs"
    again = post(NEW)
    assert (again.status_code, again.json()["prefix_cache"]["source"]) == (200, "disk")
    assert again.json()["choices"] == first.json()["choices"]
    assert manager.exit_codes == ([] if is_router else [-signal.SIGABRT])

    assert manager.stop() == 0
    assert manager.said("STOPPING") == ["1"]
    assert manager.said("STATUS")[-1] == ("stopping" if is_router else "stopping: writing what is not on disk yet")
    assert (tmp_path / "kv" / "data.mdb").exists()
