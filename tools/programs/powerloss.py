"""The power-loss matrix: the real writer is recorded, and the real reader opens what a power failure may leave.

A deed runs once in a process of its own, with a recorder preloaded. Before each barrier, and at the end, the changes
that no barrier covers are dropped, torn and reordered. An image fails if a byte is wrong, if something acknowledged is
missing, if a process dies or hangs, or if the store does not open, cannot be written, or is damaged at the second
start. With `--mutants`, each protection is taken away once: then an image must fail.
"""

from __future__ import annotations

import copy
import json
import mmap
import multiprocessing
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import click
from rich.console import Console
from rich.table import Table

from tests.faults.isolated import run_isolated
from tests.faults.power import check, deeds
from tests.faults.power.check import Promise, Recorded, Wrong
from tests.faults.power.images import UNORDERED, Moment
from tests.faults.power.recording import Disk, Event, Op, record
from tools.measuring.options import FOLDER, JSON
from tools.measuring.report import new_table

IMAGE_TIMEOUT_S = 60.0
EVERY = 10
"""Of the moments after a fault, one of so many is looked at."""
MOST_FAILURES = 3
"""Reported of one moment; the rest of its images are left out."""


@dataclass(frozen=True)
class Part:
    """A deed, and the protections that are taken away from the process that writes and from the one that reads."""

    deed: str
    promise: Promise = "kept"
    without: tuple[str, ...] = ()
    reader_without: tuple[str, ...] = ()
    title: str = ""

    @property
    def name(self) -> str:
        removed = ", ".join((*self.without, *self.reader_without))
        return self.title or f"{self.deed} without {removed}"


PARTS = (
    Part("save", title="saves, uses, deletions"),
    Part("evict", title="evictions"),
    Part("compact", title="compaction"),
    Part("backup", title="backup"),
    Part("restore", title="restore"),
    Part("aside", title="a damaged file is moved aside"),
    Part("exchange", title="export and import"),
    Part("profile", title="settings of an agent"),
    Part("models", title="a model in the cache folder"),
    Part("fetched", title="a model from a hub"),
    Part("save", "exact", ("all barriers",), title="a drive that ignores barriers"),
)
MUTANTS = (
    Part("save", without=("LMDB's barriers",)),
    Part("save", without=("the barrier between pages and meta page",)),
    Part("save", without=("the barrier of names",)),
    Part("save", without=("the overwriting",)),
    Part("compact", without=("the barrier of a copied file",)),
    Part("compact", without=("the barrier of names",)),
    Part("backup", without=("the barrier of names",)),
    Part("restore", without=("the barrier of a copied file",)),
    Part("aside", without=("the barrier of names",)),
    Part("exchange", without=("the barrier of an export",)),
    Part("profile", without=("the barrier of a copied file",)),
    Part("models", "kept", ("the barrier of a copied file",), ("digests of a model",)),
    Part("fetched", without=("the barrier of a copied file",)),
    Part("save", "exact", ("all barriers",), ("checksums",)),
    Part("save", "exact", ("all barriers",), ("the check of the file",)),
)


Fault: TypeAlias = tuple[str, str, str]
"""The kind of call that fails, the error ("HALF" writes half of it), and how many calls fail from there on."""
FAULTY = Part("faulty", title="faults of the disk")
FAULTS: tuple[Fault, ...] = (
    ("sync", "EIO", "1"),
    ("sync", "EIO", "1000000"),
    *(("write", error, times) for error in ("ENOSPC", "EIO", "EDQUOT", "EROFS") for times in ("1", "1000000")),
    ("write", "HALF", "1"),
    ("names", "EROFS", "1"),
    ("names", "ENOSPC", "1000000"),
)


@dataclass
class Result:
    """The images of a part by kind, and what is wrong with some."""

    moments: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Result) -> None:
        self.moments += other.moments
        self.kinds.update(other.kinds)
        self.failures += other.failures


@dataclass(frozen=True)
class Recording:
    """A part that was recorded. `start` is the disk before it."""

    part: Part
    recorded: Recorded
    start: Disk
    events: tuple[Event, ...]

    def moments(self) -> Iterator[tuple[Moment, tuple[str, ...]]]:
        """Yields the disk before each barrier and at the end, with the marks until then. Without barriers, before each
        mark."""
        disk = copy.deepcopy(self.start)
        has_barriers = any(event.op == Op.SYNC for event in self.events)
        for event in self.events:
            if event.op in (Op.SYNC, Op.SYNC_FAILED) or (event.op == Op.MARK and not has_barriers):
                yield Moment(disk), tuple(disk.marks)
            disk.apply(event)
        yield Moment(disk), tuple(disk.marks)


