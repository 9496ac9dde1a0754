"""Is what the store says true? Index, tree and payload keys checked against each other; nothing is changed.

`store.filecheck` has looked at the structure of the file before; this looks at what is in the records, and
`store.verify_payloads` at what is in the payloads. All is read within one snapshot, so that it belongs to one moment.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from diskprefix.errors import StoreCorrupt
from diskprefix.store.changes import node_bytes
from diskprefix.store.pieces import PayloadLayout
from diskprefix.store.schema import (
    HISTORY_KEY_BYTES,
    Kind,
    NodeRecord,
    RootRecord,
    UsageRecord,
    decode_codec,
    decode_entry,
    decode_node,
    decode_prompt,
    decode_root,
    decode_usage,
    node_name,
    piece_index,
    piece_key,
)
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.store import Store
from diskprefix.tenant import Tenant
from diskprefix.tokens import HASH_BYTES, root_hash


class ProblemKind(StrEnum):
    DAMAGED = "damaged"
    """It cannot be read, or its checksum does not match."""
    MISNAMED = "misnamed"
    """Its name is not the hash of what it holds."""
    DETACHED = "detached"
    """What it continues is not there, ends elsewhere, or cannot be continued so."""
    ROOTLESS = "rootless"
    """Nothing says whose numbers it holds and how they are laid out."""
    MISSHAPEN = "misshapen"
    """Its sizes are not those of its root's layout."""
    INCOMPLETE = "incomplete"
    """A piece of its payload is missing, or there is one too many."""
    MISCOUNTED = "miscounted"
    """Its usage record does not say what is there."""
    ORPHANED = "orphaned"
    """It belongs to something that is not there."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `key` is the record's key in hex; of a payload it begins with the node's name."""

    kind: ProblemKind
    database: str
    key: str
    message: str

    @property
    def place(self) -> tuple[ProblemKind, str, str]:
        """All but the message, in which numbers may change while others write."""
        return self.kind, self.database, self.key

    @property
    def node(self) -> bytes:
        """The name of the node that a problem of `nodes`, `payloads`, `usage` or `entries` belongs to."""
        return bytes.fromhex(self.key)[:HASH_BYTES]


@dataclass(frozen=True, kw_only=True)
class IndexReport:
    """What one snapshot's index holds. `stored_bytes` tells of each good node how long its payload is."""

    problems: tuple[Problem, ...]
    stored_bytes: dict[bytes, int]
    num_nodes: int
    num_entries: int
    num_prompts: int
    num_roots: int


def verify_index(store: Store) -> IndexReport:
    """Check all but the payloads' contents. Problems are those that a second look finds again.

    On a folder that cannot be written there is no lock to take, and whoever writes there from elsewhere may change
    pages under a snapshot: what looks wrong then is looked at again.
    """
    report = _read_index(store)
    if report.problems:
        before = {problem.place for problem in report.problems}
        report = _read_index(store)
        report = replace(report, problems=tuple(problem for problem in report.problems if problem.place in before))
    return report


class Place(NamedTuple):
    """What of a node's record counts here; the token ids of all nodes would fill the memory."""

    parent: bytes
    root: bytes
    position: int
    num_tokens: int
    kind: Kind
    num_pieces: int
    raw_bytes: int
    stored_bytes: int
    generated: bool

    @property
    def end(self) -> int:
        return self.position + self.num_tokens


