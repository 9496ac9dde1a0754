"""Notifies systemd (sd_notify(3)): the state of a Type=notify service, and signs of life for its watchdog."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from diskprefix.engine.inbox import Inbox

log = logging.getLogger("diskprefix")

_supervisor: socket.socket | None = None


def notify_through(channel: socket.socket) -> None:
    """Sends later notifications to the supervisor of this process, which passes them on to systemd."""
    global _supervisor
    _supervisor = channel


def is_heard() -> bool:
    """Returns whether systemd or a supervisor listens."""
    return _supervisor is not None or bool(os.environ.get("NOTIFY_SOCKET"))


def notify(**state: str | int) -> None:
    """Sends assignments such as `READY=1, STATUS="serving"`. Logs a warning if the socket cannot be reached."""
    message = "\n".join(f"{name}={value}" for name, value in state.items()).encode()
    if _supervisor is not None:
        # If it is gone, this process ends too.
        with suppress(OSError):
            _supervisor.send(message, socket.MSG_DONTWAIT)
        return
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    # A leading @ stands for the NUL byte of Linux's abstract socket names.
    target = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
            connection.connect(target)
            connection.sendall(message)
    except OSError as error:
        log.warning("cannot notify systemd at %s: %s", address, error)


def watchdog_s() -> float | None:
    """Returns the watchdog's limit in seconds (sd_watchdog_enabled(3)), None without a watchdog."""
    limit_us, process = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not limit_us.isdigit() or process not in ("", str(os.getpid())):
        return None
    return int(limit_us) / 1e6 or None


_PERIOD_S = 5.0


class Reporting(Protocol):
    """The daemon, as systemd sees it."""

    @property
    def inbox(self) -> Inbox:
        """The requests of the engine."""

    @property
    def status(self) -> str:
        """The state, as `/health` tells it."""

    @property
    def status_line(self) -> str:
        """One line for people."""


async def give_signs_of_life(daemon: Reporting) -> None:
    """Notifies systemd, or the supervisor, every few seconds. Returns at once if nobody listens."""
    limit_s = watchdog_s()
    signs = SignsOfLife(daemon, limit_s)
    while is_heard():
        signs.give()
        await asyncio.sleep(_PERIOD_S if limit_s is None else min(_PERIOD_S, limit_s / 4))


class SignsOfLife:
    """The notifications while the daemon runs.

    The watchdog gets a sign of life if the event loop calls `give`, and the engine is idle, has made progress since the
    last call, or is in a step that may take longer. A hanging step or event loop thus ends with a new process. Loading
    a model is no step: it may take as long as `TimeoutStartSec=` allows.
    """

    def __init__(self, daemon: Reporting, limit_s: float | None) -> None:
        self._daemon = daemon
        self._limit_s = limit_s
        self._status = ""
        self._is_reported = False

    def give(self) -> None:
        heartbeat = self._daemon.inbox.heartbeat
        has_stopped = heartbeat.has_stopped()
        if self._limit_s is not None:
            if not has_stopped:
                notify(WATCHDOG=1)
                self._is_reported = False
            elif heartbeat.working_s > self._limit_s / 2 and not self._is_reported:
                self._is_reported = True
                log.error(
                    "[server] the engine has hung in one step for %.0f s; the watchdog's limit is %.0f s. Its threads:",
                    heartbeat.working_s,
                    self._limit_s,
                )
                faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
        status = self._daemon.status_line
        if status != self._status and self._daemon.status in ("ok", "degraded"):
            self._status = status
            notify(STATUS=status)
