"""The file format: what lies in `data.mdb`, byte by byte. Format version 1.

One LMDB environment with seven named databases. Integers are little-endian unless said otherwise; hashes and roots are
16 bytes; times are seconds since the epoch as float64. A *node* is a block of the prefix tree: a full block of
`block_size` tokens, or the *tail* of one prompt (the 0 to `block_size - 1` tokens after its last full block).

    database   key                       value
    meta       "format"                  u32       the format version
               "store_id"                16 bytes  random, drawn when the store is created
               "secret"                  u64       random, seeds every node hash
               "created_at"              f64
               "evictions"               u64       nodes evicted since the store was created
    roots      root                      msgpack   RootRecord: whose numbers these are and how a payload is laid out
    nodes      node hash                 72 bytes  header (below), then num_tokens × i32 token ids
    usage      node hash                 24 bytes  last_used f64 · hits u32 · children u32 · stored_bytes u64
    payloads   node hash                 bytes     the encoded payload
    entries    node hash of its end      msgpack   EntryRecord: one saved prompt, what `inspect` lists
    history    root, u64 big-endian      bytes     zstd of num_tokens × i32: the recent prompts, oldest first

    node header   0 parent hash (the root for a first block)   16 bytes
                 16 root                                       16 bytes
                 32 start position in tokens                   u32
                 36 num_tokens                                 u32
                 40 codec                                      u8
                 41 kind (0 block, 1 tail)                     u8
                 42 zero                                       6 bytes
                 48 raw_bytes, before encoding                 u64
                 56 stored_bytes, after encoding               u64
                 64 checksum of the stored payload, xxh3-64    u64

A payload holds, for each tensor group of the root's layout in order, the group's tensors as a C-contiguous array of
shape [tensors, heads, num_tokens, head_dim]; a tail's payload ends with the next-token logits.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import msgspec
import numpy as np

from diskprefix.errors import StoreCorrupt
from diskprefix.tokens import HASH_BYTES, TokenIds

FORMAT_VERSION = 1
DATABASES = ("meta", "roots", "nodes", "usage", "payloads", "entries", "history")

_NODE = struct.Struct("<16s16sIIBB6xQQQ")
_USAGE = struct.Struct("<dIIQ")
_HISTORY_SEQUENCE = struct.Struct(">Q")


class Kind(IntEnum):
    BLOCK = 0
    TAIL = 1


@dataclass(frozen=True, eq=False)
class NodeRecord:
    """What the index knows of one node. `position` is that of its first token; it ends at `position + num_tokens`."""

    parent: bytes
    root: bytes
    position: int
    token_ids: TokenIds
    kind: Kind
    codec: int
    raw_bytes: int
    stored_bytes: int
    checksum: int

    @property
    def end(self) -> int:
        return self.position + len(self.token_ids)


@dataclass(frozen=True)
class UsageRecord:
    """The mutable part of a node. `children` counts the nodes that continue it: only those with none may be evicted."""

    last_used: float
    hits: int
    children: int
    stored_bytes: int


class RootRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`layout` is the canonical text of `kv.layout.Layout`: the payload layout is a record, not a constant."""

    model: str
    block_size: int
    layout: str
    created_at: float


class EntryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One saved prompt: it ends at the node whose hash is the key. `preview` is for people."""

    root: bytes
    num_tokens: int
    scope: str
    preview: str
    created_at: float


def encode_node(node: NodeRecord) -> bytes:
    header = _NODE.pack(
        node.parent,
        node.root,
        node.position,
        len(node.token_ids),
        node.codec,
        node.kind,
        node.raw_bytes,
        node.stored_bytes,
        node.checksum,
    )
    return header + node.token_ids.tobytes()


def decode_node(value: bytes | memoryview) -> NodeRecord:
    """Parse a node record; the token ids are copied. Raises `StoreCorrupt` when the lengths do not add up."""
    if len(value) < _NODE.size:
        raise StoreCorrupt(f"a node record of {len(value)} bytes is shorter than its header")
    parent, root, position, num_tokens, codec, kind, raw_bytes, stored_bytes, checksum = _NODE.unpack_from(value)
    if len(value) != _NODE.size + 4 * num_tokens or kind not in (Kind.BLOCK, Kind.TAIL):
        raise StoreCorrupt(f"a node record of {len(value)} bytes claims {num_tokens} tokens of kind {kind}")
    token_ids = np.frombuffer(value, dtype="<i4", offset=_NODE.size).astype(np.int32)
    return NodeRecord(parent, root, position, token_ids, Kind(kind), codec, raw_bytes, stored_bytes, checksum)


def encode_usage(usage: UsageRecord) -> bytes:
    return _USAGE.pack(usage.last_used, usage.hits, usage.children, usage.stored_bytes)


def decode_usage(value: bytes | memoryview) -> UsageRecord:
    if len(value) != _USAGE.size:
        raise StoreCorrupt(f"a usage record has {len(value)} bytes instead of {_USAGE.size}")
    return UsageRecord(*_USAGE.unpack(value))


def history_key(root: bytes, sequence: int) -> bytes:
    """Keys sort by root, then by age: the oldest prompt of a root comes first."""
    return root + _HISTORY_SEQUENCE.pack(sequence)


def history_sequence(key: bytes) -> int:
    return int(_HISTORY_SEQUENCE.unpack_from(key, HASH_BYTES)[0])


_encoder = msgspec.msgpack.Encoder()
_root_decoder = msgspec.msgpack.Decoder(RootRecord)
_entry_decoder = msgspec.msgpack.Decoder(EntryRecord)


def encode_record(record: RootRecord | EntryRecord) -> bytes:
    return _encoder.encode(record)


def decode_root(value: bytes | memoryview) -> RootRecord:
    try:
        return _root_decoder.decode(value)
    except msgspec.DecodeError as error:
        raise StoreCorrupt(f"a root record cannot be read: {error}") from error


def decode_entry(value: bytes | memoryview) -> EntryRecord:
    try:
        return _entry_decoder.decode(value)
    except msgspec.DecodeError as error:
        raise StoreCorrupt(f"an entry record cannot be read: {error}") from error
