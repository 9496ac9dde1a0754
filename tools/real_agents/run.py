"""`tools/agents`: real command-line agents do a task with the daemon, which is killed between their turns."""

from __future__ import annotations

import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from diskprefix.errors import ModelError
from diskprefix.progress import Report
from tools.measuring.answers import LiveServerError
from tools.measuring.environments import NotInstalled, reason_of
from tools.measuring.live_server import LiveServer, log_tail, step
from tools.measuring.options import JSON
from tools.measuring.report import machine, new_table, print_report, say, show_machine
from tools.models import real
from tools.real_agents import hour, hour_report, session_report
from tools.real_agents.agents import AGENTS, FILE, LAST_REPLY, MENDED, PRINTED, TASK, Agent
from tools.real_agents.install import installed, newest
from tools.real_agents.scratch import Scratch, scratch
from tools.real_agents.sessions import SESSIONS, run_session
from tools.real_agents.tap import Tap
from tools.real_agents.templates import TEMPLATES, with_template
from tools.real_agents.tiny_model import write_tiny

TABLE_COLUMNS = 110
SHOWN_CHARS, SHOWN_FILES = 1500, 6
GOAL = 0.9
"""The least share of the prompts after the first one that is restored."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one agent. Times are medians over its turns, in milliseconds, as a client sees them."""

    agent: str
    version: str
    is_done: bool
    exit_code: int | None
    turns: int
    side_requests: int
    calls: list[str]
    prompt_tokens: list[int]
    restored: list[int]
    statuses: list[int]
    restored_share: float | None
    first_byte_ms: float | None
    first_token_ms: float | None
    restarts: int
    refused: list[str]
    retries: int
    cut_off: int
    hosts_refused: list[str]
    changed: list[str]
    new: list[str]

    @property
    def is_good(self) -> bool:
        """Returns whether the task is done and nothing failed. It may have taken one turn only."""
        share = 1.0 if self.restored_share is None else self.restored_share
        has_failed = self.refused or self.retries or self.cut_off or self.changed
        return self.is_done and not has_failed and share >= GOAL


