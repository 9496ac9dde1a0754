"""Checks the records of the store against each other, and removes those that fail.

A node that fails a check is removed with all its descendants. If a seen prompt fails, all seen prompts of its root are
removed. Any other record is removed alone; a damaged entry so leaves blocks that belong to no prompt, and those are
removed too, because a deletion of the prompt they came from would not find them.

`verify_index` works within one snapshot. `verify_payloads` checks the contents of the payloads. That takes long, and an
open snapshot keeps freed pages from being reused, so it uses a new snapshot for each slice of the payloads. It skips
nodes that were evicted meanwhile.
"""

from __future__ import annotations

import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.store.changes import RECORDS_AT_ONCE, batches, node_bytes
from diskprefix.prefixstore.store.codec.codec import Piece, decode_piece, piece_seed, populate
from diskprefix.prefixstore.store.codec.planes import Bytes
from diskprefix.prefixstore.store.note_record import decode_note
from diskprefix.prefixstore.store.pieces import PayloadLayout
from diskprefix.prefixstore.store.schema import (
    DATABASES,
    MODEL_MARK,
    EntryRecord,
    ModelRecord,
    NodeKind,
    NodeRecord,
    PromptRecord,
    RootRecord,
    child_keys,
    decode_record,
    model_key,
    piece_index,
)
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.store import Store
from diskprefix.prefixstore.store.tree import PrefixTree
from diskprefix.tokens import HASH_BYTES, checksum, root_hash
from diskprefix.values import Tenant

_CHECK_AGAIN_S = (0.1, 1.0)
"""The pauses before records are checked again that a writer may just have changed."""
_PASSES = 3
"""A node whose record is cut short names no parent. Only the next pass notices that the parent counts one child too
many."""
_SUMS = 1 << 64
_NO_ROOT = "there is no sound record of its root"


class StoreProblem(Struct, frozen=True):
    """A record that failed a check. `key` is its key in hex. Problems of a node's payload, usage record or keys in the
    index of children are problems of the node. `seen` has one problem for each root, with the root as key."""

    database: str
    key: str
    message: str


class IndexReport(Struct, frozen=True, kw_only=True):
    """The counts and problems of one snapshot. `stored_bytes` is the size of the payload of each sound node."""

    problems: tuple[StoreProblem, ...]
    stored_bytes: dict[bytes, int]
    num_nodes: int
    num_entries: int
    num_prompts: int
    num_roots: int


class RemovedRecords(NamedTuple):
    """The result of a removal: the names of saved prompts (`entries`), and the numbers of nodes (`blocks`), of seen
    prompts, and of all removed records."""

    entries: tuple[bytes, ...] = ()
    blocks: int = 0
    prompts: int = 0
    records: int = 0


def remove_damaged(store: Store, problems: Sequence[StoreProblem] | None = None) -> RemovedRecords:
    """Removes the records that `problems` name, then the records that `verify_index` reports. Without `problems`,
    begins with a report of `verify_index`. Raises `CacheError`."""
    removed = RemovedRecords()
    if problems is None:
        problems = verify_index(store).problems
    for _ in range(_PASSES):
        if not problems:
            break
        removed = RemovedRecords._make(map(operator.add, removed, remove_problems(store, problems)))
        problems = verify_index(store).problems
    return removed


def remove_problems(store: Store, problems: Sequence[StoreProblem]) -> RemovedRecords:
    """Removes the records that problems name: nodes with all their descendants, and other records if they are still
    wrong. Daemons may use the store meanwhile, and a kill leaves it in order. Raises `CacheError`."""
    counts: Counter[str] = Counter()
    nodes, entries = store.remove_subtrees(
        [bytes.fromhex(problem.key) for problem in problems if problem.database == "nodes"]
    )
    others = [problem for problem in problems if problem.database not in ("nodes", "seen")]
    for some in batches(others, RECORDS_AT_ONCE):
        with store.changes() as changes:
            check = RecordCheck(changes, store.secret)
            for problem in some:
                key = bytes.fromhex(problem.key)
                if changes.has_record(problem.database, key) and check.wrong(problem.database, key):
                    changes.delete_record(problem.database, key)
                    counts[problem.database] += 1
                    entries += [key] if problem.database == "entries" else []
    roots = {bytes.fromhex(problem.key) for problem in problems if problem.database == "seen"}
    counts["seen"] = _forget_wrong_seen(store, roots)
    return RemovedRecords(
        entries=tuple(entries),
        blocks=len(nodes),
        prompts=counts["seen"],
        records=len(nodes) + counts.total() + len(entries),
    )


