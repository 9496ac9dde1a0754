"""A file that LMDB does not survive costs one process at most; whoever comes next moves it aside."""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path

import pytest

from diskprefix.errors import StoreCorrupt
from diskprefix.store import opening, survival
from diskprefix.store.folder import DATA, LOCK
from diskprefix.store.opening import DAMAGED
from diskprefix.store.store import Store
from diskprefix.store.survival import require_survivable
from tests.faults.isolated import run_isolated
from tests.faults.power.check import leave_mark
from tests.store import other_process
from tests.store.building import BLOCK, is_whole, open_store, prompt, publication
from tests.store.other_process import beside

PAGE = 4096


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with one prompt, closed."""
    store = open_store(tmp_path)
    store.publish(publication(store, prompt(1, 3 * BLOCK)))
    store.close()
    return tmp_path


def cut(folder: Path) -> None:
    """Leaves the meta pages alone: LMDB gets a signal at the first read."""
    os.truncate(folder / DATA, 2 * PAGE)


def daemon(folder: Path) -> Store:
    return Store(folder, budget_bytes=32 << 20, on_corruption="quarantine", serving=True)


def test_a_sound_file_and_none_survive(folder: Path) -> None:
    require_survivable(folder)
    require_survivable(folder, is_alone=True)
    require_survivable(folder / "none")
    (folder / DATA).write_bytes(b"")
    require_survivable(folder)


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_file_that_ends_the_process_and_one_that_lmdb_refuses_are_damaged(folder: Path, is_alone: bool) -> None:
    cut(folder)
    with pytest.raises(StoreCorrupt, match=r"it ended a process that read it \(signal \d+\)"):
        require_survivable(folder, is_alone=is_alone)
    (folder / DATA).write_bytes(b"no file of LMDB" * 1000)
    with pytest.raises(StoreCorrupt, match=r"is damaged: lmdb\.InvalidError"):
        require_survivable(folder, is_alone=is_alone)


def test_a_file_that_lmdb_does_not_get_through_is_damaged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survival, "_CHILD", "import time; time.sleep(60)")
    monkeypatch.setattr(survival, "_PATIENCE_S", 0.01)
    with pytest.raises(StoreCorrupt, match="LMDB was not through it"):
        require_survivable(folder)


def test_a_page_that_is_lost_between_the_trees_and_the_free_list_is_noticed(folder: Path) -> None:
    """Nothing would crash: the meta page just knows one page more."""
    data = bytearray((folder / DATA).read_bytes())
    for at in (136, PAGE + 136):
        data[at : at + 8] = (int.from_bytes(data[at : at + 8], "little") + 1).to_bytes(8, "little")
    (folder / DATA).write_bytes(bytes(data) + bytes(PAGE))
    with pytest.raises(StoreCorrupt, match="is damaged"):
        require_survivable(folder)


def test_a_process_that_dies_of_the_file_leaves_a_mark_and_the_next_one_moves_the_file_aside(folder: Path) -> None:
    cut(folder)

    def dies() -> str:
        faulthandler.disable()
        daemon(folder).counts()
        return "lives"

    assert run_isolated(dies, 30).startswith("signal")
    store = daemon(folder)
    assert store.counts()["entries"] == 0
    assert (folder / DAMAGED).exists()
    store.close()


def test_only_the_mark_of_a_process_that_is_gone_costs_a_child(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Path] = []
    monkeypatch.setattr(opening, "require_survivable", lambda path, **_: tried.append(path))
    daemon(folder).close()
    assert not (folder / LOCK).stat().st_size
    with beside(other_process.hold, folder, False):
        assert (folder / LOCK).stat().st_size
        Store(folder, read_only=True).close()
    assert tried == []
    store = daemon(folder)
    assert tried == [folder]
    assert is_whole(store, publication(store, prompt(1, 3 * BLOCK)))
    store.close()
    assert not (folder / LOCK).stat().st_size


def test_a_store_that_is_refused_keeps_its_file_and_its_mark(folder: Path) -> None:
    cut(folder)
    leave_mark(folder)
    with pytest.raises(StoreCorrupt):
        Store(folder)
    assert (folder / LOCK).stat().st_size
    assert not (folder / DAMAGED).exists()


def test_damage_that_is_found_while_a_daemon_runs_moves_the_file_aside(folder: Path) -> None:
    """A record was damaged; a child then finds that the file is, too."""
    store = daemon(folder)
    cut(folder)
    store.try_file()
    assert "is damaged" in str(store.problem)
    assert store.maintain()
    assert store.problem is None
    assert (folder / DAMAGED).exists()
    store.close()
