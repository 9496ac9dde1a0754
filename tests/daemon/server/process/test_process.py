"""The daemon as a process: starting, failing to start, being told to stop, and being killed."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from diskprefix.daemon import app
from diskprefix.daemon.server.process import process
from diskprefix.daemon.server.process.token_file import token_at
from diskprefix.daemon.settings import Settings
from diskprefix.errors import DeviceLost
from diskprefix.scope import parse_scope
from tests.daemon.server import scripted
from tests.daemon.server.chat_model import weights_of
from tests.daemon.server.daemon_process import (
    CHAT,
    DaemonProcess,
    ask,
    clean_environment,
    open_raw,
    props,
    running_daemon,
    serve_flags,
    wait_until,
)
from tests.daemon.server.test_auth import ALICE, bearer, write_keys
from tests.runtimes import not_by_llama

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


def next_data(lines: Iterator[str]) -> str:
    """The next line of a stream that is no comment: the engine has begun."""
    return next(line for line in lines if line.startswith("data: "))


@pytest.mark.cases(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_with_0_after_requests_and_pending_saves(
    chat_model: Path, cache: Path, number: signal.Signals
) -> None:
    with running_daemon(chat_model, cache) as daemon:
        first = httpx.post(daemon.url + CHAT, json=BODY, timeout=60).json()
        with httpx.stream("POST", daemon.url + CHAT, json=STREAM | {"max_tokens": 100}, timeout=60) as answer:
            lines = answer.iter_lines()
            next_data(lines)
            daemon.process.send_signal(number)
            assert list(lines)[-2] == "data: [DONE]"
        assert daemon.process.wait(60) == daemon.stop() == 0
        assert "stopped" in daemon.lines[-1]
    with running_daemon(chat_model, cache) as daemon:
        again = httpx.post(daemon.url + CHAT, json=BODY, timeout=60).json()
    assert again["prefix_cache"]["restored"] == first["usage"]["prompt_tokens"]
    assert again["prefix_cache"]["source"] == "disk"
    assert again["choices"] == first["choices"]


@pytest.mark.slow
def test_a_request_beyond_the_grace_gets_an_error_event(chat_model: Path, cache: Path) -> None:
    # A fast machine finishes the request within the grace that users get.
    flags = serve_flags(chat_model, cache)
    with DaemonProcess(*flags, module="tests.daemon.server.process.short_grace") as daemon:
        daemon.wait_ready()
        url, port = daemon.url, int(daemon.url.rpartition(":")[2])
        with httpx.stream("POST", url + CHAT, json=ENDLESS, timeout=60) as answer:
            lines = answer.iter_lines()
            next_data(lines)
            assert token_at("127.0.0.1", port)
            daemon.process.send_signal(signal.SIGTERM)
            daemon.wait_for_line("stopping: ")
            # One that came just before the socket was closed is reset.
            with pytest.raises((httpx.ConnectError, httpx.ReadError)):
                wait_until(lambda: httpx.get(url + "/health").is_error and None, "no new connection is taken")
            assert token_at("127.0.0.1", port) is None
            rest = [line for line in lines if line]
        assert rest[-1].startswith('data: {"error":{"message":"the daemon is stopping"')
        assert daemon.stop() == 0


def test_a_body_that_is_still_arriving_does_not_delay_the_end(chat_model: Path, cache: Path) -> None:
    with running_daemon(chat_model, cache) as daemon:
        port = int(daemon.url.rpartition(":")[2])
        with open_raw(port, announced_bytes=10, Expect="100-continue") as client:
            assert client.recv(1000).startswith(b"HTTP/1.1 100 "), "the body is being read"
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
        lines = answer.iter_lines()
        next_data(lines)
        daemon.process.send_signal(signal.SIGINT)
        daemon.wait_for_line("stopping: 1 request may take 5 s to finish")
        assert daemon.stop(signal.SIGINT) == 130


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


@pytest.mark.slow
def test_a_bucket_that_does_not_answer_keeps_no_daemon_from_ending(chat_model: Path, tmp_path: Path) -> None:
    bucket, key = tmp_path / "bucket", tmp_path / "key"
    key.write_text("a key that machines share")
    key.chmod(0o600)
    shared = {"remote_tier": f"file://{bucket}", "namespace_key_file": key, "remote_write": "all"}
    messages = [{"role": "user", "content": "Name three rivers and tell me where each begins. " * 20}]
    body = BODY | {"messages": messages, "prefix_cache": {"scope": "full"}}
    with running_daemon(chat_model, tmp_path / "one", **shared) as daemon, daemon.client() as client:
        client.post(CHAT, json=body).raise_for_status()
        daemon.wait_saved()
        wait_until(lambda: not props(client)["full_cache"]["state"]["remote"]["offered"], "it is shared")
    objects = [path for path in bucket.rglob("*") if path.is_file()]
    assert objects
    for path in objects:
        path.unlink()
        # Who reads it waits for a program that writes to it.
        os.mkfifo(path)
    with running_daemon(chat_model, tmp_path / "two", **shared) as daemon:
        answer = httpx.post(daemon.url + CHAT, json=body, timeout=60, headers=bearer(daemon.token)).json()
        assert answer["prefix_cache"]["restored"] == 0
        assert daemon.stop() == 0
        assert daemon.lines[-1].endswith("stopped")


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("process._end(daemon)", 0, ["stopped"]),
        ("daemon.failure = error; process._end(daemon)", 3, ["the model is gone"]),
        ("process.leave(5)", 5, []),
        ("release.set(); process._end(daemon); print('in order')", 0, ["stopped", "in order"]),
    ],
)
def test_no_thread_that_hangs_keeps_the_process_from_ending(ends: str, code: int, said: list[str]) -> None:
    program = f"""import logging, threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from diskprefix.daemon import app, cli
