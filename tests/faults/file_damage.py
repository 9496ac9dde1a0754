"""Damages the bytes of an LMDB data file, at random places and in its structure. A seed decides everything."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

PAGE = 4096
BRANCH, LEAF = 1, 2
IN_OVERFLOW, IS_TREE = 1, 2
NO_PAGE = 2**64 - 1
META_FIELDS = {
    "kind": (10, 2),
    "magic": (16, 4),
    "version": (20, 4),
    "map size": (32, 8),
    "page size": (40, 4),
    "free flags": (44, 2),
    "free depth": (46, 2),
    "free overflow pages": (64, 8),
    "free entries": (72, 8),
    "free root": (80, 8),
    "main flags": (92, 2),
    "main depth": (94, 2),
    "main leaf pages": (104, 8),
    "main entries": (120, 8),
    "main root": (128, 8),
    "last page": (136, 8),
    "txnid": (144, 8),
}
"""Offset in the page and bytes of each field of a meta page."""


@dataclass
class DataFile:
    """A data file as bytes, and an older version of it for pages whose last write was lost.

    Where things are is said of a sound file: ask before the first byte is changed.
    """

    data: bytearray
    older: bytes = b""
    rng: random.Random = field(default_factory=random.Random)

    @property
    def num_pages(self) -> int:
        return len(self.data) // PAGE

    @property
    def meta(self) -> int:
        """Offset of the newer meta, behind the header of its page."""
        return max((0, PAGE), key=lambda page: self.number(page + 144, 8)) + 16

    @property
    def free(self) -> int:
        """Offset of the record of the free list's tree."""
        return self.meta + 24

    @property
    def main(self) -> int:
        """Offset of the record of the tree of databases."""
        return self.meta + 72

    def root(self, tree: int) -> int:
        """The root page in the record of a tree."""
        return self.number(tree + 40, 8)

    @cached_property
    def structure(self) -> list[int]:
        """The pages that LMDB reads: both meta pages, branch and leaf pages, the first pages of overflow runs."""
        pages = [0, 1]
        for tree in (self.free, self.main):
            self._walk(self.root(tree), pages)
        return pages

    @cached_property
    def databases(self) -> dict[bytes, list[tuple[int, int]]]:
        """Offset and bytes of every record that has any, by name of database."""
        return {
            self.key(node): [
                (at, size) for at, size in map(self.record_at, self.leaf_nodes(self.root(self.data_of(node)))) if size
            ]
            for node in self.leaf_nodes(self.root(self.main))
        }

    def number(self, place: int, size: int) -> int:
        return int.from_bytes(self.data[place : place + size], "little")

    def kind(self, page: int) -> int:
        return self.number(page * PAGE + 10, 2)

    def nodes(self, page: int) -> list[int]:
        """Offsets of the nodes of a branch or leaf page."""
        lower = min(self.number(page * PAGE + 12, 2), PAGE)
        pointers = struct.unpack_from(f"<{max(0, lower - 16) // 2}H", self.data, page * PAGE + 16)
        return [page * PAGE + pointer for pointer in pointers if pointer <= PAGE - 8]

    def leaf_nodes(self, page: int) -> list[int]:
        """Offsets of all nodes in the leaves under a page, in key order."""
        if page == NO_PAGE:
            return []
        nodes = self.nodes(page)
        if self.kind(page) == LEAF:
            return nodes
        return [below for node in nodes for below in self.leaf_nodes(self.number(node, 6))]

    def key(self, node: int) -> bytes:
        return bytes(self.data[node + 8 : self.data_of(node)])

    def flags(self, node: int) -> int:
        return self.number(node + 4, 2)

    def data_of(self, node: int) -> int:
        """Offset of a leaf node's data, or of the number of its overflow page."""
        return node + 8 + self.number(node + 6, 2)

    def record_at(self, node: int) -> tuple[int, int]:
        """Offset and bytes of a leaf node's data, wherever they are."""
        at = self.data_of(node)
        in_overflow = self.flags(node) == IN_OVERFLOW
        return (self.number(at, 8) * PAGE + 16 if in_overflow else at), self.number(node, 4)

    def any_page(self) -> int:
        """Returns a random page, in most cases one of the structure and not of a payload."""
        return self.rng.choice(self.structure) if self.rng.random() < 0.8 else self.rng.randrange(self.num_pages)

    def any_place(self) -> int:
        """Returns a random offset that LMDB interprets, in a page header, an offset array or a node."""
        page = self.rng.choice(self.structure)
        nodes = self.nodes(page) if self.kind(page) in (BRANCH, LEAF) else []
        choices = [page * PAGE + self.rng.randrange(16)]
        if page < 2:
            choices.append(page * PAGE + 16 + self.rng.randrange(136))
        if nodes:
            node = self.rng.choice(nodes)
            key_bytes = min(self.number(node + 6, 2), PAGE)
            choices.append(page * PAGE + 16 + self.rng.randrange(2 * len(nodes)))
            choices.append(node + self.rng.randrange(8))
            choices.append(node + 8 + self.rng.randrange(key_bytes + 8))
        return min(self.rng.choice(choices), len(self.data) - 8)

    def any_record(self, *databases: bytes) -> tuple[int, int]:
        """Offset and bytes of a record, of one of these databases if any are given."""
        names = [name for name in databases or self.databases if self.databases[name]]
        return self.rng.choice(self.databases[self.rng.choice(names)])

    def put(self, place: int, value: bytes | bytearray) -> None:
        """Overwrite bytes. Those behind the end of the file are left out."""
        value = value[: max(0, len(self.data) - place)]
        self.data[place : place + len(value)] = value

    def swap(self, a: int, b: int, size: int) -> None:
        self.data[a : a + size], self.data[b : b + size] = self.data[b : b + size], self.data[a : a + size]

    def _walk(self, page: int, pages: list[int]) -> None:
        if page == NO_PAGE:
            return
        pages.append(page)
        for node in self.nodes(page) if self.kind(page) in (BRANCH, LEAF) else ():
            if self.kind(page) == BRANCH:
                self._walk(self.number(node, 6), pages)
            elif self.flags(node) == IN_OVERFLOW:
                pages.append(self.number(self.data_of(node), 8))
            elif self.flags(node) == IS_TREE:
                self._walk(self.root(self.data_of(node)), pages)

    def first_page(self, kind: int) -> int:
        """Offset of the first page of this kind that LMDB reads."""
        return next(page for page in self.structure[2:] if self.kind(page) == kind) * PAGE

    def tree(self, name: bytes) -> int:
        """Offset of the record of the tree of a database."""
        return next(self.data_of(node) for node in self.leaf_nodes(self.root(self.main)) if self.key(node) == name)

    def long_node(self) -> int:
        """Offset of a node whose payload is in overflow pages."""
        nodes = self.leaf_nodes(self.root(self.tree(b"payloads")))
        return next(node for node in nodes if self.flags(node) == IN_OVERFLOW)


