"""The command `diskprefix top`: watches a running daemon."""

from __future__ import annotations

import sys

import click

from diskprefix.daemon.cli.options import api_key_option, option
from diskprefix.desk.shared.daemon_call import running_daemon
from diskprefix.desk.shared.own_daemon import daemon_url, url_option
from diskprefix.errors import SettingsError


@click.command(short_help="Watch the daemon.")
@url_option()
@api_key_option("The key named admin, for a daemon with --api-keys.")
@option("--model", help="The model to watch, if the daemon has several. Default: one that is loaded.")
def top(url: str | None, api_key: str | None, model: str | None) -> None:
    """Show the running daemon until `q` or Ctrl-C: its requests, memory, store and problems, and the cache's decisions
    for the last requests.

    \b
    diskprefix top
    diskprefix top --url http://192.168.1.5:8642 --api-key "$KEY"

    \b
    Exit codes: 0 done; 1 no daemon answers; 2 wrong usage, the key is refused, or no terminal.
    """
    if not sys.stdout.isatty():
        raise SettingsError("top needs a terminal; scripts read /dashboard/state")
    from diskprefix.desk.watch.top.live import Source, show

    url = daemon_url(url)
    call = running_daemon(url, api_key)
    # A server that accepts connections and never answers is recognised soonest here.
    call("GET", "/health", None)
    show(Source(call, url, model))
