"""What the daemon listens on, what it answers before the application is there, and what it tells systemd."""

from __future__ import annotations

import logging
import resource
import socket
from pathlib import Path
from typing import Any, cast

import pytest

from diskprefix.daemon.server.process import listener as listening
from diskprefix.daemon.server.process.listener import listen, open_listeners
from diskprefix.daemon.server.process.process import uvicorn_config
from diskprefix.daemon.server.process.systemd import notify
from diskprefix.daemon.settings import Settings
from diskprefix.errors import SettingsError


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: tuple[str, int]) -> None:
    resolved = [(socket.AF_INET, 0, 0, "", address) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: resolved)


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
    for listener in passed:
        listener.close()


def test_an_absent_address_is_skipped_if_another_works(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, ("203.0.113.7", 0), ("127.0.0.1", 0))
    [listener] = listen("both", 0)
    assert listener.getsockname()[0] == "127.0.0.1"
    listener.close()


def test_a_port_in_use_on_one_of_two_addresses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        resolve_to(monkeypatch, ("127.0.0.2", port), ("127.0.0.1", port))
        with pytest.raises(SettingsError, match=f"both:{port}: Address already in use"):
            listen("both", port)


def test_port_0_takes_one_address_and_sets_the_socket_options() -> None:
    (listener,) = listen("localhost", 0)
    with listener, socket.create_connection(listener.getsockname()[:2]):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < listening.STALLED_S


@pytest.mark.parametrize("address", [None, "missing", "x" * 200])
def test_an_unreachable_systemd_socket_is_only_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, address: str | None
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    if address is not None:
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / address))
    with caplog.at_level(logging.DEBUG):
        notify(READY=1)
    assert ["cannot notify systemd" in message for message in caplog.messages] == [True] * (address is not None)


@pytest.mark.parametrize(
    ("files", "limits", "accepts"),
    [(96, (16, 8, 8), 16), (1024, (520, 224, 296), 32), (resource.RLIM_INFINITY, (520, 224, 296), 32)],
)
def test_connections_leave_open_files_for_the_rest(
    files: int, limits: tuple[int, ...], accepts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 idle connections at `ulimit -n 96` stopped a daemon, with a traceback for each try to accept another."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (files, files))
    settings = Settings(kv_cache_dir=Path(), max_sequences=8, max_queue=64)
    config = uvicorn_config(cast("Any", None), settings)
    places, _ = cast("Any", config.http).args
    assert (places.most, places.most_new, places.most_of_share) == limits
    assert config.backlog == accepts
