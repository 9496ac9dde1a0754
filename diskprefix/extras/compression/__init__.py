"""Conversations that become too long continue without their oldest exchanges: `--prefill-compression`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from diskprefix.errors import SettingsError

if TYPE_CHECKING:
    from diskprefix.chat.draft import Compress
    from diskprefix.settings import Settings


def open_compression(settings: Settings, max_positions: int, served: int) -> Compress | None:
    """Returns the function that shortens conversations, None without `--prefill-compression`.

    Of the model's `max_positions`, KV memory has room for `served`. Raises `SettingsError` if no prompt of the model
    can exceed the threshold.
    """
    if settings.prefill_compression == "off":
        return None
    limit = max_positions * 3 // 4 if settings.prefill_compression == "auto" else int(settings.prefill_compression)
    if limit >= max_positions:
        raise SettingsError(f"--prefill-compression: {limit} is not below the {max_positions} positions of this model")
    from diskprefix.extras.compression.compression import fit

    return partial(fit, min(limit, served * 3 // 4) if served < max_positions else limit)
