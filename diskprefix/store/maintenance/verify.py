"""Checks the records of the store against each other, within one snapshot. Nothing is changed.

`store.filecheck` has checked the structure of the file before. `verify_payloads` checks the contents of the payloads
apart: that takes long, and an open snapshot keeps freed pages from being reused. So it reads payloads in slices, each
with a snapshot of its own. It leaves out nodes that were evicted meanwhile.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np

from diskprefix.errors import StoreCorrupt
from diskprefix.nouns import Tenant
from diskprefix.store.changes import node_bytes
from diskprefix.store.codec.codec import Piece, populate
from diskprefix.store.codec.planes import Bytes
from diskprefix.store.note_record import decode_note
from diskprefix.store.pieces import PayloadLayout
from diskprefix.store.schema import (
    DATABASES,
    HISTORY_KEY_BYTES,
    MODEL_MARK,
    EntryRecord,
    Kind,
    ModelRecord,
    NodeRecord,
    RootRecord,
    UsageRecord,
    decode_prompt,
    decode_record,
    decode_usage,
    model_key,
    piece_index,
    piece_key,
)
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.store import Store
from diskprefix.store.tree import MisnamedNode, PrefixTree
from diskprefix.tokens import HASH_BYTES, root_hash


class ProblemKind(StrEnum):
    DAMAGED = "damaged"
    """It cannot be read, or its checksum does not match."""
    MISNAMED = "misnamed"
    """Its name is not the hash of what it holds."""
    DETACHED = "detached"
    """The node that it continues is missing, ends elsewhere, or cannot be continued in this way."""
    ROOTLESS = "rootless"
    """The record of its root, with the model and the layout, is missing."""
    MISSHAPEN = "misshapen"
    """Its sizes are not those of its root's layout."""
    INCOMPLETE = "incomplete"
    """A piece of its payload is missing, or there is one too many."""
    MISCOUNTED = "miscounted"
    """Its usage record does not agree with what is stored."""
    UNLISTED = "unlisted"
    """The index of children lacks its key."""
    ORPHANED = "orphaned"
    """The node that it belongs to is missing."""


@dataclass(frozen=True)
class StoreProblem:
    """One thing that is wrong. `key` is the key of the record in hex, which may be missing."""

    kind: ProblemKind
    database: str
    key: str
    message: str

    @property
    def location(self) -> tuple[ProblemKind, str, str]:
        """The problem without its message, whose numbers may change while others write."""
        return self.kind, self.database, self.key

    @property
    def node(self) -> bytes:
        """The name of the node that a problem of `nodes`, `payloads`, `usage` or `entries` belongs to: all keys there
        begin with it."""
        return bytes.fromhex(self.key)[:HASH_BYTES]


@dataclass(frozen=True, kw_only=True)
class IndexReport:
    """The counts and problems of one snapshot. `stored_bytes` is the size of the payload of each node that is sound."""

    problems: tuple[StoreProblem, ...]
    stored_bytes: dict[bytes, int]
    num_nodes: int
    num_entries: int
    num_prompts: int
    num_roots: int


def verify_index(store: Store) -> IndexReport:
    """Checks all records but the contents of the payloads. Returns the problems that a second look finds again.

    A process without write permission has no lock on the folder, so a writer elsewhere may change pages under its
    snapshot. The second look leaves out the problems that are due to that.
    """
    report = _verify_once(store)
    if not report.problems:
        return report
    before, again = {problem.location for problem in report.problems}, _verify_once(store)
    return replace(again, problems=tuple(problem for problem in again.problems if problem.location in before))


