"""One history: what happens to a daemon from a seed, and what must hold all the while."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from diskprefix.cache.policy.scope import parse_scope
from diskprefix.engine.inbox import Ticket
from diskprefix.engine.request import DoneEvent, ErrorEvent, Event, GenerateRequest, SamplingParams, TextEvent
from diskprefix.errors import CacheError, NotReady, QueueFull
from diskprefix.kv.layout import Layout
from diskprefix.nouns import SHARED, CacheOptions, Prompt, Tenant
from diskprefix.store.purge import PurgeFilter
from tests.faults.interleavings import hash_model, threads, world
from tests.faults.interleavings.bucket import SimulatedBucket
from tests.faults.interleavings.hash_model import Replies, salt_of
from tests.faults.interleavings.task_scheduler import Stuck, TaskScheduler
from tests.faults.interleavings.world import BLOCK, LONGEST, Daemon, Disk
from tests.made_settings import made_settings

PATIENCE_S = 300.0
"""A request that has not ended after this virtual time never will."""
_TENANTS = (SHARED, Tenant.of_key("one"), Tenant.of_key("one").with_salt("salt"), Tenant.of_key("two"))
_REPLIES = Replies()


class Wrong(AssertionError):
    """An invariant does not hold."""


@dataclass(eq=False)
class Asked:
    """A request: what was asked, and what came of it."""

    id: str
    layout: Layout
    tenant: Tenant
    token_ids: list[int]
    most: int
    num_replies: int
    saves: bool
    ttl_s: float | None
    submitted_at: float
    gone: frozenset[Asked]
    """The requests that were purged or had expired when it was submitted: it may find nothing of them."""
    is_unaffordable: bool = False
    """All of the write budget was used before it was submitted."""
    replies: dict[int, list[int]] = field(default_factory=dict)
    last: Event | None = None
    has_left: bool = False
    ended_at: float | None = None
    ticket: Ticket | None = None
    daemon: Daemon | None = None

    @property
    def expected(self) -> list[int]:
        return _REPLIES.of(self.layout, salt_of(self.tenant), self.token_ids, self.most)

    @property
    def all_tokens(self) -> list[int]:
        """The tokens whose state it may have left."""
        return self.token_ids + self.expected


class History:
    """Runs one history. `run` raises `Wrong`."""

    def __init__(self, seed: int, folder: Path, trace: Callable[[str], None] | None = None) -> None:
        self.scheduler = TaskScheduler(seed, 0.0, trace)
        self.random = self.scheduler.random
        self.scheduler.set_switches(self.random.choice((0.01, 0.05, 0.2, 0.5)))
        self.scheduler.at_points = self._watch_bounds
        self.folder = folder
        self.counts: Counter[str] = Counter()
        self.asked: list[Asked] = []
        self.gone: set[Asked] = set()
        self.daemon: Daemon | None = None
        self.model = hash_model.reset()
        self.disk, self.bucket = Disk(slow_s=self.random.choice((0.0, 0.0, 0.0, 0.3))), SimulatedBucket()
        self._has_restarted = self._has_preempted = False
        self._memory: tuple[int, ...] = ()
        self._numbers = count()
        choose = self.random.choice
        self._documents = [[self._token() for _ in range(LONGEST)] for _ in range(choose((1, 2, 3)))]
        self._tenants = _TENANTS[: choose((1, 2, 3, 4))]
        self._layout = hash_model.layout(
            choose(("token", "token", "grid")), choose(("full", "full", "window", "state"))
        )
        self._num_sequences = choose((1.0, 1.5, 2.5, 4.0))
        self.ttl_s = choose((0.0, 0.0, 20.0))
        self._own_ttls = choose((False, False, True))
        self._longest_s = 60.0 if self._own_ttls or self.ttl_s else 12.0
        self._has_bucket = choose((False, False, True))
        shared: dict[str, Any] = {
            "remote_tier": "s3://simulated",
            "namespace_key_file": folder / "key",
            "remote_write": choose(("seen-twice", "all", "all")),
        }
        self.settings = made_settings(
            **(shared if self._has_bucket else {}),
            kv_cache_dir=folder / "kv",
            kv_cache_min_tokens=choose((8, 16, 24)),
            kv_cache_gate="off",
            kv_cache_ttl=self.ttl_s,
            kv_cache_write_budget=choose(("off", "off", "300kB/day", "1MB/day")),
            max_sequences=choose((1, 2, 4)),
            disk_prefix_cache="full",
        )
        # Smaller than a user may have them, so that there is hardly any room.
        vars(self.settings).update(
            block_size=BLOCK,
            kv_cache_budget=choose((1_260_000, 1_320_000, 4_000_000)),
            kv_cache_min_free=0,
            kv_memory_keeps=choose((True, True, True, False)),
            kv_cache_write_buffer=choose((300, 700, 3_000, 1 << 20)),
            remote_deadline=choose((0.05, 1.0, 10.0)),
        )

    def run(self) -> None:
        """Raises `Wrong` with what does not hold."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        if (key := self.settings.namespace_key_file) is not None:
            key.touch(0o600)
            key.write_text("the key that all machines share\n")
        world.use(self.disk, self.bucket)
        failure: list[BaseException] = []

        def drive() -> None:
            try:
                self._drive()
            except BaseException as error:  # noqa: BLE001 (raised below)
                failure.append(error)

        with threads.running(self.scheduler):
            try:
                self.scheduler.run(drive)
            except Stuck as error:
                failure.append(Wrong(str(error)))
            finally:
                self._end()
        if failure:
            raise failure[0]

    def _end(self) -> None:
        """Frees what is left, in whatever state it is."""
        for process in {task.process for task in self.scheduler.tasks}:
            with suppress(Exception):
                self.scheduler.kill(process)
        if self.daemon is not None:
            self.daemon.release()

    # What happens.

    def _drive(self) -> None:
        self._start()
        events: list[tuple[Callable[[], None], int]] = [
            (self._arrive, 60),
            (self._pass_time, 14),
            (self._hang_up, 8),
            (self._purge, 4),
            (self._kill, 3),
            (self._stop, 3),
            (self._move, 6 if self._has_bucket else 0),
            (self._let_disk_fail, 2),
            (self._let_bucket_fail, 6 if self._has_bucket else 0),
            (self._let_model_fail, 1),
            (self._heal, 3),
            (self._look, 4),
        ]
        choices, weights = zip(*events, strict=True)
        for _ in range(self.random.randint(5, 24)):
            event = self.random.choices(choices, weights)[0]
            self.counts[event.__name__.strip("_")] += 1
            self.scheduler.say(f"--- {event.__name__.strip('_')}")
            event()
            self.scheduler.point()
            self._check_errors()
        self._finish()

    def _start(self) -> None:
        """Starts a daemon. If the disk does not let it, the disk recovers."""
        self.daemon = self._started()
        if self.daemon is None and self.disk.failing:
            self.scheduler.errors.clear()
            self.disk.failing = 0.0
            self.daemon = self._started()
        if self.daemon is None:
            raise Wrong(f"the daemon does not start: {self.scheduler.errors}")

    def _started(self) -> Daemon | None:
        process, made = object(), list[Daemon]()
        task = self.scheduler.spawn(
            "start", process, lambda: made.append(Daemon(self.settings, self._layout, self._num_sequences, process))
        )
        if not self.scheduler.join(task, PATIENCE_S):
            raise Wrong(f"the daemon does not start\n{self.scheduler.standing()}")
        if not made:
            self.scheduler.kill(process)
        return made[0] if made else None

    def _token(self) -> int:
        return self.random.randrange(hash_model.FIRST, hash_model.VOCAB)

    def _prompt(self) -> list[int]:
        """The beginning of a document, or an earlier prompt and its reply; and then some tokens of its own."""
        most = LONGEST - 16
        if self.asked and self.random.random() < 0.5:
            earlier = self.random.choice(self.asked)
            begin = earlier.token_ids if self.random.random() < 0.4 else earlier.all_tokens
            more = 0 if self.random.random() < 0.5 else self.random.randint(1, 12)
        else:
            begin = self.random.choice(self._documents)[: self.random.randint(12, 60)]
            more = self.random.choice((0, 1, 5, 9))
        return (begin + [self._token() for _ in range(more)])[:most]

    def _arrive(self) -> None:
        daemon = self.daemon
        assert daemon is not None
        tenant = self.random.choice(self._tenants)
        one = Asked(
            id=f"r{next(self._numbers)}",
            layout=self._layout,
            tenant=tenant,
            token_ids=self._prompt(),
            most=self.random.choice((1, 2, 4, 9, 16)),
            num_replies=self.random.choice((1, 1, 1, 1, 2, 3)),
            saves=self.random.random() < 0.9,
            ttl_s=self.random.choice((5.0, 60.0)) if self._own_ttls and self.random.random() < 0.5 else None,
            submitted_at=self.scheduler.now,
            gone=frozenset(self.gone),
        )
        self.asked.append(one)
        self.scheduler.spawn(one.id, "clients", lambda: self._ask(one, daemon))

    def _ask(self, one: Asked, daemon: Daemon) -> None:
        """What `server.answer` does."""
        # The task belongs to the clients, and what it calls to the daemon.
        assert self.scheduler.current is not None
        self.scheduler.current.process = daemon.process
        one.daemon = daemon
        request = GenerateRequest(
            id=one.id,
            prompt=Prompt(np.array(one.token_ids, np.int32)),
            sampling=SamplingParams(temperature=0, max_tokens=one.most, n=one.num_replies),
            cache=CacheOptions(
                scope=parse_scope(self.random.choice(("full", "full", "auto:30")), param="scope"),
                tenant=one.tenant,
                save=one.saves,
                ttl_s=one.ttl_s,
            ),
        )

        def emit(event: Event) -> None:
            if one.last is not None and not isinstance(one.last, ErrorEvent):
                raise Wrong(f"{one.id} got {event} behind its end")
            if isinstance(event, TextEvent):
                one.replies.setdefault(event.choice, []).extend(event.token_ids)
            if isinstance(event, DoneEvent | ErrorEvent):
                one.last, one.ended_at = event, self.scheduler.now

        one.is_unaffordable = self._written(daemon) >= (self.settings.write_budget_bytes or math.inf)
        one.submitted_at, one.gone = self.scheduler.now, frozenset(self.gone | self._expired(daemon))
        try:
            one.ticket = daemon.inbox.submit(request, emit)
        except (QueueFull, NotReady) as error:
            one.last, one.ended_at = ErrorEvent(error), self.scheduler.now

    def _expired(self, daemon: Daemon) -> set[Asked]:
        """Returns the requests that nothing may be found of, because their time to live is over."""
        searches_s = 34.0 if self._own_ttls or not self.ttl_s else self.ttl_s / 10 + 4.0
        has_searched = self.scheduler.now > daemon.started_at + searches_s
        # What is left of requests that lost their memory is kept for longer.
        # So is what slides out of windows.
        is_kept = self._has_preempted or any(group.window is not None for group in self._layout.groups)
        if not has_searched or is_kept or self.disk.num_failed or self.disk.slow_s or self._has_bucket:
            return set()
        return {
            one
            for one in self.asked
            # What was cut short is kept for longer.
            if isinstance(one.last, DoneEvent)
            and not one.has_left
            and one.ended_at is not None
            and (ttl_s := one.ttl_s or self.ttl_s)
            and one.ended_at + ttl_s + searches_s < self.scheduler.now
        }

    def _written(self, daemon: Daemon) -> int:
        """Returns the bytes written, which must be those that were counted."""

        def counted() -> int:
            return sum(meter.total_bytes for meter in world.meters)

        least, found, most = counted(), daemon.store.written().total, counted()
        # A kill loses what is not recorded yet, and what is recorded cannot be read from a store that is closed.
        is_complete = not self._has_restarted and daemon.store._env is not None
        if found > most or (found < least and is_complete):
            raise Wrong(f"{found} bytes are recorded as written, of {least} to {most}")
        return found

    def _hang_up(self) -> None:
        running = [one for one in self.asked if one.ticket is not None and one.last is None]
        if running:
            one = self.random.choice(running)
            one.has_left = True
            assert one.ticket is not None
            one.ticket.cancel()

    def _pass_time(self) -> None:
        self.scheduler.sleep(self.random.choice((0.01, 0.01, 0.05, 0.05, 0.2, 0.2, 1.0, 3.0, 12.0, self._longest_s)))

    def _look(self) -> None:
        assert self.daemon is not None
        self.daemon.cache.stats()
        self.daemon.inbox.activities()
        self._written(self.daemon)

    def _purge(self) -> None:
        daemon, began_at = self.daemon, self.scheduler.now
        assert daemon is not None
        over = [one for one in self.asked if one.ended_at is not None and one.ended_at < began_at]
        tenant = self.random.choice((None, *(tenant for tenant in self._tenants if tenant.ids)))
        chosen = PurgeFilter(salt=None if tenant is None else str(tenant))
        done: list[object] = []

        def purge() -> None:
            with suppress(CacheError):
                done.append(daemon.cache.purge(chosen))

        task = self.scheduler.spawn("purge", daemon.process, purge)
        if not self.scheduler.join(task, PATIENCE_S):
            raise Wrong(f"a purge does not end\n{self.scheduler.standing()}")
        if done:

            def is_of(one: Asked) -> bool:
                return tenant is None or one.tenant.ids[: len(tenant.ids)] == tenant.ids

            if not self._has_bucket:
                # Another machine may have what was shared.
                self.gone |= {one for one in over if is_of(one)}

    def _let_disk_fail(self) -> None:
        self.disk.failing = self.random.choice((0.1, 0.5, 1.0))

    def _let_bucket_fail(self) -> None:
        choose, bucket = self.random.choice, self.bucket
        bucket.failing, bucket.slow_s = choose((0.0, 0.3, 1.0)), choose((0.01, 1.0, 30.0))
        bucket.damaging = choose((0.0, 0.5))

    def _let_model_fail(self) -> None:
        self.model.failing = self.random.choice((0.05, 0.3))

    def _heal(self) -> None:
        self.disk.failing, self.disk.slow_s = 0.0, self.random.choice((0.0, 0.01, 0.3))
        self.bucket.failing = self.bucket.damaging = self.model.failing = 0.0
        self.bucket.slow_s = 0.01

    def _kill(self) -> None:
        daemon, self.daemon = self.daemon, None
        assert daemon is not None
        self.scheduler.kill(daemon.process)
        daemon.release()
        self.disk.lock = threads.SimulatedLock()
        self._lose()
        self._start()

    def _move(self) -> None:
        """Kills the daemon, and goes on with one on another machine, or on this one again."""
        vars(self.settings)["kv_cache_dir"] = self.folder / self.random.choice(("kv", "kv2"))
        self._kill()

    def _lose(self) -> None:
        self._has_restarted = True
        for one in self.asked:
            if one.ended_at is None:
                one.has_left, one.ended_at = True, self.scheduler.now

    def _stop(self) -> None:
        daemon = self.daemon
        assert daemon is not None
        grace_s, hibernates = self.random.choice((0.0, 0.05, 5.0)), self.random.random() < 0.5
        task = self.scheduler.spawn("stopping", daemon.process, lambda: daemon.stop(grace_s, hibernates=hibernates))
        if not self.scheduler.join(task, PATIENCE_S):
            raise Wrong(f"the daemon does not stop\n{self.scheduler.standing()}")
        self._check_errors()
        # A write to the bucket may take a minute, which nobody waits for.
        tasks = (task for task in self.scheduler.tasks if task.process is daemon.process)
        left = [task for task in tasks if not task.name.startswith("remote-")]
        if left and not self.disk.failing:
            deadline = self.scheduler.now + 30
            while self.scheduler.now < deadline and any(task in self.scheduler.tasks for task in left):
                self.scheduler.sleep(0.5)
            if any(task in self.scheduler.tasks for task in left):
                raise Wrong(f"threads are left after the daemon stopped\n{self.scheduler.standing()}")
        self.daemon = None
        self.scheduler.kill(daemon.process)
        daemon.release()
        self._lose()
        self._start()

    # What must hold.

    def _finish(self) -> None:
        """Waits for all requests, and looks at what is left of them."""
        self._heal()
        self.disk.slow_s = 0.0
        daemon = self.daemon
        assert daemon is not None
        deadline = self.scheduler.now + PATIENCE_S
        while self._waiting() and self.scheduler.now < deadline:
            self.scheduler.sleep(0.2)
        if waiting := self._waiting():
            raise Wrong(f"{waiting[0].id} never ends\n{self.scheduler.standing()}")
        self._check_errors()
        for one in self.asked:
            self._check_reply(one)
        self._check_idle(daemon)

    def _waiting(self) -> list[Asked]:
        return [one for one in self.asked if one.last is None and not one.has_left]

    def _check_errors(self) -> None:
        if self.scheduler.errors:
            raise Wrong(self.scheduler.errors[0])
        if self.daemon is not None and self.daemon.fatal:
            raise Wrong(f"the engine ended: {self.daemon.fatal[0]!r}")

    def _check_reply(self, one: Asked) -> None:
        expected = one.expected
        for tokens in one.replies.values():
            is_whole = isinstance(one.last, DoneEvent)
            if tokens != expected[: one.most if is_whole else len(tokens)]:
                raise Wrong(f"{one.id} got {tokens}, not {expected}")
        if isinstance(one.last, ErrorEvent):
            is_asked_for = self.counts["let_model_fail"] and "internal error" in str(one.last.error)
            if not isinstance(one.last.error, QueueFull | NotReady) and not is_asked_for:
                raise Wrong(f"{one.id} failed: {one.last.error!r}")
            self.counts["refused"] += 1
        if not isinstance(one.last, DoneEvent):
            self.counts["without an end"] += 1
            return
        if len(one.replies) != one.num_replies:
            raise Wrong(f"{one.id} got {len(one.replies)} replies, not {one.num_replies}")
        self.counts["done"] += 1
        if one.is_unaffordable:
            self.counts["unaffordable"] += 1
            if one.last.cache.saved == "queued":
                raise Wrong(f"{one.id} is saved with no budget for writes")
        cached = one.last.usage.cached_tokens
        self.counts[f"from {one.last.cache.source}"] += bool(cached)
        self.counts["tokens restored"] += cached
        allowed = max((_common(one, other) for other in self.asked if self._may_find(one, other)), default=0)
        if one.gone - self.gone:
            # A use of a part of a block keeps the whole of it from expiring.
            allowed += -allowed % BLOCK
        if cached > allowed:
            raise Wrong(f"{one.id} found {cached} tokens, and only {allowed} could be there for {one.tenant}")

    def _may_find(self, one: Asked, other: Asked) -> bool:
        assert one.ended_at is not None
        return (
            other is not one
            and other.tenant == one.tenant
            and other not in one.gone
            and other.submitted_at <= one.ended_at
        )

    def _watch_bounds(self) -> None:
        """Notes a bound of memory that does not hold now."""
        daemon = self.daemon
        if daemon is None:
            return
        self._has_preempted |= daemon.engine.figures.preemptions > 0
        pages, writer, room = daemon.engine.pages, daemon.cache.writer, self.settings.kv_cache_write_buffer
        pool: Any = pages.pool
        pending = writer.pending_bytes - writer._page_bytes
        memory = pool.taken_bytes, pool.used_bytes, len(pool.holds), len(pages.running), len(pages._nodes)
        if memory != self._memory and not pool.lock.locked():
            self._memory = memory
            lock, pool.lock = pool.lock, nullcontext()
            self.scheduler.errors += pages.check()
            pool.lock = lock
        if pool.taken_bytes > pool.limit_bytes:
            self.scheduler.errors.append(f"{pool.taken_bytes} bytes of KV memory are used, of {pool.limit_bytes}")
        if not 0 <= pending <= room:
            self.scheduler.errors.append(f"{pending} bytes wait to be written, of {room}")

    def _check_idle(self, daemon: Daemon) -> None:
        """Nothing is left of requests that are over."""
        self.scheduler.sleep(0.1)
        deadline = self.scheduler.now + PATIENCE_S

        def left() -> dict[str, object]:
            return {
                "running": daemon.inbox.num_running,
                "pending bytes": daemon.cache.writer.pending_bytes,
                "publications": daemon.cache.writer.num_pending,
                "pending nodes": daemon.cache.writer.pending,
                "pins": daemon.store.evictor.pinned(),
                "sequences": daemon.engine.pages.running,
                "held pages": daemon.engine.pages.pool.holds,
            }

        while any(left().values()) and self.scheduler.now < deadline:
            self.scheduler.sleep(1.0)
        if any(left().values()):
            raise Wrong(f"left behind: { {name: value for name, value in left().items() if value} }")


def _common(one: Asked, other: Asked) -> int:
    pairs = zip(one.token_ids, other.all_tokens, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one.token_ids), len(other.all_tokens)))
