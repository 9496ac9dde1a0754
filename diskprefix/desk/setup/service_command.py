"""`diskprefix service`: the daemon as a service of this user, under systemd, or under launchd on macOS.

The package contains the units of `systemd/user`; the program and the address are filled in. Options of `serve` are
written to a policy file, which the unit's `serve --policy` reads.
"""

from __future__ import annotations

import os
import plistlib
import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from pwd import getpwuid
from typing import Any

import click

from diskprefix.daemon.cli.options import GroupedCommand, build_settings, policy_option, policy_values, setting_options
from diskprefix.daemon.cli.serve_command import policy_text
from diskprefix.daemon.server.process.listener import listen
from diskprefix.daemon.settings import SETTINGS, Settings
from diskprefix.desk.shared.tooling import json_option, print_json
from diskprefix.errors import NotReady, SettingsError
from diskprefix.folders import config_home, units_folder
from diskprefix.printable import printable_only
from diskprefix.private_file import make_private_folder
from diskprefix.setting import CACHE

_PROGRAM = "%h/.local/bin/diskprefix"
"""The program in the units of `systemd/user`."""
_MARK = "diskprefix service install"
"""A text in each file that this command writes. It leaves files without it alone."""
_UNITS = ("diskprefix.socket", "diskprefix-verify.timer", "diskprefix.service")


def _replace(path: Path, text: str) -> None:
    """Writes a whole file or, on a full disk, leaves what was there: a part of one would lack `_MARK`."""
    make_private_folder(path.parent)
    # Options may hold secrets. A unit may be read by all: systemd logs a warning about one that may not.
    mode, new = 0o600 if path == _policy() else 0o644, path.with_name(f"{path.name}.new")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
            file.write(text)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


class _Systemd:
    """A user's systemd. It holds the port, even while the daemon restarts."""

    def texts(self, settings: Settings) -> dict[Path, str]:
        program = f"{_quoted(sys.executable)} -P -m diskprefix"
        serve = f"{program} serve --policy {_quoted(str(_policy()))}"
        units = {unit.name: unit.read_text("utf-8") for unit in units_folder().glob("*.*")}
        port = re.compile("(?<=^ListenStream=).*$", re.MULTILINE)
        return {
            config_home().parent / "systemd/user" / name: port.sub(
                _address(settings), text.replace(f"{_PROGRAM} serve", serve).replace(_PROGRAM, program)
            )
            for name, text in units.items()
        }

    def start(self, *, changed: bool) -> None:
        _run("systemctl", "--user", "daemon-reload")
        if changed:
            # A socket cannot start again while its service runs.
            _run("systemctl", "--user", "stop", *reversed(_UNITS))
        _run("systemctl", "--user", "enable", *_UNITS)
        _run("systemctl", "--user", "start", *_UNITS[:2])
        # The model may take minutes to load or to fetch.
        _run("systemctl", "--user", "start", "--no-block", _UNITS[2])

    def stop(self) -> None:
        _run("systemctl", "--user", "disable", "--now", *reversed(_UNITS))

    def state(self) -> dict[str, Any]:
        output = _run("systemctl", "--user", "show", _UNITS[2], "--property=ActiveState,StatusText,MainPID")
        values = dict(line.split("=", 1) for line in output.splitlines())
        lingers = Path("/var/lib/systemd/linger", getpwuid(os.getuid()).pw_name).exists()
        pid = int(values["MainPID"]) or None
        return {"state": values["ActiveState"], "pid": pid, "status": values["StatusText"], "lingers": lingers}


class _Launchd:
    """A user's launchd on macOS. Written from its documentation, and never tried. It does not hold the port."""

    def texts(self, _settings: Settings) -> dict[Path, str]:
        agent = {
            "Label": "diskprefix",
            "ProgramArguments": [sys.executable, "-P", "-m", "diskprefix", "serve", "--policy", str(_policy())],
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "StandardErrorPath": str(Path.home() / "Library/Logs/diskprefix.log"),
        }
        text = plistlib.dumps(agent).decode().replace("<plist", f"<!-- Written by `{_MARK}` -->\n<plist", 1)
        return {Path.home() / "Library/LaunchAgents/diskprefix.plist": text}

    def start(self, *, changed: bool) -> None:
        if changed:
            self.stop()
        if self.state()["state"] != "active":
            _run("launchctl", "bootstrap", f"gui/{os.getuid()}", *map(str, self.texts(Settings())))

    def stop(self) -> None:
        with suppress(NotReady):
            _run("launchctl", "bootout", f"gui/{os.getuid()}/diskprefix")

    def state(self) -> dict[str, Any]:
        with suppress(NotReady):
            output = _run("launchctl", "print", f"gui/{os.getuid()}/diskprefix")
            if pid := re.search(r"^\s*pid = (\d+)", output, re.MULTILINE):
                return {"state": "active", "pid": int(pid[1])}
        return {"state": "inactive", "pid": None}


