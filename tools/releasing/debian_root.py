"""A Debian root with nothing but Python, made by mmdebstrap, and commands that run in it.

A command has mount and process namespaces of its own, so that nothing is left of it when it ends. It shares the network
with this machine, and pip's settings.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tools.releasing.environment import ReleaseError, run

_HOME = "/root"
"""The home folder of root in Debian."""
PACKAGES = ("ca-certificates", "pipx", "python3", "python3-venv")
_SOURCES = ("etc/apt/sources.list.d/debian.sources", "etc/apt/sources.list")
_NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs", "/etc/pip.conf", "/etc/xdg/pip")
_PASSED = ("PIP_", "SSL_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
_PROGRAMS = ("mmdebstrap", "unshare", "chroot", "tar")
_DEBIAN = re.compile(r'^ID="?debian"?$', re.MULTILINE)
_ENTRY = re.compile(r"^(deb|URIs:)\s", re.MULTILINE)


def own_sources(system: Path = Path("/")) -> list[Path]:
    """Returns this machine's file of package sources, [] if it is no Debian or has no such file."""
    identity = system / "etc/os-release"
    if not identity.exists() or not _DEBIAN.search(identity.read_text(encoding="utf-8")):
        return []
    present = [system / name for name in _SOURCES if (system / name).exists()]
    return [path for path in present if _ENTRY.search(path.read_text(encoding="utf-8"))][:1]


def make_archive(
    archive: Path, suite: str, packages: Sequence[str] = PACKAGES, variables: Mapping[str, str] | None = None
) -> None:
    """Writes an archive of a new root. The packages come from this machine's sources if it is a Debian."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    part = archive.with_name(archive.name + ".part.tar")
    command = ("mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(packages)}", suite, part)
    run(*command, *own_sources(), variables=variables)
    part.replace(archive)


class DebianRoot:
    """An unpacked root in `folder`. `mounted` are folders of this machine and the places where commands see them."""

    def __init__(self, archive: Path, folder: Path, mounted: Mapping[Path, str]) -> None:
        self.folder = folder
        self._mounted = dict(mounted)
        folder.mkdir(parents=True)
        run("tar", "--extract", "--file", archive, "--directory", folder, "--exclude=./dev/*")

    def start(self, command: str, variables: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Starts a command of a shell; all its processes end when the returned one is killed."""
        script = "\n".join(["set -e", *self._mounts(), self._entered(command, variables)])
        with log.open("ab") as file:
            return subprocess.Popen(
                ("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def call(self, command: str, variables: Mapping[str, str], log: Path) -> None:
        """Runs a command to its end. Raises `ReleaseError` with its last line if it fails."""
        if self.start(command, variables, log).wait():
            said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it said nothing"]
            raise ReleaseError(f"{command}: {said[-1].strip()}")

    def _mounts(self) -> Iterator[str]:
        yield f"mount -t proc proc {self._quoted('proc')}"
        places = {Path("/dev"): "/dev", **{Path(name): name for name in _NETWORK}, **self._mounted}
        for path, place in places.items():
            if path.exists():
                within = self._quoted(place)
                make = f"mkdir -p {within}" if path.is_dir() else f"rm -f {within}; : >{within}"
                yield f"{make}; mount --rbind {shlex.quote(str(path.resolve()))} {within}"

    def _entered(self, command: str, variables: Mapping[str, str]) -> str:
        inherited = {name: value for name, value in os.environ.items() if name.startswith(_PASSED)}
        path = f"{_HOME}/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        settings: Sequence[str] = [f"{key}={value}" for key, value in (inherited | dict(variables)).items()]
        inside = f"cd {_HOME} && {command}"
        entry = ["env", "-i", f"HOME={_HOME}", "LANG=C.UTF-8", f"PATH={path}", *settings, "bash", "-c", inside]
        return shlex.join(["exec", "chroot", str(self.folder), *entry])

    def _quoted(self, place: str) -> str:
        return shlex.quote(str(self.folder / place.lstrip("/")))


def require_programs() -> None:
    """Raises `ReleaseError` if a root cannot be made and entered here."""
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    if absent:
        raise ReleaseError(f"{', '.join(absent)} is not installed; Debian has it")
    if os.geteuid() != 0:
        raise ReleaseError("only root can enter a new Debian root; run it in a container or with sudo")
