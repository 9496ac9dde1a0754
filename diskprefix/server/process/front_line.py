"""A worker's line to the front process that passes requests on to it: see `extras/front`."""

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

from diskprefix.server.keys import OwnerToken
from diskprefix.server.process.systemd import notify, notify_through
from diskprefix.settings import Settings

LOAD, UNLOAD = b"load", b"unload"
"""The front's orders to a worker: load the model now; save what only the memory has, and end."""
_ORPHAN_S = 60.0
"""The time for a worker to end in order after the front died."""


class Order(NamedTuple):
    """The front's first words to a worker. `address` is the front's, for people. `token` is None with API keys, and
    `page_secret`, that of `ApiKeys`, without."""

    settings: Settings
    address: str
    token: OwnerToken | None
    page_secret: bytes | None
    takes_any_name: bool
    """Whether the front has chosen the model by its name or one of its aliases."""


class FrontLine:
    """A worker's end of the line. The worker's messages for systemd go to the front."""

    def __init__(self, order: Order, listener: socket.socket, channel: socket.socket) -> None:
        self.order, self.listener, self._channel = order, listener, channel
        self.is_unloaded = False
        """True when the worker was told to end because its memory is needed."""
        self._is_due = threading.Event()
        notify_through(channel)
        threading.Thread(target=self._listen, name="front", daemon=True).start()

    def wait_for_turn(self) -> None:
        """Returns when the model may be loaded."""
        self._is_due.wait()

    def fail(self, message: str) -> None:
        """Tells the front why the model cannot be served."""
        notify(FAILED=" ".join(message.split()))

    def _listen(self) -> None:
        # If the front dies before it has read every message, the connection is reset.
        with suppress(ConnectionResetError):
            while message := self._channel.recv(64):
                if message == LOAD:
                    self._is_due.set()
                if message == UNLOAD:
                    self.is_unloaded = True
                    os.kill(os.getpid(), signal.SIGTERM)
        # The front is gone, and does not remove its folder of sockets any more.
        shutil.rmtree(Path(self.listener.getsockname()).parent, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_ORPHAN_S)
        os._exit(1)
