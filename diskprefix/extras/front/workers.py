"""The processes behind the front: the nursery, the spare, and a worker for each model."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import pickle
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from diskprefix.extras.front.nursery import (
    MAX_MESSAGE_BYTES,
    Ended,
    Forked,
    Nursery,
    Order,
    Prepare,
    Work,
    fork,
    send,
)
from diskprefix.extras.front.swaps import Slot
from diskprefix.server.keys import OwnerToken
from diskprefix.settings import Settings

log = logging.getLogger("diskprefix")

MAX_UNLOAD_S = 70.0
"""The time for a worker to end: 8 s for requests in progress, 20 s to queue what only its memory has, 30 s to write
it, and some more. systemd's unit gives all processes 90 s."""
_SETTLED_S = 60.0
"""The death of a worker that has served for so long is the first in a row."""
_MAX_DELAY_S = 60.0
_BACKLOG = 2048
_REAPED_S = 5.0
"""The time for the nursery to tell how a process ended."""
_UNKNOWN_CODE = -int(signal.SIGKILL)
"""The exit code of a process whose end the nursery did not report, because it has died too."""


@dataclass
class Backoff:
    """Counts deaths in a row, which delay the next start."""

    in_a_row: int = 0

    def next_delay_s(self, served_s: float) -> float:
        """Counts a death after `served_s` of service. Returns 0, 1, 2, 4, … and at most 60."""
        self.in_a_row = 1 if served_s >= _SETTLED_S else self.in_a_row + 1
        return 0.0 if self.in_a_row == 1 else min(_MAX_DELAY_S, 2.0 ** (self.in_a_row - 2))


