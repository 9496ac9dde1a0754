"""A little of `tools/bench interleavings`: histories of the whole daemon in which a seed decides what happens when."""

from __future__ import annotations

import gc
import inspect
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from click.testing import CliRunner

from diskprefix.daemon.engine import served_model
from diskprefix.daemon.engine.idle.kept_weights import KeptWeights
from diskprefix.daemon.engine.inbox import Inbox
from diskprefix.errors import StoreUnavailable
from diskprefix.prefixstore.cache.cache import PrefixCache
from diskprefix.prefixstore.store.environment import Environment
from diskprefix.prefixstore.store.statistics.savings import SavingsLog
from tests.faults.interleavings import threads, world
from tests.faults.interleavings.bucket import SimulatedBucket
from tests.faults.interleavings.history import EDITION
from tests.faults.interleavings.kept_seeds import KEPT_SEEDS, keep, kept_in, line_of
from tests.faults.interleavings.mutants import MUTANTS, Mutant
from tests.faults.interleavings.task_scheduler import Stuck, TaskScheduler
from tests.faults.seeds import seeds_of
from tests.waiting import wait_for
from tools.faults import interleavings
from tools.faults.interleavings import Result, run_histories

ROOT = Path(__file__).parents[2]
NOTHING: Any = None


def require_right(found: Result, count: int) -> None:
    lines = "\n".join(line_of(seed, said) for seed, said in found.failures)
    advice = f"`tools/bench interleavings --seed N` prints its trace; add to kept_seeds.txt:\n{lines}"
    assert (found.histories, found.failures) == (count, []), advice


@pytest.mark.cases(1)
@pytest.mark.parametrize("sample", range(2))
def test_in_no_history_is_a_reply_wrong_or_lost(sample: int, tmp_path: Path) -> None:
    require_right(run_histories(seeds_of(f"interleavings {sample}", 20), tmp_path), 20)


@pytest.mark.cases(1)
def test_histories_have_all_kinds_of_events(tmp_path: Path) -> None:
    found = run_histories(range(30), tmp_path)
    require_right(found, 30)
    kinds = [
        *("purge", "kill", "stop", "from disk", "from memory", "tokens ahead", "use_tool", "start_beside"),
        *("purge_prompt", "meet_a_hang", "meet_a_strangers_purge", "meet_late_work", "meet_an_expiry"),
        *("meet_an_upgrade", "meet_a_silent_writer", "meet_refused_memory", "meet_a_dead_disk"),
    ]
    assert [kind for kind in kinds if not found.events[kind]] == []


@pytest.mark.cases(1)
def test_a_history_is_wrong_if_the_daemon_goes_on_after_a_slip_in_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeptWeights, "_write", lambda: None)
    found = run_histories(range(1), tmp_path)
    assert "the daemon goes on after TypeError" in found.failures[0][1]
    monkeypatch.undo()
    monkeypatch.setattr(served_model, "_save_idle", lambda: None)
    found = run_histories(range(8), tmp_path)
    assert "the daemon goes on after TypeError" in found.failures[0][1], "it is only logged"


@pytest.mark.parametrize("edition", KEPT_SEEDS)
def test_no_history_that_failed_once_fails_again(edition: int, tmp_path: Path) -> None:
    seeds = KEPT_SEEDS[edition]
    require_right(run_histories(seeds, tmp_path, edition=edition), len(seeds))


def test_a_seed_that_failed_is_kept_once_with_the_end_of_what_it_said(tmp_path: Path) -> None:
    file = tmp_path / "kept"
    file.touch()
    for said in ("Traceback\n  File\nValueError: a\n\n", "another time otherwise"):
        keep(7, said, file)
    keep(8, "r1 got [1], not [2]", file)
    assert kept_in(file) == {EDITION: {7: "ValueError: a", 8: "r1 got [1], not [2]"}}
    assert len(line_of(7, "x" * 1000)) < 120


