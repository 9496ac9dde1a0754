"""Starts a real `diskprefix serve` process, and measures what a client of it sees."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from diskprefix.server.process.token_file import token_at
from tools.measuring.answers import Answer, LiveServerError, streamed
from tools.measuring.processes import free_port

START_DEADLINE_S = 900.0
"""Long, because the first start fetches and converts the embedded model."""
SAVE_DEADLINE_S = 120.0
ANSWER_DEADLINE_S = 600.0
POLL_S = 0.01


class _NewLines:
    """Calls `note` with the last line of a growing file when there is a new one."""

    def __init__(self, path: Path, note: Callable[[str], None]) -> None:
        self._path = path
        self._note = note
        self._position = path.stat().st_size

    def look(self) -> None:
        with self._path.open(encoding="utf-8", errors="replace") as file:
            file.seek(self._position)
            lines = file.read().splitlines()
            self._position = file.tell()
        if lines:
            self._note(lines[-1])


class LiveServer:
    """Starts, kills and restarts one server on one port and one cache folder. Its log goes to `log_path`.

    `module` is another program to start in place of `diskprefix`, `environment` has more variables for it.
    """

    def __init__(
        self,
        *,
        kv_cache_dir: Path,
        log_path: Path,
        flags: tuple[str, ...] = (),
        module: str = "diskprefix",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.kv_cache_dir = kv_cache_dir
        self.log_path = log_path
        self.port = free_port()
        self._environment = dict(environment or {})
        self._command = [sys.executable, "-m", module, "serve", "--port", str(self.port)]
        self._command += ["--kv-cache-dir", str(kv_cache_dir), *flags]
        self._process: subprocess.Popen[bytes] | None = None
        self._client = self._new_client()

    def _new_client(self) -> httpx.Client:
        timeout = httpx.Timeout(ANSWER_DEADLINE_S, connect=5.0)
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=timeout)

    @property
    def token(self) -> dict[str, str]:
        """The header of the daemon's owner, if it has no API keys."""
        token = token_at("127.0.0.1", self.port)
        return {"Authorization": f"Bearer {token}"} if token else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        self._client.close()

    def start(self, note: Callable[[str], None] = lambda _line: None) -> None:
        """Starts the process and waits until it is ready. Raises `LiveServerError`.

        `note` is called with the newest line of the server's log when there is a new one.
        """
        self.launch()
        lines = _NewLines(self.log_path, note)
        self._wait(lambda: self._is_ready(lines), START_DEADLINE_S, "the server did not become ready")

    def launch(self) -> None:
        """Starts the process and waits for nothing."""
        # Settings of the person who runs this must not change what is shown.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DISKPREFIX_")}
        environment |= self._environment
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
            )

    def recover(self, ask: Callable[[], Answer], *, standby: bool = False) -> tuple[float, Answer]:
        """Sends SIGKILL to the process that serves, and asks as soon as the port takes connections. Returns the seconds
        from the kill to the first token. Raises `LiveServerError`.

        With `standby`, of a server with `--standby`, the spare takes over once it is ready. Otherwise the process is
        started again at once, as systemd does with `RestartSec=0`.
        """
        if standby:
            self._wait(self._has_spare, START_DEADLINE_S, "no spare is ready")
            worker = self._workers()[-1]
            started = time.perf_counter()
            os.kill(worker, signal.SIGKILL)
            # Its connections are gone.
            self._client.close()
            self._client = self._new_client()
        else:
            started = time.perf_counter()
            self.kill()
            self.launch()
        self._wait(self.listens, START_DEADLINE_S, "the server does not listen")
        asked = time.perf_counter()
        answer = ask()
        return asked - started + answer.ttft_s, answer

    def kill(self) -> None:
        """Sends SIGKILL and waits until the process is gone, so that it cannot save anything more."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None
            # A worker ends a moment after its front.
            self._wait(lambda: not self.listens(), SAVE_DEADLINE_S, "the killed server still listens")

    def stop(self, deadline_s: float) -> tuple[float, int | None]:
        """Sends SIGTERM. Returns the seconds until the process ended, and its exit code.

        After `deadline_s` it is killed, and the code is None.
        """
        assert self._process is not None
        started, code = time.perf_counter(), None
        self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(deadline_s)
        seconds = time.perf_counter() - started
        self.kill()
        return seconds, code

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def process_id(self) -> int:
        """The process id of the running server."""
        assert self._process is not None
        return self._process.pid

    def restart(self) -> None:
        """Waits until all is on disk, kills, starts. Raises `LiveServerError`."""
        self.wait_until_saved()
        self.kill()
        self.start()

    def wait_until_saved(self) -> None:
        """Waits until all is on disk. Raises `LiveServerError`."""
        self._wait(lambda: self._pending_bytes() == 0, SAVE_DEADLINE_S, "the cache was not saved")

    def _pending_bytes(self) -> int:
        return int(self.props()["full_cache"]["state"]["pending_bytes"])

    def props(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._client.get("/props", headers=self.token).raise_for_status().json()
        return answer

    def chat(self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int, scope: str | None = None) -> Answer:
        asked = {} if scope is None else {"prefix_cache": {"scope": scope}}
        return streamed(self._client, "/v1/chat/completions", asked | {"messages": messages}, max_tokens)

    def _workers(self) -> list[int]:
        """Returns the processes that have served, or will: the last one is there now."""
        log = self.log_path.read_text(encoding="utf-8", errors="replace")
        return [int(number) for number in re.findall(r"process (\d+) is for", log)]

    def _has_spare(self) -> bool:
        """Returns whether the spare is ready, and the worker."""
        log = self.log_path.read_text(encoding="utf-8", errors="replace")
        return "a spare is ready" in log and log.count("diskprefix ready on") == len(self._workers())

    def listens(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
            return True
        return False

    def _is_ready(self, lines: _NewLines) -> bool:
        lines.look()
        if self._process is None or self._process.poll() is not None:
            raise LiveServerError("the server stopped while it was starting")
        try:
            return self._client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def _wait(self, condition: Callable[[], bool], deadline_s: float, failure: str) -> None:
        deadline = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() > deadline:
                raise LiveServerError(f"{failure} within {deadline_s:.0f} seconds")
            time.sleep(POLL_S)


def time_import_torch_s() -> float:
    """Returns how long a new Python takes to import torch: the measure of a start."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - started


def num_tracebacks(log_path: Path) -> int:
    return log_path.read_text(encoding="utf-8", errors="replace").count("Traceback (most recent call last):")


def log_tail(log_path: Path, num_lines: int = 20) -> str:
    if not log_path.exists():
        return ""
    return "\n".join(log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])


@contextmanager
def step(console: Console, title: str) -> Iterator[Callable[[str], None]]:
    """Shows that `title` is running and for how long, then prints its duration.

    Gives a function that shows one line with a detail.
    """
    started = time.perf_counter()
    if console.is_terminal:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description} …"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=console, transient=True, refresh_per_second=4) as progress:
            task = progress.add_task(title, note="")
            yield lambda line: progress.update(task, note=f"[dim]{escape(line)}[/dim]")
    else:
        console.print(f"  {title} …", highlight=False, soft_wrap=True)
        yield lambda line: console.print(f"    {line}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"  {title}: {time.perf_counter() - started:.1f} s", highlight=False, soft_wrap=True)
