"""`diskprefix launch`: starts an agent that uses the daemon, and the daemon if none runs."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

import click
from msgspec.structs import replace

from diskprefix.daemon.catalogue.adviser import LEAST_CONTEXT
from diskprefix.daemon.cli.options import api_key_option, nonempty
from diskprefix.daemon.server.process.token_file import shown_link, token_for
from diskprefix.desk.clients.agent_profile import AgentProfile
from diskprefix.desk.clients.first_prompt_size import counted_tokens
from diskprefix.desk.shared.daemon_call import running_daemon
from diskprefix.desk.shared.daemon_choice import find_daemon, shared_daemon
from diskprefix.desk.shared.launched_daemon import LaunchedDaemon
from diskprefix.desk.shared.model_choice import Choice, NoAgentModel, NotServed, ask_served, flags_of_model
from diskprefix.desk.shared.own_daemon import own_urls, url_option, usual_url
from diskprefix.desk.shared.recipes.recipe import KnownAgent, Served, agent_called, agents, recipe
from diskprefix.desk.shared.tooling import confirmed, say, status
from diskprefix.errors import SettingsError
from diskprefix.runtime.fetch.embedded import EMBEDDED
from diskprefix.units import counted, format_size, rough_duration

_SIGNAL_EXIT_CODE = 128
"""A shell reports a process that signal N killed as 128 + N."""


@click.command(short_help="Start an agent that uses the daemon, and the daemon if none runs.")
@click.argument("agent", required=False, callback=nonempty)
@click.argument("arguments", metavar="[-- ARGUMENTS...]", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--model",
    metavar="NAME",
    callback=nonempty,
    show_default="the served one, or the fetched one that the adviser prefers",
    help="The model. If a daemon must be started, also a folder, a .gguf file or a repository.",
)
@url_option()
@api_key_option("The key, for a daemon with --api-keys.", otherwise="this user's key")
@click.option("--anyway", is_flag=True, help="Start the agent even if no model here suits agents.")
@click.option("--print", "prints", is_flag=True, help="Show what would be done, and do nothing.")
@click.option(
    "--clean",
    is_flag=True,
    help="Remove what AGENT (or all agents) and launches wrote, and end their unused daemons. Asks first.",
)
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
def launch(
    agent: str | None,
    arguments: tuple[str, ...],
    model: str | None,
    url: str | None,
    api_key: str | None,
    anyway: bool,
    prints: bool,
    clean: bool,
    yes: bool,
) -> int:
    """Start AGENT with ARGUMENTS, set up for the daemon. Without AGENT, list the agents and how to install them.

    If a daemon of yours runs and has the model (without --model: a model that suits agents), it is used. Otherwise
    `diskprefix serve --policy agent` is started with the fetched model that suits agents best, on another port if
    necessary. This daemon ends with the last agent that uses it. If the model's process dies earlier, another
    one is started. A daemon whose only model does not suit agents is refused, unless --anyway or --model is given. If
    the launch was killed, `diskprefix stop` ends the daemon. With --url, no daemon is started.

    Your own files are not changed: settings go into the agent's environment and into a separate profile, a folder below
    $XDG_CONFIG_HOME/diskprefix/launch. The agent's own data (conversations, trusted folders) goes there too, if the
    agent has a variable for that. Your own settings of the agent do not apply, except in OpenCode and Aider where
    launch does not set them; `diskprefix clients` prints what to add to them. --clean removes the profile.

    The log of a daemon that launches started is $XDG_STATE_HOME/diskprefix/launch/daemon.log, by default below
    ~/.local/state. A second daemon beside it has daemon-2.log, and the log of the start before ends with .1.

    The agent's first prompt is computed with the first request; later sessions restore it. `diskprefix warm --agent`
    computes it before.

    Agents send this user's key, a secret generated at first use. Other users of the daemon do not have it, so they
    cannot test guesses about what your agents send.

    \b
    diskprefix pull qwen3.5:4b
    diskprefix launch claude
    diskprefix launch codex --model unsloth/Qwen3.5-4B-GGUF:Q8_0 -- exec "say what this repository is for"
    diskprefix launch claude --print
    diskprefix launch claude --clean

    \b
    Exit codes: 0 done; else the agent's exit code, or 128 plus the number of the signal that ended it. Before it
    starts: 1 no daemon answers or starts, or --clean was declined; 2 wrong usage, no such agent here, or no model;
    3 there is no such file, or the model cannot be fetched.
    """
    shared = shared_daemon()
    if agent is None:
        return _clean(shared, agents(), yes=yes) if clean else _list_agents()
    known = agent_called(agent)
    if clean:
        return _clean(shared, [known], yes=yes)
    if prints:
        running = url or next(iter(own_urls()), None)
        return _print_recipe(known, arguments, _served(running, model, api_key), shared.folder / known.name)
    choose = partial(_choice, url, model, api_key, takes_any=anyway)
    return _start(shared, known, arguments, choose, requires_suitable=model is None and not anyway)


def _list_agents() -> int:
    """Prints the agents, and where they are or how to install them. Returns the exit code."""
    click.echo("\n".join(f"{each.program:<9} {each.title:<12} {_location(each)}" for each in agents()))
    return 0


def _print_recipe(known: KnownAgent, arguments: Sequence[str], served: Served, profile: Path) -> int:
    """Prints the settings of an agent and its command. Returns the exit code."""
    settings = recipe(known.name, served, profile)
    click.echo(replace(settings, run=" ".join((settings.run, *map(shlex.quote, arguments)))).shown())
    return 0


def _choice(url: str | None, model: str | None, api_key: str | None, stack: ExitStack, *, takes_any: bool) -> Choice:
    """Returns the model at the daemon that the user named, or else at the one that `find_daemon` finds or starts; with
    `takes_any` the embedded model where none suits agents."""
    if url is not None:
        return ask_served(running_daemon(url, api_key), url, model, api_key)
    try:
        return find_daemon(stack, model, api_key)
    except NoAgentModel:
        if not takes_any:
            raise
        return find_daemon(stack, EMBEDDED.name, api_key)


def _start(
    shared: LaunchedDaemon,
    known: KnownAgent,
    arguments: Sequence[str],
    choose: Callable[[ExitStack], Choice],
    *,
    requires_suitable: bool,
) -> int:
    """Runs an agent with the model that `choose` returns, and keeps its daemon until the agent ends. Returns the
    agent's exit code. Raises `SettingsError` if it is not installed, or if `requires_suitable` and the model does not
    suit agents."""
    program = shutil.which(known.program)
    if program is None:
        raise SettingsError(f"{known.title} is not installed (no {known.program} in PATH); install it: {known.install}")
    with _signals() as agent_process, ExitStack() as stack:
        choice = choose(stack)
        if choice.problem and requires_suitable:
            raise SettingsError(f"{choice.problem}; {choice.advice}, or start {known.title} all the same: --anyway")
        profile = shared.folder / known.name
        settings = recipe(known.name, choice.served, profile)
        with shared.mutex():
            stack.enter_context(AgentProfile(folder=profile).session(settings, say))
        if choice.problem:
            say(f"warning: {choice.problem}; {choice.advice}")
        say(f"{known.title} uses {choice.served.model} at {choice.served.url}; its profile is {profile}")
        _say_duration(known, choice)
        if (token := token_for(choice.served.url)) is not None:
            say(f"the dashboard, in a browser: {shown_link(choice.served.url, token)}")
        command = [program, *shlex.split(settings.run)[1:], *arguments]
        return agent_process.run(command, os.environ | settings.environment | _not_by_proxy(choice.served.url))


def _say_duration(agent: KnownAgent, choice: Choice) -> None:
    """Says how long the agent's first prompt takes, the first time. Waits for a model that is not loaded."""
    if agent.first_prompt is None or not choice.prefill_s_per_token:
        return
    with status("waiting for the model …"):
        counted = counted_tokens(agent.first_prompt, choice.served)
    if counted is not None:
        tokens = min(round(counted, -2), choice.served.context)
        lasts = rough_duration(tokens * choice.prefill_s_per_token)
        how = "as measured here" if choice.is_measured else "a rough guess"
        say(f"its first prompt has about {tokens:,} tokens with this model: {lasts}, the first time only ({how})")


