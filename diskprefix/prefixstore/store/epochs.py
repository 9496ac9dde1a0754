"""Epochs: the time between two purges of a tenant. State of an epoch that is over is neither used nor stored.

DISK.md draws what a purge does.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import NamedTuple

import msgspec
from msgspec import Struct, field

from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.store.schema import PURGES, NamesRecord, verified, with_checksum
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.tenant_ids import fitting, patterns
from diskprefix.tokens import checksum

EVERYONE = frozenset({""})
"""What a purge of all tenants is of; see `Purges.ids`."""
_ID_BYTES = 8
_MOST = 256
"""About as many purges of some tenants are remembered. The next one counts as a purge of everyone."""


def of_tenants(tenants: Iterable[str]) -> frozenset[str]:
    """Returns what a purge of these tenants, given by their texts, is of."""
    return frozenset(map(_whole, tenants))


def of_salt(wanted: str) -> frozenset[str]:
    """Returns what a purge of the tenants that `tenant_ids.matches` names is of. The store need not know them."""
    return frozenset(f"{_lengths(pattern)} {_digest(pattern)}" for pattern in patterns(wanted))


class Purges(Struct, frozen=True):
    """The last purge of each tenant. `ids` has the random id of a purge for each thing that was purged: everyone
    (empty); a tenant (`=` and a digest of its text); the tenants that a pattern of `tenant_ids` fits (the lengths of
    its parts, and its digest). Digests do not name who was purged.

    An id is random, and not a time or a count, because all that matters is whether two are equal: neither a clock nor
    a damaged record nor an older copy of the file brings one back.
    """

    ids: dict[str, bytes] = field(default_factory=dict)

    def last(self, tenant: str) -> bytes:
        """Returns the id of a tenant's last purge. A purge of the tenant changes it for good; no other purge does."""
        if not self.ids:
            return b""
        own = {"", _whole(tenant)}
        for lengths in {what.partition(" ")[0] for what in self.ids if " " in what}:
            own |= {f"{lengths} {_digest(part)}" for part in fitting(tenant, [*map(int, lengths.split("/"))])}
        return b"".join(id_ for what, id_ in self.ids.items() if what in own)

    def was_purged(self, tenant: str, last_purge: bytes) -> bool:
        """Returns whether the tenant was purged after the time when `last_purge` was its last purge. All code that
        uses or stores state asks this, and nothing else, about purges.

        The invariant: a request, a copy in memory and a queued write keep the id of their tenant's last purge, as it
        was when they began. Their state is shared, restored from memory, or stored only while this returns False. For
        memory, a process asks the purges that it has read, a second ago at most. For the disk, it asks those in the
        file, inside the write transaction: no purge can end between the answer and the commit.
        """
        return last_purge != self.last(tenant)

    def and_of(self, purged: Collection[str]) -> Purges:
        """Returns the purges after one more, of `purged` (see `ids`)."""
        assert purged, "a purge is of somebody"
        if "" in purged or len(self.ids) >= _MOST:
            return Purges(dict.fromkeys(EVERYONE, secrets.token_bytes(_ID_BYTES)))
        return Purges(self.ids | dict.fromkeys(sorted(purged), secrets.token_bytes(_ID_BYTES)))

    def encoded(self) -> bytes:
        return with_checksum(PURGES.encode(), msgspec.msgpack.encode(self.ids))


class Epoch(NamedTuple):
    """The time between two purges of a tenant in one store. A request keeps the epoch in which it began. `secret` seeds
    the store's names, and `last_purge` is the id of the tenant's last purge."""

    store_id: bytes = b""
    secret: int = 0
    tenant: str = ""
    last_purge: bytes = b""


class Epochs(NamedTuple):
    """The epochs of all tenants at one time."""

    store_id: bytes = b""
    secret: int = 0
    purges: Purges = Purges()

    def of(self, tenant: str) -> Epoch:
        """Returns the epoch of a tenant, given by its text."""
        return Epoch(self.store_id, self.secret, tenant, self.purges.last(tenant))

    def is_over(self, epoch: Epoch) -> bool:
        """Returns whether nothing of an epoch may be stored: its tenant was purged since, or this is another store."""
        return epoch.store_id != self.store_id or self.purges.was_purged(epoch.tenant, epoch.last_purge)


def purges_of(snapshot: Snapshot) -> Purges:
    """Returns the purges of a store. A damaged record is like one more purge of everyone."""
    value = snapshot.meta(PURGES)
    if value is None:
        return Purges()
    try:
        return Purges(msgspec.msgpack.decode(verified(PURGES.encode(), value), type=dict[str, bytes]))
    except (StoreCorrupt, msgspec.DecodeError):
        return Purges(dict.fromkeys(EVERYONE, checksum(value).to_bytes(_ID_BYTES, "little")))


def epochs_of(snapshot: Snapshot, names: NamesRecord) -> Epochs:
    """Returns the epochs of an open store with these names."""
    return Epochs(names.store_id, names.secret, purges_of(snapshot))


def _whole(tenant: str) -> str:
    return f"={_digest(tenant)}"


def _lengths(pattern: str) -> str:
    return "/".join(str(len(part)) for part in pattern.split("/"))


@lru_cache(1024)
def _digest(text: str) -> str:
    return hashlib.sha256(f"purged {text}".encode()).hexdigest()[:32]