class NodeCheck:
    """Judges nodes, one at a time, by what one snapshot says of them, their parents, their roots and their pieces."""

    def __init__(self, snapshot: Snapshot, secret: int) -> None:
        self._snapshot = snapshot
        self._secret = secret
        self._places: dict[bytes, Place | Problem | None] = {}
        self.roots: dict[bytes, RootRecord] = {}
        self.root_problems: list[Problem] = []
        self._layouts: dict[bytes, PayloadLayout] = {}
        self._shapes: dict[tuple[bytes, int, Kind], tuple[int, int]] = {}
        for root, value in snapshot.records("roots"):
            try:
                self.roots[root], self._layouts[root] = _checked_root(root, value)
            except StoreCorrupt as error:
                self.root_problems.append(Problem(ProblemKind.DAMAGED, "roots", root.hex(), str(error)))

    def problems(self, name: bytes) -> list[Problem]:
        """What is wrong with a node, its pieces' contents apart; nothing if it is not there."""
        return list(self.judge(name, {index: len(stored) for index, stored in self._snapshot.pieces(name)}))

    def place(self, name: bytes, value: bytes | memoryview | None = None) -> Place | Problem | None:
        """What a node's record says, or what is wrong with the record itself; None if there is none.

        `value` is the record, if the caller has it already.
        """
        if name not in self._places:
            self._places[name] = self._read(name, value)
        return self._places[name]

    def judge(self, name: bytes, pieces: Mapping[int, int]) -> Iterator[Problem]:
        """What is wrong with a node that has these pieces: their indices, in order, and stored bytes."""
        place = self.place(name)
        if isinstance(place, Problem):
            yield place
        elif place is not None:
            yield from self._judge_place(name, place)
            if place.root in self.roots:
                yield from self._judge_shape(name, place)
            yield from _judge_pieces(name, place, pieces)

    def _read(self, name: bytes, value: bytes | memoryview | None) -> Place | Problem | None:
        try:
            node = self._snapshot.node(name) if value is None else decode_node(name, value)
        except StoreCorrupt as error:
            return _of_node(ProblemKind.DAMAGED, name, str(error))
        if node is None:
            return None
        if node_name(self._secret, node.parent, node.token_ids, node.kind, generated=node.generated) != name:
            return _of_node(ProblemKind.MISNAMED, name, "its name is not the hash of its parent and its tokens")
        return _place_of(node)

    def _judge_place(self, name: bytes, place: Place) -> Iterator[Problem]:
        if place.root not in self.roots:
            yield _of_node(ProblemKind.ROOTLESS, name, f"there is no good record of its root {place.root.hex()}")
        if place.position == 0:
            if place.parent != place.root:
                yield _of_node(ProblemKind.DETACHED, name, "it is the first block, yet its parent is not its root")
            return
        parent = self.place(place.parent)
        if parent is None:
            yield _of_node(ProblemKind.DETACHED, name, f"the block {place.parent.hex()} that it continues is missing")
        elif isinstance(parent, Place):
            if (parent.root, parent.end, parent.kind) != (place.root, place.position, Kind.BLOCK):
                message = f"it starts at token {place.position}, the block {place.parent.hex()} that it continues ends "
                yield _of_node(ProblemKind.DETACHED, name, message + f"at {parent.end}, or is of another kind or root")
            elif not _may_continue(parent, place):
                message = f"the block {place.parent.hex()} that it continues is generated and it is not, or it is a "
                yield _of_node(ProblemKind.DETACHED, name, message + "generated checkpoint of one that is not")

    def _judge_shape(self, name: bytes, place: Place) -> Iterator[Problem]:
        block_size = self.roots[place.root].block_size
        if place.position % block_size or not _has_right_length(place, block_size):
            what = f"a {place.kind.name.lower()} of {place.num_tokens} tokens at {place.position}"
            yield _of_node(ProblemKind.MISSHAPEN, name, f"{what}, the root's blocks have {block_size}")
            return
        if place.kind == Kind.CHECKPOINT and not (place.position and self._layouts[place.root].states):
            message = f"a checkpoint at {place.position}: there are none at 0, nor where the layout has no states"
            yield _of_node(ProblemKind.MISSHAPEN, name, message)
            return
        wanted = self._wanted(place.root, place.num_tokens, place.kind)
        if (place.num_pieces, place.raw_bytes) != wanted:
            message = f"{place.num_pieces} pieces of {place.raw_bytes} bytes, the layout has {wanted[0]} of {wanted[1]}"
            yield _of_node(ProblemKind.MISSHAPEN, name, message)

    def _wanted(self, root: bytes, num_tokens: int, kind: Kind) -> tuple[int, int]:
        """How many pieces, and raw bytes in them, the layout has for such a node."""
        key = root, num_tokens, kind
        if key not in self._shapes:
            pieces = self._layouts[root].pieces(num_tokens, kind)
            self._shapes[key] = len(pieces), sum(piece.num_bytes for piece in pieces)
        return self._shapes[key]


