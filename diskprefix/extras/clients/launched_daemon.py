"""The daemon of `diskprefix launch`: found, or started and shared by launches until the last one ends.

A daemon that a launch started holds a lock on `daemon.json` as long as it lives, and each launch that uses it holds a
shared lock on `daemon.users`. So it is known without process numbers whether it lives and whether it is in use, also
after a launch was killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from diskprefix.cli.tooling import status
from diskprefix.errors import NotReady, SettingsError
from diskprefix.extras.daemon_call import running_daemon
from diskprefix.printable import shown
from diskprefix.server.process.listener import LAUNCHED_FD, listen
from diskprefix.server.process.token_file import token_at

SERVE = (sys.executable, "-P", "-m", "diskprefix", "serve")
"""Without -P, Python would run a `diskprefix` of the current folder."""
_POLL_S = 0.05


@contextmanager
def locked(file: Path, kind: int = fcntl.LOCK_EX) -> Iterator[int]:
    """Holds a lock on a file, which is made if it is missing, and yields its descriptor. Raises `BlockingIOError` for
    a `kind` with LOCK_NB if another process holds it."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    while True:
        fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, kind)
            # --restore may have removed it meanwhile.
            if file.exists() and os.path.samestat(os.fstat(fd), file.stat()):
                yield fd
                return
        finally:
            os.close(fd)


@dataclass(frozen=True, kw_only=True)
class LaunchedDaemon:
    """The daemon that launches share. `folder` has its files, and the profiles of agents."""

    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / "daemon.log"

    @contextmanager
    def mutex(self) -> Iterator[None]:
        """Lets one launch at a time look and change."""
        with locked(self.folder / "lock"):
            yield

    def url(self) -> str | None:
        """Returns the address of the daemon that a launch started, None if none lives."""
        file = self.folder / "daemon.json"
        if not file.exists():
            return None
        with suppress(BlockingIOError), locked(file, fcntl.LOCK_SH | fcntl.LOCK_NB):
            return None
        # Empty while it is being started.
        text = file.read_text(encoding="utf-8")
        return f"http://127.0.0.1:{json.loads(text)['port']}" if text else None

    @contextmanager
    def used(self, port: int, flags: Sequence[str]) -> Iterator[str]:
        """Yields the address of the daemon, which is started as by `start` if none lives. At the end the daemon ends,
        unless another launch uses it. Raises `NotReady` if it does not start. The caller holds `mutex` at the entry,
        and no more at the end."""
        process = self.start(port, flags) if self.url() is None else None
        try:
            with locked(self.folder / "daemon.users", fcntl.LOCK_SH):
                yield str(self.url())
        finally:
            with self.mutex():
                is_left = self.end_unused()
            if process is not None and not is_left:
                process.wait()

    def end_unused(self) -> bool:
        """Ends the daemon if no launch uses it, and waits for that. Returns whether it goes on. The caller holds
        `mutex`."""
        if self.url() is None:
            return False
        try:
            with locked(self.folder / "daemon.users", fcntl.LOCK_EX | fcntl.LOCK_NB):
                told = json.loads((self.folder / "daemon.json").read_text(encoding="utf-8"))
                if "pid" not in told:
                    # Its launch was killed in the middle of the start.
                    return True
                # It may have died just now.
                with suppress(ProcessLookupError):
                    os.kill(told["pid"], signal.SIGTERM)
                with status("the daemon saves what only memory holds …"), locked(self.folder / "daemon.json"):
                    return False
        except BlockingIOError:
            return True

    def start(self, port: int, flags: Sequence[str]) -> subprocess.Popen[bytes]:
        """Starts the daemon at `port`, or at another one if that is in use, and returns when it answers. Raises
        `NotReady` if it ends. The caller holds `mutex`."""
        if self.log.exists():
            self.log.replace(self.log.with_name("daemon.log.1"))
        with _listener(port) as listener:
            call = running_daemon(f"http://127.0.0.1:{listener.getsockname()[1]}", None)
            process = self._spawn(listener, flags)
        try:
            with status("starting the daemon …"):
                while process.poll() is None:
                    with suppress(NotReady):
                        call("GET", "/health", None)
                        return process
                    time.sleep(_POLL_S)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        raise NotReady(self.failure())

    def _spawn(self, listener: socket.socket, flags: Sequence[str]) -> subprocess.Popen[bytes]:
        """Starts the process of a daemon on a socket that listens."""
        port = listener.getsockname()[1]
        process: subprocess.Popen[bytes] | None = None
        try:
            with (
                locked(self.folder / "daemon.json") as fd,
                open(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log,
            ):
                os.ftruncate(fd, 0)
                # First, so that others find a daemon whose launch was killed before it knew the process.
                os.pwrite(fd, json.dumps({"port": port}).encode(), 0)
                # Of another session, so that ^C in the terminal is for the agent only. It inherits the lock.
                process = subprocess.Popen(
                    [*SERVE, "--host", "127.0.0.1", "--port", str(port), *flags],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=os.environ | {LAUNCHED_FD: str(listener.fileno())},
                    pass_fds=[fd, listener.fileno()],
                    start_new_session=True,
                )
                os.pwrite(fd, json.dumps({"port": port, "pid": process.pid}).encode(), 0)
        except BaseException:
            if process is not None:
                process.terminate()
                process.wait()
            raise
        return process

    def failure(self) -> str:
        """Returns why the daemon ended: the last line of its log, and where the others are."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
        return f"the daemon ended: {shown(last.removeprefix('error: '), 500)} (its log: {self.log})"


def is_ours(url: str) -> bool:
    """Returns whether a daemon of this user listens at an address of this machine. Nothing is sent there."""
    parts = urlsplit(url)
    return token_at(parts.hostname or "", parts.port or 0) is not None


def _listener(usual: int) -> socket.socket:
    """Returns a socket that listens on the usual port if it is free, else on another."""
    for port in (usual, 0):
        with suppress(SettingsError):
            return listen("127.0.0.1", port)[0]
    raise NotReady("this machine has no free port")
