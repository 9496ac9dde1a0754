"""LMDB's data file (data version 1, LMDB 0.9), read with numpy and without LMDB: meta pages, B-tree pages, keys.

A file is an array of pages. Integers are little-endian, page numbers and transaction numbers 64 bits wide.

    page header   0 its own page number      u64        meta    0 magic 0xBEEFC0DE, data version   u32, u32
                  8 not used here            u16                8 address                          u64
                 10 kind: 1 branch, 2 leaf,  u16               16 map size                         u64
                    4 overflow, 8 meta                         24 the tree of free pages           tree
                 12 lower, upper             u16, u16          72 the tree of named databases      tree
                    (overflow: pages in run  u32)             120 last page                        u64
                                                              128 transaction                      u64
    tree          0 pad (free pages: the page size)  u32
                  4 flags, depth                     u16, u16
                  8 branch, leaf, overflow pages     u64 each
                 32 entries, root page               u64, u64

Pages 0 and 1 are meta pages; transaction N writes page N & 1, and the higher N counts. A branch or leaf page holds from
16 to `lower` the u16 offsets of its nodes in key order, and from `upper` to its end the nodes, in any order, without
gaps, each of an even size.

    node          0 leaf: bytes of data        u32
                    branch: page number's low  u32
                  4 leaf: 0, 1 for data in an overflow run (the node holds its page number), 2 for a database's tree
                    branch: page number's high u16
                  6 bytes of key               u16, then the key, then a leaf's data

The first key of a branch page counts as lower than every other. The tree of free pages maps a transaction to the pages
that it freed: their count, then their numbers, highest first.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from diskprefix.errors import StoreCorrupt

Ints: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Numbers: TypeAlias = npt.NDArray[np.uint64]
"""Page numbers as they stand in the file."""
Truths: TypeAlias = npt.NDArray[np.bool_]

NUM_METAS = 2
NO_PAGE = 2**64 - 1
"""The root of an empty tree."""
PAGE_HEADER_BYTES = 16
META_BYTES = PAGE_HEADER_BYTES + 136
BRANCH, LEAF, OVERFLOW, META = 1, 2, 4, 8
NODE_IN_OVERFLOW, NODE_IS_TREE = 1, 2
MAX_KEY_BYTES = 511
TREE_BYTES = 48

_MAGIC = 0xBEEFC0DE
_DATA_VERSION = 1
_NODE_HEADER_BYTES = 8
_PAGE_HEADER = np.dtype([("number", "<u8"), ("pad", "<u2"), ("kind", "<u2"), ("lower", "<u2"), ("upper", "<u2")])
_META_HEADER = struct.Struct("<Q2xH4xIIQQ")
_TREE = struct.Struct("<IHHQQQQQ")
_META_END = struct.Struct("<QQ")

OVERFLOW_HEADER = np.dtype([("number", "<u8"), ("pad", "<u2"), ("kind", "<u2"), ("pages", "<u4")])


@dataclass(frozen=True)
class Tree:
    """What the file says of one B-tree."""

    pad: int
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int

    @classmethod
    def parse(cls, data: bytes) -> Tree:
        return cls(*_TREE.unpack(data))


@dataclass(frozen=True)
class Meta:
    """A meta page: the start of one snapshot."""

    map_bytes: int
    free: Tree
    main: Tree
    last_page: int
    txnid: int

    @property
    def page_bytes(self) -> int:
        return self.free.pad

    @classmethod
    def parse(cls, data: bytes, number: int) -> Meta:
        """From the first `META_BYTES` of page `number`. Raises `StoreCorrupt` where LMDB would not open the file."""
        page, kind, magic, version, _, map_bytes = _META_HEADER.unpack_from(data)
        if magic == int.from_bytes(_MAGIC.to_bytes(4, "little"), "big"):
            raise StoreCorrupt(f"meta page {number} was written by a machine of the other byte order")
        if magic != _MAGIC or page != number or kind != META:
            raise StoreCorrupt(f"page {number} is not a meta page of LMDB")
        if version != _DATA_VERSION:
            raise StoreCorrupt(f"meta page {number} has data version {version} of LMDB instead of {_DATA_VERSION}")
        start = _META_HEADER.size
        free, main = (Tree.parse(data[at : at + TREE_BYTES]) for at in (start, start + TREE_BYTES))
        last_page, txnid = _META_END.unpack_from(data, start + 2 * TREE_BYTES)
        return cls(map_bytes, free, main, last_page, txnid)


@dataclass(frozen=True)
class Keys:
    """Keys in a form that numpy can compare: `words` [keys, words] uint64, zero-padded, and their `sizes` in bytes."""

    words: npt.NDArray[np.uint64]
    sizes: Ints

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: Ints | slice) -> Keys:
        return Keys(self.words[index], self.sizes[index])

    @classmethod
    def empty(cls, count: int) -> Keys:
        """Keys of no bytes, which come before every other."""
        return cls(np.zeros((count, 1), np.uint64), np.zeros(count, np.int64))

    @classmethod
    def concatenate(cls, parts: list[Keys]) -> Keys:
        width = max(part.words.shape[1] for part in parts)
        words = [np.pad(part.words, ((0, 0), (0, width - part.words.shape[1]))) for part in parts]
        return cls(np.concatenate(words), np.concatenate([part.sizes for part in parts]))

    def before(self, other: Keys) -> Truths:
        """Whether each key comes before the one of `other` at the same place: by bytes, a prefix first."""
        width = min(self.words.shape[1], other.words.shape[1])
        before: Truths = np.zeros(len(self), np.bool_)
        open_ = np.arange(len(self))
        for column in range(width):
            a, b = self.words[open_, column], other.words[open_, column]
            before[open_[a < b]] = True
            open_ = open_[a == b]
            if not len(open_):
                return before
        # What lies beyond the narrower of the two is a longer key's, or its padding.
        before[open_] = self.sizes[open_] < other.sizes[open_]
        return before


@dataclass(frozen=True)
class Nodes:
    """The nodes of some B-tree pages, page by page in key order. `page` is an index into those pages.

    `lows` is the first field, a leaf's bytes of data or the low half of a branch's page number, and `flags` the second.
    """

    page: Ints
    slot: Ints
    lows: Ints
    flags: Ints
    keys: Keys
    data_at: Ints
    """Where a leaf's data begin, in bytes from the first page's start."""
    content: Bytes

    @property
    def children(self) -> Ints:
        """The page numbers in a branch's nodes."""
        return self.lows | self.flags << 32

    @property
    def in_overflow(self) -> Truths:
        flagged: Truths = (self.flags & NODE_IN_OVERFLOW) != 0
        return flagged

    def overflow_numbers(self, nodes: Ints) -> Numbers:
        """First page numbers of the runs that hold the data of `nodes`."""
        at = self.data_at[nodes, None] + np.arange(8)
        numbers: Numbers = self.content[at].view("<u8")[:, 0]
        return numbers

    def data(self, node: int) -> bytes:
        """A leaf node's data, or its overflow page number."""
        start = int(self.data_at[node])
        return self.content[start : start + (8 if self.in_overflow[node] else int(self.lows[node]))].tobytes()


