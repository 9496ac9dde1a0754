"""The model that clients use: one that the daemon serves, or one that a daemon is started with."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from diskprefix.cli.options import variable_of
from diskprefix.cli.tooling import status
from diskprefix.errors import NotReady, SettingsError
from diskprefix.extras.catalogue.catalogue import Catalogue, open_catalogue, template_of
from diskprefix.extras.catalogue.list_command import row_of
from diskprefix.extras.catalogue.proposals import proposed
from diskprefix.extras.clients.recipe import Served
from diskprefix.extras.daemon_call import Call, key_for, wait_ready
from diskprefix.model.load.named_model import plain_name
from diskprefix.printable import shown
from diskprefix.settings import Settings

LEAST_CONTEXT = 16_384
"""Positions. The first prompts of agents have 2 000 to 19 000 tokens."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A model of the daemon. `problem` says why agents may not work with it, and is empty if they should."""

    served: Served
    problem: str


def ask_served(
    call: Call, url: str, model: str | None, api_key: str | None, key_of: Callable[[str], str] = key_for
) -> Choice:
    """Waits until the daemon at `url` has loaded its model, and returns what `model` needs: by default the only one, or
    of several one that is in memory.

    Without an `api_key`, `key_of` returns the key for the daemon's address. Raises `NotReady` if no daemon answers,
    `SettingsError` for a key that it does not take or a model that it does not serve.
    """
    with status("asking the daemon …") as say:
        wait_ready(call, url, say)
        answer = call("GET", "/v1/models", None)
    if answer.status in (401, 403):
        raise SettingsError(f"--api-key: {answer.message}")
    if answer.status != 200:
        raise NotReady(f"the daemon at {url} does not tell its models: {answer.message}")
    card = _chosen(answer.body["data"], model, url)
    if card.get("problem"):
        raise SettingsError(f"{card['id']} cannot be served: {card['problem']}")
    address = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    context = card.get("context_length") or LEAST_CONTEXT
    takes_images = "vision" in card.get("capabilities", ())
    key = api_key or key_of(url)
    served = Served(url=address, model=card["id"], key=key, context=context, takes_images=takes_images)
    return Choice(served=served, problem=_problem(card, context))


def _chosen(cards: list[dict[str, Any]], model: str | None, url: str) -> dict[str, Any]:
    """Returns the card of `model`, or of the model to take without a name."""
    if model is not None:
        # A file and a folder are served by their own names.
        wanted = {model, plain_name(model)}
        named = [card for card in cards if wanted & {card["id"], *card.get("aliases", ())}]
        if not named:
            there = ", ".join(shown(card["id"]) for card in cards)
            raise SettingsError(f"the daemon at {url} serves {there}, and not {shown(model)}; name one of them")
        return named[0]
    sound = [card for card in cards if not card.get("problem")]
    if not sound:
        raise NotReady(f"the daemon at {url} has no model; fetch one with `diskprefix pull {proposed()}`")
    return max(sound, key=lambda card: (bool(card.get("loaded")), (card.get("context_length") or 0) >= LEAST_CONTEXT))


def _problem(card: dict[str, Any], context: int) -> str:
    advice = f"fetch another with `diskprefix pull {proposed()}` and start the daemon with it"
    if "tool_use" not in card.get("capabilities", ["tool_use"]):
        return f"{shown(card['id'])} was not trained to call tools, so an agent can only talk; {advice}"
    if context < LEAST_CONTEXT:
        return f"{shown(card['id'])} takes {context:,} tokens, and first prompts of agents have up to 19,000; {advice}"
    return ""


def flags_of_model(model: str | None) -> list[str]:
    """Returns the flags with which `serve` has `model`. Without one, it is the largest on this machine that fits and
    calls tools, unless the daemon's own settings name models.

    Raises `SettingsError` if there is no such model; it proposes one.
    """
    catalogue = open_catalogue(Settings())
    names = [name for known in catalogue.models() for name in (known.name, *known.aliases)] if catalogue else []
    if model is not None:
        return [] if model in names else ["--model", model]
    if catalogue or any(os.environ.get(variable_of(flag)) for flag in ("--model", "--models-dir", "--models-file")):
        return []
    with status("reading headers of models …"):
        here = [(known.path, row_of(known)) for known in Catalogue(Settings()).models()]
        rows = [(path, row) for path, row in here if path is not None and row["fits"]]
    fit = [row for path, row in rows if row["context"] >= LEAST_CONTEXT and "tools" in template_of(path)]
    if not fit:
        raise SettingsError(
            "no model that calls tools and fits is on this machine; fetch one with "
            f"`diskprefix pull {proposed()}`, or name any with --model"
        )
    return ["--model", max(fit, key=lambda row: int(row["file_bytes"]))["name"]]
