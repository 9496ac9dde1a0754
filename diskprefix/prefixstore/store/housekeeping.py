"""Maintains a store between publications, and reports its problems. For the writing thread."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from diskprefix.errors import CacheError, LargerThanStore, PrefixGone, StoreCorrupt, StoreFull
from diskprefix.prefixstore.store.eviction import expiry_interval_s
from diskprefix.prefixstore.store.folder import FolderUnavailable
from diskprefix.prefixstore.store.note_record import note_bytes
from diskprefix.prefixstore.store.schema import ModelRecord, encode_record, joined
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.store import Store
from diskprefix.prefixstore.store.verify import StoreProblem, remove_problems, verify_index
from diskprefix.thread_pool import start_helper

log = logging.getLogger("diskprefix")

_TRY_AGAIN_S = 60.0
"""How long nothing is written to a full disk after a write has failed. Then eviction may make room."""


class Housekeeping:
    """The steps between publications. Logs a failure of the store once."""

    def __init__(self, store: Store, ttl_s: float) -> None:
        """`ttl_s` is the daemon's time to live of nodes after their last use, in seconds, 0 for no limit."""
        self._store = store
        self._ttl_s = ttl_s
        self._expired_at = -math.inf
        self.models: tuple[ModelRecord, ...] = ()
        """The models that the store is served with."""
        self._recorded: tuple[ModelRecord, ...] = ()
        """The models that the store has a record of."""
        self.on_forget: list[Callable[[], None]] = []
        """These functions are called when a process has deleted records, or when records may have expired. Copies of
        such records in memory must be dropped too."""
        self._epochs = store.epochs
        """The epochs at the last call of `on_forget`."""
        self._is_checking = False
        """A thread searches for damage while prompts are written: it reads the whole index or the whole file."""
        self._damaged: tuple[StoreProblem, ...] = ()
        """The problems that the check thread has found."""
        self.is_reading = False
        """The check thread is reading records of the store."""
        self.expired = self.quarantined = 0
        self.error: str | None = None
        """The store's last failure; None once something is saved again, or the disk has room again. See `recover`."""
        self._is_for_room = False
        """The last failure was a lack of room."""
        self.least_bytes = 0
        """The bytes that every saved prompt takes at least, 0 if unknown. Without room for them, nothing can be
        saved."""
        self._lacks_room = False
        """The last failure was a lack of room, and the free space of the disk shows it."""
        self._failed_at = -math.inf
        """The time of `time.monotonic` of the last write that failed so."""
        self.disk_room_bytes = math.inf
        """While the disk is full, the bytes that prompts may take in place of others; 0 if nothing can be written. For
        any thread to read."""
        self.report_problem()

    @property
    def is_repairing(self) -> bool:
        """Returns whether a search for damaged records is running, or damaged records wait to be removed."""
        return self.is_reading or bool(self._damaged)

    def attempt(self, step: Callable[[], None]) -> Exception | None:
        """Runs a step, and returns its exception or None. A failure of the store is reported once; a bug shows as a
        degraded cache and a traceback in the log."""
        try:
            step()
        except (PrefixGone, LargerThanStore) as error:
            # This is a problem of one prompt, not a failure of the store.
            return error
        except CacheError as error:
            is_for_room = error.is_for_room if isinstance(error, FolderUnavailable) else isinstance(error, StoreFull)
            self._report(self._store.error_text(error), is_for_room=is_for_room)
            if is_for_room and self._store.evictor.full_disk() is not None:
                self._lacks_room, self._failed_at, self.disk_room_bytes = True, time.monotonic(), 0.0
            else:
                self._lacks_room, self.disk_room_bytes = False, math.inf
            if isinstance(error, StoreCorrupt):
                self._start_check(with_records=True)
            return error
        except Exception as error:
            log.exception("[disk-cache] the writer failed")
            self.note_bug(error)
            return error
        return None

    def note_bug(self, error: Exception) -> None:
        """Reports an error that is no failure of the store, until a prompt is saved again."""
        self.error = f"internal error: {error!r}"

    def report_problem(self) -> None:
        """Reports the reason why the store cannot be written, if there is one."""
        if self._store.problem is not None:
            self._lacks_room = False
            self._report(self._store.problem)

    def check_room(self) -> None:
        """Reports when the disk is full, before a prompt is lost, and when it has room again. For any thread."""
        evictor = self._store.evictor
        if not self.least_bytes:
            return
        full_disk = evictor.full_disk()
        if full_disk is None:
            self.disk_room_bytes = math.inf
            if self._lacks_room:
                with suppress(CacheError):
                    evictor.measure_again(has_more_room=True)
                self.recover()
        elif self._store.problem is not None:
            self.disk_room_bytes = 0.0
        else:
            lacks_room = evictor.lacks_room(self.least_bytes)
            # Near the limit, a few pages more or less would change the report again and again. So the report ends only
            # when the disk is no longer full.
            if not self._lacks_room and (lacks_room or evictor.is_crowded()):
                self._report(full_disk, is_for_room=True, saves_some=not lacks_room)
                self._lacks_room = True
            if self._lacks_room:
                has_failed = time.monotonic() < self._failed_at + _TRY_AGAIN_S
                self.disk_room_bytes = 0.0
                with suppress(CacheError):
                    self.disk_room_bytes = 0.0 if lacks_room or has_failed else evictor.usable_bytes()

    def recover(self, *, is_whole: bool = True) -> None:
        """Ends the last failure, because state was saved, `is_whole` if it is that of a whole prompt. Less does not end
        a lack of room: a small write may find some, again and again. Nor does a prompt that took the place of others
        on a full disk."""
        if self.error is None or (self._is_for_room and not is_whole):
            return
        if self._lacks_room and self._store.evictor.full_disk() is not None:
            return
        # The line comes first, as in `_report`: who sees the new state finds it in the log.
        log.info("[disk-cache] saving again")
        self.error, self._lacks_room, self.disk_room_bytes = None, False, math.inf

    def maintain(self) -> None:
        """Opens the folder again if needed, removes expired records, and records the models."""
        if self._store.maintain():
            self.recover()
            self._recorded = ()
        self.report_problem()
        self.check_room()
        if self._store.problem is None:
            self._expire()
        self.record_models()

    def record_models(self) -> None:
        """Records all models in the store. After a failure, `maintain` tries again."""
        models = self.models
        if models == self._recorded:
            return
        new = self._unrecorded(models)
        if new:
            self._store.evictor.evict_for(sum(map(_record_bytes, new)), frozenset())
            with self._store.changes() as changes:
                stored = [_known(changes, model) for model in new]
                for known, model in zip(stored, new, strict=True):
                    changes.put_model(joined(known, model))
                if any(model.has_own_root and known is None for known, model in zip(stored, new, strict=True)):
                    # State that any process has in memory must no longer be used.
                    changes.record_purge()
        self._recorded = models

    def _unrecorded(self, models: Sequence[ModelRecord]) -> list[ModelRecord]:
        """Returns the models whose record the store lacks, or that change their record."""
        with self._store.reads.snapshot() as snapshot:
            stored = [_known(snapshot, model) for model in models]
        return [model for known, model in zip(stored, models, strict=True) if joined(known, model) != known]

    def quarantine(self, name: bytes, parent: bytes) -> None:
        """Removes a damaged node and all its descendants."""
        self.quarantined += self._store.quarantine(name, parent)
        self._start_check(with_records=False)

    def remove_damaged(self) -> None:
        """Removes the damaged records that the check has found. Damaged records that these hid are found later, when
        they make a write fail."""
        if damaged := self._damaged:
            try:
                self.quarantined += remove_problems(self._store, damaged).records
            finally:
                self._damaged = ()

    def notice_purge(self) -> None:
        """Reads the changes of other processes. Calls `on_forget` if one of them has purged something, or if another
        store is open now."""
        if self._store.problem is not None:
            return
        self._store.written()
        epochs = self._store.read_epochs()
        self._store.follow_budget()
        if epochs != self._epochs:
            self._epochs = self._store.epochs
            # The purge may have removed the records of the models.
            self._recorded = ()
            self._have_forgotten()

    def _expire(self) -> None:
        """Removes expired nodes at intervals. The first time is soon after the start."""
        now = time.monotonic()
        if now >= self._expired_at + expiry_interval_s(self._ttl_s, has_own_ttls=self._store.evictor.may_have_own_ttls):
            self._expired_at = now
            self.expired += self._store.evictor.expire(self._ttl_s)
            self._have_forgotten()
            # LMDB has just read records of all prompts without ending the process. So a daemon that saves nothing
            # proves the file too.
            self._store.prove()

    def _have_forgotten(self) -> None:
        for forget in self.on_forget:
            forget()

    def _start_check(self, *, with_records: bool) -> None:
        """Starts a search for damage: with `with_records` first in all records, then in the file. `maintain` moves a
        damaged file aside."""
        if not self._is_checking:
            self._is_checking, self.is_reading = True, with_records
            if not start_helper(partial(self._look_for_damage, with_records), "kv-check"):
                # The next damage tries again.
                self._is_checking = self.is_reading = False

    def _look_for_damage(self, with_records: bool) -> None:
        try:
            if with_records:
                self._damaged = verify_index(self._store).problems
            self.is_reading = False
            self._store.try_file()
        except (CacheError, OSError) as failure:
            log.debug("[disk-cache] not looked for damage: %s", failure)
        finally:
            self._is_checking = self.is_reading = False

    def _report(self, message: str, *, is_for_room: bool = False, saves_some: bool = False) -> None:
        if self.error is None:
            what = "saving only in place of older prompts" if saves_some else "serving without saving"
            log.warning("[disk-cache] %s until this is repaired: %s", what, message)
        self.error, self._is_for_room = message, is_for_room


def _record_bytes(model: ModelRecord) -> int:
    return note_bytes(len(encode_record(b"", model)))


def _known(snapshot: Snapshot, model: ModelRecord) -> ModelRecord | None:
    """Returns the sound record of a model, if the store has one."""
    with suppress(StoreCorrupt):
        return snapshot.model(model.identity)
    return None
