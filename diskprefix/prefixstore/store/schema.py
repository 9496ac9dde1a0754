"""The records in `data.mdb`, encoded and decoded. `FORMAT.md` gives the format byte by byte.

A record's checksum covers its key too, so a record does not verify under another key.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Literal, NamedTuple, TypeAlias, TypeVar, get_args

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from diskprefix.errors import StoreCorrupt
from diskprefix.tokens import (
    HASH_BYTES,
    ID_BYTES,
    NO_PROMPT,
    PromptDigest,
    TokenIds,
    beginning_hashes,
    block_hash,
    checksum,
    root_hash,
)

FORMAT, NAMES, PURGES = "format", "names", "purges"
"""Keys of the database `meta`."""
MODEL_MARK = b"model "
ENCODED_PICTURES = "pictures "
"""The beginning of the identity of a root that holds an encoder's output for pictures."""
FORMAT_VERSION = 16
MAX_PREFILL_S = 1e6
"""Limit for the seconds that computing a node took. Greater values in a record are not trusted."""
DATABASES = ("meta", "roots", "nodes", "children", "usage", "payloads", "entries", "seen", "notes")

BUILD_BYTES = 8
NO_BUILD = bytes(BUILD_BYTES)
"""In place of a build where the identity of the root says what computes."""
_HEADER = struct.Struct(f"<16s16sIIBBHIQQ{BUILD_BYTES}s")
_KIND_AT, _UNVERIFIED_AT, _BUILD_AT = 40, 41, 64
_CHECKSUM = struct.Struct("<Q")
_POSITION = struct.Struct("<I")
_TOKENS_AT = _HEADER.size + _CHECKSUM.size
_USAGE_TYPES = "ddfIQIi"
_USAGE = struct.Struct("<" + _USAGE_TYPES)
_PIECE_INDEX = struct.Struct(">H")
_MAX_KEY_BYTES = 511
"""LMDB's limit for the length of a key."""
CHILD_IDS_BYTES = (_MAX_KEY_BYTES - 2 * HASH_BYTES) // 4 * 4
"""Bytes of token ids in one key of the database `children`."""
CHECKSUM_BYTES = _CHECKSUM.size
_PAGE_BYTES, _PAGE_HEADER_BYTES = 4096, 16


class NodeKind(IntEnum):
    BLOCK = 0
    TAIL = 1
    CHECKPOINT = 2
    GHOST = 3
    """A block without payload. Its token ids are kept because it is on the path of a seen prompt."""


_KINDS = frozenset(NodeKind)
_NAME_MARKS = (b"", b"t", b"c", b"")
"""The mark in the name of a node, by kind."""


def node_name(secret: int, parent: bytes, token_ids: TokenIds | bytes, kind: NodeKind) -> bytes:
    """Returns the name of the node that continues `parent` with these token ids (see `tokens.block_hash`). The mark of
    its kind distinguishes tails and checkpoints from blocks with the same tokens."""
    return block_hash(secret, parent, token_ids, _NAME_MARKS[kind])


def shorter_names(secret: int, parent: bytes, token_ids: bytes, kind: NodeKind) -> list[bytes]:
    """Returns the names of all nodes that a new node replaces. The new node continues `parent` with these token ids
    (int32, little-endian), and replaces partial blocks and tails that have only the first of them. A tail also replaces
    the partial block with all of them."""
    blocks, tails = (
        beginning_hashes(secret, parent, token_ids, _NAME_MARKS[k]) for k in (NodeKind.BLOCK, NodeKind.TAIL)
    )
    return blocks[: None if kind == NodeKind.TAIL else -1] + tails[:-1]


def checkpoint_names(secret: int, parent: bytes, token_ids: bytes) -> list[tuple[tuple[NodeKind, bytes], ...]]:
    """Returns kinds and names of the checkpoints and tails that may continue `parent`. Element n has the nodes with the
    first n of these token ids (int32, little-endian)."""
    kinds = (NodeKind.CHECKPOINT, NodeKind.TAIL)
    of_kinds = [beginning_hashes(secret, parent, token_ids, _NAME_MARKS[kind]) for kind in kinds]
    return [tuple(zip(kinds, names, strict=True)) for names in zip(*of_kinds, strict=True)]


class NodeRecord(Struct, frozen=True, eq=False):
    """The index record of one node. It holds the tokens from `position` to before `end`.

    `seen_children` counts the seen prompts that continue it, and the children that lie on the path of a seen prompt.
    `is_unverified`: the state came from a file, and this machine has not computed it. `build` is the digest of the
    build that computed the state: only builds with the same bits may use it.
    """

    parent: bytes
    root: bytes
    position: int
    token_ids: TokenIds
    kind: NodeKind
    num_pieces: int
    raw_bytes: int
    stored_bytes: int
    seen_children: int = 0
    is_unverified: bool = False
    build: bytes = NO_BUILD

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        return self.position + self.num_tokens


