"""The read side of the store: one consistent view of the tree, its payloads, the entries and the seen prompts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import lmdb
import numpy as np

from diskprefix.errors import StoreCorrupt
from diskprefix.identity import identity_of_tenant, is_outdated
from diskprefix.prefixstore.store.eviction import UsageTable
from diskprefix.prefixstore.store.note_record import StoredNote, kind_of
from diskprefix.prefixstore.store.pieces import PayloadLayout
from diskprefix.prefixstore.store.schema import (
    DATABASES,
    MODEL_MARK,
    NAMES,
    USAGE_DTYPE,
    EntryRecord,
    ModelRecord,
    NamesRecord,
    NodeKind,
    NodeRecord,
    PromptRecord,
    RootRecord,
    UsageRecord,
    child_key_ids,
    decode_node,
    decode_record,
    decode_usage,
    is_node,
    is_unverified,
    model_key,
    node_build,
    node_kind,
    node_name,
    node_position,
    node_root,
    piece_index,
    piece_key,
)
from diskprefix.tokens import HASH_BYTES, num_common, root_hash

log = logging.getLogger("diskprefix")

_PAST_THE_END = b"\xff" * (HASH_BYTES + 1)
_TRIES = 8
"""How many similar nodes are read in search of a longer one. Only damaged nodes can come before it."""


class Snapshot:
    """One consistent view of the store. Not thread-safe, except that payload views may be read from any thread."""

    def __init__(self, databases: Mapping[str, Any], txn: lmdb.Transaction, *, copy_payloads: bool = False) -> None:
        """`copy_payloads`: pieces are copied before they are verified, because writers do not know of this transaction
        and may overwrite its pages."""
        self._databases = databases
        self._txn = txn
        self._copy_payloads = copy_payloads
        self.read_at = time.monotonic()
        """The time of the last read (`time.monotonic`). It does not change while a read waits for the disk; see
        `reads`."""
        self.unverified: set[bytes] = set()
        """The names of the nodes found by `has` whose state came from a file; see `NodeRecord`."""
        self.number = int(txn.id())
        """The number of the last commit that this snapshot sees. For a write transaction, the number of its own
        commit."""

    def close(self) -> None:
        """Lets go of the transaction, which has a place among the file's readers as long as anything refers to it."""
        del self._txn

    def node(self, name: bytes) -> NodeRecord | None:
        """Returns the index record of a stored node, or None; None for a ghost too. Raises `StoreCorrupt`."""
        node = self.node_or_ghost(name)
        return None if node is None or node.kind == NodeKind.GHOST else node

    def node_or_ghost(self, name: bytes) -> NodeRecord | None:
        """Returns the index record of a node or ghost, or None. Raises `StoreCorrupt` if it does not verify."""
        value = self.get_record("nodes", name)
        return None if value is None else decode_node(name, value)

    def is_ghost(self, name: bytes) -> bool:
        """Returns whether the node of this name is a ghost. Does not verify its record."""
        value = self.get_record("nodes", name)
        return value is not None and node_kind(value) == NodeKind.GHOST

    def build_of(self, name: bytes, parent: bytes, position: int, kind: NodeKind, token_ids: bytes) -> bytes | None:
        """Returns the digest of the build that computed this node, None if it is not stored. `token_ids` are int32,
        little-endian. Raises `StoreCorrupt` if the node with this name has another parent, position, kind or tokens."""
        value = self.get_record("nodes", name)
        if value is None or node_kind(value) == NodeKind.GHOST:
            return None
        if not is_node(value, parent, position, kind, token_ids):
            raise StoreCorrupt("its record is damaged or that of another prefix")
        if is_unverified(value):
            self.unverified.add(name)
        return node_build(value)

    def has(self, name: bytes, parent: bytes, position: int, kind: NodeKind, token_ids: bytes) -> bool:
        """Returns whether this node is stored, whatever build has computed it. Otherwise like `build_of`."""
        return self.build_of(name, parent, position, kind, token_ids) is not None

    def piece(self, name: bytes, index: int) -> memoryview | None:
        """Returns a piece of a payload as it is stored, or None. The view is valid until the snapshot is closed."""
        return next(self.pieces_at(name, (index,)))

    def pieces_at(self, name: bytes, indexes: Iterable[int]) -> Iterator[memoryview | None]:
        """Yields some of a node's pieces, as `piece` does."""
        payloads = self._databases["payloads"]
        for index in indexes:
            view: Any = self._txn.get(piece_key(name, index), db=payloads)
            self.read_at = time.monotonic()
            yield memoryview(bytes(view)) if view is not None and self._copy_payloads else view

    def pieces(self, name: bytes) -> Iterator[tuple[int, memoryview]]:
        """Yields the index and the stored bytes of each piece of a node's payload, in order."""
        cursor = self._txn.cursor(self._databases["payloads"])
        is_at_key = cursor.set_range(name)
        # Bound: the cursor moves on.
        while is_at_key and (key := bytes(cursor.key()))[:HASH_BYTES] == name:
            self.read_at = time.monotonic()
            # A key of another length is damaged. It does not hide the pieces after it.
            if (index := piece_index(key, name)) is not None:
                yield index, memoryview(cursor.value())
            is_at_key = cursor.next()

    def get_record(self, database: str, key: bytes) -> Any:
        """Returns a record, None if there is none. The key may come from a client or a file: LMDB has none that is
        empty, and refuses to look for it."""
        value = self._txn.get(key, db=self._databases[database]) if key else None
        self.read_at = time.monotonic()
        return value

    def listed(self, database: str, key: bytes) -> Any:
        """Returns the record of a key that was listed. If there is none, the keys in the file are out of order, which
        LMDB does not notice: raises `lmdb.CorruptedError`, or `StoreCorrupt` if a writer may have removed the record
        meanwhile."""
        value = self.get_record(database, key)
        if value is None and not self._copy_payloads:
            raise lmdb.CorruptedError(f"a key of {database!r} that it lists is not found")
        if value is None:
            raise StoreCorrupt("it is listed and not found")
        return value

    def has_record(self, database: str, key: bytes) -> bool:
        """Returns whether there is a record of this key, sound or not."""
        return self.get_record(database, key) is not None

    def num_records(self, database: str) -> int:
        """Returns the number of records of a database."""
        return int(self._txn.stat(self._databases[database])["entries"])

    def records(self, database: str) -> Iterator[tuple[bytes, bytes | memoryview]]:
        """Yields keys and values of a database."""
        for key, value in self._txn.cursor(self._databases[database]):
            self.read_at = time.monotonic()
            yield bytes(key), value

    def keys(self, database: str) -> Iterator[bytes]:
        """Yields the keys of a database. Reads no value, because a write transaction would copy each."""
        cursor = self._txn.cursor(self._databases[database])
        for key in cursor.iternext(keys=True, values=False):
            self.read_at = time.monotonic()
            yield bytes(key)

    def usage(self, name: bytes) -> UsageRecord | None:
        value = self.get_record("usage", name)
        return None if value is None else decode_usage(value)

    def usages(self, names: Iterable[bytes] | None = None) -> UsageTable:
        """Returns the usage records of all nodes, or of the nodes in `names` that are stored. Raises `StoreCorrupt`."""
        records = self.records("usage") if names is None else ((name, self.get_record("usage", name)) for name in names)
        usages = {name: value for name, value in records if value is not None}
        for name, value in usages.items():
            if len(value) != USAGE_DTYPE.itemsize:
                raise StoreCorrupt(f"the usage record of node {name.hex()} has {len(value)} bytes")
        return UsageTable(list(usages), np.frombuffer(b"".join(usages.values()), USAGE_DTYPE))

    def saves_nothing(self, served: Collection[str] = ()) -> Callable[[bytes], bool] | None:
        """Returns a function that tells whether the leaf of a given name is useless to this process: another build has
        computed it for a model in `served` (identities), or it is a block of a layout with states, where only
        checkpoints and tails can be restored. Returns None if the store has no such leaves."""
        roots, outdated = set[bytes](), set[bytes]()
        for root, value in self.records("roots"):
            with suppress(StoreCorrupt, ValueError):
                record = decode_record(RootRecord, root, value)
                if is_outdated(record.model_identity, served):
                    outdated.add(root)
                if PayloadLayout.parse(record.layout).states:
                    roots.add(root)
        if not (roots or outdated):
            return None

        def is_useless(name: bytes) -> bool:
            value = self.get_record("nodes", name)
            root = b"" if value is None else node_root(value)
            return root in outdated or (root in roots and value is not None and node_kind(value) == NodeKind.BLOCK)

        return is_useless

    def parent(self, name: bytes) -> bytes:
        """Returns the node or root that a node continues, empty if there is no such node."""
        value = self.get_record("nodes", name)
        return b"" if value is None else bytes(value[:HASH_BYTES])

    def children(self, name: bytes, secret: int) -> list[bytes]:
        """Returns the stored nodes that continue a node. `secret` is the secret of the store. The index of children
        does not list nodes without tokens, but the secret gives their names."""
        if len(name) != HASH_BYTES:
            return []
        bare = [node_name(secret, name, b"", kind) for kind in (NodeKind.TAIL, NodeKind.CHECKPOINT)]
        names = dict.fromkeys([*bare, *(key[-HASH_BYTES:] for key in self.keys_under("children", name))])
        return [child for child in names if self.has_record("nodes", child)]

    def similar_children(self, parent: bytes, token_ids: bytes) -> Iterator[bytes]:
        """Yields the names of the nodes that continue `parent` and have the first of these token ids (int32,
        little-endian). The node with the longest common prefix comes first. Does not verify the records, which may be
        missing."""
        yielded: set[bytes] = set()
        # A key with a later beginning shares all token ids of the earlier keys.
        for beginning, some_ids in reversed(list(child_key_ids(parent, token_ids))):
            for name in self._similar_keys(beginning, some_ids):
                if name not in yielded:
                    yielded.add(name)
                    yield name

    def _similar_keys(self, beginning: bytes, some_ids: bytes) -> Iterator[bytes]:
        """Yields the names in the keys with this beginning. The key with the longest common prefix with `some_ids`
        comes first: the keys are sorted, so it is next to the place of `some_ids`."""
        after, before = (self._txn.cursor(self._databases["children"]) for _ in range(2))
        num_after = _common_at(after, after.set_range(beginning + some_ids), beginning, some_ids)
        has_before = before.prev() if before.set_range(beginning + some_ids) else before.last()
        num_before = _common_at(before, has_before, beginning, some_ids)
        # Bound: each round moves one of the cursors.
        while num_after or num_before:
            self.read_at = time.monotonic()
            if num_after >= num_before:
                yield bytes(after.key())[-HASH_BYTES:]
                num_after = _common_at(after, after.next(), beginning, some_ids)
            else:
                yield bytes(before.key())[-HASH_BYTES:]
                num_before = _common_at(before, before.prev(), beginning, some_ids)

    def is_covered(self, name: bytes) -> bool:
        """Returns whether a node with payload belongs to an entry, as far as its neighbours tell: it has one, it is
        continued, or it is a checkpoint of a prompt that goes on. If that holds for each leaf, each node has an entry.
        Raises `StoreCorrupt`."""
        usage = self.usage(name)
        if (usage is not None and usage.children) or self.has_record("entries", name):
            return True
        node = self.node(name)
        if node is None or node.kind != NodeKind.CHECKPOINT:
            return False
        token_ids = node.token_ids.tobytes()
        if not token_ids:
            above = self.usage(node.parent)
            return self.has_record("entries", node.parent) or (above is not None and above.children > 1)
        for other in islice(self.similar_children(node.parent, token_ids), _TRIES):
            with suppress(StoreCorrupt):
                beside = self.node(other) if other != name else None
                if beside is not None and beside.token_ids.tobytes().startswith(token_ids):
                    return True
        return False

    def ancestry(self, name: bytes) -> Iterator[bytes]:
        """Yields `name` and its ancestors. Stops after the first block, or before a ghost or a node without a whole
        record. Does not verify records; the walk always ends."""
        position = 1 << 32
        # Bound: positions fall.
        while (value := self.get_record("nodes", name)) is not None and node_position(value) < position:
            if node_kind(value) == NodeKind.GHOST:
                break
            yield name
            position, name = node_position(value), bytes(value[:HASH_BYTES])

    def outdated_roots(self, identity: str, tenant: str) -> list[bytes]:
        """Returns the roots of a tenant that have nodes by other builds of the model of an `identity`. Raises
        `StoreCorrupt`."""
        others = (model.identity for _, model in self.models() if is_outdated(model.identity, (identity,)))
        roots = (root_hash(identity_of_tenant(other, tenant)) for other in others)
        return [root for root in roots if self.has_under("children", root)]

    def root(self, root: bytes) -> RootRecord | None:
        value = self.get_record("roots", root)
        return None if value is None else decode_record(RootRecord, root, value)

    def roots(self) -> Iterator[tuple[bytes, RootRecord]]:
        for key, value in self.records("roots"):
            yield key, decode_record(RootRecord, key, value)

    def entry(self, name: bytes) -> EntryRecord | None:
        """Returns the entry of the saved prompt that ends at a node, or None. Raises `StoreCorrupt`."""
        value = self.get_record("entries", name)
        return None if value is None else decode_record(EntryRecord, name, value)

    def names(self) -> NamesRecord:
        """Returns the identity of the store, with the secret of its names. Raises `StoreCorrupt`."""
        return decode_record(NamesRecord, NAMES.encode(), self.meta(NAMES) or b"")

    def meta(self, key: str) -> bytes | None:
        value = self.get_record("meta", key.encode())
        return None if value is None else bytes(value)

    def model(self, identity: str) -> ModelRecord | None:
        """Returns the record of a model that the store was served with. Raises `StoreCorrupt`."""
        key = model_key(identity)
        value = self.get_record("meta", key)
        return None if value is None else decode_record(ModelRecord, key, value)

    def models(self) -> Iterator[tuple[bytes, ModelRecord]]:
        """Yields key and record of each model that the store was served with. Raises `StoreCorrupt`."""
        for key, value in self.records("meta"):
            if key.startswith(MODEL_MARK):
                yield key, decode_record(ModelRecord, key, value)

    def entries(self) -> Iterator[tuple[bytes, EntryRecord]]:
        for key, value in self.records("entries"):
            yield key, decode_record(EntryRecord, key, value)

    def counts(self) -> dict[str, int]:
        """Returns the numbers of `entries`, `blocks` (with tails and checkpoints), seen `prompts`, `ghosts` and
        `notes`, and `seen_bytes` as `ghost_bytes`."""
        names = {"entries": "entries", "blocks": "usage", "prompts": "seen", "notes": "notes"}
        counts = {key: int(self._stat(name)["entries"]) for key, name in names.items()}
        return counts | {"ghosts": self._num_ghosts(), "ghost_bytes": self.seen_bytes()}

    def _num_ghosts(self) -> int:
        # Every node but a ghost has a usage record.
        return max(0, int(self._stat("nodes")["entries"]) - int(self._stat("usage")["entries"]))

    def used_bytes(self) -> int:
        """Returns the bytes of the pages that hold data, without the free pages of the file."""
        return sum(map(self.bytes_in, DATABASES))

    def seen_bytes(self) -> int:
        """Returns the approximate bytes of the seen prompts and the ghosts. A ghost counts as large as an average node
        record."""
        num_nodes = max(1, int(self._stat("nodes")["entries"]))
        return self.bytes_in("seen") + self.bytes_in("nodes") * self._num_ghosts() // num_nodes

    def seen_times(self) -> Iterator[tuple[bytes, float, int]]:
        """Yields the key of each seen prompt, the time when it came (seconds since the epoch; 0 for a damaged record),
        and its time to live in seconds (0: the daemon's)."""
        for key, value in self.records("seen"):
            came_at, ttl_s = 0.0, 0
            with suppress(StoreCorrupt):
                prompt = decode_record(PromptRecord, key, value)
                came_at, ttl_s = prompt.came_at, prompt.ttl_s
            yield key, came_at, ttl_s

    def last_under(self, database: str, root: bytes) -> Iterator[tuple[bytes, bytes | memoryview]]:
        """Yields the keys that begin with a root, the last key first, with their values."""
        cursor = self._txn.cursor(self._databases[database])
        is_at_key = cursor.prev() if cursor.set_range(root + _PAST_THE_END) else cursor.last()
        # Bound: the cursor moves on.
        while is_at_key and (key := bytes(cursor.key()))[:HASH_BYTES] == root:
            self.read_at = time.monotonic()
            yield key, cursor.value()
            is_at_key = cursor.prev()

    def notes(self) -> Iterator[StoredNote]:
        """Yields all notes, without their contents."""
        for key, value in self.records("notes"):
            yield StoredNote.of(key, value)

    def notes_of(self, root: bytes, kind: int | None = None) -> Iterator[StoredNote]:
        """Yields the notes of a root, those of one kind if it is given, without their contents."""
        for key in self.keys_under("notes", root, root if kind is None else root + bytes([kind])):
            if kind is not None and kind_of(key) != kind:
                # Keys are sorted by kind.
                return
            yield StoredNote.of(key, self.get_record("notes", key))

    def keys_under(self, database: str, root: bytes, start: bytes = b"") -> Iterator[bytes]:
        """Yields the keys that begin with a root, from `start` on: of `seen`, `notes`, or `children` for its first
        blocks. A root from a damaged record may be too short, and would then be the beginning of any key, so only keys
        whose first 16 bytes equal `root` are yielded."""
        cursor = self._txn.cursor(self._databases[database])
        is_at_key = cursor.set_range(max(root, start))
        # Bound: the cursor moves on.
        while is_at_key and (key := bytes(cursor.key()))[:HASH_BYTES] == root:
            self.read_at = time.monotonic()
            yield key
            is_at_key = cursor.next()

    def has_under(self, database: str, root: bytes) -> bool:
        """Returns whether `keys_under` yields a key."""
        return next(self.keys_under(database, root), None) is not None

    def roots_beyond(self, limit_bytes: int) -> list[bytes]:
        """Returns the roots to remove if the records of roots exceed the limit: roots without nodes, the least recently
        used first, until the records take three quarters of the limit."""
        if self.bytes_in("roots") <= limit_bytes:
            return []
        used: dict[bytes, float] = {}
        for note in self.notes():
            used[note.root] = max(used.get(note.root, 0.0), note.times.last_used)
        for key, came_at, _ in self.seen_times():
            used[key[:HASH_BYTES]] = max(used.get(key[:HASH_BYTES], 0.0), came_at)
        surplus: list[bytes] = []
        excess = self.bytes_in("roots") - limit_bytes * 3 // 4
        sizes = {root: len(value) for root, value in self.records("roots") if not self.has_under("children", root)}
        for root in sorted(sizes, key=lambda root: used.get(root, 0.0)):
            if excess <= 0:
                break
            surplus.append(root)
            excess -= sizes[root]
        return surplus

    def bytes_in(self, database: str) -> int:
        """Returns the bytes of the pages of a database."""
        stat = self._stat(database)
        pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return int(stat["psize"] * pages)

    def _stat(self, database: str) -> Any:
        return self._txn.stat(self._databases[database])


def _common_at(cursor: Any, is_at_key: bool, beginning: bytes, some_ids: bytes) -> int:
    """Returns the length in tokens of the common prefix of `some_ids` and the key at a cursor of the database
    `children`; 0 if the key has another beginning."""
    key = bytes(cursor.key()) if is_at_key else b""
    return num_common(key[HASH_BYTES:-HASH_BYTES], some_ids) if key.startswith(beginning) else 0
