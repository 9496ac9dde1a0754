"""The process of the router: its sockets, its signals and its end."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import signal
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from diskprefix.daemon.router.listing import Listing
from diskprefix.daemon.router.router import RouterApp
from diskprefix.daemon.router.workers import Workers
from diskprefix.daemon.server.guards import AllowedOrigins
from diskprefix.daemon.server.keys import ApiKeys
from diskprefix.daemon.server.process.listener import open_listeners
from diskprefix.daemon.server.process.process import (
    SignalledServer,
    announce_listening,
    leave,
    made_token,
    uvicorn_config,
    warn_without_keys,
)
from diskprefix.daemon.server.process.router_line import STOPPED
from diskprefix.daemon.server.process.token_file import published_token
from diskprefix.daemon.settings import PER_MODEL, Settings

if TYPE_CHECKING:
    import socket

log = logging.getLogger("diskprefix")


class RouterServer(SignalledServer):
    """The server of the router."""

    def __init__(self, router: RouterApp, workers: Workers, settings: Settings) -> None:
        app = AllowedOrigins(router, settings.origins) if settings.allowed_origins else router
        super().__init__(uvicorn_config(app, settings))
        self._router, self._workers = router, workers

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._router.read_again)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, self._router.check_memory)
        await super().startup(sockets)

    def force_end(self) -> None:
        self._workers.kill_all()
        super().force_end()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._router.stop()
        await super().shutdown(sockets)
        await self._workers.close()
        if not self._router.exit_code:
            log.info(STOPPED)


def run_router(listing: Listing, settings: Settings) -> None:
    """Serves the models of a list. See `hooks.open_router`."""
    faulthandler.enable()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    keys = None if settings.api_keys is None else ApiKeys(settings.api_keys)
    for number in (signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    workers = Workers(takes_any_name=listing.only is None)
    settings, listeners = open_listeners(settings)
    workers.token, workers.page_secret = made_token(settings), None if keys is None else keys.page_secret
    workers.address = announce_listening(listeners, settings, workers.token)
    warn_without_keys(settings, workers.address)
    access = keys or workers.token
    assert access is not None
    router = RouterApp(settings, listing, workers, access, lambda: setattr(server, "should_exit", True))
    server = RouterServer(router, workers, settings)
    # A new models.toml may give other values to one of several models at any time.
    for_all = {name: value for name, value in asdict(settings).items() if listing.only or name not in PER_MODEL}
    try:
        with server.while_listening as listening:
            listening.enter_context(published_token(workers.token.text if workers.token else "", listeners, for_all))
            server.run(sockets=listeners)
    finally:
        for listener in listeners:
            listener.close()
    # The worker has logged why. A thread that waits for a disk would keep the process.
    leave(router.exit_code, at_once=listing.is_reading)
