"""The daemon as a process: starting, failing to start, being told to stop, and being killed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from diskprefix.cache.policy.scope import parse_scope
from diskprefix.errors import DeviceLost
from diskprefix.server.process import process
from diskprefix.server.process.process import process_age_s
from diskprefix.settings import Settings
from tests.server import scripted
from tests.server.daemon_process import DaemonProcess, clean_environment, running_daemon, serve_flags, wait_until

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Name three rivers and tell me where each begins. " * 3}],
    "max_tokens": 4,
    "temperature": 0,
}
STREAM = BODY | {"stream": True, "logit_bias": {"2": -100}}
ENDLESS = STREAM | {"max_tokens": 1900, "n": 16}
"""Takes many times the grace of a stopping daemon."""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def refused_start(*flags: str) -> tuple[int, str]:
    """Exit code and the one error line of a daemon that must not start."""
    with DaemonProcess(*flags) as daemon:
        code = daemon.process.wait(120)
        daemon.stop()
    assert "Traceback" not in daemon.log
    errors = [line for line in daemon.lines if line.startswith("error: ")]
    assert len(errors) == 1, daemon.log
    assert daemon.lines[-1] == errors[0], daemon.log
    return code, errors[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_daemon_with_0_and_what_was_pending_is_written(
    chat_model: Path, cache: Path, number: signal.Signals
) -> None:
    with running_daemon(chat_model, cache) as daemon:
        first = httpx.post(daemon.url + CHAT, json=BODY, timeout=60).json()
        assert daemon.stop(number) == 0
        assert "stopped" in daemon.lines[-1]
    with running_daemon(chat_model, cache) as daemon:
        again = httpx.post(daemon.url + CHAT, json=BODY, timeout=60).json()
    assert again["prefix_cache"]["restored"] == first["usage"]["prompt_tokens"]
    assert again["prefix_cache"]["source"] == "disk"
    assert again["choices"] == first["choices"]


def next_data(lines: Iterator[str]) -> str:
    """The next line of a stream that is no comment: the engine has begun."""
    return next(line for line in lines if line.startswith("data: "))


def test_a_running_request_is_finished_before_the_end(chat_model: Path, cache: Path) -> None:
    with running_daemon(chat_model, cache) as daemon:
        with httpx.stream("POST", daemon.url + CHAT, json=STREAM | {"max_tokens": 100}, timeout=60) as answer:
            lines = answer.iter_lines()
            next_data(lines)
            daemon.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-2] == "data: [DONE]"
        assert daemon.stop() == 0


def test_a_request_that_outlasts_the_grace_gets_an_error_event(chat_model: Path, cache: Path) -> None:
    with running_daemon(chat_model, cache) as daemon:
        url = daemon.url
        with httpx.stream("POST", url + CHAT, json=ENDLESS, timeout=60) as answer:
            lines = answer.iter_lines()
            next_data(lines)
            daemon.process.send_signal(signal.SIGTERM)
            daemon.wait_for_line("stopping: ")
            # One that came just before the socket was closed is reset.
            with pytest.raises((httpx.ConnectError, httpx.ReadError)):
                wait_until(lambda: httpx.get(url + "/health").is_error and None, "no new connection is taken")
            rest = [line for line in lines if line]
        assert rest[-1].startswith('data: {"error":{"message":"the daemon is stopping"')
        assert daemon.stop() == 0


def test_a_body_that_is_still_arriving_does_not_delay_the_end(chat_model: Path, cache: Path) -> None:
    with running_daemon(chat_model, cache) as daemon:
        address, _, port = daemon.url.removeprefix("http://").rpartition(":")
        with socket.create_connection((address, int(port)), timeout=60) as client:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\nExpect: 100-continue\r\n\r\n"
            client.sendall(head.encode())
            # The body is being read.
            assert client.recv(1000).startswith(b"HTTP/1.1 100 ")
            client.sendall(b"{")
            assert daemon.stop() == 0
            # It is reset if the byte was not read yet.
            with suppress(ConnectionResetError):
                assert client.recv(1000) == b""
        assert "Traceback" not in daemon.log


def test_a_second_interrupt_ends_the_daemon_at_once(chat_model: Path, cache: Path) -> None:
    with (
        running_daemon(chat_model, cache) as daemon,
        httpx.stream("POST", daemon.url + CHAT, json=ENDLESS, timeout=60) as answer,
    ):
        next_data(answer.iter_lines())
        daemon.process.send_signal(signal.SIGINT)
        daemon.wait_for_line("stopping: ")
        assert daemon.stop(signal.SIGINT) == 130


def test_a_signal_before_anything_was_done_ends_the_daemon_with_0(chat_model: Path, cache: Path) -> None:
    with DaemonProcess(*serve_flags(chat_model, cache)) as daemon:
        assert daemon.url
        assert daemon.stop(signal.SIGTERM) == 0
        assert "Traceback" not in daemon.log


def test_a_loading_daemon_answers_health_and_ends_with_0_when_told_to(
    chat_model: Path, cache: Path, tmp_path: Path
) -> None:
    never_written = tmp_path / "template"
    os.mkfifo(never_written)
    with DaemonProcess(*serve_flags(chat_model, cache, chat_template=never_written)) as daemon:
        with daemon.client() as client, ThreadPoolExecutor(1) as clients:
            assert client.get("/health").json()["status"] == "loading"
            waiting = clients.submit(client.post, CHAT, json=BODY)
            wait_until(lambda: client.get("/health").json()["queue_depth"], "it waits")
            daemon.process.send_signal(signal.SIGTERM)
            answer = waiting.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
        assert answer.headers["retry-after"]
        assert daemon.stop(signal.SIGTERM) == 0
        assert daemon.lines[-1].endswith("stopped")


def test_a_second_daemon_on_the_port_is_refused_and_the_first_keeps_serving(
    daemon: DaemonProcess, chat_model: Path, cache: Path
) -> None:
    port = daemon.url.rpartition(":")[2]
    code, line = refused_start(*serve_flags(chat_model, cache, port=port))
    assert code == 2
    assert f"--port: cannot listen on 127.0.0.1:{port}" in line
    assert "is a daemon running already?" in line
    assert not cache.exists(), "it is refused before anything is touched"
    assert httpx.post(daemon.url + CHAT, json=BODY, timeout=60).status_code == 200


@pytest.mark.parametrize(("host", "warned"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_a_daemon_without_keys_that_others_reach_warns(chat_model: Path, cache: Path, host: str, warned: bool) -> None:
    with DaemonProcess(*serve_flags(chat_model, cache, host=host)) as daemon:
        daemon.wait_ready()
        assert daemon.stop() == 0
    lines = [line for line in daemon.lines if "no API keys (--api-keys): everybody who reaches http://0.0.0.0:" in line]
    assert (len(lines), "no API keys" in daemon.log) == (int(warned), warned)


def test_a_cache_folder_that_cannot_be_created_is_refused(chat_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    code, line = refused_start(*serve_flags(chat_model, tmp_path / "file" / "kv"))
    assert code == 4
    assert str(tmp_path / "file") in line


@pytest.mark.parametrize("standby", [(), ("--standby",)], ids=["alone", "standby"])
def test_a_damaged_model_is_refused(chat_model: Path, cache: Path, tmp_path: Path, standby: tuple[str, ...]) -> None:
    model = shutil.copytree(chat_model, tmp_path / "damaged")
    (weights,) = model.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    code, line = refused_start(*serve_flags(model, cache), *standby)
    assert code == 3
    assert f"{weights} is damaged or cut short" in line


def test_a_model_that_does_not_exist_is_refused(cache: Path, tmp_path: Path) -> None:
    code, line = refused_start(*serve_flags(tmp_path / "nothing", cache))
    assert code == 3
    assert "nothing" in line


def test_a_lost_accelerator_ends_the_daemon_with_an_exit_code_for_which_systemd_starts_it_again(
    chat_model: Path, cache: Path
) -> None:
    with DaemonProcess(*serve_flags(chat_model, cache), module="tests.server.lost_device") as daemon:
        answer = httpx.post(daemon.wait_ready().url + CHAT, json=BODY, timeout=60)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "device_lost"
        assert daemon.process.wait(60) == DeviceLost.exit_code != 0
        daemon.wait_for_line("for its supervisor to start it again")
    unit = (Path(__file__).parents[3] / "systemd" / "diskprefix.service").read_text(encoding="utf-8").split("\n")
    assert "Restart=on-failure" in unit
    never = next(line for line in unit if line.startswith("RestartPreventExitStatus="))
    assert str(DeviceLost.exit_code) not in never.partition("=")[2].split()


def test_the_age_of_a_process_is_counted_from_its_start() -> None:
    assert 0 < process_age_s() < 24 * 3600


class Notifications:
    """A socket that listens as systemd does."""

    def __init__(self, address: str) -> None:
        self.messages: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while message := self._socket.recv(65536):
            self.messages.append(message.decode())

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(30)
        self._socket.close()


@pytest.fixture
def notifications(tmp_path: Path) -> Iterator[tuple[str, Notifications]]:
    """The value of NOTIFY_SOCKET, an abstract name, and what arrives there."""
    name = f"diskprefix-test-{tmp_path.name}"
    listener = Notifications(f"\0{name}")
    yield f"@{name}", listener
    listener.close()


def test_a_daemon_that_cannot_load_is_never_ready(
    cache: Path, chat_model: Path, tmp_path: Path, notifications: tuple[str, Notifications]
) -> None:
    address, heard = notifications
    environment = clean_environment(NOTIFY_SOCKET=address)
    damaged = shutil.copytree(chat_model, tmp_path / "damaged")
    os.truncate(damaged / "model.safetensors", 100)
    with DaemonProcess(*serve_flags(damaged, cache), environment=environment) as daemon:
        assert daemon.process.wait(120) == 3
    wait_until(lambda: heard.messages[-1:] == ["STOPPING=1\nSTATUS=stopping: 0 running requests may end"], "the end")
    assert not any("READY" in message for message in heard.messages)


@pytest.mark.parametrize("room", [1 << 30, 4 << 30])
def test_the_ready_line_warns_of_a_disk_with_less_than_the_budget(room: int, caplog: pytest.LogCaptureFixture) -> None:
    scope = parse_scope("full", param="--disk-prefix-cache")
    serving = SimpleNamespace(scope=scope, model_name="m", startup_s={"total": 1.0})
    stats = scripted.STATS | {"room_bytes": room, "budget_bytes": 4 << 30}
    process._announce(cast(Any, serving), stats, Settings(), "http://here")
    said = "the disk has room for 1.0 GiB of --kv-cache-budget 4.0 GiB"
    assert [said in line for line in caplog.messages if "the disk has room" in line] == [True] * (room < 4 << 30)