class _IndexCheck:
    """One pass over one snapshot's index."""

    def __init__(self, snapshot: Snapshot, secret: int) -> None:
        self._snapshot = snapshot
        self._nodes = NodeCheck(snapshot, secret)
        self._problems = list(self._nodes.root_problems)
        self._children: Counter[bytes] = Counter()
        self._stored_bytes: dict[bytes, int] = {}
        self._file_bytes: dict[bytes, int] = {}
        self._counts: Counter[str] = Counter()

    def run(self) -> IndexReport:
        self._check_nodes()
        self._check_usage()
        self._check_others()
        return IndexReport(
            problems=tuple(self._problems),
            stored_bytes=self._stored_bytes,
            num_nodes=self._counts["nodes"],
            num_entries=self._counts["entries"],
            num_prompts=self._counts["history"],
            num_roots=len(self._nodes.roots),
        )

    def _report(self, kind: ProblemKind, database: str, key: bytes, message: str) -> None:
        self._problems.append(Problem(kind, database, key.hex(), message))

    def _check_nodes(self) -> None:
        """Nodes and the keys of their pieces, side by side: both are in the order of the names."""
        groups = _stored_pieces(self._snapshot)
        group = next(groups, None)
        for name, value in self._snapshot.records("nodes"):
            while group is not None and group.name < name:
                self._report_orphans(group)
                group = next(groups, None)
            if group is not None and group.name == name:
                self._check_node(name, value, group.sizes)
                self._report_strange(group)
                group = next(groups, None)
            else:
                self._check_node(name, value, {})
        while group is not None:
            self._report_orphans(group)
            group = next(groups, None)

    def _check_node(self, name: bytes, value: bytes | memoryview, pieces: Mapping[int, int]) -> None:
        self._counts["nodes"] += 1
        self._children[bytes(value[:HASH_BYTES])] += 1
        place = self._nodes.place(name, value)
        problems = list(self._nodes.judge(name, pieces))
        self._problems += problems
        if isinstance(place, Place):
            self._file_bytes[name] = node_bytes(place.num_tokens, list(pieces.values()))
            if not problems:
                self._stored_bytes[name] = place.stored_bytes

    def _report_orphans(self, group: _StoredPieces) -> None:
        for index in group.sizes:
            self._report(ProblemKind.ORPHANED, "payloads", piece_key(group.name, index), "it belongs to no block")
        self._report_strange(group)

    def _report_strange(self, group: _StoredPieces) -> None:
        for key in group.strange_keys:
            self._report(ProblemKind.ORPHANED, "payloads", key, f"a key of {len(key)} bytes is no piece's")

    def _check_usage(self) -> None:
        missing = dict.fromkeys(self._file_bytes)
        for name, value in self._snapshot.records("usage"):
            missing.pop(name, None)
            place = self._nodes.place(name)
            if place is None:
                self._report(ProblemKind.ORPHANED, "usage", name, "a usage record that belongs to no block")
            elif isinstance(place, Place):
                wrong = usage_problem(value, self._children[name], place.stored_bytes, self._file_bytes[name])
                if wrong:
                    self._report(ProblemKind.MISCOUNTED, "usage", name, wrong)
        for name in missing:
            self._report(ProblemKind.MISCOUNTED, "usage", name, "the block has no usage record")

    def _check_others(self) -> None:
        for database in ("entries", "history", "meta"):
            for key, value in self._snapshot.records(database):
                self._counts[database] += 1
                problem = record_problem(self._nodes, database, key, value)
                if problem is not None:
                    self._problems.append(problem)


def record_problem(nodes: NodeCheck, database: str, key: bytes, value: bytes | memoryview) -> Problem | None:
    """What is wrong with a record of `entries`, `history` or `meta`; None if nothing is."""
    try:
        if database == "entries":
            return _entry_problem(nodes, key, value)
        if database == "history":
            return _prompt_problem(nodes, key, value)
        if key == b"codec":
            decode_codec(key, value)
    except StoreCorrupt as error:
        return Problem(ProblemKind.DAMAGED, database, key.hex(), str(error))
    # What says which store it is was checked when it was opened.
    return None


def _entry_problem(nodes: NodeCheck, name: bytes, value: bytes | memoryview) -> Problem | None:
    """Raises `StoreCorrupt`. An entry whose last block is damaged goes with that."""
    entry, place = decode_entry(name, value), nodes.place(name)
    if place is None:
        return Problem(ProblemKind.ORPHANED, "entries", name.hex(), "the block that it ends with is missing")
    if isinstance(place, Place) and (entry.num_tokens, entry.root) != (place.end, place.root):
        message = f"it says {entry.num_tokens} tokens, its last block ends at {place.end}, or its root is another"
        return Problem(ProblemKind.MISSHAPEN, "entries", name.hex(), message)
    return None


def _prompt_problem(nodes: NodeCheck, key: bytes, value: bytes | memoryview) -> Problem | None:
    """Raises `StoreCorrupt`."""
    if len(key) not in HISTORY_KEY_BYTES:
        raise StoreCorrupt(f"its key has {len(key)} bytes")
    decode_prompt(key, value)
    if key[:HASH_BYTES] not in nodes.roots:
        return Problem(ProblemKind.ROOTLESS, "history", key.hex(), "there is no good record of its root")
    return None


