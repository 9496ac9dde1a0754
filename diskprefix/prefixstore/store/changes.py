"""Changes to the store inside one write transaction. Each change keeps the tree complete: a node has its parent, and a
parent counts its children."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import lmdb
from msgspec import Struct
from msgspec.structs import replace

from diskprefix.errors import PrefixGone, StoreCorrupt, StoreFull
from diskprefix.prefixstore.store.codec.codec import Codec, Piece, encode_piece, is_finite, piece_seed
from diskprefix.prefixstore.store.epochs import EVERYONE, purges_of
from diskprefix.prefixstore.store.eviction import (
    after_use,
    limits_s,
    longer_ttl,
    recorded_ttl,
    superseded_ends,
    with_uses,
)
from diskprefix.prefixstore.store.note_record import used_note
from diskprefix.prefixstore.store.pieces import Payload
from diskprefix.prefixstore.store.schema import (
    NO_BUILD,
    OWN_KINDS,
    PURGES,
    EntryRecord,
    ModelRecord,
    NodeKind,
    NodeRecord,
    PromptRecord,
    RootRecord,
    UsageRecord,
    checkpoint_names,
    child_keys,
    encode_node,
    encode_record,
    encode_usage,
    model_key,
    node_root,
    paged_bytes,
    piece_key,
    shorter_names,
)
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.tokens import HASH_BYTES, TokenIds

log = logging.getLogger("diskprefix")

_RECORDS_BYTES, _TOKEN_BYTES, _PIECE_BYTES = 256, 16, 64
"""The records and keys of a node, of each of its tokens and of each of its pieces, with half-empty B-tree pages."""
NODES_AT_ONCE = 64
"""Nodes deleted in one transaction. More of them copy more pages than a full file has free."""
RECORDS_AT_ONCE = 512
_TRIES = 8
"""How many similar nodes are read in search of a longer one. Only damaged nodes can come before it."""
_Item = TypeVar("_Item")


def batches(items: Sequence[_Item], size: int) -> Iterator[Sequence[_Item]]:
    """Yields the items in order, at most `size` at a time."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


class NewNode(Struct, frozen=True, eq=False):
    """A node to be stored. The first `num_checked` pieces must be finite, because other state spoils every later token.

    `prefill_s` is how long computing its tokens took, in seconds; 0 if unknown. `ttl_s` is its time to live after the
    last use, in seconds; with None the daemon's `--kv-cache-ttl` holds. `replaces`: any of its first tokens can be
    restored without the rest, so the node replaces nodes that hold only first tokens. `is_unverified` is that of
    `NodeRecord`.
    """

    name: bytes
    parent: bytes
    position: int
    token_ids: TokenIds
    kind: NodeKind
    payload: Payload
    pieces: tuple[Piece, ...]
    prefill_s: float = 0.0
    ttl_s: float | None = None
    replaces: bool = False
    num_checked: int = 0
    is_unverified: bool = False

    @property
    def end(self) -> int:
        return self.position + len(self.token_ids)

    @property
    def payload_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    def is_sound(self, index: int) -> bool:
        """Returns whether a piece is finite or is not required to be."""
        return index >= self.num_checked or is_finite(self.payload[index], self.pieces[index].element)

    @property
    def max_bytes(self) -> int:
        """The maximum size of the node in the file, with any codec."""
        return node_bytes(len(self.token_ids), [piece.max_bytes for piece in self.pieces])


class Use(NamedTuple):
    """One or more uses (`hits`) of a node, the last one at time `when`. `ttl_s` is the time to live that the requests
    ask for, in the form that `eviction.recorded_ttl` returns."""

    when: float
    hits: int = 1
    ttl_s: int = 0

    def and_also(self, other: Use) -> Use:
        return Use(max(self.when, other.when), self.hits + other.hits, longer_ttl(self.ttl_s, other.ttl_s))


def node_bytes(num_tokens: int, piece_bytes: list[int]) -> int:
    """Returns the approximate size of a node in the file: whole pages for its pieces, and its records."""
    records_bytes = _RECORDS_BYTES + _TOKEN_BYTES * num_tokens + _PIECE_BYTES * len(piece_bytes)
    return records_bytes + sum(map(paged_bytes, piece_bytes))


class SmallWrite(NamedTuple):
    """Changes that share a transaction with others: `put` makes them. They take at most `need_bytes` of the file."""

    need_bytes: int
    put: Callable[[Changes], None]


