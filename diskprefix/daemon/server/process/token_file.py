"""Files by which commands of the daemon's user know that a daemon is theirs, and find its token and its settings.

Each address on which a daemon listens has a file that only the user can read. The daemon holds a lock on the file as
long as it lives, and no other program can listen on the address meanwhile. So a command knows, before it sends
anything, that the daemon at the other end belongs to its own user.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import logging
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from diskprefix.daemon.server.process.peer_user import NAMES_USERS
from diskprefix.folders import cache_home
from diskprefix.private_file import distrusted_by_root, make_private_folder

log = logging.getLogger("diskprefix")

_FOLDER = "daemons"
_OF_THE_SERVICE = Path("/var/cache/diskprefix/diskprefix") / _FOLDER
"""The folder of the systemd service, which root can read."""
_OF_AN_ADDRESS = re.compile(r"[^.].*_\d+")
_MAX_BYTES = 1 << 20
UNPUBLISHED = "commands need the token in --api-key"
"""What a daemon logs if it cannot write its files."""


class _Published(NamedTuple):
    """The content of the file of a daemon. `settings` are JSON."""

    pid: int
    token: str
    settings: str


@contextmanager
def published_token(token: str, listeners: Sequence[socket.socket], settings: Mapping[str, Any] = {}) -> Iterator[None]:
    """Writes the token of a daemon ("" with API keys) and the settings that all its models have to a file for each of
    its addresses, or logs why it cannot."""
    # A relative path means another folder to the commands.
    content = f"{os.getpid()} {token}\n{json.dumps(settings, default=os.path.realpath)}"
    with ExitStack() as stack:
        try:
            for name in dict.fromkeys(name for listener in listeners for name in _names(listener)):
                stack.enter_context(_published(content, name))
        except OSError as error:
            folder = cache_home() / _FOLDER
            log.warning("%s: no file in %s (%s)", UNPUBLISHED, folder, error.strerror)
        yield


@contextmanager
def _published(content: str, name: str) -> Iterator[None]:
    """Raises `OSError`."""
    folder = cache_home() / _FOLDER
    if (reason := distrusted_by_root(folder)) is not None:
        raise PermissionError(0, reason)
    make_private_folder(folder)
    folder.chmod(0o700)
    # The file has mode 0600, and is locked before it has its name: a file without a lock belongs to a daemon that has
    # ended.
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".", delete=False) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(content.encode())
            file.flush()
            with open(os.open(folder / ".lock", os.O_WRONLY | os.O_CREAT, 0o600), "wb") as lock:
                # Two daemons that start at once do not remove each other's files.
                fcntl.flock(lock, fcntl.LOCK_EX)
                _remove_stale(folder)
                os.replace(file.name, folder / name)
        except OSError:
            os.unlink(file.name)
            raise
        try:
            yield
        finally:
            with suppress(OSError):
                if os.path.samestat(os.fstat(file.fileno()), (folder / name).stat()):
                    (folder / name).unlink()


def _remove_stale(folder: Path) -> None:
    """Removes the files of daemons that were killed."""
    for path in folder.iterdir():
        with suppress(OSError, UnicodeError):
            if _OF_AN_ADDRESS.fullmatch(path.name) and _read(path) is None:
                path.unlink()


def daemon_at(host: str, port: int) -> tuple[int, str] | None:
    """Returns the process and the token of the daemon at an address of this machine; the token is "" if it has API
    keys. Returns None if no daemon of this user listens there. Root also finds the systemd service."""
    everywhere = "::" if ":" in host else "0.0.0.0"
    for folder in (cache_home() / _FOLDER, _OF_THE_SERVICE):
        for name in (f"{host}_{port}", f"{everywhere}_{port}"):
            with suppress(OSError, ValueError):
                if (daemon := _read(folder / name)) is not None:
                    return daemon.pid, daemon.token
    return None


def token_at(host: str, port: int) -> str | None:
    daemon = daemon_at(host, port)
    return None if daemon is None else daemon[1]


def token_for(url: str) -> str | None:
    """Returns the `token_at` the address in a URL. Nothing is sent there."""
    parts = urlsplit(url)
    return token_at(parts.hostname or "", parts.port or 0)


def own_daemons() -> dict[int, str]:
    """Returns the processes of this user's daemons that listen on ports of this machine, each with an address, those
    that were started last first. Root also finds the systemd service."""
    daemons: dict[int, str] = {}
    for file, daemon in _all_published():
        host, _, port = file.name.rpartition("_")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        daemons[daemon.pid] = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    return daemons


def own_settings() -> list[tuple[dict[str, Any], float]]:
    """Returns the settings of each of the `own_daemons` as JSON has them, and the time in seconds since 1970 at which
    it was started with them. Settings that one of several models may have for itself are missing."""
    return [(json.loads(daemon.settings or "{}"), _made_at(file)) for file, daemon in _all_published()]


def _all_published() -> Iterator[tuple[Path, _Published]]:
    """Yields the files of this user's daemons, those that were started last first."""
    files = list[Path]()
    for folder in (cache_home() / _FOLDER, _OF_THE_SERVICE):
        # Only root may enter that of the service.
        with suppress(OSError):
            files += folder.glob("[!.]*_*")
    for file in sorted(files, key=_made_at, reverse=True):
        with suppress(OSError, ValueError):
            if (daemon := _read(file)) is not None:
                yield file, daemon


