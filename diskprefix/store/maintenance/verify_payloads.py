"""Checks the contents of the payloads: each piece is read, verified and decoded.

That takes long, and an open snapshot keeps freed pages from being reused. So the payloads are read in slices, each with
a snapshot of its own. A node that was evicted in the meantime is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from diskprefix.errors import StoreCorrupt
from diskprefix.store.codec.codec import Piece, decode_piece, piece_seed, populate
from diskprefix.store.maintenance.verify import Problem, ProblemKind
from diskprefix.store.pieces import PayloadLayout
from diskprefix.store.schema import piece_key
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.store import Store

_SLICE_BYTES = 128 << 20
"""Payload that is checked under one snapshot: a fraction of a second from memory, a second or two from a disk."""
_SLICE_NODES = 1024
_THREADS = 2
_MOST_PIECE_BYTES = 1 << 28
"""A layout is a part of the file, so its sizes are not trusted with memory."""


@dataclass(frozen=True, kw_only=True)
class PayloadReport:
    """`num_bytes` is the stored size of the pieces that were read."""

    problems: tuple[Problem, ...]
    num_pieces: int
    num_bytes: int


@dataclass(frozen=True)
class StoredPiece:
    """One piece of a node's payload. `stored` is a view of the memory map, valid while its snapshot is open; `expected`
    is what the layout says of the piece."""

    name: bytes
    index: int
    stored: memoryview
    expected: Piece


def verify_payloads(store: Store, stored_bytes: dict[bytes, int], advance: Callable[[int], None]) -> PayloadReport:
    """Read, verify and decode every piece of these nodes. `advance` is called with the stored bytes that are done."""
    problems: list[Problem] = []
    num_pieces = num_bytes = 0
    for names in _slices(stored_bytes):
        found, sizes = _check_slice(store, names)
        again, _ = _check_slice(store, sorted({problem.node for problem in found}))
        problems += [problem for problem in again if problem in found]
        num_pieces += len(sizes)
        num_bytes += sum(sizes)
        advance(sum(stored_bytes[name] for name in names))
    return PayloadReport(problems=tuple(problems), num_pieces=num_pieces, num_bytes=num_bytes)


def payload_problems(snapshot: Snapshot, name: bytes) -> list[Problem]:
    """Returns what is wrong with the contents of a node's pieces."""
    found = (_problem(piece) for piece in _stored_payload(snapshot, name))
    return [problem for problem in found if problem is not None]


def stored_pieces(snapshot: Snapshot, name: bytes, expected: tuple[Piece, ...]) -> list[StoredPiece]:
    """Returns the pieces of a node's payload. Raises `StoreCorrupt` if one is missing."""
    pieces = []
    for index, piece in enumerate(expected):
        stored = snapshot.piece(name, index)
        if stored is None:
            raise StoreCorrupt(f"piece {index} of its payload is missing")
        pieces.append(StoredPiece(name, index, stored, piece))
    return pieces


def _slices(stored_bytes: dict[bytes, int]) -> Iterator[list[bytes]]:
    names: list[bytes] = []
    size = 0
    for name, num_bytes in stored_bytes.items():
        names.append(name)
        size += num_bytes
        if size >= _SLICE_BYTES or len(names) >= _SLICE_NODES:
            yield names
            names, size = [], 0
    if names:
        yield names


def _check_slice(store: Store, names: Iterable[bytes]) -> tuple[list[Problem], list[int]]:
    """Returns the problems of the pieces of these nodes, and the stored size of each piece."""
    # The threads end before the snapshot is closed, because they use its views.
    with store.snapshot() as snapshot, ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as pool:
        pieces = [piece for name in names for piece in _stored_payload(snapshot, name)]
        found = [problem for problem in pool.map(_problem, pieces) if problem is not None]
        return found, [len(piece.stored) for piece in pieces]


def _stored_payload(snapshot: Snapshot, name: bytes) -> list[StoredPiece]:
    """Returns the pieces of a node; none if the node is gone, or if its records are wrong: `verify` finds that."""
    try:
        node = snapshot.node(name)
        root = snapshot.root(node.root) if node else None
        if node is None or root is None:
            return []
        return stored_pieces(snapshot, name, PayloadLayout.parse(root.layout).pieces(node.num_tokens, node.kind))
    except StoreCorrupt:
        return []


def _problem(piece: StoredPiece) -> Problem | None:
    """Returns what is wrong with a piece: its checksum, its encoding or its size. Runs in any thread."""
    key, expected = piece_key(piece.name, piece.index).hex(), piece.expected
    if expected.num_bytes > _MOST_PIECE_BYTES:
        return Problem(ProblemKind.MISSHAPEN, "payloads", key, f"the layout has a piece of {expected.num_bytes} bytes")
    try:
        populate(piece.stored)
        out = np.empty((expected.num_rows, expected.row_bytes), np.uint8)
        decode_piece(piece.stored, expected, piece_seed(piece.name, piece.index), out)
    except StoreCorrupt as error:
        return Problem(ProblemKind.DAMAGED, "payloads", key, str(error))
    return None
