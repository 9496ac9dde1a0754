"""The ids of tenants. Each tenant has its own cache and finds nothing of other tenants.

The API key of a request, the salt in the request, both, or neither make its tenant. Its text is part of the root of the
cache's keys and is written to disk. It consists of digests, so it shows neither keys nor salts. Keys and salts are
marked before they are hashed, so a client cannot choose a salt that gives the tenant of a key.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

_ID_DIGITS = 32
_GROUP_BYTES = 8
_SHOWN_DIGITS = 8
"""The digits of an id that are shown, and the minimum that is accepted. Fewer would soon match two tenants."""

TENANT_ID = re.compile(rf"[0-9a-f]{{{_ID_DIGITS}}}")
_PREFIX = re.compile(rf"[0-9a-f]{{{_SHOWN_DIGITS},{_ID_DIGITS}}}")


def id_of(kind: str, secret: str) -> str:
    """Returns 128 bits of SHA-256 as 32 hex digits. An argument of the command line may hold surrogates."""
    text = f"diskprefix {kind}\0{secret}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_ID_DIGITS]


def short_tenant(tenant: str) -> str:
    """Returns the text of a tenant with shortened ids, which `matches` accepts."""
    return "/".join(id_[:_SHOWN_DIGITS] for id_ in tenant.split("/"))


def matches(tenant: str, wanted: str) -> bool:
    """Returns whether `wanted` names the tenant with the text `tenant`, or the tenant whose user it is.

    `wanted` is a salt, an API key, or what `inspect` shows: one id or several joined with `/`, each whole or at least
    its first 8 hex digits. No text names `SHARED`.
    """
    return any(pattern in fitting(tenant, [*map(len, pattern.split("/"))]) for pattern in patterns(wanted))


def patterns(wanted: str) -> tuple[str, ...]:
    """Returns the patterns of the tenants that `matches` names: ids, or beginnings of ids, joined with `/`. They show
    neither keys nor salts."""
    digests, shown = (id_of("salt", wanted), id_of("api key", wanted)), wanted.strip().lower()
    return (*digests, shown) if all(map(_PREFIX.fullmatch, shown.split("/"))) else digests


def fitting(tenant: str, lengths: Sequence[int]) -> set[str]:
    """Returns the patterns that fit a tenant, of those whose parts have these lengths. A pattern fits if the tenant has
    its ids one after the other."""
    ids = tenant.split("/")
    starts = range(len(ids) - len(lengths) + 1)
    return {"/".join(id_[:n] for id_, n in zip(ids[start:], lengths, strict=False)) for start in starts}


def group_of(key: str) -> bytes:
    """Returns the group of a `prompt_cache_key`: 8 bytes of SHA-256. The key itself is not written to disk."""
    return bytes.fromhex(id_of("prompt cache key", key))[:_GROUP_BYTES]
