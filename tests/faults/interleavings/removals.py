"""The protections of the engine's interleavings, each of which can be taken away once: then a history must be wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
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


class Removal(NamedTuple):
    """What is replaced, and what a history must say that finds it: other failures prove nothing."""

    shows: str
    patches: tuple[tuple[object, str, Any], ...]


_WRONG_REPLY, _FOUND, _LEFT = " got [", "could be there for", "left behind: "

REMOVALS: dict[str, Removal] = {
    "the tenant in the names of blocks": Removal(
        _WRONG_REPLY, ((namespaces, "root_hash", lambda identity: root_hash(identity[:5])),)
    ),
    "the tenant of memory": Removal(
        _WRONG_REPLY, ((PrefixCache, "owner", lambda self, _tenant: Owner(b"", self.namespaces.purged_at)),)
    ),
    "the purge of memory": Removal(
        _FOUND,
        (
            (PrefixCache, "owner", lambda self, tenant: _owner(self, tenant)._replace(purged_at=None)),
            (PrefixCache, "is_gone", lambda _self, _owner: False),
        ),
    ),
    "the wait for copies before memory is overwritten": Removal(
        _WRONG_REPLY, ((KVArena, "settle", lambda _self, **_drop: None),)
    ),
    "the time to live of memory": Removal(_FOUND, ((PrefixCache, "lasts_s", lambda _self, _ttl_s: math.inf),)),
    "the search for what has expired": Removal(_FOUND, ((Evictor, "expire", lambda _self, _ttl_s: 0),)),
    "the bound of the queue": Removal(
        "requests wait", ((Inbox, "_check_room", lambda _self, _num_ahead, _limit: None),)
    ),
    "the room that is given back": Removal(
        _LEFT + "{'pending bytes'", ((Writer, "release", lambda _self, _size: None),)
    ),
    "the wake behind a fetch": Removal("never ends", ((Loop, "_end_fetch", _ended_unheard),)),
    "the bound of the write buffer": Removal("bytes wait to be written", ((Writer, "reserve", _reserved),)),
    "the wake where there is room": Removal(_LEFT + "{'captures'", ((Capturer, "wake", lambda _self: None),)),
    "the end of a pin": Removal(_LEFT + "{'pins'", ((Evictor, "unpin", lambda _self, _name: None),)),
    "the wait for a fetch of a request that is cancelled": Removal(
        "the engine ended: ",
        ((RunningRequest, "is_fetching", property(lambda _self: False, lambda _self, _value: None)),),
    ),
}


@contextmanager
def without(name: str) -> Iterator[None]:
    """Takes a protection away."""
    patches = [patch.object(holder, attribute, value) for holder, attribute, value in REMOVALS[name].patches]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()