@dataclass(frozen=True)
class Pages:
    """The numbers of some pages, and what they are, for messages."""

    numbers: Ints
    what: str

    def require(self, good: Truths, problem: str, page: Ints | None = None) -> None:
        """Raise `StoreCorrupt` naming the first page that is not `good`; for nodes, `page` says where each is."""
        if not good.all():
            first = int(np.argmin(good))
            number = self.numbers[first if page is None else page[first]]
            raise StoreCorrupt(f"page {number} ({self.what}) {problem}")


@dataclass(frozen=True)
class PageContent(Pages):
    """Pages and their bytes, one after the other in `content`, which ends `MAX_KEY_BYTES` + 1 bytes behind the last."""

    page_bytes: int
    content: Bytes

    def nodes(self, kind: int, *, numeric_keys: bool) -> Nodes:
        """All nodes of these branch or leaf pages, in order. Raises `StoreCorrupt` if LMDB could not have made one.

        `numeric_keys`: keys are 8-byte numbers and compared as such.
        """
        count, size = len(self.numbers), self.page_bytes
        pages = self.content[: count * size].reshape(count, size)
        header = np.ascontiguousarray(pages[:, :PAGE_HEADER_BYTES]).view(_PAGE_HEADER)[:, 0]
        lower, upper = header["lower"].astype(np.int64), header["upper"].astype(np.int64)
        self.require(header["number"] == self.numbers.astype(np.uint64), "has another page's number")
        self.require(header["kind"] == kind, "is of another kind")
        least = 2 if kind == BRANCH else 1
        self.require(lower % 2 == 0, "has an odd number of offset bytes")
        self.require(lower >= PAGE_HEADER_BYTES + 2 * least, "has too few nodes")
        self.require((lower <= upper) & (upper <= size), "has bounds outside itself")

        counts = (lower - PAGE_HEADER_BYTES) // 2
        page = np.repeat(np.arange(count), counts)
        slot = np.arange(len(page)) - np.repeat(np.cumsum(counts) - counts, counts)
        halves = self.content.view("<u2")
        offset = halves[page * (size // 2) + PAGE_HEADER_BYTES // 2 + slot].astype(np.int64)
        inside = (offset % 2 == 0) & (offset >= upper[page]) & (offset <= size - _NODE_HEADER_BYTES)
        self.require(inside, "has a node outside its place", page)

        start = page * size + offset
        low, high, flags, key_size = (halves[start // 2 + i].astype(np.int64) for i in range(4))
        lows = low | high << 16
        # LMDB never looks at the first key of a branch page, nor does it need to have one.
        ignored = (slot == 0) if kind == BRANCH else np.zeros(len(slot), np.bool_)
        self.require((key_size <= MAX_KEY_BYTES) & (ignored | (key_size > 0)), "has a key of a wrong size", page)
        if numeric_keys:
            self.require(ignored | (key_size == 8), "has a key that is no transaction number", page)
        if kind == LEAF:
            self.require(flags <= NODE_IS_TREE, "has a node of an unknown kind", page)
            data_size = np.where(flags & NODE_IN_OVERFLOW, 8, lows)
        else:
            data_size = np.zeros_like(lows)
        node_size = _NODE_HEADER_BYTES + key_size + data_size
        largest = (size - PAGE_HEADER_BYTES) // 2 // 2 * 2 - 2
        self.require(node_size <= largest, "has a node that is too large for a page", page)
        self._require_tiling(page, offset, node_size + node_size % 2, upper)
        keys = _gather(self.content, start + _NODE_HEADER_BYTES, key_size, numeric_keys)
        return Nodes(page, slot, lows, flags, keys, start + _NODE_HEADER_BYTES + key_size, self.content)

    def _require_tiling(self, page: Ints, offset: Ints, node_size: Ints, upper: Ints) -> None:
        """Nodes fill their page from `upper` to its end, without gaps and without overlapping."""
        start = page * self.page_bytes + offset
        order = np.argsort(start, kind="stable")
        start, end = start[order], (start + node_size)[order]
        # Sorted by place, pages stay together; a node begins where the one before ends or, on a new page, at `upper`.
        new_page = np.diff(page, prepend=-1) != 0
        begins = np.where(new_page, page * self.page_bytes + upper[page], np.roll(end, 1))
        self.require(start == begins, "has nodes that overlap or leave a gap", page)
        last_of_page = np.append(new_page[1:], True)
        whole = ~last_of_page | (end == (page + 1) * self.page_bytes)
        self.require(whole, "has nodes that do not reach its end", page)


def overflow_pages(data_size: Ints, page_bytes: int) -> Ints:
    """How many pages a run needs for so many bytes of data."""
    return (PAGE_HEADER_BYTES - 1 + data_size) // page_bytes + 1


def _gather(content: Bytes, start: Ints, size: Ints, numeric: bool) -> Keys:
    """Keys from their places in `content`, which ends at least `MAX_KEY_BYTES` + 1 bytes after the last key's start."""
    width = max(8, -(-int(size.max(initial=0)) // 8) * 8)
    block = np.lib.stride_tricks.sliding_window_view(content, width)[start]
    if (size != width).any():
        block[np.arange(width) >= size[:, None]] = 0
    words = block.view("<u8" if numeric else ">u8").astype(np.uint64)
    return Keys(words, size)
