"""Exports one saved prompt from a store into a file, and imports it into another store.

The time to live is not exported. Both directions work node by node, so memory does not grow with the entry. An export
takes a new snapshot for each node, because an open snapshot keeps a daemon from reusing pages. An import may write
several publications, the entry with the last one, so a kill leaves a shorter prefix of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import structs
from msgspec.structs import replace

from diskprefix.errors import PrefixGone, SettingsError, StoreCorrupt
from diskprefix.extras.exchange.entry_file import EntryNode, EntryReader, Manifest, refuse_existing, write_entry
from diskprefix.identity import differing, identity_fields
from diskprefix.printable import shown
from diskprefix.store.changes import NewNode, node_bytes
from diskprefix.store.pieces import PayloadLayout, split_payload
from diskprefix.store.schema import MAX_PREFILL_S, ModelRecord, NodeKind, NodeRecord, RootRecord, node_name
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.store import Publication, Store
from diskprefix.store.tree import PrefixTree
from diskprefix.store.verify import stored_pieces
from diskprefix.user_key import is_users

Advance = Callable[[int], None]
"""Takes the bytes of raw payload done since the last call."""

_BATCH_BYTES = 64 << 20
"""Bytes of raw payload in a publication, held in memory until it is written."""


def export_entry(store: Store, name: bytes, path: Path, *, force: bool, advance: Advance) -> int:
    """Writes the entry that ends at node `name` to the file `path`. Every payload is verified. Returns the file's size
    in bytes.

    Raises `StoreCorrupt` (the entry is damaged), `PrefixGone` (it was evicted in the meantime), `SettingsError` (the
    file exists, unless `force`, or the entry cannot be exported) or `StoreUnavailable`. Then no file is left.
    """
    if not force:
        refuse_existing(path)
    with store.snapshot() as snapshot:
        manifest, nodes = _read_entry(snapshot, store.secret, name)
    layout = PayloadLayout.parse(manifest.root.layout)

    def payloads() -> Iterator[memoryview]:
        for name, node in nodes.items():
            with store.snapshot() as snapshot:
                payload = _read_node(snapshot, name, node, layout)
            yield payload
            advance(len(payload))

    # Checkpoints repeat tokens of blocks, except at the end.
    token_ids = [node.token_ids for key, node in nodes.items() if node.kind == NodeKind.BLOCK or key == name]
    return write_entry(path, manifest, np.concatenate(token_ids), payloads(), force=force)


def _read_entry(snapshot: Snapshot, secret: int, name: bytes) -> tuple[Manifest, dict[bytes, NodeRecord]]:
    entry = snapshot.entry(name)
    if entry is None:
        raise PrefixGone(f"entry {name.hex()} was evicted a moment ago")
    root = snapshot.root(entry.root)
    if root is None:
        raise StoreCorrupt(f"entry {name.hex()} belongs to a root without a record; run `diskprefix verify`")
    nodes = PrefixTree(snapshot, secret).entry(name)
    if PayloadLayout.parse(root.layout).states and all(node.kind == NodeKind.BLOCK for node in nodes.values()):
        problem = "has lost the checkpoint at which it could be restored; send the prompt again, then export it"
        raise SettingsError(f"entry {name.hex()} {problem}")
    usages = [snapshot.usage(key) for key in nodes]
    seconds = [usage.prefill_s if usage and 0 <= usage.prefill_s <= MAX_PREFILL_S else 0.0 for usage in usages]
    described = [EntryNode(n.kind, n.position, n.num_tokens, s) for n, s in zip(nodes.values(), seconds, strict=True)]
    # The tokenizer's folder is on this machine only.
    record = structs.replace(root, created_at=entry.created_at, tokenizer="")
    manifest = Manifest(record, entry, tuple(described), is_own=is_users()(root.tenant))
    try:
        manifest.require_sound()
    except (StoreCorrupt, ValueError, TypeError, KeyError) as error:
        raise StoreCorrupt(f"entry {name.hex()} cannot be exported: {error}; run `diskprefix verify --fix`") from error
    return manifest, nodes


def _read_node(snapshot: Snapshot, name: bytes, node: NodeRecord, layout: PayloadLayout) -> memoryview:
    """Returns a copy of the raw payload."""
    if snapshot.usage(name) is None:
        raise PrefixGone("the entry was evicted while it was exported; save the prompt again, or raise the budget")
    payload, start = np.empty(layout.payload_bytes(node.num_tokens, node.kind), dtype=np.uint8), 0
    try:
        for piece in stored_pieces(snapshot, name, layout.pieces(node.num_tokens, node.kind)):
            stop = start + piece.expected.num_bytes
            piece.decode(payload[start:stop].reshape(piece.expected.num_rows, -1))
            start = stop
    except StoreCorrupt as error:
        advice = "`diskprefix verify --fix` removes it"
        raise StoreCorrupt(f"block {name.hex()} of the store is damaged: {error.message}; {advice}") from error
    return payload.data


def require_known_model(snapshot: Snapshot, reader: EntryReader) -> None:
    """Raises `SettingsError`, with what differs, unless the store was served with the model of the file.

    The tenant may differ: the user who imports decides for all tenants.
    """
    wanted, nearest = identity_fields(reader.manifest.root.identity), None
    known: list[ModelRecord | RootRecord] = [record for _, record in snapshot.models()]
    for record in [*known, *(record for _, record in snapshot.roots())]:
        try:
            names = differing(wanted, identity_fields(record.identity))
        except ValueError:
            continue
        if not names:
            return
        if nearest is None or len(names) < len(nearest[1]):
            nearest = (record.model, names)
    why = "but this store has seen no model yet, as a new daemon needs some seconds"
    if nearest is not None:
        why = f"which differs from '{shown(nearest[0])}' here in {', '.join(map(shown, nearest[1]))}"
    model, remedy = shown(reader.manifest.root.model), "serve that model with this store, or add --force"
    raise SettingsError(f"{reader.path} holds state of '{model}', {why}; {remedy}")


class Imported(NamedTuple):
    """The result of an import: the entry's new name, the nodes that were added and the bytes of their raw payloads, and
    the number of nodes that were evicted for them."""

    id: str
    new_nodes: int
    new_bytes: int
    evicted: int


def require_room(store: Store, reader: EntryReader) -> None:
    """Raises `StoreFull` if the entry does not fit the budget of the store."""
    nodes = _new_nodes(store.secret, reader)
    store.evictor.check_fits(sum(node_bytes(len(n.token_ids), [piece.max_bytes for piece in n.pieces]) for n in nodes))


def import_entry(store: Store, reader: EntryReader, *, advance: Advance) -> Imported:
    """Stores the entry of a file. Nodes that are stored already are not changed. The entry becomes visible at the end.

    Raises `StoreFull`, `StoreCorrupt`, `StoreUnavailable`, and `PrefixGone` if another process evicts the first nodes
    before the last ones are written.
    """
    manifest, all_nodes, waiting = reader.manifest, _new_nodes(store.secret, reader), list[NewNode]()
    # `inspect` would read a tokenizer from the folder that a forged file names.
    root_record = structs.replace(manifest.root, tokenizer="")
    num_new = new_bytes = evicted = waiting_bytes = 0
    epoch = store.epochs.of(root_record.tenant)
    for index, (node, size) in enumerate(zip(all_nodes, manifest.payload_bytes(), strict=True)):
        with store.snapshot() as snapshot:
            is_there = snapshot.has(node.name, node.parent, node.position, node.kind, node.token_ids.tobytes())
        if not is_there:
            waiting.append(replace(node, payload=split_payload(reader.read_payload(index), node.pieces)))
            num_new, new_bytes, waiting_bytes = num_new + 1, new_bytes + size, waiting_bytes + size
        advance(size)
        is_last = index == len(all_nodes) - 1
        if is_last or waiting_bytes >= _BATCH_BYTES:
            evicted += store.publish(
                Publication(
                    epoch=epoch,
                    root=manifest.entry.root,
                    root_record=root_record,
                    nodes=tuple(waiting),
                    last_node=node.name,
                    entry=manifest.entry if is_last else None,
                )
            )
            waiting, waiting_bytes = [], 0
    return Imported(all_nodes[-1].name.hex(), num_new, new_bytes, evicted)


def _new_nodes(secret: int, reader: EntryReader) -> list[NewNode]:
    """Returns the nodes of a file without their payloads. They get their names from the secret of the store."""
    parent, layout, nodes = reader.manifest.entry.root, PayloadLayout.parse(reader.manifest.root.layout), []
    for node in reader.manifest.nodes:
        token_ids, pieces = reader.token_ids[node.position : node.end], layout.pieces(node.num_tokens, node.kind)
        name = node_name(secret, parent, token_ids, node.kind)
        nodes.append(NewNode(name, parent, node.position, token_ids, node.kind, (), pieces, node.prefill_s))
        # A checkpoint continues its block; nothing continues a checkpoint.
        parent = name if node.kind == NodeKind.BLOCK else parent
    return nodes
