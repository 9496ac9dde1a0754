"""The command `diskprefix top`: watches a running daemon, and browses the saved prompts."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from diskprefix.cli.options import api_key_option, option, url_option
from diskprefix.cli.tooling import folder_option
from diskprefix.errors import SettingsError
from diskprefix.extras.watch.top.sources import Source, chosen_source


@click.command(short_help="Watch the daemon, and browse the saved prompts.")
@url_option()
@api_key_option("The key named admin, for a daemon with --api-keys.")
@folder_option("The store to browse if no daemon answers.")
@option("--model", help="The model to watch, of a daemon that has several. Default: one that is loaded.")
def top(url: str, api_key: str | None, kv_cache_dir: Path, model: str | None) -> None:
    """Show the running daemon: its requests, memory, store and problems. Browse its saved prompts. Without a daemon,
    browse the store.

    \b
    1, 2, 3   requests, saved prompts, problems
    /         filter the saved prompts by text, id, model or tenant
    s         sort the saved prompts by another column
    t         show them as a tree or as a list
    Enter     expand or fold
    d         delete the saved prompt, after a confirmation
    q         quit

    It needs a terminal of 80 by 24 characters or more. With NO_COLOR=1 it uses no colours.

    \b
    diskprefix top
    diskprefix top --url http://192.168.1.5:8642 --api-key "$KEY"

    \b
    Exit codes: 0 done; 2 wrong usage, the key is refused, or no terminal; 4 neither a daemon nor a store is there.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise SettingsError("top needs a terminal; scripts read /dashboard/state, or `diskprefix inspect --json`")
    run(chosen_source(url, api_key, kv_cache_dir, model))


def run(source: Source) -> None:
    """Shows `source` until the user quits."""
    # Imported late, because the list of commands does not need it.
    from diskprefix.extras.watch.top.screen import TopApp

    TopApp(source).run()
