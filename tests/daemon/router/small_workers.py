"""A program whose router is real, and whose workers are small: they do not import the server.

The argument is what every worker does.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from functools import partial

from diskprefix.daemon.cli.logs import configure_logging
from diskprefix.daemon.router import router, worker_program, workers
from diskprefix.daemon.router.listing import Listing
from diskprefix.daemon.router.router_server import run_router
from diskprefix.daemon.server.process.router_line import RouterLine
from diskprefix.daemon.server.process.systemd import notify
from diskprefix.daemon.settings import Settings

log = logging.getLogger("diskprefix")


def serve() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGHUP, lambda *_: log.info("the keys are read again"))
    notify(READY=1, STATUS="serving")
    log.info("serving in %d", os.getpid())
    while True:
        notify(WATCHDOG=1)
        time.sleep(0.05)


def wait() -> None:
    """Unlike `signal.pause`, it is ended by a signal that comes just before it, too."""
    while True:
        time.sleep(0.05)


def work(action: str, _settings: Settings, _router: RouterLine) -> None:
    if action == "serve":
        serve()
    elif action == "load":
        log.info("loading in %d", os.getpid())
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        wait()
    elif action == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        log.info("loading in %d", os.getpid())
        wait()
    elif action == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        sys.exit(int(action))


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        worker_program.main(partial(work, sys.argv[2]))
    configure_logging("info")
    workers.MAX_UNLOAD_S = 0.5
    router._SPARE_PAUSE_S = 0.1
    # Behind what `DaemonProcess` gives every program.
    action = sys.argv[4]
    workers.program = [sys.executable, "-m", "tests.daemon.router.small_workers", "worker", action]
    settings = Settings(port=0)
    run_router(Listing(settings, None), settings)
