"""The daemons of `diskprefix launch` and `run`: found, or started and shared until the last launch ends.

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
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from diskprefix.cli.tooling import say, status
from diskprefix.errors import DiskPrefixError, NotReady, SettingsError
from diskprefix.extras.daemon_call import running_daemon
from diskprefix.printable import shown
from diskprefix.server.process.listener import LAUNCHED_FD, listen
from diskprefix.server.process.token_file import token_for
from diskprefix.units import counted

SERVE = (sys.executable, "-P", "-m", "diskprefix", "serve")
"""Without -P, Python would run a `diskprefix` of the current folder."""
_POLL_S = 0.05
_PATIENCE_S = 10.0
_NOTE = "[launch]"
"""The beginning of lines that a launch writes into the daemon's log."""
STAYS = ("--idle-unload", "5m")
"""The flags of a daemon that stays when nobody uses it: it gives back the memory of its model."""
_MOST_DEATHS, _SETTLED_S = 3, 60.0
"""After so many deaths in a row, each within this time, the daemon is not started again."""


@contextmanager
def locked(file: Path, kind: int = fcntl.LOCK_EX) -> Iterator[int]:
    """Holds a lock on a file, which is made if it is missing, and yields its descriptor. Raises `BlockingIOError` for
    a `kind` with LOCK_NB if another process holds it."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    while True:
        fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, kind)
            # --clean may have removed it meanwhile.
            if file.exists() and os.path.samestat(os.fstat(fd), file.stat()):
                yield fd
                return
        finally:
            os.close(fd)


@dataclass(frozen=True, kw_only=True)
class LaunchedDaemon:
    """A daemon that launches share. `folder` has its files, that of the first one the profiles of agents too."""

    folder: Path
    _turn: threading.RLock = field(default_factory=threading.RLock, init=False, repr=False)
    _held: list[bool] = field(default_factory=list, init=False, repr=False)
    """Not empty while a thread of this process holds `mutex`."""

    @property
    def log(self) -> Path:
        return self.folder / "daemon.log"

    @contextmanager
    def mutex(self) -> Iterator[None]:
        """Lets one launch at a time look and change. A thread that holds it may take it again: an interrupt may come
        anywhere, and what it then cleans up takes it."""
        with self._turn, ExitStack() as stack:
            if not self._held:
                stack.enter_context(locked(self.folder / "lock"))
                self._held.append(True)
                stack.callback(self._held.clear)
            yield

    def url(self) -> str | None:
        """Returns the address of the daemon that a launch started, None if none lives."""
        file = self.folder / "daemon.json"
        if not file.exists():
            return None
        with suppress(BlockingIOError), locked(file, fcntl.LOCK_SH | fcntl.LOCK_NB):
            return None
        told = self._told()
        return f"http://127.0.0.1:{told['port']}" if told else None

    def _told(self) -> dict[str, Any]:
        """Returns what `daemon.json` says of the daemon, nothing if its start has just begun. Behind the first line
        there may be the end of a longer, older one. Raises `ValueError` if it is damaged."""
        line = (self.folder / "daemon.json").read_text(encoding="utf-8").partition("\n")[0]
        return dict(json.loads(line)) if line else {}

    def beside(self) -> Iterator[LaunchedDaemon]:
        """Yields this daemon and those that are started if the ones before are in use with another model. There is no
        last one."""
        yield self
        for number in count(2):
            yield LaunchedDaemon(folder=self.folder / f"daemon-{number}")

    def all(self) -> list[LaunchedDaemon]:
        """Returns those of `beside` that have files. The caller holds no `mutex` of theirs."""
        return [self, *(LaunchedDaemon(folder=folder) for folder in sorted(self.folder.glob("daemon-*")))]

    @contextmanager
    def used(self, port: int, flags: Sequence[str]) -> Iterator[DaemonKeeper]:
        """Yields the keeper of the daemon, which is started as by `start` if none lives. At the end the daemon ends,
        unless another launch uses it, or it stays (`STAYS`) and has served. Raises `NotReady` if it does not start. The
        caller holds `mutex` at the entry, and no more at the end."""
        keeper = DaemonKeeper(self)
        if self.url() is None:
            self.start(port, flags, keeper)
        else:
            keeper.begin(str(self.url()))
        try:
            with locked(self.folder / "daemon.users", fcntl.LOCK_SH):
                yield keeper
        finally:
            keeper.is_ending = True
            with self.mutex():
                is_left = (keeper.is_serving and set(STAYS) <= set(self.flags())) or self.end_unused()
            keeper.end(is_left=is_left)

    def flags(self) -> list[str]:
        """Returns the flags of the daemon, none if there is none."""
        return [] if self.url() is None else self._told().get("flags", [])

    def end_unused(self) -> bool:
        """Ends the daemon if no launch uses it, and waits for that. Returns whether it goes on. The caller holds
        `mutex`."""
        if self.url() is None:
            return False
        try:
            with locked(self.folder / "daemon.users", fcntl.LOCK_EX | fcntl.LOCK_NB):
                told = self._told()
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

    def start(self, port: int, flags: Sequence[str], keeper: DaemonKeeper) -> subprocess.Popen[bytes]:
        """Starts the daemon at `port`, or at another one if that is in use, and returns when it answers. Raises
        `NotReady` if it ends. The caller holds `mutex`."""
        listener = _listener(port)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        call = running_daemon(url, None)
        if self.log.exists():
            self.log.replace(self.log.with_name("daemon.log.1"))
        process = self.spawn(listener, flags)
        keeper.begin(url, listener, process)
        try:
            with status("starting the daemon …"):
                while process.poll() is None:
                    with suppress(NotReady):
                        call("GET", "/health", None)
                        return process
                    time.sleep(_POLL_S)
        except BaseException:
            process.terminate()
            keeper.end(is_left=False)
            raise
        keeper.end(is_left=False)
        raise NotReady(self.failure())

    def spawn(self, listener: socket.socket, flags: Sequence[str]) -> subprocess.Popen[bytes]:
        """Starts the process of a daemon on a socket that listens. The caller holds `mutex`."""
        port = listener.getsockname()[1]
        told = {"port": port, "flags": [*flags]}
        process: subprocess.Popen[bytes] | None = None
        try:
            with (
                locked(self.folder / "daemon.json") as fd,
                open(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log,
            ):
                # Each write is one call, because other launches read the file meanwhile.
                # First, so that others find a daemon whose launch was killed before it knew the process.
                os.pwrite(fd, f"{json.dumps(told)}\n".encode(), 0)
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
                os.pwrite(fd, f"{json.dumps(told | {'pid': process.pid})}\n".encode(), 0)
        except BaseException:
            if process is not None:
                process.terminate()
                process.wait()
            listener.close()
            raise
        return process

    def failure(self) -> str:
        """Returns why the daemon ended: the last line of its log, and where the others are."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        said = (line for line in reversed(lines) if line.strip() and not line.startswith(_NOTE))
        last = next(said, "it said nothing")
        return f"the daemon ended: {shown(last.removeprefix('error: '), 500)} (its log: {self.log})"


