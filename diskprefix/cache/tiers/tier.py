"""The interfaces of tiers: those of one machine, and the tier that machines share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from diskprefix.cache.tiers.nodes import Node, PromptNodes
from diskprefix.errors import StoreCorrupt
from diskprefix.store.changes import NewNode
from diskprefix.store.codec.planes import Bytes
from diskprefix.store.pieces import Cut
from diskprefix.store.purge import GoneText
from diskprefix.store.schema import RootRecord
from diskprefix.tokens import TokenIds

TierName: TypeAlias = Literal["memory", "disk", "remote"]
Write: TypeAlias = Callable[[Bytes], None]
"""Writes one piece into an array: uint8 of shape [rows, row_bytes], each row contiguous. Raises `StoreCorrupt` if the
piece is missing or damaged; the array may hold anything then. For any thread."""


class BlockSink(Protocol):
    """Memory that the state of a sequence is read into: a `kv.sequence.KVSequence`, or a view of another engine's
    pages."""

    def fill(self, position: int, num_tokens: int, group: int, rows: slice, write: Write) -> None:
        """Has `write` fill rows of a group. For per-token tensors, these are the rows of the tokens `position` …
        `position + num_tokens`.

        Groups are numbered as in `store.pieces.Cut`. A row is one head of one tensor, or a part of a state. Different
        rows may be filled from different threads at once.
        """


class NodeIndex(Protocol):
    """Tells which nodes are stored."""

    def has(self, node: Node, token_ids: bytes) -> bool:
        """Returns whether this node is stored. A name is no proof: parent, position, kind and token ids (int32,
        little-endian) are compared too."""

    def similar(self, parent: bytes, token_ids: TokenIds) -> Iterator[tuple[Node, TokenIds]]:
        """Yields nodes that continue `parent` (the name of a node, or the root), and their tokens. Nodes that share
        more of `token_ids` come first."""

    def num_children(self, parent: bytes) -> int:
        """Returns how many nodes continue a node, 0 if the node is unknown. Damaged ones may be counted too."""


class View(NodeIndex, Protocol):
    """The content of a tier at one moment. For one thread at a time, except for what `pieces` yields."""

    @property
    def tier(self) -> TierName: ...

    @property
    def damaged(self) -> Collection[bytes]:
        """The names of the nodes that were found damaged. The view has them no longer."""

    def prefill_s(self, node: Node) -> float:
        """Returns the time that computing the node's tokens took, in seconds; 0 if unknown."""

    def pieces(self, node: Node, cuts: Sequence[Cut], needed: Sequence[int]) -> Iterator[Write]:
        """Yields functions that write the pieces with the numbers `needed`. `cuts` are all pieces of the node."""

    def drop(self, node: Node, error: StoreCorrupt) -> None:
        """Has a damaged node removed from the tier, and from this view."""


class Tier(Protocol):
    """A place for nodes that can be read at once.

    It has no `put`: all new nodes go to the writer's buffer, which is the nearest tier, and from there to the disk.
    """

    def view(self) -> AbstractContextManager[View]:
        """Opens the tier's content of this moment. Raises `CacheError`. View the nearest tier first: a node that moves
        meanwhile is then seen twice, never missed."""


@contextmanager
def open_views(tiers: Sequence[Tier]) -> Iterator[list[View]]:
    """Yields views of the tiers, in their order. Raises `CacheError`."""
    with ExitStack() as opened:
        yield [opened.enter_context(tier.view()) for tier in tiers]


class Prefetched(NamedTuple):
    """The result of `SharedTier.prefetch`: the names of the fetched nodes, their bytes before encoding, and seconds.

    `wanted_bytes` is the size of all blocks that nearer tiers lacked. `is_whole`: nothing stopped it, neither time
    (`is_late`), nor a failure, nor want of room.
    """

    names: frozenset[bytes] = frozenset()
    num_bytes: int = 0
    wanted_bytes: int = 0
    seconds: float = 0.0
    is_whole: bool = True
    is_late: bool = False

    @property
    def telling_bytes(self) -> int:
        """The bytes to measure the tier's speed by, over `seconds`; 0 if this is no measurement."""
        if self.is_late:
            # It would have taken longer still.
            return self.num_bytes or self.wanted_bytes
        return self.num_bytes if self.is_whole else 0


@dataclass(frozen=True)
class PrefetchRequest:
    """A request to fetch, within `most_s` seconds, the nodes of a prompt that the nearer `tiers` lack.

    `publish` puts nodes, parents first, into the nearest tier, and returns False if there is no room. The state of the
    first `have` tokens is in memory, so nothing is fetched for their sake alone. `is_cancelled` is polled meanwhile.
    `prefill_s_per_token`, `ttl_s` and `replaces` become those of the `NewNode`s. `pays` tells for numbers of tokens and
    bytes whether fetching is expected to be faster than computing.
    """

    nodes: PromptNodes
    tiers: Sequence[Tier]
    publish: Callable[[tuple[NewNode, ...]], bool]
    most_s: float
    have: int = 0
    pays: Callable[[int, int], bool] = lambda _num_tokens, _num_bytes: True
    is_cancelled: Callable[[], bool] = lambda: False
    prefill_s_per_token: float = 0.0
    ttl_s: float | None = None
    replaces: bool = False


@dataclass(frozen=True)
class Upload:
    """A prompt whose first `num_tokens` tokens are to be shared, as far as `tiers` have them, and `is_current`: nothing
    was purged since its request began."""

    nodes: PromptNodes
    num_tokens: int
    record: RootRecord
    tiers: Sequence[Tier]
    is_current: Callable[[], bool] = lambda: True


class SharedTier(Protocol):
    """The tier that machines share. An extra provides one: `hooks.open_tier`.

    It may take seconds, so it is not read like the nearer tiers: its nodes are fetched to the nearest tier first, as if
    they had been computed, and read from there. Methods are for any thread. Only `forget` raises network errors.
    """

    def prefetch(self, wish: PrefetchRequest) -> Prefetched:
        """Fetches the nodes that nearer tiers lack, publishes them in the nearest one, and waits for that. Raises
        `CacheError` if a nearer tier cannot be read."""

    def upload(self, upload: Upload) -> None:
        """Queues a prompt to be written where the shared tier lacks it. Does not wait."""

    def forget(self, texts: Sequence[GoneText], timeout_s: float) -> int:
        """Removes the objects of deleted texts. Returns the number of objects. Raises `CacheError`."""

    def flush(self, timeout_s: float) -> bool:
        """Waits until all is uploaded. Returns False if the time runs out first."""

    def stats(self) -> dict[str, Any]:
        """Returns the figures for `/props` and `/metrics`."""

    def counts(self) -> Counter[str]:
        """Returns the counts of this process. Refused objects are counted as `refused_REASON`."""

    def close(self, timeout_s: float) -> None:
        """Uploads what waits, and ends."""


class Bucket(Protocol):
    """The objects of a shared tier, opened to remove some of them. Methods raise `CacheError`."""

    def forget(self, texts: Sequence[GoneText]) -> int:
        """Removes the objects of these texts. Returns their number."""

    def purge(self, is_wanted: Callable[[str, str], bool]) -> int:
        """Removes the roots for which `is_wanted(model, tenant)` holds. Returns the number of objects."""
