"""Checks without LMDB that LMDB can use a data file without crashing.

LMDB trusts its file: a damaged page number, length or free list may end the process by a signal, or hold it in a loop.
This module reads the pages of all B-trees with ordinary reads. It checks everything that LMDB relies on there, and that
every page is either used once or free. It reads neither payloads, which have checksums, nor the headers of their pages,
which `Environment.require_sound_runs` checks before LMDB uses them.

Names follow LMDB's mdb.c, data version 1: `MDB_meta`, `MDB_db` (here a tree), `MDB_page`, `MDB_node`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.store.codec.codec import address

_PAGE_BYTES = min(mmap.PAGESIZE, 1 << 15)
_HEADER_BYTES, _NODE_BYTES = 16, 8
_BRANCH, _LEAF, _OVERFLOW, _META = 1, 2, 4, 8
"""Flags of a page."""
_IN_OVERFLOW, _IS_TREE = 1, 2
"""Flags of a node in a leaf page: its data is in overflow pages, or is the record of a tree."""
_INTEGER_KEYS = 8
"""The flag of the free list's tree."""
_MAX_KEY_BYTES, _MAX_DEPTH, _NO_PAGE = 511, 32, 2**64 - 1
_MAX_NODE_BYTES = ((_PAGE_BYTES - _HEADER_BYTES) // 2 & ~1) - 2
"""A longer record is in overflow pages."""
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_META_HEADER, _TREE, _META_END = struct.Struct("<QHHI II16x"), struct.Struct("<IHHQQQQQ"), struct.Struct("<QQ")
_MAIN_AT = _META_HEADER.size + _TREE.size
_OVERFLOW_HEADER, _NODE_HEADER = struct.Struct("<QHHI"), struct.Struct("<HHHH")
_AHEAD = 256
"""The kernel is asked to read this many pages ahead."""
_PAYLOADS = b"payloads"
"""The database whose overflow pages are not read."""
_OURS = b"meta"
"""Every store has a database of this name."""


_Key: TypeAlias = bytes | int
_Place: TypeAlias = tuple[int, _Key | None, _Key | None]
"""A page of a B-tree, the lower limit of its keys, and their upper limit (exclusive); None for no limit."""


class _Tree(NamedTuple):
    pad: int
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int


class _Meta(NamedTuple):
    free: _Tree
    main: _Tree
    last_page: int
    txnid: int


class _Node(NamedTuple):
    """`data` is the value, or the number of its first overflow page. `child` is the page below the node, if the node is
    in a branch page."""

    key: bytes
    size: int
    flags: int
    data: bytes
    child: int


def require_sound_meta(path: Path) -> None:
    """Checks both meta pages of the file `path`, unless it is missing or empty. Raises `StoreCorrupt`, or `OSError` if
    it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if os.fstat(fd).st_size:
            _read_metas(path, fd)
    finally:
        os.close(fd)


def require_survivable(path: Path, fd: int, txnid: int) -> bool:
    """Checks the file `path`, open as `fd`, in the state of commit `txnid`. The caller must have a read transaction of
    that commit open, which protects its pages. Returns False if later commits have overwritten its meta page. For any
    thread. Raises `StoreCorrupt` if the file is damaged or cannot be read."""
    try:
        meta = _read_metas(path, fd)[txnid & 1]
        if meta.txnid != txnid:
            return False
        _FileCheck(path, fd, meta).run()
    except OSError as error:
        raise _damaged(path, f"it cannot be read ({error.strerror})") from error
    return True


def mend_runs(path: Path) -> bool:
    """Repairs wrong headers of payloads in overflow pages: the B-trees give the content of these headers. No process
    may have the file open. Returns False if no header is wrong, or if the B-trees are damaged too. Raises `OSError`."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        check = _FileCheck(path, fd, max(_read_metas(path, fd), key=lambda meta: meta.txnid), keeps_runs=True)
        check.run()
        return check.mend_runs() > 0
    except StoreCorrupt:
        return False
    finally:
        os.close(fd)


def is_sound_run(fd: int, first: int, value_bytes: int) -> bool:
    """Returns whether the overflow pages of a record, from page `first` on, have the header that LMDB expects when it
    deletes the record: LMDB frees the pages that the header names, whichever page it is in."""
    if not 2 <= first < os.fstat(fd).st_size // _PAGE_BYTES:
        return False
    number, _, kind, count = _OVERFLOW_HEADER.unpack(os.pread(fd, _HEADER_BYTES, first * _PAGE_BYTES))
    expected = first, _OVERFLOW, -(-(_HEADER_BYTES + value_bytes) // _PAGE_BYTES)
    return (number, kind, count) == expected


def overflow_of(key: memoryview) -> tuple[int, int] | None:
    """Returns the first overflow page of a record and the bytes of its value, or None if it has no such pages. `key` is
    a view of the key in LMDB's map: its node in the leaf page lies around it."""
    start = address(key)
    low, high, flags, _ = _NODE_HEADER.unpack(ctypes.string_at(start - _NODE_BYTES, _NODE_BYTES))
    if not flags & _IN_OVERFLOW:
        return None
    return int.from_bytes(ctypes.string_at(start + len(key), 8), "little"), low | high << 16


def _damaged(path: Path, problem: str) -> StoreCorrupt:
    return StoreCorrupt(f"{path} is damaged: {problem}")


def _read_metas(path: Path, fd: int) -> tuple[_Meta, _Meta]:
    data = os.pread(fd, 2 * _PAGE_BYTES, 0)
    if len(data) < 2 * _PAGE_BYTES:
        raise _damaged(path, "it has no meta pages")
    metas = []
    for number in (0, 1):
        at = number * _PAGE_BYTES
        page, _, kind, _, magic, version = _META_HEADER.unpack_from(data, at)
        free, main = (_Tree(*_TREE.unpack_from(data, at + place)) for place in (_META_HEADER.size, _MAIN_AT))
        meta = _Meta(free, main, *_META_END.unpack_from(data, at + _MAIN_AT + _TREE.size))
        is_own = (page, kind, magic, version) == (number, _META, _MAGIC, _VERSION)
        # With another flag of the free list's tree, LMDB would map the file at an address that the file names.
        if not is_own or (free.pad, free.flags) != (_PAGE_BYTES, _INTEGER_KEYS):
            raise _damaged(path, f"meta page {number} is wrong")
        # LMDB would map as many pages as the meta page says.
        if meta.last_page * _PAGE_BYTES > 2 * os.fstat(fd).st_size + 2**30:
            raise _damaged(path, f"meta page {number} names pages far behind its end")
        metas.append(meta)
    # LMDB finds the meta page of a commit by the parity of its number.
    newest = max(meta.txnid for meta in metas)
    if metas[newest & 1].txnid != newest:
        raise _damaged(path, "the number of the last commit is wrong")
    return metas[0], metas[1]


class _FileCheck:
    """One check of a file. `_used` has one byte per page, which is 1 once the page is known to be in use or free."""

    def __init__(self, path: Path, fd: int, meta: _Meta, *, keeps_runs: bool = False) -> None:
        self._path, self._fd, self._meta, self._keeps_runs = path, fd, meta, keeps_runs
        self._num_bytes = os.fstat(fd).st_size
        self._used = np.zeros(meta.last_page + 1, np.uint8)
        self._used[:2] = 1
        self._payload_runs: list[tuple[int, int]] = []
        """With `keeps_runs`, first page and number of pages of each payload in overflow pages."""

    def mend_runs(self) -> int:
        """Repairs wrong headers of payloads. Call it after `run`. Returns the number of wrong headers."""
        num_wrong = 0
        for first, count in self._payload_runs:
            number, _, kind, stated = _OVERFLOW_HEADER.unpack(os.pread(self._fd, _HEADER_BYTES, first * _PAGE_BYTES))
            if (number, kind, stated) != (first, _OVERFLOW, count):
                os.pwrite(self._fd, _OVERFLOW_HEADER.pack(first, 0, _OVERFLOW, count), first * _PAGE_BYTES)
                num_wrong += 1
        os.fsync(self._fd)
        return num_wrong

    def run(self) -> None:
        """Checks the file. Raises `StoreCorrupt` or `OSError`."""
        trees: dict[bytes, _Tree] = {}
        for _, node in self._leaf_nodes(self._meta.main):
            if node.flags == _IS_TREE:
                trees[node.key] = _Tree(*_TREE.unpack(node.data))
        # Another program may use flags that a store does not use. Its file is refused later, and not changed.
        has_flags = any(tree.flags for tree in (self._meta.main, *trees.values()))
        if has_flags and _OURS not in trees:
            return
        if has_flags:
            raise self._damage("a database has unknown flags")
        for name, tree in trees.items():
            for _ in self._leaf_nodes(tree, reads_runs=name != _PAYLOADS):
                pass
        for key, node in self._leaf_nodes(self._meta.free, has_numbers=True):
            self._take_free(key, node)
        if not self._used.all():
            raise self._damage(f"page {self._used.argmin()} is neither in use nor free")

    def _damage(self, problem: str) -> StoreCorrupt:
        return _damaged(self._path, problem)

    def _leaf_nodes(
        self, tree: _Tree, *, has_numbers: bool = False, reads_runs: bool = True
    ) -> Iterator[tuple[_Key, _Node]]:
        """Checks a tree and yields the nodes of its leaves with their keys; with `has_numbers`, the keys are numbers.
        Without `reads_runs`, does not read the headers of overflow pages."""
        if tree.root == _NO_PAGE:
            if any(tree[2:7]):
                raise self._damage("an empty database has pages")
            return
        if not 1 <= tree.depth <= _MAX_DEPTH:
            raise self._damage("a B-tree has a wrong depth")
        num_pages, num_entries, num_overflow = {_BRANCH: 0, _LEAF: 0}, 0, 0
        level: list[_Place] = [(tree.root, None, None)]
        for depth in range(1, tree.depth + 1):
            kind = _LEAF if depth == tree.depth else _BRANCH
            below: list[_Place] = []
            num_pages[kind] += len(level)
            for (_, low, high), page in self._pages(level):
                nodes = self._nodes(page, kind)
                keys: list[_Key] = [int.from_bytes(node.key, "little") if has_numbers else node.key for node in nodes]
                self._require_order(keys[kind == _BRANCH :], low, high)
                if kind == _BRANCH:
                    if len(nodes) < 2 and not has_numbers:
                        raise self._damage("a branch page has one child")
                    # The first key of a branch page is not used.
                    bounds = [low, *keys[1:], high]
                    below += zip([node.child for node in nodes], bounds, bounds[1:], strict=False)
                    continue
                num_entries += len(nodes)
                for key, node in zip(keys, nodes, strict=True):
                    if node.flags == _IN_OVERFLOW:
                        num_overflow += self._take_run(node, reads_header=reads_runs)
                    yield key, node
            level = below
        counted = (num_pages[_BRANCH], num_pages[_LEAF], num_entries)
        is_counted = counted == (tree.branch_pages, tree.leaf_pages, tree.entries)
        if not is_counted or not num_overflow <= tree.overflow_pages <= self._meta.last_page:
            raise self._damage("a database has another number of pages or records than it says")

    def _require_order(self, keys: list[_Key], low: _Key | None, high: _Key | None) -> None:
        """Checks that keys ascend from `low` to below `high`; otherwise lookups would miss keys."""
        bounded = [*keys, *([] if high is None else [high])]
        is_ordered = all(key < following for key, following in pairwise(bounded))  # type: ignore[operator]
        if not is_ordered or (low is not None and keys and keys[0] < low):  # type: ignore[operator]
            raise self._damage("keys are not in their order")

    def _pages(self, level: list[_Place]) -> Iterator[tuple[_Place, bytes]]:
        """Yields the pages of one level of a tree in the order of the file."""
        level.sort(key=lambda place: place[0])
        for at in range(0, len(level), _AHEAD):
            places = level[at : at + _AHEAD]
            # Before anything is computed from them: the file may hold any number.
            for number, _, _ in places:
                self._mark_used(number, 1)
            for number, _, _ in places if hasattr(os, "posix_fadvise") else ():
                os.posix_fadvise(self._fd, number * _PAGE_BYTES, _PAGE_BYTES, os.POSIX_FADV_WILLNEED)
            for place in places:
                number = place[0]
                page = os.pread(self._fd, _PAGE_BYTES, number * _PAGE_BYTES)
                if int.from_bytes(page[:8], "little") != number:
                    raise self._damage(f"page {number} is another one")
                yield place, page

    def _nodes(self, page: bytes, kind: int) -> list[_Node]:
        """Returns the nodes of a page. They must fill the page from its upper end without gaps."""
        words = memoryview(page).cast("H")
        lower, upper = words[6], words[7]
        is_sound = words[5] == kind and _HEADER_BYTES < lower <= upper <= _PAGE_BYTES and not lower & 1
        nodes, spans = [], []
        for at in words[_HEADER_BYTES // 2 : lower // 2].tolist() if is_sound else ():
            if at & 1 or not upper <= at <= _PAGE_BYTES - _NODE_BYTES:
                raise self._damage("a page has a wrong offset")
            low, high, flags, key_bytes = words[at // 2 : at // 2 + 4].tolist()
            begin, size = at + _NODE_BYTES + key_bytes, low | high << 16
            held_bytes = (8 if flags & _IN_OVERFLOW else size) if kind == _LEAF else 0
            node = _Node(
                page[begin - key_bytes : begin], size, flags, page[begin : begin + held_bytes], size | flags << 32
            )
            if len(node.key) > _MAX_KEY_BYTES or (kind == _LEAF and not self._is_sound_record(node)):
                raise self._damage("a record has wrong flags or a wrong size")
            nodes.append(node)
            spans.append((at, (begin + held_bytes + 1) & ~1))
        spans.sort()
        ends = [upper, *(end for _, end in spans)]
        if not nodes or [begin for begin, _ in spans] != ends[:-1] or ends[-1] != _PAGE_BYTES:
            raise self._damage("a page of a B-tree is wrong")
        return nodes

    @staticmethod
    def _is_sound_record(node: _Node) -> bool:
        if not node.key or _NODE_BYTES + len(node.key) + len(node.data) > _MAX_NODE_BYTES:
            return False
        if node.flags == _IS_TREE:
            return node.size == _TREE.size == len(node.data)
        return node.flags in (0, _IN_OVERFLOW)

    def _mark_used(self, first: int, count: int) -> None:
        """Records pages that are in use."""
        end = first + count
        if first < 2 or end > len(self._used) or end * _PAGE_BYTES > self._num_bytes:
            raise self._damage(f"page {first} is not in the file")
        if self._used[first:end].any():
            raise self._damage(f"page {first} is used twice")
        self._used[first:end] = 1

    def _take_run(self, node: _Node, *, reads_header: bool) -> int:
        """Records the overflow pages of a record. Returns their number."""
        first, count = int.from_bytes(node.data, "little"), -(-(_HEADER_BYTES + node.size) // _PAGE_BYTES)
        if reads_header:
            count = self._run_pages(first, count)
        elif self._keeps_runs:
            self._payload_runs.append((first, count))
        self._mark_used(first, count)
        return count

    def _run_pages(self, first: int, min_pages: int) -> int:
        """Returns the number of pages of a run, which its header gives. The run is longer than `min_pages` if a record
        was written twice in one transaction and became shorter."""
        header = os.pread(self._fd, _OVERFLOW_HEADER.size, first * _PAGE_BYTES) if first < len(self._used) else b""
        if len(header) < _OVERFLOW_HEADER.size:
            raise self._damage(f"page {first} is not in the file")
        number, _, kind, count = _OVERFLOW_HEADER.unpack(header)
        if (number, kind) != (first, _OVERFLOW) or count < min_pages:
            raise self._damage(f"page {first} is not the first one of a long record")
        return int(count)

    def _take_free(self, key: _Key, node: _Node) -> None:
        """Records the free pages of one commit: a number, then the pages in descending order."""
        data = node.data
        if node.flags == _IN_OVERFLOW:
            at = int.from_bytes(data, "little") * _PAGE_BYTES + _HEADER_BYTES
            data = os.pread(self._fd, node.size, at)
        count = int.from_bytes(data[:8], "little")
        if len(node.key) != 8 or not isinstance(key, int) or key > self._meta.txnid or 8 * (count + 1) > len(data):
            raise self._damage("the list of free pages is wrong")
        pages = np.frombuffer(data, np.uint64, count, 8)
        if not count:
            return
        if not (pages[:-1] > pages[1:]).all() or pages[-1] < 2 or pages[0] >= len(self._used):
            raise self._damage("the list of free pages is wrong")
        if self._used[pages].any():
            raise self._damage("a page is both free and in use")
        self._used[pages] = 1
