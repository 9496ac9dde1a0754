"""What the store holds, for people: the saved prompts, and what they share."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from diskprefix.errors import StoreCorrupt
from diskprefix.store.schema import EntryRecord
from diskprefix.store.snapshot import Snapshot

log = logging.getLogger("diskprefix")


@dataclass(frozen=True, kw_only=True)
class EntryInfo:
    """One saved prompt. Bytes cover its whole path; `shared_bytes` is the part that other entries use as well.

    Times are seconds since the epoch. `hits` counts the requests that restored up to this entry's end or beyond.
    """

    id: str
    model: str
    num_tokens: int
    raw_bytes: int
    stored_bytes: int
    shared_bytes: int
    hits: int
    created_at: float
    last_used_at: float
    scope: str
    tenant: str
    preview: str


@dataclass(frozen=True)
class _Step:
    """What of a node counts here; its token ids would fill the memory."""

    parent: bytes
    position: int
    raw_bytes: int
    stored_bytes: int


def list_entries(snapshot: Snapshot) -> list[EntryInfo]:
    """All entries, the most recently used first. An entry whose path is damaged is left out and logged."""
    steps: dict[bytes, _Step] = {}
    paths: dict[bytes, tuple[EntryRecord, list[bytes]]] = {}
    for name, entry in snapshot.entries():
        try:
            paths[name] = (entry, _path(snapshot, name, steps))
        except StoreCorrupt as error:
            log.warning("entry %s left out: %s", name.hex(), error)
    users = Counter(node for _, path in paths.values() for node in path)
    infos = [_info(snapshot, name, entry, path, steps, users) for name, (entry, path) in paths.items()]
    return sorted(infos, key=lambda info: (-info.last_used_at, info.id))


def _path(snapshot: Snapshot, name: bytes, steps: dict[bytes, _Step]) -> list[bytes]:
    """Names of the nodes from `name` up to the first block; each is read once for all entries."""
    path: list[bytes] = []
    while True:
        if name not in steps:
            node = snapshot.node(name)
            if node is None:
                raise StoreCorrupt(f"node {name.hex()} is missing from its path")
            steps[name] = _Step(node.parent, node.position, node.raw_bytes, node.stored_bytes)
        path.append(name)
        step = steps[name]
        if step.position == 0:
            return path
        name = step.parent


def _info(
    snapshot: Snapshot,
    name: bytes,
    entry: EntryRecord,
    path: list[bytes],
    steps: dict[bytes, _Step],
    users: Counter[bytes],
) -> EntryInfo:
    root, usage = snapshot.root(entry.root), snapshot.usage(name)
    return EntryInfo(
        id=name.hex(),
        model=root.model if root else "",
        num_tokens=entry.num_tokens,
        raw_bytes=sum(steps[node].raw_bytes for node in path),
        stored_bytes=sum(steps[node].stored_bytes for node in path),
        shared_bytes=sum(steps[node].stored_bytes for node in path if users[node] > 1),
        hits=usage.restores if usage else 0,
        created_at=round(entry.created_at, 3),
        last_used_at=round(usage.last_used if usage else entry.created_at, 3),
        scope=entry.scope,
        tenant=root.tenant if root else "",
        preview=entry.preview,
    )
