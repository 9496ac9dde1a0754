"""A router with a worker process for each model: several models, `--router`, `--idle-unload`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from diskprefix.daemon.settings import Settings


def open_router(settings: Settings) -> Callable[[Settings], None] | None:
    """Returns the function that serves each model in a process of its own, or None if the settings ask for one model
    in this process. Raises `SettingsError`."""
    from diskprefix.daemon.catalogue.catalogue import open_catalogue

    catalogue = open_catalogue(settings)
    if catalogue is None and not (settings.router or settings.idle_unload):
        return None
    from diskprefix.daemon.router.listing import Listing
    from diskprefix.daemon.router.router_server import run_router

    return partial(run_router, Listing(settings, catalogue))
