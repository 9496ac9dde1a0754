"""Lists what the store holds, for people: the saved prompts, and what they share."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from diskprefix.errors import StoreCorrupt
from diskprefix.printable import shown
from diskprefix.store.schema import EntryRecord, Kind, NodeRecord, shorter_names
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.tree import PrefixTree

log = logging.getLogger("diskprefix")

_MOST_GROWN = 10_000
_FORMER_DIGITS = 8
"""The fewest digits of a former id. Fewer soon match one of the millions of names that are computed."""


@dataclass(frozen=True, kw_only=True)
class EntryInfo:
    """One saved prompt. Sizes are in bytes and cover its nodes, checkpoints included; `shared_bytes` is the part that
    other entries use as well.

    `checkpoints` are the tokens at which state is kept that exists at one position only; `checkpoint_bytes` is the size
    of that state. `generated_tokens` were decoded, not prefilled: they are not exact. Times are seconds since the
    epoch. `hits` counts the requests that restored up to this entry's end or beyond. `ttl_s`: how long requests asked
    to keep it after its last use, in seconds, None if none did. `default_ttl`: whether one asked for no time of its
    own, so that the daemon's `--kv-cache-ttl` holds if that is longer.
    """

    id: str
    model: str
    num_tokens: int
    raw_bytes: int
    stored_bytes: int
    shared_bytes: int
    checkpoints: tuple[int, ...]
    checkpoint_bytes: int
    generated_tokens: int
    hits: int
    created_at: float
    last_used_at: float
    ttl_s: int | None
    default_ttl: bool
    scope: str
    tenant: str
    preview: str


@dataclass(kw_only=True)
class NodeCounts:
    """Counts of the whole store: its blocks (tails included), how many of them are generated, its checkpoints and the
    bytes of their payloads."""

    blocks: int = 0
    generated_blocks: int = 0
    checkpoints: int = 0
    checkpoint_bytes: int = 0


def list_entries(snapshot: Snapshot) -> list[EntryInfo]:
    """Returns all entries, the most recently used first. An entry with a damaged path is left out and logged."""
    tree = PrefixTree(snapshot)
    entries: dict[bytes, tuple[EntryRecord, dict[bytes, NodeRecord]]] = {}
    for name, entry in snapshot.entries():
        try:
            entries[name] = entry, tree.entry(name)
        except StoreCorrupt as error:
            log.warning("entry %s left out: %s", name.hex(), error)
    users = Counter(node for _, nodes in entries.values() for node in nodes)
    infos = [_info(snapshot, name, entry, nodes, users) for name, (entry, nodes) in entries.items()]
    return sorted(infos, key=lambda info: (-info.last_used_at, info.id))


def grown_from(snapshot: Snapshot, secret: int, beginning: str) -> list[str]:
    """Returns the ids of the saved prompts that have grown out of one whose id begins with these hex digits and that is
    not listed any more: a longer node took the place of its last one. `secret` is the store's.

    Nothing records such ids: the names of all nodes that a stored one may have replaced are computed, for the
    `_MOST_GROWN` nodes that were used last. That takes a second, and milliseconds for what grew of late.
    """
    beginning = beginning.lower()
    try:
        digits = bytes.fromhex(beginning[: len(beginning) // 2 * 2])
    except ValueError:
        return []
    if len(beginning) < _FORMER_DIGITS:
        return []
    tree, table, parent = PrefixTree(snapshot), snapshot.usages(), None
    names = [table.names[place] for place in np.argsort(-table.records["last_used"], kind="stable")[:_MOST_GROWN]]
    grown: set[bytes] = set()
    for name in names:
        with suppress(StoreCorrupt):
            node = tree.node(name)
            # All that grew out of one node continue the same one.
            if node is None or parent not in (None, node.parent):
                continue
            shorter = shorter_names(secret, node.parent, node.token_ids.tobytes(), node.kind)
            # Joined they are searched at once, though what is found may lie across two names.
            if digits in b"".join(shorter) and any(one.hex().startswith(beginning) for one in shorter):
                parent = node.parent
                grown.add(name)
    return [name.hex() for name in snapshot.keys("entries") if grown and not grown.isdisjoint(_path(tree, name))]


def has_grown(former_id: str, ids: Sequence[str]) -> str:
    """Returns what people are told about a former id. `ids` are those that `grown_from` found."""
    if len(ids) == 1:
        return f"entry {shown(former_id)} has grown; its id is now {ids[0]}"
    return f"entry {shown(former_id)} has grown into {len(ids)}: {', '.join(ids)}"


def _path(tree: PrefixTree, name: bytes) -> Mapping[bytes, NodeRecord]:
    """Returns the path of an entry; nothing if it is damaged."""
    try:
        return tree.path(name)
    except StoreCorrupt:
        return {}


def count_nodes(snapshot: Snapshot) -> NodeCounts:
    """Returns the counts of all nodes whose records are sound."""
    tree, counts = PrefixTree(snapshot), NodeCounts()
    for name in snapshot.keys("nodes"):
        try:
            node = tree.node(name)
        except StoreCorrupt:
            continue
        if node is not None and node.kind == Kind.CHECKPOINT:
            counts.checkpoints += 1
            counts.checkpoint_bytes += node.stored_bytes
        elif node is not None:
            counts.blocks += 1
            counts.generated_blocks += node.generated
    return counts


def _info(
    snapshot: Snapshot, name: bytes, entry: EntryRecord, nodes: dict[bytes, NodeRecord], users: Counter[bytes]
) -> EntryInfo:
    root, usage = snapshot.root(entry.root), snapshot.usage(name)
    checkpoints = [node for node in nodes.values() if node.kind == Kind.CHECKPOINT]
    return EntryInfo(
        id=name.hex(),
        model=root.model if root else "",
        num_tokens=entry.num_tokens,
        raw_bytes=sum(node.raw_bytes for node in nodes.values()),
        stored_bytes=sum(node.stored_bytes for node in nodes.values()),
        shared_bytes=sum(node.stored_bytes for step, node in nodes.items() if users[step] > 1),
        checkpoints=tuple(sorted(node.position for node in checkpoints)),
        checkpoint_bytes=sum(node.stored_bytes for node in checkpoints),
        generated_tokens=sum(node.num_tokens for node in nodes.values() if node.generated),
        hits=usage.restores if usage else 0,
        created_at=round(entry.created_at, 3),
        last_used_at=round(usage.last_used if usage else entry.created_at, 3),
        ttl_s=abs(usage.ttl_s) or None if usage else None,
        default_ttl=usage.ttl_s <= 0 if usage else True,
        scope=entry.scope,
        tenant=root.tenant if root else "",
        preview=entry.preview,
    )
