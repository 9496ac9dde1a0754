"""The service unit and its environment file, as far as they can be checked without starting them."""

from __future__ import annotations

import configparser
import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from diskprefix.errors import SettingsError
from diskprefix.settings import SETTINGS, Settings, default_kv_cache_dir, flag_of, parse_size

SYSTEMD = Path(__file__).parent.parent.parent / "systemd"
UNIT = SYSTEMD / "diskprefix.service"
PROGRAM = "/opt/diskprefix/bin/diskprefix"


@pytest.fixture(scope="module")
def service() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, comment_prefixes=("#",), delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT, encoding="utf-8")
    return parser["Service"]


def example_variables() -> dict[str, str]:
    lines = (SYSTEMD / "diskprefix.env").read_text(encoding="utf-8").splitlines()
    assignments = [line.lstrip("#") for line in lines if line.lstrip("#").startswith("DISKPREFIX_")]
    return dict(line.split("=", maxsplit=1) for line in assignments)


def test_readiness_is_reported_by_the_daemon_itself(service: configparser.SectionProxy) -> None:
    assert service["Type"] == "notify"
    assert service["NotifyAccess"] == "main"
    assert "AF_UNIX" in service["RestrictAddressFamilies"].split()


def test_it_runs_serve_with_flags_that_exist(service: configparser.SectionProxy) -> None:
    program, command, *arguments = service["ExecStart"].split()
    flags = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
    assert (program, command) == (PROGRAM, "serve")
    assert flags <= {flag_of(name) for name in SETTINGS} | {"--policy"}


def test_what_people_wrote_is_private_to_the_service(service: configparser.SectionProxy) -> None:
    assert service["CacheDirectory"] == "diskprefix"
    assert service["CacheDirectoryMode"] == "0700"
    assert service["UMask"] == "0077"
    assert service["DynamicUser"] == "yes"


def test_everything_that_is_written_lands_in_the_cache_directory(
    service: configparser.SectionProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert service["ProtectSystem"] == "strict"
    assert service["Environment"] == "XDG_CACHE_HOME=%C/diskprefix"
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/diskprefix")
    monkeypatch.setenv("CACHE_DIRECTORY", "/var/cache/diskprefix")
    assert default_kv_cache_dir() == Path("/var/cache/diskprefix/kv")


def test_it_may_generate_machine_code_as_torch_does(service: configparser.SectionProxy) -> None:
    assert "MemoryDenyWriteExecute" not in service


def test_wrong_settings_do_not_make_it_start_again_and_again(service: configparser.SectionProxy) -> None:
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"] == str(SettingsError.exit_code)


def test_the_environment_file_names_every_setting_with_its_default() -> None:
    variables = example_variables()
    assert variables.keys() == {f"DISKPREFIX_{name.upper()}" for name in SETTINGS} | {"DISKPREFIX_POLICY"}
    for setting in dataclasses.fields(Settings):
        shown = variables[f"DISKPREFIX_{setting.name.upper()}"]
        if isinstance(setting.default, bool):
            assert shown == ("on" if setting.default else "off")
        elif isinstance(setting.default, int):
            assert parse_size(shown, param=setting.name) == setting.default
        elif isinstance(setting.default, str) or setting.default is None:
            assert shown == (setting.default or "")


def test_the_environment_file_changes_nothing_until_it_is_edited() -> None:
    lines = (SYSTEMD / "diskprefix.env").read_text(encoding="utf-8").splitlines()
    assert all(not line or line.startswith("#") for line in lines)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed here")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    # The program is not installed where the unit expects it, and its absence is an error for systemd.
    unit.write_text(UNIT.read_text(encoding="utf-8").replace(PROGRAM, sys.executable), encoding="utf-8")
    answer = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")
