"""Restores beside other requests: none waits for the disk but who needs it, and none for ever."""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from diskprefix.daemon.engine import fetches, served_model
from diskprefix.daemon.engine.fetches import Fetches, ReadJob
from diskprefix.daemon.engine.idle.ahead_jobs import AheadJob
from diskprefix.daemon.engine.loop import Engine
from diskprefix.daemon.engine.request import DoneEvent, ErrorEvent
from diskprefix.daemon.engine.running_request import Reply
from diskprefix.errors import NotReady
from diskprefix.prefixstore.cache import misses
from diskprefix.prefixstore.cache.restore import Restore
from diskprefix.prefixstore.cache.tiers.loading import MAX_LOADS, READER_THREADS
from diskprefix.prefixstore.cache.tiers.local import DiskView
from diskprefix.prefixstore.cache.tiers.tier import Prefetched
from diskprefix.prefixstore.kv.page_cache import PageCache
from diskprefix.prefixstore.store import reads
from diskprefix.prefixstore.store.environment import Environment
from diskprefix.prefixstore.store.reads import Patience, Reads
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.tokens import TokenIds, TokenPath
from diskprefix.values import SHARED, Prompt, Tenant
from tests.daemon.engine.driving import (
    Client,
    after_steps,
    alone,
    bound_memory,
    load,
    request,
    run_together,
    running,
    tokens,
    wait_until_idle,
)
from tests.waiting import wait_for

STORED = [tokens(900, seed) for seed in range(MAX_LOADS + 1)]
TURN, NEW = tokens(300, 20), tokens(20, 21)
SOMEBODY = Tenant.of_key("somebody")
begin = Fetches.begin_read


class Gate:
    """In the place of a method: calls wait at it while it is shut."""

    def __init__(self, patch: pytest.MonkeyPatch, holder: type, name: str) -> None:
        self.opened, self.num_arrived = threading.Event(), 0
        self.calls: Counter[Any] = Counter()
        method = getattr(holder, name)

        def waiting(this: Any, *args: Any, **kwargs: Any) -> Any:
            self.num_arrived += 1
            self.calls[args[:2] if name == "_decode" else name] += 1
            assert self.opened.wait(120)
            return method(this, *args, **kwargs)

        patch.setattr(holder, name, waiting)

    def wait_until_reached(self, times: int = 1) -> None:
        wait_for(lambda: self.num_arrived >= times)


