"""The daemon that `launch` and `run` use: one of this user that has the model, or one that is started with it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from urllib.parse import urlsplit

from diskprefix.cli.options import policy_values, variable_of
from diskprefix.cli.tooling import say
from diskprefix.errors import NotReady, SettingsError
from diskprefix.extras.clients.launched_daemon import STAYS, LaunchedDaemon, is_ours
from diskprefix.extras.clients.model_choice import Choice, NotServed, ask_served, flags_of_model
from diskprefix.extras.daemon_call import running_daemon
from diskprefix.settings import config_home, default_kv_cache_dir
from diskprefix.units import format_size, parse_size


def shared_daemon() -> LaunchedDaemon:
    """Returns the first of the daemons that launches share, which may not live."""
    return LaunchedDaemon(folder=config_home() / "launch")


def find_daemon(stack: ExitStack, url: str, model: str | None, api_key: str | None, *flags: str) -> Choice:
    """Returns `model` (None: one that agents can work with) at a daemon that has it until the end of `stack`.

    It is the daemon of this user at `url`, the usual address, or one that launches share. Of these, one with another
    model ends if nobody uses it. The last choice is a new one, with `flags`. Raises `NotReady` if that does not start,
    and as `ask_served` and `flags_of_model`.
    """

    def served_at(url: str) -> Choice | None:
        """Returns the model of a running daemon, None if another daemon has a better one."""
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
        say(f"{reason}: another daemon is used")
        return None

    path = os.path.abspath(os.path.expanduser(model)) if model and os.path.exists(os.path.expanduser(model)) else ""
    shared = shared_daemon()
    if url not in {one.url() for one in shared.all()} and is_ours(url) and (choice := served_at(url)):
        return choice
    for one in shared.beside():
        while True:
            was_absent = one.url() is None
            # It may fetch a model, for which other launches should not wait.
            named = flags_of_model(model) if was_absent else []
            with ExitStack() as held:
                with one.mutex():
                    is_new = one.url() is None
                    if is_new and not was_absent:
                        continue
                    if is_new:
                        _say_start(flags)
                    policy = ("--policy", "agent")
                    use = held.enter_context(one.used(urlsplit(url).port or 0, [*policy, *flags, *named]))
                    log_bytes = one.log.stat().st_size
                try:
                    at = use.url
                    found: Choice | None = None
                    if is_new:
                        found = ask_served(running_daemon(at, api_key), at, model, api_key)
                    elif path in ("", *one.flags()):
                        # Two files may have one name.
                        found = served_at(at)
                except NotReady as error:
                    raise NotReady(one.failure()) if one.has_ended() else error from None
                if found is not None:
                    use.is_serving = True
                    stack.enter_context(held.pop_all())
                    stack.callback(one.say_deaths, log_bytes)
                    return found
            with one.mutex():
                if one.end_unused():
                    break
    raise AssertionError


def _say_start(flags: Sequence[str]) -> None:
    """Says what a daemon that is started takes of the disk, and how one ends that stays."""
    variable = variable_of("--kv-cache-budget")
    budget = parse_size(os.environ.get(variable) or policy_values("agent")["kv_cache_budget"], param=variable)
    folder = os.environ.get(variable_of("--kv-cache-dir")) or default_kv_cache_dir()
    stays = " in the background, which `diskprefix stop` ends" if flags == STAYS else ""
    say(f"starting a daemon{stays}; it keeps at most {format_size(budget)} in {folder} ({variable} sets another limit)")
