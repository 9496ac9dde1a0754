"""Without keys, what shows texts of prompts is for the daemon's own user and root, of the users of this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from diskprefix.server.process import local_user
from diskprefix.server.process.local_user import is_of_another_user, is_of_this_user
from tests.server.scripted import AppServer

ANOTHER = 54321


@pytest.fixture(params=["127.0.0.1", "::1", "::"])
def scope(request: pytest.FixtureRequest) -> Iterator[dict[str, object]]:
    """The scope of a connection as a server has it; at the address for any, of one by IPv4 to a socket of IPv6."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.create_server((request.param, 0), family=family, dualstack_ipv6=request.param == "::") as listener:
        host = "127.0.0.1" if request.param == "::" else request.param
        with socket.create_connection((host, listener.getsockname()[1])), listener.accept()[0] as accepted:
            yield {"client": accepted.getpeername()[:2], "server": accepted.getsockname()[:2]}


def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, inode: str = "77") -> None:
    """Has the kernel's tables name another user."""
    for number, place in enumerate(local_user._TABLES):
        lines = place.read_text().splitlines()
        changed = [line.split() for line in lines[1:]]
        for columns in changed:
            columns[7], columns[9] = str(user), inode
        (tmp_path / str(number)).write_text("\n".join([lines[0], *map(" ".join, changed)]))
    monkeypatch.setattr(local_user, "_TABLES", (tmp_path / "0", tmp_path / "1"))


def test_a_connection_of_the_same_user_is_known(scope: dict[str, object]) -> None:
    assert not is_of_another_user(scope)


def test_a_connection_of_another_user_is_known(
    scope: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table(tmp_path, monkeypatch, ANOTHER)
    assert is_of_another_user(scope)
    table_of_root = tmp_path / "root"
    table_of_root.mkdir()
    monkeypatch.undo()
    table(table_of_root, monkeypatch, 0)
    assert not is_of_another_user(scope)


def test_an_end_that_was_closed_is_nobodys_though_the_kernel_lists_it_as_roots(
    scope: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table(tmp_path, monkeypatch, 0, inode="0")
    assert is_of_another_user(scope)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_program_of_another_user_that_listens_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::") as listener:
        port = listener.getsockname()[1]
        assert is_of_this_user(port)
        table(tmp_path, monkeypatch, ANOTHER)
        assert not is_of_this_user(port)


@pytest.mark.parametrize("client", [("192.0.2.7", 5000), None])
def test_another_machine_and_a_socket_file_have_no_user_here(client: object) -> None:
    assert not is_of_another_user({"client": client, "server": ("192.0.2.1", 8642)})


@pytest.mark.parametrize("path", ["/dashboard/state", "/dashboard/clients", "/props"])
def test_another_user_sees_no_texts_of_prompts(server: AppServer, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    with server.client() as client:
        assert client.get(path).status_code == 200
        monkeypatch.setattr(os, "geteuid", lambda: ANOTHER)
        monkeypatch.setattr(local_user, "_users", lambda *_: iter([ANOTHER + 1]))
        answer: httpx.Response = client.get(path)
        assert answer.status_code == 403
        assert "--api-keys" in answer.json()["error"]["message"]
        assert client.get("/metrics").status_code == 200
