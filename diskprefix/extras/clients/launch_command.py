"""`diskprefix launch`: starts an agent that uses the daemon, and the daemon if none runs."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from types import FrameType
from urllib.parse import urlsplit

import click
from click.core import ParameterSource

from diskprefix.cli.options import api_key_option, nonempty, policy_values, url_option, variable_of
from diskprefix.errors import NotReady, SettingsError
from diskprefix.extras.clients.agent_profile import AgentProfile
from diskprefix.extras.clients.launched_daemon import DaemonKeeper, LaunchedDaemon, is_ours
from diskprefix.extras.clients.model_choice import LEAST_CONTEXT, ask_served, flags_of_model
from diskprefix.extras.clients.recipe import KnownAgent, Recipe, Served, agents, recipe
from diskprefix.extras.daemon_call import running_daemon
from diskprefix.printable import escaped, printable_only
from diskprefix.server.process.token_file import dashboard_line, token_at
from diskprefix.settings import config_home, default_kv_cache_dir
from diskprefix.units import counted, format_size, parse_size

_SIGNAL_EXIT_CODE = 128
"""A shell reports a process that signal N killed as this and N."""


@click.command(short_help="Start an agent that uses the daemon, and the daemon if none runs.")
@click.argument("agent", required=False, callback=nonempty)
@click.argument("arguments", metavar="[-- ARGUMENTS...]", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--model",
    metavar="NAME",
    callback=nonempty,
    show_default="the served one, or the largest that was fetched, fits and calls tools",
    help="The model. If a daemon must be started, also a folder, a .gguf file or a repository.",
)
@url_option()
@api_key_option("The key, for a daemon with --api-keys.", otherwise="the key of this user")
@click.option("--print", "prints", is_flag=True, help="Show what would be done, and do nothing.")
@click.option("--restore", is_flag=True, help="Remove what launches of AGENT, or of all, have written.")
@click.pass_context
def launch(
    context: click.Context,
    agent: str | None,
    arguments: tuple[str, ...],
    model: str | None,
    url: str,
    api_key: str | None,
    prints: bool,
    restore: bool,
) -> int | None:
    """Start AGENT with ARGUMENTS, set up for the daemon. Without AGENT, list the agents and how to install them.

    A daemon of yours that runs is used. Otherwise `diskprefix serve --policy agent` is started with the
    largest model that was fetched, fits and calls tools, and ends with the last agent that uses it. If it dies before,
    it is started again. If that launch was killed, the daemon goes on until the next launch ends, or until --restore.
    With --url, none is started.

    No file of yours is changed: settings go into the agent's environment and into a profile of its own, a folder below
    $XDG_CONFIG_HOME/diskprefix/launch. What the agent itself keeps (conversations, trusted folders) goes there too, if
    the agent has a variable for that. Your own settings of the agent do not apply, except for what the launch does not
    set in OpenCode and Aider; `diskprefix clients` prints what to add to them. --restore removes the profile.

    Agents send the key of this user, which is drawn at the first use: without it, other users of the daemon can test no
    guesses of what your agents send.

    \b
    diskprefix pull unsloth/Qwen3.5-4B-GGUF
    diskprefix launch claude
    diskprefix launch codex --model unsloth/Qwen3.5-4B-GGUF:Q8_0 -- exec "say what this repository is for"
    diskprefix launch claude --print
    diskprefix launch claude --restore

    \b
    Exit codes: 0 done; else that of the agent, or 128 and the number of the signal that ended it. Before it starts: 1
    no daemon answers, or it does not start; 2 wrong usage, the agent is not installed, or there is no model.
    """
    shared = LaunchedDaemon(folder=config_home() / "launch")
    if agent is None and not restore:
        click.echo("\n".join(f"{each.name:<12} {_place(each)}" for each in agents()))
        return None
    known = agents() if agent is None else [_known(agent)]
    if restore:
        _restore(shared, known)
        return None
    [one] = known
    profile = shared.folder / one.name
    own_url = url if context.get_parameter_source("url") is not ParameterSource.DEFAULT else None
    if prints:
        own_url = own_url or shared.url() or (url if is_ours(url) else None)
        _show(recipe(one.name, _served(own_url, url, model, api_key), profile), arguments)
        return None
    program = shutil.which(one.program)
    if program is None:
        raise SettingsError(f"{one.title} is not installed (no {one.program} in PATH); install it: {one.install}")
    with _signals() as agent_process, ExitStack() as stack:
        with shared.mutex():
            others = own_url or (url if shared.url() is None and is_ours(url) else None)
            found, keeper = others, None
            if found is None:
                flags = [] if shared.url() else ["--policy", "agent", *flags_of_model(model)]
                if flags:
                    _say(_kept())
                keeper = stack.enter_context(shared.used(urlsplit(url).port or 0, flags, _say))
                found = keeper.url
        try:
            choice = ask_served(running_daemon(found, api_key), found, model, api_key)
        except NotReady as error:
            raise error if others or shared.url() else NotReady(shared.failure()) from error
        if keeper is not None:
            keeper.is_serving = True
            stack.callback(_say_deaths, keeper, shared)
        settings = recipe(one.name, choice.served, profile)
        with shared.mutex():
            stack.enter_context(AgentProfile(folder=profile).session(settings, _say))
        if choice.problem:
            _say(f"warning: {choice.problem}")
        _say(f"{one.title} uses {choice.served.model} at {choice.served.url}; its profile is {profile}")
        if (line := _dashboard(choice.served.url)) is not None:
            _say(line)
        command = [program, *shlex.split(settings.run)[1:], *arguments]
        return agent_process.run(command, os.environ | settings.environment | _not_by_proxy(choice.served.url))


def _kept() -> str:
    """Returns what a daemon that is started takes of the disk."""
    variable = variable_of("--kv-cache-budget")
    budget = parse_size(os.environ.get(variable) or policy_values("agent")["kv_cache_budget"], param=variable)
    folder = os.environ.get(variable_of("--kv-cache-dir")) or default_kv_cache_dir()
    return f"starting a daemon; it keeps at most {format_size(budget)} in {folder} ({variable} sets another limit)"


def _place(agent: KnownAgent) -> str:
    return shutil.which(agent.program) or f"not installed: {agent.install}"


def _known(agent: str) -> KnownAgent:
    """Returns the agent with this name or program. Raises `SettingsError`."""
    known = agents()
    for each in known:
        if agent in (each.name, each.program):
            return each
    raise SettingsError(f"no agent is called {agent!r}; there are {', '.join(each.name for each in known)}")


def _restore(shared: LaunchedDaemon, known: Sequence[KnownAgent]) -> None:
    if not shared.folder.exists():
        _say("nothing to remove")
        return
    with shared.mutex():
        is_used = shared.end_unused()
        for each in known:
            profile = AgentProfile(folder=shared.folder / each.name)
            if profile.remove(each.title):
                _say(f"removed {profile.folder}, with what {each.title} kept there")
        if not is_used and not any(path.is_dir() for path in shared.folder.iterdir()):
            shutil.rmtree(shared.folder)
    with suppress(OSError):
        shared.folder.parent.rmdir()


def _served(found: str | None, url: str, model: str | None, api_key: str | None) -> Served:
    """Returns what the daemon at `found` serves, or what one would that must be started first. The key of this user is
    neither drawn nor shown."""
    key = api_key or "KEY"
    if found is not None:
        choice = ask_served(running_daemon(found, api_key), found, model, api_key, lambda _url: key)
        if choice.problem:
            _say(f"warning: {choice.problem}")
        return choice.served
    flags = flags_of_model(model)
    started = shlex.join(["diskprefix", "serve", "--policy", "agent", *flags])
    click.echo(f"No daemon runs. `{started}` would be started, and says what to write for model and context:\n")
    return Served(url=url, model=flags[-1] if flags else "MODEL", key=key, context=LEAST_CONTEXT)


def _show(settings: Recipe, arguments: Sequence[str]) -> None:
    text = replace(settings, run=" ".join((settings.run, *map(shlex.quote, arguments)))).shown()
    click.echo("\n".join(map(escaped, text.splitlines())))


def _say_deaths(keeper: DaemonKeeper, shared: LaunchedDaemon) -> None:
    """Says it again: an agent that fills the terminal has hidden what was said meanwhile."""
    if keeper.num_deaths:
        times = counted(keeper.num_deaths, "time")
        _say(f"the daemon at {keeper.url} died {times} while the agent ran (its log: {shared.log})")


def _dashboard(url: str) -> str | None:
    """Returns the line about the dashboard of a daemon of this user, None for another one."""
    parts = urlsplit(url)
    token = token_at(parts.hostname or "", parts.port or 0)
    return None if token is None else dashboard_line(url, token)


def _say(line: str) -> None:
    click.echo(printable_only(line), err=True)


def _not_by_proxy(url: str) -> dict[str, str]:
    """Returns the variables with which programs ask no proxy for the daemon."""
    own = urlsplit(url).hostname or ""
    upper = [f"{kind}_PROXY" for kind in ("HTTP", "HTTPS", "ALL")]
    if not any(map(os.environ.get, (*upper, *map(str.lower, upper)))):
        return {}
    names = ("NO_PROXY", "no_proxy")
    hosts = [host.strip() for name in names for host in os.environ.get(name, "").split(",")]
    return dict.fromkeys(names, ",".join(dict.fromkeys(filter(None, (*hosts, own)))))


class _Foreground:
    """The agent's process. Signals are for it as soon as it runs; the terminal sends it SIGINT by itself."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Returns the exit code of a command."""
        with subprocess.Popen(command, env=environment) as self._process:
            code = self._process.wait()
        self._process = None
        return code if code >= 0 else _SIGNAL_EXIT_CODE - code

    def handle(self, number: int, _frame: FrameType | None) -> None:
        if self._process is None:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(_SIGNAL_EXIT_CODE + number)
        if number != signal.SIGINT:
            self._process.send_signal(number)


@contextmanager
def _signals() -> Iterator[_Foreground]:
    """Ends the daemon too when the launch is ended, and passes signals on to the agent."""
    foreground, numbers = _Foreground(), (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, foreground.handle) for number in numbers}
    try:
        yield foreground
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
