"""The agents' npm packages in a folder of their own, with the versions of `AGENTS`."""

from __future__ import annotations

from pathlib import Path

from diskprefix.progress import Report
from diskprefix.settings import cache_home
from tools.measuring.installing import install_once, npm_install, run_installer
from tools.real_agents.agents import AGENTS


def installed(report: Report) -> Path:
    """Returns the folder of the agents' commands, and installs them if they are not there. Raises `NotInstalled`."""
    folder = cache_home() / "agents"

    def install() -> None:
        report("installing the agents with npm; this is done once and takes about a gigabyte")
        npm_install(folder, *(agent.requirement for agent in AGENTS.values()))
        for agent in AGENTS.values():
            if agent.postinstall is not None:
                # It only links a file that is there already.
                run_installer("node", agent.postinstall, folder=folder / "node_modules" / agent.package)

    install_once(folder, sorted(agent.requirement for agent in AGENTS.values()), install)
    return folder / "node_modules" / ".bin"
