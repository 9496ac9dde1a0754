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
from diskprefix.store.filecheck import FileState, check_file
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
        assert report.state is FileState.SOUND
        assert report.txnid == churn.env.info()["last_txnid"]
        assert report.entries == {name: stat["entries"] for name, stat in stats.items()}
        assert report.overflow_pages >= sum(stat["overflow_pages"] for stat in stats.values())
        assert report.leaked_pages == 0
        in_trees = report.branch_pages + report.leaf_pages + report.overflow_pages
        assert in_trees + report.free_pages + 2 == churn.env.info()["last_pgno"] + 1
    churn.env.close()


def test_the_files_of_these_tests_have_what_is_hard(churned: Built, with_reader: Built) -> None:
    """A free list in overflow pages, a free list of several leaves, trees with branch pages, free pages."""
    in_overflow, of_depth_2 = Locator.of(churned.file), Locator.of(with_reader.file)
    assert any(in_overflow.flags(node) & 1 for node in in_overflow.nodes(in_overflow.free_leaf))
    assert of_depth_2.kind(of_depth_2.root(of_depth_2.free)) == BRANCH
    for built in (churned, with_reader):
        locator = Locator.of(built.file)
        assert locator.kind(locator.root(locator.tree(b"nodes"))) == BRANCH
        assert check_file(built.file).free_pages > 500
        assert check_file(built.older).state is FileState.SOUND


def test_a_compacted_copy_passes(churned: Built, tmp_path: Path) -> None:
    with open_file(churned.file.parent, lock=False) as env:
        env.copy(str(tmp_path), compact=True)
    copy, original = check_file(tmp_path / "data.mdb"), check_file(churned.file)
    assert (copy.state, copy.entries, copy.free_pages) == (FileState.SOUND, original.entries, 0)


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
    assert check_file(file).state is FileState.SOUND
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
        assert check_file(tmp_path / "data.mdb").state is FileState.SOUND


# Races


def test_a_file_that_another_process_writes_is_never_called_damaged(tmp_path: Path) -> None:
    with churning(tmp_path, seed=1) as commits:
        for _ in range(40):
            next(commits)
        found = Counter(check_file(tmp_path / "data.mdb").state for _ in range(150))
    assert set(found) <= {FileState.SOUND, FileState.BUSY}
    assert found[FileState.SOUND]


def damage_while_checking(monkeypatch: pytest.MonkeyPatch, file: Path, findings: int) -> None:
    """The first `findings` passes find damage, and each time another transaction has been committed meanwhile."""
    passes = itertools.count(1)
    check = filecheck._check

    def interrupted(fd: int) -> Any:
        if next(passes) > findings:
            return check(fd)
        with open_file(file.parent) as env, env.begin(write=True) as txn:
            txn.put(os.urandom(8), b"x", db=env.open_db(b"meta", txn))
        raise StoreCorrupt("page 7 was overwritten")

    monkeypatch.setattr(filecheck, "_check", interrupted)


@pytest.mark.parametrize(("findings", "state"), [(1, FileState.SOUND), (3, FileState.SOUND), (10**6, FileState.BUSY)])
def test_what_was_found_in_an_outdated_snapshot_does_not_count(
    churned: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, findings: int, state: FileState
) -> None:
    file = Path(shutil.copy(churned.file, tmp_path / "data.mdb"))
    damage_while_checking(monkeypatch, file, findings)
    assert check_file(file).state is state


# No file of LMDB's


