"""A second reader of the store's file, written from `FORMAT.md` and `codec/README.md`: with LMDB, msgpack, zstd and
xxh3, and nothing of the package. It reads values in bf16 and fp32, which the kept stores have."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import msgspec
import xxhash
import zstandard

SIZES = {"bfloat16": 2, "float32": 4}
MARKS = (b"", b"t", b"c", b"")
"""In names, by the kind of the node."""


class Node(NamedTuple):
    name: bytes
    parent: bytes
    root: bytes
    position: int
    kind: int
    token_ids: tuple[int, ...]


class SecondReader:
    def __init__(self, folder: Path) -> None:
        self._env = lmdb.open(str(folder), max_dbs=16, readonly=True, lock=False)
        meta = dict(self._records("meta"))
        (self.format,) = struct.unpack("<I", meta[b"format"])
        self.secret: int = _unpacked(b"names", meta[b"names"])["secret"]
        self.roots = {key: _unpacked(key, value) for key, value in self._records("roots")}
        self.entries = {key: _unpacked(key, value) for key, value in self._records("entries")}
        self.nodes = {key: _node(key, value) for key, value in self._records("nodes")}
        self._payloads = dict(self._records("payloads"))

    def _records(self, database: str) -> Iterator[tuple[bytes, bytes]]:
        db = self._env.open_db(database.encode(), create=False)
        with self._env.begin(db=db) as transaction:
            yield from [(bytes(key), bytes(value)) for key, value in transaction.cursor()]

    def path(self, name: bytes) -> list[Node]:
        """Returns the nodes from the root to an entry's node."""
        node = self.nodes[name]
        return [*([] if node.parent == node.root else self.path(node.parent)), node]

    def name_of(self, node: Node) -> bytes:
        ids = struct.pack(f"<{len(node.token_ids)}i", *node.token_ids)
        return xxhash.xxh3_128_digest(node.parent + ids + MARKS[node.kind], seed=self.secret)

    def text(self, node: Node) -> str:
        """Returns a digest of a node and of its decoded payload."""
        payload = hashlib.sha256(b"".join(self._decoded(node))).hexdigest()
        text = f"{node.parent.hex()} {node.position} {node.kind} {list(node.token_ids)} {payload}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def codecs(self, node: Node) -> set[int]:
        return {piece[16] for key, piece in self._payloads.items() if key[:16] == node.name}

    def _decoded(self, node: Node) -> Iterator[bytes]:
        for index, (num_rows, width, size) in enumerate(self._pieces(node)):
            piece = self._payloads[node.name + struct.pack(">H", index)]
            check, raw_bytes, bits, codec = struct.unpack_from("<QIIB", piece)
            seed = (int.from_bytes(node.name[:8], "little") + index) % 2**64
            assert check == xxhash.xxh3_64_intdigest(piece[8:], seed=seed)
            assert raw_bytes == num_rows * width * size
            data = piece[48:]
            if codec == 2:
                data = b"".join(_joined(data, bits, num_rows, width, size))
            yield zstandard.decompress(data, max_output_size=raw_bytes) if codec == 1 else data

    def _pieces(self, node: Node) -> Iterator[tuple[int, int, int]]:
        """Yields the rows of each piece, the values of a row, and the bytes of a value."""
        layout, groups = json.loads(self.roots[node.root]["layout"]), []
        for group in layout["groups"]:
            rows = len(group["tensors"]) * group["heads"]
            groups.append((rows, group["head_dim"] * len(node.token_ids), SIZES[group["dtype"]]))
        for state in layout.get("states", []) if node.kind else []:
            rows = len(state["tensors"]) * state["rows"]
            groups.append((rows, prod(state["shape"]) // state["rows"], SIZES[state["dtype"]]))
        if node.kind == 1:
            groups.append((1, layout["logits"][0], SIZES[layout["logits"][1]]))
        for rows, width, size in groups:
            at_once = max(1, 512 * 1024 // max(1, width * size))
            yield from ((min(at_once, rows - first), width, size) for first in range(0, rows if width else 0, at_once))


def _unpacked(key: bytes, value: bytes) -> Any:
    (check,) = struct.unpack_from("<Q", value)
    assert check == xxhash.xxh3_64_intdigest(key + value[8:]), key
    return msgspec.msgpack.decode(value[8:])


def _node(name: bytes, value: bytes) -> Node:
    parent, root, position, num_tokens, kind = struct.unpack_from("<16s16sIIB", value)
    (check,) = struct.unpack_from("<Q", value, 72)
    assert check == xxhash.xxh3_64_intdigest(name + value[:72] + value[80:])
    return Node(name, parent, root, position, kind, struct.unpack_from(f"<{num_tokens}i", value, 80))


def _joined(data: bytes, bits: int, num_rows: int, width: int, size: int) -> Iterator[bytes]:
    """Yields the values of a piece in planes, each from its exponent and the bits beside it."""
    num_values, words, runs = num_rows * width, ceil(width / 64), ceil(width / 2048)
    codes_at = num_values * (size - 1)
    counts_at = codes_at + 8 * num_rows * words * bits
    bases_at = counts_at + 2 * num_rows * runs
    exceptions = iter(data[bases_at + num_rows * runs :])
    for value in range(num_values):
        row, at = divmod(value, width)
        group = struct.unpack_from(f"<{bits}Q", data, codes_at + 8 * bits * (row * words + at // 64))
        code = sum((word >> at % 64 & 1) << bit for bit, word in enumerate(group))
        is_exception = code == (1 << bits) - 1
        exponent = next(exceptions) if is_exception else data[bases_at + row * runs + at // 2048] - code
        rest = data[value]
        upper = exponent << 7 | (rest & 0x80) << 8 | rest & 0x7F
        lower = data[num_values + 2 * value : num_values + 2 * value + 2] if size == 4 else b""
        yield lower + upper.to_bytes(2, "little")
