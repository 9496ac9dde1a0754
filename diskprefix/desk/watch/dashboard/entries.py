"""Lists the saved prompts with their trees, and deletes one of them.

Reading the trees holds Python's lock, which the engine needs too. So they are read on request only, and again only
after a pause of a hundred times the duration of the last reading.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from diskprefix.daemon.server.tenant_names import TenantNames
from diskprefix.daemon.server.threads import Threads
from diskprefix.desk.watch.browse.outline import Outline, outline
from diskprefix.prefixstore.cache.other_settings import options_text
from diskprefix.prefixstore.store.purge import Purged
from diskprefix.prefixstore.store.reads import Patience
from diskprefix.prefixstore.store.store import Store

_REST = 100
"""The pause after a reading, as a multiple of its duration."""
_DELETION_S = 30.0
"""The time for a deletion: the writer, the purge and the shared tier may take ten seconds each."""


class SavedPrompts:
    """Lists and deletes saved prompts, one call at a time. For the event loop."""

    def __init__(self, threads: Threads) -> None:
        self._run = partial(threads.run, "inspecting")
        self._lock = asyncio.Lock()
        self._outline: Outline | None = None
        self._read_at = self._again_at = 0.0

    async def entries(self, store: Store, names: TenantNames, *, with_texts: bool) -> dict[str, Any]:
        """Returns the `Outline.listing` of the store with a `tenant_name` for each tree, its age (`age_s`), and the
        time until the next reading (`again_s`). Raises `CacheError`."""
        async with self._lock:
            now = time.monotonic()
            if self._outline is None or now >= self._again_at:
                self._outline = await self._run(_read, store)
                self._read_at = now
                self._again_at = time.monotonic() + _REST * (time.monotonic() - now)
            ages = {"age_s": now - self._read_at, "again_s": max(0.0, self._again_at - time.monotonic())}
            listing = await self._run(partial(self._outline.listing, with_texts=with_texts))
            for tree in listing["trees"]:
                tree["tenant_name"] = names.name(tree["tenant"])
                tree["options"] = options_text(tree["made_with"])
            return ages | listing

    async def delete(self, store: Store, delete: Callable[[str], Purged], entry_id: str) -> Purged:
        """Deletes the saved prompt with this id. Raises `EntryNotFound`, and `CacheError` if the store cannot be
        written in time; then the deletion may still be carried out."""
        async with self._lock:
            patience = Patience(_DELETION_S)
            purged: Purged = await self._run(store.reads.ask, partial(delete, entry_id), patience)
            self._outline = None
        return purged


def _read(store: Store) -> Outline:
    def read() -> Outline:
        with store.reads.snapshot() as snapshot:
            return outline(snapshot)

    return store.reads.ask(read)