@dataclass(eq=False)
class Child:
    """A process that the nursery forks, and the front's end of the socket between them."""

    number: int
    channel: socket.socket
    pid: int | None = None
    code: int | None = None
    """The exit code, negative for a signal, once it has ended."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, message: bytes) -> None:
        # If the process is gone, its end is noticed elsewhere.
        with suppress(OSError):
            self.channel.send(message)

    def kill(self, number: int) -> None:
        if self.pid is not None and self.code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass(eq=False)
class ModelWorker(Child):
    """The process that serves one model."""

    slot: Slot = field(kw_only=True)
    path: str = field(kw_only=True)
    """The path of the socket on which it takes requests."""
    ready_at: float | None = None
    seen_at: float | None = None
    """The time of its last sign of life."""
    failure: str | None = None
    """Why its model cannot be served."""
    has_old_keys: bool = False
    """Whether the keys have changed since it read them."""
    status: str = ""
    """One line for people."""


class Workers:
    """Starts workers and receives their messages. The nursery and the spare are made again when they die."""

    def __init__(self, prepare: Prepare, work: Work, *, takes_any_name: bool) -> None:
        self._prepare, self._work = prepare, work
        self._takes_any_name = takes_any_name
        self.address = ""
        """The front's address, for people."""
        self.token: OwnerToken | None = None
        self.on_change: Callable[[ModelWorker], None] = lambda _worker: None
        """Called when a worker says something, and when it has ended (`code`)."""
        self.all: dict[int, ModelWorker] = {}
        self._numbers = itertools.count(1)
        self._folder = Path(tempfile.mkdtemp(prefix="diskprefix-"))
        """Only the daemon's user may enter it."""
        self._nursery_backoff, self._spare_backoff = Backoff(), Backoff()
        self._spare: Child | None = None
        self._has_prepared = False
        self._spare_order: tuple[Settings, bool] | None = None
        """The arguments of `keep_spare`."""
        self._is_closing = False
        # Before this process has an event loop, connections and prompts of clients.
        self._nursery, self._nursery_pid = self._fork_nursery(())

    def attach(self) -> None:
        """Begins to receive the nursery's messages, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._nursery, self._hear_nursery)

    def start(self, settings: Settings, slot: Slot) -> ModelWorker:
        """Starts a worker. It takes requests, and waits for its turn to load the model. Raises `OSError` if the system
        has no room for a process."""
        number = next(self._numbers)
        path = str(self._folder / str(number))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen(_BACKLOG)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            worker = ModelWorker(number, ours, slot=slot, path=path)
            order = Order(number, settings, self.address, self.token, takes_any_name=self._takes_any_name)
            try:
                with theirs:
                    self._order(order, listener, theirs)
            except OSError:
                ours.close()
                os.unlink(path)
                raise
        self.all[number] = worker
        worker.channel.setblocking(False)
        self._loop.add_reader(worker.channel, self._hear_worker, worker)
        return worker

    def keep_spare(self, settings: Settings, *, knows_model: bool) -> None:
        """Keeps a spare from now on: a process that has imported everything, from which workers are forked.
        `knows_model`: the workers will load the model of these settings."""
        if self._spare_order is None:
            self._spare_order = settings, knows_model
            self._make_spare()

    async def close(self) -> None:
        """Waits for the workers, which were told to end, and ends all processes."""
        self._is_closing = True
        ends = [asyncio.create_task(worker.ended.wait()) for worker in self.all.values()]
        if ends and (await asyncio.wait(ends, timeout=MAX_UNLOAD_S))[1]:
            self._kill_workers()
            await asyncio.wait(ends, timeout=_REAPED_S)
        if self._spare is not None:
            # It may still import, and not read the end of its socket.
            self._spare.kill(signal.SIGKILL)
        for channel in (self._nursery, *([self._spare.channel] if self._spare else [])):
            self._loop.remove_reader(channel)
            channel.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill_workers(self) -> None:
        for worker in self.all.values():
            worker.kill(signal.SIGKILL)

    def kill_all(self) -> None:
        self._kill_workers()
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill_hung(self, now: float, limit_s: float) -> None:
        """Kills workers that gave no sign of life for `limit_s`."""
        for worker in self.all.values():
            if worker.ready_at is not None and now - (worker.seen_at or now) > limit_s:
                log.error("[front] the worker gave no sign of life for %.0f s and is killed", limit_s)
                worker.seen_at = None
                worker.kill(signal.SIGKILL)

    def _order(self, order: Order, *passed: socket.socket) -> None:
        source = self._spare.channel if self._spare is not None and self._has_prepared else self._nursery
        try:
            send(source, order, *passed)
        except OSError:
            # The spare has died.
            send(self._nursery, order, *passed)

    # The nursery and the spare.

    def _fork_nursery(self, inherited: tuple[int, ...]) -> tuple[socket.socket, int]:
        """Returns the front's end of the socket to a new nursery, and its pid. The nursery closes the descriptors in
        `inherited`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def run() -> None:
            ours.close()
            for number in inherited:
                with suppress(OSError):
                    os.close(number)
            Nursery(theirs, self._prepare, self._work, self._folder).run()

        pid = fork(run)
        theirs.close()
        ours.setblocking(False)
        self._nursery_made_at = time.monotonic()
        return ours, pid

    def _hear_nursery(self) -> None:
        if message := _receive(self._nursery):
            self._take(pickle.loads(message))
            return
        self._loop.remove_reader(self._nursery)
        self._nursery.close()
        os.waitpid(self._nursery_pid, 0)
        if not self._is_closing:
            delay_s = self._nursery_backoff.next_delay_s(time.monotonic() - self._nursery_made_at)
            log.error("[front] the process that makes workers has died; another is made in %.0f s", delay_s)
            self._loop.call_later(delay_s, self._make_nursery)

    def _make_nursery(self) -> None:
        try:
            open_now = tuple(number for number in map(int, os.listdir("/dev/fd")) if number > 2)
            self._nursery, self._nursery_pid = self._fork_nursery(open_now)
        except OSError as error:
            log.error("[front] no process can be started: %s", error.strerror)
            self._loop.call_later(self._nursery_backoff.next_delay_s(0.0), self._make_nursery)
        else:
            self._loop.add_reader(self._nursery, self._hear_nursery)

    def _make_spare(self) -> None:
        assert self._spare_order is not None
        settings, knows_model = self._spare_order
        self._has_prepared = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._spare = Child(next(self._numbers), ours)
        # If this fails, the spare's socket ends, which counts as its death.
        with theirs, suppress(OSError):
            send(self._nursery, Order(self._spare.number, settings, knows_model=knows_model), theirs)
        self._spare.channel.setblocking(False)
        self._loop.add_reader(self._spare.channel, self._hear_spare, self._spare)

    def _hear_spare(self, spare: Child) -> None:
        message = _receive(spare.channel)
        if message == b"prepared":
            self._has_prepared, self._spare_backoff = True, Backoff()
            log.info("[front] a spare is ready")
        elif message:
            self._take(pickle.loads(message))
        else:
            self._forget(spare)
            self._spare, self._has_prepared = None, False
            if not self._is_closing:
                delay_s = max(1.0, self._spare_backoff.next_delay_s(0.0))
                log.warning("[front] the spare has died; another is made in %.0f s", delay_s)
                self._loop.call_later(delay_s, self._make_spare)

    def _take(self, message: Forked | Ended) -> None:
        child = self.all.get(message.number)
        if child is None and self._spare is not None and self._spare.number == message.number:
            child = self._spare  # type: ignore[assignment]
        match message:
            case Forked(pid=None):
                log.error("[front] no process can be started")
                if isinstance(child, ModelWorker):
                    self._record_end(child, _UNKNOWN_CODE)
            case Forked(pid=pid) if child is not None:
                child.pid = pid
                if isinstance(child, ModelWorker):
                    log.info("[front] process %d is for %s", pid, child.slot.model)
            case Ended(code=code) if isinstance(child, ModelWorker):
                self._record_end(child, code)

    # The workers.

    def _hear_worker(self, worker: ModelWorker) -> None:
        if self._read(worker):
            self.on_change(worker)
        else:
            # It has ended, or is about to. The nursery reports the exit code.
            self._loop.remove_reader(worker.channel)
            self._loop.call_later(_REAPED_S, self._record_end, worker, _UNKNOWN_CODE)

    def _read(self, worker: ModelWorker) -> bool:
        """Reads a message of a worker. Returns False if there is none."""
        message = _receive(worker.channel).decode(errors="replace")
        if not message:
            return False
        fields = dict(line.partition("=")[::2] for line in message.split("\n"))
        if fields.keys() - {"STATUS"}:
            # A worker that hangs may still send its status.
            worker.seen_at = self._loop.time()
        worker.failure = fields.get("FAILED", worker.failure)
        worker.status = fields.get("STATUS", worker.status)
        if "READY" in fields and worker.ready_at is None:
            worker.ready_at = self._loop.time()
        return True

    def _record_end(self, worker: ModelWorker, code: int) -> None:
        if worker.code is not None:
            return
        worker.code = code
        while self._read(worker):
            pass
        self._forget(worker)
        del self.all[worker.number]
        with suppress(OSError):
            os.unlink(worker.path)
        worker.ended.set()
        self.on_change(worker)

    def _forget(self, child: Child) -> None:
        self._loop.remove_reader(child.channel)
        child.channel.close()


def exit_text(code: int) -> str:
    """Returns how a process ended, as text."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _receive(channel: socket.socket) -> bytes:
    """Returns the next message, or no bytes if there is none or the other end is closed."""
    try:
        return channel.recv(MAX_MESSAGE_BYTES)
    except OSError:
        return b""