def _forget_wrong_seen(store: Store, roots: set[bytes]) -> int:
    """Removes the seen prompts of the `roots` where they are still wrong. Returns the number of prompts. Checks them
    before the transactions, not inside, because that reads all nodes: if another process repairs a root in between,
    only guesses of the policy are lost."""
    wrong: dict[bytes, str] = {}
    if roots:
        with store.reads.snapshot() as snapshot:
            wrong = RecordCheck(snapshot, store.secret).wrong_seen
    num_forgotten = 0
    for root in sorted(roots & wrong.keys()):
        with store.changes() as changes:
            num_forgotten += changes.forget_seen(root, wrong[root])
    return num_forgotten


def verify_index(store: Store) -> IndexReport:
    """Checks all records except the contents of the payloads.

    Writers do not see a process that cannot write to LMDB's lock file, and may change pages under its snapshot. Such a
    process checks again, twice, and returns the problems that all checks find.
    """
    report = _verify_once(store)
    for pause_s in () if store.environment.has_lock else _CHECK_AGAIN_S:
        if not report.problems:
            break
        time.sleep(pause_s)
        before, report = {(problem.database, problem.key) for problem in report.problems}, _verify_once(store)
        again = (problem for problem in report.problems if (problem.database, problem.key) in before)
        report = replace(report, problems=tuple(again))
    return report


def _verify_once(store: Store) -> IndexReport:
    with store.reads.snapshot() as snapshot:
        check = RecordCheck(snapshot, store.secret)
        problems: list[StoreProblem] = []
        stored_bytes: dict[bytes, int] = {}
        counts: Counter[str] = Counter()
        for database in DATABASES:
            for key in snapshot.keys(database):
                counts[database] += 1
                if message := check.wrong(database, key):
                    problems.append(StoreProblem(database, key.hex(), message))
                elif database == "nodes" and (node := check.tree.node(key)) is not None:
                    stored_bytes[key] = node.stored_bytes
        problems += [StoreProblem("seen", root.hex(), message) for root, message in check.wrong_seen.items()]
        return IndexReport(
            problems=tuple(problems),
            stored_bytes=stored_bytes,
            num_nodes=counts["usage"],
            num_entries=counts["entries"],
            num_prompts=counts["seen"],
            num_roots=len(check.roots),
        )