@pytest.mark.parametrize(
    ("options", "ci", "keeps"), [((), "", True), ((), "CI", False), (("--without", "a"), "", False)]
)
def test_the_tool_keeps_a_seed_that_failed_but_in_ci_and_of_a_mutant(
    options: tuple[str, ...], ci: str, keeps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def simulate(first: int, *_: Any, on_progress: Callable[[Result], None], **__: Any) -> Result:
        found = Result(histories=1, failures=[(first, "r1 got [1], not [2]")])
        on_progress(found)
        return found

    file = tmp_path / "kept"
    file.touch()
    monkeypatch.setattr(interleavings, "simulate", simulate)
    monkeypatch.setattr(interleavings, "keep", partial(keep, file=file))
    monkeypatch.setattr(interleavings, "is_ci", lambda: bool(ci))
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    before = signal.getsignal(signal.SIGTERM)
    ended = CliRunner().invoke(interleavings.main, ["--first", "7", "--folder", str(tmp_path), *options])
    signal.signal(signal.SIGTERM, before)
    line = f"{EDITION} 7 r1 got [1], not [2]"
    assert ended.exit_code == 1
    assert file.read_text() == (f"{line}\n" if keeps else "")
    assert (line in ended.stderr) == (not options)


@pytest.mark.cases(1)
@pytest.mark.parametrize("mutant", ["the tenant of memory", "the wake behind a fetch", "the mark of others"])
def test_without_a_protection_a_history_is_wrong(mutant: str, tmp_path: Path) -> None:
    assert run_histories(range(40), tmp_path, without=mutant, until=MUTANTS[mutant].shows).failures


def test_each_protection_that_can_be_taken_away_is_there() -> None:
    patches = [patch for mutant in MUTANTS.values() for patch in mutant.patches]
    assert [attribute for holder, attribute, _ in patches if not hasattr(holder, attribute)] == []


def takes_all_that(own: FunctionType, value: FunctionType) -> bool:
    """Returns whether `value` may be called as `own` is."""

    def form(function: FunctionType) -> tuple[int, float, set[str], set[str], bool]:
        """Returns the least and the most arguments by position, the names that must be and may be given, and whether
        any other name may."""
        parameters = inspect.signature(function).parameters.values()
        counted = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
        named = [one for one in parameters if one.kind == one.KEYWORD_ONLY]
        kinds = {one.kind for one in parameters}
        return (
            sum(one.default is one.empty for one in counted),
            math.inf if inspect.Parameter.VAR_POSITIONAL in kinds else len(counted),
            {one.name for one in named if one.default is one.empty},
            {one.name for one in named},
            inspect.Parameter.VAR_KEYWORD in kinds,
        )

    least, most, required, names, takes_any = form(value)
    own_least, own_most, own_required, own_names, own_takes_any = form(own)
    takes_names = takes_any or (own_names <= names and not own_takes_any)
    return least <= own_least and most >= own_most and takes_names and (own_takes_any or required <= own_required)


def test_what_takes_the_place_of_a_function_takes_the_same_arguments() -> None:
    protections = [patch for mutant in MUTANTS.values() for patch in mutant.patches]
    pairs = [(getattr(holder, name), name, value) for holder, name, value in (*protections, *world.replaced())]
    functions = [pair for pair in pairs if isinstance(pair[0], FunctionType) and isinstance(pair[2], FunctionType)]
    assert len(functions) > len(pairs) // 2
    assert [name for own, name, value in functions if not takes_all_that(own, value)] == []


@pytest.mark.parametrize("spending", [lambda _self: None, lambda _self, _share="": NOTHING.limit])
def test_a_mutant_that_is_wrong_itself_is_told_and_finds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spending: Callable[..., None]
) -> None:
    monkeypatch.setitem(MUTANTS, "wrong", Mutant("", ((PrefixCache, "spending", spending),)))
    found = run_histories(range(5), tmp_path, without="wrong", until="")
    assert found.bad
    assert not found.failures


def test_a_history_that_fails_in_another_way_does_not_find_a_mutant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Mutant("left behind: ", ((Inbox, "submit", None),))
    monkeypatch.setitem(MUTANTS, "all that answers", broken)
    failed, found = (
        run_histories(range(3), tmp_path, without="all that answers", until=until) for until in (None, broken.shows)
    )
    # Not each history submits a request before it ends.
    assert failed.failures
    assert (found.histories, found.failures) == (3, [])


def never_ending_histories(_start: int, folder: Path, **_: Any) -> None:
    """As the simulated daemon does, catches whatever is raised."""
    (folder / "begun").touch()
    while True:
        with suppress(BaseException):
            signal.pause()


def answer_once(connection: Connection) -> None:
    connection.send(connection.recv())


def test_a_signal_ends_a_run_in_the_middle_of_its_histories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleavings, "_share", never_ending_histories)

    def end_twice() -> None:
        wait_for((tmp_path / "begun").exists)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, interleavings.interrupt_once)
    ending = threading.Thread(target=end_twice)
    here, there = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=answer_once, args=(there,), daemon=True).start()
    there.close()
    ending.start()
    try:
        assert interleavings.simulate(0, 2 * interleavings.AT_ONCE, tmp_path, 2).is_cut_off
        # Another process of this one, such as a daemon that other tests use, has not ended.
        here.send("hello")
        assert here.recv() == "hello"
    finally:
        ending.join()
        signal.signal(signal.SIGTERM, before)
        here.close()


