"""SIGKILL in the middle of what is done to a store: a little of what `tools/bench crash` does at full length."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from diskprefix.store.store import Store
from diskprefix.tokens import TokenIds
from tests.examples import thorough
from tests.faults.crash import ledger, prompts
from tests.faults.crash.check import Finding, check_entries, verify
from tests.faults.crash.ledger import Account, Ledger
from tests.faults.crash.phases import CompactPhase, DeletePhase, EvictPhase, ImportPhase, SavePhase, StorePhase, fill
from tests.faults.crash.servers import ServerPhase, SeveralPhase, StandbyPhase


@pytest.mark.parametrize(
    ("phase", "kills"), [(SavePhase, 3), (EvictPhase, 3), (CompactPhase, 2), (ImportPhase, 2), (DeletePhase, 3)]
)
def test_what_was_acknowledged_survives_sigkill_and_nothing_half_done_is_seen(
    phase: type[StorePhase], kills: int, tmp_path: Path
) -> None:
    rounds = list(phase(tmp_path / "phase", random.Random(7)).rounds(kills))
    assert [done.failures for done in rounds] == [()] * kills
    assert rounds[-1].restored > 0


@thorough
@pytest.mark.slow
@pytest.mark.parametrize("phase", [ServerPhase, StandbyPhase, SeveralPhase])
def test_daemons_that_are_killed_while_they_save_and_evict_say_what_a_cold_one_says(
    phase: type[ServerPhase], tmp_path: Path
) -> None:
    rounds = list(phase(tmp_path / "phase", random.Random(7)).rounds(3))
    assert [done.failures for done in rounds] == [()] * 3
    assert sum(done.restored for done in rounds) > 0


def account_of(saved: range, *, tried: range = range(0), doing: str | None = None) -> Account:
    return Account(frozenset(saved), frozenset(tried) | frozenset(saved), None if doing is None else (doing, -1), {})


def found(folder: Path, account: Account, **options: bool) -> list[str]:
    finding = Finding()
    check_entries(folder, account, finding, may_evict=options.get("may_evict", False))
    return finding.failures


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with the prompts 0 to 3."""
    fill(tmp_path / "kv", range(4))
    return tmp_path / "kv"


def test_the_check_finds_nothing_wrong_with_a_sound_store(folder: Path) -> None:
    finding = Finding()
    check_entries(folder, account_of(range(4)), finding, may_evict=False)
    verify(folder, finding)
    assert finding == Finding(restored=4)


def test_the_check_finds_an_acknowledged_prompt_that_is_not_there(folder: Path) -> None:
    assert found(folder, account_of(range(5))) == ["acknowledged and lost: prompts [4], while None"]


def test_only_an_eviction_that_was_going_on_excuses_what_is_missing(folder: Path) -> None:
    assert found(folder, account_of(range(5), doing="publish"), may_evict=True) == []
    assert found(folder, account_of(range(5), doing="publish"), may_evict=False) != []
    assert found(folder, account_of(range(5), doing="touch"), may_evict=True) != []


def test_an_eviction_does_not_excuse_the_loss_of_most_of_the_store(folder: Path) -> None:
    assert found(folder, account_of(range(30), doing="expire"), may_evict=True) != []


def test_the_check_finds_an_entry_that_nobody_saved(folder: Path) -> None:
    (failure,) = found(folder, account_of(range(3)))
    assert failure.startswith("entries that nobody saved")


def test_an_entry_that_was_being_saved_may_be_there_whole(folder: Path) -> None:
    assert found(folder, account_of(range(3), tried=range(4), doing="publish")) == []


def test_the_check_compares_every_byte(folder: Path) -> None:
    def another(name: bytes, prefix: TokenIds, num_bytes: int) -> memoryview:
        expected = np.array(prompts.payload(name, prefix, num_bytes))
        expected[-1] ^= 1
        return expected.data

    finding = Finding()
    check_entries(folder, account_of(range(4)), finding, may_evict=False, payload=another)
    assert len(finding.failures) == 4
    assert all("another state at tokens" in failure for failure in finding.failures)


def test_the_check_finds_an_entry_that_cannot_be_restored_whole(folder: Path) -> None:
    store = Store(folder)
    (name, _, _), *_ = prompts.path(store.secret, 0)
    with store.changes() as changes:
        assert changes.delete_record("payloads", name + b"\0\0")
    store.close()
    finding = Finding()
    verify(folder, finding)
    check_entries(folder, account_of(range(4)), finding, may_evict=False)
    assert finding.failures[0].startswith("verify: exit code 1")
    assert "tokens are restored" in finding.failures[1]


def test_the_check_finds_what_is_left_behind_in_the_folder(folder: Path) -> None:
    (folder / "half").touch()
    assert found(folder, account_of(range(4))) == ["left behind in the folder: ['half']"]


def test_the_check_finds_a_store_that_does_not_open(folder: Path) -> None:
    (folder / "data.mdb").write_bytes(b"\0" * 8192)
    assert found(folder, account_of(range(4)))[0].startswith("not opened")


def test_a_ledger_tells_what_was_done_and_what_was_being_done(tmp_path: Path) -> None:
    book = Ledger(tmp_path / "ledger")
    for number in range(3):
        book.begin("publish", number)
        book.end("publish", number, gone=[0] if number == 2 else [])
    book.begin("expire")
    account = ledger.read(tmp_path / "ledger")
    assert (account.saved, account.tried) == (frozenset({1, 2}), frozenset({0, 1, 2}))
    assert account.doing == ("expire", -1)
    assert len(account.durations["publish"]) == 3
