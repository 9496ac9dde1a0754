"""The model that clients use: one that a daemon serves, or one to start a daemon with."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from diskprefix.daemon.catalogue.adviser import (
    AGENT_TOKENS,
    LEAST_CONTEXT,
    attention_bytes,
    guessed_s_per_token,
    preference,
    prefill_s_per_token,
    proposed,
)
from diskprefix.daemon.catalogue.catalogue import Catalogue, open_catalogue, template_of
from diskprefix.daemon.cli.options import variable_of
from diskprefix.daemon.settings import Settings
from diskprefix.desk.shared.daemon_call import Call, full_url, key_for, wait_ready
from diskprefix.desk.shared.fetch_model import fetch
from diskprefix.desk.shared.model_row import row_of
from diskprefix.desk.shared.recipes.recipe import Served
from diskprefix.desk.shared.tooling import status
from diskprefix.errors import NotReady, SettingsError
from diskprefix.printable import shown
from diskprefix.runtime.fetch.hub import cached_model
from diskprefix.runtime.fetch.named_model import own_path, plain_name, require_named
from diskprefix.runtime.fetch.proposals import meant_name, names_meant, require_repository, short_name
from diskprefix.runtime.memory import available_ram_bytes
from diskprefix.units import format_size

_SHOWN = 3
_KV_PART = re.compile(r"KV memory for ([\d,]+) tokens")


class Choice(Struct, frozen=True, kw_only=True):
    """A model of the daemon. `problem` says why agents may not work with it, or is empty; `advice` is what to do then.
    `prefill_s_per_token` is measured by a daemon if `is_measured`, else guessed from the size of the weights, and
    None if it is unknown."""

    served: Served
    problem: str
    advice: str
    prefill_s_per_token: float | None = None
    is_measured: bool = False


class NoAgentModel(SettingsError):
    """No model on this machine suits agents."""


class NotServed(SettingsError):
    """The daemon does not serve the requested model."""


def ask_served(
    call: Call, url: str, model: str | None, api_key: str | None, key_of: Callable[[str], str] = key_for
) -> Choice:
    """Waits until the daemon at `url` serves. Returns `model`, or without a name preferably a model in memory.

    Without an `api_key`, `key_of` returns the key for the daemon's address. Raises `NotReady` if no daemon answers,
    `SettingsError` for a key that it refuses, and `NotServed` for a model that it does not serve.
    """
    with status("waiting for the daemon and its model …") as say:
        wait_ready(call, url, say)
        answer = call("GET", "/v1/models", None)
    if answer.status in (401, 403):
        raise SettingsError(f"--api-key: {answer.message}")
    if answer.status != 200:
        raise NotReady(f"the daemon at {url} does not tell its models: {answer.message}")
    cards = answer.body["data"]
    card = _chosen(cards, model, url)
    if card.get("problem"):
        raise SettingsError(f"{card['id']} cannot be served: {card['problem']}")
    context = card.get("context_length") or LEAST_CONTEXT
    takes_images = "vision" in card.get("capabilities", ())
    key = api_key or key_of(url)
    served = Served(url=full_url(url), model=card["id"], key=key, context=context, takes_images=takes_images)
    props = _props(call, card["id"])
    measured: float | None = props.get("full_cache", {}).get("gate", {}).get("prefill_s_per_token")
    speed, is_measured = _noted_speed(card) if measured is None else (measured, True)
    return Choice(
        served=served,
        problem=_problem(card),
        advice=_advice(cards),
        prefill_s_per_token=speed,
        is_measured=is_measured,
    )


def _chosen(cards: list[dict[str, Any]], model: str | None, url: str) -> dict[str, Any]:
    """Returns the card of `model`, or without a name the card of the best model."""
    if model is not None:
        # A file and a folder are served by their own names.
        wanted = {model, meant_name(model), plain_name(model), *names_meant(model)}
        named = [card for card in cards if wanted & {card["id"], *card.get("aliases", ())}]
        if not named:
            served = ", ".join(shown(card["id"]) for card in cards)
            raise NotServed(f"the daemon at {url} serves {served}, and not {shown(model)}")
        return named[0]
    sound = [card for card in cards if not card.get("problem")]
    if not sound:
        raise NotReady(f"the daemon at {url} has no model; fetch one with {proposed()}")
    return max(sound, key=lambda card: (not _problem(card), bool(card.get("loaded")), "context_length" in card))


def _problem(card: dict[str, Any]) -> str:
    context = card.get("context_length") or LEAST_CONTEXT
    if "tool_use" not in card.get("capabilities", ["tool_use"]):
        return f"{shown(card['id'])} was not trained to call tools, so an agent can only talk"
    if context < LEAST_CONTEXT:
        return f"{shown(card['id'])} takes {context:,} tokens, and first prompts of agents have up to 19,000"
    return ""


def _advice(cards: list[dict[str, Any]]) -> str:
    """Returns what to do about a problem of a model: use another model of the daemon, or else fetch one."""
    fitting = [
        f"--model {shown(card['id'])} ({format_size(card['needs_bytes'])} of memory)"
        for card in cards
        if not (card.get("problem") or _problem(card)) and 0 < card.get("needs_bytes", 0) <= available_ram_bytes()
    ]
    if fitting:
        return f"the daemon also has {', '.join(fitting[:_SHOWN])}"
    return f"fetch another with {proposed()} and name it with --model"


def _props(call: Call, model: str) -> dict[str, Any]:
    """Returns what the daemon tells its owner of a model, nothing to others."""
    answer = call("GET", f"/props?model={quote(model, safe='')}", None)
    return answer.body if answer.status == 200 and isinstance(answer.body, dict) else {}


def _noted_speed(card: dict[str, Any]) -> tuple[float | None, bool]:
    """Returns the prefill seconds per token without a measurement of the running daemon, and whether an earlier daemon
    measured them. For a model outside the table of models, the guess assumes that each token reads all weights, so it
    is too slow for a mixture of experts."""
    if (row := short_name(card["id"])) is not None:
        return prefill_s_per_token(row)
    weights_bytes = attended_bytes = 0
    num_tokens = min(AGENT_TOKENS, card.get("context_length") or LEAST_CONTEXT)
    for part, num_bytes in card.get("needs", {}).items():
        if part.startswith("weights"):
            weights_bytes += num_bytes
        elif match := _KV_PART.fullmatch(part):
            attended_bytes += attention_bytes(num_bytes / max(int(match[1].replace(",", "")), 1), num_tokens)
    return (guessed_s_per_token(weights_bytes + attended_bytes, is_plain=True) if weights_bytes else None), False


def flags_of_model(model: str | None, *, fetches: bool = True) -> list[str]:
    """Returns the flags with which `serve` has `model`. Without a name it is the fetched model that fits, calls tools
    and is preferred by the adviser, and there are no flags if the daemon's settings name models. Raises
    `SettingsError`, which proposes a model, if there is none."""
    catalogue = open_catalogue(Settings())
    names = [name for known in catalogue.models() for name in (known.name, *known.aliases)] if catalogue else []
    if model is not None:
        is_known = not {model, meant_name(model), *names_meant(model)}.isdisjoint(names)
        return [] if is_known else ["--model", _find_model(model, fetches=fetches)]
    if catalogue or any(os.environ.get(variable_of(flag)) for flag in ("--model", "--models-dir", "--models-file")):
        return []
    with status("reading headers of models …"):
        fetched = [(known.path, row_of(known)) for known in Catalogue(Settings()).models()]
        rows = [(path, row) for path, row in fetched if path is not None and row["fits"]]
    fit = [row for path, row in rows if row["context"] >= LEAST_CONTEXT and "tools" in template_of(path)]
    if not fit:
        raise NoAgentModel(
            "no model that calls tools and fits is on this machine; fetch one with "
            f"{proposed()}, or name any with --model; --anyway takes the embedded one"
        )
    return ["--model", max(fit, key=lambda row: preference(row["name"], row["file_bytes"]))["name"]]


def _find_model(model: str, *, fetches: bool) -> str:
    """Returns the name or path for `serve --model`. Fetches a model of the hub, to show the progress."""
    if os.path.exists(path := os.path.expanduser(model)):
        return os.path.abspath(path)
    if own_path(model) is not None:
        return model
    if model.startswith(("./", "../", "/", "~")) or model.lower().endswith(".gguf"):
        require_named(model, "--model")
    name = model if "/" in model else require_repository(model)
    if fetches and "/" in name and cached_model(name) is None:
        fetch(name, "--model")
    return name
