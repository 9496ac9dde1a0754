"""The whole daemon, simulated: a seed decides which thread goes on, what the clock says, what fails, and who comes.

Engine, cache, store, writer, evictor and the tier that machines share are the real ones. Threads, locks, queues and
clocks are replaced, and the model by a hash of its tokens. A history fails if a reply is not the hash of its prompt, if
state of another tenant or from before a purge is restored, if a bound does not hold, if a request or a thread never
ends, or if something is left behind. With `--mutants`, each protection is taken away once: then a history must fail.
"""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

import click
from rich.console import Console

from diskprefix.control_groups import num_cpus
from tests.faults.interleavings import world
from tests.faults.interleavings.history import EDITION, History, Wrong
from tests.faults.interleavings.kept_seeds import keep, line_of
from tests.faults.interleavings.mutants import MUTANTS, bad, without_protection
from tests.faults.seeds import is_ci
from tools.measuring.options import FOLDER, JSON, seed_option
from tools.measuring.report import new_table

AT_ONCE = 200
"""The number of histories that a process runs as one task."""
_COLLECT_EVERY = 50
_HANG_S = 600
"""Of real time, as the machine may be busy. A history takes a thirtieth of a second."""
_MOST_FAILURES = 5
_INTERRUPTED = 128 + signal.SIGINT
"""The exit code of a run that was ended by Ctrl-C or SIGTERM."""


@dataclass
class Result:
    """The events of some histories, and the failed ones: their seeds and reasons."""

    histories: int = 0
    switches: int = 0
    cpu_s: float = 0.0
    events: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    """The errors of a mutant that is wrong itself."""
    is_cut_off: bool = False

    def add(self, other: Result) -> None:
        self.histories += other.histories
        self.switches += other.switches
        self.cpu_s += other.cpu_s
        self.events.update(other.events)
        self.failures += other.failures
        self.bad += other.bad


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the log and the garbage collector, which would run at random moments, out of a history."""
    log = logging.getLogger("diskprefix")
    level, was_enabled = log.level, gc.isenabled()
    log.setLevel(logging.CRITICAL + 1)
    gc.disable()
    gc.collect()
    # So that a collection looks at nothing but what histories have left.
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        log.setLevel(level)
        if was_enabled:
            gc.enable()


def _too_long(_signal: int, _frame: FrameType | None) -> None:
    raise Wrong(f"it takes more than {_HANG_S} s")


def run_histories(
    seeds: Iterable[int], folder: Path, *, without: str = "", until: str | None = None, edition: int = EDITION
) -> Result:
    """Runs one history of an `edition` after the other. `without` names a protection that is taken away. With `until`,
    only a failure that says this counts, and is the last one."""
    result, began_s = Result(), time.process_time()
    mutant = without_protection(without) if without else nullcontext()
    with _quiet(), world.patched(), mutant:
        for seed in seeds:
            failure = run_history(seed, folder, result, edition=edition)
            if without and bad:
                result.bad += bad
                break
            if failure and (until or "") in failure:
                result.failures.append((seed, failure))
            if len(result.failures) == (_MOST_FAILURES if until is None else 1):
                break
            if result.histories % _COLLECT_EVERY == 0:
                gc.collect()
    result.cpu_s = time.process_time() - began_s
    return result


def run_history(
    seed: int, folder: Path, result: Result, trace: Callable[[str], None] | None = None, edition: int = EDITION
) -> str:
    """Returns why a history failed, "" if it did not. Call it within `world.patched`."""
    history = History(seed, folder, trace, edition)
    before = signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(_HANG_S)
    try:
        history.run()
    except Wrong as wrong:
        return str(wrong)
    except Exception:  # noqa: BLE001 (it is reported)
        return traceback.format_exc()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        result.histories += 1
        result.switches += history.scheduler.num_switches
        result.events.update(history.counts)
    return ""


def interrupt_once(_signal: int, _frame: FrameType | None) -> None:
    """Handles SIGTERM: `timeout` sends it twice, to this process and to its group."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _end_by_signals() -> None:
    """Lets SIGTERM end a worker. The simulated daemon would catch an exception, such as its parent gets: it goes on
    after any error of a thread. Ctrl-C is left to the parent."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _share(start: int, first: int, count: int, folder: Path, without: str, until: str | None) -> Result:
    return run_histories(
        range(start, min(start + AT_ONCE, first + count)),
        folder / f"{os.getpid()}",
        without=without,
        until=until,
    )


def simulate(
    first: int,
    count: int,
    folder: Path,
    processes: int,
    *,
    without: str = "",
    until: str | None = None,
    on_progress: Callable[[Result], None] = lambda _: None,
) -> Result:
    """Runs `count` histories from seed `first` on, in `processes` processes. `KeyboardInterrupt` ends it; the result
    then has `is_cut_off`."""
    whole = Result()
    work = partial(_share, first=first, count=count, folder=folder, without=without, until=until)
    gc.freeze()
    others = multiprocessing.active_children()
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_end_by_signals) as pool:
        try:
            for part in pool.map(work, range(first, first + count, AT_ONCE)):
                whole.add(part)
                on_progress(whole)
                if whole.bad or len(whole.failures) >= (_MOST_FAILURES if until is None else 1):
                    break
        except KeyboardInterrupt:
            whole.is_cut_off = True
            for worker in set(multiprocessing.active_children()).difference(others):
                worker.terminate()
        finally:
            pool.shutdown(cancel_futures=True)
    return whole


def _show_trace(seed: int, folder: Path, without: str, edition: int) -> str:
    """Prints what every thread of one history does. Returns why it failed."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("             %(message)s"))
    log = logging.getLogger("diskprefix")
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    mutant = without_protection(without) if without else nullcontext()
    gc.disable()
    with world.patched(), mutant:
        return run_history(seed, folder, Result(), click.echo, edition)


