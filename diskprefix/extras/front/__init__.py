"""A front process with a worker process for each model: several models, `--front`, `--idle-unload`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from diskprefix.settings import Settings


def open_front(settings: Settings) -> Callable[[Settings], None] | None:
    """Returns the function that serves each model in a process of its own, or None if the settings ask for one model
    in this process. Raises `SettingsError`."""
    from diskprefix.extras.catalogue.catalogue import open_catalogue

    catalogue = open_catalogue(settings)
    if catalogue is None and not (settings.front or settings.idle_unload):
        return None
    from diskprefix.extras.front.front_server import run_front
    from diskprefix.extras.front.listing import Listing

    return partial(run_front, Listing(settings, catalogue))
