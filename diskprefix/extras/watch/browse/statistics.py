"""The figures of the cache for each model and tenant."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from diskprefix.errors import StoreCorrupt
from diskprefix.store.savings import Savings, Tally
from diskprefix.store.schema import Kind, NodeRecord, decode_node
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.tree import EntryInfo

_COUNTED = ("entries", "blocks", "checkpoints", "listed_bytes", "raw_bytes", "stored_bytes", "checkpoint_bytes")


@dataclass(frozen=True, kw_only=True)
class RootStatistics:
    """The figures of one model and tenant.

    `listed_bytes`: the size of its saved prompts, uncompressed and each stored alone. `raw_bytes`: the size of its
    blocks, uncompressed and each stored once. `stored_bytes`: their size in the file. So sharing saves
    `listed_bytes - raw_bytes`, and compression saves `raw_bytes - stored_bytes`. `checkpoint_bytes` are the part of
    `stored_bytes` that checkpoints take. `total` counts requests since `since` (seconds since the epoch), which is None
    if no request was counted.
    """

    root: str
    model: str
    tenant: str
    entries: int
    blocks: int
    listed_bytes: int
    raw_bytes: int
    stored_bytes: int
    checkpoints: int
    checkpoint_bytes: int
    since: float | None
    total: Tally
    today: Tally

    @property
    def shared_bytes(self) -> int:
        """The bytes that sharing saves. Blocks outside of saved prompts are subtracted."""
        return max(0, self.listed_bytes - self.raw_bytes)

    @property
    def compressed_bytes(self) -> int:
        """The bytes that compression saves."""
        return max(0, self.raw_bytes - self.stored_bytes)


def statistics(
    snapshot: Snapshot,
    entries: Sequence[EntryInfo],
    savings: Mapping[bytes, Savings],
    now: float,
    only: Collection[bytes] | None = None,
) -> list[RootStatistics]:
    """Returns the figures of each model and tenant, the largest first; `only`: of these roots.

    `entries` is the result of `list_entries` for this snapshot, `savings` that of `read_savings`. Reads the record of
    every node and leaves out damaged ones.
    """
    counts: defaultdict[bytes, Counter[str]] = defaultdict(Counter)
    for info in entries:
        entry = snapshot.entry(bytes.fromhex(info.id))
        if entry is not None:
            counts[entry.root].update(entries=1, listed_bytes=info.raw_bytes)
    for node in _sound_nodes(snapshot):
        counts[node.root].update(raw_bytes=node.raw_bytes, stored_bytes=node.stored_bytes)
        if node.kind == Kind.CHECKPOINT:
            counts[node.root].update(checkpoints=1, checkpoint_bytes=node.stored_bytes)
        else:
            counts[node.root].update(blocks=1)
    rows = []
    for root, record in snapshot.roots():
        if only is not None and root not in only:
            continue
        used = savings.get(root)
        row = RootStatistics(
            root=root.hex(),
            model=record.model,
            tenant=record.tenant,
            **{name: counts[root][name] for name in _COUNTED},
            since=used.since if used else None,
            total=used.total if used else Tally(),
            today=used.today(now) if used else Tally(),
        )
        rows.append(row)
    return sorted(rows, key=lambda row: (-row.stored_bytes, -row.total.requests, row.root))


def _sound_nodes(snapshot: Snapshot) -> Iterator[NodeRecord]:
    for name, value in snapshot.records("nodes"):
        try:
            node = decode_node(name, value)
        except StoreCorrupt:
            continue
        yield node
