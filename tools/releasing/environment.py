"""The programs that build and check wheels, in an environment of their own in the cache folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from diskprefix.errors import DiskPrefixError
from diskprefix.folders import cache_home
from tools.measuring.environments import install_once, run_installer

ROOT = Path(__file__).parent.parent.parent
CONSTRAINTS = ROOT / "tools/constraints.txt"
_PROGRAMS = ("auditwheel==6.8.2", "hatchling==1.33.0")


class ReleaseError(DiskPrefixError):
    """Something cannot be released as it is; the message is one line."""


def programs() -> Path:
    """Returns the folder of the programs, installed on first use. Raises `NotInstalled`."""
    folder = cache_home() / "release/programs"

    def install() -> None:
        run_installer(sys.executable, "-m", "venv", str(folder))
        run_installer(str(folder / "bin/pip"), "install", "--quiet", "--constraint", str(CONSTRAINTS), *_PROGRAMS)

    install_once(folder, [*_PROGRAMS, CONSTRAINTS.read_text(encoding="utf-8")], install)
    return folder / "bin"


def run(*command: str | Path, folder: Path | None = None, variables: Mapping[str, str] | None = None) -> str:
    """Runs a command and returns what it printed. Raises `ReleaseError` with the last line of its errors."""
    ended = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=os.environ | dict(variables or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        said = [line.strip() for line in (ended.stderr or ended.stdout).splitlines() if line.strip()]
        raise ReleaseError(f"{Path(command[0]).name} failed: {said[-1] if said else ended.returncode}")
    return ended.stdout
