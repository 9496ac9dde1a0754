"""`diskprefix run`: a conversation with a model, which is fetched and served if need be."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from typing import Any

import click

from diskprefix.daemon.cli.options import nonempty
from diskprefix.desk.shared.daemon_call import running_daemon
from diskprefix.desk.shared.daemon_choice import find_daemon, shared_daemon
from diskprefix.desk.shared.launched_daemon import STAYS, LaunchedDaemon
from diskprefix.desk.shared.model_choice import ask_served
from diskprefix.desk.shared.own_daemon import own_urls
from diskprefix.desk.shared.recipes.recipe import Served
from diskprefix.desk.shared.tooling import say
from diskprefix.desk.talk.chat_command import Restart, chat, converse, with_piped
from diskprefix.errors import NotReady, SettingsError
from diskprefix.printable import shown
from diskprefix.runtime.fetch.embedded import EMBEDDED

_EPILOG = """\b
Examples:
  diskprefix run                                     the model that runs, or else the embedded one
  diskprefix run qwen3.5:4b
  diskprefix run qwen3.5:4b "Name three rivers."
  diskprefix run unsloth/Qwen3.5-4B-GGUF:Q8_0 "Summarise this file." < notes.txt
  diskprefix run ~/models/qwen.gguf --system rules.txt

In a conversation, /help lists the commands.

Exit codes: 0 done; 1 no daemon answers or starts, or a reply failed; 2 wrong usage, or no model has this name; 3 there
is no such file, or the model cannot be fetched.
"""


@click.command(
    short_help="Talk to a model: fetch it and start a daemon if necessary.",
    epilog=_EPILOG,
    params=[each for each in chat.params if each.name not in ("model", "browser")],
)
@click.argument("model", required=False, callback=nonempty)
@click.argument("prompt", nargs=-1)
def run(model: str | None, prompt: tuple[str, ...], url: str | None, api_key: str | None, **options: Any) -> None:
    """Talk to MODEL: a short name or ORG/NAME[:QUANT] of the hub (fetched if necessary), a folder or a .gguf file.
    Without MODEL, talk to the one that your daemon has in memory, or else to the embedded one.

    With PROMPT, print one reply and exit. Piped input goes before PROMPT, or is the prompt.

    If a daemon of yours serves MODEL, it is used. Otherwise one is started in the background, on another port if
    necessary. It unloads the model five minutes after the last request, and loads it again for the next one; saved
    state is restored. `diskprefix ps` shows the daemon, and `diskprefix stop` ends it. If you run another model while
    nobody uses the daemon, a daemon with that model replaces it. If the daemon ends during a conversation, your next
    message starts it again. With --url, no daemon is started.
    """
    if model is not None and not prompt and _is_prompt(model):
        raise SettingsError(f"{shown(model)!r} is no model; MODEL comes first: diskprefix run {EMBEDDED.name} '…'")
    # An empty input ends this before anything is fetched or started.
    text = " ".join(prompt) or with_piped("")
    with ExitStack() as stack:
        restart: Restart | None = None
        if url is None:
            name = model or _running_model(api_key)

            def start_again(url: str) -> Served | None:
                # The lock tells a slow daemon, which stays in use, from one that has ended.
                if (daemon := _launched(url)) and not daemon.has_ended():
                    return None
                stack.close()
                return find_daemon(stack, name, api_key, *STAYS).served

            served = find_daemon(stack, name, api_key, *STAYS).served
            # Another daemon is started again by who started it, with options of theirs.
            restart = start_again if _launched(served.url) else None
        else:
            served = ask_served(running_daemon(url, api_key), url, model, api_key).served
        converse(served.url, api_key, text, restart=restart, model=served.model, **options)


def _is_prompt(model: str) -> bool:
    """Returns whether what stands for the model is a text: names have no spaces, and a path has slashes or exists."""
    return any(map(str.isspace, model.strip())) and "/" not in model and not os.path.exists(model)


def _running_model(api_key: str | None) -> str:
    """Returns the model of the first of this user's daemons that serves one, or else the embedded model; says which. It
    is named so that the daemon can be started again."""
    for url in own_urls():
        with suppress(NotReady, SettingsError):
            name = ask_served(running_daemon(url, api_key), url, None, api_key).served.model
            say(f"talking to {name}, which your daemon at {url} has")
            flags = daemon.flags() if (daemon := _launched(url)) else []
            return flags[flags.index("--model") + 1] if "--model" in flags else name
    say(f"talking to the embedded model, {EMBEDDED.name}; `diskprefix list --available` lists others")
    return EMBEDDED.name


def _launched(url: str) -> LaunchedDaemon | None:
    """Returns the daemon at `url` if it is one of those that launches share."""
    return next((daemon for daemon in shared_daemon().all() if daemon.url() == url), None)
