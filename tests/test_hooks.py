"""The places where extras join the core."""

from __future__ import annotations

from typing import Any

import pytest

from diskprefix import hooks
from diskprefix.errors import SettingsError
from diskprefix.settings import Settings


def test_without_settings_that_ask_for_it_no_extra_joins() -> None:
    assert hooks.open_tier(Settings()) is None
    assert hooks.open_recorder(Settings(), lambda: 0) is None
    assert hooks.open_compression(Settings(), 1024, 1024) is None
    assert hooks.open_front(Settings()) is None


def test_settings_that_ask_for_an_extra_get_it() -> None:
    assert hooks.open_compression(Settings(prefill_compression="auto"), 1024, 1024) is not None
    assert hooks.open_front(Settings(front=True)) is not None


def test_the_threshold_of_compression_is_the_models_and_at_most_what_is_served() -> None:
    def threshold(wanted: str, served: int) -> int:
        compress: Any = hooks.open_compression(Settings(prefill_compression=wanted), 32768, served)
        return int(compress.args[0])

    assert [threshold("auto", served) for served in (32768, 30000, 20480)] == [24576, 22500, 15360]
    assert [threshold("30000", served) for served in (32768, 20480)] == [30000, 15360]
    with pytest.raises(SettingsError, match="40000 is not below the 32768 positions of this model"):
        threshold("40000", 20480)