@pytest.mark.slow
def test_a_seed_is_one_history_in_every_process() -> None:
    command = [sys.executable, "-m", "tools", "interleavings", "--seed", "7"]

    def trace(hash_seed: str) -> str:
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return re.sub(r"diskprefix-sim-\w+", "folder", done.stdout)

    first = trace("1")
    assert first.count(" --- ") >= 10
    assert trace("2") == first


def trace_of(seed: int) -> list[str]:
    lines: list[str] = []
    scheduler = TaskScheduler(seed, 0.5, lines.append)

    def work() -> None:
        with ThreadPoolExecutor(3, thread_name_prefix="pool") as pool:
            list(pool.map(lambda number: scheduler.say(str(number)), range(20)))

    # A pool of before that is collected in a history wakes its threads in it.
    gc.collect()
    gc.disable()
    try:
        with threads.patched(), threads.running(scheduler):
            scheduler.run(work)
    finally:
        gc.enable()
    return lines


@pytest.mark.slow
def test_a_seed_is_one_order_of_the_threads() -> None:
    assert trace_of(1) == trace_of(1)
    assert len({tuple(trace_of(seed)) for seed in range(4)}) == 4


def test_threads_that_wait_for_each_other_are_stuck() -> None:
    def work() -> None:
        locks = threads.SimulatedLock(), threads.SimulatedLock()

        def take(first: int) -> None:
            with locks[first], locks[1 - first]:
                pass

        tasks = [scheduler.spawn(str(number), None, lambda number=number: take(number)) for number in (0, 1)]  # type: ignore[misc]
        for task in tasks:
            scheduler.join(task)

    stuck = 0
    for seed in range(20):
        scheduler = TaskScheduler(seed, 0.5)
        with threads.patched(), threads.running(scheduler):
            try:
                scheduler.run(work)
            except Stuck:
                stuck += 1
    assert 0 < stuck < 20


def test_the_package_has_its_own_threads_and_clock_again_behind_a_history() -> None:
    with threads.patched():
        pass
    assert SavingsLog.__init__.__globals__["threading"].__name__ == "threading"
    assert not hasattr(SavingsLog.__init__.__globals__["threading"], "_real")


def in_a_history(work: Callable[[world.Disk], None]) -> None:
    """Runs `work` as the only task of a history without events."""
    failures, disk, scheduler = list[BaseException](), world.Disk(), TaskScheduler(0, 0.0)

    def first() -> None:
        try:
            work(disk)
        except BaseException as error:  # noqa: BLE001 (raised below)
            failures.append(error)

    with world.patched(), threads.running(scheduler):
        world.use(disk, SimulatedBucket(), 1 << 20)
        try:
            scheduler.run(first)
        finally:
            world.kill_all()
    for error in failures:
        raise error


def records_of(path: Path, *, read_only: bool) -> list[str]:
    """Opens "one" and "two" as a process does, and returns the keys in both. Writes their names into them first unless
    `read_only`."""
    env = Environment(path, budget_bytes=1 << 20, read_only=read_only, max_databases=4)
    env.open_databases(["one", "two"])
    if not read_only:
        with env.transaction(write=True) as txn:
            for name in ("one", "two"):
                txn.put(name.encode(), b"", db=env.databases[name])
    with env.transaction() as txn:
        found = [bytes(key) for name in ("one", "two") for key, _ in txn.cursor(env.databases[name])]
    assert env.close()
    return [key.decode() for key in found]


def test_a_process_that_only_reads_may_open_the_file_first(tmp_path: Path) -> None:
    def work(_disk: world.Disk) -> None:
        assert records_of(tmp_path, read_only=False) == ["one", "two"]
        assert records_of(tmp_path, read_only=True) == ["one", "two"]

    in_a_history(work)


def test_a_database_that_was_opened_by_a_write_that_failed_is_opened_again(tmp_path: Path) -> None:
    def work(disk: world.Disk) -> None:
        records_of(tmp_path, read_only=False)
        failed = Environment(tmp_path, budget_bytes=1 << 20, read_only=False, max_databases=4)
        disk.failing = 1.0
        with pytest.raises(StoreUnavailable, match="Input/output error"):
            failed.open_databases(["two"])
        disk.failing = 0.0
        # The file stays open meanwhile.
        assert records_of(tmp_path, read_only=False) == ["one", "two"]
        assert failed.close()

    in_a_history(work)
