"""Explains why the stored prefixes of a model are not used: they were computed under another identity."""

from __future__ import annotations

from diskprefix.extras.vllm.plans import RankIdentity
from diskprefix.identity import differing, identity_fields
from diskprefix.printable import shown
from diskprefix.store.store import Store


def what_differs(store: Store, identity: RankIdentity) -> str | None:
    """Returns the fields in which the closest stored root of the same model differs from `identity`. Returns None if
    the store has a root of `identity`, or no root of the model. Raises `CacheError`."""
    own = identity_fields(identity.record("").identity)
    closest: list[str] | None = None
    with store.snapshot() as snapshot:
        for _, record in snapshot.roots():
            if record.model != identity.model:
                continue
            try:
                stored = identity_fields(record.identity)
            except ValueError:
                continue
            names = differing(own, stored)
            if not names:
                return None
            if closest is None or len(names) < len(closest):
                closest = [f"{name} ({_short(stored.get(name))}, here {_short(own.get(name))})" for name in names]
    return None if closest is None else ", ".join(closest)


def _short(value: str | None) -> str:
    return shown(value or "none", 40)
