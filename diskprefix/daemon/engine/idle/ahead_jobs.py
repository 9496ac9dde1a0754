"""The queues of prompts to compute ahead of requests, one for each share, and the times when they may be computed:
within a budget of processor seconds, not while the machine runs on its battery, and not while other programs want the
CPUs."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from msgspec import Struct

from diskprefix.daemon.engine.idle.cpu_waits import CpuWaits
from diskprefix.daemon.engine.scheduler import fair_counts
from diskprefix.prefixstore.cache.context import PromptOrigin
from diskprefix.values import CacheOptions, Prompt

if TYPE_CHECKING:
    from diskprefix.prefixstore.cache.cache import PrefixCache
    from diskprefix.prefixstore.kv.page_cache import PageCache
    from diskprefix.prefixstore.kv.sequence import Owner
    from diskprefix.runtime.contract import Runtime

_MAX_JOBS, _MAX_SHARES = 8, 64
"""The maximum number of waiting prompts of one share, and of shares with waiting prompts."""
_QUIET_S = 0.5
"""Nothing is computed ahead for this many seconds after a request for a reply comes or the reply ends, because the next
request may come."""
_TURN_S = 60.0
"""The processor seconds that a job may take more than another share has taken whose job waits. The rest of it is
computed in the share's next turn, from what memory or the disk has of it."""
_LATER_S = 60.0
"""The seconds until the battery, an exhausted budget or the other programs are checked again."""
_DAY_S = 86400.0
_SUPPLIES = Path("/sys/class/power_supply")


PauseReason: TypeAlias = Literal["off", "battery", "budget", "other programs"]


class AheadModel(Protocol):
    """A model that computes ahead: the served model or the draft model."""

    runtime: Runtime
    cache: PrefixCache
    pages: PageCache


class AheadJob(Struct, eq=False):
    """A prompt that a model computes. `make` renders the prompt, which may take long, and returns None if there is no
    prompt. `owner` owns its state in memory. `content` is the conversation that the prompt continues: a later job that
    continues more of this conversation replaces this one. After `expires_at`, on the clock of `AheadJobs`, the job is
    no longer wanted. `label` is the name under which somebody asked for it. Of its `num_tokens`, 0 until they are
    known, `num_ready` are computed. `origin`: what the entry of its state says. `was_dropped`: others of its share took
    its place before it was computed."""

    model: AheadModel
    make: Callable[[], Prompt | None]
    options: CacheOptions
    owner: Owner
    content: tuple[object, ...] | bytes = ()
    expires_at: float = math.inf
    label: str = ""
    num_tokens: int = 0
    num_ready: int = 0
    origin: PromptOrigin = PromptOrigin("ahead")
    was_dropped: bool = False

    @property
    def share(self) -> str:
        return self.options.share


