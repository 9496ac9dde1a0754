"""Publications built by hand, for tests of the store."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from diskprefix.store.schema import EntryRecord, Kind, RootRecord
from diskprefix.store.store import NewNode, Publication, Store
from diskprefix.tokens import TokenIds, block_hash

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


class Clock:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def open_store(path: Path, *, budget_bytes: int = 32 << 20, clock: Clock | None = None) -> Store:
    return Store.open(path, budget_bytes=budget_bytes, clock=clock or Clock())


def prompt(seed: int, num_tokens: int) -> TokenIds:
    return np.random.default_rng(seed).integers(0, 1000, num_tokens).astype(np.int32)


def payload_of(token_ids: TokenIds, num_bytes: int) -> memoryview:
    """Bytes that depend on the tokens, so that a mix-up shows."""
    seed = int(np.abs(token_ids).sum()) + len(token_ids)
    return memoryview(np.random.default_rng(seed).bytes(num_bytes))


def publication(store: Store, token_ids: TokenIds, *, payload_bytes: int = 20_000, root: bytes = ROOT) -> Publication:
    """The whole prompt: its full blocks, its tail, its entry and its place in the history."""
    parent, nodes = root, []
    for i, name in enumerate(chain(store.secret, root, token_ids, BLOCK)):
        tokens = token_ids[i * BLOCK : (i + 1) * BLOCK]
        nodes.append(NewNode(name, parent, i * BLOCK, tokens, Kind.BLOCK, payload_of(tokens, payload_bytes)))
        parent = name
    start = len(nodes) * BLOCK
    rest = token_ids[start:]
    tip = block_hash(store.secret, parent, rest)
    nodes.append(NewNode(tip, parent, start, rest, Kind.TAIL, payload_of(rest, 100 + 10 * len(rest))))
    return Publication(
        root=root,
        root_record=RootRecord(model="tiny", block_size=BLOCK, layout="test", created_at=0.0),
        nodes=tuple(nodes),
        tip=tip,
        entry=EntryRecord(root=root, num_tokens=len(token_ids), scope="full", preview="hello", created_at=1.0),
        prompt=token_ids,
        history_limit=4,
    )


def is_whole(store: Store, pub: Publication) -> bool:
    """Whether every node of the publication can be read back, byte for byte."""
    with store.snapshot() as snapshot:
        return all(
            (record := snapshot.node(node.name)) is not None
            and record.parent == node.parent
            and record.token_ids.tobytes() == node.token_ids.tobytes()
            and bytes(snapshot.payload(node.name) or b"") == bytes(node.payload)
            for node in pub.nodes
        )
