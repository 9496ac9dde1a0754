"""The program of a worker: `python -m diskprefix.daemon.router.worker_program CHANNEL`, a descriptor."""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from diskprefix.daemon import hooks
from diskprefix.daemon.app import load_engine
from diskprefix.daemon.cli.logs import configure_logging
from diskprefix.daemon.server.process.router_line import Order, RouterLine
from diskprefix.daemon.settings import Settings
from diskprefix.errors import DiskPrefixError
from diskprefix.printable import printable_only

if TYPE_CHECKING:
    from diskprefix.daemon.engine.loop import Engine
    from diskprefix.progress import Report

MAX_ORDER_BYTES = 64 * 1024
_NEEDED = (
    "diskprefix.daemon.engine.loop",
    "diskprefix.runtime.choose_runtime",
    "diskprefix.daemon.catalogue.catalogue",
    "diskprefix.runtime.files.gguf.encoders",
    "diskprefix.runtime.files.gguf.gguf",
    "diskprefix.runtime.files.gguf.gguf_weights",
    "diskprefix.runtime.files.template_sandbox",
    "diskprefix.daemon.server.http_app",
    "diskprefix.daemon.server.metrics",
    "diskprefix.daemon.server.process.connection",
    "diskprefix.daemon.server.process.process",
    "huggingface_hub.constants",
    "uvicorn.lifespan.on",
    "uvicorn.loops.asyncio",
)
"""What is imported late otherwise: when a file is opened, a port is served, or the first request comes."""


def main(serve: Callable[[Settings, RouterLine], None], *, prepare: Callable[[], None] = lambda: None) -> NoReturn:
    """Waits for an order of the router, serves as it says, and ends the process. What needs no order is done before,
    in `prepare`."""
    channel = socket.socket(fileno=int(sys.argv[-1]))
    prepare()
    message, listeners, *_ = socket.recv_fds(channel, MAX_ORDER_BYTES, 1)
    if not message:
        # The router is gone, or needs no spare any more.
        os._exit(0)
    order: Order = pickle.loads(message)
    listener = socket.socket(fileno=listeners[0])
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


def import_all() -> None:
    """Imports what a worker needs until the end of its first reply, and makes the validators of the bodies of
    requests."""
    for name in _NEEDED:
        importlib.import_module(name)
    from diskprefix.daemon.server import answer
    from diskprefix.daemon.server.process.process import leave_plugins_out

    leave_plugins_out()
    for module in (answer, *hooks.modules_of_routes()):
        for route in module.routes:
            if route.about is not None and (body := route.about.body) is not None:
                body.model_rebuild()


def serve_model(settings: Settings, router: RouterLine) -> None:
    from diskprefix.daemon.server.process.process import run

    def load_in_turn(settings: Settings, progress: Report) -> Engine:
        router.wait_for_turn()
        return load_engine(settings, progress)

    run(settings, load_in_turn, router)


if __name__ == "__main__":
    main(serve_model, prepare=import_all)