class AheadJobs:
    """The prompts to compute ahead, and the times when they may be computed. For any thread. `budget_s` is the budget
    of processor seconds per day; with 0 nothing is computed ahead."""

    def __init__(self, budget_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget_s, self._clock, self._lock = budget_s, clock, threading.Lock()
        self.spent_s = 0.0
        """The processor seconds that were spent since the start."""
        self.pause_reason: PauseReason | None = None if budget_s else "off"
        """Why waiting prompts are not computed now, as far as a request is not the reason."""
        self._waits = CpuWaits()
        self._jobs: dict[str, list[AheadJob]] = {}
        """The waiting prompts of each share, the next one first. The share whose turn was longest ago comes first."""
        self._dropped: dict[str, list[AheadJob]] = {}
        """The last prompts of each share that somebody asked for and that were dropped."""
        self._spent_of: dict[str, float] = {}
        """The processor seconds of each share. Only shares with waiting prompts, or with more than these, are
        counted."""
        self._left_s, self._counted_at = budget_s, clock()
        self._not_before = 0.0
        self.on_job: Callable[[], None] = lambda: None
        """Called when a job is added."""

    def add_job(self, job: AheadJob) -> None:
        """Adds a prompt, which is computed before the others of its share. It replaces earlier turns of its
        conversation. Above eight prompts of a share the oldest is dropped, first of those that nobody asked for."""
        if not self._budget_s:
            job.was_dropped = True
            return
        with self._lock:
            job.was_dropped = False
            others = [other for other in self._jobs.pop(job.share, ()) if not _continues(job, other)]
            dropped = [other for other in self._dropped.pop(job.share, ()) if other.content != job.content]
            queue = [job, *others]
            if len(queue) > _MAX_JOBS:
                last = next((other for other in reversed(queue) if not other.label), queue[-1])
                queue.remove(last)
                last.was_dropped = True
                dropped += [last] if last.label else []
            # A share that has just asked waits for those that asked before.
            self._jobs[job.share] = queue
            self._dropped[job.share] = dropped[-_MAX_JOBS:]
            self._count_shares()
        self.on_job()

    def drop_job(self, job: AheadJob) -> None:
        """Removes a job that is over."""
        self._keep(lambda other: other is not job)

    def has(self, job: AheadJob) -> bool:
        """Returns whether a job waits or runs."""
        return job in self._jobs.get(job.share, ())

    def drop_gone(self) -> None:
        """Drops the jobs that have expired, and those whose owner's state was purged, also of a draft model."""
        now = self._clock()
        self._keep(lambda job: job.expires_at > now and not job.model.cache.is_gone(job.owner))

    def _keep(self, is_kept: Callable[[AheadJob], bool]) -> None:
        with self._lock:
            for queues in (self._jobs, self._dropped):
                for share, jobs in list(queues.items()):
                    queues[share] = [job for job in jobs if is_kept(job)]
                    if not queues[share]:
                        del queues[share]

    def _count_shares(self) -> None:
        """Begins to count the seconds of new shares, and drops the prompts of a share above the limit of shares. The
        caller holds the lock."""
        if len(self._jobs) > _MAX_SHARES:
            last = max(self._jobs, key=lambda share: self._spent_of.get(share, 0.0))
            for job in self._jobs.pop(last):
                job.was_dropped = True
            self._dropped.pop(last, None)
        self._spent_of = fair_counts(self._spent_of, self._jobs)

    def pause(self, *, is_long: bool = False) -> None:
        """Lets no job begin for half a second, or with `is_long` for a minute."""
        self._not_before = max(self._not_before, self._clock() + (_LATER_S if is_long else _QUIET_S))

    def next(self) -> AheadJob | None:
        """Returns the job to compute now. Returns None if there is no job or none may begin now."""
        self.drop_gone()
        if not self._jobs or self._clock() < self._not_before:
            return None
        self._refill()
        self.pause_reason = self._limit()
        if self.pause_reason is not None:
            self.pause(is_long=True)
            return None
        self._waits.begin()
        with self._lock:
            # Of shares with equal seconds, the one that has waited longest.
            share = min(self._jobs, key=lambda share: self._spent_of[share], default=None)
            return None if share is None else self._jobs[share][0]

    def why_paused(self) -> PauseReason | None:
        """Returns why a prompt that is added now is not computed soon, as far as a request is not the reason. May ask
        another program about the battery."""
        is_later = self._clock() < self._not_before
        return self.pause_reason if self.pause_reason == "other programs" and is_later else self._limit()

    def _limit(self) -> PauseReason | None:
        if not self._budget_s:
            return "off"
        return "budget" if self._left_at(self._clock()) <= 0 else "battery" if runs_on_battery() else None

    def spend(self, job: AheadJob, seconds: float) -> bool:
        """Subtracts processor seconds from the budget. Returns whether the job may go on, or is to wait for its share's
        next turn, or for the budget."""
        self._left_s -= seconds
        self.spent_s += seconds
        with self._lock:
            spent_s = self._spent_of[job.share] = self._spent_of.get(job.share, 0.0) + seconds
            others = [self._spent_of[share] for share in self._jobs if share != job.share]
        if self._waits.are_long():
            self.pause_reason = "other programs"
            self.pause(is_long=True)
            return False
        return self._refill() > 0 and spent_s <= min(others, default=math.inf) + _TURN_S and self.has(job)

    @property
    def figures(self) -> dict[str, Any]:
        """The number of waiting prompts, the processor seconds that were spent, those that may be spent now, why
        nothing is computed (`paused`), and the progress of the prompts that clients asked for (`asked`), also of those
        that were dropped and wait no longer."""
        with self._lock:
            jobs = [job for some in self._jobs.values() for job in some]
            dropped = [job for some in self._dropped.values() for job in some]
        return {
            "waiting": len(jobs),
            "cpu_s": round(self.spent_s, 1),
            "cpu_left_s": round(max(0.0, self._left_at(self._clock())), 1),
            "paused": self.pause_reason if jobs or not self._budget_s else None,
            "asked": [
                {
                    "label": job.label,
                    "tokens": job.num_tokens or None,
                    "ready": job.num_ready,
                    "waits": not job.was_dropped,
                }
                for job in (*jobs, *dropped)
                if job.label
            ],
        }

    @property
    def wait_s(self) -> float | None:
        """The seconds until `next` may return a job, None if there is none."""
        return max(0.0, self._not_before - self._clock()) if self._jobs else None

    def _refill(self) -> float:
        now = self._clock()
        self._left_s, self._counted_at = self._left_at(now), now
        return self._left_s

    def _left_at(self, now: float) -> float:
        """Returns what is left of the budget. Changes nothing, so threads that only show it take nothing back."""
        return min(self._left_s + (now - self._counted_at) * self._budget_s / _DAY_S, self._budget_s)


def _continues(job: AheadJob, other: AheadJob) -> bool:
    return job.owner == other.owner and job.content[: len(other.content)] == other.content


def runs_on_battery() -> bool:
    """Returns whether the machine's battery is being discharged; False if the system does not say."""
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
