"""Prompts to compute before they are asked for, and when there is time for them: within a budget in seconds of a
processor, and never while the machine runs on its battery."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from diskprefix.values import CacheOptions, Prompt

if TYPE_CHECKING:
    from diskprefix.cache.cache import PrefixCache
    from diskprefix.kv.page_cache import PageCache
    from diskprefix.kv.sequence import Owner
    from diskprefix.model.runtime import Runtime

_MAX_JOBS = 8
"""The most prompts that wait to be computed. The oldest is dropped first."""
_QUIET_S = 0.5
"""The seconds after a request comes, or a reply ends, in which nothing is computed ahead: the next one may come."""
_LATER_S = 60.0
"""The seconds until the battery, or a budget that is spent, is looked at again."""
_SUPPLIES = Path("/sys/class/power_supply")


class AheadModel(Protocol):
    """A model that computes ahead: the served one, or the draft model."""

    runtime: Runtime
    cache: PrefixCache
    pages: PageCache


class AheadJob(Struct, frozen=True, eq=False):
    """A prompt that a model computes. `make` renders it, which may take long, and returns None if there is none.
    `owner` owns its state in memory. `content` is what it continues: a job that continues more of it replaces it.
    After `expires_at` on the clock of `AheadJobs`, it is no longer wanted."""

    model: AheadModel
    make: Callable[[], Prompt | None]
    options: CacheOptions
    owner: Owner
    content: tuple[object, ...] | bytes = ()
    expires_at: float = math.inf


class AheadJobs:
    """The prompts to compute ahead, and when there is time for them. For any thread. `budget_s` are the seconds of a
    processor for each hour; with 0 nothing is computed ahead."""

    def __init__(self, budget_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget_s, self._clock, self._lock = budget_s, clock, threading.Lock()
        self._jobs: list[AheadJob] = []
        self._left_s, self._counted_at = budget_s, clock()
        self._not_before = 0.0
        self.on_job: Callable[[], None] = lambda: None
        """Called when a job is added."""

    def add(self, job: AheadJob) -> None:
        """Adds a prompt, the first one to be computed. It replaces earlier turns of its conversation."""
        if not self._budget_s:
            return
        with self._lock:
            others = [other for other in self._jobs if not _continues(job, other)]
            self._jobs = [job, *others][:_MAX_JOBS]
        self.give_way()
        self.on_job()

    def drop(self, job: AheadJob) -> None:
        with self._lock:
            self._jobs = [other for other in self._jobs if other is not job]

    def forget(self, is_gone: Callable[[Owner], bool]) -> None:
        """Drops the jobs that have expired, and those whose owner's state was purged."""
        now = self._clock()
        with self._lock:
            self._jobs = [job for job in self._jobs if job.expires_at > now and not is_gone(job.owner)]

    def give_way(self, *, is_long: bool = False) -> None:
        """Has no job begin for some time."""
        self._not_before = max(self._not_before, self._clock() + (_LATER_S if is_long else _QUIET_S))

    def next(self) -> AheadJob | None:
        """Returns the job to compute now, None if there is none or this is no time for it."""
        self.forget(lambda _: False)
        if not self._jobs or self._clock() < self._not_before:
            return None
        if self._refill() <= 0 or runs_on_battery():
            self.give_way(is_long=True)
            return None
        return self._jobs[0]

    def spend(self, job: AheadJob, seconds: float) -> bool:
        """Takes seconds of a processor from the budget. Returns whether the job goes on."""
        self._left_s -= seconds
        return self._refill() > 0 and job in self._jobs

    @property
    def wait_s(self) -> float | None:
        """The seconds until `next` may return a job, None if there is none."""
        return max(0.0, self._not_before - self._clock()) if self._jobs else None

    def _refill(self) -> float:
        now = self._clock()
        self._left_s += (now - self._counted_at) * self._budget_s / 3600
        self._left_s, self._counted_at = min(self._left_s, self._budget_s), now
        return self._left_s


def _continues(job: AheadJob, other: AheadJob) -> bool:
    return job.owner == other.owner and job.content[: len(other.content)] == other.content


def runs_on_battery() -> bool:
    """Returns whether the machine's battery is being discharged, as far as the system says so."""
    if sys.platform == "darwin":
        with suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(["pmset", "-g", "batt"], capture_output=True, timeout=2.0, check=False).stdout
            return b"'Battery Power'" in said
    for supply in sorted(_SUPPLIES.glob("*")):
        with suppress(OSError, UnicodeDecodeError):
            kind, status = ((supply / name).read_text().strip() for name in ("type", "status"))
            # The battery of a mouse has the scope Device.
            scope = supply / "scope"
            is_own = not scope.exists() or scope.read_text().strip() != "Device"
            if is_own and (kind, status) == ("Battery", "Discharging"):
                return True
    return False
