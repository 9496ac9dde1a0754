"""A store of format 1, for the migration: what an older diskprefix left in `data.mdb`, each record checked.

Where it differs from `store.schema`:

    meta       no checksum
    roots      without identity and tenant
    nodes      the header's last 32 bytes:
                 40 codec (0), kind, 6 bytes of zero        u8, u8
                 48 raw_bytes, stored_bytes                 u64, u64
                 64 checksum of the stored payload, xxh3-64 u64
    usage      24 bytes: last_used f64 · hits u32 · children u32 · stored_bytes u64
    payloads   node hash → the raw payload, in one value
    history    root, u64 big-endian: a counter

Nothing of that is taken on trust: a node's name is the hash of its parent and its token ids, the layout of its root
says how large its payload is, and the payload has a checksum.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import numpy as np

from diskprefix.errors import StoreCorrupt, StoreUnavailable
from diskprefix.store.changes import NewNode, node_bytes
from diskprefix.store.codec.codec import Codec, Piece, decode_tokens, populate
from diskprefix.store.folder import DATA
from diskprefix.store.pieces import PayloadLayout
from diskprefix.store.schema import DATABASES, EntryRecord, Kind, RootRecord
from diskprefix.tokens import HASH_BYTES, TokenIds, block_hash, checksum

log = logging.getLogger("diskprefix")

FORMAT_1 = 1

_U32, _U64, _F64 = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<d")
_NODE = struct.Struct("<16s16sIIBB6xQQQ")
_USAGE = struct.Struct("<dIIQ")
_MAX_PROMPT_TOKENS = 1 << 24
_MAX_TIME = float(1 << 42)
"""Seconds; in microseconds it still fits the key of a remembered prompt."""
_DAMAGED = (lmdb.CorruptedError, lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.PageNotFoundError)


@dataclass(frozen=True)
class OldUsage:
    last_used: float
    hits: int


@dataclass(frozen=True, eq=False)
class _Node:
    """A node record. `checksum` is that of the payload."""

    parent: bytes
    root: bytes
    position: int
    num_tokens: int
    codec: int
    kind: int
    raw_bytes: int
    stored_bytes: int
    checksum: int
    token_ids: TokenIds

    @classmethod
    def parse(cls, value: memoryview) -> _Node:
        """Raises `StoreCorrupt` when the lengths do not add up."""
        if len(value) < _NODE.size or (len(value) - _NODE.size) % 4:
            raise StoreCorrupt(f"a node record has {len(value)} bytes")
        parent, root, position, num_tokens, codec, kind, raw_bytes, stored_bytes, seal = _NODE.unpack_from(value)
        token_ids = np.frombuffer(value, dtype="<i4", offset=_NODE.size).astype(np.int32)
        if len(token_ids) != num_tokens:
            raise StoreCorrupt(f"a node record claims {num_tokens} tokens and has {len(token_ids)}")
        return cls(parent, root, position, num_tokens, codec, kind, raw_bytes, stored_bytes, seal, token_ids)


class Format1Store:
    """A store of format 1 in one read transaction. Views of payloads are good for as long as it is open."""

    def __init__(self, path: Path, env: lmdb.Environment, txn: lmdb.Transaction[memoryview]) -> None:
        """Raises `StoreCorrupt` when it is damaged where everything depends on it."""
        self._txn = txn
        self._databases = {name: env.open_db(name.encode(), txn, create=False) for name in DATABASES}
        try:
            self.secret: int = _U64.unpack(self._get("meta", b"secret") or b"")[0]
            self.created_at: float = _F64.unpack(self._get("meta", b"created_at") or b"")[0]
            self.store_id = bytes(self._get("meta", b"store_id") or b"")
            if len(self.store_id) != HASH_BYTES or self._get("meta", b"checksum") is not None:
                raise struct.error("not as format 1 has it")
        except struct.error as error:
            raise StoreCorrupt(
                f"{path}: what the store says of itself is damaged ({error}); move its {DATA} away to start afresh"
            ) from error
        self.roots: dict[bytes, RootRecord] = {}
        """Those whose record can be read."""
        self._layouts: dict[bytes, PayloadLayout] = {}
        self._read_roots()
        self.continuations: dict[bytes, list[bytes]] = {}
        """Names of the nodes that continue a node or a root."""
        self.payload_bytes = 0
        self.new_bytes = 0
        """What it takes in format 2, at most."""
        self._read_tree()

    def count(self, database: str) -> int:
        return int(self._stat(database)["entries"])

    def node(self, name: bytes, parent: bytes, position: int, root: bytes) -> NewNode:
        """The node that belongs at this place; its payload is verified and a view. Raises `StoreCorrupt`."""
        value, payload = self._get("nodes", name), self._get("payloads", name)
        if value is None or payload is None:
            raise StoreCorrupt("its payload is missing")
        node = _Node.parse(value)
        if (node.parent, node.position, node.root) != (parent, position, root):
            raise StoreCorrupt("it does not continue its parent")
        if block_hash(self.secret, parent, node.token_ids) != name:
            raise StoreCorrupt("its token ids are not those that it is named by")
        pieces = self._pieces(node)
        populate(payload)
        if checksum(payload) != node.checksum:
            raise StoreCorrupt("its payload's checksum does not match")
        return NewNode(name, parent, position, node.token_ids, Kind(node.kind), payload, pieces)

    def usage(self, name: bytes, root: bytes) -> OldUsage:
        """When and how often a node was used; one whose record is damaged was not, since its root is there."""
        value = self._get("usage", name)
        if value is not None and len(value) == _USAGE.size:
            last_used, hits, _, _ = _USAGE.unpack(value)
            if _is_time(last_used):
                return OldUsage(last_used, hits)
        return OldUsage(self.roots[root].created_at, 0)

    def entry(self, name: bytes) -> EntryRecord | None:
        """The entry that ends at a node; None if there is none that can be read."""
        value = self._get("entries", name)
        try:
            entry = None if value is None else msgspec.msgpack.decode(value, type=EntryRecord)
        except msgspec.DecodeError:
            return None
        return entry if entry is not None and _is_time(entry.created_at) else None

    def entries(self) -> Iterator[bytes]:
        """Names of the nodes that entries end at."""
        for name, _ in self._records("entries"):
            yield name

    def prompts(self, root: bytes) -> list[TokenIds]:
        """The remembered prompts of a root that can be read, oldest first."""
        cursor = self._txn.cursor(self._databases["history"])
        prompts: list[TokenIds] = []
        found = cursor.set_range(root)
        while found and bytes(cursor.key()[:HASH_BYTES]) == root:
            try:
                prompts.append(decode_tokens(cursor.value(), max_tokens=_MAX_PROMPT_TOKENS))
            except StoreCorrupt as error:
                log.debug("[disk-cache] migration: %s", error)
            found = cursor.next()
        return prompts

    def _read_roots(self) -> None:
        """What is under a root whose record cannot be read is lost: nobody can say what it is."""
        for root, value in self._records("roots"):
            try:
                record = msgspec.msgpack.decode(value, type=RootRecord)
                layout = PayloadLayout.parse(record.layout)
            except (msgspec.DecodeError, StoreCorrupt) as error:
                log.debug("[disk-cache] migration: root %s: %s", root.hex(), error)
                continue
            if _is_time(record.created_at) and record.block_size > 0:
                self.roots[root], self._layouts[root] = record, layout

    def _read_tree(self) -> None:
        need = 2**20 + sum(self._bytes_in(name) for name in ("meta", "roots", "entries", "history"))
        for name, value in self._records("nodes"):
            try:
                node = _Node.parse(value)
                pieces = self._pieces(node)
            except StoreCorrupt:
                continue
            self.continuations.setdefault(node.parent, []).append(name)
            self.payload_bytes += node.raw_bytes
            need += node_bytes(node.num_tokens, [piece.most_bytes for piece in pieces])
        self.new_bytes = need + need // 64

    def _pieces(self, node: _Node) -> tuple[Piece, ...]:
        """How the payload of a node is cut. Raises `StoreCorrupt` when it is none that its root could have."""
        if node.root not in self.roots:
            raise StoreCorrupt("its root is not known")
        if node.kind not in (Kind.BLOCK, Kind.TAIL) or node.codec != Codec.RAW:
            raise StoreCorrupt(f"it is of kind {node.kind} and codec {node.codec}")
        is_tail, block_size = node.kind == Kind.TAIL, self.roots[node.root].block_size
        if not (node.num_tokens < block_size if is_tail else node.num_tokens == block_size):
            raise StoreCorrupt(f"it is of kind {node.kind} and has {node.num_tokens} tokens")
        pieces = self._layouts[node.root].pieces(node.num_tokens, Kind(node.kind))
        if not node.stored_bytes == node.raw_bytes == sum(piece.num_bytes for piece in pieces):
            raise StoreCorrupt(f"its payload has {node.stored_bytes} bytes, which the layout does not give")
        return pieces

    def _records(self, database: str) -> Iterator[tuple[bytes, memoryview]]:
        for key, value in self._txn.cursor(self._databases[database]):
            yield bytes(key), value

    def _get(self, database: str, key: bytes) -> memoryview | None:
        return self._txn.get(key, db=self._databases[database])

    def _bytes_in(self, database: str) -> int:
        stat = self._stat(database)
        return int(stat["psize"] * (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]))

    def _stat(self, database: str) -> Any:
        return self._txn.stat(self._databases[database])


def is_format_1(path: Path) -> bool:
    """Whether the file in folder `path` says that it is of format 1. Raises `StoreCorrupt`, `StoreUnavailable`."""
    with _opened(path) as env:
        try:
            meta = env.open_db(b"meta", create=False)
        except lmdb.NotFoundError:
            return False
        with env.begin() as txn:
            return txn.get(b"format", db=meta) == _U32.pack(FORMAT_1)


@contextmanager
def open_format_1(path: Path) -> Iterator[Format1Store]:
    """Read the store of format 1 in folder `path`; nobody may write to it meanwhile.

    Raises `StoreCorrupt`, `StoreUnavailable`.
    """
    with _opened(path) as env, env.begin(buffers=True) as txn:
        yield Format1Store(path, env, txn)


@contextmanager
def _opened(path: Path) -> Iterator[lmdb.Environment]:
    """Without LMDB's lock, whose file is left alone."""
    try:
        env = lmdb.open(str(path), max_dbs=len(DATABASES), readonly=True, lock=False, create=False)
        try:
            yield env
        finally:
            env.close()
    except (*_DAMAGED, lmdb.NotFoundError) as error:
        raise StoreCorrupt(f"{path / DATA} is damaged or no store ({error}); move it away to start afresh") from error
    except lmdb.Error as error:
        raise StoreUnavailable(f"--kv-cache-dir {path}: {error}; mend it or choose another folder") from error


def _is_time(seconds: float) -> bool:
    return 0.0 <= seconds < _MAX_TIME
