"""The daemons that `diskprefix launch` and `run` start and share.

A daemon holds a lock on `daemon.json`, and each launch that uses it holds a shared lock on `daemon.users`. So the locks
tell whether the daemon runs and whether it is in use, even after a launch was killed. The daemon has a router, which
starts the process of a model again when that dies.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from msgspec import Struct

from diskprefix.daemon.server.process.router_line import STOPPED
from diskprefix.daemon.server.process.token_file import UNPUBLISHED, daemon_at
from diskprefix.desk.shared.daemon_call import running_daemon
from diskprefix.desk.shared.tooling import say, status
from diskprefix.errors import NotReady
from diskprefix.printable import shown
from diskprefix.private_file import make_private_folder

SERVE = (sys.executable, "-P", "-m", "diskprefix", "serve")
"""Without -P, Python would run a `diskprefix` of the current folder."""
_POLL_S, _PATIENCE_S = 0.05, 5.0
_STOP_S = 120.0
"""Longer than a daemon takes to end. One that is suspended does not end."""
_REASON_S = 60.0
"""An error that is older than this at the last line of the log is not why the daemon ended."""
_DEATH = b"[router] the worker of"
"""The beginning of what a router logs when the process of a model dies."""
_LOGGED = r"^[\d-]+ [\d:,]+ "
"""The beginning of a line of the log, before its level."""
_TIME = re.compile(r"^([\d-]+ [\d:]+),\d+ ", re.MULTILINE)
_ERROR = re.compile(r"^(?:error:|([\d-]+ [\d:]+),\d+ (?:ERROR|CRITICAL)) (.+)", re.MULTILINE)
_LAST = re.compile(rf"^(?!{_LOGGED}).+\Z", re.MULTILINE)
_NUMBERED = re.compile(r"daemon-\d+")
"""The folder of a daemon beside the first one."""
STAYS = ("--idle-unload", "5m")
"""The flags of a daemon that stays when nobody uses it. It then unloads its model."""


@contextmanager
def locked(file: Path, kind: int = fcntl.LOCK_EX) -> Iterator[int]:
    """Holds a lock on a file, which is created if it is missing, and yields its descriptor. Raises `BlockingIOError`
    if `kind` has LOCK_NB and another process holds the lock."""
    make_private_folder(file.parent)
    while True:
        fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, kind)
            # --clean may have removed the file meanwhile.
            if file.exists() and os.path.samestat(os.fstat(fd), file.stat()):
                yield fd
                return
        finally:
            os.close(fd)


@dataclass(frozen=True, kw_only=True)
class LaunchedDaemon:
    """A daemon that launches share. `folder` has its files; the first daemon's folder has the agents' profiles, too.
    `logs` is the folder of the logs of all of them."""

    folder: Path
    logs: Path
    _turn: threading.RLock = field(default_factory=threading.RLock, init=False, repr=False)
    _held: list[bool] = field(default_factory=list, init=False, repr=False)
    """Not empty while this process holds the lock of `mutex`."""

    @property
    def log(self) -> Path:
        number = self.folder.name if _NUMBERED.fullmatch(self.folder.name) else "daemon"
        return self.logs / f"{number}.log"

    def remove_logs(self) -> None:
        for log in (self.log, self.log.with_name(f"{self.log.name}.1")):
            log.unlink(missing_ok=True)

    @contextmanager
    def mutex(self) -> Iterator[None]:
        """Excludes other launches. A thread may take it again, because the clean-up after an interrupt takes it."""
        with self._turn, ExitStack() as stack:
            if not self._held:
                stack.enter_context(locked(self.folder / "lock"))
                self._held.append(True)
                stack.callback(self._held.clear)
            yield

    def url(self) -> str | None:
        """Returns the address of the running daemon, or None."""
        file = self.folder / "daemon.json"
        if not file.exists():
            return None
        with suppress(BlockingIOError), locked(file, fcntl.LOCK_SH | fcntl.LOCK_NB):
            return None
        state = self._state()
        return f"http://127.0.0.1:{state['port']}" if state else None

    def is_listening(self) -> bool:
        """Returns whether the daemon itself has its port. While it starts or ends, another user's program may listen
        there, read an agent's requests, and answer them."""
        state = self._state() if self.url() is not None else {}
        daemon = daemon_at("127.0.0.1", state["port"]) if state else None
        # The launch may have been killed before it wrote the process.
        return daemon is not None and daemon[0] == state.get("pid", daemon[0])

    def _state(self) -> dict[str, Any]:
        """Returns the first line of `daemon.json`, or an empty dict if the start has just begun. After that line there
        may be the rest of an older, longer line. Raises `ValueError` if the file is damaged."""
        line = (self.folder / "daemon.json").read_text(encoding="utf-8").partition("\n")[0]
        return dict(json.loads(line)) if line else {}

    def candidates(self) -> Iterator[LaunchedDaemon]:
        """Yields this daemon, then more without end: each is for when all before it are in use with other models."""
        yield self
        for number in count(2):
            yield LaunchedDaemon(folder=self.folder / f"daemon-{number}", logs=self.logs)

    def all(self) -> list[LaunchedDaemon]:
        """Returns the candidates that have files. The caller holds no `mutex` of theirs."""
        folders = sorted(self.folder.glob("daemon-*"))
        return [self, *(LaunchedDaemon(folder=folder, logs=self.logs) for folder in folders)]

    @contextmanager
    def use(self, port: int, flags: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[DaemonUse]:
        """Starts the daemon as by `start` if it does not run, and yields its use. When the context ends, the daemon
        ends, unless another launch uses it, or it has `STAYS` and has served. Raises `NotReady` if it does not start.
        The caller holds `mutex` when it enters, and not when it leaves."""
        process = self.start(port, flags, environment) if self.url() is None else None
        use = DaemonUse(url=str(self.url()))
        try:
            with locked(self.folder / "daemon.users", fcntl.LOCK_SH):
                yield use
        finally:
            with self.mutex():
                goes_on = (use.goes_on and set(STAYS) <= set(self.flags())) or self.end_unused()
            if process is not None and not goes_on:
                process.wait()

    def flags(self) -> list[str]:
        """Returns the flags of the daemon, none if it does not run."""
        return [] if self.url() is None else self._state().get("flags", [])

    def is_used(self) -> bool:
        """Returns whether a launch uses the daemon."""
        with suppress(BlockingIOError), locked(self.folder / "daemon.users", fcntl.LOCK_EX | fcntl.LOCK_NB):
            return False
        return True

    def end_unused(self) -> bool:
        """Ends the daemon if no launch uses it, and waits for its end, but for no daemon that is suspended. Returns
        whether it still runs. The caller holds `mutex`."""
        if self.url() is None:
            return False
        try:
            with locked(self.folder / "daemon.users", fcntl.LOCK_EX | fcntl.LOCK_NB):
                state = self._state()
                if "pid" not in state:
                    # Its launch was killed during the start.
                    return True
                with suppress(ProcessLookupError):
                    os.kill(state["pid"], signal.SIGTERM)
                with status("the daemon is saving what is only in memory …"):
                    has_ended = self.has_ended(_STOP_S)
                if not has_ended:
                    say(f"the daemon did not end within {_STOP_S:.0f} s: see process {state['pid']} and {self.log}")
                return not has_ended
        except BlockingIOError:
            return True

    def start(
        self, usual_port: int, flags: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts the daemon at the usual port, or at a free one if that is in use. Returns when this daemon answers,
        not another program that took the port first. An `environment` of None means this process's environment. Raises
        `NotReady` if it ends before. The caller holds `mutex`."""
        port = _free_port(usual_port)
        call = running_daemon(f"http://127.0.0.1:{port}", None)
        make_private_folder(self.logs)
        if self.log.exists():
            self.log.replace(self.log.with_name(f"{self.log.name}.1"))
        state = {"port": port, "flags": [*flags]}
        process: subprocess.Popen[bytes] | None = None
        try:
            with (
                locked(self.folder / "daemon.json") as fd,
                open(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log,
            ):
                # One call for each write, because other launches read the file meanwhile. The first write is before
                # the start, so that they find a daemon whose launch was killed before the second.
                os.pwrite(fd, f"{json.dumps(state)}\n".encode(), 0)
                # In a new session, so that ^C in the terminal reaches only the agent. It inherits the lock.
                process = subprocess.Popen(
                    [*SERVE, "--router", "--host", "127.0.0.1", "--port", str(port), *flags],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    pass_fds=[fd],
                    start_new_session=True,
                )
                os.pwrite(fd, f"{json.dumps(state | {'pid': process.pid})}\n".encode(), 0)
            with status("starting the daemon …"):
                while process.poll() is None:
                    if self.is_listening():
                        with suppress(NotReady):
                            call("GET", "/health", None)
                            return process
                    if UNPUBLISHED.encode() in self.log.read_bytes():
                        raise NotReady(f"the daemon cannot be told from another user's: see its log, {self.log}")
                    time.sleep(_POLL_S)
        except BaseException:
            if process is not None:
                process.terminate()
                process.wait()
            raise
        raise NotReady(self.failure())

    def has_ended(self, limit_s: float | None = None) -> bool:
        """Waits some seconds, or `limit_s`, for the end of a daemon that does not serve. Returns whether it has
        ended."""
        deadline = time.monotonic() + (_PATIENCE_S if limit_s is None else limit_s)
        while self.url() is not None:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def failure(self) -> str:
        """Returns why the daemon ended: it was stopped, or the last error at the end of its log, or else the last line
        if that is not of the log, as at the end of a traceback."""
        text = self.log.read_text(encoding="utf-8", errors="replace").rstrip()
        ended_at = max(map(_seconds, _TIME.findall(text)), default=0.0)
        errors = [error for at, error in _ERROR.findall(text) if not at or ended_at - _seconds(at) <= _REASON_S]
        errors = errors or _LAST.findall(text)
        how = f"ended: {shown(errors[-1], 500)}" if errors else "ended without an error, as if killed"
        was_stopped = any(line.endswith(f" INFO {STOPPED}") for line in text.splitlines())
        return f"the daemon {'was stopped' if was_stopped else how} (its log: {self.log})"

    def say_end(self, seen_bytes: int, *, names_log: bool) -> None:
        """Says how often the model's process has died since the log had `seen_bytes`, or why the daemon has ended. With
        `names_log`, says where the log is in any case."""
        # --clean removes the log of a daemon that has ended.
        with suppress(FileNotFoundError):
            if (url := self.url()) is None:
                say(self.failure())
            elif num_deaths := self.log.read_bytes()[seen_bytes:].count(_DEATH):
                died = "died once" if num_deaths == 1 else f"died {num_deaths} times"
                say(f"the model at {url} {died} and was restarted (its log: {self.log})")
            elif names_log:
                say(f"the daemon's log: {self.log}")


def _seconds(time_of_line: str) -> float:
    return time.mktime(time.strptime(time_of_line, "%Y-%m-%d %H:%M:%S"))


class DaemonUse(Struct):
    """The use of a daemon by one launch."""

    url: str
    goes_on: bool = False
    """Whether a daemon with `STAYS` goes on when the use ends: it has answered."""


def _free_port(usual: int) -> int:
    """Returns the usual port if it is free, else another one."""
    for port in (usual, 0):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)) as probe:
            return int(probe.getsockname()[1])
    raise NotReady("this machine has no free port")
