"""The protections of the engine's interleavings, each of which can be taken away once: then a history must be wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from diskprefix.cache import namespaces
from diskprefix.cache.cache import Owner, PrefixCache
from diskprefix.cache.resources import CacheResources
from diskprefix.engine.loop import Loop
from diskprefix.engine.running_request import RunningRequest
from diskprefix.kv.arena import KVArena
from diskprefix.kv.capturer import Capturer
from diskprefix.store.evictor import Evictor
from diskprefix.store.writer import Writer
from diskprefix.store.written import WriteMeter, WrittenBytes
from diskprefix.tokens import root_hash

_owner: Any = PrefixCache.owner
_added_to = WriteMeter.added_to


def _ended_unheard(self: Loop, running: RunningRequest, error: Exception | None) -> None:
    if error is not None:
        running.error = error
    self._fetched.append(running)


def _reserved(self: Writer, size: int, *, leaving: int = 0) -> bool:  # noqa: ARG001 (as the real one)
    self.pending_bytes += size
    return True


def _added_twice(self: WriteMeter, written: WrittenBytes, now: float, recorded_bytes: int) -> WrittenBytes:
    written.recorder = ""
    return _added_to(self, written, now, recorded_bytes)


class Mutant(NamedTuple):
    """What is replaced, and what a history must say that finds it: other failures prove nothing."""

    shows: str
    patches: tuple[tuple[object, str, Any], ...]


_WRONG_REPLY, _FOUND, _LEFT = " got [", "could be there for", "left behind: "

MUTANTS: dict[str, Mutant] = {
    "the tenant in the names of blocks": Mutant(
        _WRONG_REPLY, ((namespaces, "root_hash", lambda identity: root_hash(identity[:5])),)
    ),
    "the tenant of memory": Mutant(
        _WRONG_REPLY, ((PrefixCache, "owner", lambda self, _tenant: Owner(b"", self.namespaces.purged_at)),)
    ),
    "the purge of memory": Mutant(
        _FOUND,
        (
            (PrefixCache, "owner", lambda self, tenant: _owner(self, tenant)._replace(purged_at=None)),
            (PrefixCache, "is_gone", lambda _self, _owner: False),
        ),
    ),
    "the wait for copies before memory is overwritten": Mutant(
        _WRONG_REPLY, ((KVArena, "settle", lambda _self, **_drop: None),)
    ),
    "the time to live of memory": Mutant(_FOUND, ((PrefixCache, "lasts_s", lambda _self, _ttl_s: math.inf),)),
    "the search for what has expired": Mutant(_FOUND, ((Evictor, "expire", lambda _self, _ttl_s: 0),)),
    "the room that is given back": Mutant(
        _LEFT + "{'pending bytes'", ((Writer, "release", lambda _self, _size: None),)
    ),
    "the wake behind a fetch": Mutant("never ends", ((Loop, "_end_fetch", _ended_unheard),)),
    "the bound of the write buffer": Mutant("bytes wait to be written", ((Writer, "reserve", _reserved),)),
    "the wake where there is room": Mutant(_LEFT + "{'captures'", ((Capturer, "wake", lambda _self: None),)),
    "the end of a pin": Mutant(_LEFT + "{'pins'", ((Evictor, "unpin", lambda _self, _name: None),)),
    "the write budget": Mutant("with no budget", ((CacheResources, "spending", lambda _self: None),)),
    "the name of who recorded written bytes": Mutant(
        "are recorded as written", ((WriteMeter, "added_to", _added_twice),)
    ),
    "the wait for a fetch of a request that is cancelled": Mutant(
        "the engine ended: ",
        ((RunningRequest, "is_fetching", property(lambda _self: False, lambda _self, _value: None)),),
    ),
}


@contextmanager
def without_protection(name: str) -> Iterator[None]:
    """Takes a protection away."""
    patches = [patch.object(holder, attribute, value) for holder, attribute, value in MUTANTS[name].patches]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()
