"""The read side of the store: one consistent view of the tree, its payloads, entries and the prompts that were seen."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import lmdb
import numpy as np

from diskprefix.errors import StoreCorrupt
from diskprefix.store.codec.codec import Piece, decode_piece, piece_seed
from diskprefix.store.codec.planes import Bytes
from diskprefix.store.eviction import UsageTable
from diskprefix.store.note_record import StoredNote
from diskprefix.store.pieces import PayloadLayout
from diskprefix.store.schema import (
    DATABASES,
    MODEL_MARK,
    USAGE_DTYPE,
    EntryRecord,
    Kind,
    ModelRecord,
    NodeRecord,
    PromptRecord,
    RootRecord,
    UsageRecord,
    child_keys,
    child_parts,
    decode_node,
    decode_record,
    decode_usage,
    is_node,
    node_kind,
    node_name,
    node_position,
    node_root,
    piece_index,
    piece_key,
)
from diskprefix.tokens import HASH_BYTES, num_common

log = logging.getLogger("diskprefix")

_PAST_THE_END = b"\xff" * (HASH_BYTES + 1)


class Snapshot:
    """One consistent view of the store. Not thread-safe, except that payload views may be read from any thread."""

    def __init__(self, databases: Mapping[str, Any], txn: lmdb.Transaction, *, copy_payloads: bool = False) -> None:
        """`copy_payloads`: pieces are copied before they are verified, because writers do not know of this transaction
        and may overwrite its pages."""
        self._databases = databases
        self._txn = txn
        self._copy_payloads = copy_payloads

    def node(self, name: bytes) -> NodeRecord | None:
        """Returns the index record of a node, or None if there is none, or only a ghost. Raises `StoreCorrupt` if it
        does not verify."""
        node = self.node_or_ghost(name)
        return None if node is None or node.kind == Kind.GHOST else node

    def node_or_ghost(self, name: bytes) -> NodeRecord | None:
        """Returns the index record of a node, with or without payload, or None. Raises `StoreCorrupt`."""
        value = self.record("nodes", name)
        return None if value is None else decode_node(name, value)

    def is_ghost(self, name: bytes) -> bool:
        """Returns whether there is a ghost of this name. Does not verify its record."""
        value = self.record("nodes", name)
        return value is not None and node_kind(value) == Kind.GHOST

    def has(self, name: bytes, parent: bytes, position: int, kind: Kind, token_ids: bytes) -> bool:
        """Returns whether this node is stored: these token ids (int32, little-endian), at this place, after this
        parent. Raises `StoreCorrupt` if there is a node of this name that is another."""
        value = self.record("nodes", name)
        if value is None or node_kind(value) == Kind.GHOST:
            return False
        if not is_node(value, parent, position, kind, token_ids):
            raise StoreCorrupt("its record is damaged or that of another prefix")
        return True

    def piece(self, name: bytes, index: int) -> memoryview | None:
        """Returns a piece of a payload as it stands in the file, or None. The view is valid until the snapshot is
        closed."""
        return next(self.pieces_at(name, (index,)))

    def pieces_at(self, name: bytes, indexes: Iterable[int]) -> Iterator[memoryview | None]:
        """Yields some of a node's pieces, as `piece` does."""
        payloads = self._databases["payloads"]
        for index in indexes:
            view: Any = self._txn.get(piece_key(name, index), db=payloads)
            yield memoryview(bytes(view)) if view is not None and self._copy_payloads else view

    def pieces(self, name: bytes) -> Iterator[tuple[int, memoryview]]:
        """Yields every piece of a node's payload as it stands in the file, with its index, in order."""
        cursor = self._txn.cursor(self._databases["payloads"])
        found = cursor.set_range(name)
        while found and (index := piece_index(cursor.key(), name)) is not None:
            yield index, memoryview(cursor.value())
            found = cursor.next()

    def decode(self, name: bytes, index: int, stored: memoryview, piece: Piece, out: Bytes) -> None:
        """Verifies a piece, given as it stands in the file, and writes it to `out`; see `decode_piece`. For any
        thread."""
        decode_piece(stored, piece, piece_seed(name, index), out)

    def record(self, database: str, key: bytes) -> Any:
        """Returns a record, None if there is none."""
        return self._txn.get(key, db=self._databases[database])

    def listed(self, database: str, key: bytes) -> Any:
        """Returns the record of a key that was listed. If it is not found, the order of the file's pages is broken,
        which LMDB does not notice itself. Raises its error for that, and `StoreCorrupt` where a writer may have removed
        it."""
        found = self.record(database, key)
        if found is None and not self._copy_payloads:
            raise lmdb.CorruptedError(f"a key of {database!r} that it lists is not found")
        if found is None:
            raise StoreCorrupt("it is listed and not found")
        return found

    def has_record(self, database: str, key: bytes) -> bool:
        """Returns whether there is a record of this key, sound or not."""
        return self.record(database, key) is not None

    def records(self, database: str) -> Iterator[tuple[bytes, bytes | memoryview]]:
        """Keys and values of a database."""
        for key, value in self._txn.cursor(self._databases[database]):
            yield bytes(key), value

    def child_keys(self, name: bytes, node: NodeRecord) -> list[bytes]:
        """Returns the keys of a node in the database `children`; none for a node without tokens."""
        return child_keys(name, node.parent, node.token_ids.tobytes())

    def keys(self, database: str) -> Iterator[bytes]:
        """Keys of a database. No value is touched: in a write transaction each would be a copy."""
        cursor = self._txn.cursor(self._databases[database])
        for key in cursor.iternext(keys=True, values=False):
            yield bytes(key)

    def usage(self, name: bytes) -> UsageRecord | None:
        value = self.record("usage", name)
        return None if value is None else decode_usage(value)

    def usages(self, names: Iterable[bytes] | None = None) -> UsageTable:
        """Returns the usage records of these nodes, as far as they are stored, or of all. Raises `StoreCorrupt`."""
        found = self.records("usage") if names is None else ((name, self.record("usage", name)) for name in names)
        usages = {name: value for name, value in found if value is not None}
        for name, value in usages.items():
            if len(value) != USAGE_DTYPE.itemsize:
                raise StoreCorrupt(f"the usage record of node {name.hex()} has {len(value)} bytes")
        return UsageTable(list(usages), np.frombuffer(b"".join(usages.values()), USAGE_DTYPE))

    def saves_nothing(self) -> Callable[[bytes], bool] | None:
        """Returns a function that tells whether nothing can be restored from a node that nothing continues: a block of
        a layout with states, because only checkpoints and tails can be restored. None if this holds for no node."""
        roots = {root for root, value in self.records("roots") if _has_states(root, value)}
        if not roots:
            return None

        def is_bare_block(name: bytes) -> bool:
            value = self.record("nodes", name)
            return value is not None and node_kind(value) == Kind.BLOCK and node_root(value) in roots

        return is_bare_block

    def parent(self, name: bytes) -> bytes:
        """Returns the node or root that a node continues; empty if there is no such node."""
        value = self.record("nodes", name)
        return b"" if value is None else bytes(value[:HASH_BYTES])

    def children(self, name: bytes, secret: int) -> list[bytes]:
        """Returns the stored nodes that continue a node, as the index lists them: first keys begin with its name. Nodes
        without tokens are in no index, but their names are known. `secret` is the store's."""
        if len(name) != HASH_BYTES:
            return []
        bare = [node_name(secret, name, b"", kind) for kind in (Kind.TAIL, Kind.CHECKPOINT)]
        found = dict.fromkeys([*bare, *(key[-HASH_BYTES:] for key in self.keys_under("children", name))])
        return [child for child in found if self.has_record("nodes", child)]

    def similar_children(self, parent: bytes, token_ids: bytes) -> Iterator[bytes]:
        """Yields the names of the nodes that continue `parent` and have the first of these token ids (int32,
        little-endian): first those that have most of them in common. Does not verify records, which may be missing."""
        found: set[bytes] = set()
        # What is listed in a later part has all tokens of the parts before.
        for beginning, part in reversed(list(child_parts(parent, token_ids))):
            for name in self._similar_in_part(beginning, part):
                if name not in found:
                    found.add(name)
                    yield name

    def _similar_in_part(self, beginning: bytes, part: bytes) -> Iterator[bytes]:
        """Does what `similar_children` does, for the keys with this beginning. Keys are sorted, so none has more in
        common with `part` than one that is nearer to its place."""
        after, before = (self._txn.cursor(self._databases["children"]) for _ in range(2))
        num_after = _common_at(after, after.set_range(beginning + part), beginning, part)
        has_before = before.prev() if before.set_range(beginning + part) else before.last()
        num_before = _common_at(before, has_before, beginning, part)
        while num_after or num_before:
            if num_after >= num_before:
                yield bytes(after.key())[-HASH_BYTES:]
                num_after = _common_at(after, after.next(), beginning, part)
            else:
                yield bytes(before.key())[-HASH_BYTES:]
                num_before = _common_at(before, before.prev(), beginning, part)

    def ancestry(self, name: bytes) -> Iterator[bytes]:
        """Yields `name` and its ancestors, up to the first block or one without a whole record. Yields nothing for a
        ghost. Does not verify records; the walk always ends."""
        position = 1 << 32
        while (value := self.record("nodes", name)) is not None and node_position(value) < position:
            if node_kind(value) == Kind.GHOST:
                break
            yield name
            position, name = node_position(value), bytes(value[:HASH_BYTES])

    def root(self, root: bytes) -> RootRecord | None:
        value = self.record("roots", root)
        return None if value is None else decode_record(RootRecord, root, value)

    def roots(self) -> Iterator[tuple[bytes, RootRecord]]:
        for key, value in self.records("roots"):
            yield key, decode_record(RootRecord, key, value)

    def entry(self, name: bytes) -> EntryRecord | None:
        """Returns the saved prompt that ends at a node, or None. Raises `StoreCorrupt`."""
        value = self.record("entries", name)
        return None if value is None else decode_record(EntryRecord, name, value)

    def meta(self, key: str) -> bytes | None:
        value = self.record("meta", key.encode())
        return None if value is None else bytes(value)

    def models(self) -> Iterator[tuple[bytes, ModelRecord]]:
        """Yields the models that the store was served with, by their keys. Raises `StoreCorrupt`."""
        for key, value in self.records("meta"):
            if key.startswith(MODEL_MARK):
                yield key, decode_record(ModelRecord, key, value)

    def entries(self) -> Iterator[tuple[bytes, EntryRecord]]:
        for key, value in self.records("entries"):
            yield key, decode_record(EntryRecord, key, value)

    def counts(self) -> dict[str, int]:
        """Returns the numbers of `entries`, `blocks` (with tails and checkpoints), recent `prompts`, `ghosts` and
        `notes`; and `seen_bytes` as `ghost_bytes`."""
        names = {"entries": "entries", "blocks": "usage", "prompts": "seen", "notes": "notes"}
        counts = {key: int(self._stat(name)["entries"]) for key, name in names.items()}
        return counts | {"ghosts": self._num_ghosts(), "ghost_bytes": self.seen_bytes()}

    def _num_ghosts(self) -> int:
        # Each other node has a usage record.
        return max(0, int(self._stat("nodes")["entries"]) - int(self._stat("usage")["entries"]))

    def used_bytes(self) -> int:
        """Returns the size of the pages that hold data. Free pages inside the file do not count."""
        return sum(self._bytes_in(name) for name in DATABASES)

    def seen_bytes(self) -> int:
        """Returns about the size of the pages with the prompts that were seen and with ghosts: these are taken to be as
        large as other nodes."""
        num_nodes = max(1, int(self._stat("nodes")["entries"]))
        return self._bytes_in("seen") + self._bytes_in("nodes") * self._num_ghosts() // num_nodes

    def seen_times(self) -> Iterator[tuple[bytes, float, int]]:
        """Yields for all prompts that were seen: the key, when it came, and its time to live in seconds (0: the
        daemon's). A damaged one came at 0."""
        for key, value in self.records("seen"):
            came_at, ttl_s = 0.0, 0
            with suppress(StoreCorrupt):
                prompt = decode_record(PromptRecord, key, value)
                came_at, ttl_s = prompt.came_at, prompt.ttl_s
            yield key, came_at, ttl_s

    def last_under(self, database: str, root: bytes) -> Iterator[tuple[bytes, bytes | memoryview]]:
        """Yields keys and values that begin with a root, the last key first."""
        cursor = self._txn.cursor(self._databases[database])
        found = cursor.set_range(root + _PAST_THE_END)
        found = cursor.prev() if found else cursor.last()
        while found and (key := bytes(cursor.key())).startswith(root):
            yield key, cursor.value()
            found = cursor.prev()

    def notes(self) -> Iterator[StoredNote]:
        """Yields all notes, without their contents."""
        for key, value in self.records("notes"):
            yield StoredNote.of(key, value)

    def notes_of(self, root: bytes) -> Iterator[StoredNote]:
        """Yields the notes of a root, without their contents."""
        for key in self.keys_under("notes", root):
            yield StoredNote.of(key, self.record("notes", key))

    def note_bytes(self) -> int:
        """Returns the size of the pages with notes."""
        return self._bytes_in("notes")

    def keys_under(self, database: str, root: bytes) -> Iterator[bytes]:
        """Yields the keys that begin with a root: what was seen under it, its notes, or its first blocks
        (`children`)."""
        cursor = self._txn.cursor(self._databases[database])
        found = cursor.set_range(root)
        while found and (key := bytes(cursor.key())).startswith(root):
            yield key
            found = cursor.next()

    def has_nodes(self, root: bytes) -> bool:
        return next(self.keys_under("children", root), None) is not None

    def roots_beyond(self, limit_bytes: int) -> list[bytes]:
        """Returns the roots that must go if the records of roots take more than the limit: those without nodes, first
        the ones that were used longest ago. The rest takes at most three quarters of it, unless it has nodes."""
        if self._bytes_in("roots") <= limit_bytes:
            return []
        used: dict[bytes, float] = {}
        for note in self.notes():
            used[note.root] = max(used.get(note.root, 0.0), note.times.last_used)
        for key, came_at, _ in self.seen_times():
            used[key[:HASH_BYTES]] = max(used.get(key[:HASH_BYTES], 0.0), came_at)
        gone: list[bytes] = []
        excess = self._bytes_in("roots") - limit_bytes * 3 // 4
        sizes = [(root, len(value)) for root, value in self.records("roots") if not self.has_nodes(root)]
        for root, size in sorted(sizes, key=lambda found: used.get(found[0], 0.0)):
            if excess <= 0:
                break
            gone.append(root)
            excess -= size
        return gone

    def _bytes_in(self, database: str) -> int:
        """Bytes of the pages that a database takes."""
        stat = self._stat(database)
        pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return int(stat["psize"] * pages)

    def _stat(self, database: str) -> Any:
        return self._txn.stat(self._databases[database])


def _common_at(cursor: Any, is_at_key: bool, beginning: bytes, part: bytes) -> int:
    """Returns how many tokens of `part` the key at a cursor of the database `children` has; 0 at another beginning."""
    key = bytes(cursor.key()) if is_at_key else b""
    if not key.startswith(beginning):
        return 0
    return num_common(key[HASH_BYTES:-HASH_BYTES], part)


def _has_states(root: bytes, record: bytes | memoryview) -> bool:
    """Returns whether the layout in a root's record has states; False for a record that cannot be read."""
    try:
        return bool(PayloadLayout.parse(decode_record(RootRecord, root, record).layout).states)
    except StoreCorrupt:
        return False
