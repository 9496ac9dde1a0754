"""The agents' npm packages in a folder of their own, with the versions of `AGENTS`."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from diskprefix.progress import Report
from diskprefix.settings import cache_home
from tools.real_agents.agents import AGENTS


class NotInstalled(Exception):
    """The agents cannot be installed; the message is one line."""


def installed(report: Report) -> Path:
    """Returns the folder of the agents' commands, and installs them if they are not there. Raises `NotInstalled`."""
    folder = cache_home() / "agents"
    stamp, wanted = folder / "installed.json", json.dumps(sorted(agent.requirement for agent in AGENTS.values()))
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        if shutil.which("npm") is None:
            raise NotInstalled("npm is not installed: the agents come from the npm registry and run on Node.js 20")
        report("installing the agents with npm; this is done once and takes about a gigabyte")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _install(folder)
        stamp.write_text(wanted, encoding="utf-8")
    return folder / "node_modules" / ".bin"


def _install(folder: Path) -> None:
    # npm asks before it runs the scripts of a package; the two that are needed only link a file that is there already.
    flags = ("--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier")
    _run(folder, "npm", "install", *flags, "--prefix", str(folder), *(agent.requirement for agent in AGENTS.values()))
    for agent in AGENTS.values():
        if agent.postinstall is not None:
            _run(folder / "node_modules" / agent.package, "node", agent.postinstall)


def _run(folder: Path, *command: str) -> None:
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if ended.returncode:
        last = (ended.stderr or ended.stdout).strip().splitlines()[-1:] or [f"exit code {ended.returncode}"]
        raise NotInstalled(f"{' '.join(command[:2])} failed: {last[0]}")
