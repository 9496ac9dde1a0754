"""Publications built by hand, for tests of the store."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from msgspec.structs import replace

from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.store.changes import NewNode
from diskprefix.prefixstore.store.codec.codec import decode_piece, piece_seed
from diskprefix.prefixstore.store.ghosts import newest_first
from diskprefix.prefixstore.store.pieces import PayloadLayout, split_payload
from diskprefix.prefixstore.store.schema import EntryRecord, NodeKind, RootRecord, node_name, piece_key
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.store import Publication, Store
from diskprefix.prefixstore.store.verify import verify_index, verify_payloads
from diskprefix.tokens import PromptDigest, TokenIds, TokenPath, block_hash

ROOT = b"r" * 16
BLOCK = 16


def chain(secret: int, root: bytes, token_ids: TokenIds, block_size: int) -> list[bytes]:
    """Names of all full blocks of `token_ids`, in order; the partial rest is not named."""
    names: list[bytes] = []
    parent = root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(secret, parent, token_ids[start : start + block_size])
        names.append(parent)
    return names


@dataclass
class Clock:
    """A clock that only moves when told to."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def names_of_every_run() -> Iterator[None]:
    """A store that is created meanwhile has the same id and secret in every run. A secret that is drawn decides the
    order of keys, and which of two nodes of equal rank is evicted."""
    with mock.patch("secrets.token_bytes", bytes), mock.patch("secrets.randbits", return_value=7):
        yield


def open_store(path: Path, *, budget_bytes: int = 32 << 20, clock: Clock | None = None) -> Store:
    return Store(path, budget_bytes=budget_bytes, clock=clock or Clock())


def prompt(seed: int, num_tokens: int) -> TokenIds:
    return np.random.default_rng(seed).integers(0, 1000, num_tokens).astype(np.int32)


