"""Is `data.mdb` sound? A check of its structure that never uses LMDB, run before LMDB opens the file.

LMDB trusts its file: a damaged page number, node, length or free list ends in a signal, an endless loop, or writes over
pages in use. So everything that LMDB follows or counts on is followed here first: the meta pages, every branch and leaf
page of every database, the header of every overflow run, the lists of free pages. Every page must be reached once or be
free once. What is *in* a record is not looked at: checksums of the records do that.

Whatever the bytes are, the check ends: no page is visited twice, and nothing is allocated by a number from the file
that was not compared with the file's size. It reads with `pread`, since a map would turn a bad sector into SIGBUS. Its
cost is that of the branch and leaf pages and 16 bytes for each overflow run, not of the payloads.

Another process may write meanwhile. The pages of the snapshot that is checked stay as they are until two transactions
later; so a finding counts only if the meta pages are still the same afterwards, else the check starts anew.
"""

from __future__ import annotations

import mmap
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from diskprefix.errors import StoreCorrupt
from diskprefix.store.lmdb_format import (
    BRANCH,
    LEAF,
    MAX_KEY_BYTES,
    META_BYTES,
    NO_PAGE,
    NODE_IS_TREE,
    NUM_METAS,
    OVERFLOW,
    OVERFLOW_HEADER,
    PAGE_HEADER_BYTES,
    TREE_BYTES,
    Ints,
    Keys,
    Meta,
    Nodes,
    Numbers,
    PageContent,
    Pages,
    Tree,
    overflow_pages,
)

_ATTEMPTS = 4
_PAGES_AT_ONCE = 256
_RUNS_AT_ONCE = 4096
_FREE_BYTES_AT_ONCE = 1 << 20
_LARGEST_PAGE_BYTES = 1 << 15
_MAX_DEPTH = 32
_MAX_MAP_BYTES = 1 << 46
"""LMDB may map as much as the meta page says; a map that cannot be had leaves it with a null pointer."""
_MAX_TXNID = 1 << 62
_FREE_FLAGS = (0x0008, 0x4008)
"""Integer keys; and with MDB_NOSUBDIR, which LMDB writes into the same field."""
_UNUSED, _IN_TREE, _FREE = 0, 1, 2


class FileState(Enum):
    ABSENT = "absent"
    """There is no file: LMDB would create it."""
    EMPTY = "empty"
    """A file of 0 bytes: LMDB would initialise it."""
    SOUND = "sound"
    BUSY = "busy"
    """Another process writes so fast that no snapshot held still: it has the file open, and LMDB with it."""


@dataclass(frozen=True, kw_only=True)
class FileReport:
    """What the check found in a file that LMDB can open. Pages are counted as of transaction `txnid`.

    `leaked_pages` are neither used nor free: lost room, harmless otherwise. `entries` is by name of database.
    """

    state: FileState
    txnid: int = 0
    page_bytes: int = 0
    branch_pages: int = 0
    leaf_pages: int = 0
    overflow_pages: int = 0
    free_pages: int = 0
    leaked_pages: int = 0
    entries: dict[bytes, int] = field(default_factory=dict)


def check_file(path: Path) -> FileReport:
    """Check the structure of an LMDB data file.

    Raises `StoreCorrupt`, one line that names the problem and its page, if LMDB could crash, hang or err on it, and
    `OSError` if the file cannot be opened.
    """
    try:
        # A pipe in its place must not make us wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return FileReport(state=FileState.ABSENT)
    try:
        for _ in range(_ATTEMPTS):
            before = _identity(fd)
            try:
                return _check(fd)
            except StoreCorrupt as error:
                if _identity(fd) == before:
                    raise StoreCorrupt(f"{path} is damaged: {error}") from error
        return FileReport(state=FileState.BUSY)
    finally:
        os.close(fd)


def _identity(fd: int) -> tuple[int, bytes]:
    """What changes with every transaction that another process commits."""
    size = os.fstat(fd).st_size
    try:
        return size, os.pread(fd, META_BYTES, 0) + os.pread(fd, META_BYTES, _page_bytes())
    except OSError:
        return size, b""


def _page_bytes() -> int:
    """The size of a page in a file that LMDB makes on this machine."""
    return min(mmap.PAGESIZE, _LARGEST_PAGE_BYTES)


