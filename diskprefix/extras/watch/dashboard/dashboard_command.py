"""`diskprefix dashboard`: opens the dashboard in a browser, with the daemon's token."""

from __future__ import annotations

import html
import os
import sys
import webbrowser
from pathlib import Path

import click

from diskprefix.cli.options import api_key_option, url_option
from diskprefix.errors import SettingsError
from diskprefix.extras.daemon_call import token_of
from diskprefix.server.process.token_file import dashboard_link
from diskprefix.settings import cache_home


@click.command(short_help="Open the dashboard in a browser.")
@url_option()
@api_key_option("The key named admin, for a daemon with --api-keys.", otherwise="the token of your daemon")
@click.option("--print", "prints", is_flag=True, help="Print the link, which has the token, and open nothing.")
def dashboard(url: str, api_key: str | None, prints: bool) -> None:
    """Open the dashboard of the running daemon in a browser. Where there is none, print the link.

    The link has the token of a daemon of yours, so the page shows texts of prompts. The browser is given a file that
    only you can read, and not the link: other users see the arguments of programs. A browser that may not read files
    below $XDG_CACHE_HOME, as some in a sandbox, needs the printed link.

    \b
    diskprefix dashboard
    diskprefix dashboard --print

    \b
    Exit codes: 0 done; 1 no daemon answers; 2 wrong usage.
    """
    token = token_of(url)
    address = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    link = dashboard_link(address, api_key or token or "")
    if prints or not _is_opened(link):
        click.echo(link)


def _is_opened(link: str) -> bool:
    """Returns False if there is no browser that shows pages. Raises `SettingsError` if the file cannot be written."""
    has_screen = sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")))
    return has_screen and webbrowser.open(_written(link).as_uri())


def _written(link: str) -> Path:
    """Returns a page that leads to the link, with the rights of the files of tokens beside it."""
    path = cache_home() / "daemons" / "dashboard.html"
    page = f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={html.escape(link)}">\n'
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(page)
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error.strerror}; --print needs no file") from error
    return path
