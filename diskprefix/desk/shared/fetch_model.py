"""Fetching a model from the hub, with progress and what it needs on stderr."""

from __future__ import annotations

from pathlib import Path

from diskprefix.daemon.catalogue.adviser import cost_text
from diskprefix.desk.shared.tooling import say
from diskprefix.runtime.fetch.hub import HubListing, fetched_model
from diskprefix.runtime.fetch.proposals import short_name
from diskprefix.runtime.files.fit import fitted
from diskprefix.runtime.memory import available_ram_bytes


def fetch(name: str, flag: str, *, with_packs: bool = False) -> Path:
    """Returns the folder or file of a model. Fetches it from the hub if it is not on this machine, `with_packs` with
    those beside a `.gguf` file, and with progress on stderr. Raises a `ModelError` that names `flag`."""
    return fetched_model(name, say, flag, _warn, with_weights=True, with_packs=with_packs)


def _warn(listing: HubListing) -> None:
    """Says before the download what a model of the table of models needs, and if the model does not fit: the user may
    want it for another time, or machine."""
    if (row := short_name(f"{listing.repo}:{listing.quant}")) is not None:
        say(f"{row.name}: {cost_text(row)}")
    fit = fitted(listing.needs("auto"), available_ram_bytes())
    if not fit.is_enough:
        say(f"note: {fit.refusal(listing.other_forms())}")
