"""The opening of a conversation as a note keeps it: with the options of its request, which hold for what is computed of
it later."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from diskprefix.scope import parse_scope
from diskprefix.values import CacheOptions, Tenant


class KeptOpening(Struct, frozen=True, array_like=True):
    """An opening (`content`, see `chat.conversation_opening`), under a client's name for it (`label`), or "". The other
    fields are those of `CacheOptions`; `is_salted` is the tenant's."""

    label: str
    content: bytes
    scope: str
    group: bytes
    ttl_s: float | None
    is_asked: bool
    is_salted: bool
    share: str

    @classmethod
    def of(cls, content: bytes, options: CacheOptions, label: str = "") -> KeptOpening:
        """Returns what is kept of a request with these options."""
        return cls(
            label=label,
            content=content,
            scope=str(options.scope),
            group=options.group,
            ttl_s=options.ttl_s,
            is_asked=options.is_asked,
            is_salted=options.tenant.is_salted,
            share=options.share,
        )

    @classmethod
    def decode(cls, kept: bytes) -> KeptOpening:
        """Raises `ValueError`."""
        return msgspec.msgpack.decode(kept, type=cls)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def options(self, tenant: Tenant) -> CacheOptions:
        """Returns the options of the request, which was this tenant's. Raises `InvalidScope`."""
        return CacheOptions(
            scope=parse_scope(self.scope, param="scope"),
            tenant=Tenant(tenant.ids, is_salted=self.is_salted),
            group=self.group,
            ttl_s=self.ttl_s,
            is_asked=self.is_asked,
            share=self.share,
        )