@pytest.fixture(scope="module")
def stored(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """The folder of a store with the prompts STORED, and the replies to them."""
    kv = tmp_path_factory.mktemp("stored") / "kv"
    engine = load(folder, kv)
    replies = [client.tokens for client in run_together(engine, map(request, STORED))]
    engine.close()
    return kv, replies


@pytest.fixture
def engine(
    folder: Path, stored: tuple[Path, list[list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Engine:
    """Its store has STORED, and its memory TURN."""
    shutil.copytree(stored[0], tmp_path / "kv")
    engine = load(folder, tmp_path / "kv")
    run_together(engine, [request(TURN)])
    monkeypatch.setattr(Environment.close, "__defaults__", (0.1,))
    return engine


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "STALL_S", 0.3)
    monkeypatch.setattr(fetches, "_END_S", 0.1)


def is_done(client: Client) -> bool:
    return bool(client.events) and isinstance(client.events[-1], DoneEvent)


def require_nothing_left(engine: Engine) -> None:
    wait_for(lambda: not engine.pages._sequences and not engine.cache.store.environment._transactions)
    assert engine.pages.check() == []
    wait_for(lambda: not engine.cache.store.evictor.pinned())


def test_what_needs_nothing_from_the_disk_does_not_wait_for_a_restore(
    engine: Engine, stored: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, DiskView, "_decode")
    with running(engine) as inbox:
        restored = Client(inbox, request(STORED[0]))
        gate.wait_until_reached()
        beginning = Client(inbox, request(np.concatenate([STORED[0], NEW])))
        next_turn = np.concatenate([TURN, tokens(20, 3)])
        others = [Client(inbox, request(ids)) for ids in (next_turn, TURN, NEW)]
        others += [Client(inbox, request(NEW, tenant=SOMEBODY))]
        wait_for(lambda: all(map(is_done, others)))
        assert not is_done(restored)
        gate.opened.set()
    assert [client.done.usage.cached_tokens for client in others] == [len(TURN), len(TURN), 0, 0]
    assert (restored.tokens, restored.done.cache.source) == (stored[1][0], "disk")
    assert beginning.done.usage.cached_tokens == len(STORED[0])
    # What is behind the last complete block may be read for both.
    assert gate.calls.total() <= len(gate.calls) + 2 < 2 * len(gate.calls)


@pytest.mark.cases(1)
@pytest.mark.parametrize("hangs", [(Snapshot, "last_under"), (DiskView, "has"), (DiskView, "_decode")])
@pytest.mark.usefixtures("impatient")
def test_a_disk_that_does_not_answer_stops_no_request(
    hangs: tuple[type, str],
    engine: Engine,
    stored: tuple[Path, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = Gate(monkeypatch, *hangs)
    tenant = SOMEBODY if hangs[0] is Snapshot else SHARED
    with running(engine) as inbox:
        clients = [Client(inbox, request(STORED[0], tenant=tenant))]
        gate.wait_until_reached()
        clients += [Client(inbox, request(ids)) for ids in (np.concatenate([TURN, NEW]), TURN, NEW)]
        wait_for(lambda: all(map(is_done, clients)))
        assert clients[0].tokens == stored[1][0]
        # What comes now does not try.
        before = gate.num_arrived
        clients += [Client(inbox, request(ids)) for ids in STORED[1:]]
        wait_for(lambda: all(map(is_done, clients)))
        assert gate.num_arrived == before
        assert [client.tokens for client in clients[4:]] == stored[1][1:]
        assert engine.cache.health[0] == engine.cache.stats()["state"] == "degraded"
        assert engine.cache.stats()["stalled_reads"] >= 1
        assert engine.pages.check() == []
        assert len(engine.pages._abandoned) == (hangs[1] == "_decode")
        gate.opened.set()
        wait_for(lambda: engine.cache.health[0] == "ok")
        require_nothing_left(engine)
        # What waits to be written would be read from memory.
        assert engine.cache.writer.flush(30)
        engine.pages.forget_idle()
        again = Client(inbox, request(STORED[1]))
        wait_for(lambda: is_done(again))
    assert again.done.cache.source == "disk"
    assert sum("has not answered" in record.message for record in caplog.records) == 1


@pytest.mark.usefixtures("impatient")
def test_a_client_that_leaves_a_read_that_hangs_leaves_nobody_behind_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of a prefill is not known, so nobody waits for a while only."""
    gate = Gate(monkeypatch, DiskView, "has")
    engine.cache.cost_model.prefill_s_per_token = None
    with running(engine) as inbox:
        left = Client(inbox, request(STORED[0]))
        gate.wait_until_reached()
        left.ticket.cancel()
        other = Client(inbox, request(STORED[1]))
        wait_for(lambda: is_done(other))
        assert engine.cache.health[0] == "degraded"
        gate.opened.set()
    assert not is_done(left)


def begin_without_steps(self: Fetches, job: ReadJob) -> None:
    job.steps = iter(())
    begin(self, job)


def compute_ahead(engine: Engine, token_ids: TokenIds) -> None:
    """Has a prompt computed while nobody waits."""
    options = request(token_ids).cache
    engine.ahead.add_job(AheadJob(engine, lambda: Prompt(token_ids), options, engine.cache.owner(SHARED)))
    engine.ahead._not_before = 0.0


@pytest.mark.parametrize("hangs", ["has", "_decode"])
def test_a_question_does_not_wait_for_idle_work_whose_read_hangs(
    hangs: str, engine: Engine, stored: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question is by design the one that shares its beginning with what is computed ahead."""
    gate = Gate(monkeypatch, DiskView, hangs)
    monkeypatch.setattr(reads, "STALL_S", 60.0)
    engine.cache.cost_model.prefill_s_per_token = 1e-9
    with running(engine) as inbox:
        compute_ahead(engine, np.concatenate([STORED[0], tokens(200, 30)]))
        inbox.wake()
        gate.wait_until_reached()
        with monkeypatch.context() as patch:
            patch.setattr(Fetches, "begin_read", begin_without_steps)
            client = Client(inbox, request(STORED[0]))
            wait_for(lambda: is_done(client))
        assert not gate.opened.is_set()
        assert client.tokens == stored[1][0]
        assert not engine.pages.running
        gate.opened.set()
        require_nothing_left(engine)


@pytest.mark.usefixtures("impatient")
def test_idle_work_whose_read_hangs_is_given_up_and_begins_nothing_until_the_disk_answers(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, DiskView, "_decode")
    with running(engine) as inbox:
        compute_ahead(engine, np.concatenate([STORED[0], tokens(200, 30)]))
        inbox.wake()
        gate.wait_until_reached()
        wait_for(lambda: engine.cache.health[0] == "degraded" and not engine.pages.running)
        before = gate.num_arrived
        compute_ahead(engine, np.concatenate([STORED[1], tokens(200, 31)]))
        inbox.wake()
        wait_until_idle(inbox)
        assert gate.num_arrived == before
        gate.opened.set()
        require_nothing_left(engine)
        engine.ahead._not_before = 0.0
        inbox.wake()
        wait_for(lambda: engine.cache.counters["ahead_tokens"] > 0)


def test_the_wait_for_the_shared_tier_is_no_wait_for_the_disk(engine: Engine) -> None:
    waits, ended, may_go = list[float](), threading.Event(), threading.Event()
    pools = Fetches(engine.cache, engine.pages, engine.pools.steps, ended.set)
    job = ReadJob(lambda: True)

    def prefetch() -> None:
        waits.append(job.waits_since)
        assert may_go.wait(30)

    steps: list[Any] = [("prefetch", prefetch), ("match", lambda: waits.append(job.waits_since))]
    job.steps = iter([*steps, ("load", lambda: waits.append(job.waits_since))])
    before = time.monotonic()
    pools.begin_read(job)
    wait_for(lambda: bool(waits))
    may_go.set()
    assert ended.wait(30)
    pools.close()
    assert waits[0] == math.inf
    assert before < waits[1] == waits[2] <= time.monotonic()


def test_a_request_that_has_waited_for_the_disk_elsewhere_waits_no_more(
    engine: Engine, stored: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, patience = Gate(monkeypatch, DiskView, "has"), Patience(0.0)
    engine.cache.cost_model.prefill_s_per_token = None
    with running(engine) as inbox:
        client = Client(inbox, replace(request(STORED[0]), patience=patience))
        wait_for(lambda: is_done(client))
        assert (client.tokens, gate.num_arrived) == (stored[1][0], 0)
        gate.opened.set()


@pytest.mark.cases(1)
@pytest.mark.parametrize("hangs", ["has", "_decode"])
def test_a_slow_disk_uses_up_the_patience_of_a_request_and_of_those_that_wait_behind_it(
    hangs: str, engine: Engine, stored: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read moves now and then, so none of them hangs."""
    monkeypatch.setattr(fetches, "_SLOW_S", 0.05)
    gate, patience = Gate(monkeypatch, DiskView, hangs), [Patience(0.3) for _ in STORED]
    engine.cache.cost_model.prefill_s_per_token = None
    with running(engine) as inbox:
        clients = [
            Client(inbox, replace(request(ids), patience=one)) for ids, one in zip(STORED, patience, strict=True)
        ]
        wait_for(lambda: all(map(is_done, clients)))
        assert not gate.opened.is_set()
        assert [client.tokens for client in clients] == stored[1]
        assert engine.cache.health[0] == "ok"
        gate.opened.set()
        require_nothing_left(engine)


@pytest.mark.usefixtures("impatient")
def test_a_shared_tier_that_does_not_answer_is_not_asked_and_the_disk_is_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine.cache, "remote", SimpleNamespace(prefetch=lambda _: Prefetched(), upload=lambda _: None))
    gate = Gate(monkeypatch, Restore, "_prefetch")

    def is_asked_again() -> bool:
        Client(inbox, request(NEW))
        wait_until_idle(inbox)
        return gate.num_arrived > 1

    with running(engine) as inbox:
        for ids in STORED[:2]:
            client = Client(inbox, request(ids))
            wait_until_idle(inbox)
            assert client.done.cache.source == "disk"
            assert gate.num_arrived == 1
        assert engine.cache.health[0] == "ok"
        gate.opened.set()
        require_nothing_left(engine)
        wait_for(is_asked_again)
    assert sum("the shared tier does not answer" in record.message for record in caplog.records) == 1


@pytest.mark.usefixtures("impatient")
def test_where_a_load_that_hangs_has_all_memory_its_request_fails_and_others_are_served(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound_memory(engine.pages, engine.pages.pool.sequence_bytes(1100))
    gate = Gate(monkeypatch, DiskView, "_decode")
    with running(engine) as inbox:
        hung = Client(inbox, request(STORED[0]))
        gate.wait_until_reached()
        other = Client(inbox, request(NEW))
        wait_for(lambda: is_done(other) and hung.events and isinstance(hung.events[-1], ErrorEvent))
        gate.opened.set()
        require_nothing_left(engine)
    with pytest.raises(NotReady, match="the disk does not answer"):
        hung.done  # noqa: B018


def test_a_client_that_leaves_ends_its_load_and_does_not_wait_for_its_turn(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, DiskView, "_decode")
    with running(engine) as inbox:
        clients = [Client(inbox, request(ids)) for ids in STORED]
        gate.wait_until_reached(MAX_LOADS * READER_THREADS)
        clients[-1].ticket.cancel()
        wait_for(lambda: inbox.num_running == MAX_LOADS)
        for client in clients:
            client.ticket.cancel()
        gate.opened.set()
        wait_until_idle(inbox)
    assert gate.num_arrived == MAX_LOADS * READER_THREADS, "no piece more is read"
    assert not any(map(is_done, clients))
    require_nothing_left(engine)


@pytest.mark.usefixtures("impatient")
def test_a_stop_does_not_wait_for_a_disk_that_does_not_answer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(monkeypatch, DiskView, "_decode")
    with running(engine) as inbox:
        client = Client(inbox, request(STORED[0]))
        gate.wait_until_reached()
        inbox.stop(0)
        engine.save_idle()
        assert engine.close()
    gate.opened.set()
    assert not is_done(client)
    assert "a reader of this process does not end" in caplog.text
    wait_for(lambda: not engine.cache.store.environment._transactions)


def test_a_disk_that_hangs_first_when_memory_is_saved_does_not_hold_the_stop(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, DiskView, "has")
    monkeypatch.setattr(served_model, "_LAST_SAVE_S", 0.1)
    engine.save_idle(0.1)
    assert gate.num_arrived
    gate.opened.set()


# What the engine's thread does not do.


def test_the_thread_of_the_engine_does_not_read_the_disk(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(folder, tmp_path / "kv", kv_cache_write_budget="1GB/day")
    snapshot, by = Reads.snapshot, Counter[str]()

    def noted(self: Reads) -> Any:
        by[threading.current_thread().name.partition("_")[0]] += 1
        return snapshot(self)

    monkeypatch.setattr(Reads, "snapshot", noted)
    conversation: TokenIds = STORED[0]
    for seed in range(2):
        (client,) = run_together(engine, [request(conversation)])
        conversation = np.concatenate([conversation, np.array(client.tokens, np.int32), tokens(70, seed)])
    with running(engine) as inbox, monkeypatch.context() as patch:
        leaving = Client(inbox, request(STORED[1]))
        after_steps(patch, 1, leaving.ticket.cancel)
        wait_until_idle(inbox)
    assert engine.cache.finish_aside()
    assert by["kv-match"] > 0
    assert by["engine"] == 0


def test_a_request_that_waits_for_another_is_matched_when_that_is_far_enough(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    match, matched = PageCache.match_prefix, Counter[int]()

    def noted(self: PageCache, owner: Any, path: TokenPath, **options: Any) -> Any:
        matched[len(path.token_ids)] += 1
        return match(self, owner, path, **options)

    monkeypatch.setattr(PageCache, "match_prefix", noted)
    prompt = tokens(3000, 30)
    first, second = run_together(engine, [request(prompt), request(prompt[:2900])])
    assert (first.done.usage.cached_tokens, second.done.usage.cached_tokens) == (0, 2899)
    assert matched[2900] == 2
    assert second.tokens == alone(engine, request(prompt[:2900])).tokens


def test_where_a_prompt_changed_is_found_on_another_thread(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    by = list[str]()
    monkeypatch.setattr(misses, "find_break", lambda *_: by.append(threading.current_thread().name))
    submit, one = engine.cache.background.submit, request(NEW)

    def begun(*call: Any) -> Any:
        """A request that ends before the search begins cancels it."""
        search = submit(*call)
        wait_for(lambda: search.running() or search.done())
        return search

    monkeypatch.setattr(engine.cache.background, "submit", begun)
    source: Any = SimpleNamespace(line_at=str)
    run_together(engine, [replace(one, prompt=replace(one.prompt, source=source))])
    assert by == ["kv-background_0"]


def test_a_request_ends_while_the_thread_that_looks_where_its_prompt_changed_is_held_up(engine: Engine) -> None:
    may_go, one = threading.Event(), request(NEW)
    engine.cache.background.submit(may_go.wait, 120)
    source: Any = SimpleNamespace(line_at=str)
    with running(engine) as inbox:
        client = Client(inbox, replace(one, prompt=replace(one.prompt, source=source)))
        try:
            wait_for(lambda: is_done(client))
        finally:
            may_go.set()
    assert client.done.cache.broken is None


def test_a_reply_that_nobody_may_find_is_not_joined_with_its_prompt_for_each_token(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined, computed_ids = Counter[str](), Reply.computed_ids

    def noted(self: Reply) -> TokenIds:
        joined["times"] += 1
        return computed_ids(self)

    monkeypatch.setattr(Reply, "computed_ids", noted)
    run_together(engine, [request(tokens(70, 40), save=False, max_tokens=40)])
    assert joined["times"] <= 3
