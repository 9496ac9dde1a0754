"""The kernel says whose connection it is: over IPv4, IPv6, IPv4 mapped into IPv6, and at a path."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from tempfile import mkdtemp

import pytest

from diskprefix.daemon.server.process import peer_user
from diskprefix.daemon.server.process.peer_user import is_client_open, user_of
from tests.daemon.server.other_user import NOBODY, OTHER_USER, python_for_all

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems are not asked")

_CLIENT = """
import socket, sys
kind, family, *address = sys.argv[1:]
MPTCP, SO_BINDTODEVICE = 262, 25
with socket.socket(int(family), socket.SOCK_STREAM, MPTCP if "multipath" in kind else 0) as client:
    if "another address" in kind:
        client.bind((kind.split()[-1], 0))
    if "bound" in kind:
        client.setsockopt(socket.SOL_SOCKET, SO_BINDTODEVICE, b"lo")
    client.connect((address[0], *map(int, address[1:])) if len(address) > 1 else address[0])
    if "half closed" in kind:
        client.shutdown(socket.SHUT_WR)
    client.recv(1)
"""
SOCKETS = ["bound", "multipath", "multipath and bound", "half closed", "bound and half closed", "of a user namespace"]
"""Kinds of sockets that any user can make."""
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
        ("0.0.0.0" if is_v4 else "::", 0),
        family=socket.AF_INET if is_v4 else socket.AF_INET6,
        dualstack_ipv6=not is_v4,
    )
    host = {"IPv6": "::1", "mapped, client of IPv6": "::ffff:127.0.0.1"}.get(kind, "127.0.0.1")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return listener, [str(int(family)), host, str(listener.getsockname()[1])]


@contextmanager
def accepted_from(user: int, kind: str, socket_kind: str = "plain") -> Iterator[socket.socket]:
    """The daemon's end of a connection that a process of `user` has opened."""
    python = python_for_all()
    # Other users cannot enter the temporary folder of this run.
    folder = Path(mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    listener, arguments = listening(kind, folder)
    listener.settimeout(60)
    command = [python, "-c", _CLIENT, socket_kind, *arguments]
    if "namespace" in socket_kind:
        command = ["unshare", "--user", "--map-root-user", *command]
    with listener, subprocess.Popen(command, user=user, group=user, cwd="/"):
        accepted, _ = listener.accept()
        with accepted:
            if "half closed" in socket_kind:
                # The client's end has arrived, and stays unread.
                assert accepted.recv(1, socket.MSG_PEEK) == b""
            yield accepted
    (folder / "socket").unlink(missing_ok=True)
    folder.rmdir()


@pytest.mark.cases(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("user", [0, OTHER_USER, NOBODY])
def test_the_user_is_that_of_the_process_which_connected(user: int, kind: str) -> None:
    with accepted_from(user, kind) as accepted:
        assert user_of(accepted, takes_root=True) == (None if user == NOBODY else user)
        assert user_of(accepted, takes_root=False) == (OTHER_USER if user == OTHER_USER else None)


@pytest.mark.cases(4)
@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize("socket_kind", SOCKETS)
def test_no_kind_of_socket_hides_its_user(socket_kind: str, kind: str) -> None:
    if "namespace" in socket_kind and not may_make_namespaces():
        pytest.skip("this system lets no user make a namespace")
    with accepted_from(OTHER_USER, kind, socket_kind) as accepted:
        assert user_of(accepted, takes_root=False) == OTHER_USER


def test_a_client_with_another_address_of_the_machine_has_its_user() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            # Sends nothing.
            asking.connect(("192.0.2.1", 9))
            [address, _] = asking.getsockname()
        except OSError:
            address = "127.0.0.2"
    with accepted_from(OTHER_USER, "IPv4", f"from another address {address}") as accepted:
        assert (accepted.getpeername()[0], accepted.getsockname()[0]) == (address, "127.0.0.1")
        assert user_of(accepted, takes_root=False) == OTHER_USER


def test_a_client_of_a_link_local_address_has_its_user() -> None:
    lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    local = [(str(IPv6Address(bytes.fromhex(line[0]))), int(line[1], 16)) for line in lines if line[0][:4] == "fe80"]
    host, interface = local[0] if local else ("::1", 0)
    with socket.create_server((host, 0, 0, interface), family=socket.AF_INET6) as listener:
        arguments = [str(int(socket.AF_INET6)), host, str(listener.getsockname()[1]), "0", str(interface)]
        command = [python_for_all(), "-c", _CLIENT, "plain", *arguments]
        with subprocess.Popen(command, user=OTHER_USER, group=OTHER_USER, cwd="/"):
            accepted, _ = listener.accept()
            with accepted:
                assert user_of(accepted, takes_root=False) == OTHER_USER


def may_make_namespaces() -> bool:
    command = ["unshare", "--user", "--map-root-user", "true"]
    tried = subprocess.run(command, user=OTHER_USER, group=OTHER_USER, cwd="/", capture_output=True, check=False)
    return tried.returncode == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_sends_nothing_more_is_open_until_it_closes(kind: str, tmp_path: Path) -> None:
    listener, (family, *address) = listening(kind, tmp_path)
    with listener, socket.socket(int(family), socket.SOCK_STREAM) as client:
        client.connect((address[0], int(address[1])) if kind != "path" else address[0])
        accepted, _ = listener.accept()
        with accepted:
            assert is_client_open(accepted)
            client.shutdown(socket.SHUT_WR)
            assert accepted.recv(1) == b""
            assert is_client_open(accepted)
            client.close()
            assert not is_client_open(accepted)


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
            user = peer_user._owner_of(*_numbers(own), *_numbers(("127.0.0.1", 1)), interface=1)
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
