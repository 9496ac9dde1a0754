"""The savings of the cache for each root are kept in the store, and add up over processes and days."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from diskprefix.errors import StoreUnavailable
from diskprefix.prefixstore.store.changes import Changes
from diskprefix.prefixstore.store.note_record import NoteKind, note_key
from diskprefix.prefixstore.store.schema import RootRecord
from diskprefix.prefixstore.store.statistics.lost_tokens import LostTokens, joined, of_last_day
from diskprefix.prefixstore.store.statistics.savings import Savings, SavingsLog, Tally, read_savings, total_savings
from diskprefix.prefixstore.store.store import Store
from diskprefix.prefixstore.store.writer import Writer
from tests.faults.damage import damaged
from tests.prefixstore.store.building import ROOT, Clock, is_clean, layout_of, open_store
from tests.waiting import wait_for

RECORD = RootRecord(model="tiny", block_size=16, layout=layout_of(100), created_at=0.0)
OTHER = b"o" * 16
DAY_S = 86400.0


def hit(tokens: int = 100) -> Tally:
    return Tally(requests=1, prompt_tokens=tokens + 20, restored_tokens=tokens, saved_s=tokens / 100)


def stored(store: Store) -> dict[bytes, Savings]:
    with store.snapshot() as snapshot:
        return read_savings(snapshot)


def test_counts_outlive_the_process_and_those_of_several_add_up(tmp_path: Path) -> None:
    clock = Clock(1e9)
    store = open_store(tmp_path, clock=clock)
    for _ in range(2):
        log = SavingsLog(store)
        log.record_request(store.epochs.of(""), ROOT, RECORD, hit())
        log.record_request(store.epochs.of(""), OTHER, RECORD, Tally(requests=1, prompt_tokens=7))
        store.write_from(log.writing)
        clock.now += 1
    store.close()
    store = open_store(tmp_path)
    found = stored(store)
    assert (found[ROOT].total.requests, found[ROOT].total.saved_s, found[ROOT].since) == (2, 2.0, 1e9)
    assert found[OTHER].total.requests == 2
    with store.snapshot() as snapshot:
        assert total_savings(snapshot).total.prompt_tokens == 2 * 120 + 2 * 7
    assert is_clean(store)


def test_a_process_counts_what_it_saved_since_its_start(store: Store) -> None:
    for _ in range(2):
        log = SavingsLog(store)
        for root in (ROOT, OTHER):
            log.record_request(store.epochs.of(""), root, RECORD, hit())
            store.write_from(log.writing)
        assert log.saved_s == 2.0, "what others saved, and what was written before, is not in it"


def test_today_is_counted_apart_and_days_long_past_are_forgotten(store: Store, clock: Clock) -> None:
    log = SavingsLog(store)
    for _ in range(40):
        for _ in range(2):
            log.record_request(store.epochs.of(""), ROOT, RECORD, hit())
            store.write_from(log.writing)
        clock.now += DAY_S
    found, last = stored(store)[ROOT], clock.now - DAY_S
    assert found.today(last).requests == 2
    assert found.today(clock.now).requests == 0
    assert (len(found.days), found.total.requests) == (30, 80)


def test_what_is_not_written_yet_is_read_too_and_nothing_is_counted_twice(store: Store) -> None:
    log = SavingsLog(store)
    log.record_request(store.epochs.of(""), ROOT, RECORD, hit())
    assert stored(store) == {}
    for _ in range(2):
        assert log.total().total.requests == 1
        store.write_from(log.writing)
        assert stored(store)[ROOT].total.requests == 1


def test_counts_that_are_being_written_are_read_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    log = SavingsLog(store)
    log.record_request(store.epochs.of(""), ROOT, RECORD, hit())
    add, found = log._add_waiting, list[int]()
    reader = threading.Thread(target=lambda: found.append(log.total().total.requests))

    def slow(waiting: Any, changes: Changes) -> None:
        reader.start()
        reader.join(0.05)
        add(waiting, changes)

    monkeypatch.setattr(log, "_add_waiting", slow)
    store.write_from(log.writing)
    reader.join(30)
    assert found == [1]


def test_counts_are_in_the_store_though_its_writer_is_never_closed(store: Store) -> None:
    log = SavingsLog(store)
    writer = Writer(store, buffer_bytes=1 << 20, also_writes=(log.writing,))
    log.record_request(store.epochs.of(""), ROOT, RECORD, hit())
    wait_for(lambda: ROOT in stored(store))
    writer.close(30)


def test_what_cannot_be_written_is_kept_and_counted_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    log = SavingsLog(store)
    log.record_request(store.epochs.of(""), ROOT, RECORD, hit())

    def fail() -> None:
        raise StoreUnavailable("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(store, "changes", fail)
        with pytest.raises(StoreUnavailable):
            store.write_from(log.writing)
    log.record_request(store.epochs.of(""), ROOT, RECORD, hit())
    store.write_from(log.writing)
    assert stored(store)[ROOT].total.requests == 2


def test_a_damaged_record_is_left_out_and_begins_anew(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    log = SavingsLog(store)
    log.record_request(store.epochs.of(""), ROOT, RECORD, hit())
    store.write_from(log.writing)
    store.close()
    with damaged(tmp_path) as records:
        records.flip("notes", note_key(ROOT, NoteKind.SAVINGS, ""), 40)
    store = open_store(tmp_path)
    assert stored(store) == {}
    log = SavingsLog(store)
    log.record_request(store.epochs.of(""), ROOT, RECORD, hit())
    store.write_from(log.writing)
    assert stored(store)[ROOT].total.requests == 1


def lost(hour: int, tokens: int, **fields: Any) -> LostTokens:
    return LostTokens(hour=hour, cause="diverged", tokens=tokens, **fields)


def test_tokens_that_were_computed_again_add_up_over_processes_for_a_day(tmp_path: Path) -> None:
    for _ in range(2):
        store = open_store(tmp_path)
        log = SavingsLog(store)
        log.record_request(
            store.epochs.of(""), ROOT, RECORD, Tally(), [lost(100, 7, client="a"), lost(101, 5, client="b")]
        )
        store.write_from(log.writing)
        store.close()
    store = open_store(tmp_path)
    rows = stored(store)[ROOT].lost
    assert [(row.hour, row.client, row.tokens, row.requests) for row in rows] == [(100, "a", 14, 2), (101, "b", 10, 2)]
    assert [row.tokens for row in of_last_day(rows, 101 * 3600.0)] == [14, 10]
    assert [row.tokens for row in of_last_day(rows, 124 * 3600.0)] == [10]
    assert of_last_day(rows, 0.0) == [], "the clock was wrong"


@pytest.mark.parametrize("hours", [(100, 101), (101, 100)])
def test_a_row_of_the_last_day_has_the_last_of_its_hours(hours: tuple[int, int]) -> None:
    kept = joined([lost(hour, tokens) for hour, tokens in zip(hours, (7, 5), strict=True)])
    assert sorted((row.hour, row.tokens) for row in kept) == sorted(zip(hours, (7, 5), strict=True))
    assert of_last_day(kept, 103 * 3600.0) == [lost(101, 12, requests=2)]


def test_hours_before_the_last_day_and_the_smallest_rows_are_dropped() -> None:
    rows = joined([lost(9, 10**6), *(lost(99, tokens, line=str(tokens)) for tokens in range(1, 300))])
    assert [row.tokens for row in rows] == [*range(299, 171, -1)]


def test_counting_does_not_wait_for_a_sum_that_waits_for_the_disk(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, may_read = SavingsLog(store), threading.Event()
    log.record_request(store.epochs.of(""), ROOT, RECORD, hit())
    snapshot, begun, totals = store.reads.snapshot, threading.Event(), list[Savings]()

    def late() -> Any:
        begun.set()
        assert may_read.wait(60)
        return snapshot()

    monkeypatch.setattr(store.reads, "snapshot", late)
    summing = threading.Thread(target=lambda: totals.append(log.total()))
    counting = threading.Thread(target=log.record_request, args=(store.epochs.of(""), ROOT, RECORD, hit()))
    summing.start()
    assert begun.wait(60)
    counting.start()
    counting.join(5)
    was_waiting = counting.is_alive()
    may_read.set()
    for thread in (counting, summing):
        thread.join()
    assert not was_waiting
    assert totals[0].total.requests == 2