def record_part(part: Part, folder: Path) -> Recording:
    """Runs the deed of a part. Raises `RuntimeError` if the record does not explain every byte that the deed left."""
    root = folder / "recorded"
    before = deeds.prepare(part.deed, root)
    start = Disk()
    start.load(root)
    arguments = ("-m", "tests.faults.power.deeds", part.deed, str(root), *part.without)
    events = tuple(record(arguments, root, folder / "log"))
    disk = copy.deepcopy(start)
    for event in events:
        disk.apply(event)
    left = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    explained = Moment(disk).everything()
    wrong = {
        name
        for name in left.keys() | {name for name, content in explained.items() if content is not None}
        if left.get(name) != explained.get(name) and Path(name).name not in UNORDERED
    }
    if wrong:
        raise RuntimeError(f"{part.deed}: the record does not explain {sorted(wrong)}")
    return Recording(part, Recorded(part.deed, before, part.promise, left), start, events)


def record_faults(fault: Fault, folder: Path, step: int) -> list[Recording]:
    """Lets one call after the other fail, or one of `step`. Returns what was written with each of them.

    Raises `RuntimeError` if an error of the disk came through, or what failed could not be saved afterwards.
    """
    root = folder / "recorded"
    deeds.prepare("faulty", root)
    arguments = ("-m", "tests.faults.power.deeds", "faulty", str(root), *fault, str(step))
    sections: list[list[Event]] = []
    for event in record(arguments, root, folder / "log"):
        if event.op == Op.MARK and "section" in (values := json.loads(event.path)):
            below = f"{values['section']}/"
            sections.append([])
        elif event.op == Op.MARK:
            sections[-1].append(event)
        elif event.op == Op.SYNC and event.path == below[:-1]:
            sections[-1].append(replace(event, path="."))
        elif event.path.startswith(below):
            path, other = event.path.removeprefix(below), event.other.removeprefix(below)
            sections[-1].append(replace(event, path=path, other=other))
    keeps = (False, True) if fault[0] == "sync" else (False,)
    recorded = Recorded("faulty")
    return [Recording(FAULTY, recorded, Disk(fail_keeps=kept), tuple(events)) for events in sections for kept in keeps]


def run_faults(fault: Fault, folder: Path, samples: int, every: int, step: int = 1) -> Result:
    """Records a fault at every call in turn, or at one of `step`, and checks one moment of `every`."""
    result = Result()
    for number, recording in enumerate(record_faults(fault, folder, step)):
        found = check_share(recording, number % every, every, folder, samples, until_red=False)
        found.failures = [f"call {number}, {failure}" for failure in found.failures]
        result.add(found)
    return result


def check_moment(recording: Recording, moment: Moment, marks: tuple[str, ...], root: Path, samples: int) -> Result:
    """Checks the images of one moment, in processes of their own: one that dies is gone on from."""
    result, done = Result(moments=1), mmap.mmap(-1, mmap.PAGESIZE)
    work = partial(_check_images, recording, moment, marks, root, samples, done)
    begin = 0
    while len(result.failures) < MOST_FAILURES:
        answer = run_isolated(partial(work, begin), IMAGE_TIMEOUT_S)
        if not answer.startswith("{"):
            begin = int.from_bytes(done[:8], "little") + 1
            result.failures.append(f"image {begin - 1}: {answer[-1500:]}")
            continue
        found = json.loads(answer)
        result.add(Result(kinds=Counter(found["kinds"]), failures=found["failures"]))
        break
    return result


def _check_images(
    recording: Recording,
    moment: Moment,
    marks: tuple[str, ...],
    root: Path,
    samples: int,
    done: mmap.mmap,
    begin: int,
) -> str:
    for removal in recording.part.reader_without:
        check.REMOVALS[removal]()
    kinds, failures, seen = Counter[str](), list[str](), set[bytes]()
    for number, image in enumerate(moment.images(len(marks), samples)):
        digest = image.digest()
        if digest in seen:
            continue
        seen.add(digest)
        if number < begin:
            continue
        done[:8] = number.to_bytes(8, "little")
        signal.setitimer(signal.ITIMER_REAL, IMAGE_TIMEOUT_S)
        kinds[image.kind] += 1
        try:
            check.check(recording.recorded, image, marks, root)
        except Wrong as wrong:
            failures.append(f"image {number} ({image.kind}): {wrong}")
            if len(failures) == MOST_FAILURES:
                break
    return json.dumps({"kinds": kinds, "failures": failures})


