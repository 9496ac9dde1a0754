"""Prompts and their state, each a function of its number, so that a process can check what another one stored."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from diskprefix.store.changes import NewNode
from diskprefix.store.pieces import PayloadLayout
from diskprefix.store.schema import EntryRecord, Kind, RootRecord, node_name
from diskprefix.store.store import Publication, Store
from diskprefix.tokens import TokenIds, root_hash

BLOCK = 16
_FAMILY = 5
"""The number of consecutive prompts that share a beginning."""


@dataclass(frozen=True)
class Model:
    """Of whose state a prompt's nodes are: the fields of `tests.synthetic_model.dense_layout`."""

    name: str
    layers: int
    heads: int
    head_dim: int
    dtype: str
    vocab_size: int

    @property
    def identity(self) -> str:
        """The text that a daemon would give for such a model."""
        values = {
            "fingerprint": {"weights_digest": self.name, "dtype": self.dtype},
            "block_size": BLOCK,
            "layout_version": 1,
            "layout": self.layout,
            "salt": "",
        }
        return json.dumps(values, sort_keys=True, separators=(",", ":"))

    @property
    def root(self) -> bytes:
        return root_hash(self.identity)

    @property
    def layout(self) -> str:
        """The text that `kv.layout.Layout.describe` writes for such a model."""
        tensors = [f"{layer}.{part}" for layer in range(self.layers) for part in ("keys", "values")]
        group = {"heads": self.heads, "head_dim": self.head_dim, "dtype": self.dtype, "tensors": tensors}
        logits = [self.vocab_size, self.dtype]
        return json.dumps({"version": 1, "groups": [group], "logits": logits}, separators=(",", ":"))


MODELS = (
    Model("crash-small", layers=1, heads=2, head_dim=32, dtype="bfloat16", vocab_size=25),
    Model("crash-medium", layers=2, heads=2, head_dim=128, dtype="bfloat16", vocab_size=1000),
    Model("crash-wide", layers=1, heads=2, head_dim=3072, dtype="float32", vocab_size=1000),
)
"""Blocks of 4 KiB, of 32 KiB, and of 768 KiB, which is two pieces."""


def model_of(number: int) -> Model:
    return MODELS[number // _FAMILY % len(MODELS)]


def token_ids(number: int) -> TokenIds:
    """20 to 110 tokens, the first of them shared with the prompts of the same family."""
    shared = np.random.default_rng([1, number // _FAMILY])
    own = np.random.default_rng([2, number])
    parts = [shared.integers(0, 1000, shared.integers(16, 64)), own.integers(0, 1000, own.integers(4, 48))]
    return np.concatenate(parts).astype(np.int32)


def payload(prefix: TokenIds, num_bytes: int) -> memoryview:
    """Bytes that depend on the whole prefix, so that a mix-up shows, and not on the store; they can be compressed."""
    rng = np.random.default_rng([len(prefix), *prefix[-BLOCK:].tolist(), int(prefix.sum())])
    return rng.integers(0, 24, num_bytes, dtype=np.uint8).data


def path(secret: int, number: int) -> list[tuple[bytes, bytes, TokenIds]]:
    """Name, parent and token ids of the nodes of a prompt: its blocks, then its tail."""
    ids, parent = token_ids(number), model_of(number).root
    nodes: list[tuple[bytes, bytes, TokenIds]] = []
    for start in range(0, len(ids) + 1, BLOCK):
        part = ids[start : start + BLOCK]
        kind = Kind.BLOCK if len(part) == BLOCK else Kind.TAIL
        nodes.append((node_name(secret, parent, part, kind), parent, part))
        parent = nodes[-1][0]
    return nodes


def last_node(secret: int, number: int) -> bytes:
    """The node that a prompt's entry ends with."""
    return path(secret, number)[-1][0]


def publication(store: Store, number: int) -> Publication:
    """Returns the publication of a prompt: nodes, entry and history."""
    model, ids = model_of(number), token_ids(number)
    layout = PayloadLayout.parse(model.layout)
    nodes: list[NewNode] = []
    for index, (name, parent, part) in enumerate(path(store.secret, number)):
        kind = Kind.BLOCK if len(part) == BLOCK else Kind.TAIL
        pieces = layout.pieces(len(part), kind)
        start = index * BLOCK
        raw = payload(ids[: start + len(part)], sum(piece.num_bytes for piece in pieces))
        nodes.append(NewNode(name, parent, start, part, kind, raw, pieces, prefill_s=0.1))
    return Publication(
        store_id=store.store_id,
        root=model.root,
        root_record=RootRecord(
            model=model.name, block_size=BLOCK, layout=model.layout, created_at=0.0, identity=model.identity
        ),
        nodes=tuple(nodes),
        last_node=nodes[-1].name,
        entry=EntryRecord(root=model.root, num_tokens=len(ids), scope="full", preview=str(number), created_at=0.0),
        prompt=ids,
    )
