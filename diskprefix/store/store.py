"""The store: nodes of the prefix tree, their payloads, entries and history in one LMDB environment.

Readers take a `Snapshot` (one LMDB read transaction): everything they see belongs to one moment, and the pages under it
stay as they are until the snapshot is closed. There is one writer at a time, in this process or another; a publication
is one write transaction, so nothing half-written is ever visible. All state is in the file: the index is not kept in
memory, so a restart loses nothing and several processes see each other's entries.

The budget is the size of the memory map, so LMDB itself refuses to let the file outgrow it.
"""

from __future__ import annotations

import logging
import os
import secrets
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb

from diskprefix.errors import CacheError, PrefixGone, StoreCorrupt, StoreFormatError, StoreFull, StoreUnavailable
from diskprefix.settings import format_size
from diskprefix.store.codec import Codec, encode_tokens
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
from diskprefix.tokens import TokenIds, checksum

log = logging.getLogger("diskprefix")

_PAGE_BYTES = 4096
_U32, _U64, _F64 = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<d")
_DELETE_BYTES = 4 << 20
_ATTEMPTS = 8
"""Publication attempts; before each, more is evicted: free pages may be too scattered for a large payload."""


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

    def __init__(self, path: Path, env: lmdb.Environment, budget_bytes: int, clock: Callable[[], float]) -> None:
        self.path = path
        self.budget_bytes = budget_bytes
        self.databases: dict[str, Any] = {}
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
        env = _open_environment(path, budget_bytes, read_only)
        store = cls(path, env, budget_bytes, clock)
        try:
            with _translated(path):
                store._open_databases(read_only)
        except CacheError:
            env.close()
            raise
        return store

    def close(self) -> None:
        self._env.close()

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """A consistent read view. Keep it short: pages freed meanwhile cannot be reused until it is closed."""
        with _translated(self.path), self._env.begin(buffers=True) as txn:
            yield Snapshot(self.databases, txn)

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

        Raises `StoreFull` when it cannot fit; a publication larger than the budget is refused before anything is
        evicted for it. Raises `PrefixGone` when a node continues one that is no longer there.
        """
        need = sum(_stored_size(node) for node in publication.nodes)
        if need > self._usable_bytes():
            raise StoreFull(
                f"{format_size(need)} do not fit the budget of {format_size(self.budget_bytes)}; "
                "raise --kv-cache-budget or save a shorter prefix"
            )
        keep = _parents(publication)
        evicted = 0
        for attempt in range(_ATTEMPTS):
            evicted += self._make_room(need * (1 + attempt) if need else attempt * 2**20, keep)
            try:
                with _translated(self.path), self._env.begin(write=True) as txn:
                    self._write(txn, publication)
                return evicted
            except StoreFull:
                continue
        raise StoreFull(f"no room for {format_size(need)} in {self.path}; raise --kv-cache-budget")

    def touch(self, uses: Mapping[bytes, tuple[float, int]]) -> None:
        """Record use: node → (last time, number of hits). Missing nodes are passed over; ancestors count with it."""
        with _translated(self.path), self._env.begin(write=True) as txn:
            for name, (when, hits) in uses.items():
                self._touch_path(txn, name, when, hits)

    def quarantine(self, name: bytes, parent: bytes) -> None:
        """Remove a damaged node from the index, so that nothing below it can be reached.

        `parent` is the node that it continues: its own record may be what is damaged.
        """
        with _translated(self.path), self._env.begin(write=True) as txn:
            self._delete(txn, name, parent)

    def counts(self) -> dict[str, int]:
        with self.snapshot() as snapshot:
            return snapshot.counts() | {"used_bytes": snapshot.used_bytes()}

    def shrink_to_budget(self) -> int:
        """Evict until the budget holds, for a store that was opened with a smaller one. Answers the evicted nodes."""
        return self._make_room(0, frozenset())

    def _usable_bytes(self) -> int:
        """The budget less what B-tree copies, the free list and scattered pages need: 1/32 of it and 1 MiB."""
        return self.budget_bytes - self.budget_bytes // 32 - 2**20

    def _make_room(self, need: int, keep: frozenset[bytes]) -> int:
        """Evict until `need` more bytes fit. Answers how many nodes were evicted."""
        with self.snapshot() as snapshot:
            excess = snapshot.used_bytes() + need - self._usable_bytes()
        if excess <= 0:
            return 0
        with _translated(self.path), self._env.begin(write=True) as txn:
            usage = {bytes(key): decode_usage(value) for key, value in txn.cursor(self.databases["usage"])}
            pinned = keep | self._pinned()
            victims = choose_victims(usage, lambda n: self._parent(txn, n), bytes_wanted=excess, pinned=pinned)
            for name in victims:
                self._delete(txn, name, self._parent(txn, name))
        self._count_evictions(len(victims))
        return len(victims)

    def _count_evictions(self, count: int) -> None:
        """A transaction of its own on purpose: LMDB reuses pages only two transactions after they were freed."""
        with _translated(self.path), self._env.begin(write=True) as txn:
            value = txn.get(b"evictions", db=self.databases["meta"]) or _U64.pack(0)
            txn.put(b"evictions", _U64.pack(_U64.unpack(value)[0] + count), db=self.databases["meta"])

    def _write(self, txn: lmdb.Transaction, publication: Publication) -> None:
        now = self._clock()
        if not txn.get(publication.root, db=self.databases["roots"]):
            txn.put(publication.root, encode_record(publication.root_record), db=self.databases["roots"])
        for node in publication.nodes:
            self._put_node(txn, publication.root, node, now)
        if publication.tip is not None:
            self._touch_path(txn, publication.tip, now, 0)
        if publication.entry is not None and publication.tip is not None:
            if txn.get(publication.tip, db=self.databases["nodes"]) is None:
                raise PrefixGone("the prefix that it ends with was evicted meanwhile")
            txn.put(publication.tip, encode_record(publication.entry), overwrite=False, db=self.databases["entries"])
        if publication.prompt is not None:
            self._remember(txn, publication.root, publication.prompt, publication.history_limit)

    def _put_node(self, txn: lmdb.Transaction, root: bytes, node: NewNode, now: float) -> None:
        stored = txn.get(node.name, db=self.databases["nodes"])
        if stored is not None:
            there = decode_node(stored)
            if there.parent != node.parent or there.token_ids.tobytes() != node.token_ids.tobytes():
                raise PrefixGone(f"another prefix has the same name, {node.name.hex()}")
            return
        if node.position > 0:
            parent = txn.get(node.parent, db=self.databases["usage"])
            if parent is None:
                raise PrefixGone("the prefix that it continues was evicted meanwhile")
            u = decode_usage(parent)
            u = UsageRecord(u.last_used, u.hits, u.children + 1, u.stored_bytes)
            txn.put(node.parent, encode_usage(u), db=self.databases["usage"])
        size = len(node.payload)
        record = NodeRecord(
            node.parent, root, node.position, node.token_ids, node.kind, Codec.RAW, size, size, checksum(node.payload)
        )
        txn.put(node.name, encode_node(record), db=self.databases["nodes"])
        txn.put(node.name, encode_usage(UsageRecord(now, 0, 0, _stored_size(node))), db=self.databases["usage"])
        txn.put(node.name, node.payload, db=self.databases["payloads"])

    def _touch_path(self, txn: lmdb.Transaction, name: bytes, when: float, hits: int) -> None:
        while (value := txn.get(name, db=self.databases["usage"])) is not None:
            u = decode_usage(value)
            u = UsageRecord(max(u.last_used, when), u.hits + hits, u.children, u.stored_bytes)
            txn.put(name, encode_usage(u), db=self.databases["usage"])
            name = self._parent(txn, name)

    def _delete(self, txn: lmdb.Transaction, name: bytes, parent: bytes) -> None:
        if not txn.delete(name, db=self.databases["nodes"]):
            return
        usage = txn.get(parent, db=self.databases["usage"])
        if usage is not None:
            u = decode_usage(usage)
            u = UsageRecord(u.last_used, u.hits, max(0, u.children - 1), u.stored_bytes)
            txn.put(parent, encode_usage(u), db=self.databases["usage"])
        for database in ("usage", "payloads", "entries"):
            txn.delete(name, db=self.databases[database])

    def _parent(self, txn: lmdb.Transaction, name: bytes) -> bytes:
        value = txn.get(name, db=self.databases["nodes"])
        return b"" if value is None else bytes(value[:16])

    def _remember(self, txn: lmdb.Transaction, root: bytes, prompt: TokenIds, limit: int) -> None:
        keys = [key for key, _ in Snapshot(self.databases, txn).history(root)]
        newest = history_sequence(keys[0]) if keys else -1
        txn.put(history_key(root, newest + 1), encode_tokens(prompt), db=self.databases["history"])
        for key in keys[max(0, limit - 1) :]:
            txn.delete(key, db=self.databases["history"])

    def _open_databases(self, read_only: bool) -> None:
        if not read_only:
            self._env.reader_check()
        meta = self._env.open_db(b"meta", create=not read_only)
        with self._env.begin(write=not read_only) as txn:
            version = txn.get(b"format", db=meta)
            if version is None and not read_only:
                self._create(txn, meta)
            elif version is None:
                raise StoreCorrupt(f"{self.path} holds no diskprefix store")
            else:
                self._check_format(version)
            self.store_id = bytes(txn.get(b"store_id", db=meta) or b"")
            self.secret = _U64.unpack(txn.get(b"secret", db=meta) or b"")[0]
        self.databases = {
            name: meta if name == "meta" else self._env.open_db(name.encode(), create=not read_only)
            for name in DATABASES
        }

    def _create(self, txn: lmdb.Transaction, meta: Any) -> None:
        txn.put(b"format", _U32.pack(FORMAT_VERSION), db=meta)
        txn.put(b"store_id", secrets.token_bytes(16), db=meta)
        txn.put(b"secret", _U64.pack(secrets.randbits(64)), db=meta)
        txn.put(b"created_at", _F64.pack(self._clock()), db=meta)

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


def _open_environment(path: Path, budget_bytes: int, read_only: bool) -> lmdb.Environment:
    if read_only and not (path / "data.mdb").is_file():
        raise StoreUnavailable(f"{path} holds no diskprefix store; give its folder with --kv-cache-dir")
    with _translated(path):
        if not read_only:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Without write permission there is no lock file to join; a daemon that belongs to somebody else may then
        # overwrite pages under a long read, which the checks of every record turn into a clear error.
        lock = not read_only or os.access(path, os.W_OK)
        return lmdb.open(
            str(path),
            map_size=_read_map_size(path) if read_only else _map_size(path, budget_bytes),
            max_dbs=len(DATABASES),
            readonly=read_only,
            create=not read_only,
            lock=lock,
            mode=0o600,
            meminit=False,
        )


def _read_map_size(path: Path) -> int:
    """Room for what a daemon may add while we read; address space only."""
    return 2 * (path / "data.mdb").stat().st_size + 2**30


def _map_size(path: Path, budget_bytes: int) -> int:
    """The budget in whole pages; or, where the file is larger already, its size and some pages to delete with."""
    file = path / "data.mdb"
    file_bytes = file.stat().st_size if file.exists() else 0
    if file_bytes > budget_bytes:
        log.warning(
            "[disk-cache] %s has %s, more than the budget of %s: entries are evicted, the file keeps its size",
            file,
            format_size(file_bytes),
            format_size(budget_bytes),
        )
    wanted = max(budget_bytes, file_bytes + _DELETE_BYTES if file_bytes > budget_bytes else 0)
    return wanted - wanted % _PAGE_BYTES


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """LMDB's and the file system's errors become ours, at this one place."""
    try:
        yield
    except lmdb.MapFullError as error:
        raise StoreFull(f"{path}: the store is full") from error
    except (lmdb.CorruptedError, lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.PageNotFoundError) as error:
        raise StoreCorrupt(f"{path}/data.mdb is not a store ({error}); move it away to start afresh") from error
    except struct.error as error:
        raise StoreCorrupt(f"{path}: a record has a wrong length ({error})") from error
    except OSError as error:
        raise StoreUnavailable(f"--kv-cache-dir {path}: {error.strerror or error}; choose another folder") from error
    except lmdb.Error as error:
        raise StoreUnavailable(f"--kv-cache-dir {path}: {error}; choose another folder") from error
