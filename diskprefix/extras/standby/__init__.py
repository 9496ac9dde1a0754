"""A second process that takes over if the first one dies: `--standby`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diskprefix.hooks import Supervise
    from diskprefix.settings import Settings


def open_supervisor(settings: Settings) -> Supervise | None:
    """Returns what runs the daemon's processes for `--standby`, None without it."""
    if not settings.standby:
        return None
    from diskprefix.extras.standby.supervisor import supervise

    return supervise
