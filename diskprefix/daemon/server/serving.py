"""The loaded model, as the routes see it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from diskprefix.daemon.catalogue.built_in_names import BuiltInNames, without_latest
from diskprefix.daemon.chat.renderer import PromptRenderer
from diskprefix.daemon.server.threads import Threads
from diskprefix.errors import ModelNotFound
from diskprefix.printable import shown
from diskprefix.runtime.fetch.proposals import names_meant, short_name
from diskprefix.runtime.files.gguf.gguf_file import model_stem
from diskprefix.units import format_size
from diskprefix.values import Scope, require_model_name

if TYPE_CHECKING:
    from diskprefix.daemon.engine.inbox import Inbox
    from diskprefix.daemon.engine.loop import Engine


_COUNTS_S, _PATIENCE_S = 2.0, 0.5
"""The age up to which counts are new, and the time to wait for newer counts, in seconds."""


class CacheCounts:
    """The counts of the cache, which a thread reads from the disk. While the disk is slow, old counts are shown."""

    def __init__(self, threads: Threads, read: Callable[[], dict[str, Any]]) -> None:
        """Reads the counts once. The other methods are for the event loop."""
        self._threads, self._read = threads, read
        self.last = read()
        self._read_at = time.monotonic()
        self._reading: asyncio.Task[dict[str, Any]] | None = None

    async def newest(self, max_age_s: float = _COUNTS_S) -> dict[str, Any]:
        """Returns counts that are at most `max_age_s` old, unless the disk is slow."""
        if self._reading is None and time.monotonic() >= self._read_at + max_age_s:
            self._reading = asyncio.create_task(self._threads.run("inspecting", self._read))
            self._reading.add_done_callback(self._done)
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=_PATIENCE_S)
        return self.last

    def _done(self, reading: asyncio.Task[dict[str, Any]]) -> None:
        self._reading, self._read_at = None, time.monotonic()
        if not reading.cancelled() and reading.exception() is None:
            self.last = reading.result()


class Serving(Struct, frozen=True, eq=False):
    """A loaded engine and what the routes need besides it."""

    engine: Engine
    inbox: Inbox
    renderer: PromptRenderer
    scope: Scope
    model_name: str
    fingerprint: str
    loaded_at: int
    startup_s: dict[str, float]
    counts: CacheCounts
    built_in_names: BuiltInNames
    takes_any_name: bool = False

    def require_model(self, name: str | None) -> None:
        """Raises `ModelNotFound` for another model's name. None means any model. Also accepted are the name of the
        model's file, other names of that file on this machine, and names that programs have built in, each also with
        the `:latest` that Ollama's clients append."""
        if name is None or without_latest(name) == without_latest(self.model_name):
            return
        require_model_name(name)
        is_file = without_latest(name) == model_stem(self.engine.origin)
        if self.takes_any_name or self.model_name in names_meant(name) or is_file:
            return
        if not self.built_in_names.has(name, self.model_name):
            raise ModelNotFound(f"model '{shown(name)}' is not served here; {self._instead_of(name)}", param="model")

    def _instead_of(self, name: str) -> str:
        """Returns what is served, and how another model would be."""
        known = short_name(name)
        if known is not None:
            size = format_size(known.download_bytes)
            return (
                f"{self.model_name!r} is; once this server has ended, `diskprefix serve --model {known.name}` serves "
                f"that one ({size} to fetch, if it is not on this machine)"
            )
        if self.built_in_names.refuses(name):
            return f"{self.model_name!r} is, and --strict-model-names refuses the names that programs have built in"
        return f"{self.model_name!r} is; `--served-model-name` of `diskprefix serve` gives it another name"
