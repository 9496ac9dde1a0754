"""Packages of other projects, each set in a folder of the cache, which are installed when they are first needed."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diskprefix.errors import DiskPrefixError

_LOG_LINES = 3
_NPM = ("npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier")
"""npm asks before it runs the scripts of a package."""


class NotInstalled(DiskPrefixError):
    """Packages cannot be installed; the message is one line."""


def install_once(folder: Path, wanted: Any, install: Callable[[], None]) -> None:
    """Calls `install` with `folder` made empty, unless it was called before for the same `wanted`, which JSON can hold.

    Raises `NotInstalled`.
    """
    stamp, text = folder / "installed.json", json.dumps(wanted)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == text:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    install()
    stamp.write_text(text, encoding="utf-8")


def npm_install(folder: Path, *requirements: str) -> None:
    """Installs packages of the npm registry. Raises `NotInstalled`."""
    if shutil.which("npm") is None:
        raise NotInstalled(f"npm is not installed: {', '.join(requirements)} come from the npm registry")
    run_installer(*_NPM, "--prefix", str(folder), *requirements, folder=folder)


def run_installer(*command: str, folder: Path | None = None) -> None:
    """Runs a command in a folder. Raises `NotInstalled` with the last lines of what it said."""
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if ended.returncode:
        said = [line.strip() for line in (ended.stderr or ended.stdout).splitlines() if line.strip()]
        last = " ".join(said[-_LOG_LINES:]) or f"exit code {ended.returncode}"
        raise NotInstalled(f"{' '.join(command[:4])} failed: {last}")
