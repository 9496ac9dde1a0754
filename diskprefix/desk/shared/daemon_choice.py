"""The daemon that `launch` and `run` use: a running daemon of this user that has the model, or a new daemon."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from diskprefix.daemon.cli.options import policy_values, variable_of
from diskprefix.desk.shared.daemon_call import running_daemon
from diskprefix.desk.shared.launched_daemon import STAYS, LaunchedDaemon
from diskprefix.desk.shared.model_choice import Choice, NotServed, ask_served, flags_of_model
from diskprefix.desk.shared.own_daemon import own_urls, usual_url
from diskprefix.desk.shared.tooling import say
from diskprefix.errors import NotReady, SettingsError
from diskprefix.folders import config_home, default_kv_cache_dir, state_home
from diskprefix.prefixstore.store.folder import DATA
from diskprefix.units import format_size, parse_size


def shared_daemon() -> LaunchedDaemon:
    """Returns the first of the daemons that launches share, which need not run."""
    return LaunchedDaemon(folder=config_home() / "launch", logs=state_home() / "launch")


def find_daemon(stack: ExitStack, model: str | None, api_key: str | None, *flags: str) -> Choice:
    """Returns `model` (None: a model that agents can work with) at a daemon that keeps it until `stack` ends.

    Tries this user's daemons in the order of `own_urls`, then those that launches share. A shared daemon with another
    model ends if nobody uses it. Starts a new daemon with `flags` if need be, at the usual port if that is free. Raises
    `NotReady` if it does not start, and raises as `ask_served` and `flags_of_model`.
    """
    path = os.path.abspath(os.path.expanduser(model)) if model and os.path.exists(os.path.expanduser(model)) else ""
    shared, port = shared_daemon(), urlsplit(usual_url()).port or 0
    launched = {daemon.url() for daemon in shared.all()}
    for url in own_urls():
        if url not in launched and (choice := _served_at(url, model, api_key)):
            return choice
    for daemon in shared.candidates():
        while True:
            was_absent = daemon.url() is None
            # This may fetch a model. Other launches should not wait for it, so the mutex is not held.
            model_flags = flags_of_model(model) if was_absent else []
            with ExitStack() as held:
                with daemon.mutex():
                    is_new = daemon.url() is None
                    if is_new and not was_absent:
                        continue
                    if is_new:
                        _say_start(flags)
                    policy = ("--policy", "agent")
                    use = held.enter_context(daemon.use(port, [*policy, *flags, *model_flags]))
                    log_bytes = daemon.log.stat().st_size
                try:
                    choice = None
                    if is_new:
                        choice = ask_served(running_daemon(use.url, api_key), use.url, model, api_key)
                    elif path in ("", *daemon.flags()):
                        # Two files may have the same name.
                        choice = _served_at(use.url, model, api_key)
                    if choice is not None and not daemon.is_listening():
                        raise NotReady(f"the daemon at {use.url} is ending; try again")
                except NotReady:
                    if not daemon.has_ended():
                        raise
                    if is_new:
                        raise NotReady(daemon.failure()) from None
                    # It was ending when it was found.
                    continue
                # A daemon with another model ends below, unless the model cannot be had.
                use.goes_on = True
                if choice is None:
                    flags_of_model(model)
                else:
                    stack.enter_context(held.pop_all())
                    stack.callback(daemon.say_end, log_bytes, names_log=tuple(flags) != STAYS)
                    return choice
            with daemon.mutex():
                if daemon.end_unused():
                    break
    raise AssertionError


def _served_at(url: str, model: str | None, api_key: str | None) -> Choice | None:
    """Returns the model of a running daemon, or None if another daemon should be used; says why."""
    try:
        choice = ask_served(running_daemon(url, api_key), url, model, api_key)
        if not choice.problem or model is not None:
            return choice
        reason = choice.problem
    except NotServed as error:
        reason = error.message
    else:
        try:
            flags_of_model(None)
        except SettingsError:
            return choice
    say(f"{reason}; using another daemon")
    return None


def _say_start(flags: Sequence[str]) -> None:
    """Says that a daemon is started, how much of the disk it uses, and what ends a daemon that goes on."""
    variable = variable_of("--kv-cache-budget")
    folder = os.environ.get(variable_of("--kv-cache-dir")) or default_kv_cache_dir()
    if not (given := os.environ.get(variable)) and (Path(folder) / DATA).exists():
        limit = "within the limit that this folder was made with"
    else:
        given = given or os.environ.get(variable_of("--kv-cache-new-budget"))
        budget = parse_size(given or policy_values("agent")["kv_cache_new_budget"], param=variable)
        limit = f"at most {format_size(budget)}"
    stays = " in the background, which `diskprefix stop` ends" if flags == STAYS else ""
    say(f"starting a daemon{stays}; it saves prompts in {folder}, {limit} ({variable} sets another)")
