"""The one way to a daemon's reads: limits, the verdict on the disk, and who may open a transaction."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import wait
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from diskprefix.errors import DiskStalled, StoreCorrupt
from diskprefix.prefixstore.store import reads
from diskprefix.prefixstore.store.reads import Patience, Reads
from diskprefix.prefixstore.store.snapshot import Snapshot
from tests.exceptions import exceptions
from tests.prefixstore.store.building import open_store
from tests.waiting import wait_for

PACKAGE = Path(__file__).parents[3] / "diskprefix"
NAME = "nothing"

COMMANDS = {
    *exceptions("READ_WITHOUT_A_DAEMON"),
    "prefixstore/packs/exchange.py",
    "prefixstore/state_identity.py",
}
"""Modules that read without a daemon: of commands, and of other engines' processes."""
OPENING = {
    "prefixstore/store/environment.py",
    "prefixstore/store/store_file.py",
    "prefixstore/store/store_identity.py",
    "prefixstore/store/compact.py",
}
"""Modules that open or copy a file, and the one door itself."""
MAY_HANG = {
    "prefixstore/store/reads.py": "the door",
    "prefixstore/store/store_file.py": "`read_epoch`: the writer, uploads and `ask`",
    "prefixstore/store/store.py": "publications on the writer's thread; counts, by `ask`",
    "prefixstore/store/evictor.py": "the writer",
    "prefixstore/store/housekeeping.py": "the writer",
    "prefixstore/store/notes.py": "`make_fit` on the writer's thread; lookups, by `ask`",
    "prefixstore/store/statistics/savings.py": "the writer, and `ask`",
    "prefixstore/store/verify.py": "commands, and the thread kv-check",
    "prefixstore/store/purge.py": "commands, and by `ask`",
    "prefixstore/cache/cache.py": "the start",
    "prefixstore/cache/build_bits.py": "the start, the writer, and threads of fetches",
    "prefixstore/cache/imported_prompt.py": "a thread for reads",
    "prefixstore/cache/namespaces.py": "kv-seen, and the start",
    "prefixstore/cache/restore.py": "kv-match",
    "prefixstore/chunk_store.py": "by `ask`; `clear`, on a thread of the engine that may wait",
    "prefixstore/cache/tiers/local.py": "threads of fetches and uploads",
    "daemon/engine/idle/recheck.py": "the thread idle",
    "daemon/server/openings.py": "a thread for reads",
    **exceptions("MAY_HANG"),
}
"""The modules that call `Reads.snapshot`, and the threads on which they do."""


