"""The store: nodes of the prefix tree, their payloads, entries and history in one LMDB environment.

Readers take a `Snapshot` (one LMDB read transaction): everything they see belongs to one moment, and the pages under it
stay as they are until the snapshot is closed. There is one writer at a time, in this process or another; a publication
is one write transaction, so nothing half-written is ever visible. All state is in the file: the index is not kept in
memory, so a restart loses nothing and several processes see each other's entries.

The budget is the size of the memory map, so LMDB itself refuses to let the file outgrow it.
"""

from __future__ import annotations

import logging
import secrets
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import lmdb

from diskprefix.errors import CacheError, PrefixGone, StoreCorrupt, StoreFormatError, StoreFull, StoreUnavailable
from diskprefix.settings import format_size
from diskprefix.store.codec import Codec, encode_tokens
from diskprefix.store.environment import Environment
from diskprefix.store.eviction import choose_victims
from diskprefix.store.schema import (
    DATABASES,
    FORMAT_VERSION,
    EntryRecord,
    Kind,
    NodeRecord,
    RootRecord,
    UsageRecord,
    decode_node,
    decode_usage,
    encode_node,
    encode_record,
    encode_usage,
    history_key,
    history_sequence,
)
from diskprefix.store.snapshot import Snapshot
from diskprefix.tokens import HASH_BYTES, TokenIds, checksum

log = logging.getLogger("diskprefix")

_PAGE_BYTES = 4096
_U32, _U64, _F64 = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<d")
_EVICT_BATCH = 64
"""Nodes deleted in one transaction: more would copy more pages than a full file has free."""


@dataclass(frozen=True, eq=False)
class NewNode:
    """A node to be published: `payload` is raw and C-contiguous."""

    name: bytes
    parent: bytes
    position: int
    token_ids: TokenIds
    kind: Kind
    payload: memoryview


@dataclass(frozen=True, eq=False)
class Publication:
    """What one request adds: new nodes (parents first), the nodes it used, its entry and its place in the history.

    `tip` is the last node of the request's path, whether it is new or already stored.
    """

    root: bytes
    root_record: RootRecord
    nodes: tuple[NewNode, ...]
    tip: bytes | None = None
    entry: EntryRecord | None = None
    prompt: TokenIds | None = None
    history_limit: int = 0

    @property
    def base(self) -> bytes | None:
        """The stored node that this publication continues or ends with, to be pinned until it is written."""
        if not self.nodes:
            return self.tip
        return self.nodes[0].parent if self.nodes[0].position > 0 else None

    @property
    def payload_bytes(self) -> int:
        return sum(len(node.payload) for node in self.nodes)


