"""Finding the longest restorable prefix of a prompt, verifying it, and copying it into the arena."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, islice
from operator import attrgetter, itemgetter

import numpy as np
import torch

from diskprefix.cache_report import Refused, Source
from diskprefix.errors import StoreCorrupt
from diskprefix.kv.arena import KVArena
from diskprefix.kv.layout import Layout
from diskprefix.kv.transfer import Bytes
from diskprefix.prefix_cache.matching import Matcher
from diskprefix.prefix_cache.nodes import Node, PromptNodes, Rest
from diskprefix.prefix_cache.planning import Progress
from diskprefix.store.changes import NewNode
from diskprefix.store.codec.codec import Piece, decode_piece, is_in_memory, piece_seed, populate
from diskprefix.store.pieces import Cut
from diskprefix.store.schema import Kind, NodeRecord
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.store import Store
from diskprefix.store.writer import Writer
from diskprefix.tokens import TokenIds, common_prefix_length, floor_to_grid

log = logging.getLogger("diskprefix")

READER_THREADS = 2
_MAPPED_NODES = 100_000
_TRIES = 64
"""Nodes that are looked at to find one that shares a part of the prompt. Few of them will not do: damaged ones, and
generated ones that the request did not ask for."""


@dataclass(frozen=True, kw_only=True)
class Restored(Progress):
    """What is in the arena now: the state after `num_tokens` tokens. To get it, `num_bytes` were loaded.

    The store alone can restore `stored_tokens`; `tip` is the last node of these. `blocks` may reach further, and
    `refused` says why; `matched` is how far what is stored reaches, in tokens. `logits` (shape [vocab], the model's
    dtype) come with an exact repeat.
    """

    num_bytes: int = 0
    stored_tokens: int = 0
    logits: torch.Tensor | None = None
    matched: int = 0
    refused: Refused | None = None
    source: Source = "none"
    lookup_ms: float = 0.0
    restore_ms: float = 0.0


@dataclass
class Restoration:
    """Restores one prompt. `run` is for any one thread at a time.

    `pins` gets what unpins the last node that matched and the one that is restored to. `allows` says whether so many
    tokens are worth restoring, and `pays` whether so many more tokens are worth loading so many more bytes.
    `reuse_generated` and `needs_logits`: see `Matcher`.
    """

    nodes: PromptNodes
    layout: Layout
    store: Store
    writer: Writer
    readers: Executor
    pins: ExitStack
    allows: Callable[[int], bool]
    pays: Callable[[int, int], bool]
    reuse_generated: bool = False
    needs_logits: bool = True
    _queued: dict[bytes, NewNode] = field(default_factory=dict)
    """The nodes that were found waiting to be written, with their raw payloads."""
    _lost: set[bytes] = field(default_factory=set)
    """The names of nodes that were found damaged."""
    _is_slower: bool = False
    kept: int = 0
    """Of how many tokens the arena still has the state if `run` raises."""

    def run(self, arena: KVArena, have: int = 0, logits: torch.Tensor | None = None) -> Restored:
        """Restore into `arena`, which has room for the prompt and the state after its first `have` tokens already.
        `logits` are those at the prompt's end, if it has that much.

        Raises `CacheError`; the state behind the first `kept` tokens is then undefined. A damaged node is removed, and
        the next shorter prefix that can be is restored.
        """
        self.kept = have
        started = time.perf_counter()
        # Before the snapshot: a node that is written in between is then seen twice, never not at all.
        pending = self.writer.pending
        with self.store.snapshot() as snapshot:
            matcher = Matcher(
                self.nodes,
                partial(self._is_stored, pending, snapshot),
                partial(self._most_similar, pending, snapshot),
                self.layout.state_kind,
                self.reuse_generated,
                self.needs_logits,
            )
            matcher.match()
            self._pin(matcher.deepest)
            path, end = self._worth_restoring(matcher, have)
            matched = time.perf_counter()
            while True:
                missing = [node for node in path if min(node.end, end) > have]
                loader = _Loader(
                    self.nodes, self.layout, missing, have, end, self._queued, snapshot, self.store.mapped, arena
                )
                if not missing:
                    break
                self.kept = 0
                loader.make_room()
                if not self.layout.states and arena.held(have) == have:
                    # Neither are states overwritten, nor have windows moved on.
                    self.kept = have
                if (bad := loader.run(self.readers)) is None:
                    break
                self._quarantine(*bad)
                matcher.drop(bad[0])
                have = self.kept
                arena.truncate(have)
                path, end = self._worth_restoring(matcher, have)
        loaded = time.perf_counter()
        deepest, num_tokens = matcher.deepest, max(have, end)
        is_from_disk = any(node.name not in self._queued for node in missing)
        return Restored(
            num_tokens=num_tokens,
            num_bytes=loader.num_bytes,
            stored_tokens=end,
            logits=loader.logits if end > have else logits,
            blocks=matcher.blocks,
            rest=matcher.rest,
            tip=path[-1].name if path else None,
            matched=max(deepest.end if deepest else 0, num_tokens),
            refused=self._why_refused(deepest, num_tokens),
            exact=not any(node.generated for node in missing),
            source="disk" if is_from_disk else "memory" if num_tokens else "none",
            lookup_ms=(matched - started) * 1e3,
            restore_ms=(loaded - matched) * 1e3,
        )

    def _pin(self, node: Node | None) -> None:
        """Before anything is loaded: the request will continue what it restores."""
        if node is not None:
            self.store.evictor.pin(node.name)
            self.pins.callback(self.store.evictor.unpin, node.name)

    def _worth_restoring(self, matcher: Matcher, have: int) -> tuple[list[Node], int]:
        """Returns the nodes of the prefix to restore, the last of them pinned, and where it ends. There are none where
        computing what lies behind the first `have` tokens is faster."""
        nodes, end = matcher.restorable()
        if end % self.nodes.block_size and end < len(self.nodes.token_ids):
            # All of the last node is read and verified, however little of it is used.
            last = nodes[-1]
            if end > have and not self.pays(
                end - max(last.position, have), self.layout.bytes_per_token * last.num_tokens
            ):
                nodes, end = nodes[:-1], last.position
        self._is_slower = end > have and not self.allows(end - have)
        if self._is_slower:
            return [], 0
        self._pin(nodes[-1] if nodes else None)
        return nodes, end

    def _why_refused(self, deepest: Node | None, num_tokens: int) -> Refused | None:
        """Why what is stored could not all be restored; None if it could."""
        if self._lost:
            return "damaged"
        if self._is_slower:
            return "faster_to_compute"
        if deepest is None or deepest.end <= num_tokens:
            return None
        if self.layout.is_one_pass:
            return "whole_prompt_only"
        at_end = deepest.end == len(self.nodes.token_ids)
        return "no_logits" if at_end and deepest.end - num_tokens <= self.nodes.block_size else "no_checkpoint"

    def _is_stored(self, pending: Mapping[bytes, NewNode], snapshot: Snapshot, node: Node) -> bool:
        """Whether the node is stored, or queued to be; one whose record is damaged is removed.

        A name is not a proof: the tokens, the parent and the place are compared too.
        """
        token_ids = self.nodes.token_bytes(node)
        queued = pending.get(node.name)
        if queued is not None and _is_same(queued, node, token_ids):
            self._queued[node.name] = queued
            return True
        try:
            return snapshot.has(node.name, node.parent, node.position, node.kind, token_ids, generated=node.generated)
        except StoreCorrupt as error:
            self._quarantine(node, error)
            return False

    def _most_similar(
        self, pending: Mapping[bytes, NewNode], snapshot: Snapshot, parent: bytes, start: int, end: int
    ) -> Rest | None:
        """Returns the sound node, stored or queued to be, that continues `parent` and has most of the prompt's tokens
        from `start` to `end`. None if no node has the first one."""
        token_ids = self.nodes.token_ids[start:end]
        found: list[Rest] = []
        for name, queued in pending.items():
            if (match := self._shared_part(name, queued, parent, start, token_ids)) is not None:
                found.append(match)
                self._queued[name] = queued
        for name in islice(snapshot.similar_children(parent, token_ids.tobytes()), _TRIES):
            stored = self._sound_record(snapshot, name, parent)
            if stored and (match := self._shared_part(name, stored, parent, start, token_ids)) is not None:
                # Those that come after it have no more in common.
                found.append(match)
                break
        return max(found, key=attrgetter("end", "node.end"), default=None)

    def _sound_record(self, snapshot: Snapshot, name: bytes, parent: bytes) -> NodeRecord | None:
        """Returns the record of a node that continues `parent`; None if it is missing or damaged."""
        if name in self._lost:
            return None
        try:
            return snapshot.node(name)
        except StoreCorrupt as error:
            self._quarantine(Node(name, parent, 0, 0, Kind.BLOCK), error)
            return None

    def _shared_part(
        self, name: bytes, record: NodeRecord | NewNode, parent: bytes, start: int, token_ids: TokenIds
    ) -> Rest | None:
        """Returns the node, and where the tokens end that it shares with `token_ids`, which begin at `start`. None if
        there are none, if it continues something else, or if it was generated and the request did not ask for that."""
        is_elsewhere = (record.parent, record.position) != (parent, start)
        if is_elsewhere or (record.generated and not self.reuse_generated) or name in self._lost:
            return None
        num_common = common_prefix_length(record.token_ids, token_ids)
        node = Node(name, parent, start, len(record.token_ids), record.kind, record.generated)
        return Rest(node, start + num_common) if num_common else None

    def _quarantine(self, node: Node, error: StoreCorrupt) -> None:
        self._lost.add(node.name)
        what = "checkpoint" if node.kind == Kind.CHECKPOINT else "block"
        log.warning("[disk-cache] %s %s is damaged and will be removed: %s", what, node.name.hex(), error)
        self.writer.quarantine(node.name, node.parent)


@dataclass
class _Loader:
    """Verifies, decodes and copies pieces on the reading threads, which take them one after the other.

    `path` are the nodes of the prefix that ends at `end`, without those that end among the first `have` tokens, which
    the arena has already. The last one may reach further; it is verified as a whole.
    """

    nodes: PromptNodes
    layout: Layout
    path: list[Node]
    have: int
    end: int
    queued: Mapping[bytes, NewNode]
    snapshot: Snapshot
    mapped: set[bytes]
    arena: KVArena
    logits: torch.Tensor | None = None
    num_bytes: int = 0

    def __post_init__(self) -> None:
        # A block that the prompt goes on in will be stored: all of it is needed.
        block_start = floor_to_grid(self.end, self.nodes.block_size)
        self._first_needed = {n: min(g.first_needed(self.end), block_start) for n, g in enumerate(self.layout.groups)}
        if self.end < len(self.nodes.token_ids):
            # Logits are those at the prompt's end.
            self._first_needed[self.nodes.layout.logits_group] = self.end
        self._loads = self._in_order()
        self._taking = threading.Lock()
        self._bad: dict[int, StoreCorrupt] = {}

    def make_room(self) -> None:
        """Make the arena ready for what `run` loads."""
        for number in range(len(self.layout.groups)):
            first_loaded = floor_to_grid(self._first_needed[number], self.nodes.block_size)
            self.arena.expect(number, first_loaded, self.end)

    def run(self, readers: Executor) -> tuple[Node, StoreCorrupt] | None:
        """Load everything. Answers the first node that cannot be used and what is wrong with it, None if all can."""
        threads = [readers.submit(self._take) for _ in range(READER_THREADS)]
        # The views belong to the snapshot: no thread may still read them when it is closed.
        wait(threads)
        for thread in threads:
            thread.result()
        if not self._bad:
            return None
        index, error = min(self._bad.items(), key=itemgetter(0))
        return self.path[index], error

    def _in_order(self) -> Iterator[tuple[int, Cut, Callable[[Bytes], None]]]:
        """For each piece, the index of its node, what it holds, and what writes it into memory. One thread at a time: a
        snapshot serves no two at once."""
        for index, node in enumerate(self.path):
            cuts = self.nodes.cuts(node)
            # Of layers with a window, the run looks at the blocks under the window only.
            end = min(node.end, self.end)
            needed = [number for number, cut in enumerate(cuts) if end > self._first_needed.get(cut.group, -1)]
            if (queued := self.queued.get(node.name)) is not None:
                starts = list(accumulate((cut.piece.num_bytes for cut in cuts), initial=0))
                for number in needed:
                    yield index, cuts[number], partial(_copy, queued.payload[starts[number] : starts[number + 1]])
                continue
            is_cold = bool(needed) and not self._is_mapped(node, needed)
            for number in needed:
                stored, seed = self.snapshot.piece(node.name, number), piece_seed(node.name, number)
                yield index, cuts[number], partial(_decode, stored, is_cold, cuts[number].piece, seed)

    def _is_mapped(self, node: Node, needed: list[int]) -> bool:
        """Whether this process has read the node's pages before, and they are still in memory.

        The ends speak for the whole: to populate what is mapped already, or to look at each piece, would cost a fifth
        of a restore.
        """
        if node.name not in self.mapped:
            if len(self.mapped) >= _MAPPED_NODES:
                self.mapped.clear()
            self.mapped.add(node.name)
            return False
        ends = [self.snapshot.piece(node.name, number) for number in (needed[0], needed[-1])]
        return all(end is not None and is_in_memory(end) for end in ends)

    def _take(self) -> None:
        while not self._bad:
            with self._taking:
                load = next(self._loads, None)
                if load is None:
                    return
                index, cut, write = load
                self.num_bytes += cut.piece.num_bytes
            try:
                self._load(self.path[index], cut, write)
            except StoreCorrupt as error:
                self._bad.setdefault(index, error)

    def _load(self, node: Node, cut: Cut, write: Callable[[Bytes], None]) -> None:
        if cut.group == self.nodes.layout.logits_group:
            logits = np.empty((1, cut.piece.row_bytes), dtype=np.uint8)
            write(logits)
            self.logits = self.arena.logits_from(logits)
        else:
            rows = slice(cut.first_row, cut.first_row + cut.piece.num_rows)
            start, end = max(node.position, self.have), min(node.end, self.end)
            if end - start < node.num_tokens and cut.group < len(self.layout.groups):
                first_byte = (start - node.position) * (cut.piece.row_bytes // node.num_tokens)
                write = partial(_write_part, write, cut.piece, first_byte)
            self.arena.fill(start, end - start, cut.group, rows, write)


def _write_part(write: Callable[[Bytes], None], piece: Piece, first_byte: int, out: Bytes) -> None:
    """Writes a part of each row of a piece, from `first_byte` on: a row holds its tokens one after the other."""
    whole = np.empty((piece.num_rows, piece.row_bytes), dtype=np.uint8)
    write(whole)
    out[...] = whole[:, first_byte : first_byte + out.shape[1]]


def _copy(raw: memoryview, out: Bytes) -> None:
    out[...] = np.frombuffer(raw, dtype=np.uint8).reshape(out.shape)


def _decode(stored: memoryview | None, is_cold: bool, piece: Piece, seed: int, out: Bytes) -> None:
    """Raises `StoreCorrupt` if the piece is missing or damaged."""
    if stored is None:
        raise StoreCorrupt("a piece of its payload is missing")
    if is_cold:
        populate(stored)
    decode_piece(stored, piece, seed, out)


def _is_same(queued: NewNode, node: Node, token_ids: bytes) -> bool:
    there = queued.parent, queued.position, queued.kind, queued.generated
    return there == (node.parent, node.position, node.kind, node.generated) and queued.token_ids.tobytes() == token_ids
