"""What systemd is told while the daemon runs: what it does, and for the watchdog that requests are computed."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
from typing import TYPE_CHECKING

from diskprefix.server.notify import is_heard, notify, watchdog_s

if TYPE_CHECKING:
    from diskprefix.server.daemon import Daemon

log = logging.getLogger("diskprefix")

_PERIOD_S = 5.0


async def give_signs_of_life(daemon: Daemon) -> None:
    """Tells systemd, or the supervisor, every few seconds. Does nothing where nobody listens."""
    limit_s = watchdog_s()
    signs = SignsOfLife(daemon, limit_s)
    while is_heard():
        signs.give()
        await asyncio.sleep(_PERIOD_S if limit_s is None else min(_PERIOD_S, limit_s / 4))


class SignsOfLife:
    """What is told to systemd. The watchdog hears that the daemon lives if the event loop calls `give`, and if the
    engine has done something since the last call, has nothing to do, or is in a step that may take longer.

    So a hanging step, and a hanging event loop, end with a new process. Loading a model is no step: it may take as long
    as `TimeoutStartSec=` allows.
    """

    def __init__(self, daemon: Daemon, limit_s: float | None) -> None:
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
        status = status_of(self._daemon)
        if status != self._status and self._daemon.status in ("ok", "degraded"):
            self._status = status
            notify(STATUS=status)


def status_of(daemon: Daemon) -> str:
    """Returns one line for people: the current step of the load, or what is served and how busy the engine is."""
    if daemon.serving is None:
        return daemon.doing
    inbox = daemon.inbox
    state, error = daemon.serving.engine.cache.health
    problem = f"; the cache is degraded ({error})" if state == "degraded" else ""
    hangs = (
        f"; one step has taken {inbox.heartbeat.working_s:.0f} s" if inbox.heartbeat.working_s >= 2 * _PERIOD_S else ""
    )
    return f"{daemon.doing}; {inbox.num_running} running, {inbox.queue_depth} waiting{problem}{hangs}"