class DaemonKeeper:
    """Keeps a daemon running while its agent does: when it dies, it is started again on the same port.

    The launch that has started it holds the port, where connections wait meanwhile. If that launch has ended, another
    one takes the port anew.
    """

    def __init__(self, shared: LaunchedDaemon) -> None:
        self._shared = shared
        self.url = ""
        self._num_deaths = 0
        self._failure = ""
        self.is_serving = False
        """True once the model is loaded. A daemon that dies before is not started again: it would die again."""
        self.is_ending = False
        self._listener: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep, daemon=True)

    def begin(
        self, url: str, listener: socket.socket | None = None, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.url, self._listener, self._process = url, listener, process
        self._thread.start()

    def end(self, *, is_left: bool) -> None:
        """Gives the port back, and waits for the end of the daemon unless it `is_left` to other launches."""
        self.is_ending = True
        if not is_left:
            self._thread.join()
            if self._process is not None:
                self._process.wait()
        if self._listener is not None:
            self._listener.close()

    def _keep(self) -> None:
        in_a_row = 0
        while True:
            began_at = time.monotonic()
            # Until the daemon, which holds a lock on it, has died. --clean may have removed the folder then.
            with suppress(FileNotFoundError), locked(self._shared.folder / "daemon.json", fcntl.LOCK_SH):
                pass
            if self.is_ending or not self.is_serving:
                break
            self._num_deaths += 1
            in_a_row = 1 if time.monotonic() - began_at >= _SETTLED_S else in_a_row + 1
            if in_a_row > _MOST_DEATHS:
                self._failure = f"it is not started again; {self._shared.failure()}"
                break
            try:
                self._start_again()
            except (DiskPrefixError, OSError, ValueError) as error:
                self._failure = f"it cannot be started again: {error} (its log: {self._shared.log})"
                break
        if self._listener is not None:
            # Who waits there for an answer must not wait for ever.
            self._listener.close()

    def _start_again(self) -> None:
        """Starts the daemon, unless another launch does. Raises `DiskPrefixError` and `OSError`, and
        `ValueError` if `daemon.json` is damaged."""
        deadline = time.monotonic() + _PATIENCE_S
        if self._process is not None:
            self._process.wait()
        while True:
            with self._shared.mutex():
                if self.is_ending or self._shared.url() is not None:
                    return
                told = self._shared._told()
                try:
                    self._listener = self._listener or listen("127.0.0.1", told["port"], asks=False)[0]
                except SettingsError:
                    # The launch that holds the port will start it, or is just ending.
                    if time.monotonic() > deadline:
                        raise
                else:
                    self._process = self._shared.spawn(self._listener, told["flags"])
                    break
            time.sleep(_POLL_S)
        # Not on the terminal, which is the agent's.
        with suppress(OSError), self._shared.log.open("a", encoding="utf-8") as log:
            log.write(f"{_NOTE} the daemon at {self.url} has died and is started again\n")

    def say_deaths(self) -> None:
        """Says what happened to the daemon, unless it is well."""
        end = self._failure or f"it was started again each time (its log: {self._shared.log})"
        if self._num_deaths:
            say(f"the daemon at {self.url} died {counted(self._num_deaths, 'time')}; {end}")


def is_ours(url: str) -> bool:
    """Returns whether a daemon of this user listens at an address of this machine. Nothing is sent there."""
    return token_for(url) is not None


def _listener(usual: int) -> socket.socket:
    """Returns a socket that listens on the usual port if it is free, else on another."""
    for port in (usual, 0):
        with suppress(SettingsError):
            return listen("127.0.0.1", port, asks=False)[0]
    raise NotReady("this machine has no free port")
