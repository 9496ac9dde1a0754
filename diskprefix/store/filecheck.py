"""Checks the structure of `data.mdb` without LMDB, before LMDB opens the file (LMDB 0.9, data version 1).

LMDB trusts its file. A damaged page number, node, length or free list ends in a signal, in an endless loop, or in a
write over pages that are in use. So this module follows everything that LMDB follows or counts. Each page must be
referred to once by a tree, or be free once. Records have checksums and are not checked here. A guarded child
process that reads everything through LMDB would miss a page that is both in use and free, and what only a write meets.

The check ends for every content of the file: no page is visited twice, and the file's size bounds the memory that is
allocated. It reads with `pread`, because a memory map turns a bad sector into SIGBUS. Another process may write during
the check. LMDB does not reuse the pages of a snapshot before two more transactions, so damage counts only if the meta
pages are the same afterwards. Otherwise the check starts again.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import add, sub
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from diskprefix.errors import StoreCorrupt

_ATTEMPTS = 4
_NUM_METAS = 2
_NO_PAGE = 2**64 - 1
"""The root of an empty tree."""
_BRANCH, _LEAF, _OVERFLOW, _META = 1, 2, 4, 8
_NODE_IN_OVERFLOW, _NODE_IS_TREE = 1, 2
_IN_OVERFLOW_BYTES = 8
_MAGIC, _DATA_VERSION = 0xBEEFC0DE, 1
_MAX_KEY_BYTES = 511
_MAX_DEPTH = 32
_MAX_MAP_BYTES = 1 << 46
"""LMDB maps as many bytes as the meta page says. If the kernel refuses, LMDB continues with a null pointer."""
_MAX_TXNID = 1 << 62
_FREE_FLAGS = (0x0008, 0x4008)
"""Integer keys, without and with MDB_NOSUBDIR, which LMDB writes into the same field."""
_UNUSED, _IN_TREE, _FREE = 0, 1, 2

_META_PAGE = struct.Struct("<Q2xH4xIIQQ48s48sQQ")
_TREE = struct.Struct("<IHHQQQQQ")
_PAGE_HEADER = struct.Struct("<Q2xHHH")
_RUN_HEADER = struct.Struct("<Q2xHI")
_NODE_HEADER = struct.Struct("<IHH")


@dataclass(frozen=True, kw_only=True)
class FileReport:
    """The result of a check. `used_bytes` is the size of all pages that are not free. `entries` is the number of
    entries of each named database.

    Without a file, or with one of 0 bytes, LMDB creates a new one. A file is busy if another process commits so often
    that no snapshot could be checked; that process has it open with LMDB.
    """

    state: Literal["absent", "empty", "sound", "busy"]
    used_bytes: int = 0
    entries: dict[bytes, int] = field(default_factory=dict)


def check_file(path: Path) -> FileReport:
    """Checks the structure of an LMDB data file.

    Raises `StoreCorrupt` if LMDB could crash, hang or err on the file; the message is one line that names the page.
    Raises `OSError` if the file cannot be opened, or is a symbolic link.
    """
    try:
        # O_NONBLOCK: opening a pipe would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return FileReport(state="absent")
    try:
        for _ in range(_ATTEMPTS):
            before = _identity(fd)
            try:
                return _check(fd)
            except StoreCorrupt as error:
                if _identity(fd) == before:
                    raise StoreCorrupt(f"{path} is damaged: {error}") from error
        return FileReport(state="busy")
    finally:
        os.close(fd)


def _identity(fd: int) -> tuple[int, bytes]:
    """Returns the file's size and meta pages, which change with every transaction that another process commits."""
    size = os.fstat(fd).st_size
    try:
        return size, b"".join(os.pread(fd, _META_PAGE.size, n * _page_bytes()) for n in range(_NUM_METAS))
    except OSError:
        return size, b""


def _page_bytes() -> int:
    """Returns the size of a page in a file that LMDB creates on this machine."""
    return min(mmap.PAGESIZE, 1 << 15)


