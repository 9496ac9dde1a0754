"""Settings with the constants that a test needs smaller than any user has them."""

from __future__ import annotations

from typing import Any

from diskprefix.settings import SETTINGS, Settings


def made_settings(**values: Any) -> Settings:
    constants = {name: value for name, value in values.items() if name not in SETTINGS}
    settings = Settings(**{name: value for name, value in values.items() if name in SETTINGS})
    return settings.with_constants(**constants) if constants else settings