def _with_fixed_hashes() -> None:
    """Starts this process again unless sets have one order in all processes: a seed is to be one history."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, sys.orig_argv, os.environ | {"PYTHONHASHSEED": "0"})


def _print(result: Result) -> None:
    table = new_table("Interleavings", left=("event",), right=("number",))
    table.add_row("histories", str(result.histories), style="bold")
    table.add_row("switches between threads", str(result.switches))
    for event, number in sorted(result.events.items()):
        table.add_row(event, str(number))
    table.add_row("wrong", str(len(result.failures)), style="bold")
    Console().print(table)


@click.command()
@click.option("--seed", type=int, help="Print the trace of one history.")
@click.option(
    "--edition",
    type=click.IntRange(1, EDITION),
    default=EDITION,
    show_default=True,
    help="The events of that history: a kept seed has those of the day when it failed.",
)
@seed_option("histories", "The first seed.", "--first")
@click.option("--histories", type=click.IntRange(min=1), default=20_000, show_default=True)
@click.option("--mutants", is_flag=True, help="Take each protection away once: a history must fail.")
@click.option("--without", default="", help="Take one protection away.")
@click.option("--processes", type=click.IntRange(min=1), default=num_cpus(), show_default=True)
@FOLDER
@JSON
def main(
    seed: int | None,
    edition: int,
    first: int,
    histories: int,
    mutants: bool,
    without: str,
    processes: int,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Simulate the whole daemon: one history for each seed, which decides all that happens.

    Exits with 1 if a history is wrong, or with --mutants if none is. Outside CI a seed that failed is added to
    tests/faults/interleavings/kept_seeds.txt, which every run of the tests tries. --folder should be in memory (the
    default is /dev/shm if it exists).
    """
    _with_fixed_hashes()
    signal.signal(signal.SIGTERM, interrupt_once)
    console, shm = Console(stderr=True), Path("/dev/shm")
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    with tempfile.TemporaryDirectory(prefix="diskprefix-sim-", dir=folder or (shm if shm.is_dir() else None)) as work:
        if seed is not None:
            failure = _show_trace(seed, Path(work) / "one", without, edition)
            click.echo(failure or "nothing is wrong")
            sys.exit(1 if failure else 0)
        if mutants:
            are_found = True
            for name, mutant in MUTANTS.items():
                result = simulate(first, histories, Path(work), processes, without=name, until=mutant.shows)
                if result.is_cut_off:
                    sys.exit(_INTERRUPTED)
                where = "".join(f"seed {seed}: {failure[:300]}" for seed, failure in result.failures[:1])
                own = "".join(f"BAD MUTANT, it fails itself: {failure[-300:]}" for failure in result.bad[:1])
                say(f"without {name}: {own or where or 'NOT FOUND'}")
                are_found &= bool(result.failures) and not own
            sys.exit(0 if are_found else 1)

        reported: list[tuple[int, str]] = []

        def tell(sofar: Result) -> None:
            for number, failure in sofar.failures[len(reported) :]:
                say(f"seed {number}: {failure}")
                if not without:
                    say(f"in kept_seeds.txt: {line_of(number, failure) if is_ci() else keep(number, failure)}")
            reported[:] = sofar.failures
            if sofar.histories % (50 * AT_ONCE) < AT_ONCE:
                say(f"{sofar.histories} histories, {len(reported)} wrong, {sofar.cpu_s:.0f} s of processor time")
                say(json.dumps(sofar.events))

        result = simulate(first, histories, Path(work), processes, without=without, on_progress=tell)
    if as_json:
        click.echo(json.dumps(vars(result), indent=2))
    else:
        _print(result)
    sys.exit(1 if result.failures else _INTERRUPTED if result.is_cut_off else 0)


if __name__ == "__main__":
    main()
