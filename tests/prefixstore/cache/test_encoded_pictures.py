"""The encoder's outputs in the store: found again bit for bit, by their tenant only, and gone like any block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from diskprefix.errors import CacheError, StoreFull, StoreUnavailable
from diskprefix.prefixstore.cache.encoded_pictures import EncodedPictures
from diskprefix.prefixstore.kv.numbers import Array, converted
from diskprefix.prefixstore.store.note_record import NoteKind, StoredNote
from diskprefix.prefixstore.store.purge import PurgeFilter
from diskprefix.prefixstore.store.verify import verify_index, verify_payloads
from diskprefix.prefixstore.store.writer import WriterLimits
from diskprefix.runtime.plan.plan_runner import PlanRunner
from diskprefix.tokens import picture_ids
from diskprefix.values import CacheOptions, Picture, Prompt, Scope, Tenant
from tests.prefixstore.cache.opening import AUTO, FULL, OFF, Opened, is_sound
from tests.prefixstore.store.building import damage
from tests.runner import BLOCK, VOCAB, Answer, Runner, random_prompt, same

LEVELS, HIDDEN = 3, 512
ALICE = replace(AUTO, tenant=Tenant().with_salt("alice"))


def picture(name: int = 1, num_tokens: int = 2 * BLOCK + 5) -> Picture:
    return Picture(bytes([name] * 16), "<image>", num_tokens, {}, "640x480", 1000, "messages[0]", dict)


def rows_of(one: Picture) -> Array:
    numbers = np.random.default_rng(one.name[0]).standard_normal((LEVELS, one.num_tokens, HIDDEN), np.float32)
    return converted(numbers, "bfloat16")


def pictures(runner: Runner) -> EncodedPictures:
    return EncodedPictures(runner.cache, LEVELS, HIDDEN, "bfloat16")


def save(runner: Runner, one: Picture, options: CacheOptions = AUTO, *, is_flushed: bool = True) -> None:
    pictures(runner).save(one, rows_of(one), options, runner.cache.epoch(options.tenant), encode_s=2.0)
    runner.cache.finish_aside()
    if is_flushed:
        runner.flush()


def finds(runner: Runner, one: Picture, options: CacheOptions = AUTO) -> bool:
    found = pictures(runner).load(one, options)
    assert found is None or np.array_equal(found, rows_of(one))
    return found is not None


@pytest.fixture
def runner(opened: Opened) -> Iterator[Runner]:
    one = opened("grid")
    yield one
    assert is_sound(one)


@pytest.mark.parametrize("num_tokens", [1, BLOCK, 2 * BLOCK, 2 * BLOCK + 5])
def test_an_output_is_found_in_memory_on_the_disk_and_after_a_restart(runner: Runner, num_tokens: int) -> None:
    one = picture(num_tokens=num_tokens)
    assert not finds(runner, one)
    save(runner, one, is_flushed=False)
    assert finds(runner, one)
    runner.flush()
    assert finds(runner, one)
    runner.reopen()
    assert finds(runner, one)
    assert not finds(runner, picture(2, num_tokens))
    assert runner.cache.writer.pending_bytes == 0
    store = runner.cache.store
    payloads = verify_payloads(store, dict(verify_index(store).stored_bytes), lambda _: None)
    assert (payloads.problems, payloads.num_pieces > 0) == ((), True)
    store.compact()
    assert finds(runner, one)


def test_one_that_is_saved_again_before_it_was_copied_is_saved(
    runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    one, waits, saving = picture(), threading.Event(), pictures(runner)
    runner.cache.run_aside(lambda: None if waits.wait(30) else pytest.fail("nobody goes on"))
    for _ in range(2):
        saving.save(one, rows_of(one), AUTO, runner.cache.store.epochs.of(""))
    waits.set()
    runner.cache.finish_aside()
    runner.flush()
    assert finds(runner, one)
    assert not caplog.messages


def test_another_form_of_the_output_is_another_root(runner: Runner) -> None:
    save(runner, picture())
    assert EncodedPictures(runner.cache, LEVELS, HIDDEN, "float16").load(picture(), AUTO) is None
    assert EncodedPictures(runner.cache, 1, HIDDEN, "bfloat16").load(picture(), AUTO) is None


def test_other_tenants_never_find_it_and_a_purge_of_one_leaves_the_others(runner: Runner) -> None:
    save(runner, picture(), ALICE)
    assert finds(runner, picture(), ALICE)
    assert not finds(runner, picture())
    save(runner, picture())
    assert runner.cache.purge(PurgeFilter(salt=str(ALICE.tenant))).blocks == 3
    assert finds(runner, picture())
    assert not finds(runner, picture(), ALICE)


@pytest.mark.parametrize("chosen", [PurgeFilter(), PurgeFilter(model="tiny")], ids=["all", "model"])
def test_a_purge_removes_it_with_its_root(runner: Runner, chosen: PurgeFilter) -> None:
    save(runner, picture())
    purged = runner.cache.purge(chosen)
    assert (purged.blocks, purged.roots) == (3, 1)
    assert not finds(runner, picture())


def test_the_budget_holds_and_the_least_recently_used_goes_first(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = opened("grid", kv_cache_budget=16 << 20)
    store, now, names = runner.cache.store, runner.cache.store.clock(), range(1, 50)
    for name in names:
        monkeypatch.setattr(store, "clock", partial(float, now + 10 * name))
        save(runner, picture(name, 8 * BLOCK))
        assert finds(runner, picture(1, 8 * BLOCK))
    assert runner.cache.writer.evicted
    left = [name for name in names if finds(runner, picture(name, 8 * BLOCK))]
    assert left == [1, *names[1 - len(left) :]]
    assert is_sound(runner)


def test_it_is_kept_as_long_as_the_request_asks_after_its_last_use(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now = runner.cache.store, runner.cache.store.clock()
    save(runner, picture(), replace(AUTO, ttl_s=100.0))
    with store.snapshot() as snapshot:
        assert {usage["ttl_s"] for usage in snapshot.usages().records} == {100}
    for later, is_left in ((90, True), (180, True), (400, False)):
        monkeypatch.setattr(store, "clock", partial(float, now + later))
        store.evictor.expire(0.0)
        assert finds(runner, picture(), replace(AUTO, ttl_s=100.0)) == is_left
        runner.flush()
        store.write_from(runner.cache.writer._using)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_damaged_block_goes_and_the_output_is_saved_again(runner: Runner, number: int) -> None:
    save(runner, picture())
    with runner.cache.store.snapshot() as snapshot:
        of_places = {snapshot.node(name).position: name for name in snapshot.keys("usage")}  # type: ignore[union-attr]
    damage(runner.cache.store, of_places[number * BLOCK])
    assert not finds(runner, picture())
    runner.wait_for(lambda: runner.cache.store.counts()["blocks"] == number)
    save(runner, picture())
    assert finds(runner, picture())


def test_what_is_not_finite_is_never_found(runner: Runner) -> None:
    rows = rows_of(picture())
    rows[1, 20] = 0x7FC0
    pictures(runner).save(picture(), rows, AUTO, runner.cache.store.epochs.of(""))
    runner.cache.finish_aside()
    assert pictures(runner).load(picture(), AUTO) is None
    runner.flush()
    assert pictures(runner).load(picture(), AUTO) is None


@pytest.mark.parametrize(
    "options",
    [OFF, replace(AUTO, save=False), CacheOptions(scope=Scope("tokens", 1000))],
    ids=["off", "only restores", "limit"],
)
def test_a_request_that_does_not_save_all_it_computes_saves_none(runner: Runner, options: CacheOptions) -> None:
    save(runner, picture(), options)
    assert not finds(runner, picture())
    save(runner, picture())
    assert finds(runner, picture(), options) == (options is not OFF)


def test_the_write_budget_and_the_buffer_limit_it(opened: Opened) -> None:
    runner = opened("grid")
    budget = runner.cache.store.meter
    budget.budget_bytes = 4 * rows_of(picture()).nbytes
    for name in range(1, 9):
        save(runner, picture(name))
    assert 0 < sum(finds(runner, picture(name)) for name in range(1, 9)) <= 3
    assert runner.cache.counters["unaffordable"] >= 5
    budget.budget_bytes, runner.cache.writer._buffer_bytes = 0, 10
    save(runner, picture(20))
    assert not finds(runner, picture(20))
    assert runner.cache.writer.dropped == 1


def test_the_room_of_an_output_that_waits_is_kept_if_its_note_fails(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Any:
        raise MemoryError

    writer, rows = runner.cache.writer, rows_of(picture())
    writer.pause_writing()
    writer.limits = WriterLimits(pause_s=600.0)
    writer.pause_writing()
    with monkeypatch.context() as patch:
        patch.setattr(type(writer.notes), "put", failing)
        save(runner, picture(), is_flushed=False)
    assert (writer.num_pending, writer._reserved_bytes) == (1, rows.nbytes)
    writer.resume_writing()
    runner.flush()
    assert writer._reserved_bytes == 0
    assert finds(runner, picture())


@pytest.mark.parametrize("error", [StoreUnavailable, StoreFull])
def test_a_failing_store_is_a_miss(runner: Runner, monkeypatch: pytest.MonkeyPatch, error: type[CacheError]) -> None:
    def failing(*_: Any) -> Any:
        raise error("the disk fails")

    with monkeypatch.context() as patch:
        patch.setattr(runner.cache.store.reads, "snapshot", failing)
        assert pictures(runner).load(picture(), AUTO) is None
    with monkeypatch.context() as patch:
        patch.setattr(runner.cache.store, "publish", failing)
        save(runner, picture())
    assert not finds(runner, picture())
    assert runner.cache.counters["errors"] == 1
    save(runner, picture())
    assert finds(runner, picture())


def test_a_store_that_cannot_be_written_still_gives_what_it_has(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(runner, picture())
    monkeypatch.setattr(runner.cache.store, "_problem", "the file system is read-only")
    save(runner, picture(2))
    assert (finds(runner, picture()), finds(runner, picture(2))) == (True, False)


def pictured(runner: Runner, pictures: str, num_tokens: int = 300) -> Answer:
    """A prompt with text before and behind each picture, given by its letter. Their tokens count as text here."""
    runner.model.get_input_embeddings().register_forward_pre_hook(lambda _, args: (args[0] % VOCAB,))
    parts = [random_prompt(0, 100)]
    for picture in pictures:
        parts += [picture_ids(picture.encode(), num_tokens), random_prompt(ord(picture) % 2, 50)]
    return runner.run_prompt(Prompt(np.concatenate(parts)), FULL)


@pytest.mark.parametrize("name", ["grid", "token"])
def test_a_prompt_with_pictures_is_restored_like_text_up_to_another_picture(
    opened: Opened, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A plan does not call the module whose input `pictured` changes.
    run = PlanRunner.run
    monkeypatch.setattr(PlanRunner, "run", lambda plan, runs, ids, *rest: run(plan, runs, ids % VOCAB, *rest))
    runner, cold = opened(name), opened(name)
    pictured(runner, "ab")
    runner.reopen()
    longer = pictured(runner, "abc")
    assert longer.report.restored >= 800 - BLOCK
    assert same(longer, pictured(cold, "abc"))
    # The second picture has another neighbour of the same text behind it.
    other = pictured(runner, "adc")
    assert (other.report.restored, other.report.miss_reason) == (450 - 450 % BLOCK if name == "grid" else 450, "image")
    assert pictured(runner, "abcd").report.miss_reason is None


def test_deleting_a_saved_prompt_removes_its_pictures_but_not_those_of_others(runner: Runner) -> None:
    pictured(runner, "ab")
    pictured(runner, "ac")
    pictures_of = {name: replace(picture(num_tokens=300), name=name.encode()) for name in "abcd"}
    for one in pictures_of.values():
        save(runner, one, FULL)
    with runner.cache.store.snapshot() as snapshot:
        entry = next(name for name, _ in snapshot.entries())
    assert {note.kind for note in noted(runner)} == {NoteKind.PICTURE}
    purged = runner.cache.purge(PurgeFilter(entries=frozenset({entry})))
    assert (purged.entries, purged.left_blocks) == (1, 0)
    left = [name for name, one in pictures_of.items() if finds(runner, one)]
    assert left in (["a", "b", "d"], ["a", "c", "d"])
    assert len(noted(runner)) == 3


def noted(runner: Runner) -> list[StoredNote]:
    with runner.cache.store.snapshot() as snapshot:
        return [note for note in snapshot.notes() if note.kind == NoteKind.PICTURE]
