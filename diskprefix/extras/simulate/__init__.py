"""The effect of other settings: `--record` writes the workload of a daemon, `diskprefix simulate` replays it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diskprefix.hooks import Recorder
    from diskprefix.settings import Settings


def open_recorder(settings: Settings, secret_of: Callable[[], int]) -> Recorder | None:
    """Returns the recorder that writes the file of `--record`, None without it. Raises `SettingsError`."""
    if settings.record is None:
        return None
    from diskprefix.extras.simulate.recording import RequestRecorder

    return RequestRecorder(settings.record, settings, secret_of)
