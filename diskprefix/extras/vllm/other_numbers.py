"""Explains why the stored prefixes of a model are not found: they were computed in another way."""

from __future__ import annotations

from diskprefix.extras.vllm.plans import RankIdentity
from diskprefix.identity import differing, identity_fields
from diskprefix.store.store import Store

_SHOWN_CHARS = 40


def what_differs(store: Store, identity: RankIdentity) -> str | None:
    """Returns the fields in which the stored roots of a model differ from `identity`, for the root that differs least.
    Returns None if a root of `identity` is stored, or no root of the model.

    Raises `CacheError`.
    """
    own = identity_fields(identity.record("").identity)
    least: list[str] | None = None
    with store.snapshot() as snapshot:
        for _, record in snapshot.roots():
            if record.model != identity.model:
                continue
            try:
                found = identity_fields(record.identity)
            except ValueError:
                continue
            names = differing(own, found)
            if not names:
                return None
            if least is None or len(names) < len(least):
                least = [f"{name} ({_shown(found.get(name))}, here {_shown(own.get(name))})" for name in names]
    return None if least is None else ", ".join(least)


def _shown(value: str | None) -> str:
    text = value or "none"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
