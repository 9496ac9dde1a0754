"""Notifications to systemd without a listener."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from diskprefix.server.process.systemd import notify


def test_without_a_socket_nothing_is_sent(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    with caplog.at_level(logging.DEBUG):
        notify(READY=1)
    assert caplog.records == []


@pytest.mark.parametrize("address", ["missing", "x" * 200])
def test_a_socket_that_cannot_be_reached_is_logged_and_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, address: str
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / address))
    with caplog.at_level(logging.WARNING):
        notify(READY=1)
    assert "cannot notify systemd" in caplog.text