def check_share(recording: Recording, share: int, shares: int, folder: Path, samples: int, until_red: bool) -> Result:
    """Checks every moment whose number belongs to a share. With `until_red`, stops at the first that fails."""
    result = Result()
    check.warm_up(recording.recorded)
    for number, (moment, marks) in enumerate(recording.moments()):
        if number % shares != share:
            continue
        found = check_moment(recording, moment, marks, folder / f"image{share}", samples)
        found.failures = [f"moment {number}, {failure}" for failure in found.failures]
        result.add(found)
        if until_red and result.failures:
            break
    return result


def run_part(part: Part, folder: Path, samples: int, shares: int, *, until_red: bool = False) -> Result:
    """Records a part and checks its images in so many processes."""
    recording, result = record_part(part, folder), Result()
    some = partial(check_share, recording, shares=shares, folder=folder, samples=samples, until_red=until_red)
    if shares == 1:
        return some(0)
    with ProcessPoolExecutor(shares, mp_context=multiprocessing.get_context("fork")) as pool:
        for found in pool.map(some, range(shares)):
            result.add(found)
    return result


def summary(results: Sequence[tuple[Part, Result]]) -> Table:
    table = new_table("Power failures", left=("part",), right=("moments", "images", "wrong"))
    for part, result in results:
        wrong = len(result.failures)
        table.add_row(part.title, str(result.moments), str(result.kinds.total()), str(wrong))
    whole = Result()
    for _, result in results:
        whole.add(result)
    table.add_row("all", str(whole.moments), str(whole.kinds.total()), str(len(whole.failures)), style="bold")
    for kind, count in whole.kinds.most_common():
        table.add_row(f"  {kind}", "", str(count), "")
    return table


@click.command()
@click.option("--samples", type=click.IntRange(min=1), default=1000, show_default=True, help="Images of a moment.")
@click.option("--only", help="One part, by the name of its deed.")
@click.option("--mutants", is_flag=True, help="Take each protection away once: an image must fail.")
@click.option("--faults", is_flag=True, help="Let every call fail in turn, and one moment of ten lose its power.")
@click.option("--processes", type=click.IntRange(min=1), default=os.cpu_count() or 1, show_default=True)
@FOLDER
@JSON
def main(
    samples: int, only: str | None, mutants: bool, faults: bool, processes: int, folder: Path | None, as_json: bool
) -> None:
    """Record what is written, and open every state in which a power failure may leave the disk.

    Exits with 1 if an image is wrong, or with --mutants if none is. --folder is best one in memory (the default is
    /dev/shm where there is one).
    """
    console = Console(stderr=True)
    shm = Path("/dev/shm")
    results = []
    with tempfile.TemporaryDirectory(prefix="diskprefix-power-", dir=folder or (shm if shm.is_dir() else None)) as work:
        for part, run in _runs(Path(work), samples, processes, mutants, faults):
            if only not in (None, part.deed):
                continue
            result = run()
            results.append((part, result))
            figures = f"{result.moments} moments, {result.kinds.total()} images, {len(result.failures)} wrong"
            console.print(f"{part.name}: {figures}", highlight=False, soft_wrap=True)
            for failure in result.failures[: 1 if mutants else 20]:
                console.print(f"  {failure}", highlight=False, soft_wrap=True, markup=False)
    if as_json:
        click.echo(json.dumps([asdict(part) | vars(result) for part, result in results], indent=2))
    elif not mutants:
        Console().print(summary(results))
    wrong = [part for part, result in results if bool(result.failures) != mutants]
    sys.exit(1 if wrong else 0)


def _runs(
    work: Path, samples: int, processes: int, mutants: bool, faults: bool
) -> Iterator[tuple[Part, Callable[[], Result]]]:
    if faults:
        for fault in FAULTS:
            part = Part("faulty", title=f"{fault[0]}: {fault[1]}, {fault[2]} times")
            yield part, partial(run_faults, fault, work, samples, EVERY)
        return
    for part in MUTANTS if mutants else PARTS:
        yield part, partial(run_part, part, work, samples, processes, until_red=mutants)


if __name__ == "__main__":
    main()
