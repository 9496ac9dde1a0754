"""The loaded model, as the routes see it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diskprefix.chat.renderer import PromptRenderer
from diskprefix.errors import ModelNotFound
from diskprefix.nouns import Scope, require_model_name
from diskprefix.printable import shown

if TYPE_CHECKING:
    from diskprefix.engine.inbox import Inbox
    from diskprefix.engine.loop import Engine


@dataclass(frozen=True, eq=False)
class Serving:
    """A loaded engine and what the routes need besides it."""

    engine: Engine
    inbox: Inbox
    renderer: PromptRenderer
    scope: Scope
    model_name: str
    fingerprint: str
    loaded_at: int
    startup_s: dict[str, float]
    takes_any_name: bool = False
    _reading_stats: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def cache_stats(self) -> dict[str, Any]:
        """Returns the cache's counts, read in a thread because they come from the disk; one read at a time."""
        async with self._reading_stats:
            return await asyncio.to_thread(self.engine.cache.stats)

    def require_model(self, name: str | None) -> None:
        """Raises `ModelNotFound` for a name other than the served model's. None stands for the served model."""
        if name is None or name == self.model_name:
            return
        require_model_name(name)
        if not self.takes_any_name:
            raise ModelNotFound(f"model '{shown(name)}' is not served here; {self.model_name!r} is", param="model")
