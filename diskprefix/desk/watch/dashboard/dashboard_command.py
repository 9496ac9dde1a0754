"""`diskprefix dashboard`: opens the dashboard in a browser, with the daemon's token."""

from __future__ import annotations

import click

from diskprefix.daemon.cli.options import api_key_option
from diskprefix.desk.shared.open_page import open_page
from diskprefix.desk.shared.own_daemon import daemon_url, url_option


@click.command(short_help="Open the dashboard in a browser.")
@url_option()
@api_key_option("The key named admin, for a daemon with --api-keys.", otherwise="the token of your daemon")
@click.option("--print", "prints", is_flag=True, help="Print the link, token included, instead of opening it.")
def dashboard(url: str | None, api_key: str | None, prints: bool) -> None:
    """Open the dashboard of the running daemon in a browser. If there is no browser, print the link.

    The link contains a token of the daemon, so the page shows the texts of prompts. The token ends with the daemon:
    after a restart, open the page again. The browser opens a file that only you can read, not the link itself, because
    other users can see the arguments of programs. A browser that may not read files below $XDG_CACHE_HOME, such as a
    sandboxed one, needs the printed link.

    \b
    diskprefix dashboard
    diskprefix dashboard --print

    \b
    Exit codes: 0 done; 1 no daemon answers; 2 wrong usage.
    """
    open_page(daemon_url(url), api_key, prints=prints)