def _verify_once(store: Store) -> IndexReport:
    with store.snapshot() as snapshot:
        check = RecordCheck(snapshot, store.secret)
        problems: list[StoreProblem] = []
        stored_bytes: dict[bytes, int] = {}
        counts: Counter[str] = Counter()
        for database in DATABASES:
            for key in snapshot.keys(database):
                counts[database] += 1
                found = check.problems(database, key)
                problems += found
                if database == "nodes":
                    problems += check.problems("usage", key)
                    if not found:
                        node = check.node(key)
                        stored_bytes[key] = node.stored_bytes
                        for child_key in snapshot.child_keys(key, node):
                            problems += check.problems("children", child_key)
        # Those of usage records and of the index that belong to a node have been found with it.
        return IndexReport(
            problems=tuple(dict.fromkeys(problems)),
            stored_bytes=stored_bytes,
            num_nodes=counts["nodes"],
            num_entries=counts["entries"],
            num_prompts=counts["history"],
            num_roots=len(check.roots),
        )


_Found: TypeAlias = tuple[ProblemKind, str, str]
"""Kind, database and message of a problem."""


class RecordCheck:
    """Checks one record at a time against the others of a snapshot. `roots` are the root records that are sound."""

    def __init__(self, snapshot: Snapshot, secret: int) -> None:
        self._snapshot = snapshot
        self.tree = PrefixTree(snapshot, secret)
        self.roots: dict[bytes, RootRecord] = {}
        self._layouts: dict[bytes, PayloadLayout] = {}
        for root, value in snapshot.records("roots"):
            with suppress(StoreCorrupt):
                self.roots[root], self._layouts[root] = _checked_root(root, value)

    def problems(self, database: str, key: bytes) -> list[StoreProblem]:
        """Returns what is wrong with a record, or with the absence of a node's usage record or key in `children`.

        For a node that includes its pieces, but not their contents.
        """
        checks: dict[str, Callable[[bytes, Any], Iterable[_Found]]] = {
            "roots": self._root_problems,
            "nodes": self._node_problems,
            "children": self._child_problems,
            "usage": self._usage_problems,
            "payloads": self._piece_problems,
            "entries": self._entry_problems,
            "history": self._prompt_problems,
            "notes": self._note_problems,
            "meta": self._meta_problems,
        }
        if database not in ("usage", "children") and not self._snapshot.has_record(database, key):
            return []
        # The check of a piece looks at its key alone, and to decrypt all of them takes long.
        value = self._snapshot.record(database, key) if database != "payloads" else None
        if database in ("usage", "children", "entries"):
            try:
                self.tree.node(key[-HASH_BYTES:])
            except StoreCorrupt:
                # This is a problem of the node, and both go with it.
                return []
        try:
            found = checks[database](key, value)
            return [StoreProblem(kind, where, key.hex(), message) for kind, where, message in found]
        except StoreCorrupt as error:
            kind = ProblemKind.MISNAMED if isinstance(error, MisnamedNode) else ProblemKind.DAMAGED
            return [StoreProblem(kind, database, key.hex(), str(error))]

    def node(self, name: bytes) -> NodeRecord:
        """Returns a node that is known to be stored and sound."""
        node = self.tree.node(name)
        assert node is not None
        return node

    def piece_bytes(self, name: bytes) -> dict[int, int]:
        """Returns the stored size of each piece of a node's payload, by the piece's index."""
        return {index: len(stored) for index, stored in self._snapshot.pieces(name)}

    def _root_problems(self, root: bytes, value: bytes) -> Iterable[_Found]:
        _checked_root(root, value)
        return ()

    def _node_problems(self, name: bytes, _value: bytes) -> Iterator[_Found]:
        node = self.node(name)
        if node.root not in self.roots:
            yield ProblemKind.ROOTLESS, "nodes", f"there is no sound record of its root {node.root.hex()}"
        elif wrong := self._wrong_shape(node):
            yield ProblemKind.MISSHAPEN, "nodes", wrong
        if wrong := self._wrong_parent(node):
            yield ProblemKind.DETACHED, "nodes", wrong
        pieces = self.piece_bytes(name)
        if list(pieces) != list(range(node.num_pieces)):
            lost = set(range(node.num_pieces)) - pieces.keys()
            what = f"piece {min(lost)} is missing" if lost else f"it has {len(pieces)} pieces"
            yield ProblemKind.INCOMPLETE, "payloads", f"{what}, its record says {node.num_pieces}"
        elif sum(pieces.values()) != node.stored_bytes:
            message = f"its pieces take {sum(pieces.values())} bytes, its record says {node.stored_bytes}"
            yield ProblemKind.MISSHAPEN, "payloads", message

    def _wrong_parent(self, node: NodeRecord) -> str | None:
        if node.position == 0:
            return None if node.parent == node.root else "it is the first block, but its parent is not its root"
        try:
            parent = self.tree.node(node.parent)
        except StoreCorrupt:
            # This is a problem of the parent, and both go with it.
            return None
        if parent is None:
            return f"the block {node.parent.hex()} that it continues is missing"
        if (parent.root, parent.end, parent.kind) != (node.root, node.position, Kind.BLOCK):
            where = f"at token {node.position}, the block {node.parent.hex()} that it continues ends at {parent.end}"
            return f"it starts {where}, or is of another kind or root"
        return None

    def _wrong_shape(self, node: NodeRecord) -> str | None:
        block_size, layout = self.roots[node.root].block_size, self._layouts[node.root]
        # Where the layout has states, nothing can be restored from the beginning of a block.
        shortest_block = block_size if layout.states else 1
        right = {
            Kind.BLOCK: shortest_block <= node.num_tokens <= block_size,
            Kind.TAIL: node.num_tokens < block_size,
            Kind.CHECKPOINT: node.num_tokens < block_size,
        }[node.kind]
        if node.position % block_size or not right:
            what = f"a {node.kind.name.lower()} of {node.num_tokens} tokens at {node.position}"
            return f"{what}, the root's blocks have {block_size}"
        if node.kind == Kind.CHECKPOINT and not (node.end and layout.states):
            return f"a checkpoint at {node.end}: there are none at 0, nor where the layout has no states"
        cuts = layout.cuts(node.num_tokens, node.kind)
        wanted = len(cuts), layout.payload_bytes(node.num_tokens, node.kind)
        if (node.num_pieces, node.raw_bytes) != wanted:
            return f"{node.num_pieces} pieces of {node.raw_bytes} bytes, the layout has {wanted[0]} of {wanted[1]}"
        return None

    def _usage_problems(self, name: bytes, value: bytes | None) -> Iterator[_Found]:
        node = self.tree.node(name)
        if node is None:
            yield ProblemKind.ORPHANED, "usage", "a usage record that belongs to no block"
        elif wrong := self._wrong_usage(name, node, value):
            yield ProblemKind.MISCOUNTED, "usage", wrong

    def _wrong_usage(self, name: bytes, node: NodeRecord, value: bytes | None) -> str | None:
        if value is None:
            return "the block has no usage record"
        try:
            usage = decode_usage(value)
        except StoreCorrupt as error:
            return str(error)
        if not is_sane(usage):
            return "it holds a number that cannot be"
        children = len(self.tree.children.get(name, ()))
        if usage.children != children:
            return f"it says that {usage.children} blocks continue it, {children} do"
        # The size of a node besides its pieces is an estimate, which may differ in another version.
        if not node.stored_bytes <= usage.stored_bytes <= 2 * self.file_bytes(name, node):
            return f"it says that the block takes {usage.stored_bytes} bytes, its pieces take {node.stored_bytes}"
        return None

    def file_bytes(self, name: bytes, node: NodeRecord) -> int:
        """Returns how many bytes a node takes in the file."""
        return node_bytes(node.num_tokens, list(self.piece_bytes(name).values()))

    def _child_problems(self, key: bytes, value: bytes | None) -> Iterator[_Found]:
        name = key[-HASH_BYTES:]
        node = self.tree.node(name)
        is_due = node is not None and key in self._snapshot.child_keys(name, node)
        if is_due and value is None:
            yield ProblemKind.UNLISTED, "children", f"the block {name.hex()} is not in the index of children"
        elif value is not None and not is_due:
            yield ProblemKind.ORPHANED, "children", "no block has this key in the index of children"

    def _piece_problems(self, key: bytes, _value: None) -> Iterator[_Found]:
        name = key[:HASH_BYTES]
        if piece_index(key, name) is None:
            yield ProblemKind.ORPHANED, "payloads", f"a key of {len(key)} bytes is no piece's"
        elif not self._snapshot.has_record("nodes", name):
            yield ProblemKind.ORPHANED, "payloads", "it belongs to no block"

    def _entry_problems(self, name: bytes, value: bytes) -> Iterator[_Found]:
        entry, node = decode_record(EntryRecord, name, value), self.tree.node(name)
        if node is None:
            yield ProblemKind.ORPHANED, "entries", "the block that it ends with is missing"
        elif (entry.num_tokens, entry.root) != (node.end, node.root):
            message = f"it says {entry.num_tokens} tokens, its last block ends at {node.end}, or its root is another"
            yield ProblemKind.MISSHAPEN, "entries", message

    def _prompt_problems(self, key: bytes, value: bytes) -> Iterator[_Found]:
        if len(key) not in HISTORY_KEY_BYTES:
            raise StoreCorrupt(f"its key has {len(key)} bytes")
        decode_prompt(key, value)
        if key[:HASH_BYTES] not in self.roots:
            yield ProblemKind.ROOTLESS, "history", "there is no sound record of its root"

    def _note_problems(self, key: bytes, value: bytes) -> Iterator[_Found]:
        decode_note(key, value)
        if key[:HASH_BYTES] not in self.roots:
            yield ProblemKind.ROOTLESS, "notes", "there is no sound record of its root"

    def _meta_problems(self, key: bytes, value: bytes) -> Iterable[_Found]:
        """The records that identify the store were checked when it was opened."""
        if key.startswith(MODEL_MARK) and model_key(decode_record(ModelRecord, key, value).identity) != key:
            raise StoreCorrupt("its key does not have the hash of its identity")
        return ()


