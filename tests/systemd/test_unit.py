"""The units and the environment file, as far as they can be checked without starting them."""

from __future__ import annotations

import configparser
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from diskprefix.daemon.engine import served_model
from diskprefix.daemon.router import workers
from diskprefix.daemon.server.process import process
from diskprefix.daemon.settings import SETTINGS, Settings
from diskprefix.errors import DeviceLost, SettingsError
from diskprefix.folders import default_kv_cache_dir
from diskprefix.setting import flag_of
from diskprefix.units import parse_duration, parse_size
from tests.closing import needs

ROOT = Path(__file__).parent.parent.parent
SYSTEMD = ROOT / "systemd"
PROGRAM = "/opt/diskprefix/bin/diskprefix"


def section(unit: str, name: str) -> configparser.SectionProxy:
    """A section of a unit. Of a directive that is there twice, the last one."""
    parser = configparser.ConfigParser(interpolation=None, comment_prefixes=("#",), delimiters=("=",), strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(SYSTEMD / unit, encoding="utf-8")
    return parser[name]


@pytest.fixture(scope="module")
def service() -> configparser.SectionProxy:
    return section("diskprefix.service", "Service")


def test_the_service_runs_serve_as_a_user_of_its_own_that_says_when_it_is_ready(
    service: configparser.SectionProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, command, *arguments = service["ExecStart"].split()
    flags = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
    assert (program, command) == (PROGRAM, "serve")
    assert flags <= {flag_of(name) for name in SETTINGS} | {"--policy"}
    assert (service["Type"], service["NotifyAccess"]) == ("notify", "main")
    assert "AF_UNIX" in service["RestrictAddressFamilies"].split()
    assert (service["CacheDirectoryMode"], service["UMask"], service["DynamicUser"]) == ("0700", "0077", "yes")
    assert "MemoryDenyWriteExecute" not in service, "torch generates machine code"
    # All that is written lands in the cache directory.
    assert (service["CacheDirectory"], service["ProtectSystem"]) == ("diskprefix", "strict")
    assert service["Environment"] == "XDG_CACHE_HOME=%C/diskprefix"
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/diskprefix")
    monkeypatch.setenv("CACHE_DIRECTORY", "/var/cache/diskprefix")
    assert default_kv_cache_dir() == Path("/var/cache/diskprefix/kv")


def test_a_lost_accelerator_makes_it_start_again_and_wrong_settings_do_not(service: configparser.SectionProxy) -> None:
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"] == str(SettingsError.exit_code)
    assert DeviceLost.exit_code not in (0, SettingsError.exit_code)


def test_a_stop_in_order_takes_less_time_than_systemd_gives_it(service: configparser.SectionProxy) -> None:
    grace_s = process.GRACE_S + process._SLOW_CLIENT_S
    longest_s = grace_s + served_model._FLUSH_TIMEOUT_S
    given_s = parse_duration(service["TimeoutStopSec"], param="TimeoutStopSec")
    assert given_s > 1.5 * longest_s
    assert longest_s + served_model._SAVE_IDLE_S < workers.MAX_UNLOAD_S
    assert grace_s + workers.MAX_UNLOAD_S + workers._KILLED_S < given_s


def test_the_check_has_the_user_and_the_folder_of_the_service(service: configparser.SectionProxy) -> None:
    check = section("diskprefix-verify.service", "Service")
    for name in ("DynamicUser", "User", "CacheDirectory", "CacheDirectoryMode", "UMask", "EnvironmentFile"):
        assert check[name] == service[name]
    assert check["ExecStart"] == f"{PROGRAM} verify"


def test_the_socket_listens_where_the_daemon_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISKPREFIX_HOST", raising=False)
    for unit in ("diskprefix.socket", "user/diskprefix.socket"):
        assert section(unit, "Socket")["ListenStream"] == f"{Settings().host}:{Settings().port}"
        assert "Accept" not in section(unit, "Socket")
        assert section(unit, "Socket")["SocketMode"] == "0600", "of a path that somebody writes there"


def test_nobody_is_told_to_copy_secrets_for_all_to_read_or_to_run_a_script_unread() -> None:
    careless = re.compile(r"\bcp .*diskprefix\.env\b|\| *(?:\w+=\S* )*(?:ba|z)?sh\b")
    pages = [*ROOT.glob("*.md"), *(ROOT / "diskprefix").rglob("*.md"), *(ROOT / "diskprefix").rglob("*.toml")]
    texts = [path.read_text(encoding="utf-8") for path in (*pages, *SYSTEMD.rglob("*.*"))]
    assert sum("install -m 600 systemd/diskprefix.env" in text for text in texts) == 2
    assert [found for text in texts for found in careless.findall(text)] == []


def test_the_environment_file_names_every_setting_with_its_default_as_a_comment() -> None:
    lines = (SYSTEMD / "diskprefix.env").read_text(encoding="utf-8").splitlines()
    assert all(not line or line.startswith("#") for line in lines)
    assignments = [line.lstrip("#") for line in lines if line.lstrip("#").startswith("DISKPREFIX_")]
    variables = dict(line.split("=", maxsplit=1) for line in assignments)
    assert variables.keys() == {f"DISKPREFIX_{name.upper()}" for name in SETTINGS} | {"DISKPREFIX_POLICY"}
    for setting in (one for one in dataclasses.fields(Settings) if one.name in SETTINGS):
        shown = variables[f"DISKPREFIX_{setting.name.upper()}"]
        if isinstance(setting.default, bool):
            assert shown == ("on" if setting.default else "off")
        elif isinstance(setting.default, int):
            assert parse_size(shown, param=setting.name) == setting.default
        elif isinstance(setting.default, str) or setting.default is None:
            assert shown == (setting.default or "")


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


def test_nothing_names_a_second_index_for_packages() -> None:
    second = re.compile("extra.index", re.IGNORECASE)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    places = ("systemd/", "tools/", ".github/", ".ci/", "diskprefix/")
    files = [ROOT / name for name in listed.split("\0") if name.startswith(places)]
    texts = {file: file.read_bytes().decode(errors="replace") for file in files if file.is_file()}
    assert [str(file) for file, text in texts.items() if second.search(text)] == []
