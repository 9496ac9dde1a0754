from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import pytest

from diskprefix.errors import StoreCorrupt
from diskprefix.store import filecheck
from diskprefix.store.filecheck import check_file
from tests.faults.file_damage import BRANCH, PAGE, DataFile
from tests.faults.lmdb_files import DATABASES, Churn, build_churned, build_with_reader, open_file, use_hard


@dataclass(frozen=True)
class Built:
    """A data file, and a copy of it as it was some transactions earlier."""

    file: Path
    older: Path


def build(folder: Path, builder: Callable[[Path], Path]) -> Built:
    file, older = builder(folder), folder / "older.mdb"
    shutil.copy(file, older)
    churn = Churn(open_file(folder), seed=9)
    with churn.env.begin() as txn:
        churn.names = [key for key, _ in txn.cursor(churn.databases[b"nodes"])]
    for _ in range(3):
        churn.publish(2, 30_000)
        churn.evict(2)
    churn.env.close()
    return Built(file, older)


@pytest.fixture(scope="module")
def churned(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("churned"), build_churned)


@pytest.fixture(scope="module")
def with_reader(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("with_reader"), build_with_reader)


# Files that LMDB made


@pytest.mark.parametrize("seed", range(4))
def test_a_file_passes_after_every_commit_and_its_figures_are_lmdbs_own(tmp_path: Path, seed: int) -> None:
    churn = Churn(open_file(tmp_path), seed)
    for step in range(25):
        churn.publish(churn.random.randrange(1, 6), 40_000)
        if step > 8:
            churn.evict(churn.random.randrange(8))
        if step % 5 == 0:
            churn.rewrite()
        report = check_file(tmp_path / "data.mdb")
        with churn.env.begin() as txn:
            stats = {name: txn.stat(database) for name, database in churn.databases.items()}
        assert report.state == "sound"
        assert report.entries == {name: stat["entries"] for name, stat in stats.items()}
        in_databases = sum(stat[f"{kind}_pages"] for stat in stats.values() for kind in ("branch", "leaf", "overflow"))
        assert in_databases < report.used_bytes // PAGE <= churn.env.info()["last_pgno"] + 1
    churn.env.close()


def test_the_files_of_these_tests_have_what_is_hard(churned: Built, with_reader: Built) -> None:
    """A free list in overflow pages, a free list of several leaves, trees with branch pages, free pages."""
    in_overflow, of_depth_2 = Locator.of(churned.file), Locator.of(with_reader.file)
    assert any(in_overflow.flags(node) & 1 for node in in_overflow.nodes(in_overflow.free_leaf))
    assert of_depth_2.kind(of_depth_2.root(of_depth_2.free)) == BRANCH
    for built in (churned, with_reader):
        locator = Locator.of(built.file)
        assert locator.kind(locator.root(locator.tree(b"nodes"))) == BRANCH
        assert check_file(built.file).used_bytes < built.file.stat().st_size - 500 * PAGE
        assert check_file(built.older).state == "sound"


def test_a_compacted_copy_passes(churned: Built, tmp_path: Path) -> None:
    with open_file(churned.file.parent, lock=False) as env:
        env.copy(str(tmp_path), compact=True)
    file = tmp_path / "data.mdb"
    copy, original = check_file(file), check_file(churned.file)
    assert (copy.state, copy.entries, copy.used_bytes) == ("sound", original.entries, file.stat().st_size)


def test_an_environment_without_databases_and_one_in_a_single_file_pass(tmp_path: Path) -> None:
    file = tmp_path / "single.mdb"
    with lmdb.open(str(file), subdir=False, max_dbs=1) as env:
        assert check_file(file).entries == {}
        env.open_db(b"nodes")
        assert check_file(file).entries == {b"nodes": 0}


def test_a_file_may_end_before_its_last_page_when_the_rest_is_free(tmp_path: Path) -> None:
    churn = Churn(open_file(tmp_path), seed=1)
    churn.publish(3, 20_000)
    with churn.env.begin(write=True) as txn:
        txn.put(b"soon gone", bytes(1 << 20), db=churn.databases[b"payloads"])
        txn.delete(b"soon gone", db=churn.databases[b"payloads"])
    file = tmp_path / "data.mdb"
    assert file.stat().st_size < PAGE * churn.env.info()["last_pgno"]
    assert check_file(file).state == "sound"
    os.truncate(file, file.stat().st_size - PAGE)
    with pytest.raises(StoreCorrupt, match=r"truncated|last page"):
        check_file(file)


