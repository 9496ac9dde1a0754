"""The agents' packages, each agent in a folder of its own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from diskprefix.folders import cache_home
from diskprefix.progress import Report
from tools.measuring.environments import NotInstalled, install_once, npm_install, reason_of, run_installer
from tools.real_agents.agents import Agent


def installed(agent: Agent, report: Report) -> Path:
    """Returns the folder of the agent's command, and installs it if it is not there. Raises `NotInstalled`."""
    folder = cache_home() / "agents" / agent.name
    commands = folder / "node_modules" / ".bin"
    package = folder / "node_modules" / agent.package

    def install() -> None:
        report(f"installing {agent.requirement}; this is done once")
        if agent.is_python:
            # Its requirements are of other versions than this project's.
            run_installer(sys.executable, "-m", "venv", str(folder / "own"))
            run_installer(str(folder / "own/bin/pip"), "install", "--quiet", agent.requirement)
            commands.mkdir(parents=True)
            (commands / agent.name).symlink_to(folder / "own/bin" / agent.name)
            return
        npm_install(folder, agent.requirement)
        if agent.postinstall is not None:
            # It only links a file that is there already.
            run_installer("node", agent.postinstall, folder=package)
        if agent.program is not None:
            (commands / agent.name).symlink_to(package / agent.program)

    install_once(folder, agent.requirement, install)
    return commands


def newest(agent: Agent) -> Agent:
    """Returns the agent in the newest version that its registry has. Raises `NotInstalled`."""
    pip = (sys.executable, "-m", "pip", "index", "versions", agent.package)
    command = pip if agent.is_python else ("npm", "view", agent.package, "version")
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NotInstalled(f"the newest version of {agent.package} is not known: {error}") from error
    if ended.returncode:
        raise NotInstalled(f"the newest version of {agent.package} is not known: {reason_of(ended)}")
    # npm prints the version; pip first prints `PACKAGE (VERSION)`.
    said = ended.stdout.split()
    return replace(agent, version=said[1].strip("()") if agent.is_python else said[0])