def test_no_file_and_an_empty_one_are_told_apart(tmp_path: Path) -> None:
    assert check_file(tmp_path / "data.mdb").state is FileState.ABSENT
    (tmp_path / "data.mdb").touch()
    assert check_file(tmp_path / "data.mdb").state is FileState.EMPTY


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\0", "within page 0: it was truncated"),
        (b"\0" * 3 * PAGE, "page 0 is not a meta page"),
        (b"SQLite format 3\0" * PAGE, "page 0 is not a meta page"),
        (random.Random(1).randbytes(3 * PAGE), "page 0 is not a meta page"),
        (struct.pack(">QHHIIIQQ", 0, 0, 8, 0, 0xBEEFC0DE, 1, 0, 0).ljust(2 * PAGE, b"\0"), "other byte order"),
    ],
    ids=["one byte", "zeros", "another format", "noise", "big-endian"],
)
def test_what_is_no_data_file_of_lmdb_is_refused(tmp_path: Path, data: bytes, problem: str) -> None:
    file = tmp_path / "data.mdb"
    file.write_bytes(data)
    with pytest.raises(StoreCorrupt, match=problem):
        check_file(file)


def test_a_file_of_lmdb_1_0_is_refused(tmp_path: Path) -> None:
    try:
        env = lmdb.open(str(tmp_path), lib_version=1)
    except (TypeError, lmdb.Error):
        pytest.skip("this py-lmdb has no LMDB 1.0")
    env.close()
    with pytest.raises(StoreCorrupt, match="page 0 is not a meta page"):
        check_file(tmp_path / "data.mdb")


def test_a_folder_or_a_pipe_in_its_place_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(StoreCorrupt, match="not a regular file"):
            check_file(place)


