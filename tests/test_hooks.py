"""The places where extras join the core."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from diskprefix import hooks
from diskprefix.cli import command_places
from diskprefix.errors import SettingsError
from diskprefix.model.load.picture_processor import PicturesModel
from diskprefix.settings import Settings

_EXTRA = """
COMMANDS = {"hello": "hello_extra:hello"}

def hello():
    import click
    click.command()(lambda: click.echo("hello from outside"))()
"""


def test_the_own_extras_add_their_commands() -> None:
    assert set(hooks.commands()) == {
        *("pull", "list", "show", "rm"),
        *("verify", "purge", "compact", "backup", "restore"),
        *("launch", "clients", "ps", "stop", "run", "chat", "doctor", "service", "warm", "inspect", "dashboard", "top"),
        *("export", "import", "simulate"),
    }
    assert next(iter(command_places())) == "serve"
    for place in hooks.commands().values():
        assert hooks.command(place).name in hooks.commands()


def test_without_settings_that_ask_for_it_no_extra_joins() -> None:
    assert hooks.open_tier(Settings()) is None
    assert hooks.open_recorder(Settings(), lambda: 0) is None
    assert hooks.open_compression(Settings(), 1024, 1024) is None
    assert hooks.open_front(Settings()) is None


def test_settings_that_ask_for_an_extra_get_it() -> None:
    assert hooks.open_compression(Settings(prefill_compression="auto"), 1024, 1024) is not None
    assert hooks.open_front(Settings(front=True)) is not None


def test_the_threshold_of_compression_is_the_models_and_at_most_what_is_served() -> None:
    def threshold(wanted: str, served: int) -> int:
        compress: Any = hooks.open_compression(Settings(prefill_compression=wanted), 32768, served)
        return int(compress.args[0])

    assert [threshold("auto", served) for served in (32768, 30000, 20480)] == [24576, 22500, 15360]
    assert [threshold("30000", served) for served in (32768, 20480)] == [30000, 15360]
    with pytest.raises(SettingsError, match="40000 is not below the 32768 positions of this model"):
        threshold("40000", 20480)


def test_two_extras_that_answer_for_one_setting_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Extra(ModuleType):
        def open_tier(self, _: Settings) -> Any:
            return self

    monkeypatch.setattr(hooks, "extras", lambda: (Extra("one"), Extra("other")))
    with pytest.raises(SettingsError, match="two extras"):
        hooks.open_tier(Settings())


def test_pictures_are_prepared_by_another_distribution_where_it_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Other(ModuleType):
        def open_pictures(self, model: PicturesModel) -> Any:
            return None if model.problem() else self

    own, other = hooks.extras(), Other("other")
    pictured = PicturesModel(tmp_path, [], dict, lambda: None, lambda: None)
    monkeypatch.setattr(hooks, "extras", lambda: (*own, other))
    assert hooks.open_pictures(pictured) is other
    assert hooks.open_pictures(replace(pictured, problem=lambda: "text only")).problem == "text only"
    monkeypatch.setattr(hooks, "extras", lambda: (*own, other, Other("third")))
    with pytest.raises(SettingsError, match="two extras"):
        hooks.open_pictures(pictured)


def test_an_extra_that_cannot_be_loaded_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = EntryPoint("broken", "there_is_no_such_module", "diskprefix.extras")
    monkeypatch.setattr(hooks, "entry_points", lambda group: [broken])  # noqa: ARG005 (its keyword)
    assert len(hooks.extras.__wrapped__()) == len(hooks._OWN)
    assert "the extra broken is left out" in caplog.text


def test_another_distribution_adds_a_command(tmp_path: Path) -> None:
    (tmp_path / "hello_extra.py").write_text(_EXTRA)
    about = tmp_path / "hello_extra-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: hello-extra\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[diskprefix.extras]\nhello = hello_extra\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from diskprefix import hooks as h; "
    code += "h.command(h.commands()['hello'])()"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "hello from outside\n"
