"""The simulated machine: its disk, its bucket, and daemons of the real engine and cache that are started, stopped and
killed."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import lmdb
from msgspec.structs import replace

from diskprefix import printable, thread_pool
from diskprefix.daemon.chat.replay import RecordsUnread
from diskprefix.daemon.engine import device, forward, served_model
from diskprefix.daemon.engine.idle import ahead, ahead_jobs, idle_work
from diskprefix.daemon.engine.idle.idle_work import IdleWork
from diskprefix.daemon.engine.inbox import Inbox, Ticket
from diskprefix.daemon.engine.loop import Engine
from diskprefix.daemon.server.remembering import StoredTurns
from diskprefix.daemon.server.threads import _NUM_THREADS
from diskprefix.daemon.settings import Settings
from diskprefix.errors import DeviceLost, NotReady, StoreCorrupt
from diskprefix.identity import identity_text
from diskprefix.memo import Memo
from diskprefix.prefixstore import store_options
from diskprefix.prefixstore.cache.cache import PrefixCache
from diskprefix.prefixstore.cache.tiered_store import open_store
from diskprefix.prefixstore.cache.tiers.local import DiskView
from diskprefix.prefixstore.kv import page_cache, pages, sequence, sizes
from diskprefix.prefixstore.kv.layout import Layout
from diskprefix.prefixstore.kv.pages import Captured, PagePool
from diskprefix.prefixstore.remote import objects, remote_tier  # noqa: F401 (imported before its names are replaced)
from diskprefix.prefixstore.store import compact, environment, evictor, folder, opening, write_counter
from diskprefix.prefixstore.store.environment import Environment
from diskprefix.prefixstore.store.evictor import Evictor
from diskprefix.prefixstore.store.folder import FolderLock
from diskprefix.prefixstore.store.reads import Patience
from diskprefix.prefixstore.store.save import Save
from diskprefix.prefixstore.store.store import Store
from diskprefix.prefixstore.store.write_counter import WriteMeter
from diskprefix.prefixstore.store.writer import Writer
from diskprefix.thread_pool import ThreadPool
from diskprefix.values import Tenant
from tests.faults.interleavings import hash_model, shared_file, threads
from tests.faults.interleavings.bucket import SimulatedBucket
from tests.faults.interleavings.task_scheduler import Killed, Task
from tests.faults.interleavings.threads import Shim, scheduler

BLOCK = 8
LONGEST = 96
"""The tokens of the longest prompt with its reply."""
BUILDS = "build 0", "build 1"
"""Each computes other bits."""


@dataclass
class Disk:
    """The one disk of a history, which may fail, be slow, be full, or not answer."""

    failing: float = 0.0
    """The share of writes that fail."""
    slow_s: float = 0.0
    """The longest time that a commit takes."""
    reading_s: float = 0.0
    """The longest time that a read of a payload takes."""
    hangs: str = ""
    """The reads that do not answer before `answer`: of "payloads", of "all", or none."""
    damaged: set[bytes] = field(default_factory=set)
    """The names of nodes whose payload is not what was written."""
    free_bytes: int = 1 << 40
    num_failed: int = 0
    waiting: list[Task] = field(default_factory=list)
    silent_until: float = 0.0
    """When it last did not answer any read."""

    def read(self, what: str) -> None:
        one = scheduler()
        if self.reading_s and what == "payloads":
            one.block(one.random.random() * self.reading_s)
        while self.hangs in (what, "all"):
            threads.wait_in(self.waiting, None)

    def answer(self) -> None:
        if self.hangs == "all":
            self.silent_until = scheduler().now
        self.hangs = ""
        while self.waiting:
            threads.wake_one(self.waiting)


_SLIPS = (TypeError, AttributeError, NameError, AssertionError, LookupError)
"""What only a slip in the code raises, here or in the daemon."""
_LOG = logging.getLogger("diskprefix")
_log_exception = _LOG.exception
_disks: list[Disk] = []
_buckets: list[SimulatedBucket] = []
_transaction, _init_environment, _init_lock = Environment.transaction, Environment.__init__, FolderLock.__init__
_init_meter, _check_file = WriteMeter.__init__, Environment.require_survivable
_pause, _try_later = Writer.pause_writing, Writer._try_later
_quarantine, _restoring, _report_failure = Store.quarantine, IdleWork.restoring, thread_pool.report_failure
_expire, _zeros, _release, _look = Evictor.expire, pages.zeros, Captured.release, Inbox.waiting
READERS = (
    *("kv-writer", "kv-seen", "kv-match", "kv-load", "kv-prefetch", "picture-load", "draft-fetch", "kv-check"),
    *("disk-reader", "idle", "remote-fetch", "remote-write"),
)
"""The threads of a daemon that may hang, because all who wait for them have limits: they alone read the disk."""
observers: list[Task | None] = []
"""The tasks that look at the disk for the history: they do not wait for it."""
meters: list[WriteMeter] = []
"""The counts of written bytes of all processes of a history."""
checked: list[object] = []
"""The processes of a history that have checked a file."""
held_at: dict[Writer, float] = {}
"""When a writer last began to pause, for a prompt or because the store failed."""
searched_at: dict[Evictor, float] = {}
"""When the last search for what has expired began, of those that have ended."""
freed_at: dict[PagePool, float] = {}
"""When the release of a hold last freed pages, by whatever thread."""
looked_at: dict[Inbox, float] = {}
"""When the engine last looked for what it may begin."""
daemons: set[object] = set()
"""The processes that are daemons, once they serve."""
_held: list[tuple[object, Environment | FolderLock]] = []
"""What a process has open that the kernel closes when it is killed."""


@contextmanager
def _simulated_transaction(self: Environment, *, write: bool = False) -> Iterator[Any]:
    """In the place of `Environment.transaction`: writers wait for each other as tasks, and writes may
    fail."""
    if not threads.is_simulated():
        with _transaction(self, write=write) as txn:
            yield txn
        return
    disk, one = _disks[-1], scheduler()
    shared: Any = self._env
    one.point()
    if _is_dying():
        # A process that was killed begins nothing.
        raise Killed
    if not write:
        if one.current not in observers:
            _require_reader(one.current)
            disk.read("all")
        with _transaction(self) as txn:
            yield txn
        one.point()
        return
    with _waiting_to_write(self, shared), _transaction(self, write=True) as txn:
        yield txn
        if disk.slow_s:
            one.block(one.random.random() * disk.slow_s)
        if disk.failing and one.random.random() < disk.failing:
            disk.num_failed += 1
            raise lmdb.DiskError("mdb_txn_commit: Input/output error")


@contextmanager
def _waiting_to_write(env: Environment, shared: Any) -> Iterator[None]:
    """Takes the lock between writers. Meanwhile the environment knows that it waits, as beside other processes."""
    one, waiting = id(scheduler().current), env.write_lock._waiting
    with ExitStack() as held:
        waiting[one] = scheduler().now
        try:
            held.enter_context(shared.file.changing())
        finally:
            del waiting[one]
        yield


def _require_reader(task: Task | None) -> None:
    """Notes that a thread of a daemon reads the disk, which all who wait for it would wait for without a limit."""
    name = "" if task is None else task.name.rpartition("_")[0] or task.name
    if task is not None and task.process in daemons and name not in READERS:
        scheduler().errors.append(f"the thread {name} reads the disk")


@contextmanager
def observing() -> Iterator[None]:
    """Lets this task look at the disk, also while that does not answer."""
    observers.append(scheduler().current)
    try:
        yield
    finally:
        observers.remove(scheduler().current)


def _decoded(decode: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of `DiskView._decode`."""

    def decoded(self: DiskView, name: bytes, *args: Any) -> Any:
        # A view does not see what is saved again behind it.
        if threads.is_simulated() and (name in _disks[-1].damaged or name in self.damaged):
            raise StoreCorrupt("it is damaged, as was asked for")
        return decode(self, name, *args)

    return _waiting(decoded, "payloads")


