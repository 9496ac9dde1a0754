"""Notifies systemd of the state of a Type=notify service (sd_notify(3)), if `NOTIFY_SOCKET` is set."""

from __future__ import annotations

import logging
import os
import socket

log = logging.getLogger("diskprefix")


def notify(**state: str | int) -> None:
    """Sends assignments such as `READY=1, STATUS="serving"`. Logs a warning if the socket cannot be reached."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    # A leading @ stands for the NUL byte of Linux's abstract socket names.
    target = "\0" + address[1:] if address.startswith("@") else address
    message = "\n".join(f"{name}={value}" for name, value in state.items())
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
            connection.connect(target)
            connection.sendall(message.encode())
    except OSError as error:
        log.warning("cannot notify systemd at %s: %s", address, error)