def is_sane(usage: UsageRecord) -> bool:
    """Returns whether eviction can calculate with the times and counts of a usage record."""
    numbers = (usage.last_used, usage.created_at, usage.hits, usage.prefill_s)
    return all(map(math.isfinite, numbers)) and usage.hits >= 0 and usage.prefill_s >= 0


def _checked_root(root: bytes, value: bytes | memoryview) -> tuple[RootRecord, PayloadLayout]:
    """Returns a root's record and its layout. Raises `StoreCorrupt`."""
    record = decode_record(RootRecord, root, value)
    if record.block_size < 1:
        raise StoreCorrupt(f"it says blocks of {record.block_size} tokens")
    if record.identity and root_hash(record.identity) != root:
        raise StoreCorrupt("the root is not the hash of its identity")
    try:
        Tenant.parse(record.tenant)
    except ValueError as error:
        raise StoreCorrupt(str(error)) from error
    return record, PayloadLayout.parse(record.layout)


_SLICE_BYTES = 128 << 20
"""Payload that is checked under one snapshot: a fraction of a second from memory, a second or two from a disk."""
_SLICE_NODES = 1024
_THREADS = 2
_MAX_PIECE_BYTES = 1 << 28
"""A layout is a part of the file, so its sizes are not trusted with memory."""


