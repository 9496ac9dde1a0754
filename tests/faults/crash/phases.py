"""Rounds of killing: a process does one kind of thing to a store, dies at a random moment, and the store is checked."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from diskprefix.errors import CacheError
from diskprefix.store.store import Store
from tests import forked
from tests.faults.crash import ledger, prompts, worker
from tests.faults.crash.check import Finding, check_entries, opened, verify
from tests.faults.crash.ledger import Account
from tests.faults.crash.worker import WorkerPlan

START_TIMEOUT_S = 120.0
DEED_TIMEOUT_S = 300.0
_POLL_S = 0.005
_CREATION_S = 0.03
_CODECS = ("RAW", "PLANES")


@dataclass(frozen=True, kw_only=True)
class Round:
    """One kill. `doing` is the deed that the kill interrupted, None if it came between two deeds."""

    phase: str
    moment_s: float
    """Seconds between the begin of the awaited deed and the kill."""
    doing: str | None
    restored: int
    failures: tuple[str, ...]
    evicted: int = 0
    """The number of blocks, if a daemon counted them."""


class WorkerDied(Exception):
    """The process ended before the kill. The message holds its output."""


class Worker:
    """A process that carries out a plan until it is killed. `folder` holds its plan and its output."""

    def __init__(self, plan: WorkerPlan, folder: Path) -> None:
        self._ledger = Path(plan.ledger)
        self._start = self._ledger.stat().st_size if self._ledger.exists() else 0
        self._errors = folder / "errors.txt"
        plan.write(folder / "plan.json")
        self._process = forked.start(worker.main, str(folder / "plan.json"), errors=self._errors)

    def wait_begun(self, deed: str) -> None:
        """Raises `WorkerDied`."""
        self._wait(lambda: ledger.num_begun(self._ledger, deed, self._start) > 0, START_TIMEOUT_S)

    def wait_ended(self, deed: str, times: int) -> None:
        """Raises `WorkerDied`."""
        self._wait(lambda: ledger.num_ended(self._ledger, deed, self._start) >= times, DEED_TIMEOUT_S)

    def kill(self) -> None:
        """Raises `WorkerDied` if it had ended before."""
        self._process.kill()
        self._process.join()
        if self._process.exitcode != -signal.SIGKILL:
            raise self._died()

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self._process.exitcode is not None or time.monotonic() > deadline:
                self._process.kill()
                self._process.join()
                raise self._died()
            time.sleep(_POLL_S)

    def _died(self) -> WorkerDied:
        return WorkerDied(f"exit code {self._process.exitcode}: {self._errors.read_text()[-2000:]}")


class StorePhase:
    """Kills of one kind."""

    deed = ""
    awaited = "publish"
    """The deed after whose begin the random time before the kill starts."""
    times = 1
    """The times that it is done, where its length decides over which time the kills are spread."""
    _same_store = 0
    """The number of kills that use one store; 0 for all."""
    budget_bytes = 1 << 30
    may_evict = False

    def __init__(self, folder: Path, rng: random.Random) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._store = folder / "kv"
        self._ledger = folder / "ledger.jsonl"
        self._rng = rng
        self._span_s = 0.2

    def rounds(self, kills: int) -> Iterator[Round]:
        """Raises `WorkerDied` if a process that is not killed fails."""
        self._set_up()
        for index in range(kills):
            self._prepare(index)
            awaited, span_s = self._awaits(index)
            moment_s = self._rng.uniform(0.0, span_s)
            finding = Finding()
            try:
                self._kill_one(self._plan(index), awaited, moment_s)
            except WorkerDied as error:
                finding.fail(str(error))
            account = ledger.read(self._ledger)
            self._check(account, finding)
            self._note_what_is_left(account)
            self._learn(account)
            doing = None if account.doing is None else account.doing[0]
            yield Round(
                phase=self.deed,
                moment_s=moment_s,
                doing=doing,
                restored=finding.restored,
                failures=tuple(finding.failures),
            )

    def _set_up(self) -> None:
        """Before the first kill."""

    def _prepare(self, index: int) -> None:
        """Before kill number `index`."""
        if self._same_store and index % self._same_store == 0:
            shutil.rmtree(self._store, ignore_errors=True)
            self._ledger.unlink(missing_ok=True)

    def _awaits(self, _index: int) -> tuple[str, float]:
        """The deed after whose beginning kill number `index` comes, and how many seconds after it at most."""
        return self.awaited, self._span_s

    def _check(self, account: Account, finding: Finding) -> None:
        verify(self._store, finding)
        check_entries(self._store, account, finding, may_evict=self.may_evict)

    def _plan(self, index: int) -> WorkerPlan:
        tried = ledger.read(self._ledger).tried
        return WorkerPlan(
            deed=self.deed,
            folder=str(self._store),
            ledger=str(self._ledger),
            budget_bytes=self.budget_bytes,
            first=max(tried, default=-1) + 1,
            codec=_CODECS[index % len(_CODECS)],
            files=self._files(),
        )

    def _files(self) -> dict[str, str]:
        return {}

    def _kill_one(self, plan: WorkerPlan, awaited: str, moment_s: float) -> None:
        running = Worker(plan, self._folder)
        running.wait_begun(awaited)
        if awaited == "publish" and not ledger.num_ended(self._ledger, awaited, 0):
            # Or on a slow disk, no kill would leave anything to restore.
            running.wait_ended(awaited, 1)
        time.sleep(moment_s)
        running.kill()

    def _run_undisturbed(self) -> None:
        """Measure how long a process takes that is not killed. The kills are spread over this time."""
        running = Worker(self._plan(0), self._folder)
        running.wait_ended(self.awaited, self.times)
        running.kill()
        self._span_s = float("inf")
        self._learn(ledger.read(self._ledger))

    def _learn(self, account: Account) -> None:
        """Shorten the time over which kills are spread, after a kill that came too late."""
        durations = account.durations.get(self.awaited, [])[-self.times :]
        if self.awaited == self.deed and len(durations) == self.times:
            self._span_s = min(self._span_s, 1.1 * sum(durations))

    def _note_what_is_left(self, account: Account) -> None:
        """Find what the interrupted deed removed and note it, so that the next check does not report it as lost."""
        # A store that does not open was reported by the check.
        with contextlib.suppress(CacheError), opened(self._store) as store, store.snapshot() as snapshot:
            present = set(snapshot.keys("entries"))
            gone = [number for number in account.saved if prompts.last_node(store.secret, number) not in present]
            ledger.Ledger(self._ledger).end("kill", gone=gone)

    def _acknowledge(self, numbers: range) -> None:
        """Create a ledger that says that these prompts were saved."""
        self._ledger.unlink(missing_ok=True)
        book = ledger.Ledger(self._ledger)
        for number in numbers:
            book.begin("publish", number)
            book.end("publish", number)


class SavePhase(StorePhase):
    """Publications into a store with enough room, and uses of stored nodes between them."""

    deed = "save"
    _same_store = 5

    def _awaits(self, index: int) -> tuple[str, float]:
        """The first kill of each store comes during its creation."""
        return ("open", _CREATION_S) if index % self._same_store == 0 else super()._awaits(index)

    def _check(self, account: Account, finding: Finding) -> None:
        if account.tried:
            super()._check(account, finding)
        else:
            # There may be no store yet for `verify` to look at.
            check_entries(self._store, account, finding, may_evict=False)
            verify(self._store, finding)


class EvictPhase(StorePhase):
    """Publications into a full store, and expiries."""

    deed = "evict"
    budget_bytes = 24 << 20
    may_evict = True


class CompactPhase(StorePhase):
    """`diskprefix compact`, after some saves and an expiry."""

    deed = awaited = "compact"
    may_evict = True

    def _set_up(self) -> None:
        fill(self._store, range(20))
        self._acknowledge(range(20))
        self._run_undisturbed()


class ImportPhase(StorePhase):
    """`diskprefix import` of several files into a store that has other prompts of the same models."""

    deed = awaited = "import"
    imported = range(5, 15)
    times = len(imported)
    there = range(1000, 1015)

    def _set_up(self) -> None:
        fill(self._folder / "base", self.there)
        self._export(self._folder / "source")
        self._prepare(0)
        self._run_undisturbed()

    def _prepare(self, index: int) -> None:  # noqa: ARG002 - each round starts alike
        shutil.rmtree(self._store, ignore_errors=True)
        shutil.copytree(self._folder / "base", self._store)
        self._acknowledge(self.there)

    def _files(self) -> dict[str, str]:
        return {str(number): str(self._folder / f"{number}.safetensors") for number in self.imported}

    def _export(self, source: Path) -> None:
        fill(source, self.imported)
        with opened(source) as store:
            names = {number: prompts.last_node(store.secret, number).hex() for number in self.imported}
        for number, file in self._files().items():
            worker.command("export", names[int(number)], "-o", file, "--kv-cache-dir", str(source))


class DeletePhase(StorePhase):
    """Publications and deletions."""

    deed = "delete"
    awaited = "delete"
    times = 3
    _same_store = 5


def fill(folder: Path, numbers: range) -> None:
    """A store with these prompts."""
    store = Store(folder, budget_bytes=1 << 30)
    for number in numbers:
        store.publish(prompts.publication(store, number))
    store.close()
