"""The agents' packages in a folder of their own, with the versions of `AGENTS`."""

from __future__ import annotations

import sys
from pathlib import Path

from diskprefix.progress import Report
from diskprefix.settings import cache_home
from tools.measuring.environments import install_once, npm_install, run_installer
from tools.real_agents.agents import AGENTS


def installed(report: Report) -> Path:
    """Returns the folder of the agents' commands, and installs them if they are not there. Raises `NotInstalled`."""
    folder = cache_home() / "agents"
    commands = folder / "node_modules" / ".bin"

    def install() -> None:
        report("installing the agents with npm and pip; this is done once and takes two gigabytes")
        npm_install(folder, *(agent.requirement for agent in AGENTS.values() if not agent.is_python))
        for agent in AGENTS.values():
            package = folder / "node_modules" / agent.package
            if agent.postinstall is not None:
                # It only links a file that is there already.
                run_installer("node", agent.postinstall, folder=package)
            if agent.program is not None:
                (commands / agent.name).symlink_to(package / agent.program)
            if agent.is_python:
                # Their requirements are of other versions than this project's.
                own = folder / agent.name
                run_installer(sys.executable, "-m", "venv", str(own))
                run_installer(str(own / "bin/pip"), "install", "--quiet", agent.requirement)
                (commands / agent.name).symlink_to(own / "bin" / agent.name)

    install_once(folder, sorted(agent.requirement for agent in AGENTS.values()), install)
    return commands
