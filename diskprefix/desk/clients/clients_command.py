"""`diskprefix clients`: the settings with which agents and libraries use a running daemon."""

from __future__ import annotations

import click
from msgspec import to_builtins

from diskprefix.daemon.cli.options import api_key_option, nonempty
from diskprefix.desk.shared.daemon_call import running_daemon
from diskprefix.desk.shared.model_choice import ask_served
from diskprefix.desk.shared.own_daemon import daemon_url, url_option
from diskprefix.desk.shared.recipes.recipe import client_called, names, recipe, shown_names
from diskprefix.desk.shared.tooling import json_option, print_json, say


@click.command(short_help="Print the settings with which agents and libraries use the daemon.")
@click.argument("name", required=False, callback=nonempty)
@url_option()
@click.option(
    "--model", metavar="NAME", callback=nonempty, show_default="one in memory", help="The model, if there are several."
)
@api_key_option("The key, for a daemon with --api-keys. It is printed with the settings.", otherwise="this user's key")
@json_option
def clients(name: str | None, url: str | None, model: str | None, api_key: str | None, as_json: bool) -> None:
    """Print the environment variables and files that make a client use the running daemon: its address, model and key,
    and how many tokens the model takes.

    NAME is one of claude, codex, opencode, qwen, cline, aider, cn (Continue), goose, hermes, pi, open-webui, langchain,
    pydantic-ai and llm. Without NAME, all are printed. Nothing is written: the settings are for your own files. If an
    agent shortens its history, so that much is recomputed, they switch that off. A program with a fixed name of a model
    (`gpt-4o`, `claude-…`) needs the address alone: a daemon of one model answers to those names. `diskprefix launch`
    starts an agent without these settings. This user's key is a secret generated at first use. Other users of
    the daemon do not have it, so they cannot test guesses about what your agents send.

    \b
    diskprefix clients codex
    diskprefix clients qwen --url http://192.168.1.5:8642 --api-key "$KEY"
    diskprefix clients --json

    \b
    Exit codes: 0 done; 1 no daemon answers; 2 wrong usage, or no such NAME.
    """
    name = name and client_called(name)
    otherwise = f". There are settings for {', '.join(shown_names())}"
    url = daemon_url(url, otherwise)
    call = running_daemon(url, api_key, otherwise=otherwise)
    choice = ask_served(call, url, model, api_key)
    if choice.problem:
        say(f"warning for agents: {choice.problem}")
        say(choice.advice)
    recipes = [recipe(each, choice.served) for each in ([name] if name else names())]
    if as_json:
        print_json({"clients": [to_builtins(each) for each in recipes]})
    else:
        click.echo("\n\n\n".join(each.shown() for each in recipes))