def _check(fd: int) -> FileReport:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise StoreCorrupt("it is not a regular file")
    if status.st_size == 0:
        return FileReport(state=FileState.EMPTY)
    return _Check(_File(fd, status.st_size)).run()


class _File:
    """Pages by number. A read that fails or ends early is damage: LMDB would be killed by it."""

    def __init__(self, fd: int, size: int) -> None:
        self.page_bytes = _page_bytes()
        self.num_pages = size // self.page_bytes
        self._fd = fd

    def read(self, start: int, size: int) -> bytes:
        buffer = bytearray(size)
        self._read_into(memoryview(buffer), start)
        return bytes(buffer)

    def pages(self, numbers: Ints, what: str) -> PageContent:
        """Whole pages, in the order of `numbers`."""
        size, count = self.page_bytes, len(numbers)
        content = np.empty(count * size + MAX_KEY_BYTES + 1, np.uint8)
        order = np.argsort(numbers)
        ordered = content if (order[:-1] < order[1:]).all() else np.empty(count * size, np.uint8)
        view = ordered.data
        runs = list(_runs(numbers[order]))
        for first, last, number in runs:
            self._expect(number * size, (last - first) * size)
        for first, last, number in runs:
            self._read_into(view[first * size : last * size], number * size)
        if ordered is not content:
            content[: count * size].reshape(count, size)[order] = ordered.reshape(count, size)
        return PageContent(numbers, what, size, content)

    def overflow_headers(self, numbers: Ints) -> npt.NDArray[np.void]:
        """The headers of overflow runs; sorted `numbers` read best."""
        buffer = bytearray(PAGE_HEADER_BYTES * len(numbers))
        view = memoryview(buffer)
        starts = (numbers * self.page_bytes).tolist()
        for start in starts:
            self._expect(start, PAGE_HEADER_BYTES)
        for i, start in enumerate(starts):
            self._read_into(view[i * PAGE_HEADER_BYTES : (i + 1) * PAGE_HEADER_BYTES], start)
        return np.frombuffer(buffer, OVERFLOW_HEADER)

    def _expect(self, start: int, size: int) -> None:
        """Have the kernel read ahead, all that is announced at once."""
        if sys.platform == "linux":
            os.posix_fadvise(self._fd, start, size, os.POSIX_FADV_WILLNEED)

    def _read_into(self, view: memoryview, start: int) -> None:
        while view:
            page = start // self.page_bytes
            try:
                got = os.preadv(self._fd, [view], start)
            except OSError as error:
                raise StoreCorrupt(f"page {page} cannot be read: {error.strerror}") from error
            if not got:
                raise StoreCorrupt(f"the file ends within page {page}: it was truncated")
            # A read that ends early names the bad sector when it is gone on with.
            view, start = view[got:], start + got


def _runs(numbers: Ints) -> Iterator[tuple[int, int, int]]:
    """Runs of consecutive numbers in a sorted array: index of the first, index behind the last, first number."""
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    starts = np.concatenate([[0], cuts])
    yield from zip(starts.tolist(), [*cuts.tolist(), len(numbers)], numbers[starts].tolist(), strict=True)


@dataclass
class _Walk:
    """One tree on its way: what was counted, and where each level has got to."""

    name: str
    tree: Tree
    numeric_keys: bool = False
    branch_pages: int = 0
    leaf_pages: int = 0
    overflow_pages: int = 0
    entries: int = 0
    last_keys: dict[int, Keys] = field(default_factory=dict)
    """By level: the last key of the last page, one `Keys` of length 1."""

    def verify_counts(self) -> None:
        for what in ("branch_pages", "leaf_pages", "overflow_pages", "entries"):
            counted, noted = getattr(self, what), getattr(self.tree, what)
            if counted != noted:
                raise StoreCorrupt(f"{self.name} has {counted} {what.replace('_', ' ')}, the file notes {noted}")


