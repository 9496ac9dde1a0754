"""The places where extras join the core: commands, routes, tiers, recorders and others.

An extra is a module with some of the names that the functions below look up; `extras/README.md` lists them. The
package's own extras are listed here and imported on first use. Other distributions add theirs as entry points.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from diskprefix.errors import SettingsError
from diskprefix.printable import first_line

if TYPE_CHECKING:
    import click

    from diskprefix.cache.tiers.tier import Bucket, SharedTier
    from diskprefix.chat.draft import Compress
    from diskprefix.model.load.picture_processor import PictureProcessor, PicturesModel
    from diskprefix.settings import Settings
    from diskprefix.tokens import TokenIds
    from diskprefix.values import CacheOptions, CacheReport, Prompt

log = logging.getLogger("diskprefix")

_OWN = (
    *("catalogue", "clients", "talk", "setup", "warm", "watch", "simulate", "housekeeping", "exchange", "remote"),
    *("front", "compression", "pictures", "infill", "embedding", "ollama"),
)
"""In the order of their commands in `diskprefix --help`."""
_GROUP = "diskprefix.extras"


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
        output_tokens: int,
        reply: TokenIds,
        prefill_ms: float,
        remembered: bool,
    ) -> None:
        """Records a finished request, which arrived at `when` (seconds since 1970). `reply` has the tokens that were
        computed after the prompt. `remembered`: the prompt was computed to its end and has no pictures."""

    def close(self) -> None:
        """Writes pending records and ends."""


@cache
def extras() -> tuple[ModuleType, ...]:
    """Returns the modules of all extras, the package's own first."""
    return (*(importlib.import_module(f"diskprefix.extras.{name}") for name in _OWN), *_others())


def _others() -> Iterator[ModuleType]:
    """Yields the extras of other distributions. An extra that cannot be loaded must not stop the daemon."""
    for entry in entry_points(group=_GROUP):
        try:
            yield entry.load()
        except Exception as error:  # noqa: BLE001 (whatever another distribution does)
            log.warning("the extra %s is left out: %s", entry.name, first_line(error))


def commands() -> dict[str, str]:
    """Returns `COMMANDS` of all extras: `module:function` by the name of the command."""
    places: dict[str, str] = {}
    for commands_of in _all("COMMANDS"):
        # The first extra with a name wins: no other package replaces a command of this package.
        places |= {name: place for name, place in commands_of.items() if name not in places}
    return places


def command(place: str) -> click.Command:
    """Imports the command at `module:function`."""
    module, _, name = place.partition(":")
    command: click.Command = getattr(importlib.import_module(module), name)
    return command


def add_routes(app: Any) -> None:
    """Adds the routes of each extra to the Starlette application. `app.state.daemon` is the daemon."""
    for add in _all("add_routes"):
        add(app)


def open_tier(settings: Settings) -> SharedTier | None:
    """Returns the shared tier, None if no extra has one for these settings. Raises `SettingsError`."""
    return cast("SharedTier | None", _only("open_tier", settings))


def open_bucket(url: str, key_file: Path) -> Bucket:
    """Returns the opened bucket of a shared tier, to remove objects from it. Raises `SettingsError`."""
    bucket: Bucket | None = _only("open_bucket", url, key_file)
    if bucket is None:
        raise SettingsError(f"no extra is installed that knows the bucket {url}")
    return bucket


def open_recorder(settings: Settings, secret_of: Callable[[], int]) -> Recorder | None:
    """Returns the recorder, None without one. `secret_of` returns the store's secret. Raises `SettingsError`."""
    return cast("Recorder | None", _only("open_recorder", settings, secret_of))


def open_compression(settings: Settings, max_positions: int, served: int) -> Compress | None:
    """Returns the function that shortens conversations, None if no extra has one for these settings.

    Of the model's `max_positions`, KV memory has room for `served`. Raises `SettingsError`.
    """
    return cast("Compress | None", _only("open_compression", settings, max_positions, served))


def open_pictures(model: PicturesModel) -> PictureProcessor:
    """Returns the processor of images for a multimodal model: that of another distribution, or else the package's own,
    which takes any model. Raises `SettingsError`."""
    own, *others = _all("open_pictures")
    processor: PictureProcessor | None = _first(open_(model) for open_ in others)
    return own(model) if processor is None else processor


def open_front(settings: Settings) -> Callable[[Settings], None] | None:
    """Returns the function that serves each model in its own process until the daemon stops, None without one. It
    raises `SettingsError`, as this function does, and `SystemExit` with the exit code of the only model's process."""
    return cast("Callable[[Settings], None] | None", _only("open_front", settings))


def _all(name: str) -> Iterator[Any]:
    return (getattr(extra, name) for extra in extras() if hasattr(extra, name))


def _only(name: str, *args: Any) -> Any:
    """Returns the result of the only extra whose function `name` returns one, None without any."""
    return _first(open_(*args) for open_ in _all(name))


def _first(results: Iterator[Any]) -> Any:
    """Returns the only result that is not None, None without any. Raises `SettingsError` for several."""
    only, *others = [result for result in results if result is not None] or [None]
    if others:
        raise SettingsError("two extras answer for the same setting; uninstall one of them")
    return only
