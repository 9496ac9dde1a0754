"""The kernel says whose connection it is: over IPv4, IPv6, IPv4 mapped into IPv6, and at a path."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from tempfile import mkdtemp

import pytest

from diskprefix.server.process import peer_user
from diskprefix.server.process.peer_user import user_of
from tests.server.other_user import NOBODY, OTHER_USER, python_for_all

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems are not asked")

_CLIENT = """
import socket, sys
family, *address = sys.argv[1:]
with socket.socket(int(family), socket.SOCK_STREAM) as client:
    client.connect((address[0], int(address[1])) if len(address) > 1 else address[0])
    client.recv(1)
"""
KINDS = ["IPv4", "IPv6", "mapped, client of IPv4", "mapped, client of IPv6", "path"]


def listening(kind: str, folder: Path) -> tuple[socket.socket, list[str]]:
    """A listener, and the arguments of a client that connects to it."""
    if kind == "path":
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(folder / "socket"))
        (folder / "socket").chmod(0o777)
        listener.listen()
        return listener, [str(int(socket.AF_UNIX)), str(folder / "socket")]
    is_v4 = kind == "IPv4"
    listener = socket.create_server(
        ("127.0.0.1" if is_v4 else "::", 0),
        family=socket.AF_INET if is_v4 else socket.AF_INET6,
        dualstack_ipv6=not is_v4,
    )
    host = {"IPv6": "::1", "mapped, client of IPv6": "::ffff:127.0.0.1"}.get(kind, "127.0.0.1")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return listener, [str(int(family)), host, str(listener.getsockname()[1])]


@pytest.mark.cases(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("user", [0, OTHER_USER, NOBODY])
def test_the_user_is_that_of_the_process_which_connected(user: int, kind: str) -> None:
    python = python_for_all()
    # Other users cannot enter the temporary folder of this run.
    folder = Path(mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    listener, arguments = listening(kind, folder)
    listener.settimeout(60)
    with listener, subprocess.Popen([python, "-c", _CLIENT, *arguments], user=user, group=user, cwd="/"):
        accepted, _ = listener.accept()
        with accepted:
            assert user_of(accepted, takes_root=True) == (None if user == NOBODY else user)
            assert user_of(accepted, takes_root=False) == (OTHER_USER if user == OTHER_USER else None)
    (folder / "socket").unlink(missing_ok=True)
    folder.rmdir()


def test_a_closed_client_has_no_user() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        client.connect(listener.getsockname())
        own, accepted = client.getsockname(), listener.accept()[0]
        with accepted:
            assert user_of(accepted, takes_root=True) == os.geteuid()
            client.close()
            assert user_of(accepted, takes_root=True) is None, "an orphan"
        with socket.create_server(own) as other, socket.create_connection(other.getsockname()):
            # The exact question finds what listens there.
            user = peer_user._owner_of(*_numbers(own), *_numbers(("127.0.0.1", 1)))
            assert user is None


def _numbers(address: tuple[str, int]) -> tuple[IPv4Address | IPv6Address, int]:
    return ip_address(address[0]), address[1]


def test_a_missing_answer_of_the_kernel_names_no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            monkeypatch.setattr(peer_user, "_owner_of", refused)
            assert user_of(accepted, takes_root=True) is None