from diskprefix.errors import ModelError
from diskprefix.daemon.server.process import process
app.serve, process._FAILED_S = lambda _: serve(), 0.1
release, error = threading.Event(), ModelError("the model is gone")
ThreadPoolExecutor(1).submit(release.wait)
daemon = SimpleNamespace(failure=None, is_loading=False, threads=SimpleNamespace(are_busy=False))
def serve():
    {ends}
cli.main(["serve"])
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=clean_environment(), timeout=60
    )
    lines = [line.removeprefix("error: ").rpartition("INFO ")[2] for line in (ended.stderr + ended.stdout).splitlines()]
    assert (ended.returncode, lines) == (code, said)


@pytest.mark.cases(1)
@not_by_llama("the library reads the weights before the model is served")
@pytest.mark.parametrize("problem", ["", "the disk is gone"])
def test_a_stored_prompt_is_answered_before_the_weights_are_read(
    problem: str, chat_model: Path, cache: Path, tmp_path: Path
) -> None:
    body, held = BODY | {"prefix_cache": {"scope": "full"}}, tmp_path / "weights"
    with running_daemon(chat_model, cache) as daemon:
        first = httpx.post(daemon.url + CHAT, json=body, timeout=60).json()
        daemon.wait_saved()
    os.mkfifo(held)
    environment = clean_environment(HELD_WEIGHTS=str(held))
    flags, module = serve_flags(chat_model, cache), "tests.daemon.server.held_weights"
    with ThreadPoolExecutor(1) as clients, DaemonProcess(*flags, module=module, environment=environment) as daemon:
        with httpx.Client(base_url=daemon.url, timeout=60) as client:
            again = clients.submit(client.post, CHAT, json=body | {"max_tokens": 1}).result(30).json()
            assert again["prefix_cache"]["restored"] == first["usage"]["prompt_tokens"]
            waiting = clients.submit(client.post, CHAT, json=body)
            wait_until(lambda: client.get("/health").json()["running"], "it has begun")
            held.write_text(problem)
            answer = waiting.result().json()
        if problem:
            assert answer["error"]["message"] == f"cannot load the model in {chat_model}: {problem}"
            assert daemon.process.wait(60) == 3
            assert f"error: cannot load the model in {chat_model}: {problem}" in daemon.lines
        else:
            assert answer["choices"] == first["choices"]
            assert daemon.stop() == 0


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


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("wrong", "code", "words"),
    [
        ("port", 2, "--port: cannot listen on 127.0.0.1:PORT: Address already in use; diskprefix answers there with"),
        ("host", 2, "--host: cannot listen on 192.0.2.1:0: Cannot assign requested address; give an address of this"),
        ("memory", 2, "--kv-memory: 1.0 MiB has no room for a block of 8192 tokens; a context of 2,048 tokens takes "),
        ("folder", 4, "FOLDER/file"),
        ("keys", 2, "--api-keys: others may read or write FOLDER/keys (mode 0644); run `chmod 600` on it"),
        ("no model", 3, "FOLDER/nothing"),
        ("damaged", 3, "FOLDER/damaged/WEIGHTS … cut short"),
        ("damaged, behind a router", 3, "FOLDER/damaged/WEIGHTS … cut short"),
    ],
)
def test_a_daemon_that_cannot_serve_ends_with_one_line_and_is_never_ready(
    daemon: DaemonProcess,
    chat_model: Path,
    cache: Path,
    tmp_path: Path,
    notifications: tuple[str, Notifications],
    wrong: str,
    code: int,
    words: str,
) -> None:
    address, heard = notifications
    port = daemon.url.rpartition(":")[2]
    (tmp_path / "file").write_text("not a folder")
    write_keys(tmp_path / "keys", ALICE).chmod(0o644)
    damaged = shutil.copytree(chat_model, tmp_path / "damaged")
    weights = weights_of(damaged)
    os.truncate(weights, weights.stat().st_size // 2)
    flags = {
        "port": serve_flags(chat_model, cache, port=port),
        "folder": serve_flags(chat_model, tmp_path / "file" / "kv"),
        "host": serve_flags(chat_model, cache, host="192.0.2.1"),
        "memory": serve_flags(chat_model, cache, kv_memory="1MiB", block_size=8192),
        "keys": serve_flags(chat_model, cache, api_keys=tmp_path / "keys"),
        "no model": serve_flags(tmp_path / "nothing", cache),
        "damaged": serve_flags(damaged, cache),
        "damaged, behind a router": [*serve_flags(damaged, cache), "--router"],
    }[wrong]
    with DaemonProcess(*flags, environment=clean_environment(NOTIFY_SOCKET=address)) as refused:
        assert refused.process.wait(120) == code
        refused.stop()
    assert "Traceback" not in refused.log
    assert [line for line in refused.lines if line.startswith("error: ")] == refused.lines[-1:], refused.log
    for name, value in {"PORT": port, "FOLDER": tmp_path, "WEIGHTS": weights.name}.items():
        words = words.replace(name, str(value))
    assert all(part in refused.lines[-1] for part in words.split(" … ")), refused.lines[-1]
    if wrong == "damaged":
        last = "STOPPING=1\nSTATUS=stopping"
        wait_until(lambda: heard.messages[-1:] == [last], "the end")
    if wrong == "port":
        assert not [*cache.iterdir()], "it is refused before anything is written"
        assert httpx.post(daemon.url + CHAT, json=BODY, timeout=60).status_code == 200, "the first keeps serving"
    assert not any("READY" in message for message in heard.messages)


@pytest.mark.parametrize(("host", "warned"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_a_daemon_without_keys_that_others_reach_warns(chat_model: Path, cache: Path, host: str, warned: bool) -> None:
    with DaemonProcess(*serve_flags(chat_model, cache, host=host)) as daemon:
        daemon.wait_ready()
        assert daemon.stop() == 0
    lines = [line for line in daemon.lines if "no API keys (--api-keys): everybody who reaches http://0.0.0.0:" in line]
    assert (len(lines), "no API keys" in daemon.log) == (int(warned), warned)


def test_a_lost_accelerator_ends_the_daemon_with_its_exit_code(chat_model: Path, cache: Path) -> None:
    with DaemonProcess(*serve_flags(chat_model, cache), module="tests.daemon.server.lost_device") as daemon:
        answer = httpx.post(daemon.wait_ready().url + CHAT, json=BODY, timeout=60)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "device_lost"
        assert daemon.process.wait(60) == DeviceLost.exit_code != 0
        daemon.wait_for_line("for its supervisor to start it again")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kv_cache_budget": 4 << 30}, "--kv-cache-budget 4.0 GiB"),
        ({"kv_cache_new_budget": 4 << 30}, "4.0 GiB, the budget of a new folder; --kv-cache-budget sets another"),
        ({}, "4.0 GiB, the budget that an earlier start has set for this folder; --kv-cache-budget sets another"),
    ],
)
@pytest.mark.parametrize("room", [1 << 30, 4 << 30])
def test_the_ready_line_warns_of_a_small_disk_and_says_who_set_the_budget(
    room: int, given: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    scope = parse_scope("full", param="--disk-prefix-cache")
    serving = SimpleNamespace(scope=scope, model_name="m", startup_s={"total": 1.0})
    stats = scripted.STATS | {"room_bytes": room, "budget_bytes": 4 << 30}
    process._announce(cast(Any, serving), stats, Settings(**given), "http://here")
    warned = [line for line in caplog.messages if "the disk has room" in line]
    assert warned == [f"[disk-cache] the disk has room for 1.0 GiB of saved prompts, less than {said}"] * (
        room < 4 << 30
    )


@pytest.mark.cases(2)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="a round takes another time")
@pytest.mark.parametrize(
    ("own", "engine", "read"),
    [
        ({}, "auto", app._SPINS),
        ({}, "llama", ""),
        ({"GOMP_SPINCOUNT": "7"}, "auto", "7"),
        ({"GOMP_SPINCOUNT": "7"}, "llama", "7"),
        ({"OMP_WAIT_POLICY": "passive"}, "auto", "0"),
    ],
)
def test_waiting_threads_sleep_soon_unless_the_environment_decides(own: dict[str, str], engine: str, read: str) -> None:
    """OpenMP prints what it has read when it is loaded, as torch loads it; llama.cpp has its default."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    [library] = map(str, Path(str(spec.origin)).parent.glob("lib/libgomp*"))
    code = "import ctypes; "
    code += "from diskprefix.daemon import app, settings; from diskprefix.daemon.server.process import process; "
    code += f"process.run = lambda *_: ctypes.CDLL({library!r}); app.serve(settings.Settings(runtime={engine!r}))"
    environment = clean_environment(OMP_DISPLAY_ENV="verbose", **own)
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    [spins] = re.findall("GOMP_SPINCOUNT = '([0-9]+)'", said.stderr)
    assert spins == read or (not read and spins != app._SPINS)


_SERVER_WITHOUT_TICKS = """
import uvicorn
from diskprefix.daemon.server.process import process

async def app(scope, receive, send):
    await receive()
    await send({"type": "lifespan.startup.complete"})
    print("it serves", flush=True)
    await receive()
    await send({"type": "lifespan.shutdown.complete"})

process._TICK_S = 3600.0
process.SignalledServer(uvicorn.Config(app, port=0, lifespan="on", log_config=None)).run()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_before_its_next_tick(number: signal.Signals) -> None:
    code = [sys.executable, "-P", "-c", _SERVER_WITHOUT_TICKS]
    with subprocess.Popen(code, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == "it serves\n"
            server.send_signal(number)
            assert server.wait(30) == 0
        finally:
            server.kill()


def test_a_load_begins_when_what_it_imports_is_there() -> None:
    """Else two threads may import one package, and one gets half of it: a start in some hundreds fails."""
    code = """import os, sys
from diskprefix.daemon import settings
from diskprefix.daemon.server.process import process
def load(*_):
    print({"tokenizers", "numpy", "jinja2"} - sys.modules.keys() or "all", flush=True)
    os._exit(0)
process.run(settings.Settings(port=0), load)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean_environment())
    assert said.stdout == "all\n"


def test_a_first_reply_imports_nothing_that_it_does_not_need(chat_model: Path, cache: Path) -> None:
    """Each takes as long as all that a server does for a request."""
    environment = clean_environment(PYTHONPROFILEIMPORTTIME="1")
    with DaemonProcess(*serve_flags(chat_model, cache), environment=environment, fresh=True) as daemon:
        ask(daemon, "hello")
        imported = {line.rpartition("|")[2].strip() for line in daemon.lines if line.startswith("import time:")}
    assert {"numpy", "pydantic"} <= imported
    assert not imported & {"anyio._backends._asyncio", "numpy.ma", "torch", "transformers"}
