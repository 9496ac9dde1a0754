"""The processes of the models: the router starts them, hears how they are, and ends them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from diskprefix.daemon.router.swaps import Slot
from diskprefix.daemon.server.keys import OwnerToken
from diskprefix.daemon.server.process.router_line import Order
from diskprefix.daemon.settings import Settings

log = logging.getLogger("diskprefix")

MAX_UNLOAD_S = 70.0
"""The time for a worker to end: 8 s for requests in progress, 20 s to queue what only its memory has, 30 s to write
it, and some more. systemd's unit gives all processes 90 s."""
_KILLED_S = 5.0
"""The time for a worker that was killed to be gone."""
_BACKLOG = 2048
_MAX_MESSAGE_BYTES = 64 * 1024
program = [sys.executable, "-P", "-m", "diskprefix.daemon.router.worker_program"]


@dataclass(eq=False, kw_only=True)
class ModelWorker(Slot):
    """A slot and the process that serves its model."""

    path: str = ""
    """The path of the socket on which it takes requests."""
    process: subprocess.Popen[bytes] = field(init=False)
    channel: socket.socket = field(init=False)
    """The router's end of the socket between them."""
    code: int | None = None
    """The exit code, negative for a signal, once it has ended."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    ready_at: float | None = None
    seen_at: float | None = None
    """The time of its last sign of life."""
    failure: str | None = None
    """Why its model cannot be served."""
    has_old_keys: bool = False
    """Whether the keys have changed since it read them."""
    status: str = ""
    """One line for people."""

    def tell(self, message: bytes) -> None:
        # If the process is gone, its end is noticed elsewhere.
        with suppress(OSError):
            self.channel.send(message)

    def kill(self, number: int) -> None:
        self.process.send_signal(number)

    def read(self, now: float) -> bool:
        """Reads a message. Returns False if there is none."""
        try:
            message = self.channel.recv(_MAX_MESSAGE_BYTES).decode(errors="replace")
        except OSError:
            return False
        if not message:
            return False
        fields = dict(line.partition("=")[::2] for line in message.split("\n"))
        if fields.keys() - {"STATUS"}:
            # A worker that hangs may still send its status.
            self.seen_at = now
        self.failure = fields.get("FAILED", self.failure)
        self.status = fields.get("STATUS", self.status)
        if "READY" in fields and self.ready_at is None:
            self.ready_at = now
        return True


class _Spare(NamedTuple):
    """A process that has imported all that a worker needs, and waits for an order on the other end of `channel`."""

    process: subprocess.Popen[bytes]
    channel: socket.socket

    @classmethod
    def started(cls) -> _Spare:
        """Starts a process. Raises `OSError` if the system has no room for it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ExitStack() as failing, theirs:
            failing.callback(ours.close)
            process = subprocess.Popen(
                [*program, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # systemd's watchdog is the router's.
                env={name: value for name, value in os.environ.items() if name != "WATCHDOG_PID"},
                # The terminal's interrupt is for the router only.
                process_group=0,
            )
            failing.pop_all()
        return cls(process, ours)

    def takes(self, order: Order, listener: socket.socket) -> bool:
        """Gives the process its order. Returns False if it has ended."""
        try:
            socket.send_fds(self.channel, [pickle.dumps(order)], [listener.fileno()])
        except OSError:
            self.end()
            return False
        return True

    def end(self) -> None:
        self.channel.close()
        self.process.kill()
        # A process that waits for a device may take long to be gone.
        threading.Thread(target=self.process.wait, name="worker", daemon=True).start()


class Workers:
    """All workers that live. All methods must be called on the event loop."""

    def __init__(self, *, takes_any_name: bool) -> None:
        self._takes_any_name = takes_any_name
        self.address = ""
        """The router's address, for people."""
        self.token: OwnerToken | None = None
        self.page_secret: bytes | None = None
        self.on_change: Callable[[ModelWorker], None] = lambda _worker: None
        """Called when a worker says something, and when it has ended (`code`)."""
        self.all: list[ModelWorker] = []
        self._numbers = itertools.count(1)
        self._spare: _Spare | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="diskprefix-"))
        """Only the daemon's user may enter it."""

    def start(self, worker: ModelWorker, settings: Settings) -> None:
        """Gives a worker a process: the spare one, or a new one. It takes requests, and waits for its turn to load the
        model. Raises `OSError` if the system has no room for a process."""
        worker.path = str(self._folder / str(next(self._numbers)))
        with ExitStack() as failing, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(worker.path)
            failing.callback(os.unlink, worker.path)
            listener.listen(_BACKLOG)
            order = Order(
                settings, self.address, self.token, self.page_secret, self._takes_any_name, sent_at=time.monotonic()
            )
            spare, self._spare = self._spare, None
            if spare is None or not spare.takes(order, listener):
                spare = _Spare.started()
                failing.callback(spare.end)
                if not spare.takes(order, listener):
                    raise ChildProcessError("a new process ended at once")
            worker.process, worker.channel = spare
            failing.pop_all()
        log.info("[router] %s runs in process %d", worker.model, worker.process.pid)
        worker.channel.setblocking(False)
        self.all.append(worker)
        loop = asyncio.get_running_loop()
        loop.add_reader(worker.channel, self._hear, worker)

        def wait() -> None:
            code = worker.process.wait()
            # The loop ends before its router gives up on a process that cannot be killed.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._record_end, worker, code)

        threading.Thread(target=wait, name="worker", daemon=True).start()

    def keep_spare(self) -> None:
        """Starts a spare process, if there is none. Raises `OSError` if the system has no room for it."""
        if self._spare is not None and self._spare.process.poll() is not None:
            self._end_spare()
        self._spare = self._spare or _Spare.started()

    def _end_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.end()

    async def close(self) -> None:
        """Waits for the workers, which were told to end, and kills those that do not."""
        self._end_spare()
        ends = [asyncio.create_task(worker.ended.wait()) for worker in self.all]
        if ends and (await asyncio.wait(ends, timeout=MAX_UNLOAD_S))[1]:
            self.kill_all()
            await asyncio.wait(ends, timeout=_KILLED_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill_all(self) -> None:
        self._end_spare()
        for worker in self.all:
            worker.kill(signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill_hung(self, now: float, limit_s: float) -> None:
        """Kills workers that gave no sign of life for `limit_s`."""
        for worker in self.all:
            if worker.ready_at is not None and now - (worker.seen_at or now) > limit_s:
                log.error("[router] the worker gave no sign of life for %.0f s and is killed", limit_s)
                worker.seen_at = None
                worker.kill(signal.SIGKILL)

    def _hear(self, worker: ModelWorker) -> None:
        loop = asyncio.get_running_loop()
        if worker.read(loop.time()):
            self.on_change(worker)
        else:
            # It ends.
            loop.remove_reader(worker.channel)

    def _record_end(self, worker: ModelWorker, code: int) -> None:
        loop = asyncio.get_running_loop()
        while worker.read(loop.time()):
            pass
        loop.remove_reader(worker.channel)
        worker.channel.close()
        worker.code = code
        self.all.remove(worker)
        with suppress(OSError):
            os.unlink(worker.path)
        worker.ended.set()
        self.on_change(worker)


def exit_text(code: int) -> str:
    """Returns how a process ended, as text."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
