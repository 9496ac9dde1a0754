"""Notifies systemd (sd_notify(3)): the state of a Type=notify service, and signs of life for its watchdog."""

from __future__ import annotations

import logging
import os
import socket
from contextlib import suppress

log = logging.getLogger("diskprefix")

_router: socket.socket | None = None


def notify_through(channel: socket.socket) -> None:
    """Sends later notifications to the router of this process, which forwards them to systemd."""
    global _router
    _router = channel


def is_heard() -> bool:
    """Returns whether systemd or a router listens."""
    return _router is not None or bool(os.environ.get("NOTIFY_SOCKET"))


def notify(**state: str | int) -> None:
    """Sends assignments such as `READY=1, STATUS="serving"`. Logs a warning if the socket cannot be reached."""
    message = "\n".join(f"{name}={value}" for name, value in state.items()).encode("utf-8", "replace")
    if _router is not None:
        # If the router is gone, this process ends too.
        with suppress(OSError):
            _router.send(message, socket.MSG_DONTWAIT)
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
