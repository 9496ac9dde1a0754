"""The first prompt of an agent: from one run of it without a network, against a stand-in that ends each reply at once.
Nothing of the run is kept but the request.

The run is a process of its own (`python -P -m diskprefix.desk.warm.first_prompt`), which first gets an empty
network, mounts and process numbers of its own: the agent reaches only the stand-in, can write nothing in the current
folder, writes to a copy of its profile, and all that it started ends with the run. Agents write the names of both
folders and the newest commits into their prompts. Where the system does not allow this, the agent runs in an empty
repository, and a proxy that is none refuses other addresses.

That keeps a run from changing anything by mistake. It is no sandbox: the agent has the rights of its user, may write
elsewhere, and reaches programs that listen at a path (Docker, ssh-agent).
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from diskprefix.desk.shared.recipes.recipe import KnownAgent, Served, recipe
from diskprefix.desk.warm.stand_in import StandIn
from diskprefix.errors import SettingsError
from diskprefix.printable import shown
from diskprefix.private_file import make_private_folder

_LIMIT_S, _AFTER_S = 120.0, 10.0
"""Seconds that a run may take, and seconds that it may go on after its first request with tools."""
_POLL_S = 0.05
_MAX_FILE_BYTES, _MAX_FILES, _MAX_DEPTH = 1 << 18, 200, 3
"""Of the user's profile, so many files of at most this size are copied: settings, but no conversations."""
_APART = 0x10000000 | 0x20000000 | 0x40000000 | 0x00020000
"""CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET and CLONE_NEWNS."""
_MS_BIND, _MS_REC, _MS_OF_PROC = 4096, 16384, 2 | 4 | 8
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _NUM_CAPABILITIES = 1, 24, 38, 64
_CAPABILITY_VERSION_3 = 0x20080522


class FirstPrompt(Struct, frozen=True):
    """A request of an agent: its route and its body. `had_network`: the run could not leave the network."""

    route: str
    body: dict[str, Any]
    had_network: bool = False


class _Run(Struct, frozen=True):
    """The input of the process of a run, as JSON."""

    agent: KnownAgent
    program: str
    served: Served
    profile: str
    own_profile: str
    """The user's profile of the agent, which may not exist."""
    current: str
    """The folder in which the session begins."""


def first_prompt(agent: KnownAgent, served: Served, profile: Path) -> FirstPrompt:
    """Runs an agent and returns its first request with tools, or its largest one if none has tools. `profile` is the
    folder in which `launch` keeps its files. Raises `SettingsError` if it is not installed or sends nothing."""
    program = shutil.which(agent.program)
    if program is None:
        raise SettingsError(f"{agent.title} is not installed (no {agent.program} in PATH); install it: {agent.install}")
    if not agent.probe:
        raise SettingsError(f"{agent.title} cannot be asked for its first prompt; see `diskprefix warm --help`")
    try:
        with tempfile.TemporaryDirectory(prefix="diskprefix-", ignore_cleanup_errors=True) as scratch:
            run = _Run(agent, program, served, scratch, str(profile), os.getcwd())
            ended = subprocess.run(
                [sys.executable, "-P", "-m", "diskprefix.desk.warm.first_prompt"],
                input=_written(run),
                capture_output=True,
                check=False,
            )
    except OSError as error:
        raise SettingsError(f"{agent.title} cannot be run here: {error.strerror or error}") from error
    if ended.returncode:
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        raise SettingsError(f"{agent.title} {shown(lines[-1], 300) if lines else 'could not be run'}")
    return msgspec.convert(json.loads(ended.stdout), FirstPrompt)


def _written(value: Struct) -> bytes:
    """Returns a value as JSON. Paths and prompts may have half characters, which msgspec's own JSON refuses."""
    return json.dumps(msgspec.to_builtins(value)).encode()


