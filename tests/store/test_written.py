from __future__ import annotations

from pathlib import Path

import pytest

from diskprefix.store import written as written_module
from diskprefix.store.store import Store
from diskprefix.store.writer import Writer
from diskprefix.store.written import WrittenBytes, read_written
from tests.store.building import BLOCK, Clock, open_store, prompt, publication

HOUR_S = 3600.0


def test_what_was_written_counts_for_a_day_and_in_all() -> None:
    written = WrittenBytes()
    for hour, num_bytes in ((0.5, 100), (1.5, 10), (20.0, 1)):
        written.add(num_bytes, hour * HOUR_S)
    assert [written.last_day(hour * HOUR_S) for hour in (20.5, 24.9, 25.0, 26.0, 44.9, 45.0)] == [111, 111, 11, 1, 1, 0]
    written.add(0, 100 * HOUR_S)
    assert (written.total, written.hours) == (111, {100: 0})


def test_hours_of_a_clock_that_was_wrong_do_not_count_for_ever() -> None:
    written = WrittenBytes()
    written.add(100, 1000 * HOUR_S)
    assert written.last_day(990 * HOUR_S) == 100
    assert written.last_day(900 * HOUR_S) == 0


@pytest.mark.parametrize("is_counted", [True, False], ids=["by the kernel", "in whole pages"])
def test_pages_on_the_disk_are_counted_and_all_processes_add_to_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_counted: bool
) -> None:
    if not is_counted:
        monkeypatch.setattr(written_module, "_IO", tmp_path / "none")
    clock, totals = Clock(), []
    for number in range(3):
        store = open_store(tmp_path / "store", clock=clock)
        store.meter.budget_bytes = [1 << 30, None, 0][number]
        pub = publication(store, prompt(number, 4 * BLOCK), payload_bytes=20_000)
        writer = Writer(store, buffer_bytes=1 << 30)
        assert writer.reserve(pub.payload_bytes)
        writer.submit(pub, reserved_bytes=pub.payload_bytes)
        assert writer.close(30)
        totals.append(store.written().total)
        with store.snapshot() as snapshot:
            unrecorded = store.meter.waiting_bytes
            assert read_written(snapshot).budget_bytes == [1 << 30, 1 << 30, 0][number], "a tool has none of its own"
            assert read_written(snapshot).total + unrecorded == totals[-1]
            assert unrecorded < 1 << 17, "what closing the store has written itself"
        store.close()
    first, second, third = totals
    assert pub.payload_bytes < first < 3 * pub.payload_bytes + (1 << 17)
    assert second - first > pub.payload_bytes
    assert third - second > pub.payload_bytes


def test_a_damaged_record_counts_as_none(store: Store) -> None:
    with store.changes() as changes:
        changes.put_meta("written", b"damaged")
    assert store.written().total == store.meter.waiting_bytes > 0
