"""The places where extras join the core: commands, routes, a shared tier, a bucket to purge, a recorder.

An extra is a module that has some of the names that the functions below look for. Those of this package are listed
here and imported when they are asked for; another distribution adds its own as an entry point of the group
`diskprefix.extras`.
`extras/README.md` has an example.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from diskprefix.errors import SettingsError

if TYPE_CHECKING:
    from diskprefix.cache.tiers.tier import Bucket, SharedTier
    from diskprefix.nouns import CacheOptions, CacheReport, Prompt
    from diskprefix.settings import Settings
    from diskprefix.tokens import TokenIds

_OWN = ("diskprefix.extras.watch", "diskprefix.extras.simulate", "diskprefix.extras.remote")
_GROUP = "diskprefix.extras"


class Recorder(Protocol):
    """Whatever goes wrong in it fails no request. `know` and `forget` are for any thread, the others for one."""

    def describe(
        self, *, bytes_per_token: int, state_bytes: int, logits_bytes: int, exact_at: Literal["token", "grid"]
    ) -> None:
        """Tells what the model's state is like, as `kv.layout.Layout` has it."""

    def know(self, root: bytes, prompts: Iterable[TokenIds]) -> None:
        """Tells the prompts of a root that are from before this process, oldest first."""

    def forget(self) -> None:
        """Tells that prompts were deleted."""

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
        """Tells a request that has ended. `when` it arrived, in seconds since 1970. `reply`: the tokens that were run
        through the model behind the prompt. `remembered`: the prompt was computed to its end and holds no media."""

    def close(self) -> None:
        """Ends."""


@cache
def extras() -> tuple[ModuleType, ...]:
    """Returns the modules of all extras, the package's own first."""
    own = tuple(importlib.import_module(name) for name in _OWN)
    return own + tuple(entry.load() for entry in entry_points(group=_GROUP))


def commands() -> dict[str, str]:
    """Returns `COMMANDS` of all extras: `module:function` by the name of the command."""
    return {name: place for found in _all("COMMANDS") for name, place in found.items()}


def command(place: str) -> Any:
    """Imports a command of `commands`."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def add_routes(app: Any) -> None:
    """Has each extra add its routes to the FastAPI application. `app.state.daemon` is the daemon."""
    for add in _all("add_routes"):
        add(app)


def open_tier(settings: Settings) -> SharedTier | None:
    """Returns the tier that machines share, None if no extra has one for these settings. Raises `SettingsError`."""
    tier: SharedTier | None = _only(one for open_ in _all("open_tier") if (one := open_(settings)) is not None)
    return tier


def open_bucket(url: str, key_file: Path) -> Bucket:
    """Opens what a shared tier has written, to remove something from it. Raises `SettingsError`."""
    found: Bucket | None = _only(open_(url, key_file) for open_ in _all("open_bucket"))
    if found is None:
        raise SettingsError(f"no extra is installed that knows the bucket {url}")
    return found


def open_recorder(settings: Settings, secret_of: Callable[[], int]) -> Recorder | None:
    """Returns what records requests, None if no extra does for these settings. `secret_of` answers the store's secret.
    Raises `SettingsError`."""
    found = (open_(settings, secret_of) for open_ in _all("open_recorder"))
    recorder: Recorder | None = _only(one for one in found if one is not None)
    return recorder


def _all(name: str) -> Iterator[Any]:
    return (getattr(extra, name) for extra in extras() if hasattr(extra, name))


def _only(found: Iterator[Any]) -> Any:
    """Returns the only one, None without any. Raises `SettingsError` for several."""
    one, *others = [*found] or [None]
    if others:
        raise SettingsError("two extras answer for the same setting; uninstall one of them")
    return one
