"""What is stored stays in use after an upgrade that changed no bit; after another one, nothing of it is restored."""

from __future__ import annotations

import logging
import runpy
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from diskprefix.daemon.engine.idle import recheck
from diskprefix.daemon.engine.idle.ahead_jobs import AheadModel
from diskprefix.daemon.engine.idle.idle_work import IdleWork
from diskprefix.daemon.engine.idle.recheck import Recheck
from diskprefix.daemon.engine.loop import Engine
from diskprefix.daemon.engine.request import DoneEvent
from diskprefix.errors import StoreFull, StoreUnavailable
from diskprefix.identity import identity_of_build, is_outdated
from diskprefix.native import build
from diskprefix.prefixstore.cache.build_bits import BuildBits, build_digest
from diskprefix.prefixstore.kv.page_cache import PageCache
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.prefixstore.store.changes import Changes
from diskprefix.prefixstore.store.note_record import NoteKind, decode_note, encode_note
from diskprefix.prefixstore.store.purge import PurgeFilter
from diskprefix.prefixstore.store.schema import (
    BUILD_BYTES,
    ENCODED_PICTURES,
    ModelRecord,
    NodeKind,
    encode_node,
    joined,
    model_key,
)
from diskprefix.prefixstore.store.store import Store
from diskprefix.runtime import choose_runtime as choosing
from diskprefix.runtime.load import plan_fingerprint
from diskprefix.tokens import NO_PROMPT, TokenIds, root_hash
from diskprefix.values import SHARED, CacheReport
from tests.daemon.engine.driving import BusyClient, Client, done, load, request, run, running, tokens, write_model
from tests.daemon.server.daemon_process import DaemonProcess, ask, clean_environment, serve_flags
from tests.waiting import wait_for

SALTED = SHARED.with_salt("another user")


