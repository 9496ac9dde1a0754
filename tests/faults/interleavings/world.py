"""The simulated machine: its disk, its bucket, and daemons of the real engine and cache that are started, stopped and
killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lmdb
import torch

from diskprefix import settings as settings_module
from diskprefix.cache.cache import PrefixCache
from diskprefix.cache.resources import open_store
from diskprefix.engine import forward, served_model
from diskprefix.engine.inbox import Inbox
from diskprefix.engine.loop import Engine
from diskprefix.errors import DeviceLost
from diskprefix.extras.remote import objects, remote_tier  # noqa: F401 (imported before its names are replaced)
from diskprefix.kv import page_cache, pages, sequence, sizes
from diskprefix.kv.layout import Layout
from diskprefix.kv.pages import PagePool
from diskprefix.memo import Memo
from diskprefix.model.exact import runner
from diskprefix.settings import Settings
from diskprefix.store import written
from diskprefix.store.environment import Environment
from diskprefix.store.written import WriteMeter
from tests.faults.interleavings import hash_model, threads
from tests.faults.interleavings.bucket import SimulatedBucket
from tests.faults.interleavings.threads import SimulatedLock, scheduler

BLOCK = 8
LONGEST = 96
"""The tokens of the longest prompt with its reply."""


@dataclass
class Disk:
    """The one disk of a history, which may fail."""

    failing: float = 0.0
    """The share of writes that fail."""
    slow_s: float = 0.0
    lock: SimulatedLock = field(default_factory=SimulatedLock)
    """In the place of LMDB's lock between writers."""
    num_failed: int = 0


_disks: list[Disk] = []
_buckets: list[SimulatedBucket] = []
_transaction = Environment.transaction
_init_meter = WriteMeter.__init__
meters: list[WriteMeter] = []
"""The counts of written bytes of all processes of a history."""


@contextmanager
def _simulated_transaction(self: Environment, *, write: bool = False) -> Iterator[Any]:
    """In the place of `Environment.transaction`: writers wait for each other as tasks, and writes may
    fail."""
    if not threads.is_simulated():
        with _transaction(self, write=write) as txn:
            yield txn
        return
    disk, one = _disks[-1], scheduler()
    one.point()
    if not write:
        with _transaction(self) as txn:
            yield txn
        one.point()
        return
    with disk.lock, _transaction(self, write=True) as txn:
        yield txn
        if disk.slow_s:
            one.block(one.random.random() * disk.slow_s)
        if disk.failing and one.random.random() < disk.failing:
            disk.num_failed += 1
            raise lmdb.DiskError("mdb_txn_commit: Input/output error")


def _listed_meter(self: WriteMeter) -> None:
    """In the place of `WriteMeter.__init__`."""
    _init_meter(self)
    meters.append(self)


@contextmanager
def patched() -> Iterator[None]:
    """Replaces threads, clocks, the model and the writing of the disk in the package."""
    replaced: list[tuple[Any, str, Any]] = [
        (Environment, "transaction", _simulated_transaction),
        (WriteMeter, "__init__", _listed_meter),
        (forward, "_rows", hash_model.salted_rows),
        (runner, "run", hash_model.run),
        (objects, "_import", lambda: _buckets[-1]),
        (objects, "_opened", lambda *_url, **_options: None),
        # What is free on this machine says nothing about a history, and what it measured is of no other.
        (served_model, "kv_bytes", lambda _device: 1 << 40),
        (Memo, "get", lambda _self, _key: None),
        (Memo, "put", lambda _self, _key, _value: None),
        # The kernel counts for this thread, which is that of all tasks. Without it, pages of records are counted.
        (written, "_written_by_thread", lambda: None),
        (settings_module, "_LEAST_WRITTEN", 0),
        # Prompts are short. So are the rows of a step, and nothing is guessed and taken back.
        (pages, "_SLAB_BYTES", 1024),
        (sizes, "STEP_TOKENS", LONGEST),
        (sizes, "MOST_TAKEN_BACK", 0),
        (page_cache, "STEP_TOKENS", LONGEST),
        (sequence, "MOST_TAKEN_BACK", 0),
    ]
    with threads.patched():
        before = [(holder, name, getattr(holder, name)) for holder, name, _ in replaced]
        for holder, name, value in replaced:
            setattr(holder, name, value)
        try:
            with torch.inference_mode():
                yield
        finally:
            for holder, name, value in before:
                setattr(holder, name, value)


def use(disk: Disk, bucket: SimulatedBucket) -> None:
    """Sets the disk and the bucket of the history that begins."""
    _disks[:], _buckets[:] = [disk], [bucket]
    meters.clear()


class Daemon:
    """One process of the daemon, without its HTTP server: `PrefixCache`, `Engine` and `Inbox`, as `app.load_engine` and
    `server.daemon` put them together."""

    def __init__(self, settings: Settings, layout: Layout, num_sequences: float, process: object) -> None:
        self.process = process
        self.store = open_store(settings)
        try:
            self._open(settings, layout, num_sequences)
        except BaseException:
            self.release()
            raise

    def _open(self, settings: Settings, layout: Layout, num_sequences: float) -> None:
        pool = PagePool(layout, torch.device("cpu"), block_size=BLOCK)
        kv_limit = int(num_sequences * pool.sequence_bytes(LONGEST))
        self.cache = PrefixCache(settings, self.store, layout, "hash/{}".format, "hash")
        self.engine = Engine(hash_model.loaded(kv_limit), self.cache)
        self.engine.warm_up()
        self.fatal: list[DeviceLost] = []
        self.inbox = Inbox(self.engine.serve, self.fatal.append)
        self.inbox.start()
        self.started_at = scheduler().now

    def stop(self, grace_s: float, *, hibernates: bool) -> bool:
        self.inbox.stop(grace_s)
        if hibernates:
            self.engine.hibernate()
        return self.engine.close()

    def release(self) -> None:
        """Frees what the kernel would free after a kill."""
        env = self.store._env
        if env is not None:
            env._env.close()
        if self.store._lock is not None:
            self.store._lock.close()