@dataclass(frozen=True, kw_only=True)
class PayloadReport:
    """`num_bytes` is the stored size of the pieces that were read."""

    problems: tuple[StoreProblem, ...]
    num_pieces: int
    num_bytes: int


@dataclass(frozen=True)
class StoredPiece:
    """One piece of a node's payload. `stored` is a view of the memory map, valid while `snapshot` is open; `expected`
    is what the layout says of the piece."""

    snapshot: Snapshot
    name: bytes
    index: int
    stored: memoryview
    expected: Piece

    def decode(self, out: Bytes) -> None:
        """Reads and verifies the piece, and writes it to `out`. For any thread. Raises `StoreCorrupt`."""
        populate(self.stored)
        self.snapshot.decode(self.name, self.index, self.stored, self.expected, out)


def verify_payloads(store: Store, stored_bytes: dict[bytes, int], advance: Callable[[int], None]) -> PayloadReport:
    """Reads, verifies and decodes every piece of these nodes. `advance` is called with the stored bytes that are
    done."""
    problems: list[StoreProblem] = []
    num_pieces = num_bytes = 0
    for names in _slices(stored_bytes):
        found, sizes = _check_slice(store, names)
        again, _ = _check_slice(store, sorted({problem.node for problem in found}))
        problems += [problem for problem in again if problem in found]
        num_pieces += len(sizes)
        num_bytes += sum(sizes)
        advance(sum(stored_bytes[name] for name in names))
    return PayloadReport(problems=tuple(problems), num_pieces=num_pieces, num_bytes=num_bytes)


