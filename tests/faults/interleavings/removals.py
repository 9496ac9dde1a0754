"""The protections of the engine's interleavings, each of which can be taken away once: then a history must be wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from diskprefix.cache import namespaces
from diskprefix.cache.cache import Owner, PrefixCache
from diskprefix.engine.inbox import Inbox
from diskprefix.engine.loop import Loop
from diskprefix.engine.running_request import RunningRequest
from diskprefix.kv.arena import KVArena
from diskprefix.kv.capturer import Capturer
from diskprefix.store.evictor import Evictor
from diskprefix.store.writer import Writer
from diskprefix.tokens import root_hash

_owner: Any = PrefixCache.owner


def _ended_unheard(self: Loop, running: RunningRequest, error: Exception | None) -> None:
    if error is not None:
        running.error = error
    self._fetched.append(running)


def _reserved(self: Writer, size: int, *, leaving: int = 0) -> bool:  # noqa: ARG001 (as the real one)
    self.pending_bytes += size
    return True


REMOVALS: dict[str, tuple[tuple[object, str, Any], ...]] = {
    "the tenant in the names of blocks": ((namespaces, "root_hash", lambda identity: root_hash(identity[:5])),),
    "the tenant of memory": ((PrefixCache, "owner", lambda self, _tenant: Owner(b"", self.namespaces.purged_at)),),
    "the purge of memory": (
        (PrefixCache, "owner", lambda self, tenant: _owner(self, tenant)._replace(purged_at=None)),
        (PrefixCache, "is_gone", lambda _self, _owner: False),
    ),
    "the wait for copies before memory is overwritten": ((KVArena, "settle", lambda _self, **_drop: None),),
    "the time to live of memory": ((PrefixCache, "lasts_s", lambda _self, _ttl_s: math.inf),),
    "the search for what has expired": ((Evictor, "expire", lambda _self, _ttl_s: 0),),
    "the bound of the queue": ((Inbox, "_check_room", lambda _self, _num_ahead, _limit: None),),
    "the room that is given back": ((Writer, "release", lambda _self, _size: None),),
    "the wake behind a fetch": ((Loop, "_end_fetch", _ended_unheard),),
    "the bound of the write buffer": ((Writer, "reserve", _reserved),),
    "the wake where there is room": ((Capturer, "wake", lambda _self: None),),
    "the end of a pin": ((Evictor, "unpin", lambda _self, _name: None),),
    "the wait for a fetch of a request that is cancelled": (
        (RunningRequest, "is_fetching", property(lambda _self: False, lambda _self, _value: None)),
    ),
}


@contextmanager
def without(name: str) -> Iterator[None]:
    """Takes a protection away."""
    patches = [patch.object(holder, attribute, value) for holder, attribute, value in REMOVALS[name]]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()
