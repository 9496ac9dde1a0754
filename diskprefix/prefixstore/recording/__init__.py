"""Records requests, without their text."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diskprefix.prefixstore.recording.recording import RequestRecorder
    from diskprefix.prefixstore.store_options import StoreOptions


def open_recorder(settings: StoreOptions, secret_of: Callable[[], int], model_name: str = "") -> RequestRecorder | None:
    """Returns the recorder, None without one. `secret_of` returns the store's secret. `model_name` is "" for the
    model's own name. Raises `SettingsError` if the file cannot be written or is no recording."""
    if settings.record is None:
        return None
    from diskprefix.prefixstore.recording.recording import RequestRecorder

    return RequestRecorder(settings.record, settings, secret_of, model_name)
