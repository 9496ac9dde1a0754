"""`tools/agents --hour`: OpenCode works for fifty questions in one conversation, and what may happen to a daemon in an
hour happens: five kills, a change of the model and back, a full disk, midnight."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from tools.measuring.answers import LiveServerError
from tools.measuring.live_server import POLL_S, LiveServer, num_tracebacks, step
from tools.real_agents.agents import AGENTS
from tools.real_agents.false_clock import FalseClock
from tools.real_agents.hour_report import Findings, Part
from tools.real_agents.hour_tasks import COUNTER, Task, counter, sources, tasks
from tools.real_agents.hour_world import Killer, fill, make_room, pending_bytes, small_disk
from tools.real_agents.install import installed
from tools.real_agents.recomputing import recomputed
from tools.real_agents.records import Recorded, recorded
from tools.real_agents.scratch import Scratch, scratch
from tools.real_agents.tap import Tap

AGENT = AGENTS["opencode"]
MODELS = CODER, REVIEWER = "coder", "reviewer"
DISK_BYTES = 2 << 30
PAUSE_S, LONGEST_PAUSE_S = 1.0, 72.0
"""An hour has 72 seconds for a question. A pause ends when nothing is left to compute ahead or to save."""
BEFORE_MIDNIGHT_S, OVER_MIDNIGHT_S = 5.0, 30.0
"""The daemon looks at the day every 20 seconds."""
ANSWER_LIMIT_S = 900.0
MOST_TRIES = 3
_DATE_TOKENS = 100
"""The template writes the date within the first tokens, at most this number."""

_OTHER_MODEL, _FULL, _ROOM, _MIDNIGHT = "the other model", "the disk is full", "the disk has room", "after midnight"
PARTS = {1: "work", 21: _OTHER_MODEL, 25: "the first model", 29: _FULL, 34: _ROOM, 39: _MIDNIGHT, 45: "to the end"}
"""The first question of each part of the hour."""
SAVING, REPLY, PREFILL, IDLE, AHEAD = 6, 14, 21, 31, 44
"""The questions in which or after which the daemon is killed."""
NUM_KILLS = 5
COMPARED_EVERY = 5
COMPARED_TOO = {SAVING + 1, REPLY, IDLE + 1, *PARTS}
"""The replies to every fifth question and to these are computed again: those after an event."""


class Hour:
    """Asks the agent at `place` question after question. `parts` has the counts."""

    def __init__(self, place: Scratch, tap: Tap, killer: Killer, disk: Path, clock: FalseClock) -> None:
        self.parts: list[Part] = []
        self.asked_again: list[int] = []
        self.unanswered: list[int] = []
        self.states_when_full: set[str] = set()
        self.asked_at_ns: dict[int, int] = {}
        """When each question was asked, on the machine's clock."""
        self._place, self._tap, self._killer, self._disk, self._clock = place, tap, killer, disk, clock
        self._num_exchanges = self._num_kills = self._num_ahead = 0

    def work(self, all_tasks: Iterable[Task], console: Console) -> None:
        """Raises `LiveServerError` if the daemon does not start again."""
        for task in all_tasks:
            if task.number in PARTS:
                self._begin_part(PARTS[task.number])
            with step(console, f"{self._part.name}: {task.question}"):
                self._ask(task, console)
                self._follow(task.number)
        self._end_part()

    def cache_states(self) -> set[str]:
        """Returns what the caches of the loaded models say of themselves."""
        return {state["full_cache"]["state"]["state"] for state in self._killer.states().values()}

    @property
    def _part(self) -> Part:
        return self.parts[-1]

    def _begin_part(self, name: str) -> None:
        self._end_part()
        self.parts.append(Part(name=name))
        if name == _FULL:
            fill(self._disk)
        elif name == _ROOM:
            make_room(self._disk)
        elif name == _MIDNIGHT:
            self._clock.set_before_midnight(BEFORE_MIDNIGHT_S)
            time.sleep(OVER_MIDNIGHT_S)
            self._read()

    def _end_part(self) -> None:
        if not self.parts:
            return
        exchanges, kills, num_ahead = self._tap.exchanges, self._killer.kills, self._killer.ahead_tokens()
        self._part.add_exchanges(exchanges[self._num_exchanges :])
        for kill in kills[self._num_kills :]:
            self._part.add_kill(kill)
        self._part.ahead = num_ahead - self._num_ahead
        self._num_exchanges, self._num_kills, self._num_ahead = len(exchanges), len(kills), num_ahead

    def _ask(self, task: Task, console: Console) -> None:
        self._part.questions += 1
        self.asked_at_ns[task.number] = time.monotonic_ns()
        moment = {SAVING: "saving", REPLY: "reply", PREFILL: "prefill", AHEAD: "ahead"}.get(task.number)
        if moment is not None:
            self._killer.arm(moment, task.number)
        for _ in range(MOST_TRIES):
            is_answered, said = self._run_agent(task)
            self._killer.wait_until_started()
            if is_answered:
                return
            console.print(f"{AGENT.name} did not answer, and said:\n{said[-1500:]}", markup=False)
            self.asked_again.append(task.number)
        self.unanswered.append(task.number)

    def _run_agent(self, task: Task) -> tuple[bool, str]:
        """Asks the agent a question. Returns whether it said the prepared reply, and what it said."""
        model = REVIEWER if self._part.name == _OTHER_MODEL else CODER
        goes_on = ("--continue",) if task.number > 1 else ()
        arguments = ["--model", model, "--url", self._tap.url, "--", "run", "--auto", *goes_on]
        arguments += ["--model", f"diskprefix/{model}", task.question]
        code, said = self._place.launch(AGENT, arguments, ANSWER_LIMIT_S)
        return code == 0 and task.last.splitlines()[-1].strip() in said, said

    def _follow(self, number: int) -> None:
        """The user reads. After one question the daemon is killed meanwhile."""
        self._read()
        if self._part.name == _FULL:
            self.states_when_full |= self.cache_states()
        if number == IDLE:
            self._killer.kill("idle", number, "nothing to do")
            self._killer.wait_until_started()

    def _read(self) -> None:
        """Waits until nothing is left to compute ahead or to save, at most as long as an hour allows."""

        def is_quiet() -> bool:
            states = self._killer.states().values()
            return not any(state["ahead"]["waiting"] or state["running"] or pending_bytes(state) for state in states)

        until = time.monotonic() + LONGEST_PAUSE_S
        time.sleep(PAUSE_S)
        while not is_quiet() and time.monotonic() < until:
            time.sleep(POLL_S)
        self._killer.wait_until_started()


