"""The sockets on which the daemon listens, and the connections that they accept."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from diskprefix.errors import SettingsError
from diskprefix.server.process import listener as listening
from diskprefix.server.process.listener import LAUNCHED_FD, listen, open_listeners
from diskprefix.settings import Settings


@pytest.mark.parametrize("host", ["300.1.1.1", "no such host"])
def test_a_host_that_cannot_be_resolved_is_refused(host: str) -> None:
    with pytest.raises(SettingsError, match="--host"):
        listen(host, 0)


def test_of_two_passed_addresses_the_one_that_others_reach_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = [socket.create_server((address, 0)) for address in ("127.0.0.1", "0.0.0.0")]
    monkeypatch.setattr(listening, "passed_sockets", lambda: passed)
    settings, listeners = open_listeners(Settings())
    assert (settings.host, settings.port) == passed[1].getsockname()
    assert listeners == passed
    for one in passed:
        one.close()


def test_a_launch_passes_the_socket_on_which_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as passed:
        monkeypatch.setenv(LAUNCHED_FD, str(os.dup(passed.fileno())))
        settings, [listener] = open_listeners(Settings())
        with listener:
            assert (settings.host, settings.port) == listener.getsockname() == passed.getsockname()
        assert LAUNCHED_FD not in os.environ
        open_listeners(Settings(port=0))[1][0].close()
    read, write = os.pipe()
    monkeypatch.setenv(LAUNCHED_FD, str(read))
    with pytest.raises(SettingsError, match=f"descriptor {read} is no socket"):
        open_listeners(Settings())
    for one in (read, write):
        os.close(one)


def test_an_address_that_this_machine_lacks_is_left_out_if_there_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def two_addresses(*_: object, **__: object) -> list[Any]:
        return [(socket.AF_INET, 0, 0, "", (address, 0)) for address in ("203.0.113.7", "127.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", two_addresses)
    [listener] = listen("both", 0)
    assert listener.getsockname()[0] == "127.0.0.1"
    listener.close()


def test_a_port_in_use_on_one_of_two_addresses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        def two_addresses(*_: object, **__: object) -> list[Any]:
            return [(socket.AF_INET, 0, 0, "", (address, port)) for address in ("127.0.0.2", "127.0.0.1")]

        monkeypatch.setattr(socket, "getaddrinfo", two_addresses)
        with pytest.raises(SettingsError, match=f"both:{port}: Address already in use"):
            listen("both", port)


def test_port_0_takes_a_free_port_of_one_address() -> None:
    listeners = listen("localhost", 0)
    try:
        assert len(listeners) == 1
        assert listeners[0].getsockname()[1] > 0
    finally:
        for listener in listeners:
            listener.close()


def test_small_writes_are_sent_at_once() -> None:
    (listener,) = listen("127.0.0.1", 0)
    with listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_client_of_an_idle_connection_is_probed() -> None:
    (listener,) = listen("127.0.0.1", 0)
    with listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < listening.STALLED_S
