"""The program of a worker: `python -m diskprefix.extras.router.worker_program LISTENER CHANNEL`, two descriptors."""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from diskprefix.app import load_engine
from diskprefix.cli.logs import configure_logging
from diskprefix.errors import DiskPrefixError
from diskprefix.printable import printable_only
from diskprefix.server.process.router_line import Order, RouterLine
from diskprefix.settings import Settings

if TYPE_CHECKING:
    from diskprefix.engine.loop import Engine
    from diskprefix.progress import Report

MAX_ORDER_BYTES = 64 * 1024


def main(serve: Callable[[Settings, RouterLine], None]) -> NoReturn:
    """Serves as the router orders, and ends the process."""
    listener, channel = (socket.socket(fileno=int(number)) for number in sys.argv[-2:])
    order: Order = pickle.loads(channel.recv(MAX_ORDER_BYTES))
    configure_logging(order.settings.log_level)
    code = 0
    try:
        serve(order.settings, RouterLine(order, listener, channel))
    except DiskPrefixError as error:
        print(f"error: {printable_only(' '.join(error.message.split()))}", file=sys.stderr)
        code = error.exit_code
    sys.stderr.flush()
    # A thread that loads a model cannot be stopped.
    os._exit(code)


def serve_model(settings: Settings, router: RouterLine) -> None:
    from diskprefix.server.process.process import run

    def load_in_turn(settings: Settings, progress: Report) -> Engine:
        # While it waits.
        importlib.import_module("diskprefix.engine.measured_model")
        router.wait_for_turn()
        return load_engine(settings, progress)

    run(settings, load_in_turn, router)


if __name__ == "__main__":
    main(serve_model)