class UsageRecord(NamedTuple):
    """The mutable part of a node with payload, in the order of the stored record.

    `prefill_s`: seconds that computing its tokens took, 0 if unknown. `children`: the number of nodes with payload that
    continue it; only a node with none may be evicted. `stored_bytes`: its size in the file, in whole pages. `restores`:
    the number of uses, for people. `ttl_s`: the longest time to live that a use asked for, in seconds; `FORMAT.md`
    explains 0 and negative numbers.
    """

    last_used: float
    created_at: float
    prefill_s: float
    children: int
    stored_bytes: int
    restores: int = 0
    ttl_s: int = 0


USAGE_DTYPE = np.dtype([(name, "<" + code) for name, code in zip(UsageRecord._fields, _USAGE_TYPES, strict=True)])
"""A usage record as a numpy type, with the fields of `UsageRecord`."""


class RootRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a root. `layout` is the canonical text of the payloads' `kv.layout.Layout`.

    `identity` is the text whose hash is the root (`tokens.root_hash`), and `tokenizer` its tokenizer's folder or
    file, for commands that show text; both are empty if unknown. `tenant` is the text of a `values.Tenant`, empty for
    the shared tenant. Without prompts (`has_prompts`), the nodes hold outputs of an encoder, or chunks that another
    engine names: none ends in an entry.
    """

    model: str
    block_size: int
    layout: str
    created_at: float
    identity: str = ""
    tenant: str = ""
    tokenizer: str = ""
    has_prompts: bool = True

    @property
    def has_pictures(self) -> bool:
        """Returns whether the nodes hold the outputs of an encoder, not the state of prompts."""
        return self.identity.startswith(ENCODED_PICTURES)

    @property
    def model_identity(self) -> str:
        """The identity of the model. The identity of encoded pictures contains it after the layout."""
        if not self.has_pictures:
            return self.identity
        _, end = json.JSONDecoder().raw_decode(self.identity, len(ENCODED_PICTURES))
        return self.identity[end + 1 :]


class OptionValue(NamedTuple):
    """An option of `serve` that parts the cache: the value that was given for it, and what the model uses of it, which
    is empty if the option does nothing for the model."""

    given: str
    used: str


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A model that a store was served with, even if none of its state is stored. `identity` is the shared tenant's
    `RootRecord.identity`. `builds` are the digests of builds that were found to compute the same bits, as nodes have
    them. With `has_own_root`, the identity belongs to one build alone, because it computes other bits than the state
    that another build has stored. `options` are the options that part its cache, by the names of the settings; empty
    for a program without options. `state_kind` (see `Layout.state_kind`) says where a restored prefix can end; it is
    empty if unknown."""

    model: str
    identity: str
    builds: tuple[bytes, ...] = ()
    has_own_root: bool = False
    options: dict[str, OptionValue] = {}
    state_kind: str = ""


def joined(known: ModelRecord | None, model: ModelRecord) -> ModelRecord:
    """Returns the record of a model that takes the place of the `known` one. Its builds are all that compute the same
    bits; of those that were not compared with each other, the first ones stay."""
    if known is None or not known.builds:
        return model
    if not {*known.builds} & {*model.builds}:
        return known
    return replace(model, builds=tuple(sorted({*known.builds, *model.builds})))


class NamesRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a store, fixed when it is created: its id (16 bytes), and the secret (64 bits) that seeds the
    names of its nodes. `namespace` is the digest of the namespace key that the secret was derived from, empty if the
    secret is random."""

    store_id: bytes
    secret: int
    created_at: float
    namespace: bytes = b""


EntryKind: TypeAlias = Literal["saved", "imported", "opening", "ahead", "partial"]
"""How the state of an entry came to be: a request saved it as far as the policy wanted (`saved`); it came from a pack
(`imported`); it was computed for the first request of a conversation (`opening`) or for the next question (`ahead`)
before anybody sent it; a request has saved a part of its prompt so far, or had to leave it there (`partial`)."""
OWN_KINDS: frozenset[EntryKind] = frozenset({"saved", "imported"})
"""The kinds of entries that stay until they are deleted themselves. The others are deleted with the prompt that they
came from."""
PASSING_KINDS: frozenset[EntryKind] = frozenset({"ahead", "partial"})
"""The kinds of entries that end once a request continues them."""
_RANKS = {kind: -rank for rank, kind in enumerate(get_args(EntryKind))}


class EntryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a chain of stored state. The key is the name of its last node. It came from the prompt `came_from`,
    which may be longer, or differ: what is computed ahead came from an earlier prompt. `ttl_s` is the time to live that
    the request asked for, as in a `UsageRecord`, and `share` says whose room it takes (`CacheOptions.share`). `preview`
    is a part of the text. `reason` is one word that says why the policy saved this many tokens, empty if unknown."""

    root: bytes
    num_tokens: int
    scope: str
    preview: str
    created_at: float
    reason: str = ""
    kind: EntryKind = "saved"
    came_from: PromptDigest = NO_PROMPT
    ttl_s: int = 0
    share: str = ""

    def replaces(self, other: EntryRecord) -> bool:
        """Returns whether this entry takes the place of another one at the same node."""
        return _RANKS[self.kind] > _RANKS[other.kind]

    def passes_to(self, other: EntryRecord) -> bool:
        """Returns whether this entry ends once `other` continues it, of another part of the same prompt for example."""
        is_same = self.kind not in OWN_KINDS and (self.kind, self.came_from) == (other.kind, other.came_from)
        return is_same or self.kind in PASSING_KINDS

    def shortened(self, num_tokens: int) -> EntryRecord:
        """Returns the entry of what is left of the state, the first `num_tokens` tokens."""
        kind: EntryKind = "partial" if self.kind in OWN_KINDS else self.kind
        return replace(self, num_tokens=num_tokens, kind=kind)

    @property
    def id(self) -> tuple[float, PromptDigest, str]:
        """The part of an entry that stays when it becomes shorter."""
        return self.created_at, self.came_from, self.preview


class PromptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that was seen at `came_at`, in seconds since the epoch. `parent` is its last full block, or its root;
    `rest` has the token ids after that block (int32, little-endian). `ttl_s` is its time to live in seconds, 0 for the
    daemon's."""

    came_at: float
    parent: bytes
    rest: bytes
    group: bytes = b""
    ttl_s: int = 0

    def __post_init__(self) -> None:
        if len(self.parent) != HASH_BYTES or len(self.rest) % ID_BYTES:
            raise ValueError(f"a recent prompt cannot have {len(self.rest)} bytes behind {self.parent.hex()}")


def model_key(identity: str) -> bytes:
    """Returns the key in the database `meta` under which a store remembers the model with this identity."""
    return MODEL_MARK + root_hash(identity)


def encode_node(name: bytes, node: NodeRecord) -> bytes:
    """Returns the record of a node."""
    header = _HEADER.pack(
        node.parent,
        node.root,
        node.position,
        len(node.token_ids),
        node.kind,
        node.is_unverified,
        node.num_pieces,
        node.seen_children,
        node.raw_bytes,
        node.stored_bytes,
        node.build,
    )
    token_ids = node.token_ids.tobytes()
    return header + _CHECKSUM.pack(checksum(name + header + token_ids)) + token_ids


def decode_node(name: bytes, value: bytes | memoryview) -> NodeRecord:
    """Parses a node record; the token ids are copied. Raises `StoreCorrupt` when its checksum does not match."""
    if len(value) < _TOKENS_AT:
        raise StoreCorrupt(f"a node record of {len(value)} bytes is shorter than its header")
    header, token_ids = bytes(value[: _HEADER.size]), bytes(value[_TOKENS_AT:])
    if checksum(name + header + token_ids) != _CHECKSUM.unpack_from(value, _HEADER.size)[0]:
        raise StoreCorrupt("a node record's checksum does not match")
    parent, root, position, num_tokens, kind, flag, num_pieces, seen, *sizes, build = _HEADER.unpack(header)
    if len(token_ids) != 4 * num_tokens or kind not in _KINDS:
        raise StoreCorrupt(f"a node record of {len(value)} bytes claims {num_tokens} tokens of kind {kind}")
    ids = np.frombuffer(token_ids, dtype="<i4").astype(np.int32)
    raw_bytes, stored_bytes = sizes
    return NodeRecord(
        *(parent, root, position, ids, NodeKind(kind), num_pieces, raw_bytes, stored_bytes),
        *(seen, bool(flag), build),
    )


def is_node(value: memoryview, parent: bytes, position: int, kind: NodeKind, token_ids: bytes) -> bool:
    """Returns whether a node record has this parent, position and kind, and these token ids (int32, little-endian).

    A lookup calls this for every block, so it neither decodes nor verifies the record. The compared fields need no
    checksum, and the other fields are checked against the layout before they are used.
    """
    if len(value) != _TOKENS_AT + len(token_ids):
        return False
    record = bytes(value)
    has_tokens = record.startswith(parent) and record.endswith(token_ids)
    return has_tokens and (node_position(record), node_kind(record)) == (position, kind)