@pytest.mark.parametrize("seed", range(3))
def test_a_file_passes_after_its_writer_was_killed_at_any_moment(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for kill in range(6):
        with churning(tmp_path, seed=10 * seed + kill) as commits:
            for _ in range(rng.randrange(1, 60)):
                next(commits)
        assert check_file(tmp_path / "data.mdb").state == "sound"


# Races


def test_a_file_that_another_process_writes_is_never_called_damaged(tmp_path: Path) -> None:
    with churning(tmp_path, seed=1) as commits:
        for _ in range(40):
            next(commits)
        found = Counter(check_file(tmp_path / "data.mdb").state for _ in range(150))
    assert set(found) <= {"sound", "busy"}
    assert found["sound"]


def damage_while_checking(monkeypatch: pytest.MonkeyPatch, file: Path, findings: int) -> None:
    """The first `findings` passes find damage, and each time another transaction has been committed meanwhile."""
    passes = itertools.count(1)
    check = filecheck._check

    def interrupted(fd: int) -> Any:
        if (number := next(passes)) > findings:
            return check(fd)
        with open_file(file.parent) as env, env.begin(write=True) as txn:
            txn.put(number.to_bytes(8), b"x", db=env.open_db(b"meta", txn))
        raise StoreCorrupt("page 7 was overwritten")

    monkeypatch.setattr(filecheck, "_check", interrupted)


@pytest.mark.parametrize(("findings", "state"), [(1, "sound"), (3, "sound"), (10**6, "busy")])
def test_what_was_found_in_an_outdated_snapshot_does_not_count(
    churned: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, findings: int, state: str
) -> None:
    file = Path(shutil.copy(churned.file, tmp_path / "data.mdb"))
    damage_while_checking(monkeypatch, file, findings)
    assert check_file(file).state == state


# No file of LMDB's


def test_no_file_and_an_empty_one_are_told_apart(tmp_path: Path) -> None:
    assert check_file(tmp_path / "data.mdb").state == "absent"
    (tmp_path / "data.mdb").touch()
    assert check_file(tmp_path / "data.mdb").state == "empty"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\0", "within page 0: it was truncated"),
        (b"\0" * 3 * PAGE, "page 0 is not a meta page"),
        (b"SQLite format 3\0" * PAGE, "page 0 is not a meta page"),
        (random.Random(1).randbytes(3 * PAGE), "page 0 is not a meta page"),
        (struct.pack(">QHHIIIQQ", 0, 0, 8, 0, 0xBEEFC0DE, 1, 0, 0).ljust(2 * PAGE, b"\0"), "page 0 is not a meta page"),
    ],
    ids=["one byte", "zeros", "another format", "noise", "big-endian"],
)
def test_what_is_no_data_file_of_lmdb_is_refused(tmp_path: Path, data: bytes, problem: str) -> None:
    file = tmp_path / "data.mdb"
    file.write_bytes(data)
    with pytest.raises(StoreCorrupt, match=problem):
        check_file(file)


def test_a_symbolic_link_is_not_followed(churned: Built, tmp_path: Path) -> None:
    (tmp_path / "data.mdb").symlink_to(churned.file)
    with pytest.raises(OSError, match="symbolic link"):
        check_file(tmp_path / "data.mdb")


def test_a_folder_or_a_pipe_in_its_place_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(StoreCorrupt, match="not a regular file"):
            check_file(place)


