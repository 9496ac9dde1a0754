"""What one request asks of the cache. Apart from `prefix_cache`, so that the server needs no torch to speak of it."""

from __future__ import annotations

from dataclasses import dataclass

from diskprefix.policy.scope import Scope
from diskprefix.tenant import SHARED, Tenant, id_of

_GROUP_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """`scope` says what of the prompt to keep, `tenant` whose state it is.

    `group`: only prompts of the same group are in the window of this one (8 bytes, see `group_of`; empty for those
    without a key); what was seen before the window counts whatever its group. `save`: whether anything is kept, or only
    restored. `ttl_s`: how long it is kept after its last use, in seconds; None leaves that to the daemon.
    `reuse_generated`: keep the state of the first choice's reply, and restore that of earlier replies. `replay`:
    earlier replies stand in the prompt as the tokens that were sampled, and this reply is remembered for that.
    """

    scope: Scope
    tenant: Tenant = SHARED
    group: bytes = b""
    save: bool = True
    ttl_s: float | None = None
    reuse_generated: bool = False
    replay: bool = True


def group_of(key: str) -> bytes:
    """The group that a `prompt_cache_key` names: 8 bytes of SHA-256. The key itself is not written to disk."""
    return bytes.fromhex(id_of("prompt cache key", key))[:_GROUP_BYTES]