class Store:
    """Open with `Store.open`. Methods raise `StoreUnavailable` when LMDB or the file system fails."""

    def __init__(self, env: Environment, budget_bytes: int, clock: Callable[[], float]) -> None:
        self.path = env.path
        self.budget_bytes = budget_bytes
        self.store_id = b""
        self.secret = 0
        self._env = env
        self._clock = clock
        self._pins: Counter[bytes] = Counter()
        self._pins_lock = threading.Lock()

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        budget_bytes: int = 0,
        read_only: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> Store:
        """Open the store in folder `path`, creating it unless `read_only`.

        Raises `StoreUnavailable` (cannot be created, read or written), `StoreFormatError` (a format of another
        version), `StoreCorrupt` (not a store, or damaged).
        """
        env = Environment(path, budget_bytes=budget_bytes, read_only=read_only, max_databases=len(DATABASES))
        store = cls(env, budget_bytes, clock)
        try:
            store._identify()
        except CacheError:
            env.close()
            raise
        return store

    def close(self) -> None:
        self._env.close()

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """A consistent read view. Keep it short: pages freed meanwhile cannot be reused until it is closed."""
        with self._env.transaction() as txn:
            yield Snapshot(self._env.databases, txn)

    def pin(self, name: bytes) -> None:
        """Keep a node, and so all its ancestors, from eviction by this process until `unpin`."""
        with self._pins_lock:
            self._pins[name] += 1

    def unpin(self, name: bytes) -> None:
        with self._pins_lock:
            self._pins[name] -= 1
            if self._pins[name] <= 0:
                del self._pins[name]

    def _pinned(self) -> frozenset[bytes]:
        with self._pins_lock:
            return frozenset(self._pins)

    def publish(self, publication: Publication) -> int:
        """Make a publication visible in one transaction, evicting for it what it needs. Answers the evicted nodes.

        Raises `StoreFull` when it cannot fit (one larger than the budget is refused before anything is evicted for it),
        `PrefixGone` when a node continues one that is no longer there, `StoreUnavailable` when a reader that does not
        end keeps evicted pages from being reused.
        """
        need = sum(_stored_size(node) for node in publication.nodes)
        if need > self._usable_bytes():
            raise StoreFull(
                f"{format_size(need)} do not fit the budget of {format_size(self.budget_bytes)}; "
                "raise --kv-cache-budget or save a shorter prefix"
            )
        keep = _parents(publication)
        evicted = self._make_room(need, keep)
        if self._try_write(publication):
            return evicted
        # Either the free pages belong to a moment that somebody still reads, or they are too scattered for a payload.
        # Evicting more helps in the second case alone, so the first is waited out.
        if not self._env.wait_for_readers():
            raise StoreUnavailable(
                f"{self.path}: an open reader keeps evicted pages from being reused; end the process that reads "
                "(a suspended `diskprefix inspect`?)"
            )
        if self._try_write(publication):
            return evicted
        evicted += self._make_room(2 * need + 2**20, keep)
        if self._try_write(publication):
            return evicted
        raise StoreFull(f"no room for {format_size(need)} in {self.path}; raise --kv-cache-budget")

    def touch(self, uses: Mapping[bytes, tuple[float, int]]) -> None:
        """Record use: node → (last time, number of hits). Missing nodes are passed over; ancestors count with it."""
        with self._env.transaction(write=True) as txn:
            for name, (when, hits) in uses.items():
                self._touch_path(txn, name, when, hits)

    def quarantine(self, name: bytes, parent: bytes) -> int:
        """Remove a damaged node and all that continues it. Answers how many nodes went.

        `parent` is the node that it continues: its own record may be what is damaged. Reads the whole index, which is
        slow and, so one hopes, rare.
        """
        with self._env.transaction(write=True) as txn:
            continuations: dict[bytes, list[bytes]] = {}
            for key, value in txn.cursor(self._env.databases["nodes"]):
                continuations.setdefault(bytes(value[:HASH_BYTES]), []).append(bytes(key))
            doomed = [(name, parent)]
            for node, _ in doomed:
                doomed += [(child, node) for child in continuations.get(node, ()) if child != node]
            return sum(self._delete(txn, node, its_parent) for node, its_parent in reversed(doomed))

    def counts(self) -> dict[str, int]:
        with self.snapshot() as snapshot:
            return snapshot.counts() | {"used_bytes": snapshot.used_bytes()}

    def shrink_to_budget(self) -> int:
        """Evict until the budget holds, for a store that was opened with a smaller one. Answers the evicted nodes."""
        return self._make_room(0, frozenset())

    def _try_write(self, publication: Publication) -> bool:
        """Write a publication in one transaction; False when LMDB finds no pages for it, and nothing was written."""
        try:
            with self._env.transaction(write=True) as txn:
                self._write(txn, publication)
        except StoreFull:
            return False
        return True

    def _usable_bytes(self) -> int:
        """The budget less what B-tree copies, the free list and scattered pages need: 1/32 of it and 1 MiB."""
        return self.budget_bytes - self.budget_bytes // 32 - 2**20

    def _make_room(self, need: int, keep: frozenset[bytes]) -> int:
        """Evict until `need` more bytes fit. Answers how many nodes were evicted."""
        with self.snapshot() as snapshot:
            excess = snapshot.used_bytes() + need - self._usable_bytes()
            if excess <= 0:
                return 0
            usage, parent_of = snapshot.usages(), snapshot.parent
            victims = choose_victims(usage, parent_of, bytes_wanted=excess, pinned=keep | self._pinned())
        for start in range(0, len(victims), _EVICT_BATCH):
            with self._env.transaction(write=True) as txn:
                for name in victims[start : start + _EVICT_BATCH]:
                    self._evict(txn, name)
        self._let_freed_pages_age()
        return len(victims)

    def _evict(self, txn: lmdb.Transaction, name: bytes) -> None:
        """Delete a victim, unless it was continued or pinned since it was chosen."""
        value = txn.get(name, db=self._env.databases["usage"])
        if value is not None and not decode_usage(value).children and name not in self._pinned():
            self._delete(txn, name, self._parent(txn, name))

    def _let_freed_pages_age(self) -> None:
        """LMDB reuses pages only from the second transaction after the one that freed them: this is the one between."""
        with self._env.transaction(write=True) as txn:
            txn.put(b"evicted_at", _F64.pack(self._clock()), db=self._env.databases["meta"])

    def _write(self, txn: lmdb.Transaction, publication: Publication) -> None:
        now = self._clock()
        if not txn.get(publication.root, db=self._env.databases["roots"]):
            txn.put(publication.root, encode_record(publication.root_record), db=self._env.databases["roots"])
        for node in publication.nodes:
            self._put_node(txn, publication.root, node, now)
        if publication.tip is not None:
            self._touch_path(txn, publication.tip, now, 0)
        if publication.entry is not None and publication.tip is not None:
            if txn.get(publication.tip, db=self._env.databases["nodes"]) is None:
                raise PrefixGone("the prefix that it ends with was evicted meanwhile")
            txn.put(
                publication.tip, encode_record(publication.entry), overwrite=False, db=self._env.databases["entries"]
            )
        if publication.prompt is not None:
            self._remember(txn, publication.root, publication.prompt, publication.history_limit)

    def _put_node(self, txn: lmdb.Transaction, root: bytes, node: NewNode, now: float) -> None:
        stored = txn.get(node.name, db=self._env.databases["nodes"])
        if stored is not None:
            there = decode_node(stored)
            if there.parent != node.parent or there.token_ids.tobytes() != node.token_ids.tobytes():
                raise PrefixGone(f"another prefix has the same name, {node.name.hex()}")
            return
        if node.position > 0:
            parent = txn.get(node.parent, db=self._env.databases["usage"])
            if parent is None:
                raise PrefixGone("the prefix that it continues was evicted meanwhile")
            u = decode_usage(parent)
            u = UsageRecord(u.last_used, u.hits, u.children + 1, u.stored_bytes)
            txn.put(node.parent, encode_usage(u), db=self._env.databases["usage"])
        size = len(node.payload)
        record = NodeRecord(
            node.parent, root, node.position, node.token_ids, node.kind, Codec.RAW, size, size, checksum(node.payload)
        )
        txn.put(node.name, encode_node(record), db=self._env.databases["nodes"])
        txn.put(node.name, encode_usage(UsageRecord(now, 0, 0, _stored_size(node))), db=self._env.databases["usage"])
        txn.put(node.name, node.payload, db=self._env.databases["payloads"])

    def _touch_path(self, txn: lmdb.Transaction, name: bytes, when: float, hits: int) -> None:
        while (value := txn.get(name, db=self._env.databases["usage"])) is not None:
            u = decode_usage(value)
            u = UsageRecord(max(u.last_used, when), u.hits + hits, u.children, u.stored_bytes)
            txn.put(name, encode_usage(u), db=self._env.databases["usage"])
            name = self._parent(txn, name)

    def _delete(self, txn: lmdb.Transaction, name: bytes, parent: bytes) -> bool:
        if not txn.delete(name, db=self._env.databases["nodes"]):
            return False
        usage = txn.get(parent, db=self._env.databases["usage"])
        if usage is not None:
            u = decode_usage(usage)
            u = UsageRecord(u.last_used, u.hits, max(0, u.children - 1), u.stored_bytes)
            txn.put(parent, encode_usage(u), db=self._env.databases["usage"])
        for database in ("usage", "payloads", "entries"):
            txn.delete(name, db=self._env.databases[database])
        return True

    def _parent(self, txn: lmdb.Transaction, name: bytes) -> bytes:
        value = txn.get(name, db=self._env.databases["nodes"])
        return b"" if value is None else bytes(value[:HASH_BYTES])

    def _remember(self, txn: lmdb.Transaction, root: bytes, prompt: TokenIds, limit: int) -> None:
        keys = [key for key, _ in Snapshot(self._env.databases, txn).history(root)]
        newest = history_sequence(keys[0]) if keys else -1
        txn.put(history_key(root, newest + 1), encode_tokens(prompt), db=self._env.databases["history"])
        for key in keys[max(0, limit - 1) :]:
            txn.delete(key, db=self._env.databases["history"])

    def _identify(self) -> None:
        """Check the format, or write it into a new store, before anything else of the file is touched."""
        self._env.open_databases(["meta"])
        with self._env.transaction(write=not self._env.read_only) as txn:
            version = txn.get(b"format", db=self._env.databases["meta"])
            if version is not None:
                self._check_format(bytes(version))
            elif self._env.read_only:
                raise StoreCorrupt(f"{self.path} holds no diskprefix store")
            else:
                self._create(txn)
            self.store_id = bytes(txn.get(b"store_id", db=self._env.databases["meta"]) or b"")
            self.secret = _U64.unpack(txn.get(b"secret", db=self._env.databases["meta"]) or b"")[0]
        self._env.open_databases(DATABASES)

    def _create(self, txn: lmdb.Transaction) -> None:
        for key, value in (
            (b"format", _U32.pack(FORMAT_VERSION)),
            (b"store_id", secrets.token_bytes(16)),
            (b"secret", _U64.pack(secrets.randbits(64))),
            (b"created_at", _F64.pack(self._clock())),
        ):
            txn.put(key, value, db=self._env.databases["meta"])

    def _check_format(self, value: bytes) -> None:
        version = _U32.unpack(value)[0] if len(value) == _U32.size else -1
        if version == FORMAT_VERSION:
            return
        age = "a newer" if version > FORMAT_VERSION else "another"
        raise StoreFormatError(
            f"{self.path} was written by {age} diskprefix (format {version}, this version reads {FORMAT_VERSION}): "
            "use that version, or choose another --kv-cache-dir"
        )


def _parents(publication: Publication) -> frozenset[bytes]:
    """Nodes that the publication continues: they must not be evicted to make room for it."""
    parents = {node.parent for node in publication.nodes if node.position > 0}
    return frozenset(parents | ({publication.tip} if publication.tip else set()))


def _stored_size(node: NewNode) -> int:
    """Bytes that a node takes in the file: whole pages for the payload, and its records."""
    pages = -(-(len(node.payload) + 16) // _PAGE_BYTES)
    return pages * _PAGE_BYTES + 4 * len(node.token_ids) + 256
