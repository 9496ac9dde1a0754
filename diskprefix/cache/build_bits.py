"""The bits of this build, which decide whether it may use the stored state of a model.

A build shares the root of an earlier one if tiny models give the same bits with both (`model.bits`). Each node says
which build has computed it. So whatever other processes store under the root, a build uses only the state of builds
that are known to have its bits, and, until some of it was computed again, what an earlier build had left at the start.
If a build computes other bits of the model itself, it gets a root of its own: the digest of the build becomes a part of
the identity. The `ModelRecord` of that identity is the mark, by which the next start knows. The earlier build goes on
under its own root.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from typing import Literal, TypeAlias

from diskprefix.errors import StoreCorrupt
from diskprefix.identity import identity_of_build
from diskprefix.store.schema import BUILD_BYTES, NO_BUILD, ModelRecord, RootRecord, decode_record, model_key
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.store import Store
from diskprefix.tokens import root_hash
from diskprefix.values import SHARED

BitsState: TypeAlias = Literal["unknown", "unchecked", "beside", "other", "settled"]
"""`unknown`: the store could not be read. `unchecked`: at the start, the store has state of another build, of which
none was computed again; it is restored, and nothing is saved beside it. `beside`: another build has stored something
since; it is not restored before some of it was computed again, and nothing is saved beside it. `other`: this build
computes other bits, and the store does not say so yet. `settled`: all that is stored has the bits of this build, as far
as it was seen."""

_MAX_IDENTITIES = 256
"""The tenants whose identities are in memory."""


def build_digest(build: str) -> bytes:
    """Returns the digest (8 bytes) by which nodes name a build."""
    return hashlib.sha256(build.encode()).digest()[:BUILD_BYTES] if build else NO_BUILD


class BuildBits:
    """The identity of one model, and what is known of the bits of this build. For any thread."""

    def __init__(self, store: Store, model: str, identity: Callable[[str], str], build: str) -> None:
        """`identity` and `build` are those of `PrefixCache`. Without a `build`, the identity says what computes."""
        self.state: BitsState = "unknown" if build else "settled"
        self._store, self._model, self._build = store, model, build
        self.digest = build_digest(build)
        """The build, as nodes have it."""
        self.equal = frozenset({self.digest, NO_BUILD})
        """The builds that are known to have the bits of this one."""
        self._stored_builds: tuple[bytes, ...] = ()
        """The builds that computed what is stored, as the record of the model had them at the start."""
        self.has_used_others = False
        """State of builds that are not known to be equal may be in the memory of this process."""
        # Each request asks several times.
        self._identity = lru_cache(_MAX_IDENTITIES)(identity)
        self._identity_of_build = lru_cache(_MAX_IDENTITIES)(identity_of_build)
        self._has_own_root = False
        """The digest of the build is a part of the identity."""
        self._lock = threading.Lock()
        """Guards changes of the state. Never held while the store is read."""
        if build:
            store.build = self.digest

    def accepts(self, build: bytes) -> bool:
        """Returns whether state of a build may be used, by its digest. Notes that there is some."""
        if not self._build or build in self.equal:
            return True
        with self._lock:
            if self.state == "settled":
                self.state = "beside"
            self.has_used_others |= self.state == "unchecked"
            return self.state == "unchecked"

    def identity(self, tenant: str) -> str:
        """Returns the identity of the model for a tenant, whose hash is the root."""
        identity = self._identity(tenant)
        return self._identity_of_build(identity, self._build) if self._has_own_root else identity

    def is_current(self, record: RootRecord) -> bool:
        """Returns whether this build uses a root of the model: not any more, if another build has computed it."""
        return self.state != "other" and record.identity == self.identity(record.tenant)

    @property
    def model_record(self) -> ModelRecord | None:
        """The record of the model that the store should have; None while that is unknown."""
        identity = self._identity(str(SHARED))
        if self.state == "unknown":
            return None
        if self.state == "other" or self._has_own_root:
            own = identity_of_build(identity, self._build)
            return ModelRecord(model=self._model, identity=own, builds=(self.digest,), has_own_root=True)
        builds = tuple(sorted(self.equal - {NO_BUILD})) if self.state == "settled" else self._stored_builds
        return ModelRecord(model=self._model, identity=identity, builds=builds)

    def recall(self) -> bool:
        """Reads what the store says about this build. Returns whether that is news. Raises `CacheError`."""
        if not self._build:
            return False
        identity = self._identity(str(SHARED))
        with self._store.reads.snapshot() as snapshot:
            is_marked = snapshot.has_record("meta", model_key(identity_of_build(identity, self._build)))
            stored = self._stored(snapshot, identity)
        with self._lock:
            if is_marked and not self._has_own_root:
                self._has_own_root, self.state = True, "settled"
            elif self.state == "unknown":
                self._stored_builds = stored
                self.state = "settled" if self.digest in stored else "unchecked"
                self.equal |= {*stored} if self.state == "settled" else set()
            else:
                return False
            return True

    def note_same(self, builds: Iterable[bytes]) -> None:
        """Notes that this build computes the bits of the builds with these digests."""
        with self._lock:
            if self.state in ("unchecked", "beside"):
                self.state, self.equal = "settled", self.equal | {*builds}

    def note_other(self) -> None:
        """Notes that this build computes other bits than what is stored."""
        with self._lock:
            if self.state in ("unchecked", "beside"):
                self.state = "other"

    def _stored(self, snapshot: Snapshot, identity: str) -> tuple[bytes, ...]:
        """Returns the builds that computed what is stored of the model; this one if nothing is."""
        known = snapshot.model(identity)
        if known is not None:
            return known.builds
        # A purge removes the record, and a daemon of another build may have saved something before it adds it again.
        for root, value in snapshot.records("roots"):
            with suppress(StoreCorrupt):
                record = decode_record(RootRecord, root, value)
                if root == root_hash(self._identity(record.tenant)) and snapshot.has_under("children", root):
                    return ()
        return (self.digest,)
