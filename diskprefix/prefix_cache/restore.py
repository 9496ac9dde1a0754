"""Finding the longest stored prefix of a prompt, verifying it, and copying it into the arena."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

import torch

from diskprefix.cache_report import Source
from diskprefix.errors import StoreCorrupt
from diskprefix.kv.layers import KVArena
from diskprefix.prefix_cache.nodes import Node, PromptNodes
from diskprefix.store.codec import read_payload
from diskprefix.store.schema import Kind, NodeRecord
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.store import NewNode, Store
from diskprefix.store.writer import Writer

log = logging.getLogger("diskprefix")


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What is in the arena now: `num_tokens`, and the names of its full blocks from position 0 on.

    `logits` (shape [vocab], the model's dtype) come with an exact repeat. `tip` is the last node that was used.
    """

    num_tokens: int = 0
    logits: torch.Tensor | None = None
    blocks: tuple[bytes, ...] = ()
    tip: bytes | None = None
    source: Source = "none"
    lookup_ms: float = 0.0
    restore_ms: float = 0.0


@dataclass(frozen=True, eq=False)
class _Piece:
    """A matched node. `load` answers its raw payload, verified. Raises `StoreCorrupt`."""

    node: Node
    source: Source
    load: Callable[[], memoryview]


class Restoration:
    """Restores one prompt. `run` is for the engine thread."""

    def __init__(self, nodes: PromptNodes, store: Store, writer: Writer, readers: Executor) -> None:
        self._nodes = nodes
        self._store = store
        self._writer = writer
        self._readers = readers

    def run(self, arena: KVArena) -> Restored:
        """Restore into `arena`, which has room for the prompt. Raises `CacheError`; what is in the arena is then
        undefined. A damaged node is removed, and what lies before it is restored."""
        started = time.perf_counter()
        # Before the snapshot: a node that is written in between is then seen twice, never not at all.
        pending = self._writer.pending
        with self._store.snapshot() as snapshot:
            pieces = self._match(pending, snapshot)
            matched = time.perf_counter()
            pieces, logits = self._load(pieces, arena)
        loaded = time.perf_counter()
        return Restored(
            num_tokens=pieces[-1].node.end if pieces else 0,
            logits=logits,
            blocks=tuple(piece.node.name for piece in pieces if piece.node.kind == Kind.BLOCK),
            tip=pieces[-1].node.name if pieces else None,
            source=_source(pieces),
            lookup_ms=(matched - started) * 1e3,
            restore_ms=(loaded - matched) * 1e3,
        )

    def _match(self, pending: Mapping[bytes, NewNode], snapshot: Snapshot) -> list[_Piece]:
        """The longest chain of stored nodes that the prompt starts with.

        At least one token must be left to compute unless the tail, with the next-token logits, is stored too.
        """
        pieces: list[_Piece] = []
        parent = self._nodes.root
        for index in range(len(self._nodes.token_ids) // self._nodes.block_size):
            piece = self._find_sound(pending, snapshot, self._nodes.block(parent, index))
            if piece is None:
                return pieces
            pieces.append(piece)
            parent = piece.node.name
        tail = self._find_sound(pending, snapshot, self._nodes.tail(parent, len(pieces)))
        return self._leave_one_token(pieces) if tail is None else [*pieces, tail]

    def _leave_one_token(self, pieces: list[_Piece]) -> list[_Piece]:
        """Without its tail, a prompt that ends on the grid must compute its last block again."""
        complete = len(pieces) * self._nodes.block_size == len(self._nodes.token_ids)
        return pieces[:-1] if complete else pieces

    def _find_sound(self, pending: Mapping[bytes, NewNode], snapshot: Snapshot, node: Node) -> _Piece | None:
        """The node if it is stored, or queued to be; one whose record is damaged is removed."""
        try:
            return self._find(pending, snapshot, node)
        except StoreCorrupt as error:
            self._quarantine(node, error)
            return None

    def _find(self, pending: Mapping[bytes, NewNode], snapshot: Snapshot, node: Node) -> _Piece | None:
        queued = pending.get(node.name)
        if queued is not None and self._is_same(node, queued):
            return _Piece(node, "memory", lambda: queued.payload)
        record, stored = snapshot.node(node.name), snapshot.payload(node.name)
        if record is None:
            return None
        if not self._is_same(node, record):
            raise StoreCorrupt("its record is that of another prefix")
        if stored is None:
            raise StoreCorrupt("its payload is missing")
        expected = self._nodes.payload_bytes(node)
        return _Piece(node, "disk", lambda: read_payload(record, stored, expected_bytes=expected))

    def _is_same(self, node: Node, stored: NewNode | NodeRecord) -> bool:
        """A name is not a proof: the tokens, the parent and the place must be the same too."""
        same_place = (stored.parent, stored.position, stored.kind) == (node.parent, node.position, node.kind)
        return same_place and stored.token_ids.tobytes() == self._nodes.tokens(node).tobytes()

    def _load(self, pieces: list[_Piece], arena: KVArena) -> tuple[list[_Piece], torch.Tensor | None]:
        """Verify and copy the pieces in several threads; what follows a bad one is not accepted."""
        loads = [self._readers.submit(_load_piece, piece, arena) for piece in pieces]
        good: list[_Piece] = []
        logits: torch.Tensor | None = None
        try:
            for piece, load in zip(pieces, loads, strict=True):
                logits = load.result()
                good.append(piece)
        except StoreCorrupt as error:
            self._quarantine(pieces[len(good)].node, error)
            good, logits = self._leave_one_token(good), None
        finally:
            # The views belong to the snapshot: no thread may still read them when it is closed.
            for load in loads:
                load.cancel() or load.exception()
        return good, logits

    def _quarantine(self, node: Node, error: StoreCorrupt) -> None:
        log.warning("[disk-cache] block %s is damaged and will be removed: %s", node.name.hex(), error)
        self._writer.quarantine(node.name, node.parent)


def _load_piece(piece: _Piece, arena: KVArena) -> torch.Tensor | None:
    """On a reading thread: a tail answers its next-token logits."""
    node = piece.node
    return arena.write_block(node.position, node.num_tokens, piece.load(), with_logits=node.kind == Kind.TAIL)


def _source(pieces: list[_Piece]) -> Source:
    if not pieces:
        return "none"
    return "disk" if any(piece.source == "disk" for piece in pieces) else "memory"
