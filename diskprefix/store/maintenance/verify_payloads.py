"""Can every payload be read? Each piece is verified and decoded.

That takes long, and a snapshot keeps freed pages from being used again, so the payloads are read in slices with a
snapshot each: a node that was evicted since is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from diskprefix.errors import StoreCorrupt
from diskprefix.store.codec.codec import Piece, check_piece, piece_seed, populate
from diskprefix.store.maintenance.verify import Problem, ProblemKind
from diskprefix.store.pieces import PayloadLayout
from diskprefix.store.schema import Kind, piece_key
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.store import Store

_SLICE_BYTES = 128 << 20
"""Payload that is checked under one snapshot: a fraction of a second from memory, a second or two from a disk."""
_SLICE_NODES = 1024
_THREADS = 2


@dataclass(frozen=True, kw_only=True)
class PayloadReport:
    problems: tuple[Problem, ...]
    num_pieces: int
    num_bytes: int


def verify_payloads(store: Store, stored_bytes: dict[bytes, int], advance: Callable[[int], None]) -> PayloadReport:
    """Read, verify and decode every piece of these nodes. `advance` is told of stored bytes that are done."""
    problems: list[Problem] = []
    num_pieces = num_bytes = 0
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as pool:
        for names in _slices(stored_bytes):
            found = _check_slice(store, names, pool)
            again = _check_slice(store, sorted({problem.node for problem in found.problems}), pool)
            problems += [problem for problem in again.problems if problem in found.problems]
            num_pieces += found.num_pieces
            num_bytes += found.num_bytes
            advance(sum(stored_bytes[name] for name in names))
    return PayloadReport(problems=tuple(problems), num_pieces=num_pieces, num_bytes=num_bytes)


def payload_problems(snapshot: Snapshot, name: bytes) -> list[Problem]:
    """What is wrong with the pieces of one node, all of them read and decoded here and now."""
    return _check_payload(_payload_of(snapshot, name))


@dataclass(frozen=True, eq=False)
class _Payload:
    """What is to be read of one node: views of the memory map, good while their snapshot is open, and their forms."""

    name: bytes
    stored: list[memoryview]
    forms: tuple[Piece, ...]


class _SliceReport(NamedTuple):
    problems: list[Problem]
    num_pieces: int
    num_bytes: int


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


def _check_slice(store: Store, names: Iterable[bytes], pool: ThreadPoolExecutor) -> _SliceReport:
    with store.snapshot() as snapshot:
        payloads = [_payload_of(snapshot, name) for name in names]
        checks = [pool.submit(_check_payload, payload) for payload in payloads]
        try:
            problems = [problem for check in checks for problem in check.result()]
        finally:
            # Whatever happens, the threads must be done with the views before the snapshot is closed.
            for check in checks:
                check.cancel()
            wait(checks)
        stored = [view for payload in payloads for view in payload.stored]
        return _SliceReport(problems, len(stored), sum(map(len, stored)))


def _payload_of(snapshot: Snapshot, name: bytes) -> _Payload:
    """The payload of a node as it is now; nothing of it if it is gone, or if its index is what is wrong."""
    nothing = _Payload(name, [], ())
    try:
        node = snapshot.node(name)
        root = snapshot.root(node.root) if node else None
        if node is None or root is None:
            return nothing
        forms = _forms(root.layout, len(node.token_ids), node.kind)
    except StoreCorrupt:
        return nothing
    stored = [view for _, view in snapshot.pieces(name)]
    return _Payload(name, stored, forms) if len(stored) == len(forms) else nothing


@lru_cache(maxsize=1024)
def _forms(layout: str, num_tokens: int, kind: Kind) -> tuple[Piece, ...]:
    """Raises `StoreCorrupt`."""
    return PayloadLayout.parse(layout).pieces(num_tokens, kind)


def _check_payload(payload: _Payload) -> list[Problem]:
    """Checksum, decoding and form of every piece; runs in any thread."""
    problems = []
    for index, (stored, form) in enumerate(zip(payload.stored, payload.forms, strict=True)):
        problem = _check_piece(payload.name, index, stored, form)
        if problem is not None:
            problems.append(problem)
    return problems


def _check_piece(name: bytes, index: int, stored: memoryview, form: Piece) -> Problem | None:
    key = piece_key(name, index).hex()
    try:
        populate(stored)
        raw_bytes, _, element = check_piece(stored, piece_seed(name, index))
    except StoreCorrupt as error:
        return Problem(ProblemKind.DAMAGED, "payloads", key, str(error))
    if (raw_bytes, element) != (form.num_bytes, form.element):
        message = f"{raw_bytes} bytes of {element.name}, the layout has {form.num_bytes} of {form.element.name}"
        return Problem(ProblemKind.MISSHAPEN, "payloads", key, message)
    return None
