"""`diskprefix serve` as a process of its own on a free port, and waiting for what it says."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from diskprefix.daemon.server.process.listener import listen
from diskprefix.daemon.server.process.token_file import token_at
from tests.forked import ForkedCommand
from tests.runtimes import RUNTIME

START_TIMEOUT_S = 120.0
CHAT = "/v1/chat/completions"
_LISTENING = re.compile(r"listening on (http://\S+);")


def clean_environment(**changes: str) -> dict[str, str]:
    """This process's environment without its DISKPREFIX_ variables, nor what a daemon in this process has set. Nothing
    is computed ahead, and the runtime is the tests'.

    A tiny model gains nothing from a second thread, and on a busy machine threads that wait for each other stand still.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DISKPREFIX_", "GOMP_"))}
    usual = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "default", "OMP_NUM_THREADS": "1", "DISKPREFIX_AHEAD": "off"}
    usual["DISKPREFIX_RUNTIME"] = RUNTIME
    return kept | usual | changes


def free_port() -> int:
    """Returns a port of the loopback addresses at which nothing listens."""
    (listener,) = listen("127.0.0.1", 0)
    with listener:
        port: int = listener.getsockname()[1]
        return port


class DaemonProcess:
    """A started daemon. `url` is known once it listens; `wait_ready` returns when the model is loaded.

    `fresh`: in a new interpreter, as a user starts it. Otherwise in a fork of a process that has done the imports,
    which saves some seconds. `module` is another program to start instead of `diskprefix`.
    """

    def __init__(
        self,
        *flags: str,
        environment: dict[str, str] | None = None,
        fresh: bool = False,
        module: str = "diskprefix",
    ) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        arguments = ["serve", "--port", "0", *flags]
        self.process: subprocess.Popen[str] | ForkedCommand
        environment = environment or clean_environment()
        if fresh:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
        else:
            self.process = ForkedCommand(arguments, environment, module)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for_line(self, pattern: str, timeout_s: float = START_TIMEOUT_S) -> re.Match[str]:
        """The first match of `pattern` in what the daemon logged, waiting for it if need be."""
        expression = re.compile(pattern)

        def matching_line() -> re.Match[str] | None:
            return next((match for line in self.lines if (match := expression.search(line))), None)

        with self._changed:
            self._changed.wait_for(lambda: matching_line() or self._ended, timeout_s)
            match = matching_line()
        assert match is not None, f"no line like {pattern!r} in:\n" + "\n".join(self.lines)
        return match

    @property
    def url(self) -> str:
        return self.wait_for_line(_LISTENING.pattern)[1]

    def wait_ready(self) -> DaemonProcess:
        self.wait_for_line(r"diskprefix ready on ")
        return self

    @cached_property
    def token(self) -> str:
        """The token of a daemon without keys, "" of one with keys. The daemon must live when this is first read."""
        port = int(self.url.rpartition(":")[2])
        wait_until(lambda: token_at("127.0.0.1", port) is not None, "the file with the token is there")
        return token_at("127.0.0.1", port) or ""

    def client(self, api_key: str | None = None) -> httpx.Client:
        shown = api_key or self.token
        headers = {"Authorization": f"Bearer {shown}"} if shown else {}
        return httpx.Client(base_url=self.url, timeout=60, headers=headers)

    def wait_saved(self, api_key: str | None = None) -> None:
        """Returns when nothing waits to be written: what was answered until now survives SIGKILL."""
        with self.client(api_key) as client:
            wait_until(lambda: not any(state["pending_bytes"] for state in cache_states(client)), "all is saved")

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 60) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def __enter__(self) -> DaemonProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        self._reader.join(30)
        # To close it would wait for who reads it.
        assert not self._reader.is_alive(), "a process that it started outlives it"
        if self.process.stderr is not None:
            self.process.stderr.close()


def serve_flags(model: Path, cache: Path, **changes: Any) -> list[str]:
    """Flags for a tiny model: small blocks, and prompts of any length are saved."""
    values = {
        "model": model,
        "kv_cache_dir": cache,
        "block_size": 16,
        "kv_cache_min_tokens": 16,
        "kv_cache_budget": "64MiB",
        # It computes faster than it restores.
        "kv_cache_gate": "off",
        "disk_prefix_cache": "full",
        "device": "cpu",
    } | changes
    return [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@contextmanager
def running_daemon(model: Path, cache: Path, **changes: Any) -> Iterator[DaemonProcess]:
    with DaemonProcess(*serve_flags(model, cache, **changes)) as daemon:
        yield daemon.wait_ready()


def command(name: str, folder: Path, *arguments: str) -> Any:
    """What a `diskprefix` command about a cache folder says with --json. It must succeed."""
    said = [sys.executable, "-m", "diskprefix", name, *arguments, "--kv-cache-dir", str(folder), "--json"]
    return json.loads(subprocess.run(said, capture_output=True, env=clean_environment(), check=True).stdout)


def cache_states(client: httpx.Client) -> list[dict[str, Any]]:
    """The state of the cache, for each loaded model."""
    props = client.get("/props").json()
    if "models" in props:
        loaded = [place["model"] for place in props["models"] if place["phase"] == "ready"]
        models = [client.get("/props", params={"model": name}).json() for name in loaded]
    else:
        models = [props]
    return [model["full_cache"]["state"] for model in models]


def reply_to(client: httpx.Client, body: dict[str, Any], path: str = CHAT, **cache: Any) -> dict[str, Any]:
    """The reply to a request, which must succeed. `cache` are the fields of `prefix_cache`."""
    answer = client.post(path, json=body | ({"prefix_cache": cache} if cache else {}))
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def family(pid: int) -> Iterator[int]:
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from family(int(child))


def ask(
    daemon: DaemonProcess, question: str, scope: str = "full", *, salt: str | None = None, key: str | None = None
) -> dict[str, Any]:
    """The reply of a few tokens to a question of many blocks."""
    body = {"messages": [{"role": "user", "content": question * 6}], "max_tokens": 6, "temperature": 0}
    with daemon.client(key) as client:
        return reply_to(client, body, scope=scope, salt=salt)


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


@contextmanager
def running_as(kind: str, model: Path, cache: Path, **changes: str) -> Iterator[DaemonProcess]:
    """A daemon whose model is loaded: "alone" or "behind a router"."""
    more = {"idle_unload": "1h"} if kind == "behind a router" else {}
    with DaemonProcess(*serve_flags(model, cache, **more, **changes)) as process:
        if not more:
            process.wait_ready()
        with process.client() as client:
            client.get("/v1/models").raise_for_status()
        yield process.wait_ready()


def props(client: httpx.Client) -> Any:
    return client.get("/props").json()


def open_raw(
    port: int, body: dict[str, Any] | None = None, *, announced_bytes: int | None = None, **headers: str
) -> socket.socket:
    """A chat request on a bare socket that the test can close when it likes. With `announced_bytes` the body never
    ends. The system takes little that is not read from the socket."""
    payload = b"" if body is None else json.dumps(body).encode()
    sent = {"Host": "localhost", "Content-Type": "application/json"} | headers
    sent["Content-Length"] = str(announced_bytes or len(payload))
    connection = socket.socket()
    connection.settimeout(30)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    lines = [f"POST {CHAT} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items()), "", ""]
    connection.sendall("\r\n".join(lines).encode() + payload)
    return connection


def wait_until(condition: Any, what: str, timeout_s: float = 30) -> Any:
    """The first true value of `condition()`; fails with `what` at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        threading.Event().wait(0.01)
    return value
