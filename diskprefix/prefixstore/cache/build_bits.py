"""The bits of this build, which decide whether it may use the stored state of a model.

A *build* is a version of this program on a machine, and computes the *bits* of a model's state. It shares the root of
an earlier build if tiny models give the same bits with both (`model.bits`). Each node says which build has computed it,
so whatever other processes store under the root, a build uses only what it may:

| state | restores | saves | until |
| --- | --- | --- | --- |
| `unknown` | nothing | nothing | the store can be read |
| `unchecked` | what the earlier build had left at the start | nothing | some of that was computed again |
| `beside` | state of builds that are known to be equal | nothing | what another build has stored was computed again |
| `settled` | state of builds that are known to be equal | all | another build stores something |
| `other` | nothing | nothing | the store has the mark of a root for this build alone |

A build that computes other bits than an earlier one gets a root of its own: the digest of the build becomes a part of
the identity. The `ModelRecord` of that identity is the mark, by which the next start knows. The build that the shared
root's record names goes on under that root.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Literal, TypeAlias

from msgspec.structs import replace

from diskprefix.errors import StoreCorrupt
from diskprefix.identity import identity_of_build
from diskprefix.prefixstore.store.schema import (
    BUILD_BYTES,
    NO_BUILD,
    ModelRecord,
    OptionValue,
    RootRecord,
    decode_record,
    model_key,
)
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.store import Store
from diskprefix.tokens import root_hash
from diskprefix.values import SHARED

BitsState: TypeAlias = Literal["unknown", "unchecked", "beside", "other", "settled"]

_MAX_IDENTITIES = 256
"""The tenants whose identities are in memory."""


def build_digest(build: str) -> bytes:
    """Returns the digest (8 bytes) by which nodes name a build."""
    return hashlib.sha256(build.encode()).digest()[:BUILD_BYTES] if build else NO_BUILD


class BuildBits:
    """The identity of one model, and what is known of the bits of this build. For any thread."""

    def __init__(
        self,
        store: Store,
        model: str,
        identity: Callable[[str], str],
        build: str,
        options: Mapping[str, OptionValue],
        state_kind: str,
    ) -> None:
        """The arguments are those of `PrefixCache`. Without a `build`, the identity says what computes."""
        self.state: BitsState = "unknown" if build else "settled"
        self._store, self._model, self._build = store, model, build
        self.options, self._state_kind = options, state_kind
        self.digest = build_digest(build)
        """The build, as nodes have it."""
        self.equal = frozenset({self.digest, NO_BUILD})
        """The builds that are known to have the bits of this one."""
        self._left: tuple[bytes, ...] = ()
        """The builds that had left state at the start, by the record of the model. They are equal to each other."""
        self._met: set[bytes] = set()
        """Builds that are not known to be equal, and whose state was met: used while `unchecked`, hidden later."""
        self._hidden: frozenset[bytes] = frozenset()
        """Builds whose state this process never uses: it differs, or could not be compared."""
        self._is_recorded = False
        """The record of the shared root names this build."""
        self.on_beside: Callable[[], None] = lambda: None
        """Called when the state becomes `beside`, on any thread."""
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
        if build in self._hidden:
            return False
        with self._lock:
            is_used = self.state == "unchecked" and self._may_have_left(build)
            if is_used or self.state in ("settled", "beside"):
                self._met.add(build)
            is_news = self.state == "settled"
            if is_news:
                self.state = "beside"
        if is_news:
            self.on_beside()
        return is_used

    def is_to_compare(self, build: bytes) -> bool:
        """Returns whether state of a build, by its digest, may be used once some of it was computed again."""
        is_known = build in self.equal or build in self._hidden
        return not is_known and (self.state == "beside" or self._may_have_left(build))

    def _may_have_left(self, build: bytes) -> bool:
        return not self._left or build in self._left

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
        own = {**self.options}
        record = ModelRecord(model=self._model, identity=identity, options=own, state_kind=self._state_kind)
        if self.state == "other" or self._has_own_root:
            return replace(
                record, identity=identity_of_build(identity, self._build), builds=(self.digest,), has_own_root=True
            )
        return replace(
            record, builds=self._left if self.state == "unchecked" else tuple(sorted(self.equal - {NO_BUILD}))
        )

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
                self._left = stored
                self.state = "settled" if self.digest in stored else "unchecked"
                self.equal |= {*stored} if self.state == "settled" else set()
            else:
                return False
            return True

    def look_at_record(self, snapshot: Snapshot) -> None:
        """Reads whether the record of the shared root names this build. Raises `StoreCorrupt`."""
        known = snapshot.model(self._identity(str(SHARED)))
        self._is_recorded = known is None or self.digest in known.builds

    def note_same(self, builds: frozenset[bytes]) -> None:
        """Notes that this build computes the bits of the builds with these digests."""
        with self._lock:
            self.equal |= builds.union(self._left if builds.intersection(self._left) else ())
            self._settle()

    def note_other(self, builds: frozenset[bytes]) -> bool:
        """Notes that this build computes other bits than the builds with these digests. Returns whether it leaves the
        shared root to them: not if the root's record names it, and none of their state was used."""
        with self._lock:
            if self.state == "beside" and self._is_recorded:
                self._hidden |= builds
                self._settle()
                return False
            self.state = "other"
            return True

    def note_nothing(self, *, is_stored: bool) -> bool:
        """Notes that nothing of other builds can be compared. `is_stored`: they have stored something. Returns whether
        this build leaves the shared root to them, because their state may be in its memory, or would be used."""
        with self._lock:
            if self.state == "unchecked" and (is_stored or self._met - self.equal):
                self.state = "other"
                return True
            self._hidden |= self._met - self.equal
            self._settle()
            return False

    def _settle(self) -> None:
        """Settles the state if all that was met is known. The caller holds the lock."""
        self._met -= self.equal | self._hidden
        if self.state in ("unchecked", "beside") and not self._met:
            self.state = "settled"

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
