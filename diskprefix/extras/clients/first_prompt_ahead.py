"""Computes agents' first prompts ahead, in the background: `launch` and `service install` start this as a process of
its own (`python -P -m diskprefix.extras.clients.first_prompt_ahead`).

The process runs each agent once, remembers its first prompt as a file, and asks the daemon to compute it while no
request waits. The file is good for one version of the agent, folder, model and day: agents write the day into their
prompts. Later launches send the file's prompt again, and say how much of it is ready.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from fcntl import LOCK_EX, LOCK_NB
from pathlib import Path

import msgspec
from msgspec import Struct

from diskprefix.errors import DiskPrefixError, NotReady, SettingsError
from diskprefix.extras.clients.agent_profile import replace_file
from diskprefix.extras.clients.first_prompt import FirstPrompt, first_prompt
from diskprefix.extras.clients.launched_daemon import locked
from diskprefix.extras.clients.model_choice import ask_served
from diskprefix.extras.clients.recipe import KnownAgent, Served, agent_called, agents
from diskprefix.extras.daemon_call import Call, running_daemon
from diskprefix.printable import shown

_FOLDER = "first-prompts"
_MAX_FILES, _MAX_BYTES = 32, 4 << 20
"""The files that are kept, the newest ones, and the size of each. A longer prompt is computed and not remembered."""
_POLL_S = 2.0
_NICE = 10


class Remembered(Struct, frozen=True):
    """The result of one run of an agent: its first prompt, or the `problem` that kept it from sending one. `made_for`
    names the version of the agent and the day."""

    made_for: str
    prompt: FirstPrompt | None = None
    problem: str = ""


class Readiness(Struct, frozen=True):
    """The daemon's answer: of the prompt's `prompt_tokens` tokens, `ready_tokens` need not be computed. `paused` says
    why the rest is not computed ahead now."""

    prompt_tokens: int
    ready_tokens: int
    paused: str | None


class _Errand(Struct, frozen=True):
    """The input of the process, as JSON. `folder` has the profiles of the agents with these `names`. The process waits
    `patience_s` seconds for a daemon that starts."""

    names: Sequence[str]
    url: str
    model: str | None
    api_key: str | None
    folder: str
    patience_s: float


def may_be_asked() -> list[KnownAgent]:
    """Returns the installed agents whose first prompt can be known."""
    return [agent for agent in agents() if agent.probe and shutil.which(agent.program)]


def remembered(folder: Path, agent: KnownAgent, served: Served) -> Remembered | None:
    """Returns the result of the last run of an agent, None if there was none for this version of it, this folder, this
    model and this day."""
    with suppress(OSError, ValueError, RecursionError, msgspec.ValidationError):
        file = _file(folder, agent, served)
        if file.stat().st_size <= _MAX_BYTES:
            result = msgspec.convert(json.loads(file.read_text("utf-8")), Remembered)
            return result if result.made_for == _made_for(agent) else None
    return None


def ask_daemon(call: Call, agent: KnownAgent, served: Served, prompt: FirstPrompt) -> Readiness:
    """Asks the daemon to compute a first prompt ahead. Raises `NotReady` and, if it refuses, `SettingsError`."""
    body = prompt.body | {"model": served.model, "prefix_cache": {"ahead": agent.title}}
    answer = call("POST", prompt.route, body)
    if answer.status != 200:
        raise SettingsError(f"the daemon refuses it: {answer.message}")
    try:
        return msgspec.convert(answer.body, Readiness)
    except msgspec.ValidationError as error:
        raise SettingsError("the daemon is an older one") from error


def compute_in_background(
    known: Sequence[KnownAgent],
    folder: Path,
    url: str,
    model: str | None = None,
    api_key: str | None = None,
    *,
    patience_s: float = 0.0,
) -> None:
    """Starts the process, which goes on after this one has ended. It waits `patience_s` seconds until the daemon at
    `url` answers, and until its model is loaded."""
    task = _Errand([agent.name for agent in known], url, model, api_key, str(folder), patience_s)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "diskprefix.extras.clients.first_prompt_ahead"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None
    # In the input, because other users can see arguments. It fits into the pipe.
    with suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(json.dumps(msgspec.to_builtins(task)).encode())
    # Python warns about a process that goes on, unless it is marked as ended.
    process.returncode = 0


def forget_prompts(folder: Path, known: Sequence[KnownAgent]) -> None:
    """Removes what is remembered of agents, and the folder if nothing is left."""
    for agent in known:
        for file in (folder / _FOLDER).glob(f"{agent.name}.*"):
            file.unlink(missing_ok=True)
    with suppress(OSError):
        (folder / _FOLDER).rmdir()


def _file(folder: Path, agent: KnownAgent, served: Served) -> Path:
    """Returns the file of an agent in the current folder. Raises `OSError` if the current folder is gone."""
    key = json.dumps([os.getcwd(), served.model, served.context, served.takes_images])
    return folder / _FOLDER / f"{agent.name}.{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _made_for(agent: KnownAgent) -> str:
    """Returns the version of an installed agent, told by its program's file, and the day. Raises `OSError`."""
    program = os.path.realpath(shutil.which(agent.program) or agent.program)
    status = os.stat(program)
    return json.dumps([program, status.st_size, status.st_mtime_ns, status.st_ino, date.today().isoformat()])


def _run_agent(folder: Path, agent: KnownAgent, served: Served) -> FirstPrompt | None:
    """Returns the first prompt of an agent, from its file or from a run, which is remembered. Returns None if the agent
    sent none. Raises `OSError`, and `BlockingIOError` if another process runs the agent."""
    file = _file(folder, agent, served)
    with locked(file.with_suffix(".lock"), LOCK_EX | LOCK_NB):
        if (known := remembered(folder, agent, served)) is not None:
            return known.prompt
        made_for = _made_for(agent)
        try:
            result = Remembered(made_for, first_prompt(agent, served, folder / agent.name))
        except SettingsError as error:
            result = Remembered(made_for, problem=error.message)
        text = json.dumps(msgspec.to_builtins(result))
        if len(text) <= _MAX_BYTES:
            replace_file(file, text)
        files = sorted(file.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for old in files[:-_MAX_FILES]:
            old.with_suffix(".lock").unlink(missing_ok=True)
            old.unlink(missing_ok=True)
        return result.prompt


def _wait_served(call: Call, task: _Errand) -> Served:
    """Waits until the daemon answers and serves. Raises as `ask_served`."""
    deadline = time.monotonic() + task.patience_s
    # Bound: `deadline`.
    while True:
        try:
            return ask_served(call, task.url, task.model, task.api_key).served
        except NotReady:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)


def main() -> int:
    """Reads a task from standard input, and asks the daemon for the first prompt of each of its agents."""
    task = msgspec.convert(json.loads(sys.stdin.buffer.read()), _Errand)
    # The agent that the user has started goes first.
    os.nice(_NICE)
    call = running_daemon(task.url, task.api_key)
    try:
        served = _wait_served(call, task)
        for agent in map(agent_called, task.names):
            with suppress(OSError, SettingsError):
                if (prompt := _run_agent(Path(task.folder), agent, served)) is not None:
                    ask_daemon(call, agent, served, prompt)
    except DiskPrefixError as error:
        print(shown(error.message), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