def run_hour(
    workspace: Path, models: Sequence[Path], is_real: bool, bodies: Path | None, console: Console
) -> dict[str, Any]:
    """Returns the report. `models` are folders with the names `MODELS`. Bodies and logs are kept in `bodies`. Raises
    `NotInstalled`, `LiveServerError`."""
    commands, files = installed(AGENT, console.print), sources()
    all_tasks, clock = tasks(files, workspace / "repository"), FalseClock(workspace)
    # The random models compute faster than the disk reads, and the rule that weighs the two would not restore.
    gate = () if is_real else ("--kv-cache-gate", "off")
    script = Script(workspace, models, all_tasks)
    with small_disk(workspace / "disk", DISK_BYTES) as disk:
        with script.daemon(
            "server", disk / "kv", (*gate, "--policy", "agent", "--ahead", "auto"), clock.environment
        ) as server:
            server.start()
            with Tap(server.port, _is_turn) as tap:
                place = scratch(workspace, AGENT, commands, tap.url, files)
                place = replace(place, environment=place.environment | clock.environment)
                killer = Killer(server, tap)
                hour = Hour(place, tap, killer, disk, clock)
                hour.work(all_tasks, console)
                states_at_the_end = hour.cache_states()
                if bodies is not None:
                    tap.keep(bodies, "hour")
                    shutil.copy(workspace / "server.log", bodies)
            server.stop(90.0)
        problems = _verify(disk / "kv")
    records = recorded(script.records("server"))
    chosen = _chosen(records, hour.asked_at_ns)
    with step(console, f"{len(chosen)} replies are computed again"):
        flags = ("--disk-prefix-cache", "off", "--speculative", "off")
        with script.daemon("cold", workspace / "cold-kv", flags, {}) as cold:
            cold.start()
            again = recomputed(chosen, cold, script.records("cold"))
    return Findings(
        agent=f"{AGENT.name} {AGENT.version}",
        parts=hour.parts,
        kills=killer.kills,
        num_kills=NUM_KILLS,
        exchanges=tap.exchanges,
        first_question=all_tasks[0].question,
        recomputed=again,
        unanswered=hour.unanswered,
        asked_again=hour.asked_again,
        is_file_right=(place.repository / COUNTER).read_text("utf-8") == counter(_num_edits(all_tasks)),
        states_when_full=hour.states_when_full,
        states_at_the_end=states_at_the_end,
        days=_days(records, models[0] / "tokenizer.json"),
        problems=problems,
        num_tracebacks=num_tracebacks(workspace / "server.log"),
    ).report()


