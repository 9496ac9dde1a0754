"""A worker's connection to the router, which forwards requests to it: see `daemon/router`."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from diskprefix.daemon.server.keys import OwnerToken
from diskprefix.daemon.server.process.systemd import notify, notify_through
from diskprefix.daemon.settings import Settings

LOAD, UNLOAD = b"load", b"unload"
"""The router's orders to a worker: load the model now; save the state that is only in memory, and end."""
STOPPED = "[router] stopped"
"""What the router logs last if it was stopped. Whoever has started it reads it there."""
_ORPHAN_S = 60.0
"""Seconds for a worker to end in order after the router died."""


class Order(NamedTuple):
    """The router's first message to a worker. `address` is the router's, for people. With API keys, `token` is None;
    without, `page_secret` (of `ApiKeys`) is None."""

    settings: Settings
    address: str
    token: OwnerToken | None
    page_secret: bytes | None
    takes_any_name: bool
    """Whether the router has chosen the model by its name or one of its aliases."""
    sent_at: float
    """The time of the order, on the monotonic clock of the system."""


class RouterLine:
    """A worker's end of the connection. The worker's messages for systemd go to the router."""

    def __init__(self, order: Order, listener: socket.socket, channel: socket.socket) -> None:
        self.order, self.listener, self._channel = order, listener, channel
        self.is_unloaded = False
        """True when the router has ended the worker because its memory is needed."""
        self._is_due = threading.Event()
        notify_through(channel)
        threading.Thread(target=self._listen, name="router", daemon=True).start()

    def wait_for_turn(self) -> None:
        """Returns when the model may be loaded."""
        self._is_due.wait()

    def fail(self, message: str) -> None:
        """Reports to the router why the model cannot be served."""
        notify(FAILED=" ".join(message.split()))

    def _listen(self) -> None:
        # If the router dies before it has read every message, the connection is reset.
        with suppress(ConnectionResetError):
            while message := self._channel.recv(64):
                if message == LOAD:
                    self._is_due.set()
                if message == UNLOAD:
                    self.is_unloaded = True
                    os.kill(os.getpid(), signal.SIGTERM)
        # The router is gone, and does not remove its folder of sockets any more.
        shutil.rmtree(Path(self.listener.getsockname()).parent, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_ORPHAN_S)
        os._exit(1)