WriteSource = Callable[[], AbstractContextManager[SmallWrite | None]]
"""Yields a small write, or None if there is nothing to write. If the block raises, the source yields the write again
later."""


def touches(uses: Mapping[bytes, Use]) -> SmallWrite:
    """Returns the write that records the use of nodes, given by their names, and of their ancestors. Ignores missing
    nodes."""

    def put_uses(changes: Changes) -> None:
        for name, use in uses.items():
            changes.touch(name, use)

    return SmallWrite(0, put_uses)


class Changes(Snapshot):
    """A write transaction. It sees its own changes; others see them once it is committed."""

    def __init__(
        self,
        databases: Mapping[str, Any],
        txn: lmdb.Transaction,
        now: float,
        require_sound_runs: Callable[[bytes], None] = lambda _name: None,
        build: bytes = NO_BUILD,
    ) -> None:
        """`require_sound_runs` is called with the name of a node before its pieces are deleted. `build` is the digest
        of the build that computed new nodes."""
        super().__init__(databases, txn)
        self.now, self._build = now, build
        self._require_sound_runs = require_sound_runs
        self.num_bytes = 0
        """The size of the records that were stored, in whole pages."""
        self.moved_entries: set[bytes] = set()
        """The nodes that got the entry of a deleted one."""

    def put_meta(self, key: str, value: bytes) -> None:
        self._put_record("meta", key.encode(), value)

    def record_purge(self, purged: Collection[str] = EVERYONE) -> None:
        """Begins a new epoch of the tenants that were `purged` (see `Purges.ids`). State of them that earlier requests
        hold in memory is dropped and never stored."""
        self.put_meta(PURGES, purges_of(self).and_of(purged).encoded())

    def put_root(self, root: bytes, record: RootRecord) -> None:
        """Stores the record of a root unless a sound record is stored already."""
        with suppress(StoreCorrupt):
            if self.root(root) is not None:
                return
        self._put_record("roots", root, encode_record(root, record))

    def put_model(self, record: ModelRecord) -> None:
        """Stores the record of a model that the store is served with."""
        key = model_key(record.identity)
        self._put_record("meta", key, encode_record(key, record))

    def put_node(self, root: bytes, node: NewNode, codec: Codec) -> bytes:
        """Stores a node with its payload. Returns its name, or the name of a stored longer node that would replace it.
        A ghost of this name becomes the node; a stored node of this name gets the longer time to live.

        Raises `PrefixGone` if the parent is not stored, or if the name belongs to another prefix, and `StoreCorrupt` if
        the record under the name is damaged.
        """
        known, token_ids = self.node_or_ghost(node.name), node.token_ids.tobytes()
        if known is not None and (known.parent, known.token_ids.tobytes()) != (node.parent, token_ids):
            raise PrefixGone(f"another prefix has the same name, {node.name.hex()}")
        if known is not None and known.kind != NodeKind.GHOST:
            self._keep_for(node.name, recorded_ttl(node.ttl_s))
            return node.name
        if node.replaces and (longer := self._longer(node.parent, token_ids, node.kind)) is not None:
            return longer
        if node.position > 0 and not self._add_children(node.parent, 1):
            raise PrefixGone("the prefix that it continues was evicted meanwhile, or could not be saved")
        sizes = self._put_payload(node, codec)
        record = NodeRecord(
            parent=node.parent,
            root=root,
            position=node.position,
            token_ids=node.token_ids,
            kind=node.kind,
            num_pieces=len(node.pieces),
            raw_bytes=node.payload_bytes,
            stored_bytes=sum(sizes),
            seen_children=0 if known is None else known.seen_children,
            is_unverified=node.is_unverified,
            build=self._build,
        )
        usage = UsageRecord(
            last_used=self.now,
            children=0,
            stored_bytes=node_bytes(len(node.token_ids), sizes),
            prefill_s=node.prefill_s,
            created_at=self.now,
            ttl_s=recorded_ttl(node.ttl_s),
        )
        self._put_record("nodes", node.name, encode_node(node.name, record))
        for key in child_keys(node.name, node.parent, token_ids):
            self._put_record("children", key, b"")
        self.put_usage(node.name, usage)
        return node.name

    @cached_property
    def _secret(self) -> int:
        return self.names().secret

    def remove_shorter(self, node: NewNode) -> None:
        """Removes the nodes that a stored node replaces, with their entries, and adds their uses to its record. Keeps
        nodes with a longer time to live."""
        if node.position > 0:
            parent = self.usage(node.parent)
            if parent is None or parent.children < 2:
                return
        usage = self.usage(node.name)
        assert usage is not None, "the node was stored in this transaction"
        for name in shorter_names(self._secret, node.parent, node.token_ids.tobytes(), node.kind):
            shorter = self.usage(name)
            if shorter is None or shorter.children or longer_ttl(shorter.ttl_s, usage.ttl_s) != usage.ttl_s:
                continue
            self.delete_node(name, node.parent)
            usage = with_uses(usage, shorter)
            self.put_usage(node.name, usage)

    def remove_superseded(
        self,
        node: NewNode,
        anchors: Collection[int],
        *,
        ttl_s: float,
        pinned: Container[bytes],
        has_entry: bool,
    ) -> None:
        """Removes the earlier checkpoints and tails of a conversation that a stored one, `node`, supersedes. Keeps
        pinned nodes, and nodes with a longer time to live, which do not count as checkpoints. `ttl_s` is the daemon's
        time to live. With `has_entry`, the entry of `node` replaces the entries of kept checkpoints, which are then
        listed with `node`. Tails keep their entries, because `PrefixTree.entry` lists a tail with its own prompt
        only."""
        stored_at: dict[int, list[tuple[NodeKind, bytes, bytes]]] = {node.end: []}
        own_s = limits_s(recorded_ttl(node.ttl_s), ttl_s)
        parent, position, behind = node.parent, node.position, node.token_ids.tobytes()
        # Bound: positions fall.
        while True:
            usage = self.usage(parent) if position else None
            if not position or (usage is not None and usage.children > 1):
                for number, names in enumerate(checkpoint_names(self._secret, parent, behind)):
                    for kind, name in names:
                        stored = self.usage(name)
                        if stored is not None and limits_s(stored.ttl_s, ttl_s) <= own_s:
                            stored_at.setdefault(position + number, []).append((kind, name, parent))
            block = self.node(parent) if position else None
            if block is None or block.position >= position:
                # A damaged record could lead to a cycle.
                break
            parent, position, behind = block.parent, block.position, block.token_ids.tobytes()
        superseded = superseded_ends(stored_at, anchors)
        for end in stored_at.keys() - {node.end} - set(anchors):
            for kind, name, parent in stored_at[end]:
                if end in superseded and name not in pinned:
                    self.delete_node(name, parent)
                elif has_entry and kind == NodeKind.CHECKPOINT:
                    self.delete_record("entries", name)

    def remove_interim(self, name: bytes, parent: bytes) -> None:
        """Removes an interim checkpoint, which continues `parent`, unless a saved prompt ends there."""
        entry = self._sound_entry(name)
        if entry is None or entry.kind not in OWN_KINDS:
            self.delete_node(name, parent)

    def put_entry(self, name: bytes, entry: EntryRecord) -> None:
        """Stores an entry at its last node, unless one is there that it does not replace. Raises `PrefixGone` if the
        node is not stored."""
        if not self.has_record("usage", name):
            raise PrefixGone("the prefix that it ends with was evicted meanwhile")
        known = self._sound_entry(name)
        if known is None or entry.replaces(known):
            self._put_record("entries", name, encode_record(name, entry))

    def cover(self, nodes: Sequence[NewNode], entry: EntryRecord, continued: Collection[bytes] = ()) -> None:
        """Stores an entry at each of the stored `nodes` that belongs to none: at the last one, and at checkpoints of
        other prompts. An entry at a node of `continued` ends if it passes to this one."""
        known = {name: before for name in continued if (before := self._sound_entry(name)) is not None}
        passing = {name: before for name, before in known.items() if before.passes_to(entry)}
        for name in passing:
            self.delete_record("entries", name)
        for node in reversed(nodes):
            if self.has_record("usage", node.name) and not self.is_covered(node.name):
                self.put_entry(node.name, replace(entry, num_tokens=node.end))
        for name, before in passing.items():
            if not self.is_covered(name):
                self.put_entry(name, before)

    def _sound_entry(self, name: bytes) -> EntryRecord | None:
        with suppress(StoreCorrupt):
            return self.entry(name)
        return None

    def _move_entry(self, entry: EntryRecord, parent: bytes, token_ids: bytes) -> None:
        """Stores the entry of a deleted node at the node before it if that belongs to no other entry. The deleted node
        continued `parent` with these token ids (int32, little-endian)."""
        above = self.usage(parent) if parent else None
        name = parent
        if above is None or above.children:
            beside = (
                name for names in reversed(checkpoint_names(self._secret, parent, token_ids)) for _, name in names
            )
            name = next((name for name in beside if self.has_record("usage", name)), b"")
        node = self.node(name) if name else None
        if node is not None and not self.is_covered(name):
            self.put_entry(name, entry.shortened(node.end))
            self.moved_entries.add(name)

    def touch(self, name: bytes, use: Use) -> None:
        """Records the use of a node and of all its ancestors."""
        table = self.usages(self.ancestry(name))
        for node, record in zip(table.names, after_use(table.records, *use), strict=True):
            self._put_record("usage", node, record.tobytes())

    def delete_node(self, name: bytes, parent: bytes) -> bool:
        """Removes a node with its payload. Returns whether it was stored. Its entry moves to the node before it, unless
        that belongs to another one. A node on the path of a seen prompt becomes a ghost; a ghost is removed."""
        is_stored, node, entry = self.has_record("nodes", name), None, self._sound_entry(name)
        try:
            node = self.node_or_ghost(name)
        except StoreCorrupt as error:
            root = self._root_of_damaged(name, parent)
            if self.has_under("seen", root):
                self.forget_seen(root, error)
        self._delete_children_keys(name, node)
        if node is None or node.kind == NodeKind.GHOST:
            self.delete_record("nodes", name)
        else:
            self.put_record(name, replace(node, kind=NodeKind.GHOST, num_pieces=0, raw_bytes=0, stored_bytes=0))
        if is_stored and (node is None or node.kind != NodeKind.GHOST):
            # A parent whose usage record cannot be read is damaged itself.
            with suppress(StoreCorrupt):
                self._add_children(parent, -1)
        for database in ("usage", "entries"):
            self.delete_record(database, name)
        self._delete_payload(name)
        if entry is not None:
            # A damaged neighbour is a problem of its own.
            with suppress(StoreCorrupt):
                self._move_entry(entry, parent, b"" if node is None else node.token_ids.tobytes())
        return is_stored

    def forget_notes(self, keys: Iterable[bytes]) -> None:
        """Removes notes, given by their keys, and the records of roots under which nothing is stored any more."""
        self.delete_bare_roots({key[:HASH_BYTES] for key in keys if self.delete_record("notes", key)})

    def delete_bare_roots(self, roots: set[bytes]) -> int:
        """Removes the records of the `roots` under which nothing is stored. Returns the number of removed records."""
        in_use = {root for root in roots if any(self.has_under(name, root) for name in ("seen", "notes", "children"))}
        # A damaged record may name no root at all, and LMDB refuses an empty key.
        return sum(self.delete_record("roots", root) for root in roots - in_use if root)

    def put_prompt(self, key: bytes, record: PromptRecord) -> None:
        """Stores the record of a seen prompt; see `ghosts`."""
        self._put_record("seen", key, encode_record(key, record))

    def count_seen(self, name: bytes, number: int, new: NodeRecord | None = None) -> NodeRecord:
        """Adds `number` to the `seen_children` of a node, or of `new` if there is no node of this name. Returns the
        changed record. Raises `StoreCorrupt` if the node is missing or damaged, or its count would be negative."""
        node = self.node_or_ghost(name) or new
        if node is None or node.seen_children + number < 0:
            raise StoreCorrupt(f"the block {name.hex()} of a recent prompt is missing, or counts too few")
        node = replace(node, seen_children=node.seen_children + number)
        self.put_record(name, node)
        return node

    def forget_seen(self, root: bytes, why: StoreCorrupt | str) -> int:
        """Removes the seen prompts and ghosts of a root, because one is damaged. Returns the number of prompts."""
        log.warning("[disk-cache] what was seen under root %s is forgotten: %s", root.hex(), why)
        for name in [name for name, value in self.records("nodes") if node_root(value) == root]:
            # A damaged record is that node's own problem.
            with suppress(StoreCorrupt):
                node = self.node_or_ghost(name)
                if node is not None and (node.seen_children or node.kind == NodeKind.GHOST):
                    self.put_record(name, replace(node, seen_children=0))
        return sum(self.delete_record("seen", key) for key in list(self.keys_under("seen", root)))

    def put_record(self, name: bytes, node: NodeRecord) -> None:
        """Stores the record of a node. Removes a ghost without children."""
        if node.kind == NodeKind.GHOST and not node.seen_children:
            self.delete_record("nodes", name)
        else:
            self._put_record("nodes", name, encode_node(name, node))

    def put_note(self, key: bytes, value: bytes) -> None:
        """Stores an encoded note, replacing any with this key."""
        self._put_record("notes", key, value)

    def use_note(self, key: bytes, when: float) -> None:
        """Records the use of a note. Leaves a damaged note as it is."""
        if (value := self.get_record("notes", key)) is not None:
            with suppress(StoreCorrupt):
                self._put_record("notes", key, used_note(key, value, when))

    def put_usage(self, name: bytes, usage: UsageRecord) -> None:
        self._put_record("usage", name, encode_usage(usage))

    def _root_of_damaged(self, name: bytes, parent: bytes) -> bytes:
        """Returns the root of a node whose record is damaged. The record of its parent names the root, or `parent` is
        the root itself. Otherwise returns the root in the node's own record, which may be too short to have one."""
        above = None
        with suppress(StoreCorrupt):
            above = self.node_or_ghost(parent) if parent else None
        if above is not None:
            return above.root
        return parent if self.has_under("seen", parent) else node_root(self.get_record("nodes", name))

    def _delete_children_keys(self, name: bytes, node: NodeRecord | None) -> None:
        """Removes a node from the index of children. Without its record (None), searches all keys."""
        if node is None:
            keys = [key for key in self.keys("children") if key[-HASH_BYTES:] == name]
        else:
            keys = child_keys(name, node.parent, node.token_ids.tobytes())
        for key in keys:
            self.delete_record("children", key)

    def _keep_for(self, name: bytes, ttl_s: int) -> None:
        usage = self.usage(name)
        if usage is not None and (longer := longer_ttl(usage.ttl_s, ttl_s)) != usage.ttl_s:
            self.put_usage(name, usage._replace(ttl_s=longer))

    def _longer(self, parent: bytes, token_ids: bytes, kind: NodeKind) -> bytes | None:
        """Returns the name of a node that continues `parent` and has all these tokens and more, or None. A tail with
        the same number of tokens counts as longer than a block, because it also has the logits at their end."""
        for name in islice(self.similar_children(parent, token_ids), _TRIES):
            try:
                other = self.node(name)
            except StoreCorrupt:
                continue
            if other is None or not other.token_ids.tobytes().startswith(token_ids):
                continue
            if 4 * other.num_tokens > len(token_ids) or (other.kind, kind) == (NodeKind.TAIL, NodeKind.BLOCK):
                return name
        return None

    def _put_payload(self, node: NewNode, codec: Codec) -> list[int]:
        # This checks the headers of old pieces, which LMDB relies on when it overwrites them.
        self._delete_payload(node.name)
        sizes: list[int] = []
        for index, (raw, piece) in enumerate(zip(node.payload, node.pieces, strict=True)):
            encoded = encode_piece(raw, piece, codec, piece_seed(node.name, index))
            sizes.append(self._put_record("payloads", piece_key(node.name, index), encoded))
        return sizes

    def _delete_payload(self, name: bytes) -> None:
        """Removes all stored pieces of a node. Does not use the node's record, which counts them but may be damaged."""
        self._require_sound_runs(name)
        cursor = self._txn.cursor(self._databases["payloads"])
        # Bound: each round removes a record.
        while cursor.set_range(name) and bytes(cursor.key())[:HASH_BYTES] == name:
            cursor.delete()

    def _add_children(self, name: bytes, number: int) -> bool:
        # A damaged record may name no parent at all, and LMDB refuses an empty key.
        usage = self.usage(name) if name else None
        if usage is not None:
            self.put_usage(name, usage._replace(children=max(0, usage.children + number)))
        return usage is not None

    def _put_record(self, database: str, key: bytes, value: Any) -> int:
        """Stores a record. Returns the bytes of its value in the file."""
        if not self._txn.put(key, value, db=self._databases[database]):
            raise StoreFull(f"{database}: LMDB took no record for {key.hex()}")
        self.num_bytes += paged_bytes(len(value))
        return len(value)

    def delete_record(self, database: str, key: bytes) -> bool:
        """Removes one record. Returns whether it was stored."""
        return bool(self._txn.delete(key, db=self._databases[database]))
