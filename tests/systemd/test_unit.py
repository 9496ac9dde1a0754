"""The units and the environment file, as far as they can be checked without starting them."""

from __future__ import annotations

import configparser
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diskprefix.engine import served_model
from diskprefix.errors import SettingsError
from diskprefix.extras.front import workers
from diskprefix.server.process import process
from diskprefix.settings import SETTINGS, Settings, default_kv_cache_dir, flag_of
from diskprefix.units import parse_duration, parse_size
from tests.closing import needs

SYSTEMD = Path(__file__).parent.parent.parent / "systemd"
UNIT = SYSTEMD / "diskprefix.service"
PROGRAM = "/opt/diskprefix/bin/diskprefix"


def section(unit: Path, name: str) -> configparser.SectionProxy:
    """A section of a unit. Of a directive that is there twice, the last one."""
    parser = configparser.ConfigParser(interpolation=None, comment_prefixes=("#",), delimiters=("=",), strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit, encoding="utf-8")
    return parser[name]


@pytest.fixture(scope="module")
def service() -> configparser.SectionProxy:
    return section(UNIT, "Service")


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


def test_a_stop_in_order_takes_less_time_than_systemd_gives_it(service: configparser.SectionProxy) -> None:
    grace_s = process.GRACE_S + process._SLOW_CLIENT_S
    longest_s = grace_s + served_model._FLUSH_TIMEOUT_S
    given_s = parse_duration(service["TimeoutStopSec"], param="TimeoutStopSec")
    assert given_s > 1.5 * longest_s
    assert longest_s + served_model._HIBERNATION_S < workers.MOST_UNLOAD_S
    assert grace_s + workers.MOST_UNLOAD_S + workers._REAPED_S < given_s


def test_each_directive_of_the_service_is_explained() -> None:
    unexplained, has_comment = [], False
    for line in UNIT.read_text(encoding="utf-8").split("\n"):
        if line.startswith("#"):
            has_comment = True
        elif "=" not in line:
            has_comment = False
        elif not has_comment:
            unexplained.append(line)
    names = ("Description=", "WantedBy=")
    assert [line for line in unexplained if not line.startswith(names)] == []


def test_the_check_has_the_user_and_the_folder_of_the_service(service: configparser.SectionProxy) -> None:
    check = section(SYSTEMD / "diskprefix-verify.service", "Service")
    for name in ("DynamicUser", "User", "CacheDirectory", "CacheDirectoryMode", "UMask", "EnvironmentFile"):
        assert check[name] == service[name]
    assert check["ExecStart"] == f"{PROGRAM} verify"


def test_the_socket_listens_where_the_daemon_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISKPREFIX_HOST", raising=False)
    for unit in (SYSTEMD / "diskprefix.socket", SYSTEMD / "user" / "diskprefix.socket"):
        assert section(unit, "Socket")["ListenStream"] == f"{Settings().host}:{Settings().port}"
        assert "Accept" not in section(unit, "Socket")


NEEDS_SYSTEMD = needs("systemd-analyze")


def analyze(*arguments: str | Path, runtime: Path) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, XDG_RUNTIME_DIR=str(runtime))
    command = ["systemd-analyze", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@NEEDS_SYSTEMD
@pytest.mark.parametrize("folder", [".", "user"])
def test_systemd_accepts_the_units(tmp_path: Path, folder: str) -> None:
    units = []
    for unit in sorted((SYSTEMD / folder).glob("*.*")):
        if unit.suffix in (".service", ".socket", ".timer"):
            # The program is not installed where the unit expects it, and its absence is an error for systemd.
            text = unit.read_text(encoding="utf-8")
            for program in (PROGRAM, "%h/.local/bin/diskprefix"):
                text = text.replace(program, sys.executable)
            units.append(tmp_path / unit.name)
            units[-1].write_text(text, encoding="utf-8")
    answer = analyze("verify", *(["--user"] if folder == "user" else []), *units, runtime=tmp_path)
    assert (len(units), answer.returncode, answer.stderr) == (4, 0, "")


@NEEDS_SYSTEMD
@pytest.mark.parametrize("unit", ["diskprefix.service", "diskprefix-verify.service"])
def test_systemd_finds_little_that_a_taken_over_service_could_do(unit: str, tmp_path: Path) -> None:
    answer = analyze("security", "--offline=true", "--threshold=20", SYSTEMD / unit, runtime=tmp_path)
    assert answer.returncode == 0, answer.stdout
    assert "Overall exposure level" in answer.stdout
