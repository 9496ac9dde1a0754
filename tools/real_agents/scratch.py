"""The surroundings of an agent: a home folder with settings of its own, a repository with a task, an environment."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from diskprefix.desk.shared.recipes.recipe import Served, recipe
from tools.real_agents.agents import FILE, SOURCE, Agent

_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "LANG", "TERM")
_ELSEWHERE = Served(url="http://127.0.0.1:9", model="mine", key="unused", context=32_768)


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """`repository` is where the agent starts."""

    home: Path
    repository: Path
    environment: dict[str, str]

    def files(self) -> dict[str, str]:
        """Returns the digests of all files of the home folder, by their path in it."""
        paths = [path for path in sorted(self.home.rglob("*")) if path.is_file() and not path.is_symlink()]
        return {str(path.relative_to(self.home)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}

    def launch(self, agent: Agent, arguments: Sequence[str], limit_s: float) -> tuple[int | None, str]:
        """Starts the agent with `diskprefix launch`. Returns its exit code, None if it took longer, and what it
        said."""
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "diskprefix", "launch", agent.name, *arguments],
                cwd=self.repository,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            return None, (error.stdout or b"").decode("utf-8", "replace")
        return ended.returncode, ended.stdout


def scratch(
    folder: Path, agent: Agent, commands: Path, url: str, files: Mapping[str, str] = MappingProxyType({FILE: SOURCE})
) -> Scratch:
    """Writes settings of the agent for a daemon elsewhere, as its user has them, and a repository with `files` into
    `folder`.

    Requests to other hosts than this go to the proxy `url`.
    """
    home, repository = folder / "home", folder / "repository"
    home.mkdir(parents=True)
    repository.mkdir()
    for file in recipe(agent.name, _ELSEWHERE).files:
        path = Path(file.path.replace("~", str(home), 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text, encoding="utf-8")
    for name, text in files.items():
        (repository / name).write_text(text, encoding="utf-8")
    environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    environment["PATH"] = f"{commands}{os.pathsep}{environment.get('PATH', os.defpath)}"
    environment |= {"HOME": str(home), "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
    environment |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), url)
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    for command in (["init", "-q"], ["add", "."], [*_AS_NOBODY, "commit", "-q", "-m", "A sum"]):
        subprocess.run(["git", *command], cwd=repository, env=environment, check=True)
    environment |= agent.environment
    return Scratch(home=home, repository=repository, environment=environment)


_AS_NOBODY = ("-c", "user.name=Nobody", "-c", "user.email=nobody@example.com")
