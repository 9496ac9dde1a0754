"""The places where extras join the core, except for commands. The core imports no extra: they are imported by their
names, at their first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

if TYPE_CHECKING:
    from diskprefix.daemon.chat.draft import Compress
    from diskprefix.daemon.settings import Settings
    from diskprefix.prefixstore.cache.tiers.tier import Bucket, SharedTier
    from diskprefix.runtime.pictures.picture_processor import PictureProcessor, PicturesModel
    from diskprefix.tokens import TokenIds
    from diskprefix.values import CacheOptions, CacheReport, Prompt


class Recorder(Protocol):
    """Records requests, which its errors never fail. `know` and `forget` may be called in any thread."""

    def describe(
        self, *, bytes_per_token: int, state_bytes: int, logits_bytes: int, exact_at: Literal["token", "grid"]
    ) -> None:
        """Receives the sizes of the model's state: see `kv.layout.Layout`."""

    def know(self, root: bytes, prompts: Iterable[TokenIds]) -> None:
        """Receives the prompts of a root from before this process, oldest first."""

    def forget(self) -> None:
        """Drops all known prompts, because some were deleted."""

    def record_request(
        self,
        prompt: Prompt,
        options: CacheOptions,
        report: CacheReport,
        *,
        root: bytes,
        when: float,
        reply: TokenIds,
        prefill_ms: float,
        remembered: bool,
        is_ahead: bool = False,
    ) -> None:
        """Records a finished request, which arrived at `when` (seconds since 1970). `reply` has the tokens that were
        computed after the prompt. `remembered`: the prompt was computed to its end and has no pictures. `is_ahead`:
        nobody sent the prompt, which is computed while nobody waits."""

    def close(self) -> None:
        """Writes pending records and ends."""


def modules_of_routes() -> list[Any]:
    """Returns the modules of extras that have `routes`."""
    names = (
        "desk.watch.dashboard.dashboard_routes",
        "daemon.infill.infill",
        "daemon.embedding.embeddings",
        "daemon.ollama.ollama_routes",
    )
    return [*map(_extra, names)]


def add_routes(app: Any) -> None:
    """Adds the routes of extras to the Starlette application. `app.state.daemon` is the daemon."""
    for module in modules_of_routes():
        module.add_routes(app)


def open_tier(settings: Settings) -> SharedTier | None:
    """Returns the shared tier, None if the settings ask for none. Raises `SettingsError`."""
    if settings.remote_tier is None or settings.namespace_key_file is None:
        return None
    return cast("SharedTier", _extra("prefixstore.remote.remote_tier").open_tier(settings))


def open_bucket(url: str, key_file: Path) -> Bucket:
    """Returns the opened bucket of a shared tier, to remove objects from it. Raises `SettingsError`."""
    return cast("Bucket", _extra("prefixstore.remote.upkeep").open_bucket(url, key_file))


def open_recorder(settings: Settings, secret_of: Callable[[], int]) -> Recorder | None:
    """Returns the recorder, None without one. `secret_of` returns the store's secret. Raises `SettingsError`."""
    if settings.record is None:
        return None
    return cast(
        "Recorder", _extra("prefixstore.recording.recording").RequestRecorder(settings.record, settings, secret_of)
    )


def open_compression(settings: Settings, max_positions: int, served: int) -> Compress | None:
    """Returns the function that shortens conversations, None if the settings ask for none.

    Of the model's `max_positions`, KV memory has room for `served`. Raises `SettingsError`.
    """
    if settings.prefill_compression == "off":
        return None
    return cast("Compress", _extra("daemon.compression.compression").compress_of(settings, max_positions, served))


def open_pictures(model: PicturesModel) -> PictureProcessor:
    """Returns the processor of images for a multimodal model. Raises `SettingsError`."""
    return cast("PictureProcessor", _extra("runtime.pictures").open_pictures(model))


def open_router(settings: Settings) -> Callable[[Settings], None] | None:
    """Returns the function that serves each model in its own process until the daemon stops, None without one. It
    raises `SettingsError`, as this function does, and `SystemExit` with the exit code of the only model's process."""
    return cast("Callable[[Settings], None] | None", _extra("daemon.router").open_router(settings))


def known_names(settings: Settings) -> Iterator[tuple[str, Path | None]]:
    """Yields the names of the models that are known besides a single served one, each with its folder or file."""
    return cast("Iterator[tuple[str, Path | None]]", _extra("daemon.catalogue.catalogue").known_names(settings))


def _extra(name: str) -> Any:
    return importlib.import_module(f"diskprefix.{name}")
