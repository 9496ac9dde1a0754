"""The places where extras join the core."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from diskprefix.daemon import hooks, router
from diskprefix.daemon.catalogue import catalogue
from diskprefix.daemon.compression import compression
from diskprefix.daemon.settings import Settings
from diskprefix.errors import SettingsError
from diskprefix.prefixstore.recording import recording
from diskprefix.prefixstore.remote import remote_tier, upkeep
from diskprefix.runtime import pictures

if TYPE_CHECKING:
    from diskprefix.daemon.chat.draft import Compress
    from diskprefix.prefixstore.cache.tiers.tier import Bucket, SharedTier
    from diskprefix.runtime.pictures.picture_processor import PictureProcessor, PicturesModel

    # `hooks` names the types of what extras provide without importing them. Here mypy compares these types.
    open_tier: Callable[[Settings], SharedTier] = remote_tier.open_tier
    open_bucket: Callable[[str, Path], Bucket] = upkeep.open_bucket
    open_recorder: Callable[[Path, Settings, Callable[[], int]], hooks.Recorder] = recording.RequestRecorder
    open_compression: Callable[[Settings, int, int], Compress] = compression.compress_of
    open_pictures: Callable[[PicturesModel], PictureProcessor] = pictures.open_pictures
    open_router: Callable[[Settings], Callable[[Settings], None] | None] = router.open_router
    known_names: Callable[[Settings], Iterator[tuple[str, Path | None]]] = catalogue.known_names


def test_the_types_of_all_extras_are_compared() -> None:
    """Each cast of `hooks` has its line above."""
    source, own = Path(hooks.__file__).read_text(encoding="utf-8"), Path(__file__).read_text(encoding="utf-8")
    provided = re.findall(r'cast\(\s*"[^"]+",\s*_extra\("([\w.]+)"\)\.(\w+)\(', source)
    assert len(provided) == source.count("return cast(")
    assert all(f"= {module.rpartition('.')[2]}.{name}\n" in own for module, name in provided)


def test_without_settings_that_ask_for_it_no_extra_joins() -> None:
    assert hooks.open_tier(Settings()) is None
    assert hooks.open_recorder(Settings(), lambda: 0) is None
    assert hooks.open_compression(Settings(), 1024, 1024) is None
    assert hooks.open_router(Settings()) is None


def test_settings_that_ask_for_an_extra_get_it() -> None:
    assert hooks.open_compression(Settings(prefill_compression="auto"), 1024, 1024) is not None
    assert hooks.open_router(Settings(router=True)) is not None


def test_the_threshold_of_compression_is_the_models_and_at_most_what_is_served() -> None:
    def threshold(wanted: str, served: int) -> int:
        compress: Any = hooks.open_compression(Settings(prefill_compression=wanted), 32768, served)
        return int(compress.args[0])

    assert [threshold("auto", served) for served in (32768, 30000, 20480)] == [24576, 22500, 15360]
    assert [threshold("30000", served) for served in (32768, 20480)] == [30000, 15360]
    with pytest.raises(SettingsError, match="40000 is not below the model's context of 32768 tokens"):
        threshold("40000", 20480)
