"""`serve --standby`: a small process that holds the listening sockets, a worker that serves, and a spare.

The spare has imported everything, has read the tokenizer and mapped quantised weights, and waits. When the worker dies,
the spare takes its place and a new spare is made. Connections that arrive in between wait in the sockets' queue. This
module imports neither torch nor the server.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from diskprefix.errors import DeviceLost
from diskprefix.server.process.systemd import notify, notify_through, watchdog_s
from diskprefix.units import format_size

log = logging.getLogger("diskprefix")

GO = b"go"
IMPORTED = "SPARE=1"
"""The message of a spare that has imported everything."""

_PASSED_ON = ("READY=", "STATUS=", "RELOADING=", "MONOTONIC_USEC=")
"""Notifications of a worker that are passed on to systemd. The others are the supervisor's own."""
_SETTLED_S = 60.0
"""A worker that served longer did not die because of its start."""
_MOST_DELAY_S = 60.0
_MOST_MESSAGE_BYTES = 4096
_ORPHAN_S = 60.0
"""The time for a worker to end in order after its supervisor died."""


@dataclass
class Deaths:
    """The deaths in a row, and the delay before the next start."""

    in_a_row: int = 0

    def delay_s(self, served_s: float) -> float:
        """Counts a death. `served_s`: for how long it had served. Returns 0, 1, 2, 4, … up to a minute."""
        self.in_a_row = 1 if served_s >= _SETTLED_S else self.in_a_row + 1
        return 0.0 if self.in_a_row == 1 else min(_MOST_DELAY_S, 2.0 ** (self.in_a_row - 2))


@dataclass(eq=False)
class Child:
    """A forked process, and the supervisor's end of the socket between them."""

    pid: int
    channel: socket.socket
    ready_at: float | None = None
    seen_at: float | None = None
    """The time of its last sign of life."""

    def kill(self, number: int) -> None:
        os.kill(self.pid, number)

    def begin(self) -> bool:
        """Lets the process begin its turn. Returns False if it has ended."""
        try:
            self.channel.send(GO)
        except OSError:
            return False
        return True


class InChild(Exception):
    """Leaves the supervisor's code in a forked process. `channel` is that process' end of the socket."""

    def __init__(self, channel: socket.socket, *, is_spare: bool) -> None:
        self.channel = channel
        self.is_spare = is_spare


