from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from diskprefix.prefixstore.store import store as store_module
from diskprefix.prefixstore.store import write_counter as written_module
from diskprefix.prefixstore.store.save import Save
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.store import Store
from diskprefix.prefixstore.store.write_counter import WriteMeter, WrittenBytes, read_written
from diskprefix.prefixstore.store.writer import Writer
from tests.prefixstore.store.building import BLOCK, Clock, open_store, prompt, publication

HOUR_S = 3600.0


def test_what_was_written_counts_for_a_day_and_in_all() -> None:
    written = WrittenBytes()
    for hour, num_bytes in ((0.5, 100), (1.5, 10), (20.0, 1)):
        written.add(num_bytes, hour * HOUR_S)
    assert [written.last_day(hour * HOUR_S) for hour in (20.5, 24.9, 25.0, 26.0, 44.9, 45.0)] == [111, 111, 11, 1, 1, 0]
    for hour in range(100, 200):
        written.add(0, hour * HOUR_S)
    assert written.total == 111
    assert 0 not in written.hours, "the record stays small"


@pytest.mark.parametrize("wrong", [0, 1030, 10**6])
def test_a_clock_that_is_wrong_once_forgets_nothing(wrong: int) -> None:
    written = WrittenBytes()
    for hour in (*range(976, 1000), wrong, 1000):
        written.add(1, hour * HOUR_S)
    assert written.last_day(1000 * HOUR_S) == 25


@pytest.mark.parametrize("is_counted", [True, False], ids=["by the kernel", "in whole pages"])
def test_pages_on_the_disk_are_counted_and_all_processes_add_to_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_counted: bool
) -> None:
    if not is_counted:
        monkeypatch.setattr(written_module, "_IO", tmp_path / "none")
    clock, before = Clock(), 0
    for number in range(3):
        store = open_store(tmp_path / "store", clock=clock)
        store.meter.budget_bytes = [1 << 30, None, 0][number]
        pub = publication(store, prompt(number, 4 * BLOCK), payload_bytes=400_000)
        writer = Writer(store, buffer_bytes=1 << 30)
        old = pages(tmp_path / "store")
        writer.queue_publication(Save(pub.epoch), pub, is_last=True)
        assert writer.close(30)
        changed_bytes = 4096 * len(pages(tmp_path / "store") - old)
        total = store.written().total
        assert 0.8 * changed_bytes < total - before < 1.2 * changed_bytes
        assert store.meter.total_bytes == total - before
        with store.snapshot() as snapshot:
            written = read_written(snapshot)
            assert written.budget_bytes == [1 << 30, 1 << 30, 0][number], "a tool has none of its own"
            assert total - (1 << 17) < written.total < total, "but for what closing the store has written itself"
        store.close()
        before = written.total


def pages(folder: Path) -> set[tuple[int, bytes]]:
    """The pages of a store's file and where they are."""
    content = (folder / "data.mdb").read_bytes()
    return {(at, content[at : at + 4096]) for at in range(0, len(content), 4096)}


@pytest.mark.parametrize("readable", [(False, False), (False, True), (True, False)])
def test_a_count_that_cannot_be_read_does_not_count_the_life_of_the_thread(
    store: Store, monkeypatch: pytest.MonkeyPatch, readable: tuple[bool, bool]
) -> None:
    answers = iter([10**12 if is_readable else None for is_readable in readable])
    monkeypatch.setattr(written_module, "_written_by_thread", lambda: next(answers))
    before = store.meter.total_bytes
    with store.changes() as changes:
        changes.put_meta("x", bytes(100_000))
    assert 100_000 < store.meter.total_bytes - before < 120_000


@pytest.mark.parametrize("is_counted", [True, False])
def test_what_is_rolled_back_was_not_written(
    store: Store, monkeypatch: pytest.MonkeyPatch, *, is_counted: bool
) -> None:
    if not is_counted:
        monkeypatch.setattr(written_module, "_IO", Path("none"))

    def fail() -> None:
        with store.changes() as changes:
            changes.put_meta("x", bytes(1_000_000))
            raise RuntimeError

    before = store.meter.total_bytes
    with pytest.raises(RuntimeError):
        fail()
    assert store.meter.total_bytes - before < 1000


def test_what_is_committed_and_not_known_as_recorded_yet_counts_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.meter.count(1 << 20)
    seen = []
    real: Callable[[int], None] = store.meter.count

    def count(num_bytes: int) -> None:
        """Comes between the commit and what follows it."""
        seen.append(store.written().total)
        real(num_bytes)

    monkeypatch.setattr(store.meter, "count", count)
    store.publish(publication(store, prompt(1, BLOCK)))
    assert seen == [1 << 20]
    assert store.written().total == store.meter.total_bytes


def test_what_a_tool_writes_is_recorded_when_it_closes_the_store(tmp_path: Path) -> None:
    for number in range(2):
        store = open_store(tmp_path / "store")
        store.publish(publication(store, prompt(number, BLOCK), payload_bytes=400_000))
        store.close()
    with open_store(tmp_path / "store").snapshot() as snapshot:
        assert read_written(snapshot).total > 800_000


def test_a_damaged_record_counts_as_none(store: Store) -> None:
    with store.changes() as changes:
        changes.put_meta("written", b"damaged")
    assert store.written().total == store.meter.total_bytes > 0


def test_bytes_count_as_they_are_handed_to_the_kernel(tmp_path: Path) -> None:
    meter = WriteMeter()
    size = 100 if written_module._IO.exists() else 0
    with meter.measure():
        (tmp_path / "file").write_bytes(bytes(100))
    assert meter.total_bytes == size


def test_what_is_recorded_while_the_record_is_read_counts_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.meter.count(1 << 20)

    def read(snapshot: Snapshot) -> WrittenBytes:
        monkeypatch.undo()
        found = read_written(snapshot)
        store.record_written()
        return found

    monkeypatch.setattr(store_module, "read_written", read)
    assert store.written().total == store.meter.total_bytes == store.written().total
