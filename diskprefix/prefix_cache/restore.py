"""Finding the longest stored prefix of a prompt, verifying it, and copying it into the arena."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch

from diskprefix.cache_report import Source
from diskprefix.errors import StoreCorrupt
from diskprefix.kv.layers import Bytes, KVArena
from diskprefix.prefix_cache.nodes import Node, PromptNodes
from diskprefix.store.changes import NewNode
from diskprefix.store.codec import decode_piece, is_in_memory, piece_seed, populate
from diskprefix.store.pieces import Cut
from diskprefix.store.schema import Kind
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.store import Store
from diskprefix.store.writer import Writer

log = logging.getLogger("diskprefix")

READER_THREADS = 2
_MAPPED_NODES = 100_000


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


class _Match(NamedTuple):
    """A node of the prompt that is stored, or queued to be: then `queued` has its raw payload."""

    node: Node
    queued: NewNode | None = None

    @property
    def source(self) -> Source:
        return "disk" if self.queued is None else "memory"


class _Load(NamedTuple):
    """One piece to be brought into the arena. `stored` is encoded if it comes from the file, raw if it was queued, None
    if it is missing."""

    match: int
    number: int
    cut: Cut
    stored: memoryview | None
    is_queued: bool
    is_cold: bool


class Restoration:
    """Restores one prompt. `run` is for the engine thread."""

    def __init__(self, nodes: PromptNodes, store: Store, writer: Writer, readers: Executor) -> None:
        self._nodes = nodes
        self._store = store
        self._writer = writer
        self._readers = readers
        self.pinned: bytes | None = None
        """The last node that matched, from then on pinned in the store; the caller unpins it."""

    def run(self, arena: KVArena) -> Restored:
        """Restore into `arena`, which has room for the prompt. Raises `CacheError`; what is in the arena is then
        undefined. A damaged node is removed, and what lies before it is restored."""
        started = time.perf_counter()
        # Before the snapshot: a node that is written in between is then seen twice, never not at all.
        pending = self._writer.pending
        with self._store.snapshot() as snapshot:
            matches = self._match(pending, snapshot)
            self._pin(matches)
            matched = time.perf_counter()
            matches, logits = self._load(matches, snapshot, arena)
        loaded = time.perf_counter()
        return Restored(
            num_tokens=matches[-1].node.end if matches else 0,
            logits=logits,
            blocks=tuple(match.node.name for match in matches if match.node.kind == Kind.BLOCK),
            tip=matches[-1].node.name if matches else None,
            source=_source(matches),
            lookup_ms=(matched - started) * 1e3,
            restore_ms=(loaded - matched) * 1e3,
        )

    def _pin(self, matches: list[_Match]) -> None:
        """Before anything is loaded: the request will continue what it restores."""
        if matches:
            self.pinned = matches[-1].node.name
            self._store.pin(self.pinned)

    def _match(self, pending: Mapping[bytes, NewNode], snapshot: Snapshot) -> list[_Match]:
        """The longest chain of stored nodes that the prompt starts with.

        At least one token must be left to compute unless the tail, with the next-token logits, is stored too.
        """
        matches: list[_Match] = []
        parent = self._nodes.root
        for index in range(len(self._nodes.token_ids) // self._nodes.block_size):
            match = self._find_sound(pending, snapshot, self._nodes.block(parent, index))
            if match is None:
                return matches
            matches.append(match)
            parent = match.node.name
        tail = self._find_sound(pending, snapshot, self._nodes.tail(parent, len(matches)))
        return self._leave_one_token(matches) if tail is None else [*matches, tail]

    def _leave_one_token(self, matches: list[_Match]) -> list[_Match]:
        """Without its tail, a prompt that ends on the grid must compute its last block again."""
        complete = len(matches) * self._nodes.block_size == len(self._nodes.token_ids)
        return matches[:-1] if complete else matches

    def _find_sound(self, pending: Mapping[bytes, NewNode], snapshot: Snapshot, node: Node) -> _Match | None:
        """The node if it is stored, or queued to be; one whose record is damaged is removed.

        A name is not a proof: the tokens, the parent and the place are compared too.
        """
        token_ids = self._nodes.token_bytes(node)
        queued = pending.get(node.name)
        if queued is not None and _is_queued(queued, node, token_ids):
            return _Match(node, queued)
        try:
            stored = snapshot.has(node.name, node.parent, node.position, node.kind, token_ids)
        except StoreCorrupt as error:
            self._quarantine(node, error)
            return None
        return _Match(node) if stored else None

    def _load(
        self, matches: list[_Match], snapshot: Snapshot, arena: KVArena
    ) -> tuple[list[_Match], torch.Tensor | None]:
        """Verify the pieces and copy them into the arena, on several threads; what follows a bad one is not taken."""
        loader = _Loader(self._nodes, matches, snapshot, self._store.mapped, arena)
        loader.run(self._readers)
        bad = loader.first_bad
        if bad is None:
            return matches, loader.logits
        number, error = bad
        self._quarantine(matches[number].node, error)
        return self._leave_one_token(matches[:number]), None

    def _quarantine(self, node: Node, error: StoreCorrupt) -> None:
        log.warning("[disk-cache] block %s is damaged and will be removed: %s", node.name.hex(), error)
        self._writer.quarantine(node.name, node.parent)


class _Loader:
    """Verifies, decodes and copies pieces on the reading threads, which take them one after the other."""

    def __init__(
        self, nodes: PromptNodes, matches: list[_Match], snapshot: Snapshot, mapped: set[bytes], arena: KVArena
    ) -> None:
        self._mapped = mapped
        self.logits: torch.Tensor | None = None
        self._nodes = nodes
        self._matches = matches
        self._snapshot = snapshot
        self._arena = arena
        self._loads = self._in_order()
        self._taking = threading.Lock()
        self._bad: dict[int, StoreCorrupt] = {}

    def run(self, readers: Executor) -> None:
        threads = [readers.submit(self._take) for _ in range(READER_THREADS)]
        # The views belong to the snapshot: no thread may still read them when it is closed.
        wait(threads)
        for thread in threads:
            thread.result()

    @property
    def first_bad(self) -> tuple[int, StoreCorrupt] | None:
        """The number of the first match that cannot be used and what is wrong with it, None if all can."""
        return min(self._bad.items(), default=None, key=itemgetter(0))

    def _in_order(self) -> Iterator[_Load]:
        """All pieces of the matches. One thread at a time: a snapshot serves no two at once."""
        for match, (node, queued) in enumerate(self._matches):
            cuts = self._nodes.cuts(node)
            if queued is not None:
                starts = accumulate((cut.piece.num_bytes for cut in cuts), initial=0)
                for number, (cut, start) in enumerate(zip(cuts, starts, strict=False)):
                    raw = queued.payload[start : start + cut.piece.num_bytes]
                    yield _Load(match, number, cut, raw, is_queued=True, is_cold=False)
                continue
            is_cold = not self._is_mapped(node, len(cuts))
            for number, cut in enumerate(cuts):
                stored = self._snapshot.piece(node.name, number)
                yield _Load(match, number, cut, stored, is_queued=False, is_cold=is_cold)

    def _is_mapped(self, node: Node, num_pieces: int) -> bool:
        """Whether this process has read the node's pages before, and they are still in memory.

        The ends speak for the whole: to populate what is mapped already, or to look at each piece, would cost a fifth
        of a restore.
        """
        if node.name not in self._mapped:
            if len(self._mapped) >= _MAPPED_NODES:
                self._mapped.clear()
            self._mapped.add(node.name)
            return False
        ends = [self._snapshot.piece(node.name, number) for number in (0, num_pieces - 1)]
        return all(end is not None and is_in_memory(end) for end in ends)

    def _take(self) -> None:
        # What was taken is always loaded: so whatever lies before a bad piece is in the arena in the end.
        while not self._bad:
            with self._taking:
                load = next(self._loads, None)
            if load is None:
                return
            try:
                self._load(load)
            except StoreCorrupt as error:
                self._bad.setdefault(load.match, error)

    def _load(self, load: _Load) -> None:
        node, cut, stored = self._matches[load.match].node, load.cut, load.stored
        if stored is None:
            raise StoreCorrupt("a piece of its payload is missing")

        def write(out: Bytes) -> None:
            if load.is_queued:
                out[...] = np.frombuffer(stored, dtype=np.uint8).reshape(out.shape)
            else:
                if load.is_cold:
                    populate(stored)
                decode_piece(stored, cut.piece, piece_seed(node.name, load.number), out)

        if cut.group == len(self._nodes.layout.groups):
            logits = np.empty((1, cut.piece.row_bytes), dtype=np.uint8)
            write(logits)
            self.logits = self._arena.logits_from(logits)
        else:
            rows = slice(cut.first_row, cut.first_row + cut.piece.num_rows)
            self._arena.fill(node.position, node.num_tokens, cut.group, rows, write)


def _is_queued(queued: NewNode, node: Node, token_ids: bytes) -> bool:
    same_place = (queued.parent, queued.position, queued.kind) == (node.parent, node.position, node.kind)
    return same_place and queued.token_ids.tobytes() == token_ids


def _source(matches: list[_Match]) -> Source:
    if not matches:
        return "none"
    return "disk" if any(match.source == "disk" for match in matches) else "memory"
