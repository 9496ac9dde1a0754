"""The power-loss matrix: the real writer is recorded, and the real reader opens what a power failure may leave.

A deed runs once in a process of its own, with a recorder preloaded. Before each barrier, and at the end, the changes
that no barrier covers are dropped, torn and reordered. An image fails if a byte is wrong, if something acknowledged is
missing, if a process dies or hangs, or if the store does not open, cannot be written, or is damaged at the second
start. With `--mutants`, each protection is taken away once: then an image must fail.
"""

from __future__ import annotations

import copy
import hashlib
import json
import mmap
import multiprocessing
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeAlias

import click
from rich.console import Console
from rich.table import Table

from diskprefix.control_groups import num_cpus
from tests.faults.isolated import run_isolated
from tests.faults.power import check, deeds
from tests.faults.power.check import Promise, Recorded, Wrong
from tests.faults.power.images import UNORDERED, Moment
from tests.faults.power.recording import Disk, Event, Op, record
from tools.measuring.options import FOLDER, JSON
from tools.measuring.report import new_table

IMAGE_TIMEOUT_S = 300.0
NEAR, EVERY = 8, 10
"""The first `NEAR` moments after a fault are checked, and one in `EVERY` of the later ones."""
MOST_FAILURES = 3
"""The most failures of one moment that are reported; the rest of its images are left out."""


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
    Part("weights", title="packed weights"),
    Part("weights", "exact", ("all barriers",), title="packed weights on a drive that ignores barriers"),
    Part("save", "exact", ("all barriers",), title="a drive that ignores barriers"),
)
MUTANTS = (
    Part("save", without=("LMDB's barriers",)),
    Part("save", without=("the barrier between pages and meta page",)),
    Part("save", without=("the barrier of names",)),
    Part("compact", without=("the barrier of a copied file",)),
    Part("compact", without=("the barrier of names",)),
    Part("backup", without=("the barrier of names",)),
    Part("restore", without=("the barrier of a copied file",)),
    Part("aside", without=("the barrier of names",)),
    Part("exchange", without=("the barrier of an export",)),
    Part("profile", without=("the barrier of a copied file",)),
    Part("models", without=("the barrier of a copied file",)),
    Part("weights", without=("the barrier of packed weights",)),
    Part("weights", without=("the barrier of names",)),
    Part("save", "exact", ("all barriers",), ("checksums",)),
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
    """The images of a part by kind, and the faults in them."""

    records: int = 0
    moments: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def figures(self) -> tuple[str, str, str, str]:
        """Returns the numbers of records, moments, images and wrong images, as text."""
        return str(self.records), str(self.moments), str(self.kinds.total()), str(len(self.failures))

    def add(self, other: Result) -> None:
        self.records += other.records
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
        """Yields the disk at each moment, with the marks until then."""
        disk = copy.deepcopy(self.start)
        for event in self.events:
            if self._is_moment(event):
                yield Moment(disk), tuple(disk.marks)
            disk.apply(event)
        yield Moment(disk), tuple(disk.marks)

    def _is_moment(self, event: Event) -> bool:
        """Returns whether the power may fail before an event: before each barrier, or each mark where there are none.
        It may also fail at the end."""
        return event.op in (Op.SYNC, Op.SYNC_FAILED) or (event.op == Op.MARK and not self._has_barriers)

    @cached_property
    def _has_barriers(self) -> bool:
        return any(event.op == Op.SYNC for event in self.events)

    def new_moments(self, known: set[bytes]) -> list[int]:
        """Returns the numbers of the moments that none of the `known` ones equals, and makes them known. Moments are
        equal if the same was written and acknowledged before them."""
        histories, history = list[bytes](), hashlib.blake2b()
        for event in self.events:
            if self._is_moment(event):
                histories.append(history.digest())
            if Path(event.path).name not in UNORDERED:
                is_kept = event.op == Op.SYNC_FAILED and self.start.fail_keeps
                history.update(repr((replace(event, ino=0), is_kept)).encode())
        histories.append(history.digest())
        new = [number for number, history_then in enumerate(histories) if history_then not in known]
        known.update(histories)
        return new


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
    """Makes each call fail in turn, or one in `step`. Returns a recording for each failure.

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
    return [
        Recording(FAULTY, recorded, Disk(fail_keeps=keeps_failed), tuple(events))
        for events in sections
        for keeps_failed in keeps
    ]


def run_faults(
    fault: Fault, folder: Path, samples: int, processes: int, known: set[bytes], step: int = 1, most: int = 10**9
) -> Result:
    """Records a fault at every call in turn, or at one in `step`. Checks the moments after the fault, as `NEAR` and
    `EVERY` say, at most `most` of a record, and none that equals a `known` one."""
    recordings = record_faults(fault, folder, step)
    chosen = [_near_and_far(recording.new_moments(known))[:most] for recording in recordings]
    work = partial(check_moments, folder=folder, samples=samples)
    result = Result()
    with _pool(processes) as pool:
        for number, of_record in enumerate(pool.map(work, recordings, chosen)):
            of_record.failures = [f"record {number}, {failure}" for failure in of_record.failures]
            result.add(of_record)
    return result


def _near_and_far(moments: list[int]) -> list[int]:
    return moments[:NEAR] + moments[NEAR::EVERY]


def _pool(processes: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("fork"))


def check_moment(recording: Recording, moment: Moment, marks: tuple[str, ...], root: Path, samples: int) -> Result:
    """Checks the images of one moment in separate processes. If an image ends its process, the check continues with the
    next image."""
    result, done = Result(moments=1), mmap.mmap(-1, mmap.PAGESIZE)
    work = partial(_check_images, recording, moment, marks, root, samples, done)
    begin = 0
    while len(result.failures) < MOST_FAILURES:
        answer = run_isolated(partial(work, begin), IMAGE_TIMEOUT_S)
        if not answer.startswith("{"):
            begin = int.from_bytes(done[:8], "little") + 1
            result.failures.append(f"image {begin - 1}: {answer[-1500:]}")
            continue
        record = json.loads(answer)
        result.add(Result(kinds=Counter(record["kinds"]), failures=record["failures"]))
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


def check_moments(
    recording: Recording, numbers: Container[int], folder: Path, samples: int, *, until_red: bool = False
) -> Result:
    """Checks the moments with these numbers. With `until_red`, stops at the first that fails."""
    result = Result(records=1)
    check.warm_up(recording.recorded)
    for number, (moment, marks) in enumerate(recording.moments()):
        if number not in numbers:
            continue
        of_moment = check_moment(recording, moment, marks, folder / f"image{os.getpid()}", samples)
        of_moment.failures = [f"moment {number}, {failure}" for failure in of_moment.failures]
        result.add(of_moment)
        if until_red and result.failures:
            break
    return result


def run_part(part: Part, folder: Path, samples: int, processes: int, *, until_red: bool = False) -> Result:
    """Records a part and checks its images."""
    recording, result = record_part(part, folder), Result()
    work = partial(check_moments, recording, folder=folder, samples=samples, until_red=until_red)
    with _pool(processes) as pool:
        for of_share in pool.map(
            work, (range(share, len(recording.events) + 1, processes) for share in range(processes))
        ):
            result.add(of_share)
    return replace(result, records=1)


def summary(results: Sequence[tuple[Part, Result]]) -> Table:
    table = new_table("Power failures", left=("part",), right=("records", "moments", "images", "wrong"))
    whole = Result()
    for part, result in results:
        table.add_row(part.title, *result.figures)
        whole.add(result)
    table.add_row("all", *whole.figures, style="bold")
    for kind, count in whole.kinds.most_common():
        table.add_row(f"  {kind}", "", "", str(count), "")
    return table


@click.command()
@click.option(
    "--samples", type=click.IntRange(min=1), default=1000, show_default=True, help="The most images of one moment."
)
@click.option("--only", help="One part, by the name of its deed; with --faults, by the call that fails.")
@click.option("--mutants", is_flag=True, help="Take each protection away once: an image must fail.")
@click.option("--faults", is_flag=True, help="Let every call fail in turn, and the power fail afterwards.")
@click.option("--processes", type=click.IntRange(min=1), default=num_cpus(), show_default=True)
@FOLDER
@JSON
def main(
    samples: int, only: str | None, mutants: bool, faults: bool, processes: int, folder: Path | None, as_json: bool
) -> None:
    """Record what is written, and open every state in which a power failure may leave the disk.

    Exits with 1 if an image is wrong, or with --mutants if none is. --folder should be in memory (the default is
    /dev/shm if it exists).
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
            records, moments, images, wrong = result.figures
            figures = f"{records} records, {moments} moments, {images} images, {wrong} wrong"
            console.print(f"{part.name}: {figures}", highlight=False, soft_wrap=True)
            for failure in result.failures[: 1 if mutants else 20]:
                console.print(f"  {failure}", highlight=False, soft_wrap=True, markup=False)
    if as_json:
        click.echo(json.dumps([asdict(part) | vars(result) for part, result in results], indent=2))
    elif not mutants:
        Console().print(summary(results))
    sys.exit(0 if all(bool(result.failures) == mutants for _, result in results) else 1)


def _runs(
    work: Path, samples: int, processes: int, mutants: bool, faults: bool
) -> Iterator[tuple[Part, Callable[[], Result]]]:
    if faults:
        known = set[bytes]()
        for fault in FAULTS:
            call, error, times = fault
            part = Part(call, title=f"{call}: {error}, {'once' if times == '1' else 'from there on'}")
            yield part, partial(run_faults, fault, work, samples, processes, known)
        return
    for part in MUTANTS if mutants else PARTS:
        yield part, partial(run_part, part, work, samples, processes, until_red=mutants)


if __name__ == "__main__":
    main()
