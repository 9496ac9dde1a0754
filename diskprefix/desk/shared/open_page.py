"""Opens a page of a running daemon in a browser, with the daemon's token."""

from __future__ import annotations

import html
import os
import sys
import webbrowser
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

import click

from diskprefix.daemon.server.process.token_file import page_link
from diskprefix.desk.shared.daemon_call import full_url, running_daemon, token_of
from diskprefix.errors import NotReady, SettingsError
from diskprefix.folders import cache_home
from diskprefix.private_file import distrusted_by_root, make_private_folder


def open_page(url: str, api_key: str | None, page: str = "", *, prints: bool = False) -> None:
    """Opens the page of the daemon at `url` in a browser. Without a browser, or if `prints`, prints the link.

    The browser is given a file that only the user can read, because other users see the arguments of programs. Raises
    `SettingsError` for an invalid URL or key or if the file cannot be written, and `NotReady` if no daemon is there.
    """
    token = (token_of(url) or "") if api_key is None else _token_for(url, api_key)
    link = page_link(full_url(url), token, page)
    has_screen = sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")))
    if prints or not (has_screen and webbrowser.open(_write_redirect(link).as_uri())):
        click.echo(link)


def _token_for(url: str, api_key: str) -> str:
    """Returns what the daemon takes instead of a key as long as it lives: the link holds no key that stays."""
    answer = running_daemon(url, api_key)("POST", "/page-token", None)
    if answer.status == HTTPStatus.UNAUTHORIZED:
        raise SettingsError(f"--api-key: {answer.message}")
    body = answer.body
    if answer.status != HTTPStatus.OK or not isinstance(body, dict) or not isinstance(body.get("token"), str):
        raise NotReady(f"what answers at {url} opens no page: {answer.message}")
    return str(body["token"])


def _write_redirect(link: str) -> Path:
    """Writes a page that redirects to the link and that only the user can read. Returns its path."""
    path = cache_home() / "daemons" / "dashboard.html"
    page = f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={html.escape(link)}">\n'
    try:
        if (reason := distrusted_by_root(path.parent)) is not None:
            raise PermissionError(0, reason)
        make_private_folder(path.parent)
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(page)
    except OSError as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise SettingsError(
            f"cannot write {path}: {error.strerror}; `diskprefix dashboard --print` needs no file"
        ) from error
    return path
