"""Keeps a store in order beside the writing of prompts, and says what is wrong with it. For the writing thread."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from diskprefix.errors import CacheError, LargerThanStore, PrefixGone, StoreCorrupt
from diskprefix.store.eviction import expiry_interval_s
from diskprefix.store.note_record import note_bytes
from diskprefix.store.savings import forget_hits
from diskprefix.store.schema import ModelRecord, model_key
from diskprefix.store.store import Store
from diskprefix.store.verify import StoreProblem, remove_problems, verify_index

log = logging.getLogger("diskprefix")


class Housekeeping:
    """The steps between publications. A failure of the store is logged once."""

    def __init__(self, store: Store, ttl_s: float) -> None:
        """`ttl_s`: nodes that were not used for this many seconds are removed; 0 keeps them. Uses may ask for another
        time."""
        self._store = store
        self._ttl_s = ttl_s
        self._expired_at = -math.inf
        self.models: tuple[ModelRecord, ...] = ()
        """The models that the store is served with."""
        self._recorded: tuple[ModelRecord, ...] = ()
        """Those of which the store has a record."""
        self.on_forget: list[Callable[[], None]] = []
        """Called when records were deleted, by any process, or may have expired: memories of them must go too."""
        self._epoch = store.epoch
        """That of which there are memories."""
        self._checking: threading.Thread | None = None
        """Looks for damage beside the writing of prompts, as it reads all of the index or of the file."""
        self._damaged: tuple[StoreProblem, ...] = ()
        """What it found."""
        self.is_reading = False
        """It has the store's records open."""
        self.expired = self.quarantined = 0
        self.error: str | None = None
        """The store's last failure; None once a prompt is saved again."""
        self.report_problem()

    @property
    def is_repairing(self) -> bool:
        """Returns whether records are looked at that made writing fail, or are still to be removed."""
        return self.is_reading or bool(self._damaged)

    def attempt(self, step: Callable[[], None]) -> Exception | None:
        """Runs a step. Returns what it raised, which the thread survives: a failure of the store is said once, and a
        bug shows as a degraded cache and a logged traceback."""
        try:
            step()
        except (PrefixGone, LargerThanStore) as error:
            # Of one prompt, and no failure of the store.
            return error
        except CacheError as error:
            self._report(self._store.message(error))
            if isinstance(error, StoreCorrupt):
                self._check(with_records=True)
            return error
        except Exception as error:
            log.exception("[disk-cache] the writer failed")
            self.error = f"internal error: {error!r}"
            return error
        return None

    def report_problem(self) -> None:
        """Reports what is wrong with the folder, once."""
        if self._store.problem is not None:
            self._report(self._store.problem)

    def recover(self) -> None:
        """A prompt was saved."""
        if self.error is not None:
            self.error = None
            log.info("[disk-cache] saving again")

    def maintain(self) -> None:
        """Opens the folder again if needed, removes what has expired, and records the models."""
        if self._store.maintain():
            self.recover()
            self._recorded = ()
        self.report_problem()
        if self._store.problem is None:
            self._expire()
        self._record_models()

    def _record_models(self) -> None:
        """Records all models in the store. A failure is tried again at the next check of the folder."""
        models = self.models
        if models == self._recorded:
            return
        with self._store.snapshot() as snapshot:
            new = [model for model in models if not snapshot.has_record("meta", model_key(model.identity))]
        if new:
            self._store.evictor.make_room(sum(note_bytes(len(model.identity)) for model in new), frozenset())
            with self._store.changes() as changes:
                for model in new:
                    changes.put_model(model)
        self._recorded = models

    def quarantine(self, name: bytes, parent: bytes) -> None:
        """Removes a damaged node with all that continues it."""
        self.quarantined += self._store.quarantine(name, parent)
        self._check(with_records=False)

    def remove_damaged(self) -> None:
        """Removes the records that were found damaged. What they hid is found when it makes writing fail."""
        if damaged := self._damaged:
            try:
                self.quarantined += remove_problems(self._store, damaged).records
            finally:
                self._damaged = ()

    def notice_purge(self) -> None:
        """Looks what other processes have written. Has memories dropped if one of them has purged something, or if
        another store is open."""
        if self._store.problem is not None:
            return
        recorded_bytes = self._store.meter.recorded_bytes
        with self._store.snapshot() as snapshot:
            self._store.look_at_written(snapshot, recorded_bytes)
        if self._store.look_for_purge() != self._epoch:
            self._epoch = self._store.epoch
            self._have_forgotten()

    def _expire(self) -> None:
        """Removes expired nodes at intervals. The first time is soon after the start."""
        now = time.monotonic()
        if now >= self._expired_at + expiry_interval_s(self._ttl_s, has_own_ttls=self._store.evictor.may_have_own_ttls):
            self._expired_at = now
            if expired := self._store.evictor.expire(self._ttl_s):
                self.expired += expired
                forget_hits(self._store)
            self._have_forgotten()
            # LMDB has read records of all prompts. A daemon that saves nothing is killed as often as one likes, too.
            self._store.prove()

    def _have_forgotten(self) -> None:
        for forget in self.on_forget:
            forget()

    def _check(self, *, with_records: bool) -> None:
        """Begins to look for more damage: in the file, with which `maintain` deals, and in all records if one of them
        makes writing fail."""
        if self._checking is None or not self._checking.is_alive():
            self._checking = threading.Thread(
                target=self._look_for_damage, args=(with_records,), name="kv-check", daemon=True
            )
            self.is_reading = with_records
            self._checking.start()

    def _look_for_damage(self, with_records: bool) -> None:
        try:
            if with_records:
                self._damaged = verify_index(self._store).problems
            self.is_reading = False
            self._store.try_file()
        except (CacheError, OSError) as failure:
            log.debug("[disk-cache] not looked for damage: %s", failure)
        finally:
            self.is_reading = False

    def _report(self, message: str) -> None:
        if self.error is None:
            log.warning("[disk-cache] serving without saving until this is repaired: %s", message)
        self.error = message