class RecordCheck:
    """Checks one record at a time against the others of a snapshot. `roots` are the sound root records."""

    def __init__(self, snapshot: Snapshot, secret: int) -> None:
        self._snapshot = snapshot
        self.tree = PrefixTree(snapshot, secret)
        self.roots: dict[bytes, RootRecord] = {}
        self._layouts: dict[bytes, PayloadLayout] = {}
        for root, value in snapshot.records("roots"):
            with suppress(StoreCorrupt):
                self.roots[root], self._layouts[root] = _checked_root(root, value)

    def wrong(self, database: str, key: bytes) -> str | None:
        """Returns the problem of a stored record, None if it is sound.

        The check of a node includes its usage record, its keys in the index of children, and its pieces, but not their
        contents. For those records themselves, only their node must exist.
        """
        try:
            value = self._snapshot.listed(database, key)
            match database:
                case "nodes":
                    return self._wrong_node(key)
                case "usage" | "children" | "payloads":
                    return self._wrong_owner(database, key)
                case "roots":
                    _checked_root(key, value)
                case "entries":
                    return self._wrong_entry(key, decode_record(EntryRecord, key, value))
                case "notes":
                    decode_note(key, value)
                    return None if key[:HASH_BYTES] in self.roots else _NO_ROOT
                case "meta" if key.startswith(MODEL_MARK):
                    if model_key(decode_record(ModelRecord, key, value).identity) != key:
                        return "its key does not have the hash of its identity"
        except StoreCorrupt as error:
            return str(error)
        return None

    @cached_property
    def wrong_seen(self) -> dict[bytes, str]:
        """For each root whose seen prompts are not sound, the reason: a damaged prompt, a missing block, a wrong
        count.

        Each block counts the prompts and nodes that continue it. To check the counts, every prompt and node adds the
        checksum of its parent's name to the sum of its root, and every node subtracts the checksum of its own name
        times its count. The sum is 0 if all counts are right; otherwise it is 0 only with a probability of 1 in 2**64.
        So no block is kept in memory.
        """
        wrong: dict[bytes, str] = {}
        sums: Counter[bytes] = Counter()
        for key, value in self._snapshot.records("seen"):
            root = key[:HASH_BYTES]
            try:
                parent = decode_record(PromptRecord, key, value).parent
                sums[root] += checksum(parent) if parent != root else 0
            except StoreCorrupt as error:
                wrong[root] = str(error)
        for name in self._snapshot.keys("nodes"):
            # A damaged record is a problem of the node.
            with suppress(StoreCorrupt):
                node = self.tree.node_or_ghost(name)
                if node is not None and (node.seen_children or node.kind == NodeKind.GHOST):
                    sums[node.root] += checksum(node.parent) if node.parent != node.root else 0
                    sums[node.root] -= checksum(name) * node.seen_children
        for root, total in sums.items():
            if root not in self.roots:
                wrong[root] = _NO_ROOT
            elif total % _SUMS:
                wrong.setdefault(root, "a block of its recent prompts is missing, or counts the wrong number of them")
        return wrong

    def _wrong_node(self, name: bytes) -> str | None:
        node = self.tree.node_or_ghost(name)
        assert node is not None, "it is listed"
        if node.root not in self.roots:
            return f"{_NO_ROOT} {node.root.hex()}"
        if (message := self._wrong_shape(node)) or node.kind == NodeKind.GHOST:
            return message
        message = self._wrong_parent(node) or self._wrong_pieces(name, node) or self._wrong_usage(name, node)
        return message or self._lacks_entry(name, node)

    def _lacks_entry(self, name: bytes, node: NodeRecord) -> str | None:
        """Returns the problem of a node that no entry needs. Of a chain of such nodes, it is the first one's."""
        is_first = name in self._unneeded and node.parent not in self._unneeded
        return "it belongs to no prompt" if is_first and self.roots[node.root].has_prompts else None

    @cached_property
    def _unneeded(self) -> set[bytes]:
        """The names of the nodes that belong to no entry, and that only such nodes continue."""
        unneeded = set[bytes]()
        for name in reversed(list(self.tree.depth_first())):
            children = self.tree.children.get(name, ())
            # A damaged record is a problem of its own.
            with suppress(StoreCorrupt):
                has_entry = self._snapshot.has_record("entries", name) if children else self._snapshot.is_covered(name)
                if not has_entry and all(child in unneeded for child in children):
                    unneeded.add(name)
        return unneeded

    def _wrong_pieces(self, name: bytes, node: NodeRecord) -> str | None:
        sizes = {index: len(stored) for index, stored in self._snapshot.pieces(name)}
        if list(sizes) != list(range(node.num_pieces)):
            missing = set(range(node.num_pieces)) - sizes.keys()
            problem = f"piece {min(missing)} is missing" if missing else f"it has {len(sizes)} pieces"
            return f"{problem}, its record says {node.num_pieces}"
        if sum(sizes.values()) != node.stored_bytes:
            return f"its pieces take {sum(sizes.values())} bytes, its record says {node.stored_bytes}"
        if not all(self._snapshot.has_record("children", key) for key in _child_keys(name, node)):
            return "it is not in the index of children"
        return None

    def _wrong_owner(self, database: str, key: bytes) -> str | None:
        name = key[-HASH_BYTES:] if database == "children" else key[:HASH_BYTES]
        if database == "payloads" and piece_index(key, name) is None:
            return f"a key of {len(key)} bytes is no piece's"
        try:
            node = self.tree.node(name)
        except StoreCorrupt:
            # The node itself is wrong, and this record is removed with it.
            return None
        is_due = node is not None and (database != "children" or key in _child_keys(name, node))
        return None if is_due else "it belongs to no block"

    def _wrong_parent(self, node: NodeRecord) -> str | None:
        if node.position == 0:
            return None if node.parent == node.root else "it is the first block, but its parent is not its root"
        try:
            parent = self.tree.node(node.parent)
        except StoreCorrupt:
            # This is a problem of the parent, and this node is removed with it.
            return None
        if parent is None:
            return f"the block {node.parent.hex()} that it continues is missing"
        if (parent.root, parent.end, parent.kind) != (node.root, node.position, NodeKind.BLOCK):
            where = f"at token {node.position}, the block {node.parent.hex()} that it continues ends at {parent.end}"
            return f"it starts {where}, or is of another kind or root"
        return None

    def _wrong_shape(self, node: NodeRecord) -> str | None:
        block_size, layout = self.roots[node.root].block_size, self._layouts[node.root]
        # If the layout has states, no part of a block can be restored alone.
        shortest_block = block_size if layout.states else 1
        is_sized = {
            NodeKind.BLOCK: shortest_block <= node.num_tokens <= block_size,
            NodeKind.TAIL: node.num_tokens < block_size,
            NodeKind.CHECKPOINT: node.num_tokens < block_size,
            NodeKind.GHOST: node.num_tokens == block_size,
        }[node.kind]
        if node.position % block_size or not is_sized:
            kind = node.kind.name.lower()
            return f"a {kind} of {node.num_tokens} tokens at {node.position}, the root's blocks have {block_size}"
        if node.kind == NodeKind.CHECKPOINT and not (node.end and layout.states):
            return f"a checkpoint at {node.end}: there are none at 0, nor where the layout has no states"
        pieces = layout.pieces(node.num_tokens, node.kind)
        wanted = len(pieces), sum(piece.num_bytes for piece in pieces)
        if (node.num_pieces, node.raw_bytes) != wanted:
            return f"{node.num_pieces} pieces of {node.raw_bytes} bytes, the layout has {wanted[0]} of {wanted[1]}"
        return None

    def _wrong_usage(self, name: bytes, node: NodeRecord) -> str | None:
        usage = self._snapshot.usage(name)
        if usage is None:
            return "it has no usage record"
        numbers = (usage.last_used, usage.created_at, usage.prefill_s)
        if not all(map(math.isfinite, numbers)) or usage.prefill_s < 0:
            return "its usage record holds a number that cannot be"
        children = len(self.tree.children.get(name, ()))
        if usage.children != children:
            return f"its usage record says that {usage.children} blocks continue it, {children} do"
        # The size of a node's records is an estimate, which may differ in another version.
        max_bytes = 2 * node_bytes(node.num_tokens, [len(stored) for _, stored in self._snapshot.pieces(name)])
        if not node.stored_bytes <= usage.stored_bytes <= max_bytes:
            return f"its usage record says {usage.stored_bytes} bytes, its pieces take {node.stored_bytes}"
        return None

    def _wrong_entry(self, name: bytes, entry: EntryRecord) -> str | None:
        try:
            node = self.tree.node(name)
        except StoreCorrupt:
            return None
        if node is None:
            return "the block that it ends with is missing"
        if (entry.num_tokens, entry.root) != (node.end, node.root):
            return f"it says {entry.num_tokens} tokens, its last block ends at {node.end}, or its root is another"
        return None