class _Check:
    """One pass over one snapshot."""

    def __init__(self, file: _File) -> None:
        self._file = file
        self._meta = self._choose_meta()
        # Pages behind the end of the file can only be free. They are kept apart: a false count must cost no memory.
        self._owner = np.zeros(min(self._meta.last_page + 1, file.num_pages), np.uint8)
        self._owner[:NUM_METAS] = _IN_TREE
        self._free_behind_end: list[Numbers] = []
        self._num_free = 0

    def run(self) -> FileReport:
        meta = self._meta
        free = _Walk("the free list", meta.free, numeric_keys=True)
        for page, nodes in self._leaves(free):
            self._read_free_lists(page, nodes)
        self._check_end()
        main = _Walk("the list of databases", meta.main)
        named: dict[bytes, Tree] = {}
        for page, nodes in self._leaves(main):
            named |= self._read_trees(page, nodes)
        walks = [free, main]
        for name, tree in named.items():
            walk = _Walk(f"database {name.decode(errors='replace')!r}", tree)
            for page, nodes in self._leaves(walk):
                page.require((nodes.flags & NODE_IS_TREE) == 0, "has a database within a database", nodes.page)
            walks.append(walk)
        return FileReport(
            state=FileState.SOUND,
            txnid=meta.txnid,
            page_bytes=meta.page_bytes,
            branch_pages=sum(walk.branch_pages for walk in walks),
            leaf_pages=sum(walk.leaf_pages for walk in walks),
            overflow_pages=sum(walk.overflow_pages for walk in walks),
            free_pages=self._num_free,
            leaked_pages=int((self._owner == _UNUSED).sum()),
            entries={name: tree.entries for name, tree in named.items()},
        )

    def _choose_meta(self) -> Meta:
        """The meta page that LMDB would start from. It needs both to be valid, and takes the later transaction."""
        size = self._file.page_bytes
        metas = []
        for number in range(NUM_METAS):
            meta = Meta.parse(self._file.read(number * size, META_BYTES), number)
            if meta.page_bytes != size:
                raise StoreCorrupt(f"meta page {number} tells of pages of {meta.page_bytes} bytes instead of {size}")
            if meta.txnid > _MAX_TXNID or (meta.txnid and meta.txnid % NUM_METAS != number):
                raise StoreCorrupt(f"meta page {number} has the impossible transaction {meta.txnid}")
            metas.append(meta)
        number = int(metas[0].txnid < metas[1].txnid)
        meta = metas[number]
        if meta.map_bytes > _MAX_MAP_BYTES:
            raise StoreCorrupt(f"meta page {number} tells of a map of {meta.map_bytes} bytes")
        if meta.free.flags not in _FREE_FLAGS:
            raise StoreCorrupt(f"meta page {number} has the wrong flags {meta.free.flags:#x} for the free list")
        if not NUM_METAS - 1 <= meta.last_page < _MAX_MAP_BYTES // size:
            raise StoreCorrupt(f"meta page {number} tells of {meta.last_page} pages")
        _check_plain(meta.main, f"meta page {number}")
        return meta

    def _leaves(self, walk: _Walk) -> Iterator[tuple[PageContent, Nodes]]:
        """Check a whole tree, the generator being exhausted, and yield its leaf pages in key order."""
        tree = walk.tree
        if tree.root == NO_PAGE:
            if tree.depth:
                raise StoreCorrupt(f"{walk.name} is empty, yet its depth is {tree.depth}")
        elif not 1 <= tree.depth <= _MAX_DEPTH:
            raise StoreCorrupt(f"{walk.name} has the impossible depth {tree.depth}")
        else:
            root = self._claim(np.array([tree.root], np.uint64), f"the root of {walk.name}")
            yield from self._level(walk, root, Keys.empty(1), tree.depth)
        walk.verify_counts()

    def _level(self, walk: _Walk, numbers: Ints, bounds: Keys, height: int) -> Iterator[tuple[PageContent, Nodes]]:
        """Check pages that follow each other in key order, and all below; `bounds` are their lowest possible keys."""
        kind = LEAF if height == 1 else BRANCH
        what = f"{'leaf' if kind == LEAF else 'branch'} page of {walk.name}"
        for start in range(0, len(numbers), _PAGES_AT_ONCE):
            some = slice(start, start + _PAGES_AT_ONCE)
            page = self._file.pages(numbers[some], what)
            nodes = page.nodes(kind, numeric_keys=walk.numeric_keys)
            _check_order(walk, page, nodes, bounds[some], height)
            if kind == LEAF:
                walk.leaf_pages += len(page.numbers)
                walk.entries += len(nodes.slot)
                self._check_overflow(walk, page, nodes)
                yield page, nodes
            else:
                walk.branch_pages += len(page.numbers)
                children = self._claim(nodes.children.astype(np.uint64), f"a child in {walk.name}")
                yield from self._level(walk, children, _bounds_of_children(nodes, bounds[some]), height - 1)

    def _check_overflow(self, walk: _Walk, page: PageContent, nodes: Nodes) -> None:
        """Check and claim the overflow runs that these leaf nodes point to."""
        holders = np.flatnonzero(nodes.in_overflow)
        for start in range(0, len(holders), _RUNS_AT_ONCE):
            some = holders[start : start + _RUNS_AT_ONCE]
            numbers = self._claim(nodes.overflow_numbers(some), f"an overflow run in {walk.name}")
            order = np.argsort(numbers)
            runs, data_size = Pages(numbers[order], f"overflow page of {walk.name}"), nodes.lows[some][order]
            header = self._file.overflow_headers(runs.numbers)
            runs.require(header["number"] == runs.numbers.astype(np.uint64), "has another page's number")
            runs.require(header["kind"] == OVERFLOW, "is of another kind")
            length = header["pages"].astype(np.int64)
            # A value that was overwritten by a shorter one in the same transaction keeps its pages.
            runs.require(length >= overflow_pages(data_size, page.page_bytes), "has fewer pages than its data need")
            runs.require(runs.numbers + length <= len(self._owner), "begins a run that ends behind the last page")
            walk.overflow_pages += int(length.sum())
            self._claim_rest(runs, length)

    def _claim_rest(self, runs: Pages, length: Ints) -> None:
        """Claim the pages of runs behind their first ones; the runs are sorted by number."""
        runs.require(np.append(np.diff(runs.numbers) >= length[:-1], True), "begins a run that meets another")
        ends = np.cumsum(length - 1)
        start = 0
        while start < len(length):
            # Few runs at a time: page numbers take eight bytes each.
            stop = max(start + 1, int(np.searchsorted(ends, ends[start] + _FREE_BYTES_AT_ONCE)))
            first, count = runs.numbers[start:stop] + 1, length[start:stop] - 1
            pages = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))
            self._take(pages.astype(np.uint64), _IN_TREE, "an overflow run")
            start = stop

    def _claim(self, numbers: Numbers, what: str) -> Ints:
        """Page numbers as they stand in the file, once they are known to be in it and in use for the first time."""
        good = (numbers >= NUM_METAS) & (numbers < len(self._owner))
        if not good.all():
            wrong = int(numbers[np.argmin(good)])
            raise StoreCorrupt(f"{what} would be page {wrong}, but the last page is {len(self._owner) - 1}")
        self._take(numbers, _IN_TREE, what)
        return numbers.astype(np.int64)

    def _take(self, numbers: Numbers, owner: int, what: str) -> None:
        """Note who owns pages; each may have one owner. The numbers are known to be within the file."""
        taken = self._owner[numbers]
        self._owner[numbers] = owner
        if taken.any():
            first = int(np.argmax(taken != _UNUSED))
            also = "in the free list" if taken[first] == _FREE else "in use"
            raise StoreCorrupt(f"page {numbers[first]} ({what}) is already {also}")
        if len(numbers) > 1:
            ordered = np.sort(numbers)
            twice = ordered[1:] == ordered[:-1]
            if twice.any():
                raise StoreCorrupt(f"page {ordered[1:][twice][0]} ({what}) is referred to twice")

    def _read_free_lists(self, page: PageContent, nodes: Nodes) -> None:
        """Read and claim the pages in each record of the free list."""
        page.require((nodes.flags & NODE_IS_TREE) == 0, "has a database in the free list", nodes.page)
        txnids = nodes.keys.words[:, 0]
        page.require(
            (txnids > 0) & (txnids <= self._meta.txnid), "frees pages in an impossible transaction", nodes.page
        )
        size = nodes.lows
        page.require((size >= 8) & (size % 8 == 0), "has a free list of a wrong size", nodes.page)
        for node in range(len(nodes.slot)):
            self._read_free_list(nodes, node, f"free list of transaction {txnids[node]}")

    def _read_free_list(self, nodes: Nodes, node: int, what: str) -> None:
        data, size = nodes.data(node), int(nodes.lows[node])
        if nodes.in_overflow[node]:
            start = int.from_bytes(data, "little") * self._file.page_bytes + PAGE_HEADER_BYTES
            pieces: Iterator[bytes] = (
                self._file.read(start + at, min(_FREE_BYTES_AT_ONCE, size - at))
                for at in range(0, size, _FREE_BYTES_AT_ONCE)
            )
        else:
            pieces = iter([data])
        lowest = self._meta.last_page + 1
        count = None
        for piece in pieces:
            numbers = np.frombuffer(piece, "<u8")
            if count is None:
                count, numbers = int(numbers[0]), numbers[1:]
                if count != size // 8 - 1:
                    raise StoreCorrupt(f"the {what} tells of {count} pages in {size} bytes")
            if not len(numbers):
                continue
            if int(numbers[0]) >= lowest or (numbers[1:] >= numbers[:-1]).any():
                raise StoreCorrupt(f"the {what} is out of order, or has pages behind the last one")
            lowest = int(numbers[-1])
            if lowest < NUM_METAS:
                raise StoreCorrupt(f"the {what} has meta page {lowest}")
            behind = numbers >= len(self._owner)
            self._take(numbers[~behind], _FREE, what)
            self._free_behind_end.append(numbers[behind])
            self._num_free += len(numbers)

    def _check_end(self) -> None:
        """Every page behind the end of the file must be free, and once: a page that is in use has been written."""
        missing = self._meta.last_page + 1 - len(self._owner)
        numbers = np.concatenate([np.empty(0, np.uint64), *self._free_behind_end])
        if len(numbers) != missing or len(np.unique(numbers)) != missing:
            raise StoreCorrupt(
                f"the file ends before page {len(self._owner)} of {self._meta.last_page + 1}: it was truncated"
            )

    def _read_trees(self, page: PageContent, nodes: Nodes) -> dict[bytes, Tree]:
        """The named databases in a leaf of the main tree, which holds nothing else."""
        plain = (nodes.flags == NODE_IS_TREE) & (nodes.lows == TREE_BYTES)
        page.require(plain, "has a record that is no database", nodes.page)
        trees = {}
        for node in range(len(nodes.slot)):
            key_end = int(nodes.data_at[node])
            name = nodes.content[key_end - int(nodes.keys.sizes[node]) : key_end].tobytes()
            trees[name] = tree = Tree.parse(nodes.data(node))
            _check_plain(tree, f"page {page.numbers[nodes.page[node]]} (database {name.decode(errors='replace')!r})")
        return trees