def _run(*command: str) -> str:
    """Returns the output of a command. Raises `NotReady` with the first line of its errors."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise NotReady(f"{command[0]} was not found, so there are no services here; run `diskprefix serve`") from error
    if done.returncode:
        reason, *_ = [*done.stderr.strip().splitlines(), f"exit code {done.returncode}"]
        hint = "`journalctl --user -u diskprefix` may say more"
        if "connect to bus" in reason or "not been booted" in reason:
            hint = "this user has no systemd session: log in as the user, or run `diskprefix serve`"
        raise NotReady(f"{' '.join(command[:3])}: {reason}; {hint}")
    return done.stdout


def _quoted(text: str) -> str:
    """Returns a text as an argument of ExecStart=."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _address(settings: Settings) -> str:
    """Returns the host's IP address and the port: ListenStream= takes no names. Raises `SettingsError`."""
    try:
        addresses = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"--host: {settings.host!r} cannot be resolved: {error}") from error
    host = str(min(addresses, key=lambda address: address[0] != socket.AF_INET)[-1][0])
    return f"[{host}]:{settings.port}" if ":" in host else f"{host}:{settings.port}"


def _manager() -> _Systemd | _Launchd:
    return _Launchd() if sys.platform == "darwin" else _Systemd()


def _policy() -> Path:
    return config_home() / "service.toml"


def _installed() -> Settings | None:
    """Returns the settings of the installed service, or None."""
    return build_settings(policy_values(str(_policy()))) if _policy().exists() else None


@click.group(short_help="Run the daemon as a service of this user.")
def service() -> None:
    """Run the daemon as your own service: it starts at login, and again after a failure. No root is needed.

    systemd holds the port, so requests that arrive while the daemon starts wait. On macOS, launchd starts the daemon;
    this was written from launchd's documentation and not tried.

    \b
    diskprefix service install --model ~/models/qwen
    diskprefix service status --json
    journalctl --user -u diskprefix -f
    diskprefix service remove

    Exit codes: 0 done; 1 it does not run, or this user has no systemd session; 2 wrong usage.
    """


@service.command(cls=GroupedCommand)
@json_option
@setting_options(SETTINGS, "As for serve: ")
@policy_option("As for serve: " + CACHE)
def install(as_json: bool, **flags: Any) -> int:
    """Start the daemon now and at each login, with the given options of `serve`.

    Options and DISKPREFIX_ variables are written to ~/.config/diskprefix/service.toml. A second install replaces them,
    and restarts the daemon if something changed. The daemon stops when you log out, unless lingering is on: `loginctl
    enable-linger` starts your services at boot and keeps them running.

    Exit codes: 0 done; 1 this user has no systemd session; 2 wrong usage, or the port is in use.
    """
    settings, manager, before = build_settings(flags), _manager(), _installed()
    manager.state()
    if not settings.port:
        raise SettingsError("--port: a service needs a fixed port, not 0")
    if before is None or _address(before) != _address(settings):
        for listener in listen(settings.host, settings.port):
            listener.close()
    policy = f"# Written by `{_MARK}`: the settings of the service.\n{policy_text(settings)}"
    texts = {_policy(): policy} | manager.texts(settings)
    old = {path: path.read_text("utf-8") if path.exists() else None for path in texts}
    for path, text in old.items():
        if text is not None and _MARK not in text:
            raise SettingsError(f"{path} was not written by `{_MARK}`; move it away first")
    for path, text in texts.items():
        _replace(path, text)
    manager.start(changed=any(old.values()) and old != texts)
    return _show(manager, as_json)


@service.command()
@json_option
def status(as_json: bool) -> int:
    """Show whether the service is installed and runs.

    Exit codes: 0 it runs or starts; 1 it does not, or this user has no systemd session.
    """
    return _show(_manager(), as_json)


@service.command()
@json_option
def remove(as_json: bool) -> None:
    """Stop the daemon and remove the service. Models and saved prompts stay.

    Exit codes: 0 done, or nothing was installed; 1 this user has no systemd session.
    """
    manager, was_installed = _manager(), _installed() is not None
    if was_installed:
        manager.stop()
        for path in (*manager.texts(Settings()), _policy()):
            path.unlink(missing_ok=True)
    if as_json:
        print_json({"installed": False, "removed": was_installed})
    else:
        click.echo("the service is removed" if was_installed else "no service was installed")


def _show(manager: _Systemd | _Launchd, as_json: bool) -> int:
    """Shows the state of the service. Returns 0 if it runs or starts, else 1."""
    installed, state = _installed(), manager.state()
    url = None if installed is None else f"http://{_address(installed)}"
    if as_json:
        print_json({"installed": url is not None, "url": url, "settings": str(_policy())} | state)
    elif url is None:
        click.echo(f"no service is installed; run `{_MARK}`")
    else:
        pid = f" (pid {state['pid']})" if state["pid"] else ""
        click.echo(printable_only(f"{state['state']}{pid} {state.get('status', '')}".rstrip()))
        click.echo(f"{url}; its settings: {_policy()}")
        if state.get("lingers") is False:
            click.echo("it stops when you log out; `loginctl enable-linger` keeps it running, from boot on")
    return 0 if state["state"] in ("active", "activating", "reloading") else 1
