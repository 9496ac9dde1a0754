"""A small process that forks the workers, so that they have nothing of the front's memory.

The front sends it orders over a socket. With `--standby` one of its children is a *spare*: a nursery that has imported
everything, whose workers begin with that. Both end when the front does. This module imports neither torch nor the
server.
"""

from __future__ import annotations

import os
import pickle
import selectors
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from diskprefix.errors import DiskPrefixError
from diskprefix.server.keys import OwnerToken
from diskprefix.server.process.front_line import FrontLine
from diskprefix.server.process.systemd import notify, notify_through
from diskprefix.settings import Settings

Prepare: TypeAlias = Callable[[Settings, bool], None]
"""Imports all modules for serving. With True, reads the small parts of the model of the settings, too."""
Work: TypeAlias = Callable[[Settings, FrontLine], None]
"""Serves the model of the settings."""

PREPARE, LOAD, UNLOAD = b"prepare", b"load", b"unload"
"""What the front tells a worker: import; load the model now; save what only the memory has, and end."""
MAX_MESSAGE_BYTES = 64 * 1024
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
"""Signals whose usual handling a worker gets back. It ignores SIGHUP and SIGUSR2 until it listens."""
_ORPHAN_S = 60.0
"""The time for a worker to end in order after the front died."""


@dataclass(frozen=True)
class Order:
    """An order to fork a process with this number: a worker, or a spare if `address` is None.

    A worker gets a socket to listen on, and any process its end of a socket to the front. `address` is the front's.
    """

    number: int
    settings: Settings
    address: str | None = None
    token: OwnerToken | None = None
    takes_any_name: bool = False
    """See `FrontLine`."""
    knows_model: bool = False
    """For a spare: its workers will load the model of these settings."""


@dataclass(frozen=True)
class Forked:
    """The answer to an order. `pid` is None if the system has no room for a process."""

    number: int
    pid: int | None


@dataclass(frozen=True)
class Ended:
    """The end of a process: its exit code, or a negative number of the signal that killed it."""

    number: int
    code: int


def send(channel: socket.socket, message: Order | Forked | Ended, *passed: socket.socket) -> None:
    """Sends a message with sockets. Raises `OSError`."""
    socket.send_fds(channel, [pickle.dumps(message)], [sock.fileno() for sock in passed])


def fork(run: Callable[[], None]) -> int:
    """Returns the pid of a new process in which `run` runs, and which ends with it. Raises `OSError`."""
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        # The terminal's interrupt is for the front only.
        os.setpgid(0, 0)
        # The watchdog is the front's.
        os.environ.pop("WATCHDOG_PID", None)
        run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except DiskPrefixError as error:
        print(f"error: {' '.join(error.message.split())}", file=sys.stderr)
        code = error.exit_code
    except BaseException:  # noqa: BLE001 (the caller's code must not go on in the child)
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)


class Nursery:
    """The loop of the process. It has one thread, and signals only wake it."""

    def __init__(self, channel: socket.socket, prepare: Prepare, work: Work, folder: Path | None = None) -> None:
        """`folder` is removed when the front is gone."""
        self._channel, self._folder = channel, folder
        self._prepare, self._work = prepare, work
        self._numbers: dict[int, int] = {}
        """The numbers of the orders by the pids of their processes."""

    def run(self) -> NoReturn:
        """Forks until the front is gone."""
        self._waker, wakeup = socket.socketpair()
        for sock in (self._waker, wakeup):
            sock.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # The end of the front's socket is the sign to end, so that workers may end first.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(wakeup.fileno())
        selector = selectors.DefaultSelector()
        for sock in (self._channel, self._waker):
            selector.register(sock, selectors.EVENT_READ)
        self._inherited: list[Any] = [selector, self._waker, wakeup]
        while True:
            for key, _ in selector.select():
                if key.fileobj is self._waker:
                    self._waker.recv(4096)
                else:
                    self._take_order()
            self._reap()

    def _take_order(self) -> None:
        try:
            message, passed, _, _ = socket.recv_fds(self._channel, MAX_MESSAGE_BYTES, 2)
        except OSError:
            message, passed = b"", []
        if not message:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            os._exit(0)
        order: Order = pickle.loads(message)
        sockets = [socket.socket(fileno=number) for number in passed]
        try:
            pid = fork(lambda: self._become(order, sockets))
            self._numbers[pid] = order.number
        except OSError:
            pid = 0
        for sock in sockets:
            sock.close()
        self._report(Forked(order.number, pid or None))

    def _become(self, order: Order, sockets: list[socket.socket]) -> None:
        """Runs in the new process."""
        # If they stayed open here, the front would not notice the death of the nursery.
        self._channel.close()
        for resource in self._inherited:
            resource.close()
        if order.address is None:
            self._prepare(order.settings, order.knows_model)
            sockets[0].send(b"prepared")
            Nursery(sockets[0], self._prepare, self._work).run()
        listener, channel = sockets
        line = WorkerLine(channel, lambda: self._prepare(order.settings, False))
        began_at = time.perf_counter()
        front = FrontLine(listener, order.address, began_at, line, order.token, order.takes_any_name)
        self._work(order.settings, front)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (number := self._numbers.pop(pid, None)) is not None:
                self._report(Ended(number, os.waitstatus_to_exitcode(status)))

    def _report(self, message: Forked | Ended) -> None:
        # If the front is gone, the next read fails.
        with suppress(OSError):
            send(self._channel, message)


class WorkerLine:
    """A worker's end of the socket to the front, to which the worker's messages for systemd go."""

    def __init__(self, channel: socket.socket, prepare: Callable[[], None]) -> None:
        self._channel = channel
        self._prepare = prepare
        self._is_near, self._is_due = threading.Event(), threading.Event()
        self.is_unloaded = False
        notify_through(channel)
        threading.Thread(target=self._listen, name="front", daemon=True).start()

    def wait_for_turn(self) -> None:
        """Returns when the model may be loaded. Meanwhile imports what the load needs."""
        self._is_near.wait()
        self._prepare()
        self._is_due.wait()

    def fail(self, message: str) -> None:
        """Tells the front why the model cannot be served."""
        notify(FAILED=" ".join(message.split()))

    def _listen(self) -> None:
        # If the front dies before it has read every message, the connection is reset.
        with suppress(ConnectionResetError):
            while message := self._channel.recv(64):
                if message in (PREPARE, LOAD):
                    self._is_near.set()
                if message == LOAD:
                    self._is_due.set()
                if message == UNLOAD:
                    self.is_unloaded = True
                    os.kill(os.getpid(), signal.SIGTERM)
        # The front is gone.
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_ORPHAN_S)
        os._exit(1)
