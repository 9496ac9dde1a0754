"""Whose state an entry of the cache is. What one tenant saved, no other finds.

A tenant is named by the API key that a request came with, by the salt that the request holds, by both, or by neither.
Its text goes into the root of the cache's keys and is written to disk, so it is made of digests: neither a key nor a
salt can be read from it. Keys and salts are told apart before they are digested, so no salt that a client chooses
names the tenant of a key.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

_ID_DIGITS = 32
_SHOWN_DIGITS = 8
"""What people are shown of an id, and may give back; less would soon fit two tenants."""

_ID = re.compile(rf"[0-9a-f]{{{_ID_DIGITS}}}")
_PREFIX = re.compile(rf"[0-9a-f]{{{_SHOWN_DIGITS},{_ID_DIGITS}}}")


def _id(kind: str, secret: str) -> str:
    """128 bits of SHA-256 as 32 hex digits. What no UTF-8 holds, an argument of the command line may."""
    text = f"diskprefix {kind}\0{secret}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_ID_DIGITS]


def _salt_id(salt: str) -> str:
    return _id("salt", salt)


def _key_id(api_key: str) -> str:
    return _id("api key", api_key)


@dataclass(frozen=True)
class Tenant:
    """The ids of a tenant, outermost first: of the API key, then of the salt. Its text joins them with `/`."""

    ids: tuple[str, ...] = ()

    @classmethod
    def of_key(cls, api_key: str) -> Tenant:
        """The tenant of an API key."""
        return cls((_key_id(api_key),))

    @classmethod
    def parse(cls, text: str) -> Tenant:
        """The tenant with this text; inverse of `str`. Raises `ValueError` for a text that no tenant has."""
        ids = tuple(text.split("/")) if text else ()
        if not all(map(_ID.fullmatch, ids)):
            raise ValueError(f"not a tenant: {text!r}")
        return cls(ids)

    def with_salt(self, salt: str) -> Tenant:
        """One of this tenant's own users; of `SHARED`, where requests carry no keys, the tenant of the salt alone."""
        return Tenant((*self.ids, _salt_id(salt)))

    def __str__(self) -> str:
        return "/".join(self.ids)


SHARED = Tenant()
"""The tenant of requests with neither key nor salt."""


def short_tenant(tenant: str) -> str:
    """The text of a tenant for people: as much of each id as `matches` asks for."""
    return "/".join(id_[:_SHOWN_DIGITS] for id_ in tenant.split("/"))


def matches(tenant: str, wanted: str) -> bool:
    """Whether `wanted` means the tenant with the text `tenant`, or one that it is a user of.

    `wanted` is a salt, an API key, or what `inspect` shows: one id or several joined with `/`, each whole or at least
    its first 8 hex digits. `SHARED` has no name, so nothing means it.
    """
    ids = tenant.split("/")
    if _salt_id(wanted) in ids or _key_id(wanted) in ids:
        return True
    prefixes = wanted.strip().lower().split("/")
    if not all(map(_PREFIX.fullmatch, prefixes)):
        return False
    starts = range(len(ids) - len(prefixes) + 1)
    return any(all(map(str.startswith, ids[start:], prefixes)) for start in starts)
