"""A store with every kind of record, as the current format has it, and what can be read of a store.

`python -m tests.prefixstore.store.released_format` adds the current format to the folder `formats`, once: what is
released never changes.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import tempfile
from pathlib import Path
from typing import get_args

import numpy as np
from msgspec.structs import astuple, replace

from diskprefix.prefixstore.store.changes import NewNode
from diskprefix.prefixstore.store.codec.codec import Codec, decode_piece, piece_seed
from diskprefix.prefixstore.store.compact import copy_store
from diskprefix.prefixstore.store.epochs import of_tenants, purges_of
from diskprefix.prefixstore.store.note_record import ENCODED_TEXT, NoteKind
from diskprefix.prefixstore.store.notes import Notes
from diskprefix.prefixstore.store.pieces import PayloadLayout, split_payload
from diskprefix.prefixstore.store.schema import FORMAT_VERSION, EntryKind, ModelRecord, OptionValue, RootRecord
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.store import Publication, Store
from tests.prefixstore.store.building import (
    BLOCK,
    ROOT,
    Clock,
    layout_of,
    names_of_every_run,
    open_store,
    prompt,
    publication,
    recent_prompts,
)

FORMATS = Path(__file__).parent / "formats"
LAYOUT = layout_of(8_000, state_bytes=4_000)


def with_waves(node: NewNode) -> NewNode:
    """The node with values as a model has them, which the planes make shorter."""
    values = np.sin(np.arange(node.payload_bytes // 4 + 1, dtype=np.float32) * (0.37 + node.position))
    halves = values.view(np.uint16)[1::2]
    payload = memoryview(np.repeat(halves, 2).tobytes()[: node.payload_bytes])
    return replace(node, payload=split_payload(payload, node.pieces))


def write(folder: Path) -> None:
    """Writes the store into a folder: blocks, tails, checkpoints, ghosts, each kind of entry and note, pieces in each
    codec."""
    store = open_store(folder, clock=Clock(1.7e9))
    shared = prompt(1, 3 * BLOCK + 5)
    found: list[tuple[Codec, Publication]] = [
        (Codec.PLANES, publication(store, shared, layout=LAYOUT, checkpoints=[BLOCK + 3, 3 * BLOCK])),
        (Codec.ZSTD, publication(store, np.concatenate([shared[: 2 * BLOCK], prompt(2, BLOCK + 1)]), layout=LAYOUT)),
        (Codec.RAW, publication(store, prompt(3, 2 * BLOCK), layout=LAYOUT)),
    ]
    for number, kind in enumerate(get_args(EntryKind)):
        made = publication(store, prompt(10 + number, BLOCK + number), layout=LAYOUT)
        assert made.entry is not None
        entry = replace(made.entry, kind=kind, ttl_s=number * 60, share=f"share {number}")
        found.append((Codec.PLANES, replace(made, entry=entry)))
    found.append((Codec.RAW, publication(store, np.concatenate([shared[:BLOCK], prompt(4, BLOCK)])).without_nodes()))
    for codec, made in found:
        store.codec = codec
        store.publish(replace(made, nodes=tuple(map(with_waves, made.nodes)), prompt_group=b"g" * 8))
    notes = Notes(store, lambda: None)
    for kind in NoteKind:
        content = f"a note of kind {kind.value}".encode()
        record = RootRecord(model="tiny", block_size=BLOCK, layout=LAYOUT, created_at=0.0)
        notes.put(store.epochs.of(""), ROOT, record, kind, "id", content, 1e9)
    notes.write()
    with store.changes() as changes:
        changes.record_purge(of_tenants(["somebody"]))
        options = {"kv_type": OptionValue("auto", "auto"), "context": OptionValue("4096", "short")}
        changes.put_model(
            ModelRecord(model="tiny", identity="{}", builds=(b"a" * 8, b"b" * 8), options=options, state_kind="token")
        )
    store.close()


def contents(store: Store) -> dict[str, str]:
    """Returns what a store holds, read as a restore reads it: for each record a digest of its values."""
    notes = Notes(store, lambda: None)
    with store.snapshot() as snapshot:
        found = {f"node {name.hex()}": node_text(snapshot, name) for name in snapshot.keys("usage")}
        found["purges"] = str(purges_of(snapshot).ids)
        for key, model in snapshot.models():
            found[f"model {key.hex()}"] = str(astuple(model))
        for name, entry in snapshot.entries():
            found[f"entry {name.hex()}"] = str(astuple(entry))
        for root, record in snapshot.roots():
            found[f"root {root.hex()}"] = f"{record.model} {record.block_size} {record.layout}"
            prompts = [token_ids.tolist() for _, token_ids in recent_prompts(snapshot, root, 100)]
            found[f"prompts {root.hex()}"] = str(prompts)
            # A store that was written before a kind came has no notes of it.
            for kind in [*NoteKind, ENCODED_TEXT]:
                if (note := notes.get(root, record.tenant, kind, "id")) is not None:
                    found[f"note {root.hex()} {int(kind)}"] = str(note)
    return {key: hashlib.sha256(text.encode()).hexdigest()[:32] for key, text in found.items()}


def node_text(snapshot: Snapshot, name: bytes) -> str:
    """Returns a node's record, and its payload decoded."""
    node = snapshot.node(name)
    assert node is not None
    root = snapshot.root(node.root)
    assert root is not None
    digest = hashlib.sha256()
    for index, piece in enumerate(PayloadLayout.parse(root.layout).pieces(node.num_tokens, node.kind)):
        stored = snapshot.piece(name, index)
        assert stored is not None
        out = np.empty((piece.num_rows, piece.row_bytes), dtype=np.uint8)
        decode_piece(stored, piece, piece_seed(name, index), out)
        digest.update(out.tobytes())
    place = f"{node.parent.hex()} {node.position} {node.kind.value}"
    return f"{place} {node.token_ids.tolist()} {digest.hexdigest()}"


def record() -> Path:
    """Writes the current format's store and its contents to `formats`. Raises `FileExistsError` if they are there."""
    with tempfile.TemporaryDirectory() as name, names_of_every_run():
        folder, copy = Path(name, "store"), Path(name, "copy")
        write(folder)
        copy_store(folder, copy)
        store = Store(copy, read_only=True, clock=Clock(1.7e9))
        found = contents(store)
        store.close()
        target = FORMATS / f"{FORMAT_VERSION}.mdb.gz"
        with target.open("xb") as file:
            file.write(gzip.compress((copy / "data.mdb").read_bytes(), mtime=0))
        with target.with_suffix("").with_suffix(".json").open("x", encoding="utf-8") as text:
            text.write(json.dumps(found, indent=1) + "\n")
    return target


if __name__ == "__main__":
    print(record())
