"""The plans that the scheduler's side sends to the workers in each step, and the identity of a worker."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

from msgspec import Struct

from diskprefix.identity import differing, identity_fields, identity_text
from diskprefix.prefixstore.cache.tiers.nodes import Node
from diskprefix.prefixstore.store.schema import NodeKind, RootRecord
from diskprefix.prefixstore.store.store import Store
from diskprefix.printable import shown
from diskprefix.tokens import PromptDigest, root_hash

NO_PAGE = 0
"""The number of vLLM's null block. It replaces blocks that a sliding window no longer needs."""


class PlannedBlock(Struct, frozen=True):
    """A block of the store and its pages. `names` and `parents` have an item for each rank. `token_ids` are int32,
    little-endian. `pages` has the engine's blocks by group, with `NO_PAGE` for those that do not exist or are not
    needed."""

    names: tuple[bytes, ...]
    parents: tuple[bytes, ...]
    position: int
    token_ids: bytes
    pages: tuple[tuple[int, ...], ...]

    def node(self, rank: int) -> Node:
        num_tokens = len(self.token_ids) // 4
        return Node(self.names[rank], self.parents[rank], self.position, num_tokens, NodeKind.BLOCK)


class Load(Struct, frozen=True):
    """Blocks to copy from the store into pages before the request is computed."""

    request_id: str
    tenant: str
    blocks: tuple[PlannedBlock, ...]


class BlocksToSave(Struct, frozen=True):
    """Blocks of a prompt that are complete at the end of this step. `ttls` are their times to live after the last use,
    in seconds; None is the store's default."""

    request_id: str
    tenant: str
    blocks: tuple[PlannedBlock, ...]
    ttls: tuple[float | None, ...]
    scope: str
    prompt: PromptDigest


class EndOfRequest(Struct, frozen=True):
    """The end of a request. `names` is its last saved block by rank, which ends at token `num_tokens`; 0 if no block is
    new. `prompt` is the request's."""

    request_id: str
    tenant: str
    names: tuple[bytes, ...]
    num_tokens: int
    scope: str
    reason: str
    ttl_s: float | None
    prompt: PromptDigest


class PlannedUpload(Struct, frozen=True):
    """The first blocks of a request to write to the bucket that machines share. `token_ids` are int32,
    little-endian."""

    tenant: str
    token_ids: bytes


class StepPlan(Struct, frozen=True):
    """The workers' plan for a step."""

    loads: tuple[Load, ...] = ()
    saves: tuple[BlocksToSave, ...] = ()
    ended: tuple[EndOfRequest, ...] = ()
    uploads: tuple[PlannedUpload, ...] = ()


class RankIdentity(Struct, frozen=True):
    """The identity of one rank, without the tenant: everything that changes its numbers, and the form of its pages
    (`layout`, see `store.pieces.LayoutText`). Ranks have different identities, so each has its own root."""

    model: str
    block_size: int
    layout: str
    layout_version: int
    fingerprint: Mapping[str, str]
    tokenizer: str = ""

    def record(self, tenant: str) -> RootRecord:
        """Returns the record of a tenant's root."""
        return RootRecord(
            model=self.model,
            block_size=self.block_size,
            layout=self.layout,
            created_at=time.time(),
            identity=identity_text(self.fingerprint, self.block_size, self.layout_version, self.layout, tenant),
            tenant=tenant,
            tokenizer=self.tokenizer,
        )

    def root(self, tenant: str) -> bytes:
        return root_hash(self.record(tenant).identity)

    def differences(self, store: Store) -> str | None:
        """Returns the fields in which the closest stored root of this model differs from this identity. Returns None if
        the store has a root of this identity, or no root of the model. Raises `CacheError`."""
        own = identity_fields(self.record("").identity)
        closest: list[str] | None = None
        with store.snapshot() as snapshot:
            for _, record in snapshot.roots():
                with suppress(ValueError):
                    stored = identity_fields(record.identity) if record.model == self.model else None
                    if stored is None:
                        continue
                    if not (names := differing(own, stored)):
                        return None
                    if closest is None or len(names) < len(closest):
                        closest = [
                            f"{name} ({_short(stored.get(name))}, here {_short(own.get(name))})" for name in names
                        ]
        return None if closest is None else ", ".join(closest)


def _short(value: str | None) -> str:
    return shown(value or "none", 40)
