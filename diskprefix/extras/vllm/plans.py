"""The plans that the scheduler's side sends to the workers' side in each step, and the identity of a worker."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from diskprefix.cache.tiers.nodes import Node
from diskprefix.identity import identity_text
from diskprefix.store.schema import Kind, RootRecord
from diskprefix.tokens import root_hash

NO_PAGE = 0
"""The number of vLLM's null block, which stands where a window has moved on."""


@dataclass(frozen=True)
class PlannedBlock:
    """A block of the store and the pages that hold it. `names` and `parents` are by rank. `token_ids` are int32,
    little-endian. `pages` has the numbers of the engine's blocks by group, in order; `NO_PAGE` for pages that do not
    exist or are not wanted."""

    names: tuple[bytes, ...]
    parents: tuple[bytes, ...]
    position: int
    token_ids: bytes
    pages: tuple[tuple[int, ...], ...]

    def node(self, rank: int) -> Node:
        num_tokens = len(self.token_ids) // 4
        return Node(self.names[rank], self.parents[rank], self.position, num_tokens, Kind.BLOCK)


@dataclass(frozen=True)
class Load:
    """Blocks to copy from the store into pages before the request is computed."""

    request_id: str
    tenant: str
    blocks: tuple[PlannedBlock, ...]


@dataclass(frozen=True)
class Save:
    """Blocks that are complete at the end of this step. `ttls` are how long each is to be kept after its last use, in
    seconds; None leaves that to the store. `is_expected`: see `store.changes.NewNode`."""

    request_id: str
    tenant: str
    blocks: tuple[PlannedBlock, ...]
    ttls: tuple[float | None, ...]
    is_expected: bool


@dataclass(frozen=True)
class EndOfRequest:
    """The end of a request. Its last saved block is `names`, by rank, after `num_tokens` tokens; 0: none of it is
    new."""

    request_id: str
    tenant: str
    names: tuple[bytes, ...]
    num_tokens: int
    scope: str
    reason: str
    ttl_s: float | None


@dataclass(frozen=True)
class Share:
    """The first tokens of a prompt and its reply, whole blocks, to be uploaded. `token_ids` are int32,
    little-endian."""

    tenant: str
    token_ids: bytes


@dataclass(frozen=True)
class StepPlan:
    """`is_fetching`: a request waits for the tier that machines share."""

    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    ended: tuple[EndOfRequest, ...] = ()
    shares: tuple[Share, ...] = ()
    is_fetching: bool = False


@dataclass(frozen=True)
class RankIdentity:
    """The identity of one rank: everything that changes its numbers except the tenant, and the form of its pages
    (`layout`, see `store.pieces.LayoutText`). No two ranks have the same, so each has its own root."""

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
