"""What the store holds, for people: the saved prompts, and what they share."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from diskprefix.errors import StoreCorrupt
from diskprefix.store.schema import EntryRecord, Kind, NodeRecord, is_generated, node_kind, node_stored_bytes
from diskprefix.store.snapshot import Snapshot
from diskprefix.tokens import HASH_BYTES

log = logging.getLogger("diskprefix")


@dataclass(frozen=True, kw_only=True)
class EntryInfo:
    """One saved prompt. Bytes cover its path with the checkpoints that lie on it; `shared_bytes` is the part that other
    entries use as well.

    `checkpoints` are the tokens at which state that cannot be cut is kept, `checkpoint_bytes` what that takes; at the
    end of a whole prompt its tail holds it. `generated_tokens` of the prompt were decoded, not prefilled: they are not
    exact. Times are seconds since the epoch. `hits` counts the requests that restored up to this entry's end or beyond.
    `ttl_s`: how long uses asked to keep it after the last one, in seconds, None if none did; `default_ttl`: whether one
    asked for no time of its own, so that it stays for the daemon's `--kv-cache-ttl` if that is longer.
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


@dataclass(frozen=True, kw_only=True)
class NodeCounts:
    """Of the whole store: its blocks (tails included), how many of them are generated, and the checkpoints with what
    their payloads take."""

    blocks: int
    generated_blocks: int
    checkpoints: int
    checkpoint_bytes: int


@dataclass(frozen=True)
class _Step:
    """What of a node counts here; its token ids would fill the memory."""

    parent: bytes
    position: int
    num_tokens: int
    kind: Kind
    generated: bool
    raw_bytes: int
    stored_bytes: int


def list_entries(snapshot: Snapshot) -> list[EntryInfo]:
    """All entries, the most recently used first. An entry whose path is damaged is left out and logged."""
    steps: dict[bytes, _Step] = {}
    paths: dict[bytes, tuple[EntryRecord, list[bytes]]] = {}
    checkpoints = checkpoints_by_block(snapshot)
    for name, entry in snapshot.entries():
        try:
            path = _path(snapshot, name, steps)
            paths[name] = (entry, [*path, *_beside(snapshot, path, checkpoints, steps)])
        except StoreCorrupt as error:
            log.warning("entry %s left out: %s", name.hex(), error)
    users = Counter(node for _, path in paths.values() for node in path)
    infos = [_info(snapshot, name, entry, path, steps, users) for name, (entry, path) in paths.items()]
    return sorted(infos, key=lambda info: (-info.last_used_at, info.id))


def _path(snapshot: Snapshot, name: bytes, steps: dict[bytes, _Step]) -> list[bytes]:
    """Names of the nodes from `name` up to the first block; each is read once for all entries."""
    path: list[bytes] = []
    while True:
        path.append(name)
        step = _step(snapshot, name, steps)
        if step.position == 0:
            return path
        name = step.parent


def count_nodes(snapshot: Snapshot) -> NodeCounts:
    """Read off the records without checking them."""
    blocks = generated = checkpoints = checkpoint_bytes = 0
    for _, value in snapshot.nodes():
        if node_kind(value) == Kind.CHECKPOINT:
            checkpoints += 1
            checkpoint_bytes += node_stored_bytes(value)
        else:
            blocks += 1
            generated += is_generated(value)
    return NodeCounts(
        blocks=blocks, generated_blocks=generated, checkpoints=checkpoints, checkpoint_bytes=checkpoint_bytes
    )


def entry_nodes(snapshot: Snapshot, name: bytes) -> list[tuple[bytes, NodeRecord]]:
    """The nodes of the entry that ends with node `name`: its path from the first block on, each block followed by the
    checkpoints that continue it. Raises `StoreCorrupt`."""
    path, checkpoints = snapshot.path(name), checkpoints_by_block(snapshot)
    nodes: list[tuple[bytes, NodeRecord]] = []
    for step, node in path:
        nodes += [(step, node)] if node.kind != Kind.CHECKPOINT else []
        found = ((beside, snapshot.node(beside)) for beside in checkpoints.get(step, ()))
        nodes += [(beside, record) for beside, record in found if record is not None]
    return nodes


def checkpoints_by_block(snapshot: Snapshot) -> dict[bytes, list[bytes]]:
    """The names of all checkpoints, by the block that each continues."""
    found: dict[bytes, list[bytes]] = {}
    for name, value in snapshot.nodes():
        if node_kind(value) == Kind.CHECKPOINT:
            found.setdefault(bytes(value[:HASH_BYTES]), []).append(name)
    return found


def _beside(
    snapshot: Snapshot, path: list[bytes], checkpoints: Mapping[bytes, list[bytes]], steps: dict[bytes, _Step]
) -> list[bytes]:
    """The checkpoints that continue a block of the path, but for the one that it may end with. May raise
    `StoreCorrupt`."""
    names = [name for block in path for name in checkpoints.get(block, ()) if name != path[0]]
    for name in names:
        _step(snapshot, name, steps)
    return names


def _step(snapshot: Snapshot, name: bytes, steps: dict[bytes, _Step]) -> _Step:
    """Raises `StoreCorrupt`."""
    if name not in steps:
        node = snapshot.node(name)
        if node is None:
            raise StoreCorrupt(f"node {name.hex()} is missing from its path")
        num_tokens = len(node.token_ids)
        steps[name] = _Step(
            node.parent, node.position, num_tokens, node.kind, node.generated, node.raw_bytes, node.stored_bytes
        )
    return steps[name]


def _info(
    snapshot: Snapshot,
    name: bytes,
    entry: EntryRecord,
    path: list[bytes],
    steps: dict[bytes, _Step],
    users: Counter[bytes],
) -> EntryInfo:
    root, usage = snapshot.root(entry.root), snapshot.usage(name)
    checkpoints = [steps[node] for node in path if steps[node].kind == Kind.CHECKPOINT]
    return EntryInfo(
        id=name.hex(),
        model=root.model if root else "",
        num_tokens=entry.num_tokens,
        raw_bytes=sum(steps[node].raw_bytes for node in path),
        stored_bytes=sum(steps[node].stored_bytes for node in path),
        shared_bytes=sum(steps[node].stored_bytes for node in path if users[node] > 1),
        checkpoints=tuple(sorted(step.position for step in checkpoints)),
        checkpoint_bytes=sum(step.stored_bytes for step in checkpoints),
        generated_tokens=sum(steps[node].num_tokens for node in path if steps[node].generated),
        hits=usage.restores if usage else 0,
        created_at=round(entry.created_at, 3),
        last_used_at=round(usage.last_used if usage else entry.created_at, 3),
        ttl_s=abs(usage.ttl_s) or None if usage else None,
        default_ttl=usage.ttl_s <= 0 if usage else True,
        scope=entry.scope,
        tenant=root.tenant if root else "",
        preview=entry.preview,
    )