def layout_of(block_bytes: int, state_bytes: int = 0) -> str:
    """The layout text of a model whose blocks of `BLOCK` tokens take about that much: two tensors of two heads. With
    `state_bytes` it has a layer more, whose two states take about that much."""
    group = {"heads": 2, "head_dim": max(1, block_bytes // (8 * BLOCK)), "dtype": "bfloat16", "tensors": ["0.k", "0.v"]}
    text: dict[str, object] = {"version": 1, "groups": [group], "logits": [25, "float32"]}
    if state_bytes:
        width = max(1, state_bytes // 32)
        text["states"] = [{"shape": [4, width], "rows": 4, "dtype": "float32", "tensors": ["1.conv0", "1.recurrent0"]}]
    return json.dumps(text)


def payload_of(token_ids: TokenIds, num_bytes: int) -> memoryview:
    """Bytes that depend on the tokens, so that a mix-up shows."""
    return memoryview(_bytes_of(int(np.abs(token_ids).sum()) + len(token_ids), num_bytes))


@lru_cache(maxsize=256)
def _bytes_of(seed: int, num_bytes: int) -> bytes:
    """Remembers what the damaged stores of `tools/bench corruption` are asked for again and again."""
    return np.random.default_rng(seed).bytes(num_bytes)


def new_node(
    secret: int,
    parent: bytes,
    prompt: TokenIds,
    start: int,
    end: int,
    kind: NodeKind,
    layout: str,
    *,
    replaces: bool = False,
) -> NewNode:
    """The node of tokens `start` to `end` of a prompt, whose payload has the size that the layout says."""
    token_ids = prompt[start:end]
    name = node_name(secret, parent, token_ids, kind)
    pieces = PayloadLayout.parse(layout).pieces(len(token_ids), kind)
    seen = prompt[:end] if kind == NodeKind.CHECKPOINT else token_ids
    payload = payload_of(seen, sum(piece.num_bytes for piece in pieces))
    return NewNode(
        name,
        parent,
        start,
        token_ids,
        kind,
        split_payload(payload, pieces),
        pieces,
        prefill_s=0.5,
        replaces=replaces,
    )


def publication(
    store: Store,
    token_ids: TokenIds,
    *,
    payload_bytes: int = 20_000,
    root: bytes = ROOT,
    layout: str = "",
    checkpoints: Collection[int] = (),
    replaces: bool = False,
    end_kind: NodeKind = NodeKind.TAIL,
) -> Publication:
    """The whole prompt: its full blocks, its tail, its entry and its place in the history.

    `checkpoints`: after how many tokens there is one. `replaces`: see `NewNode`. `end_kind`: a
    block or a checkpoint ends the prompt without its logits.
    """
    layout = layout or layout_of(payload_bytes)
    nodes: list[NewNode] = []
    parent, end = root, len(token_ids)
    rest = end - end % BLOCK

    def add(start: int, end: int, kind: NodeKind) -> bytes:
        nodes.append(new_node(store.secret, parent, token_ids, start, end, kind, layout, replaces=replaces))
        return nodes[-1].name

    for start in range(0, rest + 1, BLOCK):
        for point in sorted(set(checkpoints) & set(range(start, start + BLOCK))):
            add(start, point, NodeKind.CHECKPOINT)
        if start < rest:
            parent = add(start, start + BLOCK, NodeKind.BLOCK)
    last_node = add(rest, end, end_kind) if end_kind != NodeKind.BLOCK or rest < end else parent
    return Publication(
        epoch=store.epochs.of(""),
        root=root,
        root_record=RootRecord(model="tiny", block_size=BLOCK, layout=layout, created_at=0.0),
        nodes=tuple(nodes),
        last_node=last_node,
        entry=EntryRecord(
            root=root,
            num_tokens=len(token_ids),
            scope="full",
            preview="hello",
            created_at=1.0,
            came_from=PromptDigest.of(store.secret, token_ids),
        ),
        prompt=TokenPath(store.secret, root, token_ids, BLOCK),
    )


def part_of(pub: Publication, **changes: Any) -> Publication:
    """Returns the publication of a part of a prompt, while the rest is computed: its entry is partial."""
    assert pub.entry is not None
    entry = replace(pub.entry, kind="partial", num_tokens=0)
    return replace(pub, last_node=None, entry=entry, prompt=None, **changes)


def of_root(pub: Publication, record: RootRecord, **changes: Any) -> Publication:
    """Returns a publication of the tenant of a root's record."""
    return replace(pub, epoch=pub.epoch._replace(tenant=record.tenant), root_record=record, **changes)


def recent_prompts(snapshot: Snapshot, root: bytes, limit: int) -> list[tuple[bytes, TokenIds]]:
    """Returns the last `limit` prompts that were seen under a root, oldest first, as pairs of group and token ids."""
    return [(one.record.group, one.token_ids) for one in islice(newest_first(snapshot, root), limit)][::-1]


def stored_texts(snapshot: Snapshot) -> dict[bytes, TokenIds]:
    """Returns the token ids of each path of stored nodes, by the name of its last node, whatever is listed."""
    nodes = {name: node for name in snapshot.keys("usage") if (node := snapshot.node(name)) is not None}
    texts = {}
    for name in nodes.keys() - {node.parent for node in nodes.values()}:
        ids, at = list[TokenIds](), name
        while at in nodes:
            ids.insert(0, nodes[at].token_ids)
            at = nodes[at].parent
        texts[name] = np.concatenate(ids)
    return texts


def read_payload(snapshot: Snapshot, node: NewNode) -> bytes:
    """Returns the stored payload of a node, decoded. Raises `StoreCorrupt`."""
    parts: list[bytes] = []
    for index, piece in enumerate(node.pieces):
        stored = snapshot.piece(node.name, index)
        if stored is None:
            raise StoreCorrupt(f"piece {index} is missing")
        out = np.empty((piece.num_rows, piece.row_bytes), dtype=np.uint8)
        decode_piece(stored, piece, piece_seed(node.name, index), out)
        parts.append(out.tobytes())
    return b"".join(parts)


def damage(store: Store, name: bytes) -> None:
    """Flips a bit in the first stored piece of a node."""
    with store.changes() as changes:
        piece = bytearray(changes.piece(name, 0) or b"")
        piece[-1] ^= 64
        changes._put_record("payloads", piece_key(name, 0), bytes(piece))


def change_format(path: Path, version: int) -> None:
    """Make a store say that it has another format, as a diskprefix that writes that format would."""
    store = Store(path)
    with store.changes() as changes:
        changes.put_meta("format", struct.pack("<I", version))
    store.close()


def is_whole(store: Store, pub: Publication) -> bool:
    """Tells whether every node of the publication can be read back, byte for byte."""
    with store.snapshot() as snapshot:
        return all(
            (record := snapshot.node(node.name)) is not None
            and record.parent == node.parent
            and record.token_ids.tobytes() == node.token_ids.tobytes()
            and read_payload(snapshot, node) == b"".join(node.payload)
            for node in pub.nodes
        )


def is_clean(store: Store) -> bool:
    index = verify_index(store)
    return not index.problems and not verify_payloads(store, index.stored_bytes, lambda _: None).problems