def _location(agent: KnownAgent) -> str:
    return shutil.which(agent.program) or f"not installed: {agent.install}"


def _clean(shared: LaunchedDaemon, known: Sequence[KnownAgent], *, yes: bool) -> int:
    profiles = {each.title: AgentProfile(folder=shared.folder / each.name) for each in known}
    existing = {title: profile for title, profile in profiles.items() if profile.folder.exists()}
    for title, profile in existing.items():
        files = [path for path in profile.folder.rglob("*") if path.is_file() and not path.is_symlink()]
        size = format_size(sum(path.stat().st_size for path in files))
        say(f"to remove: {profile.folder} ({counted(len(files), 'file')}, {size}), with what {title} keeps there")
    running = [(daemon, url) for daemon in shared.all() if (url := daemon.url())] if shared.folder.exists() else []
    for daemon, url in running:
        say(f"the daemon at {url} stays: it is in use" if daemon.is_used() else f"to end: the daemon at {url}")
    questions = ["Remove the profiles, with the conversations in them?"] if existing else []
    questions += ["End the daemons that nobody uses?"] if not all(daemon.is_used() for daemon, _ in running) else []
    if questions and not yes and not confirmed(" ".join(questions)):
        say("nothing was removed")
        return 1
    if not shared.folder.exists():
        say("nothing to remove")
        return 0
    for daemon in shared.all()[1:]:
        with daemon.mutex():
            is_used = _end(daemon)
        if not is_used:
            shutil.rmtree(daemon.folder)
            daemon.remove_logs()
    with shared.mutex():
        is_used = _end(shared)
        for title, profile in existing.items():
            if profile.remove(title):
                say(f"removed {profile.folder}")
        if not is_used and not any(path.is_dir() for path in shared.folder.iterdir()):
            shutil.rmtree(shared.folder)
            shared.remove_logs()
    for folder in (shared.logs, shared.logs.parent, shared.folder.parent):
        with suppress(OSError):
            folder.rmdir()
    return 0


