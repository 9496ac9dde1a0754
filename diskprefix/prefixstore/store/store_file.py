"""The file of an open store: its transactions, and opening it again after a problem."""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeAlias

from diskprefix.errors import (
    CacheError,
    ReaderStays,
    StoreCorrupt,
    StoreFormatError,
    StoreFull,
    StoreReplaced,
    StoreUnavailable,
)
from diskprefix.prefixstore.namespace_key import NamespaceKey
from diskprefix.prefixstore.store.changes import Changes
from diskprefix.prefixstore.store.compact import compact_folder
from diskprefix.prefixstore.store.environment import Environment
from diskprefix.prefixstore.store.epochs import Epoch, Epochs, epochs_of
from diskprefix.prefixstore.store.folder import FolderLock, FolderUnavailable, OnWait, disk_full
from diskprefix.prefixstore.store.opening import inode_of, open_environment, set_aside
from diskprefix.prefixstore.store.reads import Reads
from diskprefix.prefixstore.store.schema import NO_BUILD, NamesRecord
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.store_identity import identify, require_namespace
from diskprefix.prefixstore.store.write_counter import WriteMeter
from diskprefix.prefixstore.store_options import MAX_BUDGET, MIN_BUDGET
from diskprefix.units import format_size

log = logging.getLogger("diskprefix")

OnCorruption: TypeAlias = Literal["quarantine", "refuse"]

_U64 = struct.Struct("<Q")
_RETRY_S = 2.0
"""The time between attempts to open a folder that could not be opened."""
_WRITE_PATIENCE_S = 30.0
"""A daemon reports a write that has waited this long for another process."""
_RESIZE_S, _RESIZE_AGAIN_S = 1.0, 10.0
"""How long resizing the memory map waits for transactions to end, and the time between two attempts."""


