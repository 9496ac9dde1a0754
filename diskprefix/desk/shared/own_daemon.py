"""The daemon that a command speaks with: the one of `--url`, or else this user's own, wherever it listens.

A daemon of this user is known before anything is sent to it (`daemon/server/process/token_file.py`). What else listens
on the usual port may be another user's, who would read the prompts: it is asked only by its address in `--url`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

from diskprefix.daemon.cli.options import Decorated, nonempty, option, policy_value, variable_of
from diskprefix.daemon.server.process.token_file import own_daemons
from diskprefix.daemon.settings import Settings
from diskprefix.desk.shared.daemon_call import expect_own
from diskprefix.desk.shared.tooling import say
from diskprefix.errors import NotReady, SettingsError

_PORT = variable_of("--port")
_CONNECT_S = 1.0


def url_option() -> Callable[[Decorated], Decorated]:
    """Returns the option `--url`, passed as `url: str | None`."""
    return option(
        "--url",
        metavar="URL",
        show_default="your running daemon",
        envvar=variable_of("--url"),
        callback=nonempty,
        show_envvar=True,
        help="The address of the daemon.",
    )


def usual_url() -> str:
    """Returns the address of a daemon that `diskprefix serve` starts without flags. Raises `SettingsError`."""
    try:
        port = policy_value("port", os.environ.get(_PORT) or Settings.port)
    except SettingsError as error:
        raise SettingsError(f"{_PORT}: {error.message}") from error
    return f"http://{Settings.host}:{port}"


def own_urls() -> list[str]:
    """Returns the addresses of this user's running daemons: the one at the usual address, then the others, those that
    were started last first."""
    usual = usual_url()
    # With --host, the usual port has another address.
    urls = sorted(own_daemons().values(), key=lambda url: urlsplit(url).port != urlsplit(usual).port)
    for url in urls:
        expect_own(url)
    return urls


def daemon_url(url: str | None, otherwise: str = "") -> str:
    """Returns `url`, or without one the first of `own_urls`; says which, if there are several.

    Raises `NotReady`, with `otherwise` at the end of its message, if no daemon of this user runs.
    """
    if url is not None:
        return url
    urls = own_urls()
    if not urls:
        raise NotReady(none_runs() + otherwise)
    if len(urls) > 1:
        say(f"using your daemon at {urls[0]}; choose another with --url: {', '.join(urls[1:])}")
    return urls[0]


def none_runs() -> str:
    """Returns that no daemon of this user runs, and what to do. Connects to the usual address, and sends nothing."""
    usual = usual_url()
    parts = urlsplit(usual)
    with suppress(OSError), socket.create_connection((parts.hostname, parts.port), _CONNECT_S):
        return (
            f"no daemon of yours runs: what listens at {usual} is not known as yours; `diskprefix serve "
            f"--port 0` starts one, and --url {usual} uses that one all the same"
        )
    return "no daemon of yours runs; start one with `diskprefix serve`, or give the address of another with --url"
