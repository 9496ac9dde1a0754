"""One history: what happens from a seed to the processes that share a folder, and what must hold all the while."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import xxhash
from msgspec.structs import replace

from diskprefix.daemon.engine.idle.ahead_jobs import AheadJob
from diskprefix.daemon.engine.inbox import Ticket
from diskprefix.daemon.engine.request import DoneEvent, ErrorEvent, Event, GenerateRequest, SamplingParams, TextEvent
from diskprefix.daemon.settings import Settings
from diskprefix.errors import CacheError, NotReady, QueueFull
from diskprefix.prefixstore.kv.layout import Layout
from diskprefix.prefixstore.kv.page_cache import MemoryWait
from diskprefix.prefixstore.store.compact import compact_folder, rewrite_folder
from diskprefix.prefixstore.store.epochs import Purges, purges_of
from diskprefix.prefixstore.store.eviction import limits_s
from diskprefix.prefixstore.store.folder import LOCK, FileMark, _read_mark
from diskprefix.prefixstore.store.note_record import NoteKind, root_limit
from diskprefix.prefixstore.store.notes import TenantNotes
from diskprefix.prefixstore.store.opening import inode_of
from diskprefix.prefixstore.store.purge import PurgeFilter, purge
from diskprefix.prefixstore.store.reads import LIMIT_S, STALL_S, Patience
from diskprefix.prefixstore.store.schema import NodeKind
from diskprefix.prefixstore.store.store import OUTDATED, Store
from diskprefix.prefixstore.store.store_file import StoreFile
from diskprefix.prefixstore.store.verify import remove_damaged, verify_index
from diskprefix.scope import parse_scope
from diskprefix.values import SHARED, CacheOptions, Prompt, Tenant
from tests.faults.interleavings import hash_model, threads, world
from tests.faults.interleavings.bucket import SimulatedBucket
from tests.faults.interleavings.hash_model import ModelFaults, Replies, salt_of, salt_of_build
from tests.faults.interleavings.task_scheduler import Stuck, Task, TaskScheduler
from tests.faults.interleavings.world import BLOCK, LONGEST, Daemon, Disk

PATIENCE_S = 300.0
"""A request that has not ended after this virtual time never will."""
_AT_ONCE_S = 8.0
"""What needs no read has ended after this time, although reads of others do not answer."""
_NOTICE_S = 60.0
"""After this time a daemon has noticed what another process has purged."""
_SLACK_S = 2.0
"""What threads take between them, beside the limit of a wait."""
_SEARCH_SLACK_S = 4.0
"""What was expired for longer when a search began is gone when that has ended. Work ahead uses state a little later
than its request."""
_EXPIRY_SEARCH_S = 34.0
"""Between two searches for what has expired, and what the search takes."""
_LEASE_S = 2.5
"""A writer does not pause for longer when nobody asks for it again."""
_STOP_S = 30.0
"""A stop that waits for what no process will finish ends after this time."""
_TOOLS = ("purge", "purge", "erase", "verify", "compact", "read", "open")
_TENANTS = (SHARED, Tenant.of_key("one"), Tenant.of_key("one").with_salt("salt"), Tenant.of_key("two"))
_REPLIES = Replies()
_NEEDS_CHECK = FileMark.needs_check


EDITION = 3
"""The events that histories have. More events make other histories of all seeds, so a kept seed has an edition."""


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
    daemon: Daemon
    submitted_at: float
    gone: frozenset[Asked] = frozenset()
    """The requests that were purged or had expired when it was submitted: it may find nothing of them."""
    has_expired: bool = False
    """Some of them had expired, and were not purged."""
    is_unaffordable: bool = False
    """All of the write budget was used before it was submitted."""
    replies: dict[int, list[int]] = field(default_factory=dict)
    last: Event | None = None
    has_left: bool = False
    is_unchecked: bool = False
    """Its daemon had found state of an earlier build, and did not know yet whether it has the bits of its own."""
    ended_at: float | None = None
    ticket: Ticket | None = None
    turns: tuple[Asked, ...] = ()
    """The earlier requests of its conversation: the server looks for their replies."""
    patience: Patience = field(default_factory=Patience)
    rendered_at: float | None = None
    first_at: float | None = None
    """When its first token came."""
    ahead: list[int] = field(default_factory=list)
    """The last prompt that begins with its reply and is computed while nobody waits."""

    @property
    def turn_id(self) -> str:
        """The name under which its reply is recorded."""
        words = [len(self.token_ids), *self.all_tokens]
        return xxhash.xxh3_64_hexdigest(np.array(words, np.int32).tobytes())

    @property
    def expected(self) -> list[int]:
        return self.expected_of(self.tenant, self.daemon.build)

    def expected_of(self, tenant: Tenant, build: int) -> list[int]:
        """Returns the reply that a tenant gets to the same prompt from a build."""
        return _REPLIES.of(self.layout, salt_of_build(salt_of(tenant), build), self.token_ids, self.most)

    @property
    def all_tokens(self) -> list[int]:
        """The tokens of its prompt and its reply."""
        return self.token_ids + self.expected

    @property
    def left_tokens(self) -> list[int]:
        """The tokens whose state it, or the work ahead that begins with its reply, may have left."""
        return self.ahead or self.all_tokens


@dataclass(frozen=True)
class Purged:
    """A purge that has ended. `purges` are all that the store then knew, and `asked` are the requests and notes of
    which nothing may be found any more."""

    process: object
    ended_at: float
    purges: Purges
    asked: frozenset[Asked]
    notes: frozenset[tuple[Tenant, str, int]]


class History:
    """Runs one history. `run` raises `Wrong`."""

    def __init__(
        self, seed: int, folder: Path, trace: Callable[[str], None] | None = None, edition: int = EDITION
    ) -> None:
        self._edition = edition
        self.scheduler = TaskScheduler(seed, 0.0, trace)
        self.random = self.scheduler.random
        self.scheduler.set_switches(self.random.choice((0.01, 0.05, 0.2, 0.5)))
        self.scheduler.at_jumps = self._check_at_rest
        self.folder = folder
        self.counts: Counter[str] = Counter()
        self.asked: list[Asked] = []
        self.purges: list[Purged] = []
        self.notes: dict[tuple[Tenant, str], int] = {}
        """For each note the number of the last time that it was put."""
        self.daemons: list[Daemon] = []
        self.stores: list[StoreFile] = []
        """Those that were opened, by daemons and by tools."""
        self.model = hash_model.reset()
        self.disk, self.bucket = Disk(slow_s=self.random.choice((0.0, 0.0, 0.0, 0.3))), SimulatedBucket()
        self._has_restarted = self._has_preempted = self._has_others = False
        self._at_an_end: list[Task] = []
        """The driver, while it waits for the end of a request."""
        self._memory: dict[Daemon, tuple[object, ...]] = {}
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
        # What a bucket has of another build is not compared.
        self._builds = (0,) if self._has_bucket else choose(((0,), (0,), (0, 1)))
        shared: dict[str, Any] = {
            "remote_tier": "s3://simulated",
            "namespace_key_file": folder / "key",
            "remote_write": choose(("seen-twice", "all", "all")),
        }
        self.settings = Settings(
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
            kv_cache_min_free=choose((0, 1 << 20)),
            kv_memory_keeps=choose((True, True, True, False)),
            kv_cache_write_buffer=choose((300, 700, 3_000, 1 << 20, 1 << 20)),
            remote_deadline=choose((0.05, 1.0, 10.0)),
        )

    @property
    def _budget_bytes(self) -> int:
        return self.settings.kv_cache_budget or 0

    @property
    def _is_large(self) -> bool:
        """A small budget has room for little else than prompts."""
        return self._budget_bytes > 2_000_000

    @property
    def _has_room(self) -> bool:
        """Returns whether prompts are saved that follow each other, if nothing fails."""
        return self.settings.kv_cache_write_buffer > 1_000_000 and not self.settings.write_budget_bytes

    def run(self) -> None:
        """Raises `Wrong` with what does not hold."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        if (key := self.settings.namespace_key_file) is not None:
            key.touch(0o600)
            key.write_text("the key that all machines share\n")
        world.use(self.disk, self.bucket, self._budget_bytes)
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
                world.kill_all()
        self.counts["refused by the system"] += threads.num_refused[0]
        if failure:
            raise failure[0]

    # What happens.

    def _drive(self) -> None:
        self._start()
        is_alone, is_large = self._has_bucket, self._is_large
        # What waits for a file that is rewritten is not dropped because others need its memory.
        is_roomy = self._num_sequences > 2
        events: list[tuple[Callable[[], None], int]] = [
            (self._arrive, 60),
            (self._pass_time, 14),
            (self._hang_up, 8),
            (self._purge, 4),
            (self._use_tool, 0 if is_alone else 6),
            (self._start_beside, 0 if is_alone else 4),
            (self._put_notes, 4 if is_large else 0),
            (self._let_reads_hang, 2),
            (self._let_payloads_be_damaged, 3),
            (self._meet_a_hang, 0 if is_alone else 3),
            (self._meet_a_dead_disk, 0 if is_alone else 3),
            (self._meet_a_damaged_tail, 2 if self._layout.state_kind == "token" and not is_alone else 0),
            (self._meet_a_prewarm, 4 if self._num_sequences > 2 and self.settings.max_sequences > 2 else 0),
            (self._meet_a_suspended_writer, 0 if is_alone else 3),
            (self._meet_a_pause, 4 if self._layout.exact_at == "token" else 0),
            (self._meet_a_purge, 0 if is_alone else 2),
            (self._meet_a_strangers_purge, 0 if is_alone else 3),
            (self._meet_an_erasure, 8 if self._has_room and is_large and is_roomy and not is_alone else 0),
            (self._meet_a_full_disk, 8 if self._has_room and self.settings.kv_cache_min_free and not is_alone else 0),
            (self._kill, 3),
            (self._stop, 3),
            (self._move, 6 if self._has_bucket else 0),
            (self._let_disk_fail, 2),
            (self._let_bucket_fail, 6 if self._has_bucket else 0),
            (self._let_model_fail, 1),
            (self._heal, 3),
            (self._look, 4),
        ]
        if self._edition > 1:
            events += [
                (self._purge_prompt, 4),
                (self._let_resources_be_refused, 3),
                (self._meet_late_work, 4 if self._layout.exact_at == "token" and not is_alone else 0),
            ]
        if self._edition > 2:
            events += [
                (self._meet_a_silent_writer, 3 if self._num_sequences < 2 and not is_alone else 0),
                (self._meet_an_expiry, 3 if self._own_ttls or self.ttl_s else 0),
                (self._meet_refused_memory, 2),
                (self._meet_an_upgrade, 6 if len(self._builds) > 1 else 0),
            ]
        choices, weights = zip(*events, strict=True)
        for _ in range(self.random.randint(5, 24)):
            event = self.random.choices(choices, weights)[0]
            self.counts[event.__name__.strip("_")] += 1
            self.scheduler.say(f"--- {event.__name__.strip('_')}")
            if self._edition > 2 and self.random.random() < 0.2:
                # What happens as a request ends happens beside all that its end does.
                threads.wait_in(self._at_an_end, 1.0)
            event()
            self.scheduler.point()
            self._check_errors()
            self._check_marks(self._open_files(self.stores))
        self._finish()

    def _start(self, build: int | None = None) -> None:
        """Starts a daemon, of any build if none is given. If the disk does not let it, the disk recovers."""
        if not (self._started(build) or (self.disk.failing and self._recovered() and self._started(build))):
            raise Wrong(f"the daemon does not start: {self.scheduler.errors}")

    def _started(self, build: int | None) -> bool:
        process, made, is_sound = object(), list[Daemon](), self._needs_no_check()
        # A daemon that gets no threads at its start does not start.
        threads.refusing[:] = [0.0]
        build = self.random.choice(self._builds) if build is None else build
        given = self.settings, self._layout, self._num_sequences, process, build
        task = self.scheduler.spawn("start", process, lambda: made.append(Daemon(*given)))
        self._join(task, "the daemon does not start")
        if not made:
            world.kill(process)
        if is_sound and process in world.checked:
            raise Wrong("a start checks a file that needs none")
        for daemon in made:
            self._watch(daemon)
        self.daemons += made
        self.stores += [daemon.store for daemon in made]
        return bool(made)

    def _needs_no_check(self) -> bool:
        """Returns whether the file was checked in this boot, and nobody else may do something with it now."""
        path = self.settings.kv_cache_dir
        if any(task.name in (*_TOOLS, "rewrite") for task in self.scheduler.tasks) or not (path / LOCK).exists():
            return False
        with (path / LOCK).open("rb") as file:
            return not _NEEDS_CHECK(_read_mark(file.fileno()), inode_of(path))

    def _recovered(self) -> bool:
        self.scheduler.errors.clear()
        self.disk.failing = 0.0
        return True

    def _join(self, task: Task, problem: str, *, answers: bool = True) -> None:
        """Waits for a task. What `answers` to nobody waits for the disk: it answers now."""
        if answers:
            self.disk.answer()
        if not self.scheduler.join(task, PATIENCE_S):
            raise Wrong(f"{problem}\n{self.scheduler.standing()}")

    def _start_beside(self) -> None:
        if len(self.daemons) == 1:
            self._has_others = True
            self._start()

    def _token(self) -> int:
        return self.random.randrange(hash_model.FIRST, hash_model.VOCAB)

    def _prompt(self) -> tuple[list[int], tuple[Asked, ...]]:
        """The beginning of a document, or an earlier prompt and its reply; then some tokens of its own. Returns
        also the turns of the conversation."""
        most, turns = LONGEST - 16, tuple[Asked, ...]()
        if self.asked and self.random.random() < 0.5:
            earlier = self.random.choice(self.asked)
            begin, turns = earlier.token_ids, earlier.turns
            if self.random.random() > 0.4:
                begin, turns = earlier.all_tokens, (*earlier.turns, earlier)
            more = 0 if self.random.random() < 0.5 else self.random.randint(1, 12)
        else:
            begin = self.random.choice(self._documents)[: self.random.randint(12, 60)]
            more = self.random.choice((0, 1, 5, 9))
        return (begin + [self._token() for _ in range(more)])[:most], turns

    def _arrive(self) -> None:
        choose, (token_ids, turns) = self.random.choice, self._prompt()
        most = choose((0, 1, 2, 4, 9, 16))
        self._ask(
            choose(self.daemons),
            choose(self._tenants),
            token_ids,
            most=most,
            num_replies=choose((1, 1, 1, 1, 2, 3)) if most else 1,
            turns=turns,
            saves=self.random.random() < 0.9,
            ttl_s=choose((5.0, 60.0)) if self._own_ttls and self.random.random() < 0.5 else None,
        )

    def _ask(
        self,
        daemon: Daemon,
        tenant: Tenant,
        token_ids: list[int],
        most: int = 2,
        num_replies: int = 1,
        saves: bool = True,
        ttl_s: float | None = None,
        turns: tuple[Asked, ...] = (),
    ) -> Asked:
        one = Asked(
            *(f"r{next(self._numbers)}", self._layout, tenant, token_ids, most, num_replies, saves, ttl_s, daemon),
            submitted_at=self.scheduler.now,
            turns=turns,
        )
        self.asked.append(one)
        # The task belongs to the clients, and what it calls to the daemon.
        self.scheduler.spawn(one.id, daemon.process, lambda: self._submit(one))
        return one

    def _submit(self, one: Asked) -> None:
        """What `server.answer` does."""
        daemon = one.daemon
        try:
            self._render(one)
        except NotReady as error:
            self._note_end(one, ErrorEvent(error))
            return
        notes = _notes_of(daemon, one.tenant)
        request = GenerateRequest(
            id=one.id,
            prompt=Prompt(np.array(one.token_ids, np.int32)),
            sampling=SamplingParams(temperature=0, max_tokens=one.most, n=one.num_replies),
            cache=CacheOptions(
                scope=parse_scope(self.random.choice(("full", "full", "auto:30")), param="scope"),
                tenant=one.tenant,
                save=one.saves,
                ttl_s=one.ttl_s,
                share=_share_of(one.tenant),
            ),
            patience=one.patience,
        )

        def emit(event: Event) -> None:
            if one.last is not None and not isinstance(one.last, ErrorEvent):
                self.scheduler.errors.append(f"{one.id} got {event} behind its end")
            if isinstance(event, TextEvent):
                one.first_at = one.first_at or self.scheduler.now
                one.replies.setdefault(event.choice, []).extend(event.token_ids)
            if isinstance(event, DoneEvent | ErrorEvent):
                self._note_end(one, event)
            if isinstance(event, DoneEvent) and one.saves and one.most and not one.is_unchecked:
                notes.put(NoteKind.TURN, one.turn_id, bytes(one.replies[0]), request.prompt.token_ids)
                self._continue_ahead(one)

        bits = daemon.cache.bits
        one.is_unchecked = bits.state in ("unknown", "unchecked")
        one.is_unaffordable = self._written(daemon) >= (self.settings.write_budget_bytes or math.inf)
        purged, expired = self._purged(daemon), self._expired(daemon)
        one.submitted_at, one.gone, one.has_expired = self.scheduler.now, purged | expired, bool(expired - purged)
        try:
            one.ticket = daemon.inbox.submit(request, emit)
        except (QueueFull, NotReady) as error:
            self._note_end(one, ErrorEvent(error))

    def _note_end(self, one: Asked, last: Event) -> None:
        one.last, one.ended_at = last, self.scheduler.now
        threads.wake_one(self._at_an_end)

    def _render(self, one: Asked) -> None:
        """Looks for the replies of the conversation, which the prompt is made of. Raises `NotReady`."""
        began, gone = self.scheduler.now, self._purged(one.daemon)
        found = one.daemon.render(one.tenant, [turn.turn_id for turn in one.turns], one.patience)
        one.rendered_at = self.scheduler.now
        if one.rendered_at - began > LIMIT_S + _SLACK_S:
            self.scheduler.errors.append(f"{one.id} waited {one.rendered_at - began:.1f} s for its turns")
        for turn in one.turns:
            if (record := found[turn.turn_id]) is None:
                continue
            self.counts["turns found"] += 1
            if record not in [bytes(turn.expected_of(one.tenant, build)) for build in self._builds]:
                self.scheduler.errors.append(f"{one.id} got {list(record)} as a turn, not {turn.expected}")
            same = (other for other in self.asked if other.turn_id == turn.turn_id and other.tenant == one.tenant)
            if all(other in gone for other in same):
                self.scheduler.errors.append(f"a turn of {one.id} is found, and could be there for nobody")

    def _continue_ahead(self, one: Asked) -> None:
        """Has the engine compute the reply's last token while nobody waits, as the server does with histories."""
        if self.random.random() >= 0.5:
            self._compute_ahead(one, one.all_tokens)

    def _compute_ahead(self, one: Asked, token_ids: list[int]) -> None:
        """Has the engine compute a prompt that begins with a reply while nobody waits."""
        daemon, one.ahead = one.daemon, token_ids
        owner = daemon.cache.owner(one.tenant)

        def make() -> Prompt:
            daemon.cache.notes(one.tenant).get(NoteKind.TURN, one.turn_id)
            return Prompt(np.array(token_ids, np.int32))

        options = CacheOptions(
            scope=parse_scope("full", param="scope"), tenant=one.tenant, ttl_s=one.ttl_s, share=_share_of(one.tenant)
        )
        expires_at = daemon.cache.expires_at(one.ttl_s)
        daemon.engine.ahead.add_job(AheadJob(daemon.engine, make, options, owner, tuple(token_ids), expires_at))

    def _purged(self, daemon: Daemon) -> frozenset[Asked]:
        """Returns the requests of which a daemon may find nothing, because it knows that they were purged."""
        return frozenset(asked for purged in self._known_purges(daemon) for asked in purged.asked)

    def _known_purges(self, daemon: Daemon) -> list[Purged]:
        now, noticed = self.scheduler.now, daemon.cache.namespaces.epochs.purges
        last = max((n for n, purged in enumerate(self.purges) if purged.purges == noticed), default=-1)
        return [
            purged
            for number, purged in enumerate(self.purges)
            if number <= last or purged.process is daemon.process or now > purged.ended_at + _NOTICE_S
        ]

    def _expired(self, daemon: Daemon) -> set[Asked]:
        """Returns the requests that nothing may be found of, because their time to live is over."""
        often = self.ttl_s and not self._own_ttls
        searches_s = self.ttl_s / 10 + _SEARCH_SLACK_S if often else _EXPIRY_SEARCH_S
        # No search ends while the disk is silent.
        since = max(daemon.started_at, math.inf if self.disk.hangs == "all" else self.disk.silent_until)
        has_searched = self.scheduler.now > since + searches_s
        searched_at = world.searched_at.get(daemon.store.evictor, 0.0)
        self._note_preemptions()
        # What is left of requests that lost their memory is kept for longer.
        # So is what slides out of windows.
        is_kept = self._has_preempted or any(group.window is not None for group in self._layout.groups)
        # The writer does not search while what it was given waits for room on the disk.
        was_full = self.counts["meet_a_full_disk"] > 0
        is_late = self.disk.num_failed or self.disk.slow_s or self._has_others or self._has_bucket or was_full
        if is_kept or is_late:
            return set()
        before = max(searched_at - _SEARCH_SLACK_S, self.scheduler.now - searches_s if has_searched else 0.0)
        return {
            one
            for one in self.asked
            # What was cut short is kept for longer.
            if isinstance(one.last, DoneEvent)
            and not one.has_left
            and one.ended_at is not None
            and (ttl_s := one.ttl_s or self.ttl_s)
            and self._used_at(one) + ttl_s < before
        }

    def _used_at(self, one: Asked) -> float:
        """Returns when state of a request was used last: by itself, or by one of its tenant that has tokens of it."""
        users = (other for other in self.asked if other.tenant == one.tenant and _common(one, other))
        return max(math.inf if user.ended_at is None else user.ended_at for user in users)

    def _note_preemptions(self) -> None:
        self._has_preempted |= any(daemon.engine.figures.preemptions > 0 for daemon in self.daemons)

    def _written(self, daemon: Daemon) -> int:
        """Returns the bytes written, which must be those that were counted."""

        def counted() -> int:
            return sum(meter.total_bytes for meter in world.meters)

        least = counted()
        with world.observing():
            found = daemon.store.written().total
        most = counted()
        # What is not recorded yet another process does not know, and a kill loses it. And what is recorded cannot be
        # read from a store that is closed.
        is_complete = not (self._has_restarted or self._has_others) and daemon.store._env is not None
        if found > most or (found < least and is_complete):
            raise Wrong(f"{found} bytes are recorded as written, of {least} to {most}")
        return found

    def _hang_up(self) -> None:
        if running := [one for one in self.asked if one.ticket is not None and one.last is None]:
            self._leave(self.random.choice(running))

    def _leave(self, one: Asked) -> None:
        one.has_left = True
        if one.ticket is not None:
            one.ticket.cancel()

    def _pass_time(self) -> None:
        self.scheduler.sleep(self.random.choice((0.01, 0.01, 0.05, 0.05, 0.2, 0.2, 1.0, 3.0, 12.0, self._longest_s)))

    def _look(self) -> None:
        daemon, stats = self.random.choice(self.daemons), list[dict[str, Any]]()
        # A thread of the server, which may wait.
        self.scheduler.spawn("look", daemon.process, lambda: stats.append(daemon.cache.stats()))
        self._within(STALL_S + _SLACK_S, lambda: bool(stats), "the counts wait for the disk")
        if stats[0]["state"] == "degraded" and not stats[0]["error"]:
            raise Wrong("health is degraded without a reason")
        daemon.inbox.activities()
        self._written(daemon)

    def _put_notes(self, daemon: Daemon | None = None) -> None:
        daemon, budget = daemon or self.random.choice(self.daemons), self._budget_bytes
        # The share of all roots is that of four.
        for _ in range(self.random.randint(1, 80)):
            number, tenants = self.random.randrange(12), self._tenants
            tenant = Tenant.of_key("notes").with_salt(str(number)) if number > 3 else tenants[number % len(tenants)]
            id_ = str(self.random.randrange(20))
            content = self.random.randbytes(self.random.randint(1, root_limit(budget) // 9))
            if _notes_of(daemon, tenant).put(NoteKind.RESPONSE, id_, content):
                self.notes[tenant, id_] = next(self._numbers)

    def _purge(self) -> None:
        self._purge_tenant(self.random.choice(self.daemons), self._some_tenant(), is_beside=False)

    def _purge_tenant(self, daemon: Daemon, tenant: Tenant | None, *, is_beside: bool) -> None:
        """Purges a tenant, or everything, in a daemon or in another process."""
        self._run_purge(daemon, lambda process, store: self._purging(process, store, tenant), is_beside=is_beside)

    def _purge_prompt(self) -> None:
        """Purges one saved prompt. Others may need its beginning, so it is not said what may be found."""
        daemon, is_beside = self.random.choice(self.daemons), self.random.random() < 0.5
        if daemon.store.problem is not None or self._has_bucket:
            return
        with world.observing(), daemon.store.snapshot() as snapshot:
            names = sorted(name for name, _ in snapshot.entries())
        if not names:
            return
        name = self.random.choice(names)

        @contextmanager
        def purging(process: object, store: Store) -> Iterator[PurgeFilter]:
            yield PurgeFilter(entries=frozenset({name}))
            with world.observing(), store.snapshot() as snapshot:
                self.purges.append(Purged(process, self.scheduler.now, purges_of(snapshot), frozenset(), frozenset()))

        self._run_purge(daemon, purging, is_beside=is_beside)

    def _run_purge(
        self,
        daemon: Daemon,
        purging: Callable[[object, Store], AbstractContextManager[PurgeFilter]],
        *,
        is_beside: bool,
    ) -> None:
        """Purges what `purging` yields, in a daemon or in another process."""
        process = object() if is_beside else daemon.process

        def purge_here() -> None:
            with suppress(CacheError), purging(process, daemon.store) as chosen:
                daemon.store.reads.ask(partial(daemon.cache.purge, chosen), Patience(PATIENCE_S))

        def purge_beside() -> None:
            with suppress(CacheError):
                store = Store(self.settings.kv_cache_dir)
                self.stores.append(store)
                with suppress(CacheError), purging(process, store) as chosen:
                    purge(store, chosen, store.clock())
                store.close()

        self._has_others |= is_beside
        task = self.scheduler.spawn("purge", process, purge_beside if is_beside else purge_here)
        self._join(task, "a purge does not end")

    def _some_tenant(self) -> Tenant | None:
        return self.random.choice((None, *(one for one in self._tenants if one.ids)))

    @contextmanager
    def _purging(self, process: object, store: Store, tenant: Tenant | None) -> Iterator[PurgeFilter]:
        """Yields what to purge: a tenant, with its users, or everything. Notes that it was purged, unless that
        fails."""
        if self._edition > 2 and self._is_large and self.daemons and self.random.random() < 0.5:
            # They wait to be written when it begins.
            daemon = self.random.choice(self.daemons)
            self.scheduler.join(self.scheduler.spawn("notes", daemon.process, partial(self._put_notes, daemon)))
        began_at = self.scheduler.now

        def is_of(other: Tenant) -> bool:
            return tenant is None or other.ids[: len(tenant.ids)] == tenant.ids

        over = [one for one in self.asked if one.ended_at is not None and one.ended_at < began_at and is_of(one.tenant)]
        notes = frozenset((*key, number) for key, number in self.notes.items() if is_of(key[0]))
        yield PurgeFilter(salt=None if tenant is None else str(tenant))
        if not self._has_bucket:
            # Otherwise another machine may have what was shared.
            with world.observing(), store.snapshot() as snapshot:
                purges = purges_of(snapshot)
            self.purges.append(Purged(process, self.scheduler.now, purges, frozenset(over), notes))

    def _use_tool(self) -> None:
        """Another process uses the folder, beside all that happens, and may be killed."""
        task = self._spawn_tool(self.random.choice(_TOOLS))
        if self.random.random() < 0.3:
            self.scheduler.sleep(self.random.choice((1e-5, 1e-4, 1e-3, 0.01, 0.5)))
            world.kill(task.process)
        elif self.random.random() < 0.5:
            self._join(task, f"{task.name} does not end")

    def _spawn_tool(self, tool: str) -> Task:
        process = object()
        self.counts[tool] += 1
        self._has_others = True
        return self.scheduler.spawn(tool, process, lambda: self._run_tool(tool, process))

    def _run_tool(self, tool: str, process: object) -> None:
        """What the commands do. A killed one closes nothing."""
        path = self.settings.kv_cache_dir
        with suppress(CacheError):
            if tool in ("compact", "rewrite"):
                (compact_folder if tool == "compact" else rewrite_folder)(path, self._copying)
                return
            store = Store(path, read_only=tool == "read")
            self.stores.append(store)
            with suppress(CacheError):
                self._use_store(tool, process, store)
            store.close()
            if tool == "erase":
                rewrite_folder(path, self._copying)

    def _use_store(self, tool: str, process: object, store: Store) -> None:
        if tool in ("purge", "erase"):
            with self._purging(process, store, self._some_tenant()) as chosen:
                purge(store, chosen, store.clock())
        elif tool == "verify":
            self._verify(store)
            remove_damaged(store)
        else:
            with store.snapshot() if tool == "read" else nullcontext():
                self.scheduler.sleep(self.random.choice((0.01, 1.0, 10.0)))

    def _verify(self, store: Store) -> None:
        if problems := verify_index(store).problems:
            raise Wrong(f"verify finds {problems[:3]}")

    def _copying(self, _num_bytes: int) -> None:
        self.scheduler.sleep(self.random.random() * 2)

    # What is looked at when nothing else happens.

    def _meet_a_hang(self) -> None:
        """Reads of payloads do not answer, or are slow. Who needs none does not wait for those who do, and who has hung
        up ends."""
        num_loads, choose = int(self._num_sequences - 1), self.random.choice
        daemon, known = choose(self.daemons), [one for one in self.asked if one.saves and len(one.token_ids) > 40]
        if not num_loads or not known:
            return
        self._calm()
        is_slow = self.random.random() < 0.5
        self.disk.hangs, self.disk.reading_s = ("", 4.0) if is_slow else ("payloads", 0.0)
        earlier = [choose(known) for _ in range(num_loads)]
        loads = [self._ask(daemon, one.tenant, one.token_ids) for one in earlier]
        self.scheduler.sleep(0.2)
        new = self._ask(daemon, Tenant.of_key("new").with_salt(str(next(self._numbers))), self._documents[0][:30])
        self._within(_AT_ONCE_S, lambda: new.last is not None, "what needs no read waits for one of another")
        if is_slow:
            for one in loads:
                self._leave(one)
            self._within(_AT_ONCE_S, lambda: not daemon.inbox.num_running, "who has hung up reads on")
        elif self.random.random() < 0.5:
            self._stop(daemon)
        if self.random.random() < 0.7:
            self._heal()

    def _meet_a_dead_disk(self) -> None:
        """Nothing is read any more. All are answered in time, `health` says so, and a stop ends."""
        self._calm()
        daemon = self.random.choice(self.daemons)
        if self.random.random() < 0.5:
            # A new process has no turns in memory.
            self._end(daemon, starts=False)
            self._start()
            daemon = self.daemons[-1]
        self.disk.hangs = "all"
        prompts = [self._prompt() for _ in range(4)]
        asked = [self._ask(daemon, self.random.choice(self._tenants), ids, turns=turns) for ids, turns in prompts]
        for _ in range(2):
            # One after the other needs the disk: idle work, the writer, whoever asks.
            self._within(
                2 * STALL_S + _SLACK_S,
                lambda: all(one.last is not None for one in asked),
                "a request waits for a disk that does not answer",
            )
            asked.append(self._ask(daemon, self.random.choice(self._tenants), *self._prompt()[:1]))
        self._look()
        since = [read.moved_at for read in daemon.store.reads._open]
        if since and self.scheduler.now - min(since) > STALL_S + _SLACK_S and daemon.cache.health[0] != "degraded":
            raise Wrong("reads hang, and health says ok")
        if self.random.random() < 0.3:
            self._stop(daemon)
        if self.random.random() < 0.7:
            self._heal()

    def _meet_a_damaged_tail(self) -> None:
        """The only stored prompt that a new one begins like has a damaged tail: it is restored without, and once."""
        self._calm()
        if self.daemons[0].store.problem is not None:
            return
        tenant, prompt = Tenant.of_key("tail").with_salt(str(next(self._numbers))), self._documents[0][: 3 * BLOCK + 6]
        before = self._stored_names()
        self._ask(self.daemons[0], tenant, prompt, most=0)
        self._await_idle()
        with world.observing(), self.daemons[0].store.snapshot() as snapshot:
            new = {name: snapshot.node(name) for name in self._stored_names() - before}
        self.disk.damaged |= {name for name, node in new.items() if node is not None and node.kind == NodeKind.TAIL}
        # Memory would have it whole.
        self._end(self.daemons[0], starts=False)
        self._start()
        self._ask(self.daemons[-1], tenant, [*prompt[:-2], self._token()])
        self._await_idle()

    def _meet_a_silent_writer(self) -> None:
        """The disk stops answering before the writer has begun to write pages. Who needs their memory is told."""
        self._calm()
        daemon, most = self.random.choice(self.daemons), LONGEST - 2
        one = self._ask(daemon, self._tenants[0], [self._token() for _ in range(most)])
        # Bound: others end too, and are all that was asked.
        while one.last is None:
            if not threads.wait_in(self._at_an_end, PATIENCE_S):
                raise Wrong(f"a request never ends\n{self.scheduler.standing()}")
        self.disk.hangs = "all"
        other = self._ask(daemon, self._tenants[0], [self._token() for _ in range(most)])
        self._within(
            2 * STALL_S + _SLACK_S,
            lambda: other.last is not None,
            "a request waits for a disk that does not answer",
        )
        self._heal()

    def _meet_an_expiry(self) -> None:
        """Nothing is used for longer than it lasts: nothing of it is stored any more."""
        self._calm()
        daemon = self.random.choice(self.daemons)
        # What another process has stored is looked for after minutes only.
        if daemon.store.problem is not None or self._has_others:
            return
        own_s = None if self.ttl_s else 5.0
        one = self._ask(daemon, self.random.choice(self._tenants), self._prompt()[0], ttl_s=own_s)
        self._await_idle()
        self.scheduler.sleep((self.ttl_s or 5.0) + _EXPIRY_SEARCH_S)
        with world.observing(), daemon.store.snapshot() as snapshot:
            table, now = snapshot.usages(), daemon.store.clock()
        limits = limits_s(table.records["ttl_s"], self.ttl_s) + _EXPIRY_SEARCH_S
        # A node stays as long as those that continue it.
        is_over = (table.ages_s(now) > limits) & (table.records["children"] == 0)
        if daemon.store.problem is None and is_over.any():
            raise Wrong("what has expired is stored")
        self._ask(daemon, one.tenant, one.token_ids)

    def _meet_refused_memory(self) -> None:
        """A daemon that has taken no memory yet gets none. Who asks is told to try again."""
        self._calm()
        self._end(self.random.choice(self.daemons), starts=False)
        self._start()
        self.counts["let_resources_be_refused"] += 1
        threads.refusing[:] = [self.random.choice((0.5, 1.0))]
        self._ask(self.daemons[-1], self.random.choice(self._tenants), self._prompt()[0])
        self.scheduler.sleep(1.0)

    def _meet_an_upgrade(self) -> None:
        """A build that computes other bits goes on with the folder of another, or beside it."""
        self._calm()
        old, most = self.daemons[0], self.random.choice((1, 4))
        known = [self._ask(old, self.random.choice(self._tenants), self._prompt()[0], most=most) for _ in range(3)]
        self._await_idle()
        for daemon in self.daemons[1:] if self.random.random() < 0.5 else list(self.daemons):
            self._end(daemon, starts=False)
        self._has_others = True
        self._start(build=1 - old.build)
        # Until it has compared.
        self.scheduler.sleep(self.random.choice((1.0, 5.0)))
        for one in known:
            self._ask(self.daemons[-1], one.tenant, [*one.token_ids, self._token()])

    def _stored_names(self) -> set[bytes]:
        with world.observing(), self.daemons[0].store.snapshot() as snapshot:
            return set(snapshot.keys("usage"))

    def _meet_a_pause(self) -> None:
        """What is computed while nobody waits is given up at once where a question comes, also where it reads."""
        self._calm()
        daemon = self.random.choice(self.daemons)
        gone = self._purged(daemon) | self._expired(daemon)
        # What was purged or has expired nobody computes ahead.
        known = [one for one in self.asked if one.saves and one.most and one not in gone and one.last is not None]
        if not known or any(purged.process is not daemon.process for purged in self.purges):
            return
        one = self.random.choice(known)
        self.disk.hangs = self.random.choice(("payloads", "all"))
        for _ in range(2):
            self._continue_ahead(one)
        daemon.inbox.wake()
        self.scheduler.sleep(1.0)
        question = self._ask(daemon, one.tenant, one.token_ids, turns=one.turns)
        # Its own reads may hang as well, for as long as its patience lasts.
        self._within(STALL_S + 2 * _SLACK_S, lambda: question.last is not None, "a question waits for idle work")
        if self.random.random() < 0.7:
            self._heal()

    def _meet_a_prewarm(self) -> None:
        """A prompt without a reply gives way, but not where a question waits for what it computes."""
        self._calm()
        daemon = self.random.choice(self.daemons)
        tenant, beginning = Tenant.of_key("warm"), [self._token() for _ in range(40)]
        # So that the reply of another lasts longer than looking for it.
        self.model.token_s = 0.05
        stranger = self._ask(daemon, Tenant.of_key("stranger"), [self._token() for _ in range(8)], most=80)
        self._within(PATIENCE_S, lambda: stranger.first_at is not None or stranger.last is not None, "no reply begins")
        self._ask(daemon, tenant, beginning, most=0)
        self.scheduler.sleep(0.01)
        question = self._ask(daemon, tenant, [*beginning, self._token()])
        self._within(
            PATIENCE_S, lambda: stranger.last is not None and question.last is not None, "a request never ends"
        )
        self.model.token_s = ModelFaults.token_s
        began, ended = question.first_at or math.inf, stranger.ended_at or 0.0
        if isinstance(stranger.last, DoneEvent) and question.submitted_at < ended - 0.05 < began:
            raise Wrong("a question waits for a stranger's whole reply")

    def _meet_a_suspended_writer(self) -> None:
        """Another process stops inside a write. All are answered, `health` says so, and a stop ends."""
        self._calm()
        daemon, process, may_end = self.random.choice(self.daemons), object(), list[bool]()

        def write_until_told() -> None:
            with suppress(CacheError):
                store = Store(self.settings.kv_cache_dir)
                self.stores.append(store)
                with store.changes():
                    while not may_end:
                        self.scheduler.sleep(1.0)
                store.close()

        self._has_others = True
        writer = self.scheduler.spawn("open", process, write_until_told)
        self.scheduler.sleep(1.0)
        asked = [self._ask(daemon, self.random.choice(self._tenants), self._prompt()[0]) for _ in range(3)]
        self._within(PATIENCE_S, lambda: all(one.last is not None for one in asked), "a request waits for a writer")
        self.scheduler.sleep(40.0)
        if daemon.store.write_waited_s > 30.0 and daemon.cache.health[0] != "degraded":
            raise Wrong("nothing is written beside a suspended writer, and health says ok")
        if self.random.random() < 0.3:
            began = self.scheduler.now
            self._stop(daemon, starts=False)
            if self.scheduler.now - began > _STOP_S:
                raise Wrong(f"a stop takes {self.scheduler.now - began:.0f} s beside a suspended writer")
        may_end.append(True)
        self._join(writer, "a writer does not end")
        if not self.daemons:
            self._start()

    def _meet_an_erasure(self) -> None:
        """The file is rewritten while prompts are saved."""
        if len(self.daemons) > 1:
            return
        self._calm()
        daemon = self.daemons[0]
        writer = daemon.cache.writer
        # Until it has noticed the last purge.
        self.scheduler.sleep(2.0)
        before, evicted = writer.dropped, writer.evicted
        task = self._spawn_tool("rewrite")
        for _ in range(self.random.randint(1, 4)):
            self._ask(daemon, self._tenants[0], [self._token() for _ in range(30)])
            self.scheduler.sleep(self.random.random() * 0.3)
        self._join(task, "an erasure does not end")
        self._await_idle()
        if writer.dropped > before and writer.evicted == evicted:
            raise Wrong(f"{writer.dropped - before} prompts are lost because the file was rewritten")

    def _meet_a_purge(self) -> None:
        """Another process purges what a daemon has answered and not written yet."""
        self._calm()
        self.disk.slow_s = 1.0
        daemon = self.random.choice(self.daemons)
        over = [self._ask(daemon, self._tenants[0], [self._token() for _ in range(40)]) for _ in range(3)]
        self._within(PATIENCE_S, lambda: not self._waiting(), "a request never ends")
        if self._is_large:
            self._put_notes()
        self._join(self._spawn_tool("purge"), "a purge does not end")
        self._calm()
        self.scheduler.sleep(3.0)
        for one in over:
            self._ask(daemon, one.tenant, one.token_ids)

    def _meet_late_work(self) -> None:
        """A tenant is purged while a step of its idle work is computed. What that queues afterwards is found by
        nobody."""
        self._calm()
        daemon, tenant = self.random.choice(self.daemons), Tenant.of_key("late")
        one = self._ask(daemon, tenant, [self._token() for _ in range(16)])
        self._within(PATIENCE_S, lambda: one.last is not None, "a request never ends")
        self.model.token_s = 0.1
        token_ids = [*one.all_tokens, *(self._token() for _ in range(40))]
        self._compute_ahead(one, token_ids)
        # Work ahead begins after half a second without a request.
        self.scheduler.sleep(self.random.choice((0.6, 0.8, 1.2)))
        self._purge_tenant(daemon, tenant, is_beside=self.random.random() < 0.3)
        self._ask(daemon, tenant, [*token_ids, self._token()])
        self.model.token_s = ModelFaults.token_s

    def _meet_a_strangers_purge(self) -> None:
        """One tenant is purged while another has a request that runs, prompts that wait to
        be written, and memory: all of that stays."""
        self._calm()
        daemon, purged, other = self.random.choice(self.daemons), Tenant.of_key("purged"), Tenant.of_key("other")
        self._ask(daemon, purged, [self._token() for _ in range(30)])
        self._await_idle()
        # Until it has noticed the last purge.
        self.scheduler.sleep(2.0)
        kept, writer, prompt = daemon.engine.pages.kept, daemon.cache.writer, [self._token() for _ in range(30)]
        self.disk.slow_s = 0.3
        asked = self._ask(daemon, other, prompt)
        self._within(PATIENCE_S, lambda: asked.last is not None, "a request never ends")
        self.model.token_s = 0.05
        self._ask(daemon, other, [*prompt, self._token()], most=16)
        self.scheduler.sleep(self.random.choice((0.0, 0.05, 0.3)))

        def is_kept() -> set[bytes]:
            with daemon.engine.pages.pool.lock:
                return {block.name for block in kept.blocks.values() if block.owner.tenant == str(other)}

        def last_of_all() -> bytes | None:
            return daemon.cache.epochs.purges.ids.get("")

        in_memory, before = is_kept(), last_of_all()
        with (
            mock.patch.object(kept, "reclaim", wraps=kept.reclaim) as reclaim,
            mock.patch.object(writer, "note_loss", wraps=writer.note_loss) as note_loss,
        ):
            self._purge_tenant(daemon, purged, is_beside=self.random.random() < 0.5)
            self.scheduler.sleep(2.0)
            # When nothing that another version has stored can be compared, nobody's memory is used.
            may_lose = reclaim.called or self.ttl_s or last_of_all() != before or not daemon.engine.pages._keeps
            if not (may_lose or in_memory <= is_kept()):
                raise Wrong("the memory of a tenant is gone because another one was purged")
            self.model.token_s = ModelFaults.token_s
            self._calm()
        lost = [
            why for save, why in (call.args for call in note_loss.call_args_list) if save.epoch.tenant == str(other)
        ]
        if OUTDATED in lost:
            raise Wrong("what a tenant saves is lost because another one was purged")

    def _meet_a_full_disk(self) -> None:
        """Who saves nothing because the disk is full says so, and no longer once it saves again."""
        self._calm()
        daemon = self.random.choice(self.daemons)
        writer = daemon.cache.writer
        # Until it has noticed the last purge.
        self.scheduler.sleep(2.0)
        for is_full in (True, False):
            self.disk.free_bytes = 0 if is_full else 1 << 40
            before = writer.dropped, writer.written_bytes
            self._ask(daemon, self._tenants[0], [self._token() for _ in range(40)])
            self._await_idle()
            state, is_saved = daemon.cache.health[0], writer.written_bytes > before[1]
            if is_full and writer.dropped > before[0] and not is_saved and state != "degraded":
                raise Wrong(f"nothing is saved on the full disk, and health says {state}")
            if not is_full and is_saved and writer.dropped == before[0]:
                # The writer looks at the free space each second.
                self._within(
                    1.0 + _SLACK_S,
                    lambda: daemon.cache.health[0] != "degraded",
                    "health says degraded, and prompts are saved",
                )

    def _within(self, seconds: float, holds: Callable[[], bool], problem: str) -> None:
        deadline = self.scheduler.now + seconds
        while not holds() and self.scheduler.now < deadline:
            self.scheduler.sleep(min(0.2, seconds / 10))
        if not holds():
            raise Wrong(f"{problem}\n{self.scheduler.standing()}")

    def _calm(self) -> None:
        """Heals the machine, and waits until nothing happens any more."""
        self._heal()
        self.disk.slow_s = 0.0
        for task in [task for task in self.scheduler.tasks if task.name in _TOOLS]:
            self._join(task, f"{task.name} does not end")
        self._await_idle()

    def _await_idle(self) -> None:
        self._within(PATIENCE_S, lambda: not self._waiting(), "a request never ends")
        for daemon in self.daemons:
            self._check_idle(daemon)

    # What fails, and who ends.

    def _let_disk_fail(self) -> None:
        self.disk.failing = self.random.choice((0.1, 0.5, 1.0))

    def _let_bucket_fail(self) -> None:
        choose, bucket = self.random.choice, self.bucket
        bucket.failing, bucket.slow_s = choose((0.0, 0.3, 1.0)), choose((0.01, 1.0, 30.0))
        bucket.damaging = choose((0.0, 0.5))

    def _let_model_fail(self) -> None:
        self.model.failing = self.random.choice((0.05, 0.3))

    def _let_resources_be_refused(self) -> None:
        threads.refusing[:] = [self.random.choice((0.1, 0.5, 1.0))]

    def _let_reads_hang(self) -> None:
        self.disk.hangs = self.random.choice(("payloads", "all"))

    def _let_payloads_be_damaged(self) -> None:
        """Some nodes are not what was written. Those who restore them go on without."""
        store = self.random.choice(self.daemons).store
        if store.problem is None:
            with suppress(CacheError), world.observing(), store.snapshot() as snapshot:
                names = sorted(snapshot.keys("usage"))
            self.disk.damaged |= {self.random.choice(names) for _ in range(3) if names}

    def _heal(self) -> None:
        threads.refusing[:] = [0.0]
        self.disk.answer()
        self.disk.reading_s, self.disk.free_bytes = self.random.choice((0.0, 0.0, 0.1)), 1 << 40
        self.disk.failing, self.disk.slow_s = 0.0, self.random.choice((0.0, 0.01, 0.3))
        self.bucket.failing = self.bucket.damaging = self.model.failing = 0.0
        self.bucket.slow_s = 0.01

    def _kill(self) -> None:
        self._end(self.random.choice(self.daemons))

    def _end(self, daemon: Daemon, *, starts: bool = True) -> None:
        """Ends a process, and `starts` another if it was the last one."""
        open_files = self._open_files([daemon.store])
        self._note_preemptions()
        self.daemons.remove(daemon)
        self._has_restarted = True
        world.kill(daemon.process)
        self._check_marks(open_files)
        for one in self.asked:
            if one.ended_at is None and one.daemon is daemon:
                one.has_left, one.ended_at = True, self.scheduler.now
        if starts and not self.daemons:
            self._start()

    def _move(self) -> None:
        """Kills the daemon, and goes on with one on another machine, or on this one again."""
        vars(self.settings)["kv_cache_dir"] = self.folder / self.random.choice(("kv", "kv2"))
        self._kill()

    def _stop(self, daemon: Daemon | None = None, *, starts: bool = True) -> None:
        daemon = daemon or self.random.choice(self.daemons)
        grace_s, hibernates = self.random.choice((0.0, 0.05, 5.0)), self.random.random() < 0.5
        task = self.scheduler.spawn("stopping", daemon.process, lambda: daemon.stop(grace_s, hibernates=hibernates))
        self._join(task, "the daemon does not stop", answers=False)
        self._check_errors()
        # A write to the bucket may take a minute, which nobody waits for.
        tasks = (task for task in self.scheduler.tasks if task.process is daemon.process)
        left = [task for task in tasks if not task.name.startswith("remote-")]
        if left and starts and not self.disk.failing and not self.disk.hangs:
            self._within(
                30,
                lambda: not any(task in self.scheduler.tasks for task in left),
                "threads are left after the daemon stopped",
            )
        self._end(daemon, starts=starts)

    # What must hold.

    def _finish(self) -> None:
        """Waits for all requests, and looks at what is left of them."""
        if self.disk.hangs and self.random.random() < 0.5:
            self._within(PATIENCE_S, lambda: not self._waiting(), "a request waits for a read that never ends")
        self._calm()
        self._check_errors()
        self._check_marks(self._open_files(self.stores))
        for one in self.asked:
            self._check_reply(one)
        self.counts["tokens ahead"] += sum(daemon.cache.counters["ahead_tokens"] for daemon in self.daemons)
        # A daemon that could not open its folder serves without it.
        readable = [daemon for daemon in self.daemons if daemon.store.problem is None]
        for daemon in readable:
            self._check_notes(daemon)
        for daemon in readable[:1]:
            self._verify(daemon.store)

    def _waiting(self) -> list[Asked]:
        return [one for one in self.asked if one.last is None and not one.has_left]

    def _check_errors(self) -> None:
        if self.scheduler.errors:
            raise Wrong(self.scheduler.errors[0])
        for daemon in self.daemons:
            if daemon.fatal:
                raise Wrong(f"the engine ended: {daemon.fatal[0]!r}")

    def _open_files(self, stores: Iterable[StoreFile]) -> list[tuple[Path, int]]:
        """Returns folder and inode of the files in their place that these stores have open for writing."""
        found = [env for store in stores if (env := store._env) is not None and not env.read_only and not env._closed]
        return [(env.path, env.inode) for env in found if env.is_in_place()]

    def _check_marks(self, open_files: list[tuple[Path, int]]) -> None:
        """The mark stays while a process has the file open, and when it was killed."""
        for path, inode in open_files:
            with (path / LOCK).open("rb") as file:
                if _read_mark(file.fileno()).file != inode:
                    raise Wrong("the mark is gone, and a process has the file open or was killed")

    def _check_notes(self, daemon: Daemon) -> None:
        """Notes take their share at most, and what was purged is not found."""
        daemon.cache.writer.flush(PATIENCE_S)
        self.scheduler.sleep(2.0)
        with world.observing(), daemon.store.snapshot() as snapshot:
            num_bytes = snapshot.bytes_in("notes")
        most = 4 * root_limit(self._budget_bytes)
        if num_bytes > most:
            raise Wrong(f"notes take {num_bytes} bytes, of {most}")
        for purged in self._known_purges(daemon):
            for tenant, id_, number in purged.notes:
                if self.notes[tenant, id_] == number and daemon.cache.notes(tenant).get(NoteKind.RESPONSE, id_):
                    raise Wrong(f"the note {id_} of {tenant} is found, and was purged")

    def _check_reply(self, one: Asked) -> None:
        expected = one.expected
        # What another build has stored is restored until it is known to differ.
        for tokens in () if one.is_unchecked else one.replies.values():
            is_whole = isinstance(one.last, DoneEvent)
            if tokens != expected[: one.most if is_whole else len(tokens)]:
                raise Wrong(f"{one.id} got {tokens}, not {expected}")
        if isinstance(one.last, ErrorEvent):
            is_failing = self.counts["let_model_fail"] or self.counts["let_resources_be_refused"]
            is_asked_for = is_failing and "internal error" in str(one.last.error)
            if not isinstance(one.last.error, QueueFull | NotReady) and not is_asked_for:
                raise Wrong(f"{one.id} failed: {one.last.error!r}")
            self.counts["refused"] += 1
        if not isinstance(one.last, DoneEvent):
            self.counts["without an end"] += 1
            return
        if one.most and len(one.replies) != one.num_replies:
            raise Wrong(f"{one.id} got {len(one.replies)} replies, not {one.num_replies}")
        self.counts["done"] += 1
        if one.is_unaffordable:
            self.counts["unaffordable"] += 1
            # What is stored already costs nothing.
            if one.last.cache.saved == "queued" and one.last.usage.cached_tokens < len(one.token_ids):
                raise Wrong(f"{one.id} is saved with no budget for writes")
        cached = one.last.usage.cached_tokens
        self.counts[f"from {one.last.cache.source}"] += bool(cached)
        self.counts["tokens restored"] += cached
        allowed = max((_common(one, other) for other in self.asked if self._may_find(one, other)), default=0)
        if one.has_expired:
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

    def _watch(self, daemon: Daemon) -> None:
        """Has the locks of a daemon check what they guard whenever they are free again."""
        pool: Any = daemon.engine.pages.pool
        changed: Any = daemon.cache.writer._changed
        pool.lock.at_release = partial(self._check_memory, daemon)
        changed.lock.at_release = partial(self._check_buffer, daemon)

    def _check_memory(self, daemon: Daemon) -> None:
        pages = daemon.engine.pages
        pool: Any = pages.pool
        free = [len(pages_of) for pages_of in pool._free]
        memory = pool.taken_bytes, free, len(pool.holds), len(pages.running), len(pages.kept.blocks)
        if memory == self._memory.get(daemon) or daemon not in self.daemons:
            return
        self._memory[daemon] = memory
        lock, pool.lock = pool.lock, nullcontext()
        self.scheduler.errors += pages.check()
        pool.lock = lock
        if pool.taken_bytes > pool.limit_bytes:
            self.scheduler.errors.append(f"{pool.taken_bytes} bytes of KV memory are used, of {pool.limit_bytes}")

    def _check_buffer(self, daemon: Daemon) -> None:
        reserved, room = daemon.cache.writer._reserved_bytes, self.settings.kv_cache_write_buffer
        if not 0 <= reserved <= room and daemon in self.daemons:
            self.scheduler.errors.append(f"{reserved} bytes of the write buffer are reserved, of {room}")

    def _check_at_rest(self) -> None:
        """Notes who waits for nobody, while nothing happens."""
        for daemon in self.daemons:
            writer = daemon.cache.writer
            at = world.held_at.get(writer, math.inf)
            if self.scheduler.now > at + _LEASE_S and writer.num_pending and writer._next() is None:
                self.scheduler.errors.append(f"the writer pauses for nobody since {self.scheduler.now - at:.1f} s")
            if self._waits_for_free_pages(daemon):
                self.scheduler.errors.append("a request waits for pages that are free")

    def _waits_for_free_pages(self, daemon: Daemon) -> bool:
        """Returns whether the engine waits for news, and was not told that the writer has freed pages since it last
        looked."""
        inbox = daemon.inbox
        return (
            world.freed_at.get(daemon.engine.pages.pool, 0.0) > world.looked_at.get(inbox, 0.0)
            and any(isinstance(ticket.wait, MemoryWait) for ticket in inbox._waiting)
            and not inbox._has_news
            and inbox.heartbeat._working is None
        )

    def _check_idle(self, daemon: Daemon) -> None:
        """Nothing is left of requests that are over."""
        self.scheduler.sleep(0.1)
        deadline = self.scheduler.now + PATIENCE_S

        def left() -> dict[str, object]:
            return {
                "running": daemon.inbox.num_running,
                "pending bytes": daemon.cache.writer.pending_bytes,
                "reserved bytes": daemon.cache.writer._reserved_bytes,
                "saves": daemon.cache.writer._saves,
                "pending nodes": daemon.cache.writer.pending,
                "pins": daemon.store.evictor.pinned(),
                "sequences": daemon.engine.pages.running,
                "held pages": daemon.engine.pages.pool.holds,
            }

        while any(left().values()) and self.scheduler.now < deadline:
            self.scheduler.sleep(0.5)
        if any(left().values()):
            raise Wrong(f"left behind: { {name: value for name, value in left().items() if value} }")


def _share_of(tenant: Tenant) -> str:
    """Returns the share that a tenant's requests count for: that of its key, whatever the salt."""
    return "".join(tenant.ids[:1])


def _notes_of(daemon: Daemon, tenant: Tenant) -> TenantNotes:
    """Returns a tenant's notes, whose room counts for its share."""
    return replace(daemon.cache.notes(tenant), share=_share_of(tenant))


def _common(one: Asked, other: Asked) -> int:
    asked, left = one.token_ids, other.left_tokens
    pairs = zip(asked, left, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(asked), len(left)))
