"""A front process, and behind it a worker for each model: several models, `--front`, `--standby`, `--idle-unload`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diskprefix.hooks import RunFront
    from diskprefix.settings import Settings


def open_front(settings: Settings) -> RunFront | None:
    """Returns what serves with a process for each model, None if there is one that need not come and go. Raises
    `SettingsError`."""
    from diskprefix.extras.catalogue.catalogue import open_catalogue

    catalogue = open_catalogue(settings)
    if catalogue is None and not (settings.front or settings.standby or settings.idle_unload):
        return None
    from diskprefix.extras.front.front_server import run_front
    from diskprefix.extras.front.listing import Listing

    return partial(run_front, Listing(settings, catalogue))