def _check(fd: int) -> FileReport:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise StoreCorrupt("it is not a regular file")
    return FileCheck(fd, status.st_size).run() if status.st_size else FileReport(state="empty")


class _Tree(NamedTuple):
    """The description of a B-tree in the file."""

    pad: int
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int

    def require_plain(self, where: str) -> None:
        """A database of the store has no duplicates, no integer keys and no values of fixed size."""
        if self.flags or self.pad:
            raise StoreCorrupt(f"{where} has flags {self.flags:#x} or pad {self.pad} that no database of a store has")


class _Meta(NamedTuple):
    map_bytes: int
    free: _Tree
    main: _Tree
    last_page: int
    txnid: int


@dataclass(frozen=True)
class Page:
    """A branch or leaf page. Its nodes are columns, in the order of the keys.

    `data_at` is the offset of a leaf node's data in the page. `data_bytes` is the size of the data, which are in an
    overflow run where the flags say so.
    """

    number: int
    content: bytes
    keys: list[bytes]
    flags: tuple[int, ...]
    data_at: list[int]
    data_bytes: tuple[int, ...]

    @property
    def children(self) -> list[int]:
        """The page numbers in a branch page, which LMDB keeps in these fields."""
        return [low | high << 32 for low, high in zip(self.data_bytes, self.flags, strict=True)]

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yields the first page and the bytes of data of each overflow run that a leaf page refers to."""
        for flags, at, data_bytes in zip(self.flags, self.data_at, self.data_bytes, strict=True):
            if flags == _NODE_IN_OVERFLOW:
                yield int.from_bytes(self.content[at : at + _IN_OVERFLOW_BYTES], "little"), data_bytes


@dataclass
class _Walk:
    """One tree, and the counts of the pages and entries that were `found` in it."""

    name: str
    tree: _Tree
    is_free_list: bool = False
    found: Counter[str] = field(default_factory=Counter)

    def require_counts(self) -> None:
        for what in ("branch_pages", "leaf_pages", "overflow_pages", "entries"):
            found, recorded = self.found[what], getattr(self.tree, what)
            if found != recorded:
                raise StoreCorrupt(f"{self.name} has {found} {what.replace('_', ' ')}, the file says {recorded}")


class FileCheck:
    """One pass over one snapshot of the file."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self.page_bytes = _page_bytes()
        self._meta = self._choose_meta()
        # The owner of each page of the file. Pages behind its end can only be free.
        self._owner = bytearray(min(self._meta.last_page + 1, size // self.page_bytes))
        self._owner[:_NUM_METAS] = bytes([_IN_TREE]) * _NUM_METAS

    def run(self) -> FileReport:
        free = _Walk("the free list", self._meta.free, is_free_list=True)
        self._check_free_lists(free)
        main = _Walk("the list of databases", self._meta.main)
        databases: dict[bytes, _Tree] = {}
        for page in self._leaves(main):
            databases |= _databases(page)
        for name, tree in databases.items():
            for page in self._leaves(_Walk(f"database {name.decode(errors='replace')!r}", tree)):
                if _NODE_IS_TREE in page.flags:
                    raise StoreCorrupt(f"page {page.number} has a database within a database")
        return FileReport(
            state="sound",
            used_bytes=self._owner.count(_IN_TREE) * self.page_bytes,
            entries={name: tree.entries for name, tree in databases.items()},
        )

    def _choose_meta(self) -> _Meta:
        """Returns the meta page that LMDB would use. LMDB needs both to be valid, and takes the later transaction."""
        number, meta = max((self._read_meta(n) for n in range(_NUM_METAS)), key=lambda found: found[1].txnid)
        if meta.map_bytes > _MAX_MAP_BYTES:
            raise StoreCorrupt(f"meta page {number} claims a map of {meta.map_bytes} bytes")
        if meta.free.flags not in _FREE_FLAGS:
            raise StoreCorrupt(f"meta page {number} has the wrong flags {meta.free.flags:#x} for the free list")
        if not _NUM_METAS - 1 <= meta.last_page < _MAX_MAP_BYTES // self.page_bytes:
            raise StoreCorrupt(f"meta page {number} claims {meta.last_page} pages")
        meta.main.require_plain(f"meta page {number}")
        return meta

    def _read_meta(self, number: int) -> tuple[int, _Meta]:
        fields = _META_PAGE.unpack(self.read(number * self.page_bytes, _META_PAGE.size))
        page, kind, magic, version, _, map_bytes, free, main, last_page, txnid = fields
        if (page, kind, magic) != (number, _META, _MAGIC):
            raise StoreCorrupt(f"page {number} is not a meta page of LMDB")
        if version != _DATA_VERSION:
            raise StoreCorrupt(f"meta page {number} has data version {version} of LMDB instead of {_DATA_VERSION}")
        meta = _Meta(map_bytes, _Tree(*_TREE.unpack(free)), _Tree(*_TREE.unpack(main)), last_page, txnid)
        if meta.free.pad != self.page_bytes:
            raise StoreCorrupt(f"meta page {number} claims pages of {meta.free.pad} bytes, not {self.page_bytes}")
        if txnid > _MAX_TXNID or (txnid and txnid % _NUM_METAS != number):
            raise StoreCorrupt(f"meta page {number} has the impossible transaction {txnid}")
        return number, meta

    def _leaves(self, walk: _Walk) -> Iterator[Page]:
        """Checks a whole tree. Yields its leaf pages in key order."""
        tree = walk.tree
        if tree.root == _NO_PAGE:
            if tree.depth:
                raise StoreCorrupt(f"{walk.name} is empty, but its depth is {tree.depth}")
        elif not 1 <= tree.depth <= _MAX_DEPTH:
            raise StoreCorrupt(f"{walk.name} has the impossible depth {tree.depth}")
        else:
            yield from self._subtree(walk, tree.root, tree.depth, b"", None)
        walk.require_counts()

    def _subtree(self, walk: _Walk, number: int, height: int, low: bytes, high: bytes | None) -> Iterator[Page]:
        """Checks a page and the pages below it. Their keys must be at least `low` and less than `high`."""
        kind = _LEAF if height == 1 else _BRANCH
        what = f"page {number} ({'leaf' if kind == _LEAF else 'branch'} page of {walk.name})"
        self._claim(number, 1, what)
        content = self.read(number * self.page_bytes, self.page_bytes)
        try:
            page = _parse_page(content, number, kind, is_free_list=walk.is_free_list)
            keys = page.keys if kind == _LEAF else [low, *page.keys[1:]]
            _require_order(keys, low, high)
        except StoreCorrupt as error:
            raise StoreCorrupt(f"{what} {error}") from None
        if kind == _LEAF:
            walk.found["leaf_pages"] += 1
            walk.found["entries"] += len(keys)
            self._check_runs(walk, page)
            yield page
        else:
            walk.found["branch_pages"] += 1
            self._read_ahead(page.children, self.page_bytes)
            for child, first, end in zip(page.children, keys, [*keys[1:], high], strict=True):
                yield from self._subtree(walk, child, height - 1, first, end)

    def _check_runs(self, walk: _Walk, page: Page) -> None:
        """Checks and claims the overflow runs that a leaf page refers to."""
        runs = list(page.runs())
        self._read_ahead([number for number, _ in runs], _RUN_HEADER.size)
        for number, data_bytes in runs:
            what = f"page {number} (overflow run of {walk.name})"
            self._require_in_file(number, 1, what)
            found, kind, num_pages = _RUN_HEADER.unpack(self.read(number * self.page_bytes, _RUN_HEADER.size))
            if (found, kind) != (number, _OVERFLOW):
                raise StoreCorrupt(f"{what} is not the first page of an overflow run")
            # A value that a shorter one replaced in the same transaction keeps its pages.
            if num_pages * self.page_bytes < _RUN_HEADER.size + data_bytes:
                raise StoreCorrupt(f"{what} has {num_pages} pages, which are too few for {data_bytes} bytes")
            self._claim(number, num_pages, what)
            walk.found["overflow_pages"] += num_pages

    def _check_free_lists(self, walk: _Walk) -> None:
        """Checks the tree of the free lists and claims the pages in them."""
        beyond: list[npt.NDArray[np.uint64]] = [np.empty(0, np.uint64)]
        for page in self._leaves(walk):
            runs = page.runs()
            for key, flags, at, size in zip(page.keys, page.flags, page.data_at, page.data_bytes, strict=True):
                what = f"the free list of transaction {int.from_bytes(key, 'big')}"
                if flags == _NODE_IS_TREE or not 0 < int.from_bytes(key, "big") <= self._meta.txnid:
                    raise StoreCorrupt(f"{what} is impossible")
                data = page.content[at : at + size]
                if flags == _NODE_IN_OVERFLOW:
                    data = self.read(next(runs)[0] * self.page_bytes + _RUN_HEADER.size, size)
                pages = self._claim_free(data, what)
                beyond.append(pages[pages >= len(self._owner)])
        # A page in use has been written, so a page behind the end of the file must be free.
        missing, found = self._meta.last_page + 1 - len(self._owner), np.concatenate(beyond)
        if len(found) != missing or len(np.unique(found)) != missing:
            raise StoreCorrupt(
                f"the file ends before page {len(self._owner)} of {self._meta.last_page + 1}: it was truncated"
            )

    def _claim_free(self, data: bytes, what: str) -> npt.NDArray[np.uint64]:
        """Returns the page numbers in a free list, after claiming those within the file."""
        if not data or len(data) % 8:
            raise StoreCorrupt(f"{what} has {len(data)} bytes")
        pages: npt.NDArray[np.uint64] = np.frombuffer(data, "<u8")
        count, pages = int(pages[0]), pages[1:]
        if count != len(pages):
            raise StoreCorrupt(f"{what} claims {count} pages in {len(data)} bytes")
        ordered = not count or bool(_NUM_METAS <= pages[-1] <= pages[0] <= self._meta.last_page)
        if not ordered or (pages[1:] >= pages[:-1]).any():
            raise StoreCorrupt(f"{what} is out of order, or names a page that cannot be free")
        owner, within = np.frombuffer(self._owner, np.uint8), pages[pages < len(self._owner)]
        if (owner[within] != _UNUSED).any():
            wrong = int(within[np.argmax(owner[within] != _UNUSED)])
            raise StoreCorrupt(f"page {wrong} ({what}) is in use, or in another free list")
        owner[within] = _FREE
        return pages

    def _require_in_file(self, number: int, count: int, what: str) -> None:
        if number < _NUM_METAS or number + count > len(self._owner):
            raise StoreCorrupt(f"{what} has {count} pages, but the last page is {len(self._owner) - 1}")

    def _claim(self, number: int, count: int, what: str) -> None:
        """Records that a tree uses `count` pages from `number` on. Each page has one owner."""
        self._require_in_file(number, count, what)
        if self._owner.count(_UNUSED, number, number + count) != count:
            raise StoreCorrupt(f"{what} is also free, or is referred to twice")
        self._owner[number : number + count] = bytes([_IN_TREE]) * count

    def read(self, start: int, size: int) -> bytes:
        """Reads a range of the file. A read that fails or is short is damage: LMDB would get a signal there."""
        page = start // self.page_bytes
        try:
            data = os.pread(self._fd, size, start)
        except OSError as error:
            raise StoreCorrupt(f"page {page} cannot be read: {error.strerror}") from error
        if len(data) < size:
            raise StoreCorrupt(f"the file ends within page {page + len(data) // self.page_bytes}: it was truncated")
        return data

    def _read_ahead(self, pages: Iterable[int], size: int) -> None:
        """Lets the kernel read the first `size` bytes of several pages at once."""
        if sys.platform == "linux":
            for number in pages:
                if number < len(self._owner):
                    os.posix_fadvise(self._fd, number * self.page_bytes, size, os.POSIX_FADV_WILLNEED)


def _parse_page(content: bytes, number: int, kind: int, *, is_free_list: bool) -> Page:
    """Returns a branch or leaf page. Raises `StoreCorrupt` if LMDB cannot have written it."""
    size = len(content)
    found_number, found_kind, lower, upper = _PAGE_HEADER.unpack_from(content)
    if (found_number, found_kind) != (number, kind):
        raise StoreCorrupt("is of another kind, or has the number of another page")
    num_nodes = (lower - _PAGE_HEADER.size) // 2
    if lower % 2 or upper % 2 or num_nodes < (2 if kind == _BRANCH else 1) or not lower <= upper <= size:
        raise StoreCorrupt("has too few nodes or bounds outside the page")
    offsets = struct.unpack_from(f"<{num_nodes}H", content, _PAGE_HEADER.size)
    if max(offsets) > size - _NODE_HEADER.size:
        raise StoreCorrupt("has a node outside the page")
    data_bytes, flags, key_bytes = zip(*(_NODE_HEADER.unpack_from(content, at) for at in offsets), strict=True)
    # LMDB ignores the first key of a branch page.
    checked = key_bytes[1:] if kind == _BRANCH else key_bytes
    if min(checked) < (8 if is_free_list else 1) or max(checked) > (8 if is_free_list else _MAX_KEY_BYTES):
        raise StoreCorrupt("has a key of a wrong size")
    if kind == _LEAF and max(flags) > _NODE_IS_TREE:
        raise StoreCorrupt("has a node of an unknown kind")
    data_at = [at + _NODE_HEADER.size + num_bytes for at, num_bytes in zip(offsets, key_bytes, strict=True)]
    ends = data_at
    if kind == _LEAF:
        in_page = ((flag == _NODE_IN_OVERFLOW, size) for flag, size in zip(flags, data_bytes, strict=True))
        ends = list(map(add, data_at, (_IN_OVERFLOW_BYTES if is_run else size for is_run, size in in_page)))
    if max(map(sub, ends, offsets)) > (size - _PAGE_HEADER.size) // 4 * 2 - 2:
        raise StoreCorrupt("has a node that is too large for a page")
    # Each node ends where another one begins, or at the end of the page: then there is no gap and no overlap.
    padded = {end + end % 2 for end in ends}
    if len(padded) != num_nodes or {*offsets, size} != {*padded, upper}:
        raise StoreCorrupt("has nodes that overlap or leave a gap")
    # Integer keys compare like their big-endian bytes.
    step = -1 if is_free_list else 1
    keys = [content[at + _NODE_HEADER.size : end][::step] for at, end in zip(offsets, data_at, strict=True)]
    return Page(number, content, keys, flags, data_at, data_bytes)


def _require_order(keys: list[bytes], low: bytes, high: bytes | None) -> None:
    if keys != sorted(set(keys)):
        raise StoreCorrupt("has keys out of order")
    if keys[0] < low or (high is not None and keys[-1] >= high):
        raise StoreCorrupt("has a key that belongs to another page")


def _databases(page: Page) -> dict[bytes, _Tree]:
    """Returns the trees of the named databases in a leaf page of the main tree, which holds nothing else."""
    trees = {}
    for key, flags, at, data_bytes in zip(page.keys, page.flags, page.data_at, page.data_bytes, strict=True):
        if flags != _NODE_IS_TREE or data_bytes != _TREE.size:
            raise StoreCorrupt(f"page {page.number} has a record that is no database")
        trees[key] = tree = _Tree(*_TREE.unpack_from(page.content, at))
        tree.require_plain(f"page {page.number} (database {key.decode(errors='replace')!r})")
    return trees
