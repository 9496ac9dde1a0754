"""The gain of the cache for each model and tenant, and the next victims of eviction."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from diskprefix.errors import StoreCorrupt
from diskprefix.store.eviction import HALF_LIFE_S, choose_victims, scores
from diskprefix.store.savings import Savings, Tally
from diskprefix.store.schema import Kind, NodeRecord, UsageRecord, decode_node
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.tree import EntryInfo, PrefixTree

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


@dataclass(frozen=True, kw_only=True)
class Victim:
    """A block that is evicted soon. `entries` are the saved prompts that end there. `score` orders the blocks: log2
    of use, age and prefill time per byte, see `store/README.md`."""

    hash: str
    root: str
    kind: str
    start: int
    end: int
    stored_bytes: int
    score: float
    age_s: float
    hits: int
    prefill_s: float
    entries: tuple[str, ...]
    reason: str


def statistics(
    snapshot: Snapshot, entries: Sequence[EntryInfo], savings: Mapping[bytes, Savings], now: float
) -> list[RootStatistics]:
    """Returns the figures of each model and tenant, the largest first.

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


def next_victims(snapshot: Snapshot, now: float, roots: Collection[bytes], *, most: int) -> list[Victim]:
    """Returns the `most` blocks of these roots that would be evicted first now. A running daemon would keep blocks in
    use, which are not known here."""
    table = snapshot.usages()
    ranks = scores(table, now)
    saves_nothing = snapshot.saves_nothing()
    names = choose_victims(table, snapshot.parent, bytes_wanted=2**62, pinned=(), now=now, saves_nothing=saves_nothing)
    tree, victims = PrefixTree(snapshot), list[Victim]()
    for name in names:
        if len(victims) == most:
            break
        try:
            node, usage = snapshot.node(name), snapshot.usage(name)
        except StoreCorrupt:
            continue
        if node is None or usage is None or node.root not in roots:
            continue
        is_bare = saves_nothing is not None and name not in tree.children and saves_nothing(name)
        victims.append(
            Victim(
                hash=name.hex(),
                root=node.root.hex(),
                kind=node.kind.name.lower(),
                start=node.position,
                end=node.end,
                stored_bytes=usage.stored_bytes,
                score=round(float(ranks[table.row_of[name]]), 2),
                age_s=round(max(0.0, now - usage.last_used), 1),
                hits=usage.restores,
                prefill_s=round(usage.prefill_s, 4),
                entries=(name.hex(),) if snapshot.has_record("entries", name) else (),
                reason=_reason(usage, now, is_bare=is_bare),
            )
        )
    return victims


def _reason(usage: UsageRecord, now: float, *, is_bare: bool) -> str:
    if is_bare:
        return "no checkpoint continues it"
    age_s = max(0.0, now - usage.last_used)
    recent = usage.hits * 2.0 ** (-age_s / HALF_LIFE_S)
    if not usage.restores:
        return "never used again"
    return "not used lately" if recent < 0.1 else "used lately"


def _sound_nodes(snapshot: Snapshot) -> Iterator[NodeRecord]:
    for name, value in snapshot.records("nodes"):
        try:
            node = decode_node(name, value)
        except StoreCorrupt:
            continue
        yield node


@dataclass(kw_only=True)
class NodeCounts:
    """Counts of some models' nodes: blocks (tails included), checkpoints and the bytes of their payloads."""

    blocks: int = 0
    checkpoints: int = 0
    checkpoint_bytes: int = 0


def count_nodes(snapshot: Snapshot, roots: Collection[bytes]) -> NodeCounts:
    """Returns the counts of all nodes of these roots whose records are sound."""
    counts = NodeCounts()
    for node in _sound_nodes(snapshot):
        if node.root not in roots:
            continue
        if node.kind == Kind.CHECKPOINT:
            counts.checkpoints += 1
            counts.checkpoint_bytes += node.stored_bytes
        else:
            counts.blocks += 1
    return counts