def test_a_bad_sector_is_damage(churned: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    readable = os.preadv

    def read(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset > PAGE:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return readable(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)
    with pytest.raises(StoreCorrupt, match=r"page \d+ cannot be read: Input/output error"):
        check_file(churned.file)


# Each field of each structure


class Locator(DataFile):
    """Where things are in a file that is sound."""

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
META_DAMAGE: dict[str, tuple[Damage, str]] = {
    "number of page 0": (lambda f: f.set(0, 1), "page 0 is not a meta page"),
    "kind of page 1": (lambda f: f.set(PAGE + 10, 2, 2), "page 1 is not a meta page"),
    "magic": (lambda f: f.set(f.meta, 0, 4), "is not a meta page"),
    "magic of the older one": (lambda f: f.set(PAGE + 32 - f.meta, 0, 4), "is not a meta page"),
    "data version": (lambda f: f.set(f.meta + 4, 3, 4), "data version 3"),
    "map size": (lambda f: f.set(f.meta + 16, 1 << 50), "map of 1125899906842624 bytes"),
    "page size": (lambda f: f.set(f.free, 8192, 4), "pages of 8192 bytes"),
    "page size 0 of the older one": (lambda f: f.set(PAGE + 32 - f.meta + 24, 0, 4), "pages of 0 bytes"),
    "free list's flags": (lambda f: f.set(f.free + 4, 4, 2), "flags 0x4"),
    "list of databases' flags": (lambda f: f.set(f.main + 4, 4, 2), "flags 0x4"),
    "list of databases' pad": (lambda f: f.set(f.main, 8, 4), "pad 8"),
    "last page": (lambda f: f.add(f.meta + 120, 1), "truncated"),
    "huge last page": (lambda f: f.add(f.meta + 120, 1 << 32), "truncated"),
    "last page without bounds": (lambda f: f.set(f.meta + 120, HUGE), "tells of 18446744073709551614 pages"),
    "last page 0": (lambda f: f.set(f.meta + 120, 0), "tells of 0 pages"),
    "small last page": (lambda f: f.set(f.meta + 120, 2), "last page is 2"),
    "odd transaction": (lambda f: f.add(f.meta + 128, 1), "impossible transaction"),
    "huge transaction": (lambda f: f.add(f.meta + 128, 1 << 63), "impossible transaction"),
    "both transactions old": (forget_transactions, "frees pages in an impossible transaction"),
}
TREES: dict[str, Callable[[Locator], int]] = {
    "the free list": lambda f: f.free,
    "the list of databases": lambda f: f.main,
    "database 'nodes'": lambda f: f.tree(b"nodes"),
    "database 'payloads'": lambda f: f.tree(b"payloads"),
}
TREE_DAMAGE: dict[str, tuple[Callable[[Locator, int], None], str]] = {
    "depth 0": (lambda f, tree: f.set(tree + 6, 0, 2), "impossible depth 0"),
    "depth 33": (lambda f, tree: f.set(tree + 6, 33, 2), "impossible depth 33"),
    "depth one more": (lambda f, tree: f.add(tree + 6, 1, 2), "is of another kind"),
    "branch pages": (lambda f, tree: f.add(tree + 8, 1), "branch pages, the file notes"),
    "leaf pages": (lambda f, tree: f.add(tree + 16, -1), "leaf pages, the file notes"),
    "overflow pages": (lambda f, tree: f.add(tree + 24, 1), "overflow pages, the file notes"),
    "entries": (lambda f, tree: f.add(tree + 32, 1), "entries, the file notes"),
    "no root": (lambda f, tree: f.set(tree + 40, HUGE + 1), "is empty, yet its depth is"),
    "meta page as root": (lambda f, tree: f.set(tree + 40, 1), "would be page 1"),
    "root out of range": (lambda f, tree: f.set(tree + 40, HUGE), "would be page"),
    "root in use": (
        lambda f, tree: f.set(tree + 40, f.leaf),
        "already in use|of another kind|no transaction number|no database",
    ),
}
PAGE_DAMAGE: dict[str, tuple[Callable[[Locator, int], None], str]] = {
    "number": (lambda f, page: f.add(page, 1), "another page's number"),
    "kind": (lambda f, page: f.set(page + 10, 4, 2), "of another kind"),
    "dirty": (lambda f, page: f.add(page + 10, 16, 2), "of another kind"),
    "fixed-size keys": (lambda f, page: f.add(page + 10, 32, 2), "of another kind"),
    "odd lower": (lambda f, page: f.add(page + 12, 1, 2), "odd number of offset bytes"),
    "no nodes": (lambda f, page: f.set(page + 12, 16, 2), "too few nodes"),
    "lower in the header": (lambda f, page: f.set(page + 12, 0, 2), "too few nodes"),
    "huge lower": (lambda f, page: f.set(page + 12, 0xFFFE, 2), "bounds outside itself"),
    "one node less": (lambda f, page: f.add(page + 12, -2, 2), "gap|reach its end"),
    "one node more": (lambda f, page: f.add(page + 12, 2, 2), "outside its place|overlap|key of a wrong size"),
    "huge upper": (lambda f, page: f.set(page + 14, PAGE + 2, 2), "bounds outside itself"),
    "low upper": (lambda f, page: f.add(page + 14, -2, 2), "gap"),
    "high upper": (lambda f, page: f.add(page + 14, 2, 2), "outside its place"),
    "odd offset": (lambda f, page: f.add(page + 16, 1, 2), "outside its place"),
    "huge offset": (lambda f, page: f.set(page + 16, PAGE - 6, 2), "outside its place"),
    "offset in the header": (lambda f, page: f.set(page + 16, 0, 2), "outside its place"),
    "one offset twice": (lambda f, page: f.put(page + 16, bytes(f.data[page + 18 : page + 20])), "overlap"),
    "last two nodes swapped": (
        lambda f, page: f.swap(
            page + 14 + 2 * len(f.nodes(page // PAGE)), page + 12 + 2 * len(f.nodes(page // PAGE)), 2
        ),
        "out of order|belong|key of a wrong size|no transaction number",
    ),
}
NODE_DAMAGE: dict[str, tuple[Damage, str]] = {
    "duplicates": (lambda f: f.set(f.nodes(f.leaf)[0] + 4, 4, 2), "unknown kind"),
    "overflow and tree": (lambda f: f.set(f.nodes(f.leaf)[0] + 4, 3, 2), "unknown kind"),
    "a tree in a database": (lambda f: f.set(f.nodes(f.leaf)[0] + 4, 2, 2), "database within a database"),
    "in overflow, wrongly": (lambda f: f.set(f.nodes(f.leaf)[0] + 4, 1, 2), "gap|reach its end"),
    "in the page, wrongly": (lambda f: f.set(f.large[0] + 4, 0, 2), "too large for a page|overlap"),
    "no key": (lambda f: f.set(f.nodes(f.leaf)[1] + 6, 0, 2), "key of a wrong size"),
    "long key": (lambda f: f.set(f.nodes(f.leaf)[1] + 6, 512, 2), "key of a wrong size"),
    "longer key": (lambda f: f.add(f.nodes(f.leaf)[1] + 6, 2, 2), "overlap|reach its end"),
    "longer data": (lambda f: f.add(f.nodes(f.leaf)[1], 2, 4), "overlap|reach its end"),
    "huge data": (lambda f: f.set(f.nodes(f.leaf)[1], 2**32 - 1, 4), "too large for a page"),
    "key of the first node": (lambda f: f.set(f.nodes(f.leaf)[0] + 8, 0, 1), "belongs before it"),
    "key of the last node": (lambda f: f.put(f.nodes(f.leaf)[-1] + 8, b"\xff" * 16), "belong into it or behind it"),
    "keys of one leaf": (lambda f: f.swap(f.nodes(f.leaf)[0] + 8, f.nodes(f.leaf)[1] + 8, 16), "out of order"),
    "one key twice": (
        lambda f: f.put(f.nodes(f.leaf)[1] + 8, f.key(f.nodes(f.leaf)[0])),
        "out of order",
    ),
    "separator too high": (lambda f: f.put(f.nodes(f.branch)[-1] + 8, b"\xff" * 4), "belongs before it"),
    "separator too low": (
        lambda f: f.put(f.nodes(f.branch)[1] + 8, f.key(f.nodes(f.leaves[0])[-1])[: len(f.key(f.nodes(f.branch)[1]))]),
        "belong into it",
    ),
    "child out of range": (lambda f: f.set(f.nodes(f.branch)[1] + 4, 1, 2), "child in database 'nodes' would be page"),
    "meta page as child": (lambda f: f.set(f.nodes(f.branch)[1], 1, 4), "would be page 1"),
    "one child twice": (lambda f: f.set(f.nodes(f.branch)[1], f.leaves[0], 4), "referred to twice"),
    "a circle": (lambda f: f.set(f.nodes(f.branch)[1], f.branch, 4), "already in use"),
    "children swapped": (lambda f: f.swap(f.nodes(f.branch)[0], f.nodes(f.branch)[1], 4), "belong"),
    "a free page as child": (lambda f: f.set(f.nodes(f.branch)[1], f.number(f.free_lists()[0] + 8, 8), 4), "free list"),
}
OVERFLOW_DAMAGE: dict[str, tuple[Damage, str]] = {
    "out of range": (lambda f: f.set(f.data_of(f.large[0]), HUGE), "overflow run in database 'payloads' would be"),
    "meta page": (lambda f: f.set(f.data_of(f.large[0]), 0), "would be page 0"),
    "a leaf": (lambda f: f.set(f.data_of(f.large[0]), f.leaf), "already in use|of another kind"),
    "into another run": (lambda f: f.add(f.data_of(f.large[0]), 1), "another page's number|of another kind"),
    "runs swapped": (lambda f: f.swap(f.large[0], f.large[1], 4), "fewer pages than its data need"),
    "one run twice": (
        lambda f: f.set(f.data_of(f.large[0]), f.number(f.data_of(f.large[1]), 8)),
        "referred to twice",
    ),
    "number": (lambda f: f.add(f.run, 1), "another page's number"),
    "kind": (lambda f: f.set(f.run + 10, 2, 2), "of another kind"),
    "no pages": (lambda f: f.set(f.run + 12, 0, 4), "fewer pages than its data need"),
    "a page less": (lambda f: f.add(f.run + 12, -1, 4), "fewer pages than its data need"),
    "a page more": (lambda f: f.add(f.run + 12, 1, 4), "meets another|already|file notes"),
    "huge length": (lambda f: f.set(f.run + 12, 2**32 - 1, 4), "ends behind the last page|meets another"),
    "more data": (lambda f: f.add(f.large[0], PAGE, 4), "fewer pages than its data need"),
    "huge data": (lambda f: f.set(f.large[0], 2**32 - 1, 4), "fewer pages than its data need"),
}
FREE_DAMAGE: dict[str, tuple[Damage, str]] = {
    "future transaction": (lambda f: f.add(f.nodes(f.free_leaf)[-1] + 8, 1 << 20), "impossible transaction|belong"),
    "transaction 0": (lambda f: f.set(f.nodes(f.free_leaf)[0] + 8, 0), "impossible transaction"),
    "key of 6 bytes": (lambda f: f.set(f.nodes(f.free_leaf)[0] + 6, 6, 2), "no transaction number"),
    "a database": (lambda f: f.set(f.nodes(f.free_leaf)[0] + 4, 2, 2), "database in the free list|overlap|too large"),
    "count too high": (lambda f: f.add(f.free_lists()[0], 1), r"tells of \d+ pages in"),
    "count too low": (lambda f: f.add(f.free_lists()[0], -1), r"tells of \d+ pages in"),
    "huge count": (lambda f: f.set(f.free_lists()[0], HUGE), "tells of 18446744073709551614 pages in"),
    "out of range": (lambda f: f.set(f.free_lists()[0] + 8, HUGE), "out of order, or has pages behind the last"),
    "ascending": (lambda f: f.swap(f.free_lists()[0] + 8, f.free_lists()[0] + 16, 8), "out of order"),
    "one page twice": (lambda f: f.set(f.free_lists()[0] + 16, f.number(f.free_lists()[0] + 8, 8)), "out of order"),
    "a page of another list": (
        lambda f: f.set(f.free_lists()[0] + 8, f.number(f.free_lists()[1] + 8, 8)),
        "already in the free list|out of order",
    ),
    "meta page": (lambda f: f.set(last_of(f, f.free_lists()[0]), 1), "has meta page 1"),
    "a page in use": (lambda f: f.set(f.free_lists()[0] + 8, f.number(f.meta + 120, 8)), "already in"),
}


def last_of(file: Locator, free_list: int) -> int:
    return free_list + 8 * file.number(free_list, 8)


def refused(file: Path, tmp_path: Path, damage: Damage, problem: str) -> None:
    locator = Locator.of(file)
    undamaged = bytes(locator.data)
    damage(locator)
    assert bytes(locator.data) != undamaged
    copy = tmp_path / "data.mdb"
    copy.write_bytes(locator.data)
    with pytest.raises(StoreCorrupt, match=problem) as caught:
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
    damage, problem = ALONE[name]
    refused(churned.file, tmp_path, damage, problem)


@pytest.mark.parametrize("name", TREE_DAMAGE)
@pytest.mark.parametrize("tree", TREES)
def test_damage_to_what_is_noted_of_a_tree_is_found(churned: Built, tmp_path: Path, tree: str, name: str) -> None:
    damage, problem = TREE_DAMAGE[name]
    refused(churned.file, tmp_path, lambda f: damage(f, TREES[tree](f)), problem)


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
    damage, problem = PAGE_DAMAGE[name]
    refused(with_reader.file, tmp_path, lambda f: damage(f, PAGE * PAGES[page](f)), problem)


@pytest.mark.parametrize("name", ["flags", "pad", "a plain record", "of another size"])
def test_damage_to_the_record_of_a_database_is_found(churned: Built, tmp_path: Path, name: str) -> None:
    def damage(file: Locator) -> None:
        tree = file.tree(b"nodes")
        node = next(node for node in file.nodes(file.root(file.main)) if file.data_of(node) == tree)
        place, value = {"flags": (tree + 4, 4), "pad": (tree, 1), "a plain record": (node + 4, 0)}.get(name, (node, 49))
        file.set(place, value, 2)

    refused(churned.file, tmp_path, damage, "no database|not ours|reach its end|overlap")


def test_when_the_newer_meta_page_forgets_its_transaction_the_one_before_counts(churned: Built, tmp_path: Path) -> None:
    """LMDB starts from it as well, and its pages are still there: a transaction is lost, no more."""
    locator, last = Locator.of(churned.file), check_file(churned.file).txnid
    locator.set(locator.meta + 128, last % 2)
    (tmp_path / "data.mdb").write_bytes(locator.data)
    assert check_file(tmp_path / "data.mdb").txnid == last - 1
    with open_file(tmp_path) as env:
        assert env.info()["last_txnid"] == last - 1
    assert use_hard(tmp_path, seed=1) == "used"


@pytest.mark.parametrize("lost", [1, PAGE, 5 * PAGE])
def test_a_truncated_file_is_found(churned: Built, tmp_path: Path, lost: int) -> None:
    """What it loses is in use: LMDB has written it last."""
    used = max(Locator.of(churned.file).structure) * PAGE + PAGE
    refused(churned.file, tmp_path, lambda f: f.data.__delitem__(slice(used - lost, None)), "truncated|last page")


def test_leaked_pages_are_counted_and_no_damage(churned: Built, tmp_path: Path) -> None:
    """A list that misses its last page: one page is lost to all."""
    locator = Locator.of(with_plain_free_list(churned.file, tmp_path))
    node = next(n for n in locator.nodes(locator.free_leaf) if not locator.flags(n))
    start, page = locator.data_of(node), locator.free_leaf * PAGE
    # The node shrinks by one page number, and all that lies before it in the page moves up to close the gap.
    upper = page + locator.number(page + 14, 2)
    locator.add(start, -1)
    locator.add(node, -8, 4)
    end = start + locator.number(node, 4)
    locator.data[upper + 8 : end + 8] = locator.data[upper:end]
    for slot, other in enumerate(locator.nodes(locator.free_leaf)):
        if other <= node:
            locator.add(page + 16 + 2 * slot, 8, 2)
    locator.add(page + 14, 8, 2)
    file = tmp_path / "leaking.mdb"
    file.write_bytes(locator.data)
    assert check_file(file).leaked_pages == 1


def with_plain_free_list(file: Path, folder: Path) -> Path:
    """A copy after one more small transaction, whose freed pages are listed in the leaf itself."""
    shutil.copy(file, folder / "data.mdb")
    with open_file(folder) as env, env.begin(write=True) as txn:
        txn.put(b"one more", b"x", db=env.open_db(b"meta", txn))
    return folder / "data.mdb"


# What LMDB does with files that pass


def mutants(built: Built, folder: Path, cases: int, seed: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.faults.mutants", str(built.file), str(built.older), str(folder)]
    done = subprocess.run([*command, str(cases), str(seed)], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("which", ["churned", "with_reader"])
def test_lmdb_survives_every_damaged_file_that_passes(
    which: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    results = mutants(request.getfixturevalue(which), tmp_path / "mutant", cases=88, seed=1000)
    assert len(results) == 88
    died = [r for r in results if r["check"].startswith(("signal", "hang", "traceback"))]
    assert not died
    assert [r for r in results if r["check"] in ("sound", "empty") and r["use"] != "used"] == []
    verdicts = Counter(r["check"].partition(":")[0] for r in results)
    assert min(verdicts["sound"], verdicts["corrupt"]) > 10


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