def usage_problem(value: bytes | memoryview, children: int, stored_bytes: int, file_bytes: int) -> str | None:
    """What is wrong with a usage record of a node that so many others continue; None if nothing is.

    `stored_bytes` is the sum of its pieces, `file_bytes` what `node_bytes` makes of them.
    """
    try:
        usage = decode_usage(value)
    except StoreCorrupt as error:
        return str(error)
    if not is_sane(usage):
        return "it holds a number that cannot be"
    if usage.children != children:
        return f"it says that {usage.children} blocks continue it, {children} do"
    # What a node takes beside its pieces is an estimate, which another version may make in another way.
    if not stored_bytes <= usage.stored_bytes <= 2 * file_bytes:
        return f"it says that the block takes {usage.stored_bytes} bytes, its pieces take {stored_bytes}"
    return None


def is_sane(usage: UsageRecord) -> bool:
    """Whether eviction can reckon with its times and counts."""
    numbers = (usage.last_used, usage.created_at, usage.hits, usage.prefill_s)
    return all(map(math.isfinite, numbers)) and usage.hits >= 0 and usage.prefill_s >= 0


def _read_index(store: Store) -> IndexReport:
    with store.snapshot() as snapshot:
        return _IndexCheck(snapshot, store.secret).run()


@dataclass
class _StoredPieces:
    """What is stored under one name: `sizes` of pieces by their index, in order, and keys that are no piece's."""

    name: bytes
    sizes: dict[int, int] = field(default_factory=dict)
    strange_keys: list[bytes] = field(default_factory=list)


def _stored_pieces(snapshot: Snapshot) -> Iterator[_StoredPieces]:
    """In the order of the names. A name that is not a node's may be shorter."""
    group = _StoredPieces(b"")
    for key, value in snapshot.records("payloads"):
        if key[:HASH_BYTES] != group.name:
            if group.name:
                yield group
            group = _StoredPieces(key[:HASH_BYTES])
        index = piece_index(key, group.name)
        if index is None:
            group.strange_keys.append(key)
        else:
            group.sizes[index] = len(value)
    if group.name:
        yield group


def _judge_pieces(name: bytes, place: Place, pieces: Mapping[int, int]) -> Iterator[Problem]:
    if list(pieces) != list(range(place.num_pieces)):
        lost = set(range(place.num_pieces)) - pieces.keys()
        what = f"piece {min(lost)} is missing" if lost else f"it has {len(pieces)} pieces"
        message = f"{what}, its record says {place.num_pieces}"
        yield Problem(ProblemKind.INCOMPLETE, "payloads", name.hex(), message)
    elif sum(pieces.values()) != place.stored_bytes:
        message = f"its pieces take {sum(pieces.values())} bytes, its record says {place.stored_bytes}"
        yield Problem(ProblemKind.MISSHAPEN, "payloads", name.hex(), message)


def _checked_root(root: bytes, value: bytes | memoryview) -> tuple[RootRecord, PayloadLayout]:
    """A root's record and its layout. Raises `StoreCorrupt`."""
    record = decode_root(root, value)
    if record.block_size < 1:
        raise StoreCorrupt(f"it says blocks of {record.block_size} tokens")
    if record.identity and root_hash(record.identity) != root:
        raise StoreCorrupt("the root is not the hash of its identity")
    try:
        Tenant.parse(record.tenant)
    except ValueError as error:
        raise StoreCorrupt(str(error)) from error
    return record, PayloadLayout.parse(record.layout)


def _has_right_length(place: Place, block_size: int) -> bool:
    if place.kind == Kind.TAIL:
        return place.num_tokens < block_size
    return place.num_tokens == (0 if place.kind == Kind.CHECKPOINT else block_size)


def _may_continue(parent: Place, place: Place) -> bool:
    """What continues generated state is generated; a checkpoint is what its block is."""
    if place.kind == Kind.CHECKPOINT:
        return place.generated == parent.generated
    return place.generated >= parent.generated


def _of_node(kind: ProblemKind, name: bytes, message: str) -> Problem:
    return Problem(kind, "nodes", name.hex(), message)


def _place_of(node: NodeRecord) -> Place:
    return Place(
        parent=node.parent,
        root=node.root,
        position=node.position,
        num_tokens=len(node.token_ids),
        kind=node.kind,
        num_pieces=node.num_pieces,
        raw_bytes=node.raw_bytes,
        stored_bytes=node.stored_bytes,
        generated=node.generated,
    )