@dataclass(frozen=True, kw_only=True)
class Work:
    """The end of an agent: its `exit_code`, None after the time limit, and its output. `changed` and `new` are files of
    the home folder after `launch --clean`."""

    exit_code: int | None
    said: str
    changed: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Runs agents one after the other, each with a daemon and folders of its own below `workspace`.

    `bodies` is the folder for the bodies of their requests, None to drop them. `is_real`: the `model` is not the random
    one.
    """

    workspace: Path
    model: Path
    console: Console
    bodies: Path | None
    is_real: bool

    def all(self, agents: Sequence[Agent], limit_s: float) -> list[Outcome]:
        """Runs each, and prints the error of one that cannot run."""
        outcomes: list[Outcome] = []
        for agent in agents:
            log = self.workspace / agent.name / "server.log"
            try:
                outcomes.append(self.agent(agent, limit_s))
            except (LiveServerError, NotInstalled, subprocess.CalledProcessError) as error:
                self.console.print(f"error: {agent.name}: {error}\n{log_tail(log)}", markup=False)
            if self.bodies is not None and log.exists():
                shutil.copy(log, self.bodies / f"{agent.name}.log")
        return outcomes

    def agent(self, agent: Agent, limit_s: float) -> Outcome:
        """Raises `NotInstalled`, `LiveServerError` or `CalledProcessError`."""
        commands = installed(agent, self.console.print)
        folder = self.workspace / agent.name
        folder.mkdir()
        file = folder / "repository" / FILE
        script = _write_script(folder / "script.json", agent, file, self.model)
        with LiveServer(
            kv_cache_dir=folder / "kv",
            log_path=folder / "server.log",
            flags=self._flags(),
            module="tools.real_agents.scripted_daemon",
            environment={"DISKPREFIX_SCRIPT": str(script)},
        ) as server:
            with step(self.console, f"{agent.name}: the daemon starts") as note:
                server.start(note)
            with step(self.console, f"{agent.name}: {TASK}"), Tap(server.port, turn_finder(), server.restart) as tap:
                work = self._let_it_work(agent, scratch(folder, agent, commands, tap.url), tap, limit_s)
        if self.bodies is not None:
            tap.keep(self.bodies, agent.name)
        is_done = work.exit_code == 0 and MENDED in file.read_text(encoding="utf-8")
        # Without tools it runs the program itself, and need not tell the model.
        is_done = is_done and (_has_run(tap) if agent.calls else (file.parent / "printed.txt").exists())
        if not is_done:
            last = work.said[-SHOWN_CHARS:]
            self.console.print(f"{agent.name} ended with {work.exit_code} and said:\n{last}", markup=False)
        return _outcome(agent, tap, is_done, work)

    def _flags(self) -> tuple[str, ...]:
        flags = ("--model", str(self.model), "--policy", "agent", "--served-model-name", "coder")
        # The random model computes faster than the disk reads, and the rule that weighs the two would not restore.
        return flags if self.is_real else (*flags, "--kv-cache-gate", "off")

    def _let_it_work(self, agent: Agent, place: Scratch, tap: Tap, limit_s: float) -> Work:
        before = place.files()
        exit_code, said = 0, ""
        for arguments in filter(None, (agent.arguments, agent.later)):
            ended, said_then = place.launch(agent, ["--url", tap.url, "--", *arguments], limit_s)
            said += said_then
            if ended is None:
                return Work(exit_code=None, said=said)
            if exit_code := ended:
                break
        clean = [sys.executable, "-m", "diskprefix", "launch", agent.name, "--clean", "--yes"]
        cleaned = subprocess.run(clean, env=place.environment, capture_output=True, text=True, check=False)
        if cleaned.returncode:
            raise LiveServerError(f"launch --clean failed: {reason_of(cleaned)}")
        after = place.files()
        changed = [name for name, digest in before.items() if after.get(name) != digest]
        return Work(exit_code=exit_code, said=said, changed=changed, new=sorted(after.keys() - before))


def _write_script(path: Path, agent: Agent, file: Path, model: Path) -> Path:
    calls = [(name, {key: _placed(value, file) for key, value in arguments.items()}) for name, arguments in agent.calls]
    task = {"task": TASK, "calls": calls, "said": agent.said, "last": LAST_REPLY}
    path.write_text(json.dumps({"model": str(model), "tasks": [task]}), encoding="utf-8")
    return path


def _placed(value: Any, file: Path) -> Any:
    return value.replace("{file}", str(file)) if isinstance(value, str) else value


def turn_finder() -> Callable[[Mapping[str, Any]], bool]:
    """Returns a function that tells, for each parsed body in order, whether it is a turn of the task.

    Titles, summaries and counts have no tools or no stream. A sub-agent has other tools than the first turn.
    """
    first: list[list[str]] = []

    def is_turn(body: Mapping[str, Any]) -> bool:
        if not (body.get("tools") and body.get("stream") and TASK in json.dumps(body, ensure_ascii=False)):
            return False
        names = [_name_of(tool) for tool in body["tools"]]
        first[:] = first or [names]
        return names == first[0]

    return is_turn


def _name_of(tool: Mapping[str, Any]) -> str:
    return str(tool.get("function", tool).get("name") or tool.get("type"))


def _has_run(tap: Tap) -> bool:
    return bool(tap.turns) and PRINTED in tap.turns[-1].body.decode("utf-8", "replace")


def _model(workspace: Path, template: str | None, is_real: bool, report: Report) -> Path:
    """Returns the folder of the model. Raises `NotInstalled` or `ModelError`."""
    model = real.fetched(real.QWEN2_CODER.name, report)
    if not is_real:
        model = write_tiny(workspace / "model", model)
    return model if template is None else with_template(workspace / "templated", model, template)


def _hour(workspace: Path, is_real: bool, bodies: Path | None, console: Console, as_json: bool) -> int:
    """Runs and prints the hour. Returns the exit code."""
    try:
        coder = real.fetched(real.QWEN2_CODER.name, console.print)
        made = [write_tiny(workspace / f"tiny-{seed}", coder, seed) for seed in range(2)]
        bases = [coder if is_real else made[0], made[1]]
        models = [
            with_template(workspace / name, base, "gpt-oss") for name, base in zip(hour.MODELS, bases, strict=True)
        ]
        report = hour.run_hour(workspace, models, is_real, bodies, console)
    except (NotInstalled, ModelError, LiveServerError) as error:
        console.print(f"error: {error}\n{log_tail(workspace / 'server.log')}", markup=False)
        return 1
    computing = "Qwen2.5-Coder-0.5B" if is_real else "a random model with Qwen2.5-Coder's tokenizer"
    title = f"An hour of an agent: prepared replies over {computing} and gpt-oss's template"
    print_report({"title": title, "machine": machine(), **report}, as_json, hour_report.show)
    return 0 if all(each["holds"] for each in report["verdicts"]) else 1


def _sessions(run: Run, agents: Sequence[Agent], as_json: bool) -> int:
    """Runs and prints the sessions of `agents`; those that have none are left out. Returns the exit code. Raises
    `UsageError` if none has one."""
    by_name = {agent.name: agent for agent in agents}
    sessions = [each for each in SESSIONS if each.agent.name in by_name]
    if not sessions:
        raise click.UsageError("--session is for claude-code and codex")
    holds = True
    for session in sessions:
        session = replace(session, agent=by_name[session.agent.name])
        try:
            report = run_session(run.workspace, run.model, session, run.is_real, run.bodies, run.console)
        except (NotInstalled, LiveServerError, subprocess.CalledProcessError) as error:
            log = run.workspace / session.name / "server.log"
            run.console.print(f"error: {session.name}: {error}\n{log_tail(log)}", markup=False)
            holds = False
            continue
        title = "ten questions in a conversation that began elsewhere"
        print_report({"title": title, "machine": machine(), **report}, as_json, session_report.show)
        holds = holds and all(each["holds"] for each in report["verdicts"])
    return 0 if holds else 1


def _outcome(agent: Agent, tap: Tap, is_done: bool, work: Work) -> Outcome:
    turns, later = tap.turns, tap.turns[1:]
    tokens, restored = [each.reply.prompt_tokens for each in turns], [each.reply.restored for each in turns]
    return Outcome(
        agent=agent.name,
        version=agent.version,
        is_done=is_done,
        exit_code=work.exit_code,
        turns=len(turns),
        side_requests=sum(each.method == "POST" and not each.is_turn for each in tap.exchanges),
        calls=[name for each in turns for name in each.reply.calls],
        prompt_tokens=tokens,
        restored=restored,
        statuses=[each.status for each in turns],
        restored_share=sum(restored[1:]) / sum(tokens[1:]) if later and sum(tokens[1:]) else None,
        first_byte_ms=_median_ms([each.first_byte_s for each in turns]),
        first_token_ms=_median_ms([each.first_token_s for each in turns]),
        restarts=len(later),
        refused=[said for each in tap.exchanges if (said := each.refused_for) is not None],
        retries=sum(each.is_repeated for each in tap.exchanges),
        cut_off=sum(each.is_cut_off for each in tap.exchanges),
        hosts_refused=sorted(set(tap.refused_hosts)),
        changed=work.changed,
        new=work.new,
    )


def _median_ms(times_s: Sequence[float | None]) -> float | None:
    known = [time_s * 1e3 for time_s in times_s if time_s is not None]
    return round(statistics.median(known), 1) if known else None


def _report(outcomes: Sequence[Outcome], template: str | None, is_real: bool) -> dict[str, Any]:
    computing = "Qwen2.5-Coder-0.5B" if is_real else "a random model with Qwen2.5-Coder's tokenizer"
    computing += f" and the template {template}" if template else ""
    title = f"Prepared replies over {computing}"
    return {"title": title, "machine": machine(), "agents": [asdict(each) for each in outcomes]}


def show(report: Mapping[str, Any], console: Console) -> None:
    outcomes = [Outcome(**each) for each in report["agents"]]
    tokens, times = ("first\nprompt", "last\nprompt", "restored"), ("first\nbyte", "first\ntoken")
    right = ("turns", "calls", *tokens, *times, "refused", "retries", "side\nrequests")
    table = new_table(report["title"], left=("agent", "task"), right=right)
    for each in outcomes:
        table.add_row(
            each.agent,
            "done" if each.is_done else "[red]not done[/red]",
            str(each.turns),
            str(len(each.calls)),
            *(f"{each.prompt_tokens[index]:,}" if each.prompt_tokens else "" for index in (0, -1)),
            f"{each.restored_share:.1%}" if each.restored_share is not None else "",
            *("" if time is None else f"{time:,.0f} ms" for time in (each.first_byte_ms, each.first_token_ms)),
            str(len(each.refused) + each.cut_off),
            str(each.retries),
            str(each.side_requests),
        )
    console.width = max(console.width, TABLE_COLUMNS)
    console.print(table, _table_of_turns(outcomes))
    for each in outcomes:
        for line in each.refused:
            say(console, f"{each.agent}: refused: {line}")
        if each.changed:
            say(console, f"{each.agent}: other than before after launch --clean: {', '.join(each.changed)}")
        if each.new:
            say(console, f"{each.agent} keeps files of its own in the home folder: {', '.join(each.new[:SHOWN_FILES])}")
        if each.hosts_refused:
            say(console, f"{each.agent} tried to reach {', '.join(each.hosts_refused)}, and was refused")
    say(console, "The daemon was killed with SIGKILL and started again before each turn but the first.")
    show_machine(report["machine"], console)


def _table_of_turns(outcomes: Sequence[Outcome]) -> Table:
    right = ("turn", "prompt", "restored", "share", "status")
    table = new_table("Turn by turn, restored from the disk by a new process", left=("agent", "version"), right=right)
    for each in outcomes:
        turns = zip(each.prompt_tokens, each.restored, each.statuses, strict=True)
        for number, (tokens, restored, status) in enumerate(turns, start=1):
            share = f"{restored / tokens:.1%}" if tokens else ""
            table.add_row(each.agent, each.version, str(number), f"{tokens:,}", f"{restored:,}", share, str(status))
    return table


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(AGENTS)), metavar="[AGENT]...")
@click.option(
    "--real", "is_real", is_flag=True, help="Qwen2.5-Coder-0.5B computes the prompts, not a random model of two layers."
)
@click.option("--template", type=click.Choice(list(TEMPLATES)), help="A chat template of another model.")
@click.option(
    "--hour", "is_hour", is_flag=True, help="An hour of OpenCode instead: 50 questions, kills, a full disk, midnight."
)
@click.option(
    "--session",
    "is_session",
    is_flag=True,
    help="Ten questions to Claude Code and Codex, whose tools come late.",
)
@click.option("--newest", "is_newest", is_flag=True, help="The newest version of each agent, not the one in the table.")
@click.option("--limit", "limit_s", default=600, show_default=True, help="Seconds after which an agent is ended.")
@click.option(
    "--bodies",
    type=click.Path(file_okay=False, path_type=Path),
    help="A folder for the bodies of the agents' requests.",
)
@JSON
def main(
    names: tuple[str, ...],
    is_real: bool,
    template: str | None,
    is_hour: bool,
    is_session: bool,
    is_newest: bool,
    limit_s: int,
    bodies: Path | None,
    as_json: bool,
) -> None:
    """Real command-line agents mend a file in a scratch repository: read it, edit it, run it.

    AGENT is one of qwen-code, claude-code, codex, opencode, cline, continue, pi, goose and aider; without one all work,
    one after the other. They are installed with npm and pip on first use, into the cache folder. `diskprefix launch`
    starts them, and its --clean must leave their user's files as they were. Home and repository are scratch folders,
    and requests to any host but the daemon are refused.

    The daemon is killed with SIGKILL before each turn but the first, once what it computed is on disk and no request
    runs. The request waits while the daemon starts; times are counted from then.

    The replies are prepared: the tokens of the right calls are taken in place of those that the model would sample.
    The model is a random one of two layers with the tokenizer and the chat template of Qwen2.5-Coder, or with --real
    that model itself, which takes minutes for a first prompt. With --template it has another model's template, and its
    padding tokens are that template's control tokens. Everything else is the daemon as it is.

    Claude Code, Codex and OpenCode are then started again, and go on with a question in the same conversation. An agent
    that fails does not keep the others from running.

    With --session, Claude Code and Codex work for ten questions, with --hour OpenCode for fifty: tools/AGENTS.md says
    what happens to the daemon meanwhile.

    Exit codes: 0 all is well; 1 a request was refused, repeated or cut off, a task is not done, files are
    other than before, or less than 90 % of the prompts after the first were restored; 2 wrong usage.
    """
    console = Console(stderr=True)
    line = partial(console.print, markup=False)
    if bodies is not None:
        bodies.mkdir(parents=True, exist_ok=True)
    chosen = [AGENTS[each] for each in names or AGENTS]
    with tempfile.TemporaryDirectory(prefix="diskprefix-agents-") as name:
        workspace = Path(name)
        if is_hour:
            if names or template or is_newest or is_session:
                raise click.UsageError("--hour goes with --real, --bodies and --json only")
            sys.exit(_hour(workspace, is_real, bodies, console, as_json))
        try:
            chosen = [newest(each) if is_newest else each for each in chosen]
            model = _model(workspace, template, is_real, line)
        except (NotInstalled, ModelError) as error:
            line(f"error: {error}")
            sys.exit(1)
        run = Run(workspace=workspace, model=model, console=console, bodies=bodies, is_real=is_real)
        if is_session:
            sys.exit(_sessions(run, chosen, as_json))
        outcomes = run.all(chosen, limit_s)
    print_report(_report(outcomes, template, is_real), as_json, show)
    sys.exit(0 if len(outcomes) == len(chosen) and all(each.is_good for each in outcomes) else 1)


if __name__ == "__main__":
    # Without this, the daemon would outlive a run that gets a SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
