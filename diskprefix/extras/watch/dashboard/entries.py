"""The saved prompts and their tree, for those who look, and deleting one of them.

Reading the tree takes a thread, and Python's lock, which the engine needs too. So it is read only when it is asked for,
and not again before a hundred times as long has passed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from diskprefix.extras.watch.browse.flat import listing
from diskprefix.extras.watch.browse.outline import Outline, outline
from diskprefix.store.maintenance.purge import Purged
from diskprefix.store.store import Store

_REST = 100
"""Reading takes at most one part in so many of the time."""


class SavedPrompts:
    """Reads and deletes, one at a time. For the event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._outline: Outline | None = None
        self._read_at = self._again_at = 0.0

    async def entries(self, store: Store, *, with_texts: bool) -> dict[str, Any]:
        """Returns the `listing` of the store, without their texts if those are private; `age_s`, which is 0 where it
        was read for this answer, and `again_s`, after which it is read anew. Raises `CacheError`.
        """
        async with self._lock:
            asked_at = time.monotonic()
            if self._outline is None or asked_at >= self._again_at:
                self._outline = await asyncio.to_thread(_read, store)
                self._read_at = asked_at
                self._again_at = time.monotonic() + _REST * (time.monotonic() - asked_at)
            ages = {"age_s": asked_at - self._read_at, "again_s": max(0.0, self._again_at - time.monotonic())}
            return ages | await asyncio.to_thread(listing, self._outline, with_texts=with_texts)

    async def delete(self, delete: Callable[[str], Purged], entry_id: str) -> Purged:
        """Have the saved prompt with this id deleted. Raises `EntryNotFound`, and `CacheError` if the store cannot be
        written."""
        async with self._lock:
            purged = await asyncio.to_thread(delete, entry_id)
            self._outline = None
        return purged


def _read(store: Store) -> Outline:
    with store.snapshot() as snapshot:
        return outline(snapshot)