def _check_plain(tree: Tree, where: str) -> None:
    """A database of ours has no duplicates, no keys that are numbers, no fixed sizes."""
    if tree.flags or tree.pad:
        raise StoreCorrupt(f"{where} has flags {tree.flags:#x} or pad {tree.pad} of a database that is not ours")


def _check_order(walk: _Walk, page: PageContent, nodes: Nodes, bounds: Keys, height: int) -> None:
    """Keys ascend within a page, none comes before its page's bound, and none of the page before reaches it."""
    keys, slot = nodes.keys, nodes.slot
    first_slot = 0 if height == 1 else 1
    # The first key of a branch page is not looked at: neither is what would compare with it.
    follows = np.flatnonzero(slot > first_slot)
    page.require(keys[follows - 1].before(keys[follows]), "has keys out of order", nodes.page[follows])
    page.require(~keys[np.flatnonzero(slot == first_slot)].before(bounds), "has a key that belongs before it")
    last = np.append(np.flatnonzero(slot == 0)[1:] - 1, len(slot) - 1)
    previous = walk.last_keys.get(height)
    if previous is None:
        fits = np.append(True, keys[last[:-1]].before(bounds[1:]))
    else:
        fits = Keys.concatenate([previous, keys[last[:-1]]]).before(bounds)
    page.require(fits, "comes after a page with keys that belong into it or behind it")
    walk.last_keys[height] = keys[last[-1:]]


def _bounds_of_children(nodes: Nodes, bounds: Keys) -> Keys:
    """The lowest possible key of each child: its own in the branch page, the page's bound for the first."""
    keys = Keys.concatenate([nodes.keys, bounds])
    return keys[np.where(nodes.slot == 0, len(nodes.slot) + nodes.page, np.arange(len(nodes.slot)))]