def payload_problems(snapshot: Snapshot, name: bytes) -> list[StoreProblem]:
    """Returns what is wrong with the contents of a node's pieces."""
    found = (_problem(piece) for piece in _stored_payload(snapshot, name))
    return [problem for problem in found if problem is not None]


def stored_pieces(snapshot: Snapshot, name: bytes, expected: tuple[Piece, ...]) -> list[StoredPiece]:
    """Returns the pieces of a node's payload. Raises `StoreCorrupt` if one is missing."""
    pieces = []
    for index, piece in enumerate(expected):
        stored = snapshot.piece(name, index)
        if stored is None:
            raise StoreCorrupt(f"piece {index} of its payload is missing")
        pieces.append(StoredPiece(snapshot, name, index, stored, piece))
    return pieces


def _slices(stored_bytes: dict[bytes, int]) -> Iterator[list[bytes]]:
    names: list[bytes] = []
    size = 0
    for name, num_bytes in stored_bytes.items():
        names.append(name)
        size += num_bytes
        if size >= _SLICE_BYTES or len(names) >= _SLICE_NODES:
            yield names
            names, size = [], 0
    if names:
        yield names


def _check_slice(store: Store, names: Iterable[bytes]) -> tuple[list[StoreProblem], list[int]]:
    """Returns the problems of the pieces of these nodes, and the stored size of each piece."""
    # The threads end before the snapshot is closed, because they use its views.
    with store.snapshot() as snapshot, ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as pool:
        pieces = [piece for name in names for piece in _stored_payload(snapshot, name)]
        found = [problem for problem in pool.map(_problem, pieces) if problem is not None]
        return found, [len(piece.stored) for piece in pieces]


def _stored_payload(snapshot: Snapshot, name: bytes) -> list[StoredPiece]:
    """Returns the pieces of a node; none if the node is gone, or if its records are wrong: `verify` finds that."""
    try:
        node = snapshot.node(name)
        root = snapshot.root(node.root) if node else None
        if node is None or root is None:
            return []
        return stored_pieces(snapshot, name, PayloadLayout.parse(root.layout).pieces(node.num_tokens, node.kind))
    except StoreCorrupt:
        return []


def _problem(piece: StoredPiece) -> StoreProblem | None:
    """Returns what is wrong with a piece: its checksum, its encoding or its size. Runs in any thread."""
    key, expected = piece_key(piece.name, piece.index).hex(), piece.expected
    if expected.num_bytes > _MAX_PIECE_BYTES:
        message = f"the layout has a piece of {expected.num_bytes} bytes"
        return StoreProblem(ProblemKind.MISSHAPEN, "payloads", key, message)
    try:
        piece.decode(np.empty((expected.num_rows, expected.row_bytes), np.uint8))
    except StoreCorrupt as error:
        return StoreProblem(ProblemKind.DAMAGED, "payloads", key, str(error))
    return None