def _answered(run: _Run, *, is_apart: bool) -> FirstPrompt:
    """Runs the agent until it has sent its first prompt. Raises `SettingsError` if it sends none."""
    folder = Path(run.profile)
    home, current, output = folder / "home", Path(run.current), folder / "output"
    _copy_settings(Path(run.own_profile), home)
    if is_apart:
        home = _mounted(home, Path(run.own_profile))
    # In the scratch folder the agent must be able to write.
    if not (is_apart and current not in folder.resolve().parents and _is_read_only(current)):
        current = folder / "repository"
        _make_repository(current)
    if is_apart:
        _give_up_capabilities()
    with StandIn(run.served.model) as stand_in, output.open("wb") as log:
        settings = recipe(run.agent.name, replace(run.served, url=stand_in.url), home)
        for file in settings.files:
            path = Path(file.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.text, encoding="utf-8")
        command = [run.program, *shlex.split(settings.run)[1:], *run.agent.probe]
        process = subprocess.Popen(
            command,
            cwd=current,
            env={**os.environ, **settings.environment, **_own_places(folder), **_nowhere()},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + _LIMIT_S
        # Bound: `deadline`.
        while process.poll() is None and time.monotonic() < deadline:
            if stand_in.has_tools:
                deadline = min(deadline, time.monotonic() + _AFTER_S)
            time.sleep(_POLL_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        request = stand_in.first_prompt()
    if request is None:
        said = output.read_text(errors="replace").strip().splitlines()
        raise SettingsError(f"sent no prompt; it said: {shown(said[-1] if said else 'nothing', 200)}")
    return FirstPrompt(*request, had_network=not is_apart)


def _make_repository(folder: Path) -> None:
    """Makes an empty folder, and a repository of it if there is git: most sessions are in one, and agents say so."""
    folder.mkdir()
    with suppress(OSError):
        subprocess.run(["git", "init", "--quiet", str(folder)], capture_output=True, check=False)


def _copy_settings(profile: Path, home: Path) -> None:
    """Copies the small files of a profile."""
    home.mkdir()
    files = (path for path in sorted(profile.rglob("*")) if len(path.relative_to(profile).parts) <= _MAX_DEPTH)
    small = [path for path in files if path.is_file() and not path.is_symlink()]
    for path in [path for path in small if path.stat().st_size <= _MAX_FILE_BYTES][:_MAX_FILES]:
        copy = home / path.relative_to(profile)
        copy.parent.mkdir(parents=True, exist_ok=True)
        # The agent may be running.
        with suppress(FileNotFoundError):
            shutil.copyfile(path, copy)


def _own_places(folder: Path) -> Mapping[str, str]:
    """Returns variables of places for an agent that keeps conversations outside its profile (OpenCode). In the user's
    place, `--continue` would go on with this run."""
    return {"XDG_DATA_HOME": str(folder / "data"), "XDG_STATE_HOME": str(folder / "state")}


def _nowhere() -> Mapping[str, str]:
    """Returns variables with which programs find no other host than this one."""
    proxies = dict.fromkeys(
        ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9"
    )
    return proxies | dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")


def _mounted(folder: Path, place: Path) -> Path:
    """Shows a folder at the place of another one, to this process and its own. Returns the place, or the folder if it
    cannot be shown there."""
    with suppress(OSError, AttributeError):
        make_private_folder(place)
        if not ctypes.CDLL(None).mount(os.fsencode(folder), os.fsencode(place), None, _MS_BIND, None):
            return place
    return folder


def _is_read_only(folder: Path) -> bool:
    """Has this process and its own see a folder read-only, with all mounts in it. Returns whether that could be done:
    Linux can from 5.12 on."""
    with suppress(OSError, AttributeError):
        libc, name, attributes = ctypes.CDLL(None), os.fsencode(folder), struct.pack("4Q", _MOUNT_ATTR_RDONLY, 0, 0, 0)
        change = (_MOUNT_SETATTR, _AT_FDCWD, name, _AT_RECURSIVE, attributes, len(attributes))
        return not libc.mount(name, name, None, _MS_BIND | _MS_REC, None) and not libc.syscall(*change)
    return False


def _give_up_capabilities() -> None:
    """Takes all capabilities from this process and what it starts, which could undo the mounts. Raises `OSError`."""
    libc = ctypes.CDLL(None)
    for number in range(_NUM_CAPABILITIES):
        # Otherwise a program that root starts gets them back.
        libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.capset(header, bytes(24)):
        raise OSError("the rights of the run could not be given up")


def _set_apart() -> bool:
    """Gives this process, which has one thread, an empty network and mounts of its own, and its next child process
    numbers of its own. Returns whether it could."""
    user, group = os.getuid(), os.getgid()
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_APART):
            return False
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(text, encoding="ascii")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("16sh", b"lo", 0)
            [flags] = struct.unpack_from("h", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request + bytes(14)), 16)
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", flags | _IFF_UP) + bytes(14))
        return True
    return False


def _can_be_set_apart() -> bool:
    """Tries `_set_apart` in a process of its own: an empty network that cannot be used cannot be left either."""
    if child := os.fork():
        return os.waitpid(child, 0)[1] == 0
    # Not sys.exit, which would write the parent's buffers.
    os._exit(0 if _set_apart() else 1)


def _is_first_of_its_own() -> bool:
    """Forks the process 1 of the new process numbers: the kernel ends all others of them when it ends. Returns True in
    it. It ends with this process."""
    libc = ctypes.CDLL(None)
    if os.fork():
        return False
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Programs look themselves up there by their number.
    libc.mount(b"proc", b"/proc", b"proc", _MS_OF_PROC, None)
    return True


def main() -> int:
    """Reads a run from standard input, and writes the first prompt to standard output."""
    run = msgspec.convert(json.loads(sys.stdin.buffer.read()), _Run)
    is_apart = sys.platform == "linux" and _can_be_set_apart() and _set_apart()
    if is_apart and not _is_first_of_its_own():
        return os.waitstatus_to_exitcode(os.wait()[1])
    try:
        prompt = _answered(run, is_apart=is_apart)
    except (SettingsError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    sys.stdout.buffer.write(_written(prompt))
    return 0


if __name__ == "__main__":
    sys.exit(main())