def is_unverified(value: bytes | memoryview) -> bool:
    """Returns whether the state of a node is that of a file, by its record, which is not verified."""
    return len(value) >= _HEADER.size and bool(value[_UNVERIFIED_AT])


def node_build(value: bytes | memoryview) -> bytes:
    """Returns the digest of the build in a node record, without verifying the record."""
    return bytes(value[_BUILD_AT : _BUILD_AT + BUILD_BYTES])


def node_root(value: bytes | memoryview) -> bytes:
    """Returns the root in a node record, without verifying the record."""
    return bytes(value[HASH_BYTES : 2 * HASH_BYTES])


def node_num_tokens(value: bytes | memoryview) -> int:
    """Returns the number of tokens in a node record, without verifying the record."""
    return max(0, len(value) - _TOKENS_AT) // ID_BYTES


def node_kind(value: bytes | memoryview) -> int:
    """Returns the kind in a node record, without verifying the record."""
    return value[_KIND_AT] if len(value) >= _HEADER.size else NodeKind.BLOCK


def node_position(value: bytes | memoryview) -> int:
    """Returns the position in a node record, without verifying it; 2**32 if the record is cut short."""
    return int(_POSITION.unpack_from(value, 2 * HASH_BYTES)[0]) if len(value) >= _HEADER.size else 1 << 32


def paged_bytes(num_bytes: int) -> int:
    """Returns the size in the file, in bytes, of a value of `num_bytes` that is too long to share a page with
    others."""
    return -(-(num_bytes + _PAGE_HEADER_BYTES) // _PAGE_BYTES) * _PAGE_BYTES


def piece_key(name: bytes, index: int) -> bytes:
    return name + _PIECE_INDEX.pack(index)


def piece_index(key: bytes | memoryview, name: bytes) -> int | None:
    """Returns the index in a payload key, or None if the key does not belong to node `name`."""
    if len(key) != HASH_BYTES + _PIECE_INDEX.size or bytes(key[:HASH_BYTES]) != name:
        return None
    return int(_PIECE_INDEX.unpack_from(key, HASH_BYTES)[0])


def child_key_ids(parent: bytes, token_ids: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields where the database `children` lists a node that continues `parent` with these token ids (int32,
    little-endian): pairs of the beginning of a key (16 bytes) and some of the token ids.

    A key has no room for the token ids of a whole block. The first pair has the parent and the first token ids. Each
    later pair begins with a hash of the pair before it, so two keys with equal beginnings agree in all earlier tokens.
    """
    for start in range(0, len(token_ids), CHILD_IDS_BYTES):
        some_ids = token_ids[start : start + CHILD_IDS_BYTES]
        yield parent, some_ids
        parent = block_hash(0, parent, some_ids)


def child_keys(name: bytes, parent: bytes, token_ids: bytes) -> list[bytes]:
    """Returns the keys of a node in the database `children`; none for a node without tokens."""
    return [beginning + some_ids + name for beginning, some_ids in child_key_ids(parent, token_ids)]


def encode_usage(usage: UsageRecord) -> bytes:
    return _USAGE.pack(*usage)


def decode_usage(value: bytes | memoryview) -> UsageRecord:
    if len(value) != _USAGE.size:
        raise StoreCorrupt(f"a usage record has {len(value)} bytes instead of {_USAGE.size}")
    return UsageRecord(*_USAGE.unpack(value))


def encode_record(key: bytes, record: msgspec.Struct) -> bytes:
    """Returns the record's checksum, which covers `key` too, and the record."""
    return with_checksum(key, msgspec.msgpack.encode(record))


_Record = TypeVar("_Record", bound=msgspec.Struct)


def decode_record(kind: type[_Record], key: bytes, value: bytes | memoryview) -> _Record:
    """Inverse of `encode_record`. Raises `StoreCorrupt`."""
    try:
        return msgspec.msgpack.decode(verified(key, value), type=kind)
    except msgspec.DecodeError as error:
        raise StoreCorrupt(f"record {key.hex()} cannot be read: {error}") from error


def with_checksum(key: bytes, packed: bytes) -> bytes:
    """Returns a checksum, which covers `key` too, and the packed record."""
    return _CHECKSUM.pack(checksum(key + packed)) + packed


def verified(key: bytes, value: bytes | memoryview) -> bytes:
    """Inverse of `with_checksum`. Raises `StoreCorrupt` if the checksum does not match."""
    packed = bytes(value[_CHECKSUM.size :])
    if len(value) < _CHECKSUM.size or checksum(key + packed) != _CHECKSUM.unpack_from(value)[0]:
        raise StoreCorrupt(f"the checksum of record {key.hex()} does not match")
    return packed
