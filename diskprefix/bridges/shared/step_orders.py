"""The orders that the scheduler's side sends to the workers in each step."""

from __future__ import annotations

from msgspec import Struct

from diskprefix.prefixstore.cache.tiers.nodes import Node
from diskprefix.prefixstore.store.schema import NodeKind
from diskprefix.tokens import PromptDigest

NO_PAGE = 0
"""The number of vLLM's null block. It replaces blocks that a sliding window no longer needs."""


class OrderedBlock(Struct, frozen=True):
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
    blocks: tuple[OrderedBlock, ...]


class BlocksToSave(Struct, frozen=True):
    """Blocks of a prompt that are complete at the end of this step. `ttls` are their times to live after the last use,
    in seconds; None is the store's default."""

    request_id: str
    tenant: str
    blocks: tuple[OrderedBlock, ...]
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


class OrderedUpload(Struct, frozen=True):
    """The first blocks of a request to write to the bucket that machines share. `token_ids` are int32,
    little-endian."""

    tenant: str
    token_ids: bytes


class StepOrders(Struct, frozen=True):
    """The workers' plan for a step."""

    loads: tuple[Load, ...] = ()
    saves: tuple[BlocksToSave, ...] = ()
    ended: tuple[EndOfRequest, ...] = ()
    uploads: tuple[OrderedUpload, ...] = ()
