"""What the daemon and each command write is the user's alone, even with the umask 0."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.server.daemon_process import CHAT, DaemonProcess, ask, clean_environment, reply_to, serve_flags
from tests.desk.conftest import Run
from tests.waiting import wait_for


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in which everything is written: the user's home and its caches, the system's temporary files."""
    # Folders above are made by the test.
    folder = tmp_path / "place"
    for variable, name in (("HOME", "home"), ("TMPDIR", "tmp")):
        (folder / name).mkdir(parents=True)
        monkeypatch.setenv(variable, str(folder / name))
    for variable in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(variable, raising=False)
    # A program for which the daemon is asked, a browser, and the system's services.
    (tmp_path / "bin").mkdir()
    for name in ("claude", "browser", "systemctl"):
        program = tmp_path / "bin" / name
        program.write_text("#!/bin/sh\necho ActiveState=active\necho StatusText=\necho MainPID=0\n", encoding="utf-8")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("BROWSER", str(tmp_path / "bin" / "browser"))
    before = os.umask(0)
    yield folder
    os.umask(before)


UNITS = (".service", ".socket", ".timer")


def written(place: Path) -> dict[str, int]:
    """The modes of all that is in the place, but for the folders that the test made."""
    own = {place / "home", place / "tmp"}
    return {
        str(path.relative_to(place)): path.lstat().st_mode
        for path in sorted(place.rglob("*"))
        if path not in own and not path.is_symlink()
    }


def exposed(place: Path) -> dict[str, str]:
    """What others may read, enter or write to, with its mode. A socket is as private as its folder."""
    found = {}
    for name, mode in written(place).items():
        # systemd warns of a unit that others cannot read. It holds no secret.
        allowed = 0o644 if name.endswith(UNITS) else 0o700
        if stat.S_IMODE(mode) & ~allowed and not stat.S_ISSOCK(mode):
            found[name] = f"{stat.S_IMODE(mode):o}"
    return found


@pytest.mark.slow
def test_a_daemon_and_each_command_write_what_only_the_user_may_read(
    place: Path, chat_model: Path, run: Run, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("a key that machines share", encoding="utf-8")
    folder, bucket = place / "home/.cache/diskprefix/kv", place / "shared/tier"
    flags = serve_flags(
        chat_model,
        folder,
        remote_tier=bucket.as_uri(),
        namespace_key_file=key,
        remote_write="all",
        record=place / "home/requests.jsonl",
    )
    environment = clean_environment(HF_HUB_CACHE=str(tmp_path / "hub"))
    with DaemonProcess(*flags, "--router", environment=environment, module="tests.desk.umask_zero") as daemon:
        ask(daemon, "What do birds eat in winter?")
        with daemon.client() as client:
            body = {"model": chat_model.name, "messages": [{"role": "user", "content": "keep this"}], "max_tokens": 1}
            reply_to(client, body, CHAT)
        daemon.wait_saved()
        wait_for(lambda: any(path.is_file() for path in bucket.rglob("*")))
        run("dashboard", "--url", daemon.url)
        run("launch", "claude", "--anyway", "--url", daemon.url)
        during = written(place)
        assert exposed(place) == {}
        daemon.stop()
    at_cache = ("--kv-cache-dir", folder)
    entry = run("inspect", "--json", *at_cache).json["entries"][0]["id"]
    for command in (
        ("export", entry, "--output", place / "home/entry.safetensors"),
        ("backup", place / "home/backup"),
        ("compact",),
        ("verify", "--fix"),
        ("purge", entry, "--yes"),
        ("import", place / "home/entry.safetensors", "--trust"),
        ("purge", entry, "--yes", "--erase"),
    ):
        ended = run(*command, *at_cache)
        assert ended.exit_code == 0, (command, ended.stderr)
    assert run("restore", "--yes", place / "home/backup", *at_cache).exit_code == 0
    assert run("service", "install", "--ahead", "off").exit_code == 0
    assert exposed(place) == {}
    names = {Path(name).name for name in (*during, *written(place))}
    assert names >= {
        *("data.mdb", "lock.mdb", "diskprefix.lock", "requests.jsonl", "about", "key", "dashboard.html"),
        *("entry.safetensors", "service.toml", "diskprefix.service", "session.lock", "written.json", "crash.log"),
    }, names
