"""Starts a real `diskprefix serve` process, and measures what a client of it sees."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from diskprefix.daemon.server.process.token_file import token_at
from tools.measuring.answers import Answer, LiveServerError, streamed
from tools.measuring.processes import free_port

START_DEADLINE_S = 900.0
"""Long, because the first start fetches and converts the embedded model."""
SAVE_DEADLINE_S = 120.0
ANSWER_DEADLINE_S = 600.0
POLL_S = 0.01
ROOT = str(Path(__file__).parents[2])


class _NewLines:
    """Calls `note` with the last line of a growing file when there is a new one."""

    def __init__(self, path: Path, note: Callable[[str], None]) -> None:
        self._path = path
        self._note = note
        self._position = path.stat().st_size if path.exists() else 0

    def look(self) -> None:
        with self._path.open(encoding="utf-8", errors="replace") as file:
            file.seek(self._position)
            lines = file.read().splitlines()
            self._position = file.tell()
        if lines:
            self._note(lines[-1])


@dataclass
class Process:
    """One process and its children, with a log."""

    command: Sequence[str]
    log_path: Path
    environment: dict[str, str] = field(default_factory=dict)
    popen: subprocess.Popen[str] | None = None

    def start(self, *, piped: bool = False) -> None:
        pipe = subprocess.PIPE if piped else None
        # Settings of the user and work in pauses would change the figures, and there is no model hub.
        own = ("DISKPREFIX_", "PYTHON", "OMP_", "VLLM_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        with self.log_path.open("a", encoding="utf-8") as log:
            self.popen = subprocess.Popen(
                self.command,
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or log,
                stderr=log,
                text=True,
                env=inherited | {"HF_HUB_OFFLINE": "1", "DISKPREFIX_AHEAD": "off"} | self.environment,
                start_new_session=True,
            )

    def end(self) -> None:
        """Sends SIGKILL and waits for nothing: for a thread beside the one that waits for an answer."""
        pids = self.pids()
        # The workers of a killed router would save what they have, and a router would start killed ones again.
        for pid in sorted(pids, key=lambda pid: self.popen is None or pid != self.popen.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill(self) -> None:
        if self.popen is not None:
            with self.popen:
                self.end()
            self.popen = None

    def check(self) -> None:
        """Raises `LiveServerError` if it has ended."""
        if self.popen is None or self.popen.poll() is not None:
            lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
            last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
            code = self.popen.returncode if self.popen is not None else 0
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else "ended"
            raise LiveServerError(f"{Path(self.command[0]).name} {how}; the last line of its log: {last[:300]}")

    def pids(self) -> list[int]:
        """Returns all processes of its session; none before the start."""
        session = None if self.popen is None else self.popen.pid
        pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
        return [pid for pid in pids if session is not None and _session_of(pid) == session]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def started(
    process: Process, client: httpx.Client, deadline_s: float, look: Callable[[], None] = lambda: None
) -> float:
    """Starts a server. Returns the seconds until it said at `/health` that it is ready. Raises `LiveServerError`.
    `look` is called meanwhile."""
    began = time.perf_counter()
    process.start()
    while not _is_ready(client):
        look()
        process.check()
        if time.perf_counter() - began > deadline_s:
            raise LiveServerError(f"not ready after {deadline_s:.0f} s")
        time.sleep(POLL_S)
    return time.perf_counter() - began


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


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
        command = [sys.executable, "-m", module, "serve", "--port", str(self.port)]
        command += ["--kv-cache-dir", str(kv_cache_dir), *flags]
        self._process = Process(command, log_path, {"PYTHONPATH": ROOT, **(environment or {})})
        timeout = httpx.Timeout(ANSWER_DEADLINE_S, connect=5.0)
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=timeout)

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
        started(self._process, self._client, START_DEADLINE_S, _NewLines(self.log_path, note).look)

    def recover(self, ask: Callable[[], Answer]) -> tuple[float, Answer]:
        """Sends SIGKILL to the process, starts it again at once, as systemd does with `RestartSec=0`, and asks as soon
        as the port takes connections. Returns the seconds from the kill to the first token. Raises `LiveServerError`.
        """
        began = time.perf_counter()
        self.kill()
        self._process.start()
        self._wait(self.listens, START_DEADLINE_S, "the server does not listen")
        asked = time.perf_counter()
        answer = ask()
        return asked - began + answer.ttft_s, answer

    def kill(self) -> None:
        """Sends SIGKILL and waits until the process is gone, so that it cannot save anything more."""
        if self._process.popen is not None:
            self._process.kill()
            self._wait(lambda: not self.listens(), SAVE_DEADLINE_S, "the killed server still listens")

    def stop(self, deadline_s: float) -> tuple[float, int | None]:
        """Sends SIGTERM. Returns the seconds until the process ended, and its exit code.

        After `deadline_s` it is killed, and the code is None.
        """
        assert self._process.popen is not None
        began, code = time.perf_counter(), None
        self._process.popen.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            code = self._process.popen.wait(deadline_s)
        seconds = time.perf_counter() - began
        self.kill()
        return seconds, code

    def exit_code(self, deadline_s: float) -> int | None:
        """Waits for the end of the process, which was told to end. After `deadline_s` it is killed: returns None."""
        assert self._process.popen is not None
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = self._process.popen.wait(deadline_s)
        self.kill()
        return code

    @property
    def is_running(self) -> bool:
        return self._process.popen is not None and self._process.popen.poll() is None

    @property
    def process_id(self) -> int:
        """The process id of the running server."""
        assert self._process.popen is not None
        return self._process.popen.pid

    def restart(self) -> None:
        """Waits until all is on disk, kills, starts. Raises `LiveServerError`."""
        self.wait_until_saved()
        self.kill()
        self.start()

    def wait_until_saved(self, model: str | None = None) -> None:
        """Waits until all is on disk, with a router of one `model`. Raises `LiveServerError`."""

        def is_saved() -> bool:
            return int(self.props(model)["full_cache"]["state"]["pending_bytes"]) == 0

        self._wait(is_saved, SAVE_DEADLINE_S, "the cache was not saved")

    def props(self, model: str | None = None) -> dict[str, Any]:
        """Returns the properties of the daemon, or of one `model` behind its router. Raises `httpx.HTTPError`."""
        params = {} if model is None else {"model": model}
        answer: dict[str, Any] = self._client.get("/props", params=params, headers=self.token).raise_for_status().json()
        return answer

    def chat(self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int, scope: str | None = None) -> Answer:
        asked = {} if scope is None else {"prefix_cache": {"scope": scope}}
        return streamed(self._client, "/v1/chat/completions", asked | {"messages": messages}, max_tokens)

    def listens(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
            return True
        return False

    def _wait(self, condition: Callable[[], bool], deadline_s: float, failure: str) -> None:
        deadline = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() > deadline:
                raise LiveServerError(f"{failure} within {deadline_s:.0f} seconds")
            time.sleep(POLL_S)


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