@pytest.fixture(params=["llama", "qwen3_next"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", request.param)


Opened = Callable[..., Engine]


@pytest.fixture
def opened(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Opens an engine as a build does whose sources and bits have these names."""
    engines = list[Engine]()

    def open_as(build: str, bits: str = "bits", **settings: Any) -> Engine:
        for engine in engines:
            assert engine.close()
        engines.clear()
        monkeypatch.setattr(choosing, "build_of", lambda _: build)
        monkeypatch.setattr(plan_fingerprint, "bits_of_build", lambda _: bits)
        engines.append(load(model, tmp_path / "kv", **settings))
        return engines[0]

    yield open_as
    for engine in engines:
        assert engine.close()


def said(engine: Engine, num_tokens: int = 200, **options: Any) -> CacheReport:
    report = done(run(engine, tokens(num_tokens), **options)).cache
    assert report is not None
    return report


def wait_for_recheck(engine: Engine) -> None:
    with running(engine):
        wait_for(lambda: not engine.cache.must_recheck)


def test_other_sources_with_the_same_bits_use_what_is_stored(opened: Opened) -> None:
    assert said(opened("a comment")).restored == 0
    assert said(opened("another comment")).restored == 200
    assert said(opened("a comment", "other bits")).restored == 0


def test_a_prompt_that_another_build_has_stored_is_upgraded(opened: Opened) -> None:
    first = opened("one", "bits")
    for tenant in (SHARED, SALTED):
        assert said(first, tenant=tenant).miss_reason == "new"
    second = opened("two", "other bits")
    for tenant in (SHARED, SALTED):
        missed = said(second, tenant=tenant)
        assert (missed.restored, missed.miss_reason) == (0, "upgraded")
        # Now it is stored.
        assert said(second, tenant=tenant).restored == 200
    other = done(run(second, tokens(200, seed=1))).cache
    assert other is not None
    assert other.miss_reason == "new"


def test_stored_blocks_are_computed_again_once_and_stay(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first = opened("one")
    assert not first.cache.must_recheck
    for tenant in (SHARED, SALTED):
        said(first, tenant=tenant)
    second = opened("two")
    assert second.cache.must_recheck
    wait_for_recheck(second)
    assert "stored prompts compared" in caplog.text
    assert said(second).restored == 200
    assert not opened("two").cache.must_recheck


def content(engine: Engine, root: bytes) -> dict[bytes, bytes]:
    """All that the store has of the nodes of a root."""
    assert engine.cache.writer.flush(10)
    with engine.cache.store.snapshot() as snapshot:
        nodes = [(name, node) for name in snapshot.keys("usage") if (node := snapshot.node(name)) and node.root == root]
        return {name: b"".join(bytes(piece) for _, piece in snapshot.pieces(name)) for name, _ in nodes}


def has_own_root(engine: Engine, root: bytes) -> bool:
    return engine.cache.bits.state == "settled" and engine.cache.root != root


def find_difference(engine: Engine) -> None:
    """Has the recheck compute another bit, and waits until the store says so."""
    with pytest.MonkeyPatch.context() as patch:
        flipped = _flipping_one_bit(patch)
        wait_for_recheck(engine)
        wait_for(lambda: engine.cache.bits.state == "settled")
        wait_for_epoch(engine)
        assert flipped


def wait_for_epoch(engine: Engine) -> None:
    """Nothing is saved of a request that begins before the process knows of the purge."""
    engine.cache.store.read_epochs()
    wait_for(lambda: engine.cache.epochs == engine.cache.store.epochs)


@pytest.fixture
def no_recheck(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Nothing is computed again before `undo`."""
    with monkeypatch.context() as patch:
        patch.setattr(Recheck, "next_steps", lambda _: None)
        yield patch


@pytest.mark.cases(1)
def test_a_build_that_computes_other_bits_gets_a_root_of_its_own_and_the_old_one_goes_on(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    first = opened("one")
    for tenant in (SHARED, SALTED):
        said(first, tenant=tenant)
    old, stored = first.cache.root, content(first, first.cache.root)
    second = opened("two")
    find_difference(second)
    assert "is used no more" in caplog.text
    assert second.cache.stats()["outdated"] == 1
    own = second.cache.root
    for tenant in (SHARED, SALTED):
        missed = said(second, tenant=tenant)
        assert (missed.restored, missed.miss_reason) == (0, "upgraded")
        assert said(second, tenant=tenant).restored == 200
    again = opened("two")
    assert (again.cache.root, again.cache.must_recheck) == (own, False)
    assert said(again).restored == 200
    # The old build finds what it left, bit for bit, and nothing else.
    back = opened("one")
    assert (back.cache.root, back.cache.must_recheck) == (old, False)
    assert content(back, old) == stored
    assert said(back).restored == 200
    assert opened("two").cache.root == own


@pytest.mark.cases(4)
@pytest.mark.parametrize("num_tokens", [70, 3000])
@pytest.mark.parametrize("scope", ["full", "auto:30", "100"])
def test_whatever_a_build_has_stored_other_bits_are_found(opened: Opened, num_tokens: int, scope: str) -> None:
    """Also if no checkpoint is near the end of a prompt, or near its beginning."""
    first = opened("one")
    for seed in range(3):
        assert done(run(first, tokens(num_tokens, seed), scope=scope, max_tokens=1)).cache
    second = opened("two")
    old = second.cache.root
    find_difference(second)
    assert has_own_root(second, old)


@pytest.mark.parametrize("model", ["qwen3_next"], indirect=True)
@pytest.mark.parametrize("when", ["before it is chosen", "after it was chosen"])
def test_what_cannot_be_compared_is_not_taken_for_equal(
    opened: Opened, when: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a checkpoint, nothing of a model with states can be restored, and its blocks are still there."""
    said(opened("one"))
    second, choose = opened("two"), Recheck._chosen
    old, store = second.cache.root, second.cache.store

    def evict_checkpoints() -> None:
        with store.changes() as changes:
            for name in [*changes.keys("usage")]:
                if (node := changes.node(name)) and node.kind != NodeKind.BLOCK:
                    changes.delete_node(name, node.parent)

    def choose_first(self: Recheck) -> Any:
        chosen = choose(self)
        evict_checkpoints()
        return chosen

    monkeypatch.setattr(recheck, "_RETRY_S", 0.0)
    if when == "before it is chosen":
        evict_checkpoints()
    else:
        monkeypatch.setattr(Recheck, "_chosen", choose_first)
    wait_for_recheck(second)
    assert store.counts()["blocks"]
    wait_for(lambda: has_own_root(second, old))
    wait_for_epoch(second)
    assert "can be compared" in caplog.text


@pytest.mark.cases(1)
@pytest.mark.usefixtures("no_recheck")
def test_what_a_build_restored_before_the_difference_was_known_is_not_shared_after_it(
    opened: Opened, no_recheck: pytest.MonkeyPatch
) -> None:
    said(opened("one"))
    second = opened("two")
    old = second.cache.root
    # Also what continues it in memory.
    assert said(second, 230).restored == 200
    assert said(second, 230).restored >= 200
    no_recheck.undo()
    find_difference(second)
    assert has_own_root(second, old)
    assert said(second, 230).restored == 0
    assert second.cache.writer.flush(10)
    # Nor is it saved when the process ends.
    second.save_idle()
    own = content(second, second.cache.root)
    assert said(second, 230).restored == 230
    assert not own.keys() & content(second, old).keys()


@pytest.mark.usefixtures("no_recheck")
def test_nothing_is_saved_beside_what_was_not_compared(opened: Opened, no_recheck: pytest.MonkeyPatch) -> None:
    first = opened("one")
    said(first)
    old, stored = first.cache.root, content(first, first.cache.root)
    second = opened("two")
    assert said(second).restored == 200
    fresh = said(second, 300, name="another prompt")
    assert (fresh.saved, fresh.selection.reason) == ("none", "upgraded")
    second.save_idle()
    assert content(second, old) == stored
    # What memory has is saved with the next turn, once it was compared.
    no_recheck.undo()
    wait_for_recheck(second)
    assert said(second, 300).saved == "queued"
    assert content(second, old).keys() > stored.keys()


@pytest.mark.cases(1)
def test_a_request_that_comes_when_the_difference_is_found_does_not_hide_it(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened("one")
    for tenant in (SHARED, SALTED):
        said(first, tenant=tenant)
    second = opened("two")
    old, found = second.cache.root, list[Client]()
    with running(second) as inbox:

        def differs(*_: object) -> bool:
            found.append(Client(inbox, request(tokens(200))))
            return False

        monkeypatch.setattr(recheck, "_has_state_of", differs)
        wait_for(lambda: has_own_root(second, old) and found and found[0].events)
        wait_for(lambda: isinstance(found[0].events[-1], DoneEvent))
    assert len(found) == 1
    report = found[0].done.cache
    assert report is not None
    assert report.restored == 0
    assert said(second).restored in (0, 200)
    assert opened("two").cache.root != old


@pytest.mark.cases(1)
def test_while_a_difference_cannot_be_recorded_nothing_is_restored_shared_or_saved(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened("one")
    said(first)
    old, stored = first.cache.root, content(first, first.cache.root)
    second = opened("two")

    def full(*_: object) -> None:
        raise StoreFull("the store is full")

    with monkeypatch.context() as patch:
        patch.setattr(Changes, "put_model", full)
        with pytest.MonkeyPatch.context() as flips:
            _flipping_one_bit(flips)
            wait_for_recheck(second)
        assert second.cache.bits.state == "other"
        for _ in range(2):
            report = said(second)
            assert (report.restored, report.miss_reason, report.saved) == (0, "upgraded", "none")
        second.save_idle()
        assert content(second, old) == stored
    wait_for(lambda: has_own_root(second, old))
    wait_for_epoch(second)
    assert [said(second).restored for _ in range(2)] == [0, 200]


@pytest.mark.cases(1)
def test_a_request_between_the_new_epoch_and_the_new_root_has_neither(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store says that the bits differ, and the process has not read it yet."""
    first = opened("one")
    said(first)
    old, stored = first.cache.root, content(first, first.cache.root)
    second = opened("two")
    with monkeypatch.context() as patch:
        patch.setattr(BuildBits, "recall", lambda _: False)
        with pytest.MonkeyPatch.context() as flips:
            _flipping_one_bit(flips)
            wait_for_recheck(second)
        wait_for(lambda: len(models(second)) == 2)
        second.cache.namespaces.forget_deleted()
        for _ in range(2):
            report = said(second)
            assert (report.restored, report.miss_reason, report.saved) == (0, "upgraded", "none")
        assert content(second, old) == stored
    second.cache.recall_bits()
    assert has_own_root(second, old)
    assert [said(second).restored for _ in range(2)] == [0, 200]
    assert content(second, old) == stored


def test_a_recheck_that_fails_leaves_it_known_that_nothing_was_compared(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    said(opened("one"))
    second, failed = opened("two"), threading.Event()

    def fail(*_: object) -> None:
        failed.set()
        raise RuntimeError("it cannot be computed")

    monkeypatch.setattr(recheck, "_RETRY_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(IdleWork, "compute_step", fail)
        with running(second):
            assert failed.wait(30)
            wait_for(lambda: second.cache.writer.flush(1))
        assert second.cache.must_recheck
    assert opened("two").cache.must_recheck
    wait_for_recheck(opened("two"))
    assert not opened("two").cache.must_recheck


@pytest.mark.cases(2)
@pytest.mark.parametrize("is_marked", [False, True])
def test_a_store_that_cannot_be_read_at_the_start_hides_no_difference(
    is_marked: bool,
    opened: Opened,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said(opened("one"))
    second = opened("two")
    old = second.cache.root
    if is_marked:
        find_difference(second)
        said(second)

    def away(*_: object) -> None:
        raise StoreUnavailable("the disk is away")

    with monkeypatch.context() as patch:
        patch.setattr(BuildBits, "_stored", away)
        again = opened("two")
        assert again.cache.bits.state == "unknown"
        assert said(again).restored == 0
        again.pages.forget_idle()
    if is_marked:
        # The first request finds out, unless the writer has. It may have begun under the old root, and saved there.
        said(again)
        assert has_own_root(again, old)
        again.pages.forget_idle()
        said(again)
        again.pages.forget_idle()
    assert said(again).restored == 200


@pytest.mark.cases(1)
@pytest.mark.usefixtures("no_recheck")
def test_a_process_takes_the_root_that_another_one_of_its_build_got(opened: Opened) -> None:
    said(opened("one"))
    second = opened("two")
    old, identity = second.cache.root, identity_of_build(second.cache.bits.identity(""), "two")
    assert said(second).restored == 200
    with second.cache.store.changes() as changes:
        builds = (build_digest("two"),)
        changes.put_model(ModelRecord(model=second.model_name, identity=identity, builds=builds, has_own_root=True))
        changes.record_purge()
    wait_for(lambda: has_own_root(second, old))
    wait_for_epoch(second)
    assert second.cache.root == root_hash(identity)
    # A request that begins before the process knows of the purge is not saved.
    second.cache.store.read_epochs()
    wait_for(lambda: second.cache.epochs == second.cache.store.epochs)
    assert [said(second).restored for _ in range(2)] == [0, 200]


@pytest.mark.cases(1)
@pytest.mark.usefixtures("no_recheck")
def test_a_request_has_one_root_and_one_epoch_though_both_change_while_it_begins(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    said(opened("one"))
    second, begin = opened("two"), PageCache.begin_sequence
    old, identity = second.cache.root, identity_of_build(second.cache.bits.identity(""), "two")
    own = ModelRecord(model=second.model_name, identity=identity, builds=(second.cache.bits.digest,), has_own_root=True)
    assert said(second).restored == 200

    def learn_of_another_root(pages: PageCache, *args: Any, **options: Any) -> Any:
        memory = begin(pages, *args, **options)
        if second.cache.root == old:
            with second.cache.store.changes() as changes:
                changes.put_model(own)
                changes.record_purge()
            for forget in second.cache.on_forget:
                forget()
        return memory

    monkeypatch.setattr(PageCache, "begin_sequence", learn_of_another_root)
    said(second, 230)
    assert has_own_root(second, old)
    assert second.cache.writer.flush(10)
    assert not content(second, second.cache.root), "it has begun with what memory has of the other build"
    assert [said(second).restored for _ in range(2)] == [0, 200]


def test_a_store_without_the_record_of_the_model_is_compared_too(opened: Opened) -> None:
    """A purge removed it, and a daemon of another build has saved something since."""
    first = opened("one")
    said(first)
    assert first.cache.writer.flush(10)
    wait_for(lambda: models(first) == [["one"]])
    with first.cache.store.changes() as changes:
        changes.delete_record("meta", model_key(first.cache.bits.identity("")))
    assert models(first) == []
    assert opened("two").cache.must_recheck


def models(engine: Engine) -> list[list[str]]:
    """The names of the builds in each record of a model."""
    names = {build_digest(name): name for name in ("one", "two", "three")}
    with engine.cache.store.snapshot() as snapshot:
        return [sorted(names[build] for build in model.builds) for _, model in snapshot.models()]


@pytest.mark.cases(1)
def test_a_purge_leaves_the_record_of_the_model_that_is_served(opened: Opened) -> None:
    said(opened("one"))
    second = opened("two")
    find_difference(second)
    own = second.cache.root
    second.cache.purge(PurgeFilter())
    wait_for(lambda: models(second) == [["two"]])
    assert opened("two").cache.root == own


def compute_as(build: str, engine: Engine, root: bytes) -> None:
    """Changes what is stored under a root as if another build had computed it, with the logits of replaced tails."""
    assert engine.cache.writer.flush(10)
    engine.pages.forget_idle()
    with engine.cache.store.changes() as changes:
        for name in [*changes.keys("usage")]:
            if (node := changes.node(name)) is not None and node.root == root:
                changes.delete_record("nodes", name)
                changes._put_record("nodes", name, encode_node(name, replace(node, build=build_digest(build))))
        for note in changes.notes_of(root, NoteKind.LOGITS):
            times, content = decode_note(note.key, bytes(changes.get_record("notes", note.key)))
            logits = content[:-BUILD_BYTES] + build_digest(build)
            changes.put_note(note.key, encode_note(note.key, logits, times, NO_PROMPT, ""))


@pytest.fixture
def beside(opened: Opened) -> Engine:
    """An engine whose saved prompts, with the logits of a replaced tail, are then those of a build that runs beside it:
    a purge of everyone had removed what told each of the other."""
    engine = opened("one")
    said(engine, 230)
    said(engine, 200)
    compute_as("two", engine, engine.cache.root)
    return engine


@pytest.mark.cases(2)
def test_what_a_build_stores_beside_another_one_is_used_once_it_was_compared(
    beside: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stored = content(beside, beside.cache.root)
    missed = said(beside, 230)
    assert (missed.restored, missed.saved) == (0, "none")
    assert beside.cache.bits.state == "beside"
    beside.pages.forget_idle()
    wait_for_recheck(beside)
    assert "stored prompt" in caplog.text
    assert [said(beside, number).restored for number in (230, 200)] == [230, 200]
    assert content(beside, beside.cache.root) == stored


@pytest.mark.cases(4)
@pytest.mark.parametrize("is_first", [True, False])
def test_of_two_builds_with_other_bits_that_run_at_once_the_first_one_keeps_the_root(
    beside: Engine, is_first: bool
) -> None:
    old, stored = beside.cache.root, content(beside, beside.cache.root)
    if not is_first:
        with beside.cache.store.changes() as changes:
            record = ModelRecord(
                model=beside.model_name, identity=beside.cache.bits.identity(""), builds=(build_digest("two"),)
            )
            changes.put_model(record)
    assert said(beside).restored == 0
    find_difference(beside)
    assert (beside.cache.root == old) == is_first
    # What is met again does not keep it from saving.
    beside.pages.forget_idle()
    assert said(beside).restored == 0
    assert beside.cache.bits.state == "settled"
    assert done(run(beside, tokens(150, seed=1))).cache.saved == "queued"
    assert content(beside, old).items() >= stored.items()


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ([(NodeKind.CHECKPOINT, 24, 30, b"own"), (NodeKind.BLOCK, 24, 32, b"other")], set()),
        ([(NodeKind.CHECKPOINT, 24, 30, b"other"), (NodeKind.BLOCK, 24, 32, b"own")], {b"other"}),
        ([(NodeKind.CHECKPOINT, 24, 30, b"own"), (NodeKind.TAIL, 24, 30, b"other")], set()),
        ([(NodeKind.BLOCK, 24, 30, b"other"), (NodeKind.CHECKPOINT, 30, 30, b"own")], {b"other"}),
    ],
    ids=["a block goes on", "a checkpoint", "two at one end", "a block ends there"],
)
def test_a_build_is_compared_by_state_that_a_restore_reads(
    last: list[tuple[NodeKind, int, int, bytes]], expected: set[bytes]
) -> None:
    layout, bits = SimpleNamespace(states=("a state",)), SimpleNamespace(is_to_compare=b"own".__ne__)
    comparison: Any = Recheck(Mock(cache=SimpleNamespace(layout=layout, bits=bits)))
    nodes = [
        SimpleNamespace(kind=kind, position=position, end=end, build=build)
        for kind, position, end, build in [(NodeKind.BLOCK, 0, 24, b"own"), *last]
    ]
    assert comparison._builds_of(nodes, 0, 30) == expected


def test_what_another_build_adds_to_a_long_prompt_is_compared(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind more tokens than are otherwise restored to be compared."""
    monkeypatch.setattr(recheck, "_MAX_TOKENS", 256)
    first = opened("one")
    said(first, 600, max_tokens=1)
    stored = content(first, first.cache.root)
    said(first, 900, max_tokens=1)
    kept = {name for name in content(first, first.cache.root) if name in stored}
    compute_as("three", first, first.cache.root)
    with first.cache.store.changes() as changes:
        for name in kept:
            node = changes.node(name)
            assert node is not None
            changes.delete_record("nodes", name)
            changes._put_record("nodes", name, encode_node(name, replace(node, build=build_digest("one"))))
    assert said(first, 900, max_tokens=1).restored < 900
    assert first.cache.bits.state == "beside"
    wait_for_recheck(first)
    assert build_digest("three") in first.cache.bits.equal
    first.pages.forget_idle()
    assert said(first, 900, max_tokens=1).restored == 900


@pytest.mark.cases(2)
def test_builds_that_the_record_calls_equal_need_one_comparison(opened: Opened) -> None:
    said(opened("one"))
    second = opened("two")
    wait_for_recheck(second)
    assert second.cache.writer.flush(10)
    wait_for(lambda: models(second) == [["one", "two"]])
    third = opened("three")
    wait_for_recheck(third)
    assert {*map(build_digest, ("one", "two", "three"))} <= third.cache.bits.equal


@pytest.mark.cases(2)
def test_what_a_third_build_has_left_under_a_root_is_not_restored(opened: Opened) -> None:
    """It had found a difference, and went to a root of its own."""
    first = opened("one")
    said(first)
    compute_as("three", first, first.cache.root)
    second = opened("two")
    assert second.cache.bits.state == "unchecked"
    assert said(second).restored == 0


def test_the_record_of_a_model_joins_builds_that_were_compared() -> None:
    def record(*builds: str) -> ModelRecord:
        return ModelRecord(model="a model", identity="{}", builds=tuple(sorted(map(build_digest, builds))))

    assert joined(None, record("one")) == record("one")
    assert joined(record(), record("one")) == record("one")
    assert joined(record("one"), record("one", "two")) == record("one", "two")
    assert joined(record("one", "two"), record("two", "three")) == record("one", "two", "three")
    assert joined(record("one"), record("two")) == record("one"), "the first one stays"


def _flipping_one_bit(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has each step of the recheck compute another bit."""
    flipped, compute = list[int](), IdleWork.compute_step

    def flip(self: IdleWork, model: AheadModel, sequence: KVSequence, token_ids: TokenIds) -> None:
        compute(self, model, sequence, token_ids)
        page = (sequence.tables[0].pages or sequence.states)[-1]
        assert page is not None
        assert page.rows is not None
        page.rows[0, 0] ^= 1
        flipped.append(sequence.num_tokens)

    monkeypatch.setattr(IdleWork, "compute_step", flip)
    return flipped


def test_a_request_goes_before_the_recheck(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    said(opened("one"))
    second = opened("two")
    used, ran, compute = second.pages.pool.used_bytes, list[int](), IdleWork.compute_step
    with running(second) as inbox:

        def note(self: IdleWork, model: AheadModel, sequence: KVSequence, token_ids: TokenIds) -> None:
            if not ran:
                inbox.submit(request(tokens(100, seed=5)), lambda _: None)
            ran.append(sequence.num_tokens)
            compute(self, model, sequence, token_ids)

        monkeypatch.setattr(IdleWork, "compute_step", note)
        wait_for(lambda: not second.cache.must_recheck)
    assert ran[0] == ran[1], "it began again"
    second.pages.forget_idle()
    wait_for(lambda: second.pages.pool.used_bytes == used)


@pytest.fixture
def hours() -> list[float]:
    """The hours by which an engine's clock is ahead, once `of_hours` is its clock."""
    return [0.0]


def of_hours(hours: list[float]) -> Callable[[], float]:
    return lambda: time.perf_counter() + 3600 * hours[0]


@pytest.mark.cases(1)
@pytest.mark.parametrize("num_tokens", [200, 3000])
def test_a_daemon_that_is_never_idle_compares_after_an_hour_and_then_saves(
    opened: Opened,
    num_tokens: int,
    hours: list[float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Requests that come meanwhile neither wait for it nor have it begin again."""
    caplog.set_level(logging.INFO)
    said(opened("one"), num_tokens, max_tokens=1)
    second, compute, computed = opened("two"), IdleWork.compute_step, list[tuple[int, int]]()
    second.clock = of_hours(hours)
    with running(second) as inbox, BusyClient(inbox) as client:

        def note(self: IdleWork, model: AheadModel, sequence: KVSequence, token_ids: TokenIds) -> None:
            computed.append((sequence.num_tokens, client.num_answered))
            compute(self, model, sequence, token_ids)

        monkeypatch.setattr(IdleWork, "compute_step", note)
        wait_for(lambda: client.num_answered > 20)
        assert second.cache.must_recheck
        assert not computed
        hours[0] = 1.1
        wait_for(lambda: not second.cache.must_recheck)
        answered = client.num_answered
        wait_for(lambda: client.num_answered > answered + 5)
    assert "computed again beside requests" in caplog.text
    assert [start for start, _ in computed] == sorted({start for start, _ in computed})
    assert len(computed) < 90 or computed[0][1] < computed[-1][1], "requests were answered meanwhile"
    assert said(second, 300).saved == "queued"


@pytest.mark.parametrize("model", ["qwen3_next"], indirect=True)
def test_a_request_that_lacks_memory_does_not_wait_for_a_comparison_beside_it(
    opened: Opened, hours: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    said(opened("one"), 2000, max_tokens=1)
    second, compute, large = opened("two", kv_memory=5 << 18), IdleWork.compute_step, list[Client]()
    second.clock = of_hours(hours)
    with running(second) as inbox:

        def send(self: IdleWork, model: AheadModel, sequence: KVSequence, token_ids: TokenIds) -> None:
            if not large:
                hours[0] = 1.1
                large.append(Client(inbox, request(tokens(second.max_positions - 20, seed=5), max_tokens=1)))
            compute(self, model, sequence, token_ids)

        monkeypatch.setattr(IdleWork, "compute_step", send)
        wait_for(lambda: large and large[0].events and isinstance(large[0].events[-1], DoneEvent))
        assert second.cache.must_recheck
        hours[0] += 1
        inbox.wake()
        wait_for(lambda: not second.cache.must_recheck)


@pytest.mark.cases(2)
@pytest.mark.parametrize("bits", ["bits", "other bits"])
def test_blocks_of_another_build_are_useless_to_this_one(opened: Opened, bits: str) -> None:
    """Of one with other bits, and of one whose root differs by the build alone; its encoded pictures too."""
    first = opened("one")
    said(first)
    old_identity = first.cache.bits.identity("")
    second = opened("two", bits)
    if bits == "bits":
        find_difference(second)
    said(second)
    assert second.cache.writer.flush(10)
    store: Store = second.cache.store
    with store.changes() as changes:
        record = second.cache.root_record(SHARED)
        old_pictures = replace(record, identity=f"{ENCODED_PICTURES}{record.layout} {old_identity}")
        changes.put_root(root_hash(old_pictures.identity), old_pictures)
    with store.snapshot() as snapshot:
        (old,) = snapshot.outdated_roots(second.cache.root_record(SHARED).identity, "")
        is_useless = snapshot.saves_nothing(store.evictor.served)
        assert is_useless is not None
        useless = {snapshot.node(name).root for name in snapshot.keys("usage") if is_useless(name)}  # type: ignore[union-attr]
        assert old == root_hash(old_identity)
        assert is_outdated(old_pictures.model_identity, store.evictor.served)
    assert old in useless
    # Of a model with states, blocks are of no use without a checkpoint behind them.
    assert useless == {old} or (second.cache.layout.states and useless == {old, second.cache.root})


OF_EXP2 = struct.pack("<f", 5.5504109e-2)
"""A factor in `exp2` (`source/vector.h`), of which attention and gates are made."""


def other_build(folder: Path, *, flips_a_bit: bool) -> dict[str, str]:
    """Copies the package with other sources and the library that would be made of them, in which a bit of each kernel
    may be another one. Returns the environment of a process that runs the copy."""
    own_package = build.SOURCES.parents[1]
    package = shutil.copytree(own_package, folder / "diskprefix")
    (folder / "policies").symlink_to(own_package.parent / "policies")
    for source, comment in (("native/calls.py", "#"), ("native/source/vector.h", "//")):
        with (package / source).open("a") as file:
            file.write(f"{comment} {folder.name}\n")
    library, own = package / "native" / build.LIBRARY.name, build.digest().encode()
    digest = runpy.run_path(str(package / "native/build.py"))["digest"]().encode()
    content = library.read_bytes()
    assert own in content
    assert OF_EXP2 in content
    flipped = bytes((OF_EXP2[0], OF_EXP2[1] ^ 0x40, *OF_EXP2[2:]))
    library.write_bytes(content.replace(own, digest).replace(OF_EXP2, flipped if flips_a_bit else OF_EXP2))
    return clean_environment(PYTHONPATH=str(folder), PYTHONSAFEPATH="1")


@pytest.mark.slow
def test_daemons_of_other_builds_restore_what_has_their_bits(chat_model: Path, tmp_path: Path) -> None:
    flags, said = serve_flags(chat_model, tmp_path / "kv"), list[dict[str, Any]]()
    for name, flips_a_bit in (("own", False), ("same bits", False), ("a flipped bit", True)):
        environment = None if name == "own" else other_build(tmp_path / name, flips_a_bit=flips_a_bit)
        with DaemonProcess(*flags, environment=environment, fresh=environment is not None) as daemon:
            said.append(ask(daemon.wait_ready(), "Name three rivers. ")["prefix_cache"])
            if name == "same bits":
                daemon.wait_for_line("computes the bits of an earlier one: [0-9]+ stored prompts? compared")
            daemon.wait_saved()
            daemon.stop()
    own, same, other = said
    assert (own["restored"], own["miss_reason"]) == (0, "new")
    assert (same["restored"], same["source"]) == (own["boundary"], "disk")
    assert (other["restored"], other["miss_reason"]) == (0, "upgraded")
