"""`diskprefix clients`: the settings with which agents and libraries use a running daemon."""

from __future__ import annotations

from dataclasses import asdict

import click

from diskprefix.cli.options import api_key_option, nonempty, url_option
from diskprefix.cli.tooling import json_option, print_json, status
from diskprefix.errors import NotReady, SettingsError
from diskprefix.extras.clients.recipe import NO_KEY, Served, names, recipe
from diskprefix.extras.daemon_call import running_daemon, wait_ready
from diskprefix.printable import escaped


@click.command(short_help="Print the settings with which agents and libraries use the daemon.")
@click.argument("name", required=False, callback=nonempty)
@url_option()
@click.option(
    "--model", metavar="NAME", callback=nonempty, show_default="the served one", help="What clients call the model."
)
@api_key_option(
    "The key, for a daemon with --api-keys. It is printed with the settings.", otherwise="a word that is not checked"
)
@json_option
def clients(name: str | None, url: str, model: str | None, api_key: str | None, as_json: bool) -> None:
    """Print the environment and the files with which a client uses the running daemon: its address, its model, the key,
    and how many tokens the model takes.

    NAME is one of claude-code, codex, opencode, qwen-code, cline, aider, continue, open-webui, langchain, pydantic-ai
    and llm. Without a NAME all are printed. Nothing is written.

    \b
    diskprefix clients codex
    diskprefix clients qwen-code --url http://192.168.1.5:8642 --api-key "$KEY"
    diskprefix clients --json

    \b
    Exit codes: 0 done; 1 no daemon answers; 2 wrong usage, or no such NAME.
    """
    if name is not None and name not in names():
        raise SettingsError(f"there is no recipe for {name!r}; there are {', '.join(names())}")
    served = _served(url, model, api_key)
    recipes = [recipe(each, served) for each in ([name] if name else names())]
    if as_json:
        print_json({"clients": [asdict(each) for each in recipes]})
    else:
        text = "\n\n\n".join(each.shown() for each in recipes)
        click.echo("\n".join(map(escaped, text.splitlines())))


def _served(url: str, model: str | None, api_key: str | None) -> Served:
    """Asks the daemon. Raises `NotReady` if none answers, `SettingsError` for a URL or a key that it does not take."""
    call = running_daemon(url, api_key)
    with status("asking the daemon …") as say:
        wait_ready(call, url, say)
        answer = call("GET", "/v1/models", None)
    if answer.status in (401, 403):
        raise SettingsError(f"--api-key: {answer.message}")
    if answer.status != 200:
        raise NotReady(f"the daemon at {url} does not tell its model: {answer.message}")
    [card] = answer.body["data"]
    address = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    return Served(url=address, model=model or card["id"], key=api_key or NO_KEY, context=card["context_length"])