class StoreFile:
    """The environment and the lock of a store's folder. One thread at a time may open, close or reopen it.

    `names` is the identity of the open store. `budget_bytes` is the budget of the folder when this process last read
    it; see `follow_budget`. `meter` counts the bytes that this process writes to the file. `clock` returns seconds
    since the epoch.
    """

    def __init__(
        self,
        path: Path,
        budget_bytes: int,
        new_budget_bytes: int,
        read_only: bool,
        on_corruption: OnCorruption,
        serving: bool,
        clock: Callable[[], float],
        namespace: NamespaceKey | None,
        min_free_bytes: int,
        on_wait: OnWait,
    ) -> None:
        """Opens the folder. For the arguments and errors see `Store`."""
        self.path = path
        self.min_free_bytes = min_free_bytes
        self.budget_bytes = budget_bytes or new_budget_bytes
        self.clock = clock
        self.names = NamesRecord(store_id=b"", secret=0, created_at=0.0)
        self.epochs = Epochs()
        """The epochs that this process read last."""
        self._epochs_lock = threading.Lock()
        """Held while the epochs are read, so that no thread replaces newer ones by older ones."""
        self.build = NO_BUILD
        """The digest of the build that computes what this process stores."""
        self.meter = WriteMeter()
        self.reads = Reads(path, self.snapshot)
        """The reads of a daemon."""
        self._sets_budget = budget_bytes > 0
        """The folder's budget must still be set to the given one."""
        self._has_budget = self.budget_bytes > 0
        """A folder without a budget gets one."""
        self._is_reader = read_only
        self._is_serving = serving
        self._namespace = namespace
        self._on_corruption = on_corruption
        self._mapped_budget = self.budget_bytes
        """The budget for which the memory map was sized."""
        self._resize_at = 0.0
        """The time of `time.monotonic` from which on `follow_budget` may try again."""
        self._env: Environment | None = None
        self._lock: FolderLock | None = None
        self._problem: str | None = None
        self._reopening_since: float | None = None
        """When opening the folder again began; None if it is not being opened."""
        self._retry_at = 0.0
        try:
            self._attach(on_wait)
        except FolderUnavailable as error:
            if not (serving and error.passing):
                raise
            self._only_read(error)

    @property
    def problem(self) -> str | None:
        """The reason why the store cannot be written, and perhaps not read; None if it can be written."""
        env = self._env
        return self._problem or (env.broken if env is not None else None)

    @property
    def write_stall(self) -> str | None:
        """The reason why nothing is written, if a write has waited long for another process. Does not read the disk."""
        if (seconds := self._reopening_s) > _WRITE_PATIENCE_S:
            return f"--kv-cache-dir {self.path}: it is opened again for {seconds:.0f} s, as another process uses it"
        env = self._env
        return env.write_lock.stalled if env is not None else None

    @property
    def write_s(self) -> float:
        """The seconds that the oldest write of this process has taken so far, or has waited for another process; 0 if
        no write is running or waiting."""
        env = self._env
        return self.write_waited_s if env is None else max(self.write_waited_s, env.write_lock.writing_s)

    @property
    def write_waited_s(self) -> float:
        """The seconds that a write of this process has waited for another write, or for the folder to be opened
        again."""
        env = self._env
        return max(self._reopening_s, env.write_lock.waited_s if env is not None else 0.0)

    @property
    def _reopening_s(self) -> float:
        since = self._reopening_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def environment(self) -> Environment:
        """The open environment. Raises `StoreUnavailable` if there is none."""
        env = self._env
        if env is None:
            raise StoreUnavailable(self._problem or f"{self.path}: the store is closed")
        return env

    def error_text(self, error: CacheError) -> str:
        """Returns the message of an error. For a full disk, the message also says how many bytes must stay free."""
        is_full = isinstance(error, FolderUnavailable) and error.is_full
        return disk_full(self.path, self.min_free_bytes) if is_full else str(error)

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Yields a read transaction. Pages that are freed meanwhile are not reused before it ends. For commands, which
        may wait for the disk; a daemon reads with `reads`."""
        env = self.environment
        with env.transaction() as txn:
            snapshot = Snapshot(env.databases, txn, copy_payloads=not env.has_lock)
            del txn
            try:
                yield snapshot
            finally:
                snapshot.close()

    def read_epochs(self) -> Epochs:
        """Returns the epochs in the file, which a purge of another process changes. Raises `CacheError`."""
        with self._epochs_lock, self.reads.snapshot() as snapshot:
            self.epochs = epochs_of(snapshot, self.names)
            # Another process may have set another budget.
            self.budget_bytes = self._stored_budget(snapshot) or self.budget_bytes
            return self.epochs

    def follow_budget(self) -> None:
        """Resizes the memory map to the budget, which another process may have set. Without that, the file could not
        grow to the budget. Waits up to a second for the transactions of this process; new ones wait meanwhile. If the
        transactions do not end (a read may hang), a call at least ten seconds later tries again. Raises
        `CacheError`."""
        env, now = self.environment, time.monotonic()
        if self._mapped_budget != self.budget_bytes and not env.read_only and now >= self._resize_at:
            budget_bytes, self._resize_at = self.budget_bytes, now + _RESIZE_AGAIN_S
            if env.resize(budget_bytes, _RESIZE_S):
                self._resize_at = 0.0
                log.info("[disk-cache] another process set the budget of the folder to %s", format_size(budget_bytes))
                self._mapped_budget = budget_bytes

    def is_current(self, epoch: Epoch) -> bool:
        """Returns whether an epoch is not over, as far as the file can be read."""
        try:
            return not self.read_epochs().is_over(epoch)
        except CacheError:
            return False

    @contextmanager
    def changes(self) -> Iterator[Changes]:
        """Yields a write transaction, committed at the end of the block and rolled back by an exception. There is one
        at a time in all processes.

        Raises `StoreReplaced` if the file was replaced. If LMDB finds no free page, waits for readers, then raises
        `StoreFull`, or `ReaderStays` if a reader keeps freed pages.
        """
        env = self.environment
        if env.read_only:
            raise StoreUnavailable(f"--kv-cache-dir {self.path}: opened for reading only; nothing is saved")
        changes: Changes | None = None
        try:
            with self.meter.measure(lambda: changes.num_bytes if changes else 0), env.transaction(write=True) as txn:
                if not env.is_in_place():
                    raise StoreReplaced(f"{self.path} was removed or replaced")
                changes = Changes(env.databases, txn, self.clock(), env.require_sound_runs, self.build)
                yield changes
        except StoreFull:
            env.wait_for_readers()
            raise
        self.prove()

    def prove(self) -> None:
        """Records that LMDB has used the file without crashing this process."""
        if self._lock is not None:
            self._lock.prove()

    def _attach(self, on_wait: OnWait | None = None) -> None:
        """Opens the folder. With "quarantine", moves an unusable file aside. Without `on_wait`, does not wait for a
        process that replaces the file. Raises `CacheError`."""
        inode = inode_of(self.path)
        try:
            self._open(read_only=self._is_reader, on_wait=on_wait)
        except (StoreCorrupt, StoreFormatError) as error:
            if self._on_corruption == "refuse":
                raise
            set_aside(self.path, inode, error, on_wait)
            self._open(read_only=self._is_reader, on_wait=on_wait)
        self._problem = None

    def try_file(self) -> None:
        """Checks the B-trees of the file, once after each opening, because a record was damaged. If the check fails,
        `reopen` moves the file aside. For any thread, also while the writer writes."""
        env = self.environment
        if not env.is_checked:
            env.is_checked = True
            try:
                env.require_survivable()
            except StoreCorrupt as error:
                env.broken, env.damage = str(error), error

    def close(self) -> None:
        """Closes the folder. Raises `ReaderStays` if a transaction of this process does not end."""
        env, self._env = self._env, None
        if env is not None and not env.close():
            self._env = env
            raise ReaderStays(f"{self.path}: a reader of this process does not end")
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def reopen(self) -> bool:
        """Opens the folder again if its file was removed, replaced or damaged, or can be written again. Moves a damaged
        file aside first. Returns whether the folder was opened again for reading and writing. Never raises."""
        if not self._is_due():
            return False
        self._retry_at = time.monotonic() + _RETRY_S
        damage, inode = (self._env.damage, self._env.inode) if self._env is not None else (None, 0)
        self._reopening_since = time.monotonic()
        try:
            self.close()
            if damage is not None and self._on_corruption == "quarantine":
                set_aside(self.path, inode, damage, mends=True)
            self._attach()
        except FolderUnavailable as error:
            self._only_read(error)
        except CacheError as error:
            self._problem = str(error)
        else:
            return True
        finally:
            self._reopening_since = None
        return False

    def compact(self) -> None:
        """Replaces the file by a compacted copy, unless another process has it open. Logs errors. If the folder cannot
        be opened afterwards, `reopen` tries again."""
        self.close()
        try:
            compact_folder(self.path)
        except CacheError as error:
            log.warning("[disk-cache] the file keeps its size: %s", error)
        self._retry_at = 0.0
        self.reopen()

    def _is_due(self) -> bool:
        """Returns whether the folder must be opened again now."""
        env = self._env
        if env is not None and (env.broken or not env.is_in_place()):
            self._problem = env.broken or f"{self.path} was removed or replaced"
            return True
        may_be_writable = env is None or (env.read_only and os.access(self.path, os.W_OK))
        return may_be_writable and time.monotonic() >= self._retry_at

    def _open(self, *, read_only: bool, on_wait: OnWait | None = None) -> None:
        env, lock = open_environment(
            self.path,
            budget_bytes=self.budget_bytes,
            read_only=read_only,
            checks=not self._is_serving,
            on_wait=on_wait,
        )
        try:
            names = identify(self.path, env, self.clock(), self._namespace)
            if self._is_serving:
                require_namespace(self.path, names, self._namespace)
            self._agree_on_budget(env)
            with env.transaction() as txn:
                epochs = epochs_of(Snapshot(env.databases, txn), names)
        except BaseException:
            env.close()
            lock.close(is_refused=True)
            raise
        env.write_lock.on_wait = None
        if self._is_serving:
            env.write_lock.patience_s = _WRITE_PATIENCE_S
        with self._epochs_lock:
            self.names, self._env, self._lock, self.epochs = names, env, lock, epochs

    def _agree_on_budget(self, env: Environment) -> None:
        """Stores the given budget, once, or the budget for a new folder. Otherwise uses the budget in the file."""
        mapped = self.budget_bytes
        with env.transaction() as txn:
            stored = self._stored_budget(Snapshot(env.databases, txn))
        if self._sets_budget or (self._has_budget and not stored):
            if stored != self.budget_bytes and not env.read_only:
                with env.transaction(write=True) as txn:
                    Changes(env.databases, txn, self.clock()).put_meta("budget", _U64.pack(self.budget_bytes))
            # When this process opens the folder again, it uses the budget that another process may have set meanwhile.
            self._sets_budget = env.read_only and self._sets_budget
        else:
            self.budget_bytes = stored or env.file_bytes()
        if stored and self.budget_bytes != mapped and not env.read_only:
            env.resize(self.budget_bytes)
        self._mapped_budget = self.budget_bytes

    def _stored_budget(self, snapshot: Snapshot) -> int:
        """Returns the budget of the folder, 0 if it has none."""
        stored = snapshot.meta("budget") or b""
        budget = int(_U64.unpack(stored)[0]) if len(stored) == _U64.size else 0
        return budget if MIN_BUDGET <= budget <= MAX_BUDGET else 0

    def _only_read(self, error: FolderUnavailable) -> None:
        """Opens the store for reading, if there is one. `error` says why it cannot be written."""
        with suppress(CacheError):
            self._open(read_only=True)
        self._problem = self.error_text(error)
