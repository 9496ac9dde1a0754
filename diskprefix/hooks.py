"""The places where extras join the core: commands, routes, tiers, recorders and others, see `extras/README.md`.

An extra is a module with some of the names that the functions below look for. The package's own extras are listed here
and imported on first use. Another distribution adds one as an entry point of the group `diskprefix.extras`:
`extras/README.md` has an example.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from diskprefix.errors import SettingsError
from diskprefix.printable import first_line

if TYPE_CHECKING:
    import click

    from diskprefix.cache.tiers.tier import Bucket, SharedTier
    from diskprefix.chat.draft import Compress
    from diskprefix.model.load.picture_processor import PictureProcessor
    from diskprefix.nouns import CacheOptions, CacheReport, Prompt
    from diskprefix.server.process.front_line import FrontLine
    from diskprefix.settings import Settings
    from diskprefix.tokens import TokenIds

log = logging.getLogger("diskprefix")

_NAMES = (
    "catalogue",
    "clients",
    "talk",
    "setup",
    "warm",
    "watch",
    "simulate",
    "housekeeping",
    "exchange",
    "remote",
    "front",
    "compression",
    "pictures",
    "infill",
    "embedding",
    "ollama",
)
"""The order is that of the commands in `diskprefix --help`."""
_OWN = tuple(f"diskprefix.extras.{name}" for name in _NAMES)
_GROUP = "diskprefix.extras"


class Recorder(Protocol):
    """Records requests. Its errors fail no request. `know` and `forget` may be called in any thread."""

    def describe(
        self,
        *,
        bytes_per_token: int,
        state_bytes: int,
        logits_bytes: int,
        exact_at: Literal["token", "grid"],
    ) -> None:
        """Receives the sizes of the model's state, as in `kv.layout.Layout`."""

    def know(self, root: bytes, prompts: Iterable[TokenIds]) -> None:
        """Receives the prompts of a root from before this process, oldest first."""

    def forget(self) -> None:
        """Drops what it knows of prompts, because some were deleted."""

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
        """Records a finished request. `when`: its arrival, in seconds since 1970. `reply`: the
        tokens that the model computed after the prompt. `remembered`: the prompt was computed to its end and has no
        pictures."""

    def close(self) -> None:
        """Writes what is pending and ends."""


class RunFront(Protocol):
    """Serves with a process for each model, behind this one. Returns when that has stopped. Raises `SettingsError`, and
    `SystemExit` with the exit code of the only model's process."""

    def __call__(
        self, settings: Settings, prepare: Callable[[Settings, bool], None], work: Callable[[Settings, FrontLine], None]
    ) -> None:
        """Calls `work` in processes that serve the model of its settings. `prepare` imports what they need, and with
        True reads small parts of the model of its settings."""


@cache
def extras() -> tuple[ModuleType, ...]:
    """Returns the modules of all extras, the package's own first."""
    own = tuple(importlib.import_module(name) for name in _OWN)
    return own + tuple(_loaded())


def _loaded() -> Iterator[ModuleType]:
    """Yields the extras of other distributions. One that cannot be loaded must not keep the daemon from serving."""
    for entry in entry_points(group=_GROUP):
        try:
            yield entry.load()
        except Exception as error:  # noqa: BLE001 (whatever another distribution does)
            log.warning("the extra %s is left out: %s", entry.name, first_line(error))


def commands() -> dict[str, str]:
    """Returns `COMMANDS` of all extras: `module:function` by the name of the command."""
    places: dict[str, str] = {}
    for found in _all("COMMANDS"):
        # The first has the name: no other package replaces a command of this one.
        places |= {name: place for name, place in found.items() if name not in places}
    return places


def command(place: str) -> click.Command:
    """Imports the command at `module:function`."""
    module, _, name = place.partition(":")
    found: click.Command = getattr(importlib.import_module(module), name)
    return found


def add_routes(app: Any) -> None:
    """Adds the routes of each extra to the Starlette application. `app.state.daemon` is the daemon."""
    for add in _all("add_routes"):
        add(app)


def open_tier(settings: Settings) -> SharedTier | None:
    """Returns the shared tier, None if no extra has one for these settings. Raises `SettingsError`."""
    tier: SharedTier | None = _only(one for open_ in _all("open_tier") if (one := open_(settings)) is not None)
    return tier


def open_bucket(url: str, key_file: Path) -> Bucket:
    """Returns the opened bucket of a shared tier, to remove objects from it. Raises `SettingsError`."""
    found: Bucket | None = _only(one for open_ in _all("open_bucket") if (one := open_(url, key_file)) is not None)
    if found is None:
        raise SettingsError(f"no extra is installed that knows the bucket {url}")
    return found


def open_recorder(settings: Settings, secret_of: Callable[[], int]) -> Recorder | None:
    """Returns the recorder, None if no extra has one for these settings. `secret_of` returns the store's secret.

    Raises `SettingsError`.
    """
    found = (open_(settings, secret_of) for open_ in _all("open_recorder"))
    recorder: Recorder | None = _only(one for one in found if one is not None)
    return recorder


def open_compression(settings: Settings, max_positions: int, served: int) -> Compress | None:
    """Returns what shortens the conversations of a model, None if no extra does for these settings.

    Of the model's `max_positions`, KV memory has room for `served`. Raises `SettingsError`.
    """
    found = (open_(settings, max_positions, served) for open_ in _all("open_compression"))
    compress: Compress | None = _only(one for one in found if one is not None)
    return compress


def open_pictures(
    folder: Path, config: Any, problem: str | None, make_processor: Callable[[], Any] | None = None
) -> PictureProcessor:
    """Returns what prepares images for the multimodal model in a folder: that of another distribution, or
    else the package's own, which takes any model.

    `config` is its configuration of transformers. With a `problem`, the model takes text only. `make_processor` returns
    transformers' processor of a `.gguf` model, beside which there are no files of one. Raises `SettingsError`.
    """
    own, *others = _all("open_pictures")
    found = (open_(folder, config, problem, make_processor) for open_ in others)
    processor: PictureProcessor | None = _only(one for one in found if one is not None)
    return own(folder, config, problem, make_processor) if processor is None else processor


def open_front(settings: Settings) -> RunFront | None:
    """Returns what serves in processes of its own, None if no extra does for these settings. Raises `SettingsError`."""
    found = (open_(settings) for open_ in _all("open_front"))
    run_front: RunFront | None = _only(one for one in found if one is not None)
    return run_front


def _all(name: str) -> Iterator[Any]:
    return (getattr(extra, name) for extra in extras() if hasattr(extra, name))


def _only(found: Iterator[Any]) -> Any:
    """Returns the only item, None without any. Raises `SettingsError` for several."""
    one, *others = [*found] or [None]
    if others:
        raise SettingsError("two extras answer for the same setting; uninstall one of them")
    return one
