"""Store files of format 1, written with plain LMDB calls as the documentation of that format says."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import numpy as np
import xxhash
import zstandard

from diskprefix.tokens import TokenIds

BLOCK = 16
SECRET, STORE_ID, CREATED_AT = 0x1122334455667788, bytes(range(16)), 1_690_000_000.25
DATABASES = ("meta", "roots", "nodes", "usage", "payloads", "entries", "history")

SMALL = {
    "version": 1,
    "groups": [
        {"heads": 2, "head_dim": 16, "dtype": "bfloat16", "tensors": ["0.keys", "0.values", "1.keys", "1.values"]},
        {"heads": 1, "head_dim": 8, "dtype": "float32", "tensors": ["2.keys", "2.values"]},
    ],
    "logits": [50, "float32"],
}
WIDE = {
    # Rows of 128 KiB in a block, so that its payload is cut.
    "version": 1,
    "groups": [{"heads": 3, "head_dim": 2048, "dtype": "float32", "tensors": ["0.keys", "0.values"]}],
    "logits": [50, "bfloat16"],
}
_ITEMSIZE = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, eq=False)
class OldNode:
    """`kind` 0: a block, 1: a tail."""

    name: bytes
    parent: bytes
    root: bytes
    position: int
    token_ids: TokenIds
    kind: int
    payload: bytes
    last_used: float
    hits: int

    def record(self) -> bytes:
        """The header, then the token ids."""
        size = len(self.payload)
        place = struct.pack("<16s16sII", self.parent, self.root, self.position, len(self.token_ids))
        content = struct.pack("<BB6xQQQ", 0, self.kind, size, size, xxhash.xxh3_64_intdigest(self.payload))
        return place + content + self.token_ids.astype("<i4").tobytes()


@dataclass
class Format1File:
    """What a file of format 1 is to hold; `write` writes it."""

    folder: Path
    roots: dict[bytes, dict[str, Any]] = field(default_factory=dict)
    nodes: dict[bytes, OldNode] = field(default_factory=dict)
    entries: dict[bytes, dict[str, Any]] = field(default_factory=dict)
    history: dict[bytes, list[TokenIds]] = field(default_factory=dict)

    def add_root(self, root: bytes, layout: dict[str, Any], *, created_at: float = CREATED_AT) -> None:
        text = json.dumps(layout, separators=(",", ":"))
        self.roots[root] = {"model": "tiny", "block_size": BLOCK, "layout": text, "created_at": created_at}

    def add_prompt(self, root: bytes, token_ids: TokenIds, *, last_used: float, hits: int = 0) -> list[OldNode]:
        """A saved prompt: its blocks, its tail, its entry and its place in the history. Nodes that are there stay."""
        path: list[OldNode] = []
        starts = range(0, len(token_ids) + 1, BLOCK)
        for start in starts:
            ids = token_ids[start : start + BLOCK]
            path.append(self._node(path[-1].name if path else root, root, start, ids, last_used, hits))
        self.entries[path[-1].name] = {
            "root": root,
            "num_tokens": len(token_ids),
            "scope": "auto:30",
            "preview": f"prompt of {len(token_ids)}",
            "created_at": last_used - 60.0,
        }
        self.history.setdefault(root, []).append(token_ids)
        return path

    def below(self, name: bytes) -> set[bytes]:
        """The node and all that continues it."""
        found = {name}
        for node in sorted(self.nodes.values(), key=lambda node: node.position):
            if node.parent in found:
                found.add(node.name)
        return found

    def write(self) -> Format1File:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        with self.edit() as (txn, databases):
            for key, value in (
                (b"format", struct.pack("<I", 1)),
                (b"store_id", STORE_ID),
                (b"secret", struct.pack("<Q", SECRET)),
                (b"created_at", struct.pack("<d", CREATED_AT)),
            ):
                txn.put(key, value, db=databases["meta"])
            for root, record in self.roots.items():
                txn.put(root, msgspec.msgpack.encode(record), db=databases["roots"])
            for node in self.nodes.values():
                self._write_node(txn, databases, node)
            for name, entry in self.entries.items():
                txn.put(name, msgspec.msgpack.encode(entry), db=databases["entries"])
            for root, prompts in self.history.items():
                for number, prompt in enumerate(prompts):
                    value = zstandard.ZstdCompressor(level=3).compress(prompt.astype("<i4").tobytes())
                    txn.put(root + struct.pack(">Q", number), value, db=databases["history"])
        return self

    @contextmanager
    def edit(self) -> Iterator[tuple[lmdb.Transaction, dict[str, Any]]]:
        """A write transaction on the file, and its databases."""
        env = lmdb.open(str(self.folder), map_size=1 << 30, max_dbs=len(DATABASES), mode=0o600)
        try:
            databases = {name: env.open_db(name.encode()) for name in DATABASES}
            with env.begin(write=True) as txn:
                yield txn, databases
        finally:
            env.close()

    def damage(self, database: str, key: bytes, offset: int, *, bit: int = 0) -> None:
        """Flip one bit of a record."""
        with self.edit() as (txn, databases):
            value = bytearray(txn.get(key, db=databases[database]) or b"")
            value[offset] ^= 1 << bit
            txn.put(key, bytes(value), db=databases[database])

    def _node(self, parent: bytes, root: bytes, position: int, ids: TokenIds, last_used: float, hits: int) -> OldNode:
        name = xxhash.xxh3_128_digest(parent + ids.astype("<i4").tobytes(), seed=SECRET)
        if name not in self.nodes:
            kind = 0 if len(ids) == BLOCK else 1
            payload = np.random.default_rng(list(name)).bytes(self._payload_bytes(root, len(ids), kind))
            self.nodes[name] = OldNode(name, parent, root, position, ids, kind, payload, last_used, hits)
        return self.nodes[name]

    def _payload_bytes(self, root: bytes, num_tokens: int, kind: int) -> int:
        layout = json.loads(self.roots[root]["layout"])
        groups = [
            len(group["tensors"]) * group["heads"] * num_tokens * group["head_dim"] * _ITEMSIZE[group["dtype"]]
            for group in layout["groups"]
        ]
        vocab, dtype = layout["logits"]
        return int(sum(groups) + (vocab * _ITEMSIZE[dtype] if kind else 0))

    def _write_node(self, txn: lmdb.Transaction, databases: dict[str, Any], node: OldNode) -> None:
        children = sum(other.parent == node.name for other in self.nodes.values())
        usage = struct.pack("<dIIQ", node.last_used, node.hits, children, len(node.payload) + 4096)
        txn.put(node.name, node.record(), db=databases["nodes"])
        txn.put(node.name, usage, db=databases["usage"])
        txn.put(node.name, node.payload, db=databases["payloads"])