class Gate:
    """Stands for a disk: reads of `NAME` wait while it is shut. Threads that earlier tests left behind read other
    records."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.is_open, self.num_arrived = threading.Event(), 0
        record = Snapshot.get_record

        def waiting(snapshot: Snapshot, database: str, key: bytes) -> object:
            if key == NAME.encode():
                self.num_arrived += 1
                assert self.is_open.wait(60)
            return record(snapshot, database, key)

        patch.setattr(Snapshot, "get_record", waiting)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "STALL_S", 0.2)


def read_one(one: Reads) -> bytes | None:
    with one.snapshot() as snapshot:
        return snapshot.meta(NAME)


def calls(pattern: str) -> set[str]:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if re.search(pattern, path.read_text(encoding="utf-8")):
            found.add(str(path.relative_to(PACKAGE)))
    return found


def test_one_module_alone_opens_the_reads_of_a_daemon() -> None:
    assert calls(r"(?<!reads)\.snapshot\(\)") <= COMMANDS | OPENING
    assert calls(r"\.transaction\(|\b_?env\.begin\(") <= OPENING | {"prefixstore/store/reads.py"}
    assert calls(r"\.reads\.snapshot\(|_open_snapshot\(") == MAY_HANG.keys()


def test_a_read_that_ends_in_time_gives_its_result_or_its_error(tmp_path: Path) -> None:
    store, patience = open_store(tmp_path), Patience(60.0)

    def fail() -> None:
        raise StoreCorrupt("a record is damaged")

    assert store.reads.ask(lambda: read_one(store.reads), patience) is None
    with pytest.raises(StoreCorrupt, match="a record is damaged"):
        store.reads.ask(fail, patience)
    with pytest.raises(TimeoutError, match="its own"):
        store.reads.ask(lambda: (_ for _ in ()).throw(TimeoutError("its own")), patience)
    assert store.reads.num_stalled == 0
    assert store.reads.stalled is None


def test_the_reads_of_a_request_share_its_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, gate, patience = open_store(tmp_path), Gate(monkeypatch), Patience(0.1)
    # By the clock, some systems end a timed wait too early.
    monkeypatch.setattr(reads, "wait", lambda answers, limit_s: wait(answers, limit_s / 2))
    for _ in range(40):
        with pytest.raises(DiskStalled, match="did not answer in time"):
            store.reads.ask(lambda: read_one(store.reads), patience)
    assert gate.num_arrived <= 1, "none waits once the patience is spent"
    assert patience.left_s == 0
    gate.is_open.set()
    assert store.reads.ask(lambda: read_one(store.reads), Patience()) is None


def test_a_wait_for_a_thread_that_others_have_spends_the_patience_of_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, gate, patience, now = open_store(tmp_path), Gate(monkeypatch), Patience(8.0), [0.0]
    monkeypatch.setattr(reads, "time", SimpleNamespace(monotonic=lambda: now[0]))
    work = patience.from_now(lambda: store.reads.ask(lambda: read_one(store.reads), patience))
    now[0] += 8.0
    with pytest.raises(DiskStalled, match="did not answer in time"):
        work()
    assert gate.num_arrived == 0
    assert calls(r'\.run\("reading", (?!.*\.from_now\()') == set()


@pytest.mark.usefixtures("impatient")
def test_a_read_that_hangs_is_told_once_counted_once_and_keeps_others_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, gate = open_store(tmp_path), Gate(monkeypatch)
    with pytest.raises(DiskStalled, match="did not answer in time"):
        store.reads.ask(lambda: read_one(store.reads))
    for _ in range(3):
        with pytest.raises(DiskStalled, match="has not answered for"):
            store.reads.ask(lambda: read_one(store.reads))
    # All others were refused before they began; the one that began is the one that hangs.
    assert (len(store.reads._open), store.reads.num_stalled) == (1, 1)
    assert str(tmp_path) in str(store.reads.stalled)
    gate.is_open.set()
    wait_for(lambda: store.reads.stalled is None)
    assert store.reads.ask(lambda: read_one(store.reads)) is None
    said = [record.message for record in caplog.records]
    assert sum("has not answered" in line for line in said) == 1
    assert sum("answers again" in line for line in said) <= 1


@pytest.mark.usefixtures("impatient")
def test_a_read_that_moves_is_waited_for_however_long_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = open_store(tmp_path), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def many() -> int:
        with store.reads.snapshot() as snapshot:
            for _ in range(50):
                now[0] += 0.15
                snapshot.meta("nothing")
                assert store.reads.stalled is None
        return 50

    assert store.reads.ask(many) == 50
    assert store.reads.num_stalled == 0


@pytest.mark.usefixtures("impatient")
def test_a_read_that_hung_while_nobody_looked_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = open_store(tmp_path), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with store.reads.snapshot():
        now[0] += 1.0
    assert (store.reads.num_stalled, store.reads.stalled) == (1, None)


class Failing(AbstractContextManager[Snapshot]):
    def __enter__(self) -> Snapshot:
        raise StoreCorrupt("not opened")

    def __exit__(self, *_: object) -> None:
        pass


def test_a_transaction_that_cannot_be_opened_leaves_no_read_behind(tmp_path: Path) -> None:
    one = Reads(tmp_path, Failing)
    with suppress(StoreCorrupt), one.snapshot():
        pass
    assert not one._open