def flip_bits(file: DataFile) -> None:
    for _ in range(file.rng.choice((1, 1, 2, 8))):
        file.data[file.rng.randrange(len(file.data))] ^= 1 << file.rng.randrange(8)


def flip_structure_bits(file: DataFile) -> None:
    for _ in range(file.rng.choice((1, 1, 1, 2))):
        file.data[file.any_place()] ^= 1 << file.rng.randrange(8)


def write_extremes(file: DataFile) -> None:
    """Huge, zero, nearly right or random numbers where LMDB reads numbers."""
    rng = file.rng
    place, size = file.any_place() & ~1, rng.choice((2, 4, 8))
    old, top = file.number(place, size), (1 << 8 * size) - 1
    half, page = top >> 1, rng.randrange(file.num_pages)
    value = rng.choice((0, 1, top, half, half + 1, old + 1, old - 1, old + 2, page))
    file.put(place, (value & top).to_bytes(size, "little"))


def zero_pages(file: DataFile) -> None:
    start = file.any_page()
    for page in range(start, min(start + file.rng.choice((1, 1, 4)), file.num_pages)):
        file.put(page * PAGE, bytes(PAGE))


def fill_page_with_garbage(file: DataFile) -> None:
    """In some cases the page header is kept."""
    page, keep = file.any_page(), file.rng.choice((0, 0, 12, 16))
    file.put(page * PAGE + keep, file.rng.randbytes(PAGE - keep))


