"""The page on the life of a request says which states there are, which lead to which, and what a cancelled restore
leaves."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest

from diskprefix.daemon.engine import fetches
from diskprefix.daemon.engine.active_requests import ActiveRequests
from diskprefix.daemon.engine.fetches import ReadJob
from diskprefix.daemon.engine.loop import Engine, Loop
from diskprefix.daemon.engine.request import DoneEvent, TextEvent
from diskprefix.daemon.engine.running_request import Reply, Stage
from diskprefix.daemon.engine.stay import Stay
from diskprefix.prefixstore.cache.restore import Restore
from diskprefix.prefixstore.cache.tiers import loading
from diskprefix.prefixstore.cache.tiers.local import DiskView
from diskprefix.prefixstore.kv.page_cache import PageCache
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.prefixstore.store import reads
from diskprefix.prefixstore.store.schema import UsageRecord
from tests.daemon.engine.driving import BLOCK, Client, load, request, run_together, running, tokens, wait_until_idle
from tests.source_files import PACKAGE
from tests.waiting import wait_for

PAGE = (PACKAGE / "daemon/LIFE.md").read_text(encoding="utf-8")
DRAWING = PAGE.partition("```text\n")[2].partition("```")[0]
ARROW = re.compile(r"^\| ([a-z, ]+) \| ([a-z]+) \| `(\w+)\.(\w+)`", re.MULTILINE)
"""A row of the page: states, the state after them, and the function that leads there."""
OF_ENGINE = (Loop, ActiveRequests, Stay)
STORED = tokens(900)

Arrow = tuple[str, str, str]


def arrows_on_page() -> set[Arrow]:
    rows = ARROW.findall(PAGE)
    return {(state, end, f"{owner}.{name}") for states, end, owner, name in rows for state in states.split(", ")}


@pytest.fixture(scope="module")
def stored(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store that has STORED."""
    kv = tmp_path_factory.mktemp("stored") / "kv"
    engine = load(folder, kv)
    run_together(engine, [request(STORED)])
    engine.close()
    return kv


@pytest.fixture
def engine(folder: Path, stored: Path, tmp_path: Path) -> Engine:
    """Its store has STORED, its memory has nothing."""
    shutil.copytree(stored, tmp_path / "kv")
    return load(folder, tmp_path / "kv")


def test_the_drawing_has_the_states_of_the_code() -> None:
    assert set(re.findall(r"^[ |]+([a-z]{2,})", DRAWING, re.MULTILINE)) == {"new", *get_args(Stage)}
    assert {state for start, end, _ in arrows_on_page() for state in (start, end)} == {"new", *get_args(Stage)}


@contextmanager
def watched(patch: pytest.MonkeyPatch) -> Iterator[set[Arrow]]:
    """Yields the changes of the stages of all replies, with the functions of the page after which they are seen."""
    seen, stages, loops = set[Arrow](), dict[Reply, str](), list[Loop]()
    init, depth = Loop.__init__, [0]

    def noted(self: Loop, *args: Any) -> None:
        init(self, *args)
        loops[:] = [self]

    def look(replies: list[Reply], function: str) -> None:
        for reply in replies:
            before, stages[reply] = stages.get(reply, "waiting"), reply.stage
            if before != reply.stage:
                seen.add((before, reply.stage, function))

    def watching(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **named: Any) -> Any:
            depth[0] += 1
            try:
                return function(self, *args, **named)
            finally:
                depth[0] -= 1
                # What a function of the page does by another one is its own. A reply ends by one function alone.
                ended = [args[0]] if name == "ActiveRequests.end_reply" else []
                look(ended or ([] if depth[0] else loops[0]._active.replies), name)

        return call

    patch.setattr(Loop, "__init__", noted)
    for function in {function for *_, function in arrows_on_page()}:
        owner, _, name = function.partition(".")
        for kind in OF_ENGINE:
            if kind.__name__ == owner:
                patch.setattr(kind, name, watching(function, getattr(kind, name)))
    yield seen


