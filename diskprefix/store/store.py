"""The store: nodes of the prefix tree, their payloads, entries and history in one LMDB environment.

Readers take a `Snapshot` (one LMDB read transaction): everything they see belongs to one moment, and the pages under it
stay as they are until the snapshot is closed. There is one writer at a time, in this process or another; a publication
is one write transaction, so nothing half-written is ever visible. All state is in the file: the index is not kept in
memory, so a restart loses nothing and several processes see each other's entries.

The budget is the size of the memory map, so LMDB itself refuses to let the file outgrow it.

The file may go away under a daemon: removed, damaged, on a disk that turned read-only. The store is *detached* then:
every call raises `StoreUnavailable`, which callers take for a miss, until `maintain` finds the folder in order again.
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

from diskprefix.errors import CacheError, PrefixGone, StoreCorrupt, StoreFormatError, StoreFull, StoreUnavailable
from diskprefix.settings import MAX_BUDGET, MIN_BUDGET, OnCorruption, format_size
from diskprefix.store.changes import Changes, NewNode, Use
from diskprefix.store.codec.choice import choose, measure
from diskprefix.store.codec.codec import Codec
from diskprefix.store.compact import compact_folder
from diskprefix.store.environment import Environment
from diskprefix.store.eviction import bytes_to_free, choose_victims, expired, recorded_ttl, usable_bytes
from diskprefix.store.folder import DATA, FolderLock, FolderUnavailable
from diskprefix.store.opening import Access, foreign_file, open_environment, set_aside
from diskprefix.store.owner import owner_rights
from diskprefix.store.schema import (
    DATABASES,
    FORMAT_VERSION,
    CodecRecord,
    EntryRecord,
    RootRecord,
    decode_codec,
    encode_record,
    identity_checksum,
)
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.tree import PrefixTree
from diskprefix.tokens import HASH_BYTES, TokenIds

log = logging.getLogger("diskprefix")

_U32, _U64, _F64 = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<d")
_EVICT_BATCH = 64
"""Nodes deleted in one transaction: more would copy more pages than a full file has free."""
_RETRY_S = 2.0
"""Between attempts to open a folder that could not be: checking a large file takes a while."""
_HISTORY_SHARE = 16
"""The recent prompts of all roots may take this part of the budget: roots are many where clients choose salts."""


@dataclass(frozen=True)
class Names:
    """What names the nodes of one store: its id, and the secret that seeds the names."""

    store_id: bytes
    secret: int


@dataclass(frozen=True, eq=False)
class Publication:
    """What one request adds: new nodes (parents first), the nodes it used, its entry and its place in the history.

    `store_id` is that of the store whose secret named the nodes. `tip` is the last node of the request's path, whether
    it is new or already stored. `ttl_s` is how long the path is to be kept after its last use, in seconds; None leaves
    that to the daemon. `prompt_group` is the group that the prompt is remembered in: 8 bytes, or none.
    """

    store_id: bytes
    root: bytes
    root_record: RootRecord
    nodes: tuple[NewNode, ...]
    tip: bytes | None = None
    entry: EntryRecord | None = None
    prompt: TokenIds | None = None
    history_limit: int = 0
    prompt_group: bytes = b""
    ttl_s: float | None = None

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

    def __init__(self, path: Path, access: Access, min_free_bytes: int, clock: Callable[[], float]) -> None:
        self.path = path
        self.budget_bytes = access.budget_bytes
        self.codec = Codec.RAW
        """How payloads are written from now on; those that are there say themselves how they were."""
        self.codec_reason = ""
        self.names = Names(b"", 0)
        """Replaced as a whole when the store is."""
        self.mapped: set[bytes] = set()
        """Nodes whose pages this process has read since the file was opened; for those who read payloads."""
        self.may_have_own_ttls = True
        """Whether a node may have a time to live of its own. What another process writes counts once `expire` has
        looked."""
        self._problem: str | None = None
        self._retry_at = 0.0
        self._access = access
        self._min_free_bytes = min_free_bytes
        self._clock = clock
        self._env: Environment | None = None
        self._lock: FolderLock | None = None
        self._pins: Counter[bytes] = Counter()
        self._pins_lock = threading.Lock()

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        budget_bytes: int = 0,
        read_only: bool = False,
        on_corruption: OnCorruption = "refuse",
        min_free_bytes: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> Store:
        """Open the store in folder `path`, creating it unless `read_only`. Without `budget_bytes`, as a tool opens it,
        the budget is the one that the last daemon had.

        Raises `StoreUnavailable` (the folder cannot be created, read or written, others may write to it, or its file
        belongs to another program). With `on_corruption` "refuse" or `read_only`, raises `StoreFormatError` for a store
        of another format and `StoreCorrupt` for a damaged file; otherwise that file is moved aside.
        """
        access = Access(budget_bytes=budget_bytes, read_only=read_only, on_corruption=on_corruption)
        store = cls(path, access, min_free_bytes, clock)
        store._attach()
        return store

    @classmethod
    def open_for_serving(
        cls, path: Path, *, budget_bytes: int, on_corruption: OnCorruption, min_free_bytes: int
    ) -> Store:
        """`open` for a daemon: where the file system is read-only or full it starts all the same, to be mended by
        `maintain`. A folder that can never do raises, as in `open`."""
        access = Access(budget_bytes=budget_bytes, on_corruption=on_corruption)
        store = cls(path, access, min_free_bytes, time.time)
        try:
            store._attach()
        except FolderUnavailable as error:
            if not error.passing:
                raise
            store._make_do(error)
        store._fit_budget_or_say_why()
        return store

    @property
    def store_id(self) -> bytes:
        return self.names.store_id

    @property
    def secret(self) -> int:
        return self.names.secret

    @property
    def problem(self) -> str | None:
        """Why nothing can be saved, or not even read; None while all is well."""
        env = self._env
        return self._problem or (env.broken if env is not None else None)

    def close(self) -> None:
        self._detach()

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """A consistent read view. Keep it short: pages freed meanwhile cannot be reused until it is closed."""
        env = self._environment()
        with env.transaction() as txn:
            yield Snapshot(env.databases, txn, copy_payloads=not env.has_lock)

    @contextmanager
    def changes(self) -> Iterator[Changes]:
        """A write transaction: committed at the end, rolled back by an exception. One at a time in all processes."""
        env = self._environment()
        if env.read_only:
            raise StoreUnavailable(f"--kv-cache-dir {self.path}: read-only file system; nothing is saved")
        with env.transaction(write=True) as txn:
            yield Changes(env.databases, txn, self._clock())

    def pin(self, name: bytes) -> None:
        """Keep a node, and so all its ancestors, from eviction by this process until `unpin`."""
        with self._pins_lock:
            self._pins[name] += 1

    def unpin(self, name: bytes) -> None:
        with self._pins_lock:
            self._pins[name] -= 1
            if self._pins[name] <= 0:
                del self._pins[name]

    def publish(self, publication: Publication) -> int:
        """Make a publication visible in one transaction, evicting for it what it needs. Answers the evicted nodes.

        Raises `StoreFull` when it cannot fit; nothing is evicted for it then, unless room was made and turned out to be
        too scattered. Raises `PrefixGone` when a node continues one that is no longer there, `StoreUnavailable` when a
        reader that does not end keeps evicted pages from being reused.
        """
        if publication.store_id != self.store_id:
            raise PrefixGone("the store was replaced meanwhile")
        with self.snapshot() as snapshot:
            if publication.base is not None and snapshot.usage(publication.base) is None:
                raise PrefixGone("the prefix that it continues was evicted meanwhile")
            need = sum(node.most_bytes for node in publication.nodes if snapshot.usage(node.name) is None)
        self.check_fits(need)
        keep = _used_by(publication)
        evicted = self._make_room(need, keep)
        if self._may_grow(need) and self._try_write(publication):
            return evicted
        # Either the free pages are too young, or belong to a moment that somebody still reads, or are too scattered for
        # a payload. Evicting more helps in the last case alone, so the others are waited out.
        if not self._environment().wait_for_readers():
            raise StoreUnavailable(
                f"{self.path}: an open reader keeps evicted pages from being reused; end the process that reads "
                "(a suspended `diskprefix inspect`?)"
            )
        self._let_freed_pages_age()
        if self._try_write(publication):
            return evicted
        evicted += self._make_room(2 * need + 2**20, keep)
        if self._try_write(publication):
            return evicted
        raise StoreFull(f"no room for {format_size(need)} in {self.path}; raise --kv-cache-budget")

    def check_fits(self, need_bytes: int) -> None:
        """Raises `StoreFull` if that much could not be stored even if everything else were evicted."""
        if need_bytes > self._usable_bytes():
            raise StoreFull(f"{format_size(need_bytes)} do not fit {self._limit()}")

    def touch(self, uses: Mapping[bytes, Use]) -> None:
        """Record the use of nodes, given by their names. Missing nodes are passed over; ancestors count with it."""
        with self.changes() as changes:
            for name, use in uses.items():
                changes.touch(name, use)

    def quarantine(self, name: bytes, parent: bytes) -> int:
        """Remove a damaged node and all that continues it. Answers how many nodes went.

        `parent` is the node that it continues: its own record may be what is damaged. Reads the whole index, which is
        slow and, so one hopes, rare.
        """
        with self.changes() as changes:
            return sum(changes.delete_node(*node) for node in PrefixTree(changes).subtrees({name: parent}))

    def expire(self, ttl_s: float) -> int:
        """Remove what was not used for `ttl_s` seconds, nodes and remembered prompts; 0 keeps it. Nodes that were asked
        to be kept for another time go after that. Answers how many nodes went."""
        with self.snapshot() as snapshot:
            table, now = snapshot.usages(), self._clock()
            names = expired(table, snapshot.parent, ttl_s=ttl_s, pinned=self._pinned(), now=now)
            prompts = snapshot.prompts_before(now - ttl_s) if ttl_s else []
        self.may_have_own_ttls = table.has_own_ttls
        self._evict(names)
        self._forget(prompts)
        return len(names)

    def counts(self) -> dict[str, int]:
        with self.snapshot() as snapshot:
            return snapshot.counts() | {"used_bytes": snapshot.used_bytes(), "file_bytes": self.file_bytes()}

    def file_bytes(self) -> int:
        return self._environment().file_bytes()

    def fit_budget(self) -> int:
        """Evict until the budget holds, for a store that was opened with a smaller one, and make the file smaller if no
        other process has it open. Answers the evicted nodes."""
        if self._environment().read_only:
            return 0
        evicted = self._make_room(0, frozenset())
        file_bytes = self.file_bytes()
        if file_bytes > self.budget_bytes:
            log.info(
                "[disk-cache] the file has %s, more than the budget of %s: writing it anew",
                format_size(file_bytes),
                format_size(self.budget_bytes),
            )
            self._compact()
        return evicted

    def _fit_budget_or_say_why(self) -> None:
        try:
            if self.problem is None:
                self.fit_budget()
        except CacheError as error:
            log.warning("[disk-cache] the budget does not hold yet: %s", error)

    def _compact(self) -> None:
        """What fails leaves the file as it is; a store that cannot be opened again is `maintain`'s."""
        self._detach()
        try:
            compact_folder(self.path)
        except CacheError as error:
            log.warning("[disk-cache] the file keeps its size: %s", error)
        try:
            self._attach()
        except CacheError as error:
            self._problem = str(error)

    def use_codec(self, name: str, available_bytes: int) -> None:
        """Write payloads as `raw`, `zstd` or `planes` from now on, or as `auto` measures to be best.

        A store is measured once, when it is first used with `auto`; `available_bytes` of memory may cache its pages.
        """
        if name != "auto":
            self.codec, self.codec_reason = Codec[name.upper()], "--kv-cache-codec"
            return
        record = self._remembered_codec() or self._measured_codec(available_bytes)
        self.codec, self.codec_reason = Codec(record.codec), record.reason

    def _remembered_codec(self) -> CodecRecord | None:
        try:
            with self.snapshot() as snapshot:
                value = snapshot.meta("codec")
            record = None if value is None else decode_codec(b"codec", value)
        except CacheError:
            return None
        return record if record is not None and record.codec in list(Codec) else None

    def _measured_codec(self, available_bytes: int) -> CodecRecord:
        try:
            with owner_rights(self.path) as folder:
                speeds = measure(folder)
        except OSError:
            speeds = measure(None)
        codec, reason = choose(speeds, budget_bytes=self.budget_bytes, available_memory_bytes=available_bytes)
        record = CodecRecord(codec=codec, reason=reason)
        log.info("[disk-cache] codec %s: %s", codec.name.lower(), reason)
        if speeds.disk_bytes_per_s is None:
            return record
        try:
            with self.changes() as changes:
                changes.put_meta("codec", encode_record(b"codec", record))
        except CacheError as error:
            log.debug("[disk-cache] the choice of the codec is not remembered: %s", error)
        return record

    def maintain(self) -> bool:
        """Look whether the file is still the one that is open and in order, and open it again if not.

        For the writing thread, now and then. Answers whether the store was opened again. Never raises.
        """
        if not self._is_due():
            return False
        self._retry_at = time.monotonic() + _RETRY_S
        try:
            self._detach()
            self._attach()
        except FolderUnavailable as error:
            self._make_do(error)
        except CacheError as error:
            self._problem = str(error)
        else:
            self._fit_budget_or_say_why()
        return self.problem is None

    def _is_due(self) -> bool:
        """Whether the folder should be opened again, and was not tried a moment ago."""
        env = self._env
        if env is not None and (env.broken or not env.is_in_place()):
            self._problem = env.broken or f"{self.path} was removed or replaced"
            return True
        could_write = env is None or (env.read_only and os.access(self.path, os.W_OK))
        return could_write and time.monotonic() >= self._retry_at

    def _attach(self) -> None:
        try:
            self._open(self._access)
        except (StoreCorrupt, StoreFormatError) as error:
            if self._access.on_corruption == "refuse":
                raise
            set_aside(self.path, error)
            self._open(self._access)
        self._problem = None

    def _open(self, access: Access) -> None:
        env, lock = open_environment(self.path, access)
        try:
            names = self._identify(env)
            self._agree_on_budget(env)
        except BaseException:
            env.close()
            lock.close()
            raise
        self.names, self._env, self._lock, self.mapped = names, env, lock, set()
        self.may_have_own_ttls = True

    def _agree_on_budget(self, env: Environment) -> None:
        """A daemon says what its budget is; a tool, which has none, keeps to what the last daemon said."""
        with env.transaction() as txn:
            said = Snapshot(env.databases, txn).meta("budget") or b""
        if not self._access.budget_bytes:
            budget = _U64.unpack(said)[0] if len(said) == _U64.size else 0
            self.budget_bytes = budget if MIN_BUDGET <= budget <= MAX_BUDGET else env.file_bytes()
            if not env.read_only:
                env.let_grow_to(self.budget_bytes)
        elif said != _U64.pack(self.budget_bytes) and not env.read_only:
            with env.transaction(write=True) as txn:
                Changes(env.databases, txn, self._clock()).put_meta("budget", _U64.pack(self.budget_bytes))

    def _detach(self) -> None:
        """Raises `StoreUnavailable` while a transaction of this process does not end."""
        env, self._env = self._env, None
        if env is not None and not env.close_when_idle():
            self._env = env
            raise StoreUnavailable(f"{self.path}: a reader of this process does not end")
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _make_do(self, error: FolderUnavailable) -> None:
        """Read what is there if it cannot be written; stay detached if there is nothing."""
        try:
            self._open(Access(read_only=True))
        except CacheError:
            log.debug("[disk-cache] nothing to read in %s", self.path, exc_info=True)
        self._problem = str(error)

    def _environment(self) -> Environment:
        env = self._env
        if env is None:
            raise StoreUnavailable(self._problem or f"{self.path}: the store is closed")
        return env

    def _pinned(self) -> frozenset[bytes]:
        with self._pins_lock:
            return frozenset(self._pins)

    def _try_write(self, publication: Publication) -> bool:
        """Write a publication in one transaction; False when LMDB finds no pages for it, and nothing was written."""
        try:
            with self.changes() as changes:
                changes.put_root(publication.root, publication.root_record)
                for node in publication.nodes:
                    changes.put_node(publication.root, node, self.codec)
                if publication.tip is not None:
                    changes.touch(publication.tip, Use(self._clock(), 0, recorded_ttl(publication.ttl_s)))
                    if publication.entry is not None:
                        changes.put_entry(publication.tip, publication.entry)
                if publication.prompt is not None:
                    limit, group = publication.history_limit, publication.prompt_group
                    changes.remember(publication.root, publication.prompt, limit, group)
        except StoreFull:
            return False
        self.may_have_own_ttls |= any(node.ttl_s is not None for node in publication.nodes)
        return True

    def _usable_bytes(self) -> int:
        """What the pages that hold data may take of the budget, or of what the disk has room for."""
        return usable_bytes(min(self.budget_bytes, self._disk_limit()))

    def _disk_limit(self) -> int:
        """How large the file may become so that `min_free_bytes` of the disk stay free."""
        if not self._min_free_bytes:
            return self.budget_bytes
        try:
            disk = os.statvfs(self.path)
        except OSError as error:
            raise FolderUnavailable(self.path, error) from error
        return self.file_bytes() + max(0, disk.f_bavail * disk.f_frsize - self._min_free_bytes)

    def _may_grow(self, need: int) -> bool:
        """Whether the disk keeps its floor even if none of the file's free pages can be used."""
        return not self._min_free_bytes or self.file_bytes() + need <= self._disk_limit()

    def _limit(self) -> str:
        if self._disk_limit() < self.budget_bytes:
            floor = format_size(self._min_free_bytes)
            return f"the disk, of which {floor} stay free; free some, or lower --kv-cache-min-free"
        return f"--kv-cache-budget {format_size(self.budget_bytes)}; raise it or save a shorter prefix"

    def _make_room(self, need: int, keep: frozenset[bytes]) -> int:
        """Evict until `need` more bytes fit. Answers how many nodes were evicted.

        Raises `StoreFull`, and evicts nothing, if what may be evicted is not enough.
        """
        with self.snapshot() as snapshot:
            used, usable = snapshot.used_bytes(), self._usable_bytes()
            wanted = bytes_to_free(used=used, need=need, usable=usable, budget=self.budget_bytes)
            if not wanted:
                return 0
            prompts = snapshot.prompts_beyond(self.budget_bytes // _HISTORY_SHARE)
            table = snapshot.usages()
            victims = choose_victims(
                table,
                snapshot.parent,
                bytes_wanted=wanted,
                pinned=keep | self._pinned(),
                now=self._clock(),
                saves_nothing=snapshot.saves_nothing(),
            )
            freed = sum(int(table.records["stored_bytes"][table.row_of[name]]) for name in victims)
            if need and used + need - freed > usable:
                raise StoreFull(
                    f"no room for {format_size(need)}: what is stored was just written or is in use; "
                    "raise --kv-cache-budget"
                )
        self._forget(prompts)
        self._evict(victims)
        return len(victims)

    def _evict(self, victims: list[bytes]) -> None:
        """Delete nodes, children first, unless one was continued or pinned since it was chosen."""
        for start in range(0, len(victims), _EVICT_BATCH):
            with self.changes() as changes:
                for name in victims[start : start + _EVICT_BATCH]:
                    usage = changes.usage(name)
                    if usage is not None and not usage.children and name not in self._pinned():
                        changes.delete_node(name, changes.parent(name))
        if victims:
            self._let_freed_pages_age()

    def _let_freed_pages_age(self) -> None:
        """LMDB reuses pages only from the second transaction after the one that freed them: this is the one between."""
        with self.changes() as changes:
            changes.put_meta("evicted_at", _F64.pack(self._clock()))

    def _forget(self, prompts: list[bytes]) -> None:
        """Remove remembered prompts, given by their keys, and the records of roots that nothing is left of."""
        if prompts:
            with self.changes() as changes:
                changes.forget(prompts)

    def _identify(self, env: Environment) -> Names:
        """Check the format, or write it into a new store, before anything else of the file is touched."""
        env.open_databases(["meta"])
        if self._is_new(env):
            if env.read_only:
                raise StoreCorrupt(f"{self.path} holds no diskprefix store")
            with env.transaction(write=True) as txn:
                meta = Changes(env.databases, txn, self._clock())
                # Another process may have been faster.
                if not any(meta.keys("meta")):
                    _create(meta, self._clock())
        with env.transaction() as txn:
            names = _names(self.path, Snapshot(env.databases, txn))
        env.open_databases(DATABASES)
        return names

    def _is_new(self, env: Environment) -> bool:
        with env.transaction() as txn:
            return not any(Snapshot(env.databases, txn).keys("meta"))


def _create(meta: Changes, now: float) -> None:
    store_id, secret = secrets.token_bytes(16), secrets.randbits(64)
    for key, value in (
        ("format", _U32.pack(FORMAT_VERSION)),
        ("store_id", store_id),
        ("secret", _U64.pack(secret)),
        ("created_at", _F64.pack(now)),
        ("checksum", _U64.pack(identity_checksum(FORMAT_VERSION, store_id, secret, now))),
    ):
        meta.put_meta(key, value)


def _names(path: Path, meta: Snapshot) -> Names:
    """Returns what the store says of itself. Raises `StoreFormatError` if it has another format, `StoreCorrupt` if this
    is damaged, and `StoreUnavailable` if nothing of it is there, so that the file is not a store."""
    if not any(meta.meta(key) for key in ("format", "store_id", "secret", "checksum")):
        raise foreign_file(path)
    damaged = StoreCorrupt(f"{path / DATA}: the identity of the store is damaged; move the file away to start afresh")
    try:
        version = _U32.unpack(meta.meta("format") or b"")[0]
        if version != FORMAT_VERSION:
            raise StoreFormatError(
                f"{path / DATA} has format {version}, and this version of diskprefix reads format {FORMAT_VERSION}: "
                "move the file away to start afresh, or choose another --kv-cache-dir"
            )
        store_id = meta.meta("store_id") or b""
        secret = _U64.unpack(meta.meta("secret") or b"")[0]
        created_at = _F64.unpack(meta.meta("created_at") or b"")[0]
        expected = _U64.unpack(meta.meta("checksum") or b"")[0]
    except struct.error as error:
        raise damaged from error
    if len(store_id) != HASH_BYTES or expected != identity_checksum(version, store_id, secret, created_at):
        raise damaged
    return Names(store_id, secret)


def _used_by(publication: Publication) -> frozenset[bytes]:
    """Nodes that the publication continues or holds: they must not be evicted to make room for it."""
    names = {node.parent for node in publication.nodes if node.position > 0}
    names |= {node.name for node in publication.nodes}
    return frozenset(names | ({publication.tip} if publication.tip else set()))
