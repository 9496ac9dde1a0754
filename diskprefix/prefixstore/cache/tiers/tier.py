"""The interfaces of tiers: the tiers of one machine, and the tier that machines share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from msgspec import Struct

from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.cache.tiers.nodes import Node, PromptNodes
from diskprefix.prefixstore.store.changes import NewNode
from diskprefix.prefixstore.store.codec.codec import Piece
from diskprefix.prefixstore.store.codec.planes import Bytes
from diskprefix.prefixstore.store.following import GoneText
from diskprefix.prefixstore.store.schema import RootRecord
from diskprefix.tokens import TokenIds

TierName: TypeAlias = Literal["memory", "disk", "remote"]
Write: TypeAlias = Callable[[Bytes], None]
"""Writes one piece into an array: uint8 of shape [rows, row_bytes], each row contiguous. Raises `StoreCorrupt` if the
piece is missing or damaged; the array may hold anything then. For any thread."""
Fill: TypeAlias = Callable[[int, int, int, slice, Write], None]
"""`fill(position, num_tokens, group, rows, write)` has `write` fill these rows of a group, in the memory of a sequence
that is restored (`kv.sequence.KVSequence`) or in another engine's pages. For per-token tensors, the rows hold
`num_tokens` tokens from `position` on. Groups are numbered as in `Piece`. A row is one head of one tensor, or a part of
a state. Different threads may fill different rows at once."""


class NodeIndex(Protocol):
    """Tells which nodes are stored."""

    def has(self, node: Node, token_ids: bytes) -> bool:
        """Returns whether this node is stored, by its name, parent, position, kind and token ids (int32,
        little-endian)."""

    def similar(self, parent: bytes, token_ids: TokenIds) -> Iterator[tuple[Node, TokenIds]]:
        """Yields the nodes that continue `parent` (the name of a node, or the root), with their tokens. Nodes that
        share more of `token_ids` come first."""

    def num_children(self, parent: bytes) -> int:
        """Returns how many nodes continue a node, 0 if it is unknown. Damaged nodes may be counted too."""


class View(NodeIndex, Protocol):
    """The content of a tier at one moment. For one thread at a time; the functions of `piece_writes` are for any."""

    @property
    def tier(self) -> TierName: ...

    @property
    def damaged(self) -> Collection[bytes]:
        """The names of damaged nodes, which the view no longer has."""

    @property
    def unverified(self) -> Collection[bytes]:
        """The names of the nodes that were found so far whose state came from a file; see `NodeRecord`."""

    def is_part(self, node: Node) -> bool | None:
        """Returns whether a prompt ends at this node that was not computed to its end. None if the tier does not know
        it: a farther one does."""

    def prefill_s(self, node: Node) -> float:
        """Returns the time that computing the node's tokens took, in seconds; 0 if unknown."""

    def piece_writes(self, node: Node, pieces: Sequence[Piece], needed: Sequence[int]) -> Iterator[Write]:
        """Yields the functions that write the pieces with the numbers `needed`. `piece_writes` are all pieces of the
        node."""

    def drop_damaged(self, node: Node, error: StoreCorrupt) -> None:
        """Has a damaged node removed from the tier, and from this view."""


Tier: TypeAlias = Callable[[], AbstractContextManager[View]]
"""A place for nodes on this machine: a function that opens a view of its content now, and may raise `CacheError`. View
the nearest tier first: a node that moves meanwhile is then seen twice, never missed. A tier has no `put`: new nodes go
to the writer's buffer, which is the nearest tier, and from there to the disk."""


@contextmanager
def open_views(tiers: Sequence[Tier]) -> Iterator[list[View]]:
    """Yields views of the tiers, in their order. Raises `CacheError`."""
    with ExitStack() as opened:
        yield [opened.enter_context(tier()) for tier in tiers]


class Prefetched(NamedTuple):
    """The result of `SharedTier.prefetch`: the names of the fetched nodes, their bytes before encoding, and seconds.

    `wanted_bytes` is the size of all blocks that nearer tiers lacked. `is_whole`: neither a lack of time (`is_late`) or
    room nor a failure ended the fetch early.
    """

    names: frozenset[bytes] = frozenset()
    num_bytes: int = 0
    wanted_bytes: int = 0
    seconds: float = 0.0
    is_whole: bool = True
    is_late: bool = False

    @property
    def telling_bytes(self) -> int:
        """The bytes by which to measure the tier's speed over `seconds`; 0 if this is no measurement."""
        if self.is_late:
            # All bytes would have taken longer still.
            return self.num_bytes or self.wanted_bytes
        return self.num_bytes if self.is_whole else 0


class PrefetchRequest(Struct, frozen=True):
    """A request to fetch, within `max_s` seconds, the nodes of a prompt that the nearer `tiers` lack.

    `publish` puts nodes, parents first, into the nearest tier, and returns False if there is no room. The state of the
    first `in_memory_tokens` tokens is in memory, so nothing is fetched for them alone. `pays(num_tokens, num_bytes)`
    returns whether fetching is expected to be faster than computing. `is_cancelled` is polled. `prefill_s_per_token`,
    `ttl_s` and `replaces` are for the `NewNode`s.
    """

    nodes: PromptNodes
    tiers: Sequence[Tier]
    publish: Callable[[tuple[NewNode, ...]], bool]
    max_s: float
    in_memory_tokens: int = 0
    pays: Callable[[int, int], bool] = lambda _num_tokens, _num_bytes: True
    is_cancelled: Callable[[], bool] = lambda: False
    prefill_s_per_token: float = 0.0
    ttl_s: float | None = None
    replaces: bool = False


class Upload(Struct, frozen=True):
    """A prompt whose first `num_tokens` tokens are to be uploaded, as far as `tiers` have their state. `is_current`
    returns whether nothing was purged since its request began."""

    nodes: PromptNodes
    num_tokens: int
    record: RootRecord
    tiers: Sequence[Tier]
    is_current: Callable[[], bool] = lambda: True


class SharedTier(Protocol):
    """The tier that machines share. An extra provides it by `hooks.open_tier`.

    A fetch may take seconds, so restores do not read this tier: its nodes are fetched to the nearest tier first, as if
    they had been computed. Methods are for any thread. Only `delete_texts` raises network errors.
    """

    def prefetch(self, request: PrefetchRequest) -> Prefetched:
        """Fetches the nodes that nearer tiers lack, publishes them in the nearest tier, and waits until that is done.
        Raises `CacheError` if a nearer tier cannot be read."""

    def upload(self, upload: Upload) -> None:
        """Queues a prompt, of which the nodes that this tier lacks are written. Does not wait."""

    def delete_texts(self, texts: Sequence[GoneText], timeout_s: float) -> int:
        """Removes the objects of deleted texts. Returns the number of objects. Raises `CacheError`."""

    def flush(self, timeout_s: float) -> bool:
        """Waits until all is uploaded. Returns False if the time runs out first."""

    def stats(self) -> dict[str, Any]:
        """Returns the figures for `/props` and `/metrics`."""

    def counts(self) -> Counter[str]:
        """Returns the counts of this process. Refused objects are counted as `refused_REASON`."""

    def close(self, timeout_s: float) -> None:
        """Uploads what waits, and ends the threads."""


class Bucket(Protocol):
    """The objects of a shared tier, opened for removals. Methods raise `CacheError`."""

    def delete_texts(self, texts: Sequence[GoneText]) -> int:
        """Removes the objects of these texts. Returns the number of objects."""

    def purge(self, is_wanted: Callable[[str, str], bool]) -> int:
        """Removes the roots for which `is_wanted(model, tenant)` holds. Returns the number of objects."""