def test_the_page_has_each_way_from_state_to_state_and_its_function(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "STALL_S", 0.3)
    monkeypatch.setattr(fetches, "_END_S", 0.1)
    take_pages, decode, is_shut = KVSequence.take_pages_to, DiskView._decode, [True]
    waiting = list[None]()

    def refusing(self: KVSequence, end: int) -> bool:
        # Again and again: what waits to be written gives its pages up first.
        preempted = any(function == "ActiveRequests.preempt" for *_, function in seen)
        return (end != 105 or preempted) and take_pages(self, end)

    def hanging(self: Any, *args: Any) -> Any:
        waiting.append(None)
        wait_for(lambda: not is_shut[0])
        return decode(self, *args)

    with watched(monkeypatch) as seen, running(engine) as inbox:
        # Its read hangs, and it is computed in other pages.
        monkeypatch.setattr(DiskView, "_decode", hanging)
        given_up = Client(inbox, request(STORED))
        wait_for(lambda: given_up.events and isinstance(given_up.events[-1], DoneEvent))
        is_shut[0] = False
        wait_for(lambda: not engine.pages._sequences)
        # It needs nothing from the disk.
        Client(inbox, request(tokens(100, 1), scope="off"))
        wait_until_idle(inbox)
        # It loses its pages.
        monkeypatch.setattr(KVSequence, "take_pages_to", refusing)
        Client(inbox, request(tokens(100, 2), save=False))
        wait_until_idle(inbox)
        # It is cancelled while it is read. Its second reply waits.
        engine.pages.forget_idle()
        is_shut[0], waiting[:] = True, []
        left = Client(inbox, request(STORED, n=2))
        wait_for(lambda: waiting)
        left.ticket.cancel()
        inbox.wake()
        wait_until_idle(inbox)
        is_shut[0] = False
    assert seen | {("new", "waiting", "Inbox.submit")} == arrows_on_page()


def usage_of(engine: Engine) -> list[UsageRecord]:
    with engine.cache.store.reads.snapshot() as snapshot:
        usages = (snapshot.usage(name) for name in snapshot.keys("nodes"))
        return [usage for usage in usages if usage is not None]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_cancelled_restore_keeps_its_whole_blocks_by_name_and_nothing_else(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    named, begun, clients = list[int](), list[int](), list[Client]()
    name_restored, init, before = PageCache.name_restored, Restore.__init__, usage_of(engine)

    def naming(self: PageCache, sequence: KVSequence, number: int) -> None:
        name_restored(self, sequence, number)
        named.append(number)
        if number == 3:
            clients[0].ticket.cancel()

    def noted(self: Restore, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        begun.append(self.in_memory_tokens)

    monkeypatch.setattr(loading, "READER_THREADS", threads)
    monkeypatch.setattr(PageCache, "name_restored", naming)
    monkeypatch.setattr(Restore, "__init__", noted)
    jobs, is_wanted = set[ReadJob](), ReadJob.is_wanted

    def asked(self: ReadJob) -> bool:
        jobs.add(self)
        return is_wanted(self)

    monkeypatch.setattr(ReadJob, "is_wanted", asked)
    with running(engine) as inbox:
        with inbox._changed:
            clients.append(Client(inbox, request(STORED)))
        wait_until_idle(inbox)
        wait_for(lambda: not engine.pages._sequences and all(job.is_over for job in jobs))
        kept = engine.pages.stats()["kept_tokens"]
        assert all(isinstance(event, TextEvent) for event in clients[0].events), "there is no last event"
        # A thread finishes the piece that it has. The engine may end the request before or after that.
        if threads == 1:
            assert named == [0, 1, 2, 3, 4]
            assert kept in {4 * BLOCK, 5 * BLOCK}
        else:
            assert BLOCK <= kept <= len(named) * BLOCK
        assert engine.pages.check() == []
        assert not engine.cache.store.evictor.pinned()
        assert usage_of(engine) == before
        again = Client(inbox, request(STORED))
        wait_until_idle(inbox)
    if threads == 1:
        assert begun == [0, kept], "the next prompt begins with what is in memory"
    else:
        assert begun[1] in range(0, kept + 1, BLOCK), "a block that was late has no name"
    assert again.done.usage.cached_tokens == len(STORED)