def _end(daemon: LaunchedDaemon) -> bool:
    """Ends a daemon that nobody uses, and says so. Returns whether it still runs."""
    url, still_runs = daemon.url(), daemon.end_unused()
    if url is not None and not still_runs:
        say(f"ended the daemon at {url}")
    return still_runs


def _served(running_url: str | None, model: str | None, api_key: str | None) -> Served:
    """Returns the values of the daemon at `running_url`, or the known values of a daemon that would be started. This
    user's key is neither generated nor shown."""
    key = api_key or "KEY"
    with suppress(NotServed):
        if running_url is not None:
            call = running_daemon(running_url, api_key)
            choice = ask_served(call, running_url, model, api_key, lambda _url: key)
            if choice.problem:
                say(f"warning: {choice.problem}; {choice.advice}")
            return choice.served
    flags = flags_of_model(model, fetches=False)
    started = shlex.join(["diskprefix", "serve", "--policy", "agent", *flags])
    click.echo(f"No daemon serves this model. A launch would start `{started}`, which then names model and context:\n")
    return Served(url=usual_url(), model=flags[-1] if flags else "MODEL", key=key, context=LEAST_CONTEXT)


def _not_by_proxy(url: str) -> dict[str, str]:
    """Returns the variables that keep programs from using a proxy for the daemon."""
    own = urlsplit(url).hostname or ""
    upper = [f"{kind}_PROXY" for kind in ("HTTP", "HTTPS", "ALL")]
    if not any(map(os.environ.get, (*upper, *map(str.lower, upper)))):
        return {}
    names = ("NO_PROXY", "no_proxy")
    hosts = [host.strip() for name in names for host in os.environ.get(name, "").split(",")]
    return dict.fromkeys(names, ",".join(dict.fromkeys(filter(None, (*hosts, own)))))


class _Foreground:
    """The agent's process. Signals are passed on to it, but for SIGINT, which the terminal sends to it."""

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
    """Handles signals: they raise an exception here, which ends the daemon, or go to the running agent."""
    foreground, numbers = _Foreground(), (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, foreground.handle) for number in numbers}
    try:
        yield foreground
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
