"""`diskprefix service install` keeps all settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diskprefix.daemon.server.process.listener import listen
from diskprefix.daemon.settings import Settings
from diskprefix.desk.setup import service_command
from tests.daemon.cli.test_options import by_flags, values_of
from tests.desk.conftest import Run


class NoManager:
    """Starts nothing."""

    def state(self) -> dict[str, Any]:
        return {"state": "active"}

    def texts(self, _settings: Settings) -> dict[Path, str]:
        return {}

    def start(self, *, changed: bool) -> None:
        assert not changed


def test_a_service_is_installed_with_all_settings(
    run: Run, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (listener,) = listen("127.0.0.1", 0)
    with listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(service_command, "_manager", NoManager)
    monkeypatch.setattr(service_command, "_show", lambda *_: 0)
    values = values_of(tmp_path, chat_model) | {"port": str(port)}
    flags, _ = by_flags(values, tmp_path)
    assert run("service", "install", *flags).exit_code == 0
    installed = service_command._installed()
    assert installed is not None
    assert {name for name in values if getattr(installed, name) == getattr(Settings(), name)} == set()


def test_doctor_checks_all_settings(run: Run, chat_model: Path, tmp_path: Path) -> None:
    flags, _ = by_flags(values_of(tmp_path, chat_model), tmp_path)
    ended = run("doctor", "--json", *flags)
    # The folder of a test may be in memory, where a store should not be.
    problems = [one for one in ended.json["findings"] if one["level"] == "problem" and one["check"] != "file system"]
    assert problems == []
    assert ended.exit_code in (0, 1)