def test_a_bad_sector_is_damage(churned: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    readable = os.pread

    def read(fd: int, size: int, offset: int) -> bytes:
        if offset > PAGE:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return readable(fd, size, offset)

    monkeypatch.setattr(os, "pread", read)
    with pytest.raises(StoreCorrupt, match=r"page \d+ cannot be read: Input/output error"):
        check_file(churned.file)


# Each field of each structure


class Locator(DataFile):
    """The places of things in a sound file."""

    @classmethod
    def of(cls, file: Path) -> Locator:
        return cls(bytearray(file.read_bytes()))

    def tree(self, name: bytes) -> int:
        """Offset of the record of a named database."""
        return next(self.data_of(node) for node in self.leaf_nodes(self.root(self.main)) if self.key(node) == name)

    @property
    def branch(self) -> int:
        """The root of the database `nodes`, a branch page."""
        return self.root(self.tree(b"nodes"))

    @property
    def leaves(self) -> list[int]:
        return [self.number(node, 6) for node in self.nodes(self.branch)]

    @property
    def leaf(self) -> int:
        """A leaf of `nodes` with several nodes, not the first."""
        return next(leaf for leaf in self.leaves[1:] if len(self.nodes(leaf)) > 1)

    @property
    def large(self) -> list[int]:
        """Nodes whose data are in overflow runs, of one leaf of `payloads`."""
        page = self.root(self.tree(b"payloads"))
        while self.kind(page) == BRANCH:
            page = self.number(self.nodes(page)[1], 6)
        return [node for node in self.nodes(page) if self.flags(node)]

    @property
    def run(self) -> int:
        """Offset of an overflow run."""
        return PAGE * self.number(self.data_of(self.large[0]), 8)

    @property
    def free_leaf(self) -> int:
        page = self.root(self.free)
        while self.kind(page) == BRANCH:
            page = self.number(self.nodes(page)[0], 6)
        return page

    def free_lists(self) -> list[int]:
        """Offsets of the lists of at least two pages in the first leaf of the free list."""
        starts = []
        for node in self.nodes(self.free_leaf):
            at = self.data_of(node)
            starts.append(self.number(at, 8) * PAGE + 16 if self.flags(node) else at)
        return [start for start in starts if self.number(start, 8) > 1]

    def set(self, place: int, value: int, size: int = 8) -> None:
        self.put(place, value.to_bytes(size, "little"))

    def add(self, place: int, change: int, size: int = 8) -> None:
        self.set(place, self.number(place, size) + change, size)


def forget_transactions(file: Locator) -> None:
    file.set(144, 2)
    file.set(PAGE + 144, 1)


Damage = Callable[[Locator], None]
HUGE = 2**64 - 2
META_DAMAGE: dict[str, Damage] = {
    "number of page 0": lambda f: f.set(0, 1),
    "kind of page 1": lambda f: f.set(PAGE + 10, 2, 2),
    "magic": lambda f: f.set(f.meta, 0, 4),
    "magic of the older one": lambda f: f.set(PAGE + 32 - f.meta, 0, 4),
    "data version": lambda f: f.set(f.meta + 4, 3, 4),
    "map size": lambda f: f.set(f.meta + 16, 1 << 50),
    "page size": lambda f: f.set(f.free, 8192, 4),
    "page size 0 of the older one": lambda f: f.set(PAGE + 32 - f.meta + 24, 0, 4),
    "free list's flags": lambda f: f.set(f.free + 4, 4, 2),
    "list of databases' flags": lambda f: f.set(f.main + 4, 4, 2),
    "list of databases' pad": lambda f: f.set(f.main, 8, 4),
    "last page": lambda f: f.add(f.meta + 120, 1),
    "huge last page": lambda f: f.add(f.meta + 120, 1 << 32),
    "last page without bounds": lambda f: f.set(f.meta + 120, HUGE),
    "last page 0": lambda f: f.set(f.meta + 120, 0),
    "small last page": lambda f: f.set(f.meta + 120, 2),
    "odd transaction": lambda f: f.add(f.meta + 128, 1),
    "huge transaction": lambda f: f.add(f.meta + 128, 1 << 63),
    "both transactions old": forget_transactions,
}
TREES: dict[str, Callable[[Locator], int]] = {
    "the free list": lambda f: f.free,
    "the list of databases": lambda f: f.main,
    "database 'nodes'": lambda f: f.tree(b"nodes"),
    "database 'payloads'": lambda f: f.tree(b"payloads"),
}
TREE_DAMAGE: dict[str, Callable[[Locator, int], None]] = {
    "depth 0": lambda f, tree: f.set(tree + 6, 0, 2),
    "depth 33": lambda f, tree: f.set(tree + 6, 33, 2),
    "depth one more": lambda f, tree: f.add(tree + 6, 1, 2),
    "branch pages": lambda f, tree: f.add(tree + 8, 1),
    "leaf pages": lambda f, tree: f.add(tree + 16, -1),
    "overflow pages": lambda f, tree: f.add(tree + 24, 1),
    "entries": lambda f, tree: f.add(tree + 32, 1),
    "no root": lambda f, tree: f.set(tree + 40, HUGE + 1),
    "meta page as root": lambda f, tree: f.set(tree + 40, 1),
    "root out of range": lambda f, tree: f.set(tree + 40, HUGE),
    "root in use": lambda f, tree: f.set(tree + 40, f.leaf),
}
PAGE_DAMAGE: dict[str, Callable[[Locator, int], None]] = {
    "number": lambda f, page: f.add(page, 1),
    "kind": lambda f, page: f.set(page + 10, 4, 2),
    "dirty": lambda f, page: f.add(page + 10, 16, 2),
    "fixed-size keys": lambda f, page: f.add(page + 10, 32, 2),
    "odd lower": lambda f, page: f.add(page + 12, 1, 2),
    "no nodes": lambda f, page: f.set(page + 12, 16, 2),
    "lower in the header": lambda f, page: f.set(page + 12, 0, 2),
    "huge lower": lambda f, page: f.set(page + 12, 0xFFFE, 2),
    "one node less": lambda f, page: f.add(page + 12, -2, 2),
    "one node more": lambda f, page: f.add(page + 12, 2, 2),
    "huge upper": lambda f, page: f.set(page + 14, PAGE + 2, 2),
    "low upper": lambda f, page: f.add(page + 14, -2, 2),
    "high upper": lambda f, page: f.add(page + 14, 2, 2),
    "odd offset": lambda f, page: f.add(page + 16, 1, 2),
    "huge offset": lambda f, page: f.set(page + 16, PAGE - 6, 2),
    "offset in the header": lambda f, page: f.set(page + 16, 0, 2),
    "one offset twice": lambda f, page: f.put(page + 16, bytes(f.data[page + 18 : page + 20])),
    "last two nodes swapped": lambda f, page: f.swap(
        page + 14 + 2 * len(f.nodes(page // PAGE)), page + 12 + 2 * len(f.nodes(page // PAGE)), 2
    ),
}
NODE_DAMAGE: dict[str, Damage] = {
    "duplicates": lambda f: f.set(f.nodes(f.leaf)[0] + 4, 4, 2),
    "overflow and tree": lambda f: f.set(f.nodes(f.leaf)[0] + 4, 3, 2),
    "a tree in a database": lambda f: f.set(f.nodes(f.leaf)[0] + 4, 2, 2),
    "in overflow, wrongly": lambda f: f.set(f.nodes(f.leaf)[0] + 4, 1, 2),
    "in the page, wrongly": lambda f: f.set(f.large[0] + 4, 0, 2),
    "no key": lambda f: f.set(f.nodes(f.leaf)[1] + 6, 0, 2),
    "long key": lambda f: f.set(f.nodes(f.leaf)[1] + 6, 512, 2),
    "longer key": lambda f: f.add(f.nodes(f.leaf)[1] + 6, 2, 2),
    "longer data": lambda f: f.add(f.nodes(f.leaf)[1], 2, 4),
    "huge data": lambda f: f.set(f.nodes(f.leaf)[1], 2**32 - 1, 4),
    "key of the first node": lambda f: f.set(f.nodes(f.leaf)[0] + 8, 0, 1),
    "key of the last node": lambda f: f.put(f.nodes(f.leaf)[-1] + 8, b"\xff" * 16),
    "keys of one leaf": lambda f: f.swap(f.nodes(f.leaf)[0] + 8, f.nodes(f.leaf)[1] + 8, 16),
    "one key twice": lambda f: f.put(f.nodes(f.leaf)[1] + 8, f.key(f.nodes(f.leaf)[0])),
    "separator too high": lambda f: f.put(f.nodes(f.branch)[-1] + 8, b"\xff" * 4),
    "separator too low": lambda f: f.put(
        f.nodes(f.branch)[1] + 8, f.key(f.nodes(f.leaves[0])[-1])[: len(f.key(f.nodes(f.branch)[1]))]
    ),
    "child out of range": lambda f: f.set(f.nodes(f.branch)[1] + 4, 1, 2),
    "meta page as child": lambda f: f.set(f.nodes(f.branch)[1], 1, 4),
    "one child twice": lambda f: f.set(f.nodes(f.branch)[1], f.leaves[0], 4),
    "a circle": lambda f: f.set(f.nodes(f.branch)[1], f.branch, 4),
    "children swapped": lambda f: f.swap(f.nodes(f.branch)[0], f.nodes(f.branch)[1], 4),
    "a free page as child": lambda f: f.set(f.nodes(f.branch)[1], f.number(f.free_lists()[0] + 8, 8), 4),
}
OVERFLOW_DAMAGE: dict[str, Damage] = {
    "out of range": lambda f: f.set(f.data_of(f.large[0]), HUGE),
    "meta page": lambda f: f.set(f.data_of(f.large[0]), 0),
    "a leaf": lambda f: f.set(f.data_of(f.large[0]), f.leaf),
    "into another run": lambda f: f.add(f.data_of(f.large[0]), 1),
    "runs swapped": lambda f: f.swap(f.large[0], f.large[1], 4),
    "one run twice": lambda f: f.set(f.data_of(f.large[0]), f.number(f.data_of(f.large[1]), 8)),
    "number": lambda f: f.add(f.run, 1),
    "kind": lambda f: f.set(f.run + 10, 2, 2),
    "no pages": lambda f: f.set(f.run + 12, 0, 4),
    "a page less": lambda f: f.add(f.run + 12, -1, 4),
    "a page more": lambda f: f.add(f.run + 12, 1, 4),
    "huge length": lambda f: f.set(f.run + 12, 2**32 - 1, 4),
    "more data": lambda f: f.add(f.large[0], PAGE, 4),
    "huge data": lambda f: f.set(f.large[0], 2**32 - 1, 4),
}
FREE_DAMAGE: dict[str, Damage] = {
    "future transaction": lambda f: f.add(f.nodes(f.free_leaf)[-1] + 8, 1 << 20),
    "transaction 0": lambda f: f.set(f.nodes(f.free_leaf)[0] + 8, 0),
    "key of 6 bytes": lambda f: f.set(f.nodes(f.free_leaf)[0] + 6, 6, 2),
    "a database": lambda f: f.set(f.nodes(f.free_leaf)[0] + 4, 2, 2),
    "count too high": lambda f: f.add(f.free_lists()[0], 1),
    "count too low": lambda f: f.add(f.free_lists()[0], -1),
    "huge count": lambda f: f.set(f.free_lists()[0], HUGE),
    "out of range": lambda f: f.set(f.free_lists()[0] + 8, HUGE),
    "ascending": lambda f: f.swap(f.free_lists()[0] + 8, f.free_lists()[0] + 16, 8),
    "one page twice": lambda f: f.set(f.free_lists()[0] + 16, f.number(f.free_lists()[0] + 8, 8)),
    "a page of another list": lambda f: f.set(f.free_lists()[0] + 8, f.number(f.free_lists()[1] + 8, 8)),
    "meta page": lambda f: f.set(last_of(f, f.free_lists()[0]), 1),
    "a page in use": lambda f: f.set(f.free_lists()[0] + 8, f.number(f.meta + 120, 8)),
}


def last_of(file: Locator, free_list: int) -> int:
    return free_list + 8 * file.number(free_list, 8)


def refused(file: Path, tmp_path: Path, damage: Damage) -> None:
    locator = Locator.of(file)
    undamaged = bytes(locator.data)
    damage(locator)
    assert bytes(locator.data) != undamaged
    copy = tmp_path / "data.mdb"
    copy.write_bytes(locator.data)
    with pytest.raises(StoreCorrupt) as caught:
        check_file(copy)
    assert str(caught.value).startswith(f"{copy} is damaged: ")
    assert "\n" not in str(caught.value)


ALONE = {
    f"{what}: {name}": case
    for what, cases in (
        ("meta", META_DAMAGE),
        ("node", NODE_DAMAGE),
        ("overflow", OVERFLOW_DAMAGE),
        ("free list", FREE_DAMAGE),
    )
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", ALONE)
def test_damage_to_one_field_is_found(churned: Built, tmp_path: Path, name: str) -> None:
    refused(churned.file, tmp_path, ALONE[name])


@pytest.mark.parametrize("name", TREE_DAMAGE)
@pytest.mark.parametrize("tree", TREES)
def test_damage_to_what_is_noted_of_a_tree_is_found(churned: Built, tmp_path: Path, tree: str, name: str) -> None:
    refused(churned.file, tmp_path, lambda f: TREE_DAMAGE[name](f, TREES[tree](f)))


PAGES: dict[str, Callable[[Locator], int]] = {
    "branch of nodes": lambda f: f.branch,
    "leaf of nodes": lambda f: f.leaf,
    "leaf of databases": lambda f: f.root(f.main),
    "branch of the free list": lambda f: f.root(f.free),
    "leaf of the free list": lambda f: f.free_leaf,
}


@pytest.mark.parametrize("name", PAGE_DAMAGE)
@pytest.mark.parametrize("page", PAGES)
def test_damage_to_a_page_is_found(with_reader: Built, tmp_path: Path, page: str, name: str) -> None:
    refused(with_reader.file, tmp_path, lambda f: PAGE_DAMAGE[name](f, PAGE * PAGES[page](f)))


@pytest.mark.parametrize("name", ["flags", "pad", "a plain record", "of another size"])
def test_damage_to_the_record_of_a_database_is_found(churned: Built, tmp_path: Path, name: str) -> None:
    def damage(file: Locator) -> None:
        tree = file.tree(b"nodes")
        node = next(node for node in file.nodes(file.root(file.main)) if file.data_of(node) == tree)
        place, value = {"flags": (tree + 4, 4), "pad": (tree, 1), "a plain record": (node + 4, 0)}.get(name, (node, 49))
        file.set(place, value, 2)

    refused(churned.file, tmp_path, damage)


def test_when_the_newer_meta_page_forgets_its_transaction_the_one_before_counts(churned: Built, tmp_path: Path) -> None:
    """LMDB starts from it as well, and its pages are still there: a transaction is lost, no more."""
    locator = Locator.of(churned.file)
    last = locator.number(locator.meta + 128, 8)
    locator.set(locator.meta + 128, last % 2)
    (tmp_path / "data.mdb").write_bytes(locator.data)
    assert check_file(tmp_path / "data.mdb").state == "sound"
    with open_file(tmp_path) as env:
        assert env.info()["last_txnid"] == last - 1
    assert use_hard(tmp_path, seed=1) == "used"


@pytest.mark.parametrize("lost", [1, PAGE, 5 * PAGE])
def test_a_truncated_file_is_found(churned: Built, tmp_path: Path, lost: int) -> None:
    """The lost pages are in use: LMDB has written it last."""
    used = max(Locator.of(churned.file).structure) * PAGE + PAGE
    refused(churned.file, tmp_path, lambda f: f.data.__delitem__(slice(used - lost, None)))


# What LMDB does with files that pass


def mutants(built: Built, folder: Path, cases: int, seed: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.faults.mutants", str(built.file), str(built.older), str(folder)]
    done = subprocess.run([*command, str(cases), str(seed)], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("which", ["churned", "with_reader"])
def test_lmdb_survives_every_damaged_file_that_passes(
    which: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    results = mutants(request.getfixturevalue(which), tmp_path / "mutant", cases=22, seed=1000)
    assert len(results) == 22
    died = [r for r in results if r["check"].startswith(("signal", "hang", "traceback"))]
    assert not died
    assert [r for r in results if r["check"] in ("sound", "empty") and r["use"] != "used"] == []
    verdicts = Counter(r["check"].partition(":")[0] for r in results)
    assert min(verdicts["sound"], verdicts["corrupt"]) > 2


def test_what_the_check_refuses_would_have_killed_lmdb(churned: Built, tmp_path: Path) -> None:
    """So the test above can fail: without its last pages this file ends the process that reads it."""
    shutil.copy(churned.file, tmp_path / "data.mdb")
    os.truncate(tmp_path / "data.mdb", 30 * PAGE)
    use = "from pathlib import Path; from tests.faults.lmdb_files import use_hard; use_hard(Path({!r}), 1)"
    done = subprocess.run([sys.executable, "-c", use.format(str(tmp_path))], capture_output=True, check=False)
    assert done.returncode < 0
    with pytest.raises(StoreCorrupt):
        check_file(tmp_path / "data.mdb")


@contextmanager
def churning(folder: Path, seed: int) -> Iterator[Iterator[str]]:
    """A process that publishes and evicts, killed at the end; yields a line for each of its commits."""
    command = [sys.executable, "-m", "tests.store.churner", str(folder), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield iter(process.stdout)
        finally:
            process.kill()


def test_all_databases_of_the_store_are_in_these_files(churned: Built) -> None:
    assert set(check_file(churned.file).entries) == set(DATABASES)