def swap_pages(file: DataFile) -> None:
    file.swap(file.any_page() * PAGE, file.any_page() * PAGE, PAGE)


def copy_page(file: DataFile) -> None:
    """One page's bytes over another's, as a misdirected write does; in half of the cases with the right page number."""
    a, b = file.any_page() * PAGE, file.any_page() * PAGE
    keep = file.rng.choice((0, 8))
    file.data[b + keep : b + PAGE] = file.data[a + keep : a + PAGE]


def truncate(file: DataFile) -> None:
    size = file.rng.randrange(len(file.data))
    del file.data[size - (size % PAGE if file.rng.random() < 0.5 else 0) :]


def overwrite_range(file: DataFile) -> None:
    size = file.rng.choice((16, 512, 3 * PAGE, 64 << 10))
    file.put(file.rng.randrange(len(file.data)), file.rng.randbytes(size))


def damage_meta(file: DataFile) -> None:
    rng = file.rng
    offset, size = META_FIELDS[rng.choice(list(META_FIELDS))]
    for page in rng.choice(((0,), (1,), (0, 1))):
        old = file.number(page * PAGE + offset, size)
        flipped, anything = old ^ 1 << rng.randrange(8 * size), rng.getrandbits(8 * size)
        value = rng.choice((0, 1, old + 1, old + 2, old - 2, flipped, anything))
        file.put(page * PAGE + offset, (value & (1 << 8 * size) - 1).to_bytes(size, "little"))


