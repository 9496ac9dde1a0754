"""A little of `tools/bench powerloss`: every state in which a power failure may leave the disk is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.closing import needs
from tests.faults.power import deeds
from tests.faults.power.images import Moment
from tests.faults.power.recording import FOLDER, Disk, Event, Op, record
from tests.faults.seeds import part_of
from tools.faults.powerloss import (
    FAULTS,
    MUTANTS,
    PARTS,
    Part,
    Result,
    check_moments,
    record_faults,
    record_part,
    run_faults,
)

FILE, DIRECTORY = 7, 3


def event(op: Op, path: str, *, ino: int = FILE, offset: int = 0, data: bytes = b"", other: str = "") -> Event:
    return Event(op, ino, offset, len(data), path, other, data)


def disk_after(*events: Event) -> Disk:
    disk = Disk()
    for one in events:
        disk.apply(one)
    return disk


def contents(disk: Disk, name: str, samples: int = 40) -> set[bytes | None]:
    """Returns what a file may hold after a power failure; None where it is not there."""
    return {image.files.get(name) for image in Moment(disk).images(0, samples)}


CREATED = (event(Op.CREATE, "a"), event(Op.SYNC, ".", ino=DIRECTORY))
PAGES = bytes([1]) * 4096 + bytes([2]) * 4096


def test_what_no_barrier_covers_is_on_the_disk_or_not_in_any_order() -> None:
    disk = disk_after(*CREATED, event(Op.WRITE, "a", data=PAGES))
    found = contents(disk, "a")
    assert {b"", PAGES, PAGES[:4096], bytes(4096) + PAGES[4096:]} <= found
    assert any(content and len(content) % 4096 == 512 for content in found), "torn in a page"


def test_what_a_barrier_covers_is_on_the_disk() -> None:
    disk = disk_after(*CREATED, event(Op.WRITE, "a", data=PAGES), event(Op.SYNC, "a"))
    assert contents(disk, "a") == {PAGES}


def test_a_barrier_of_a_range_leaves_the_rest() -> None:
    part = Event(Op.SYNC, FILE, 4096, 10, "a", "", b"")
    disk = disk_after(*CREATED, event(Op.WRITE, "a", data=PAGES), part)
    assert contents(disk, "a") >= {PAGES, bytes(4096) + PAGES[4096:]}
    assert all(content is not None and content[4096:] == PAGES[4096:] for content in contents(disk, "a"))


@pytest.mark.parametrize("keeps", [False, True])
def test_a_barrier_that_failed_is_not_made_up_for_by_the_next(keeps: bool) -> None:
    disk = Disk(fail_keeps=keeps)
    for one in (*CREATED, event(Op.WRITE, "a", data=PAGES), event(Op.SYNC_FAILED, "a"), event(Op.SYNC, "a")):
        disk.apply(one)
    assert contents(disk, "a") == {PAGES if keeps else b""}


def test_a_name_is_durable_with_its_folder_and_not_with_its_file() -> None:
    written = (event(Op.CREATE, "new"), event(Op.WRITE, "new", data=b"x"), event(Op.SYNC, "new"))
    renamed = event(Op.RENAME, "new", other="a")
    disk = disk_after(*written, renamed)
    assert contents(disk, "a") == {None, b"x"}
    disk.apply(event(Op.SYNC, ".", ino=DIRECTORY))
    assert contents(disk, "a") == {b"x"}
    assert disk.names == {"a": 0}
    assert FOLDER not in disk.names.values()


_TOLD = (Op.WRITE, Op.SYNC, Op.SYNC_FAILED)


def result_of(part: Part, folder: Path, share: int, shares: int, samples: int = 8) -> Result:
    recording = record_part(part, folder)
    moments = range(share, len(recording.events), shares)
    return check_moments(recording, moments, folder, samples, until_red=part not in PARTS)


@pytest.mark.cases(1)
@needs("cc")
@pytest.mark.parametrize(("deed", "shares"), [("save", 26), ("compact", 4)])
def test_a_power_failure_loses_nothing_that_was_acknowledged(deed: str, shares: int, tmp_path: Path) -> None:
    (share,) = part_of(f"powerloss {deed}", range(shares))
    result = result_of(next(part for part in PARTS if part.deed == deed), tmp_path, share, shares)
    assert result.failures == [], f"share {share} of {shares}"
    assert result.kinds.total() > 15


@needs("cc")
@pytest.mark.parametrize("promise", ["kept", "exact"])
def test_packed_weights_are_whole_after_a_power_failure_or_what_is_damaged_is_noticed(
    promise: str, tmp_path: Path
) -> None:
    part = next(part for part in PARTS if (part.deed, part.promise) == ("weights", promise))
    result = result_of(part, tmp_path, 0, 1, samples=32)
    assert result.failures == []
    assert result.kinds.total() > 50


@needs("cc")
@pytest.mark.parametrize(
    ("deed", "removed", "share", "shares"),
    [
        ("save", "the barrier of names", 28, 40),
        ("profile", "the barrier of a copied file", 0, 1),
        ("weights", "the barrier of packed weights", 0, 1),
        ("weights", "the barrier of names", 0, 1),
    ],
)
def test_without_a_barrier_an_image_is_wrong(deed: str, removed: str, share: int, shares: int, tmp_path: Path) -> None:
    part = next(part for part in MUTANTS if part.deed == deed and removed in part.without)
    assert result_of(part, tmp_path, share, shares).failures


@pytest.mark.cases(1)
@needs("cc")
@pytest.mark.parametrize(("number", "step"), [(0, 26), (2, 47)])
def test_after_a_fault_of_the_disk_everything_is_saved_again(number: int, step: int, tmp_path: Path) -> None:
    result = run_faults(FAULTS[number], tmp_path, 1, 1, set(), step, 2)
    assert result.failures == []
    assert result.kinds.total() > 3


@needs("cc")
def test_what_lmdb_relies_on_is_durable_before_anything_else_is_written(tmp_path: Path) -> None:
    num_restored = 0
    for recording in record_faults(FAULTS[0], tmp_path, 8)[::2]:
        events = [event for event in recording.events if Path(event.path).name == "data.mdb" and event.op in _TOLD]
        made, again, barrier, commit = events[:4]
        if barrier.op == Op.SYNC:
            assert (again.offset, again.data) == (made.offset, made.data)
            assert commit.offset >= len(made.data)
        for failed, restored, then in zip(events, events[1:], events[2:], strict=False):
            if failed.op == Op.SYNC_FAILED and failed.size:
                # The page before is written back. The disk may have the new one, until a barrier.
                assert (restored.op, restored.size, then.op) == (Op.WRITE, failed.size, Op.SYNC)
                num_restored += 1
    assert num_restored


@needs("cc")
def test_nobody_but_the_writer_waits_for_a_disk_that_does_not_answer(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    deeds.prepare("slow", root)
    assert record(("-m", "tests.faults.power.deeds", "slow", str(root)), root, tmp_path / "log")
