"""Exports one saved prompt from a store into a file, and imports it into another store.

The time to live is not exported. Both work node by node, so memory does not grow with the entry. An export takes a new
snapshot for each node, because an open snapshot keeps a daemon from reusing pages. An import may write several
publications, the entry with the last one, so a kill leaves a shorter prefix of the same prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import structs

from diskprefix.errors import PrefixGone, SettingsError, StoreCorrupt
from diskprefix.extras.exchange.entry_file import EntryNode, EntryReader, Manifest, refuse_existing, write_entry
from diskprefix.identity import differing, identity_fields
from diskprefix.printable import shown
from diskprefix.store.changes import NewNode, node_bytes
from diskprefix.store.pieces import PayloadLayout
from diskprefix.store.schema import MAX_PREFILL_S, Kind, ModelRecord, NodeRecord, RootRecord, node_name
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.store import Publication, Store
from diskprefix.store.tree import PrefixTree
from diskprefix.store.verify import stored_pieces

Advance = Callable[[int], None]
"""Takes the bytes of raw payload done since the last call."""

_BATCH_BYTES = 64 << 20
"""Raw payload in one publication, which is kept in memory until it is written."""
_SHOWN_FIELDS = 4


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
    token_ids = [node.token_ids for one, node in nodes.items() if node.kind == Kind.BLOCK or one == name]
    return write_entry(path, manifest, np.concatenate(token_ids), payloads(), force=force)


class Imported(NamedTuple):
    """The result of an import: the new name of the entry, the nodes that were not stored before and the bytes of their
    raw payloads, and the nodes that were evicted for them."""

    id: str
    new_nodes: int
    new_bytes: int
    evicted: int


def require_known_model(snapshot: Snapshot, reader: EntryReader) -> None:
    """Raises `SettingsError`, with what differs, unless the store was served with the model of the file.

    The tenant may differ: the user who imports decides for all tenants.
    """
    wanted = reader.manifest.root
    known: list[ModelRecord | RootRecord] = [record for _, record in snapshot.models()]
    known += [record for _, record in snapshot.roots()]
    differences = [(_differences(wanted.identity, record.identity), record.model) for record in known]
    if any(not differs for differs, _ in differences):
        return
    why = "but this store has seen no model yet"
    if differences:
        differs, model = min(differences, key=lambda found: len(found[0]))
        more = f" and {len(differs) - _SHOWN_FIELDS} more" if len(differs) > _SHOWN_FIELDS else ""
        why = f"but compared with '{shown(model)}' here, {', '.join(differs[:_SHOWN_FIELDS])}{more}"
    advice = "serve that model with this store, or add --force"
    raise SettingsError(f"{reader.path} holds state of '{shown(wanted.model)}', {why}; {advice}")


def require_room(store: Store, reader: EntryReader) -> None:
    """Raises `StoreFull` if the entry does not fit the budget of the store."""
    nodes = _new_nodes(store.secret, reader)
    store.evictor.check_fits(sum(node_bytes(len(n.token_ids), [piece.max_bytes for piece in n.pieces]) for n in nodes))


def import_entry(store: Store, reader: EntryReader, *, advance: Advance) -> Imported:
    """Stores the entry of a file. Nodes that are stored already stay as they are. The entry is visible at the end.

    Raises `StoreFull`, `StoreCorrupt`, `StoreUnavailable`, and `PrefixGone` if another process evicts the first nodes
    before the last ones are written.
    """
    name, new_nodes, new_bytes, evicted = b"", 0, 0, 0
    for publication in _publications(store, reader, advance):
        evicted += store.publish(publication)
        name = publication.last_node or name
        new_nodes, new_bytes = new_nodes + len(publication.nodes), new_bytes + publication.payload_bytes
    return Imported(name.hex(), new_nodes, new_bytes, evicted)


def _publications(store: Store, reader: EntryReader, advance: Advance) -> Iterator[Publication]:
    """Yields publications of the missing nodes, from the first block on. Publish each before the next is taken."""
    manifest, all_nodes = reader.manifest, _new_nodes(store.secret, reader)
    nodes: list[NewNode] = []
    for index, (node, size) in enumerate(zip(all_nodes, manifest.payload_bytes(), strict=True)):
        with store.snapshot() as snapshot:
            is_there = _is_there(snapshot, node)
        if not is_there:
            nodes.append(replace(node, payload=reader.read_payload(index)))
        advance(size)
        is_last = node is all_nodes[-1]
        if is_last or sum(len(new.payload) for new in nodes) >= _BATCH_BYTES:
            yield Publication(
                store_id=store.store_id,
                root=manifest.entry.root,
                root_record=manifest.root,
                nodes=tuple(nodes),
                last_node=node.name,
                entry=manifest.entry if is_last else None,
            )
            nodes = []


def _new_nodes(secret: int, reader: EntryReader) -> list[NewNode]:
    """Returns the nodes of a file without their payloads. They get their names from the secret of the store."""
    parent, layout = reader.manifest.entry.root, PayloadLayout.parse(reader.manifest.root.layout)
    found = []
    for node in reader.manifest.nodes:
        token_ids = reader.token_ids[node.position : node.end]
        name, pieces = node_name(secret, parent, token_ids, node.kind), layout.pieces(node.num_tokens, node.kind)
        found.append(
            NewNode(name, parent, node.position, token_ids, node.kind, memoryview(b""), pieces, node.prefill_s)
        )
        # A checkpoint continues its block; nothing continues a checkpoint.
        parent = name if node.kind == Kind.BLOCK else parent
    return found


def _is_there(snapshot: Snapshot, node: NewNode) -> bool:
    try:
        return snapshot.has(node.name, node.parent, node.position, node.kind, node.token_ids.tobytes())
    except StoreCorrupt as error:
        raise _damaged(node.name, error) from error


def _read_entry(snapshot: Snapshot, secret: int, name: bytes) -> tuple[Manifest, dict[bytes, NodeRecord]]:
    entry = snapshot.entry(name)
    if entry is None:
        raise PrefixGone(f"entry {name.hex()} was evicted a moment ago")
    root = snapshot.root(entry.root)
    if root is None:
        raise StoreCorrupt(f"entry {name.hex()} belongs to a root without a record; run `diskprefix verify`")
    nodes = PrefixTree(snapshot, secret).entry(name)
    if PayloadLayout.parse(root.layout).states and all(node.kind == Kind.BLOCK for node in nodes.values()):
        raise SettingsError(
            f"entry {name.hex()} has lost the checkpoint that it could be restored at; send the prompt again, then "
            "export it"
        )
    usages = [snapshot.usage(one) for one in nodes]
    seconds = [usage.prefill_s if usage and 0 <= usage.prefill_s <= MAX_PREFILL_S else 0.0 for usage in usages]
    described = [EntryNode(n.kind, n.position, n.num_tokens, s) for n, s in zip(nodes.values(), seconds, strict=True)]
    # The folder of the tokenizer is one of this machine.
    root = structs.replace(root, created_at=entry.created_at, tokenizer="")
    manifest = Manifest(root, entry, tuple(described))
    try:
        manifest.require_sound()
    except (StoreCorrupt, ValueError, TypeError, KeyError) as error:
        raise StoreCorrupt(f"entry {name.hex()} cannot be exported: {error}; run `diskprefix verify --fix`") from error
    return manifest, nodes


def _read_node(snapshot: Snapshot, name: bytes, node: NodeRecord, layout: PayloadLayout) -> memoryview:
    """Returns a copy of the raw payload."""
    if snapshot.usage(name) is None:
        raise PrefixGone("the entry was evicted while it was exported; save the prompt again, or raise the budget")
    payload = np.empty(layout.payload_bytes(node.num_tokens, node.kind), dtype=np.uint8)
    start = 0
    try:
        for piece in stored_pieces(snapshot, name, layout.pieces(node.num_tokens, node.kind)):
            end = start + piece.expected.num_bytes
            piece.decode(payload[start:end].reshape(piece.expected.num_rows, -1))
            start = end
    except StoreCorrupt as error:
        raise _damaged(name, error) from error
    return payload.data


def _damaged(name: bytes, error: StoreCorrupt) -> StoreCorrupt:
    return StoreCorrupt(
        f"block {name.hex()} of the store is damaged: {error.message}; `diskprefix verify --fix` removes it"
    )


def _differences(wanted: str, known: str) -> Sequence[str]:
    """Returns how the identity of a file differs from that of a model, in words: the weights first, the layout, which
    follows from other fields, last."""
    try:
        there, here = identity_fields(wanted), identity_fields(known)
    except ValueError:
        return ["an identity cannot be read"]
    names = sorted(differing(here, there), key=lambda name: (name != "weights_digest", name.startswith("layout"), name))
    return [f"{name} is '{shown(there.get(name, ''))}' instead of '{shown(here.get(name, ''))}'" for name in names]
