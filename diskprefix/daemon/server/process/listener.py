"""The sockets on which the daemon listens."""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import socket
from contextlib import closing, suppress
from dataclasses import replace

from diskprefix.daemon.server.process.token_file import token_at
from diskprefix.daemon.settings import Settings
from diskprefix.errors import SettingsError
from diskprefix.printable import shown

STALLED_S = 60
"""Seconds after which the kernel closes a connection whose client is gone or does not read."""

_KEEPALIVE_S, _KEEPALIVE_PROBES = 15, 4
BACKLOG = 2048
_ASK_S, _MAX_HEALTH_BYTES = 2.0, 1 << 16
_ABSENT_ADDRESS = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
_FIRST_PASSED = 3
"""The number of the first descriptor that systemd passes (sd_listen_fds(3))."""


def open_listeners(settings: Settings) -> tuple[Settings, list[socket.socket]]:
    """Returns the sockets that systemd listens on for this process, or else new ones on `--host` and `--port`.

    The returned settings have the address of the passed sockets. Of several addresses they have one that other machines
    can reach, because access depends on it. Raises `SettingsError`.
    """
    passed = passed_sockets()
    if not passed:
        return settings, listen(settings.host, settings.port)
    addresses = [listener.getsockname() for listener in passed if listener.family != socket.AF_UNIX]
    if not addresses:
        return settings, passed
    host, port, *_ = min(addresses, key=lambda address: ipaddress.ip_address(address[0]).is_loopback)
    return replace(settings, host=host, port=port), passed


def passed_sockets() -> list[socket.socket]:
    """Returns the sockets of systemd's socket activation. Raises `SettingsError` unless all are listening streams."""
    count, process = (os.environ.pop(name, "") for name in ("LISTEN_FDS", "LISTEN_PID"))
    os.environ.pop("LISTEN_FDNAMES", None)
    if not count.isdigit() or process != str(os.getpid()):
        return []
    passed = []
    for number in range(_FIRST_PASSED, _FIRST_PASSED + int(count)):
        os.set_inheritable(number, False)
        passed.append(_passed(number))
    return passed


def _passed(number: int) -> socket.socket:
    try:
        listener = socket.socket(fileno=number)
        is_listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) != 0
    except OSError as error:
        raise SettingsError(f"LISTEN_FDS: descriptor {number} is no socket: {error.strerror}") from error
    families = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
    if not is_listening or listener.type != socket.SOCK_STREAM or listener.family not in families:
        raise SettingsError(
            f"LISTEN_FDS: descriptor {number} is no stream that listens; the .socket unit needs ListenStream= and "
            "Accept=no"
        )
    return listener if listener.family == socket.AF_UNIX else _configured(listener)


def listen(host: str, port: int) -> list[socket.socket]:
    """Returns listening sockets on all addresses of `host`; port 0 takes a free port of the first address.

    They listen before anything slow, so that a second daemon on the port fails at once. Raises `SettingsError`, which
    names the daemon that uses the port.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"--host: {host!r} cannot be resolved: {error}") from error
    listeners: list[socket.socket] = []
    failure: OSError | None = None
    for family, address in dict.fromkeys((family, address) for family, _, _, _, address in addresses):
        if listeners and port == 0:
            break
        try:
            listeners.append(_configured(socket.create_server(address, family=family, backlog=BACKLOG)))
        except OSError as error:
            failure = error
    # A name may have an address that this machine lacks, such as ::1 where IPv6 is off. Other failures count.
    if failure is not None and (not listeners or failure.errno not in _ABSENT_ADDRESS):
        for listener in listeners:
            listener.close()
        flag, hint = "--port", "choose another with --port"
        if failure.errno in _ABSENT_ADDRESS:
            flag, hint = "--host", "give an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them"
        elif failure.errno == errno.EADDRINUSE:
            hint = f"{_who_answers(host, port)}; {hint}"
        message = f"{flag}: cannot listen on {host}:{port}: {os.strerror(failure.errno or 0)}; {hint}"
        raise SettingsError(message) from failure
    return listeners


def _who_answers(host: str, port: int) -> str:
    """Describes the program that uses a port: a daemon with its models, if one answers."""
    from http.client import HTTPConnection, HTTPException

    token = token_at(host, port)
    with suppress(OSError, ValueError, LookupError, AttributeError, HTTPException):
        with closing(HTTPConnection(host, port, timeout=_ASK_S)) as connection:
            connection.request("GET", "/health", headers={"Authorization": f"Bearer {token}"} if token else {})
            health = json.loads(connection.getresponse().read(_MAX_HEALTH_BYTES))
        models = [*health["models"]] if "models" in health else [health["model"]] if health["model"] else []
        return f"diskprefix answers there{' with ' if models else ''}{', '.join(map(shown, models))}"
    return "another program uses it"


def _configured(listener: socket.socket) -> socket.socket:
    """Sets the options that accepted sockets inherit.

    Without TCP_NODELAY, the first tokens of a stream wait 40 ms for an acknowledgement; asyncio does not set it here.
    The others are for clients that are gone or do not read: only the kernel knows whether a client has read a response.
    """
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": _KEEPALIVE_S,
        "TCP_KEEPINTVL": _KEEPALIVE_S,
        "TCP_KEEPCNT": _KEEPALIVE_PROBES,
        "TCP_USER_TIMEOUT": STALLED_S * 1000,
    }
    for name, value in options.items():
        # Linux has all of them, other systems some.
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return listener