def _quarantined(self: Store, name: bytes, parent: bytes) -> int:
    """In the place of `Store.quarantine`: what is saved again is whole."""
    _disks[-1].damaged.discard(name)
    return _quarantine(self, name, parent)


@contextmanager
def _noted_restoring(self: IdleWork, model: Any, prompt: Any, options: Any, *begins: Any, **how: Any) -> Iterator[Any]:
    """In the place of `IdleWork.restoring`: the model knows whose sequence it is."""
    with _restoring(self, model, prompt, options, *begins, **how) as restored:
        hash_model.salts[restored.sequence] = hash_model.salt_of(options.tenant)
        yield restored


def _is_dying() -> bool:
    current = scheduler().current
    return current is not None and current.is_killed


def _listed(init: Callable[..., None]) -> Callable[..., None]:
    """In the place of a constructor of what the kernel closes with its process."""

    def listed(self: Any, *args: Any, **kwargs: Any) -> None:
        if threads.is_simulated():
            _held.append((scheduler().current.process, self))  # type: ignore[union-attr]
        init(self, *args, **kwargs)

    return listed


def _living(work: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of a change of the folder: another process may come before it, and one that was killed makes none,
    though its `finally` blocks run here."""

    def living(*args: Any, **kwargs: Any) -> Any:
        if not threads.is_simulated():
            return work(*args, **kwargs)
        scheduler().point()
        return None if _is_dying() else work(*args, **kwargs)

    return living


def _waiting(read: Callable[..., Any], what: str) -> Callable[..., Any]:
    """In the place of a function that reads the map."""

    def waiting(*args: Any) -> Any:
        if threads.is_simulated():
            _disks[-1].read(what)
        return read(*args)

    return waiting


def _note_hold(writer: Writer) -> None:
    if threads.is_simulated():
        held_at[writer] = scheduler().now


def _noted_pause(self: Writer) -> None:
    _note_hold(self)
    _pause(self)


def _noted_retry(self: Writer, save: Save) -> bool:
    _note_hold(self)
    return _try_later(self, save)


def _noted_search(self: Evictor, ttl_s: float) -> int:
    """In the place of `Evictor.expire`."""
    began_at, num_removed = scheduler().now if threads.is_simulated() else 0.0, _expire(self, ttl_s)
    searched_at[self] = began_at
    return num_removed


def _noted_release(self: Captured) -> None:
    """In the place of `Captured.release`."""
    pool = self._pool
    # The engine may be told, and look, before this returns.
    before, began_at = pool.used_bytes, scheduler().now if threads.is_simulated() else 0.0
    _release(self)
    if threads.is_simulated() and pool.used_bytes < before:
        freed_at[pool] = began_at


def _noted_look(self: Inbox) -> list[Ticket]:
    """In the place of `Inbox.waiting`."""
    waiting = _look(self)
    if threads.is_simulated():
        looked_at[self] = scheduler().now
    return waiting


def _refused_zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    """In the place of `pages.zeros`."""
    if threads.is_simulated() and threads.is_refused():
        raise MemoryError
    return _zeros(shape, dtype)


def _checked_slowly(self: Environment) -> None:
    """In the place of `Environment.require_survivable`."""
    if threads.is_simulated():
        checked.append(scheduler().current.process)  # type: ignore[union-attr]
        scheduler().block(scheduler().random.random())
    _check_file(self)


def _noted_failure(name: str, error: Exception) -> None:
    """In the place of `thread_pool.report_failure`: a thread that begins again is a fault too."""
    if threads.is_simulated():
        lines = "".join(traceback.format_exception(error))
        scheduler().errors.append(f"{name} ended with {error!r}\n{lines}")
    else:
        _report_failure(name, error)


def _noting_slips(work: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of what the daemon calls with each error that it goes on after: one that only a slip in the code
    raises is a fault, whoever goes on."""

    def noting(error: BaseException, *rest: Any) -> Any:
        _note_slip(error)
        return work(error, *rest)

    return noting


def _note_slip(error: BaseException | None) -> None:
    if threads.is_simulated() and isinstance(error, _SLIPS):
        lines = "".join(traceback.format_exception(error))
        scheduler().errors.append(f"the daemon goes on after {error!r}\n{lines}")


def _logged_exception(message: str, *arguments: object) -> None:
    """In the place of the log's `exception`, which only some of what the daemon goes on after reaches."""
    _note_slip(sys.exc_info()[1])
    _log_exception(message, *arguments)


def _listed_meter(self: WriteMeter) -> None:
    """In the place of `WriteMeter.__init__`."""
    _init_meter(self)
    meters.append(self)


def replaced() -> list[tuple[Any, str, Any]]:
    """Returns what takes the place of what in the package: its holder, its name there, and the value."""
    of_disk = {"statvfs": lambda _path: SimpleNamespace(f_blocks=1 << 50, f_bavail=_disks[-1].free_bytes, f_frsize=1)}
    return [
        (Environment, "transaction", _simulated_transaction),
        (Environment, "__init__", _listed(_init_environment)),
        (FolderLock, "__init__", _listed(_init_lock)),
        (folder, "_write_mark", _living(folder._write_mark)),
        (WriteMeter, "__init__", _listed_meter),
        (thread_pool, "report_failure", _noted_failure),
        (Writer, "pause_writing", _noted_pause),
        (Writer, "_try_later", _noted_retry),
        (Evictor, "expire", _noted_search),
        (DiskView, "has", _waiting(DiskView.has, "all")),
        (DiskView, "similar", _waiting(DiskView.similar, "all")),
        (DiskView, "_decode", _decoded(DiskView._decode)),
        (Store, "quarantine", _quarantined),
        (IdleWork, "restoring", _noted_restoring),
        (idle_work, "Rows", hash_model.idle_rows),
        (ahead_jobs, "runs_on_battery", lambda: False),
        (ahead, "time", Shim(time, process_time=lambda: 0.0)),
        (Environment, "require_survivable", _checked_slowly),
        (environment, "open_lmdb", shared_file.opened),
        *((module, "fcntl", Shim(module.fcntl, flock=shared_file.flock)) for module in (environment, folder)),
        *((module, "os", Shim(os, **of_disk)) for module in (evictor, folder, compact)),
        *(
            (module, name, _noting_slips(work))
            for work in (device.raise_if_lost, printable.first_line)
            for module in list(sys.modules.values())
            if module.__name__.startswith("diskprefix.")
            for name in [work.__name__]
            if vars(module).get(name) is work
        ),
        (_LOG, "exception", _logged_exception),
        *((module, "shutil", Shim(shutil, rmtree=_living(shutil.rmtree))) for module in (opening, compact)),
        (forward, "_rows", hash_model.salted_rows),
        (objects, "_import", lambda: _buckets[-1]),
        (objects, "_open_store", lambda *_url, **_options: None),
        # What is free on this machine says nothing about a history, and what it measured is of no other.
        (served_model, "kv_bytes", lambda: 1 << 40),
        (Memo, "get", lambda _self, _key: None),
        (Memo, "put", lambda _self, _key, _value: None),
        # The kernel counts for this thread, which is that of all tasks. Without it, pages of records are counted.
        (write_counter, "_written_by_thread", lambda: None),
        (store_options, "_MIN_WRITTEN", 0),
        # Prompts are short. So are the rows of a step.
        (pages, "_SLAB_BYTES", 1024),
        (pages, "zeros", _refused_zeros),
        (Captured, "release", _noted_release),
        (Inbox, "waiting", _noted_look),
        (sizes, "STEP_TOKENS", LONGEST),
        (sizes, "MAX_TAKEN_BACK", 0),
        (page_cache, "STEP_TOKENS", LONGEST),
        (sequence, "MAX_TAKEN_BACK", 0),
    ]


@contextmanager
def patched() -> Iterator[None]:
    """Replaces threads, clocks, the model and the writing of the disk in the package."""
    with threads.patched():
        values = replaced()
        before = [(holder, name, getattr(holder, name)) for holder, name, _ in values]
        for holder, name, value in values:
            setattr(holder, name, value)
        try:
            yield
        finally:
            for holder, name, value in before:
                setattr(holder, name, value)


def use(disk: Disk, bucket: SimulatedBucket, map_bytes: int) -> None:
    """Sets the disk and the bucket of the history that begins. `map_bytes`: the size that LMDB's map has."""
    _disks[:], _buckets[:] = [disk], [bucket]
    hash_model.salts.clear()
    observers.clear()
    daemons.clear()
    meters.clear()
    checked.clear()
    held_at.clear()
    searched_at.clear()
    freed_at.clear()
    looked_at.clear()
    threads.refusing[:], threads.num_refused[:] = [0.0], [0]
    shared_file.reset(map_bytes)


def kill(process: object) -> None:
    """Ends the tasks of a process, and closes what the kernel closes."""
    scheduler().kill(process)
    for owner, held in list(_held):
        if owner is not process:
            continue
        _held.remove((owner, held))
        env: Any = getattr(held, "_env", None)
        if isinstance(held, FolderLock):
            held._close()
        # Asked of the file: a process may be killed after it said that it is closed, and before it was.
        elif env is not None and not env.is_closed:
            env.close()
            with suppress(AttributeError):
                os.close(held._fd)
    shared_file.wake_writers()


def kill_all() -> None:
    """Ends all processes, in whatever state they are."""
    for process in dict.fromkeys((*(task.process for task in scheduler().tasks), *(owner for owner, _ in _held))):
        with suppress(Exception):
            kill(process)


class Daemon:
    """One process of the daemon, without its HTTP server: `PrefixCache`, `Engine` and `Inbox`, as `app.load_engine` and
    `server.daemon` put them together."""

    def __init__(
        self, settings: Settings, layout: Layout, num_sequences: float, process: object, build: int = 0
    ) -> None:
        self.process, self.build = process, build
        self.rendering, self.reading = (ThreadPool(_NUM_THREADS[kind], kind) for kind in ("rendering", "reading"))
        self.store = open_store(settings)
        pool = PagePool(layout, block_size=BLOCK)
        identity = partial(identity_text, {"model": "hash"}, BLOCK, 1, layout.describe())
        kv_limit = int(num_sequences * pool.sequence_bytes(LONGEST))
        self.cache = PrefixCache(settings, self.store, layout, identity, "hash", build=BUILDS[build])
        runtime: Any = hash_model.HashRuntime(layout, build)
        self.engine = Engine(hash_model.loaded(kv_limit), runtime, self.cache, settings)
        self.engine.warm_up()
        self.fatal: list[DeviceLost] = []
        self.inbox = Inbox(self.engine.serve, self.fatal.append)
        self.inbox.start()
        self.started_at = scheduler().now
        daemons.add(process)

    def render(self, tenant: Tenant, turn_ids: Sequence[str], patience: Patience) -> dict[str, bytes | None]:
        """Returns the recorded turns of a conversation, as `server.prepare.prepare` gets them: those in memory, and
        once a thread that waits has read them, all. Raises `NotReady` if the daemon ends."""
        turns = StoredTurns(replace(self.cache.notes(tenant), patience=patience))

        def render() -> dict[str, bytes | None]:
            found = {id_: turns.get(id_) for id_ in turn_ids}
            turns.require_read()
            return found

        try:
            # Bound: `StoredTurns` raises it a few times at most.
            while True:
                try:
                    return self.rendering.submit(render).result()
                except RecordsUnread:
                    self.reading.submit(patience.from_now(turns.read)).result()
        except (RuntimeError, CancelledError) as error:
            raise NotReady("the daemon is stopping") from error

    def stop(self, grace_s: float, *, hibernates: bool) -> bool:
        for pool in (self.rendering, self.reading):
            pool.shutdown(wait=False, cancel_futures=True)
        self.inbox.stop(grace_s)
        if hibernates:
            self.engine.save_idle()
        return self.engine.close()