class Script:
    """The prepared replies to `all_tasks`, and daemons that serve `models` with them."""

    def __init__(self, workspace: Path, models: Sequence[Path], all_tasks: Iterable[Task]) -> None:
        self._workspace = workspace
        self._flags = tuple(part for model in models for part in ("--model", str(model)))
        self._content = {"model": str(models[0]), "tasks": [task.script() for task in all_tasks], "works_always": True}

    def records(self, name: str) -> Path:
        return self._workspace / f"{name}-records"

    def daemon(self, name: str, folder: Path, flags: tuple[str, ...], environment: Mapping[str, str]) -> LiveServer:
        """Returns a daemon with its store in `folder`. Its log and its records have its `name`."""
        self.records(name).mkdir()
        script = self._workspace / f"{name}.json"
        script.write_text(json.dumps(self._content | {"records": str(self.records(name))}), encoding="utf-8")
        return LiveServer(
            kv_cache_dir=folder,
            log_path=self._workspace / f"{name}.log",
            flags=(*self._flags, *flags),
            module="tools.real_agents.scripted_daemon",
            environment={"DISKPREFIX_SCRIPT": str(script), **environment},
        )


def _is_turn(body: Mapping[str, Any]) -> bool:
    """Returns whether a body is of the conversation, and not a small request beside it."""
    return bool(body.get("tools") and body.get("stream"))


def _verify(folder: Path) -> list[Any]:
    """Returns the problems that `diskprefix verify` finds in a store. Raises `LiveServerError` if it cannot say."""
    command = [sys.executable, "-m", "diskprefix", "verify", "--json", "--kv-cache-dir", str(folder)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        problems: list[Any] = json.loads(said.stdout)["problems"]
    except ValueError as error:
        raise LiveServerError(f"verify ended with {said.returncode}: {said.stderr[-300:]}") from error
    return problems


def _chosen(records: Iterable[Recorded], asked_at_ns: Mapping[int, int]) -> list[Recorded]:
    """Returns the records of the questions whose replies are computed again."""

    def is_chosen(record: Recorded) -> bool:
        number = max((number for number, at in asked_at_ns.items() if at <= record.began_ns), default=0)
        return number % COMPARED_EVERY == 0 or number in COMPARED_TOO

    return [record for record in records if is_chosen(record)]


def _days(records: Iterable[Recorded], tokenizer_file: Path) -> set[str]:
    """Returns the dates in prompts, as the template of gpt-oss writes them at the beginning."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    beginnings = {tokenizer.decode(each.prompt[:_DATE_TOKENS]) for each in records}
    return {date for beginning in beginnings for date in re.findall(r"Current date: (\S+)", beginning)}


def _num_edits(all_tasks: Iterable[Task]) -> int:
    return sum(name == "edit" for task in all_tasks for name, _ in task.calls)
