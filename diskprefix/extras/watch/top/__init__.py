"""`diskprefix top`: watch a running daemon, and browse what is saved."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from diskprefix.cli.options import api_key_option, url_option
from diskprefix.cli.tooling import folder_option
from diskprefix.errors import SettingsError
from diskprefix.extras.watch.top.sources import Source, chosen_source


@click.command(short_help="Watch the daemon, and browse what is saved.")
@url_option()
@api_key_option("The key named admin, for a daemon with --api-keys.")
@folder_option("The folder of the store to browse if no daemon answers.")
def top(url: str, api_key: str | None, kv_cache_dir: Path) -> None:
    """Show the requests of the running daemon as they are computed, its memory, its store and what is wrong, and browse
    the saved prompts. Without a daemon, the store is browsed.

    \b
    1, 2, 3   requests, saved prompts, what to look at
    /         filter the saved prompts by text, id, model or tenant
    s, t      sort them; as a tree of what they share, or as a list
    Enter     expand or fold
    d         delete the saved prompt, after a question
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
    run(chosen_source(url, api_key, kv_cache_dir))


def run(source: Source) -> None:
    """Shows `source` until the user quits."""
    # Imported late: the list of commands needs none of it.
    from diskprefix.extras.watch.top.screen import TopApp

    TopApp(source).run()