def _child_keys(name: bytes, node: NodeRecord) -> list[bytes]:
    return child_keys(name, node.parent, node.token_ids.tobytes())


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
"""The payload bytes that are checked with one snapshot: a fraction of a second from memory, a second or two from a
disk."""
_SLICE_NODES = 1024
_THREADS = 2
_MAX_PIECE_BYTES = 1 << 28
"""The layout comes from the file, so memory is not allocated for any size that it states."""


class PayloadReport(Struct, frozen=True, kw_only=True):
    """`num_bytes` is the stored size of the pieces that were read."""

    problems: tuple[StoreProblem, ...]
    num_pieces: int
    num_bytes: int


class StoredPiece(Struct, frozen=True):
    """One piece of a node's payload. `stored` is a view of the memory map, valid while the snapshot is open; `expected`
    is the piece's form in the layout."""

    name: bytes
    index: int
    stored: memoryview
    expected: Piece

    def decode(self, out: Bytes) -> None:
        """Reads and verifies the piece, and writes it to `out`. For any thread. Raises `StoreCorrupt`."""
        populate(self.stored)
        decode_piece(self.stored, self.expected, piece_seed(self.name, self.index), out)


def verify_payloads(store: Store, stored_bytes: dict[bytes, int], advance: Callable[[int], None]) -> PayloadReport:
    """Reads, verifies and decodes every piece of these nodes. Calls `advance` with the stored bytes of each slice."""
    problems: list[StoreProblem] = []
    num_pieces = num_bytes = 0
    for names in _slices(stored_bytes):
        first, sizes = _check_slice(store, names)
        again, _ = _check_slice(store, sorted({bytes.fromhex(problem.key) for problem in first}))
        problems += [problem for problem in again if problem in first]
        num_pieces += len(sizes)
        num_bytes += sum(sizes)
        advance(sum(stored_bytes[name] for name in names))
    return PayloadReport(problems=tuple(problems), num_pieces=num_pieces, num_bytes=num_bytes)