def lose_writes(file: DataFile) -> None:
    """Replace some pages by their content of some transactions ago."""
    places = range(0, min(len(file.data), len(file.older)) // PAGE * PAGE, PAGE)
    changed = [at for at in places if file.data[at : at + PAGE] != file.older[at : at + PAGE]]
    for at in file.rng.sample(changed, min(len(changed), file.rng.choice((1, 1, 2, len(changed) // 2)))):
        file.put(at, file.older[at : at + PAGE])


def swap_payloads(file: DataFile) -> None:
    """Swap two stored payloads of the same size."""
    _swap_two_alike(file, [b"payloads"])


def swap_records(file: DataFile) -> None:
    """Swap two records of one database that have the same size."""
    _swap_two_alike(file, list(file.databases))


def _swap_two_alike(file: DataFile, databases: list[bytes]) -> None:
    alike: dict[tuple[bytes, int], list[int]] = {}
    for name in databases:
        for at, size in file.databases[name]:
            alike.setdefault((name, size), []).append(at)
    size, places = file.rng.choice([(size, places) for (_, size), places in alike.items() if len(places) > 1])
    a, b = file.rng.sample(places, 2)
    file.swap(a, b, size)


def write_record_numbers(file: DataFile) -> None:
    """Huge, zero or nearly right numbers where a record's fields are: lengths, counts, positions, times."""
    rng = file.rng
    at, record_bytes = file.any_record(*((b"nodes", b"usage", b"payloads") if rng.random() < 0.7 else ()))
    size = rng.choice([size for size in (1, 2, 4, 8) if size <= record_bytes])
    place = at + rng.randrange(0, min(record_bytes, 96) - size + 1, size)
    old, top = file.number(place, size), (1 << 8 * size) - 1
    value = rng.choice((0, 1, top, top >> 1, (top >> 1) + 1, old + 1, old - 1, old * 2, old << 16))
    file.put(place, (value & top).to_bytes(size, "little"))


def flip_record_bits(file: DataFile) -> None:
    at, size = file.any_record()
    for _ in range(file.rng.choice((1, 1, 2, 8))):
        file.data[at + file.rng.randrange(size)] ^= 1 << file.rng.randrange(8)


_TREE_NUMBERS = "IHHQQQQQ"
_META_NUMBERS = "QHHI" + "IIQQ" + 2 * _TREE_NUMBERS + "QQ"
_PAGE_NUMBERS, _RUN_NUMBERS, _NODE_NUMBERS = "QHHHH", "QHHI", "HHHH"
STRUCTURES: dict[str, tuple[Callable[[DataFile], int], str]] = {
    "meta page 0": (lambda _: 0, _META_NUMBERS),
    "meta page 1": (lambda _: PAGE, _META_NUMBERS),
    "branch page": (lambda file: file.first_page(BRANCH), _PAGE_NUMBERS),
    "node of a branch page": (lambda file: file.nodes(file.first_page(BRANCH) // PAGE)[1], _NODE_NUMBERS),
    "leaf page": (lambda file: file.first_page(LEAF), _PAGE_NUMBERS),
    "offsets in a leaf page": (lambda file: file.first_page(LEAF) + 16, "HH"),
    "node of a leaf page": (lambda file: file.nodes(file.first_page(LEAF) // PAGE)[0], _NODE_NUMBERS),
    "node of a payload": (lambda file: file.long_node(), _NODE_NUMBERS),
    "page of a payload": (lambda file: file.data_of(file.long_node()), "Q"),
    "header of a payload": (lambda file: file.number(file.data_of(file.long_node()), 8) * PAGE, _RUN_NUMBERS),
    "tree of nodes": (lambda file: file.tree(b"nodes"), _TREE_NUMBERS),
    "tree of payloads": (lambda file: file.tree(b"payloads"), _TREE_NUMBERS),
    "key of free pages": (lambda file: file.leaf_nodes(file.root(file.free))[0] + 8, "Q"),
    "free pages": (lambda file: file.data_of(file.leaf_nodes(file.root(file.free))[0]), "QQQ"),
    "usage record": (lambda file: file.databases[b"usage"][0][0], "ddfIQIi"),
    "node record": (lambda file: file.databases[b"nodes"][0][0] + 32, "IIBBHIQQ"),
    "piece": (lambda file: file.databases[b"payloads"][0][0], "QIIBB"),
    "budget": (lambda file: file.databases[b"meta"][0][0], "Q"),
}
"""Where one of each structure of a file begins, and the types of its numbers, as in the module `struct`."""


def extremes(file: DataFile, structure: str, index: int) -> Iterator[tuple[int, bytes]]:
    """Yields offset and bytes of what is written over one number of a structure of a sound file: 0, the largest or
    smallest that it can be, or near that; or, for a page number, one whose place fits no signed number."""
    where, types = STRUCTURES[structure]
    place, size = where(file) + struct.calcsize("<" + types[:index]), struct.calcsize(types[index])
    top = (1 << 8 * size) - 1
    half, old = top >> 1, file.number(place, size)
    for value in sorted({0, 1, top, top - 1, half, half + 1, half // PAGE, half // PAGE + 1} - {old}):
        yield place, value.to_bytes(size, "little")


Damage = Callable[[DataFile], None]
FILE_DAMAGE: dict[str, Damage] = {
    "bit flips": flip_bits,
    "bit flips in the structure": flip_structure_bits,
    "extreme numbers in the structure": write_extremes,
    "zeroed pages": zero_pages,
    "garbage in a page": fill_page_with_garbage,
    "swapped pages": swap_pages,
    "misdirected writes": copy_page,
    "truncation": truncate,
    "overwritten ranges": overwrite_range,
    "damaged meta pages": damage_meta,
    "lost writes": lose_writes,
}
RECORD_DAMAGE: dict[str, Damage] = {
    "swapped payloads": swap_payloads,
    "swapped records": swap_records,
    "huge lengths in records": write_record_numbers,
    "bit flips in records": flip_record_bits,
}
"""Damage that leaves LMDB's structure intact. Only the content of the records shows it."""


def damaged(data: bytes, older: bytes, kind: str, seed: int) -> bytes:
    """Returns a damaged copy of `data`. `older` is an earlier version of the same file."""
    file = DataFile(bytearray(data), older, random.Random(f"{kind} {seed}"))
    # Known before a byte changes: it is remembered, and the damage looks at it.
    assert file.structure
    (FILE_DAMAGE | RECORD_DAMAGE)[kind](file)
    return bytes(file.data)