def agents_key(token: str) -> str:
    """Returns the key by which the owner's agents are known where the kernel names no users. It gives no rights of the
    owner, and like the daemon's `token` it is worth nothing after the daemon has ended: an agent may send it to any
    program that listens on the port later."""
    return hmac.new(token.encode(), b"agents", "sha256").hexdigest()


def is_of_this_machine(connected: socket.socket) -> bool:
    (host, *_), (own, *_) = connected.getpeername(), connected.getsockname()
    return bool(host == own or ip_address(host).is_loopback)


def token_of_peer(connected: socket.socket) -> str | None:
    """Returns the `token_at` the other end of a connection. Returns None for other machines."""
    return token_at(*connected.getpeername()[:2]) if is_of_this_machine(connected) else None


def page_link(url: str, token: str, page: str = "") -> str:
    """Returns the link to a page, "" for the dashboard. No server and no log gets the part after #."""
    return f"{url}/{page}#token={quote(token, safe='')}" if token else f"{url}/{page}"


_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def log_key(token: str) -> str:
    """Returns the key in links of logs, which have other readers: it has the rights of the `token` only over a
    connection that the kernel says is the daemon's user's."""
    return hmac.new(token.encode(), b"log", "sha256").hexdigest()


def shown_link(url: str, token: str, page: str = "") -> str:
    """Returns the link to a page for standard error. A terminal shows the token. A log has `log_key` in its place, and
    nothing where the kernel names no users, as for connections from another machine or a container."""
    if token and not sys.stderr.isatty():
        token = log_key(token) if NAMES_USERS and urlsplit(url).hostname in _LOOPBACK else ""
    return page_link(url, token, page)


def _read(file: Path) -> _Published | None:
    """Returns what a daemon has published, None if it has ended or is another user's."""
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
        if os.geteuid() not in (0, os.fstat(opened.fileno()).st_uid):
            return None
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            line, _, settings = opened.read(_MAX_BYTES).decode("ascii").partition("\n")
            pid, _, token = line.partition(" ")
            return _Published(int(pid), token, settings)
        return None


def _made_at(file: Path) -> float:
    with suppress(OSError):
        return file.stat().st_mtime
    return 0.0


def _names(listener: socket.socket) -> list[str]:
    if listener.family == socket.AF_UNIX:
        return []
    host, port, *_ = listener.getsockname()
    is_dual = host == "::" and not listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
    return [f"{host}_{port}", *([f"0.0.0.0_{port}"] if is_dual else [])]