def stored_pieces(snapshot: Snapshot, name: bytes, expected: tuple[Piece, ...]) -> list[StoredPiece]:
    """Returns the pieces of a node's payload. Raises `StoreCorrupt` if one is missing."""
    pieces = []
    for index, piece in enumerate(expected):
        stored = snapshot.piece(name, index)
        if stored is None:
            raise StoreCorrupt(f"piece {index} of its payload is missing")
        pieces.append(StoredPiece(name, index, stored, piece))
    return pieces


def raw_payload(snapshot: Snapshot, name: bytes, expected: tuple[Piece, ...]) -> memoryview:
    """Returns a copy of the raw payload of a node. Raises `StoreCorrupt` if a piece is missing or damaged."""
    payload, start = np.empty(sum(piece.num_bytes for piece in expected), dtype=np.uint8), 0
    for piece in stored_pieces(snapshot, name, expected):
        stop = start + piece.expected.num_bytes
        piece.decode(payload[start:stop].reshape(piece.expected.num_rows, -1))
        start = stop
    return payload.data


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
    with store.reads.snapshot() as snapshot, ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as pool:
        pieces = [piece for name in names for piece in _stored_payload(snapshot, name)]
        problems = [problem for problem in pool.map(_problem, pieces) if problem is not None]
        return problems, [len(piece.stored) for piece in pieces]


def _stored_payload(snapshot: Snapshot, name: bytes) -> list[StoredPiece]:
    """Returns the pieces of a node; none if the node is gone, or if its records are wrong, which `verify_index`
    reports."""
    try:
        node = snapshot.node(name)
        root = snapshot.root(node.root) if node else None
        if node is None or root is None:
            return []
        return stored_pieces(snapshot, name, PayloadLayout.parse(root.layout).pieces(node.num_tokens, node.kind))
    except StoreCorrupt:
        return []


def _problem(piece: StoredPiece) -> StoreProblem | None:
    """Returns the problem of a piece (its checksum, its encoding or its size), None if it is sound. For any thread."""
    expected = piece.expected
    try:
        if expected.num_bytes > _MAX_PIECE_BYTES:
            raise StoreCorrupt(f"the layout has one of {expected.num_bytes} bytes")
        piece.decode(np.empty((expected.num_rows, expected.row_bytes), np.uint8))
    except StoreCorrupt as error:
        return StoreProblem("nodes", piece.name.hex(), f"piece {piece.index}: {error}")
    return None