@dataclass
class Supervisor:
    """Runs the worker and the spare until a signal stops it. It has one thread, and signals only wake it."""

    clock: Callable[[], float] = time.monotonic
    _worker: Child | None = None
    _spare: Child | None = None
    _is_stopping: bool = False
    _num_interrupts: int = 0
    _worker_deaths: Deaths = field(default_factory=Deaths)
    _spare_deaths: Deaths = field(default_factory=Deaths)
    _worker_at: float | None = None
    """The time of the next start of a worker, and below of a spare; None if none is due."""
    _spare_at: float | None = None
    _pinged_at: float = 0.0

    def run(self) -> int:
        """Returns the exit code. Raises `InChild` in each process that it forks."""
        self._watchdog_s = watchdog_s()
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        for end in (self._wake_reader, self._wake_writer):
            end.setblocking(False)
        # A child that was just forked shares the descriptor, so what is written there only wakes the loop.
        self._signals: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda number, _frame: self._signals.append(number))
        signal.set_wakeup_fd(self._wake_writer.fileno())
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._worker_at = self.clock()
        while (code := self._step()) is None:
            pass
        signal.set_wakeup_fd(-1)
        self._close_wakeups()
        return code

    def _step(self) -> int | None:
        for key, _ in self._selector.select(self._timeout_s()):
            if key.data is not None:
                self._hear(key.data)
            else:
                self._wake_reader.recv(4096)
        while self._signals:
            code = self._on_signal(self._signals.pop(0))
            if code is not None:
                return code
        self._start_what_is_due()
        self._guard()
        return None

    def _timeout_s(self) -> float | None:
        now = self.clock()
        due = [at - now for at in (self._worker_at, self._spare_at) if at is not None]
        if self._watchdog_s is not None:
            due.append(self._watchdog_s / 4)
        return max(0.0, min(due)) if due else None

    # What comes from outside.

    def _on_signal(self, number: int) -> int | None:
        """Returns the exit code if that is the end."""
        if number == signal.SIGCHLD:
            return self._reap()
        if number == signal.SIGHUP:
            if self._worker is not None:
                self._worker.kill(signal.SIGHUP)
            return None
        return self._stop(number)

    def _stop(self, number: int) -> int | None:
        self._num_interrupts += number == signal.SIGINT
        if not self._is_stopping:
            self._is_stopping = True
            notify(STOPPING=1, STATUS="stopping")
            self._worker_at = self._spare_at = None
            if self._spare is not None:
                self._spare.kill(signal.SIGKILL)
        if self._worker is None:
            return 0
        # A second interrupt is for those who do not want to wait.
        self._worker.kill(signal.SIGINT if self._num_interrupts > 1 else signal.SIGTERM)
        return None

    def _reap(self) -> int | None:
        """Returns the exit code if the worker's end is the end."""
        code = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return code
            if pid == 0:
                return code
            ended = os.waitstatus_to_exitcode(status)
            if self._spare is not None and pid == self._spare.pid:
                self._spare_ended(ended)
            elif self._worker is not None and pid == self._worker.pid:
                code = self._worker_ended(ended)

    def _worker_ended(self, ended: int) -> int | None:
        worker = self._worker
        assert worker is not None
        self._forget(worker)
        self._worker = None
        has_spoken = ended > 0 and ended != DeviceLost.exit_code and worker.ready_at is None
        if self._is_stopping or ended == 0 or has_spoken:
            if self._spare is not None:
                self._spare.kill(signal.SIGKILL)
            if self._is_stopping and ended == -signal.SIGTERM:
                # It was told to end before it had begun.
                return 0
            return ended if ended >= 0 else 128 - ended
        served_s = 0.0 if worker.ready_at is None else self.clock() - worker.ready_at
        delay_s = self._worker_deaths.delay_s(served_s)
        self._worker_at = self.clock() + delay_s
        next_one = "the spare takes its place" if self._spare else "another is started"
        when = f" in {delay_s:.0f} s: it died {self._worker_deaths.in_a_row} times in a row" if delay_s else ""
        log.error("[standby] the worker %s; %s%s", _described(ended), next_one, when)
        notify(STATUS=f"the worker {_described(ended)}; {next_one}{when}")
        return None

    def _spare_ended(self, ended: int) -> None:
        spare = self._spare
        assert spare is not None
        self._forget(spare)
        self._spare = None
        if not self._is_stopping:
            delay_s = max(1.0, self._spare_deaths.delay_s(0.0))
            log.warning("[standby] the spare %s; another is made in %.0f s", _described(ended), delay_s)
            self._spare_at = self.clock() + delay_s

    def _hear(self, child: Child) -> None:
        """Takes one message of a child: what it would tell systemd."""
        try:
            message = child.channel.recv(_MOST_MESSAGE_BYTES).decode(errors="replace")
        except OSError:
            message = ""
        if not message:
            # It has ended, or will have in a moment: the signal tells.
            self._selector.unregister(child.channel)
            return
        lines = message.split("\n")
        child.seen_at = self.clock()
        if child is self._spare and IMPORTED in lines:
            self._spare_deaths = Deaths()
            log.info("[standby] a spare is ready; it takes %s of memory", format_size(private_bytes(child.pid)))
        if child is not self._worker:
            return
        if "READY=1" in lines and child.ready_at is None:
            child.ready_at = self.clock()
            self._spare_at = self.clock()
        told = dict(line.split("=", 1) for line in lines if line.startswith(_PASSED_ON))
        if told and not self._is_stopping:
            notify(**told)

    # What is done about it.

    def _start_what_is_due(self) -> None:
        now = self.clock()
        if self._worker_at is not None and self._worker_at <= now:
            self._worker_at = None
            spare, self._spare = self._spare, None
            if spare is not None and spare.begin():
                self._worker = spare
            else:
                if spare is not None:
                    # It has just died.
                    self._forget(spare)
                    spare.kill(signal.SIGKILL)
                self._worker = self._fork(is_spare=False)
                if self._worker is None:
                    self._worker_at = now + max(1.0, self._worker_deaths.delay_s(0.0))
                else:
                    self._worker.begin()
        if self._spare_at is not None and self._spare_at <= now:
            self._spare_at = None
            if self._spare is None and self._worker is not None:
                self._spare = self._fork(is_spare=True)
                if self._spare is None:
                    self._spare_at = now + max(1.0, self._spare_deaths.delay_s(0.0))

    def _fork(self, *, is_spare: bool) -> Child | None:
        """Returns None if the system has no room for a process now. Raises `InChild` in the new process."""
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            log.error("[standby] no process can be started: %s", error.strerror)
            return None
        try:
            pid = os.fork()
        except OSError as error:
            log.error("[standby] no process can be started: %s", error.strerror)
            ours.close()
            theirs.close()
            return None
        if pid == 0:
            self._leave()
            ours.close()
            raise InChild(theirs, is_spare=is_spare)
        theirs.close()
        child = Child(pid, ours)
        self._selector.register(ours, selectors.EVENT_READ, child)
        return child

    def _leave(self) -> None:
        """Closes in a new process what belongs to the supervisor: a channel that stayed open would hide its death."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        # Of the terminal's interrupt only the supervisor tells the worker.
        os.setpgid(0, 0)
        for child in (self._worker, self._spare):
            if child is not None:
                child.channel.close()
        self._close_wakeups()

    def _close_wakeups(self) -> None:
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()

    def _forget(self, child: Child) -> None:
        if child.channel in self._selector.get_map():
            self._selector.unregister(child.channel)
        child.channel.close()

    def _guard(self) -> None:
        """Sends signs of life to the watchdog, and kills a worker that gives none."""
        if self._watchdog_s is None:
            return
        now, worker = self.clock(), self._worker
        if now - self._pinged_at >= self._watchdog_s / 4:
            self._pinged_at = now
            notify(WATCHDOG=1)
        if worker is not None and worker.ready_at is not None and now - (worker.seen_at or now) > self._watchdog_s:
            log.error("[standby] the worker gave no sign of life for %.0f s and is killed", self._watchdog_s)
            worker.seen_at = None
            worker.kill(signal.SIGKILL)


def _described(ended: int) -> str:
    return f"was killed by {signal.Signals(-ended).name}" if ended < 0 else f"ended with exit code {ended}"


def private_bytes(pid: int) -> int:
    """Returns the memory that a process shares with no other; 0 on systems without /proc."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


class SupervisorLine:
    """A worker's or a spare's end of the socket to its supervisor. What it tells systemd goes there."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._turn = threading.Event()
        notify_through(channel)
        threading.Thread(target=self._listen, name="supervisor", daemon=True).start()

    def wait_for_turn(self) -> None:
        notify(SPARE=1)
        self._turn.wait()

    def _listen(self) -> None:
        # It is a reset, not an end, where the supervisor died before it had read all that it was told.
        with suppress(ConnectionResetError):
            while self._channel.recv(len(GO)) == GO:
                self._turn.set()
        # The supervisor is gone. Without it systemd hears nothing, and the port must become free.
        if self._turn.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_ORPHAN_S)
        os._exit(1)


def supervise(prepare: Callable[[], None], work: Callable[[float], None]) -> None:
    """Supervises processes that run `work`. A spare runs `prepare` first, and waits for its turn.

    `work` takes when its turn began, on the clock of `time.perf_counter`. This function exits the process. Only in a
    worker it returns, or raises what `work` raises.
    """
    try:
        code = Supervisor().run()
    except InChild as child:
        # It is the supervisor's.
        os.environ.pop("WATCHDOG_PID", None)
        line = SupervisorLine(child.channel)
        if child.is_spare:
            prepare()
            line.wait_for_turn()
        work(time.perf_counter())
        return
    sys.exit(code)
