"""Finding the longest restorable prefix of a prompt, verifying it, and copying it into the arena."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch

from diskprefix.cache_report import Refused, Source
from diskprefix.errors import StoreCorrupt
from diskprefix.kv.arena import Bytes, KVArena
from diskprefix.kv.layout import Layout
from diskprefix.prefix_cache.matching import Found, Matcher
from diskprefix.prefix_cache.nodes import Node, PromptNodes
from diskprefix.store.changes import NewNode
from diskprefix.store.codec.codec import decode_piece, is_in_memory, piece_seed, populate
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
    """What is in the arena now: the state after `num_tokens` tokens, `num_bytes` of which were loaded.

    `blocks` are the full blocks of the prompt that are stored, from position 0 on: they may reach further than what
    could be restored, and `refused` says why; `matched` is how far they and the tail reach, in tokens. `tip` is the
    last node that was used. `logits` (shape [vocab], the model's dtype) come with an exact repeat. `exact`: the state
    is what a prefill from position 0 computes, bit for bit.
    """

    num_tokens: int = 0
    num_bytes: int = 0
    logits: torch.Tensor | None = None
    blocks: tuple[Node, ...] = ()
    tip: bytes | None = None
    matched: int = 0
    refused: Refused | None = None
    exact: bool = True
    source: Source = "none"
    lookup_ms: float = 0.0
    restore_ms: float = 0.0


class _Match(NamedTuple):
    """A node of the prompt that is stored, or queued to be: then `queued` has its raw payload."""

    node: Node
    queued: NewNode | None = None


class _Load(NamedTuple):
    """One piece to be brought into the arena. `stored` is encoded if it comes from the file, raw if it was queued, None
    if it is missing."""

    match: int
    number: int
    cut: Cut
    stored: memoryview | None
    is_queued: bool
    is_cold: bool


@dataclass
class Restoration:
    """Restores one prompt. `run` is for the engine thread. `allows` says whether so many tokens are worth restoring.
    `reuse_generated` and `needs_logits`: see `Matcher`."""

    nodes: PromptNodes
    layout: Layout
    store: Store
    writer: Writer
    readers: Executor
    allows: Callable[[int], bool]
    reuse_generated: bool = False
    needs_logits: bool = True
    _is_slower: bool = False
    pinned: list[bytes] = field(default_factory=list)
    """The last node that matched and the one that is restored to, pinned in the store; the caller unpins them."""

    def run(self, arena: KVArena) -> Restored:
        """Restore into `arena`, which has room for the prompt. Raises `CacheError`; what is in the arena is then
        undefined. A damaged node is removed, and the next shorter prefix that can be is restored."""
        started = time.perf_counter()
        # Before the snapshot: a node that is written in between is then seen twice, never not at all.
        pending = self.writer.pending
        found: Found[_Match] = Found()
        with self.store.snapshot() as snapshot:
            matcher = Matcher(
                self.nodes,
                partial(self._find_sound, pending, snapshot, found),
                self.layout.state_kind,
                self.reuse_generated,
                self.needs_logits,
            )
            matcher.match(found)
            self._pin(found.deepest)
            matches = self._worth_restoring(matcher, found)
            matched = time.perf_counter()
            while True:
                loader = _Loader(self.nodes, self.layout, matches, snapshot, self.store.mapped, arena)
                if not matches or (bad := loader.run(self.readers)) is None:
                    break
                self._quarantine(*bad)
                found.drop(bad[0])
                matches = self._worth_restoring(matcher, found)
        loaded = time.perf_counter()
        num_tokens = matches[-1].node.end if matches else 0
        deepest = found.deepest
        return Restored(
            num_tokens=num_tokens,
            num_bytes=loader.num_bytes,
            logits=loader.logits,
            blocks=tuple(match.node for match in found.blocks),
            tip=matches[-1].node.name if matches else None,
            matched=deepest.end if deepest else 0,
            refused=self._why_refused(found, num_tokens),
            exact=not any(match.node.generated for match in matches),
            source=_source(matches),
            lookup_ms=(matched - started) * 1e3,
            restore_ms=(loaded - matched) * 1e3,
        )

    def _pin(self, node: Node | None) -> None:
        """Before anything is loaded: the request will continue what it restores."""
        if node is not None and node.name not in self.pinned:
            self.store.evictor.pin(node.name)
            self.pinned.append(node.name)

    def _worth_restoring(self, matcher: Matcher[_Match], found: Found[_Match]) -> list[_Match]:
        """The nodes to restore, the last of them pinned; none where computing is faster."""
        matches = matcher.restorable(found)
        self._is_slower = bool(matches) and not self.allows(matches[-1].node.end)
        if self._is_slower:
            return []
        self._pin(matches[-1].node if matches else None)
        return matches

    def _why_refused(self, found: Found[_Match], num_tokens: int) -> Refused | None:
        """Why what is stored could not all be restored; None if it could."""
        if found.damaged:
            return "damaged"
        if self._is_slower:
            return "faster_to_compute"
        deepest = found.deepest
        if deepest is None or deepest.end == num_tokens:
            return None
        if self.layout.is_one_pass:
            return "whole_prompt_only"
        at_end = deepest.end == len(self.nodes.token_ids)
        return "no_logits" if at_end and deepest.end - num_tokens <= self.nodes.block_size else "no_checkpoint"

    def _find_sound(
        self, pending: Mapping[bytes, NewNode], snapshot: Snapshot, found: Found[_Match], node: Node
    ) -> _Match | None:
        """The node if it is stored, or queued to be; one whose record is damaged is removed.

        A name is not a proof: the tokens, the parent and the place are compared too.
        """
        token_ids = self.nodes.token_bytes(node)
        queued = pending.get(node.name)
        if queued is not None and _is_queued(queued, node, token_ids):
            return _Match(node, queued)
        try:
            stored = snapshot.has(node.name, node.parent, node.position, node.kind, token_ids, generated=node.generated)
        except StoreCorrupt as error:
            found.damaged = True
            self._quarantine(node, error)
            return None
        return _Match(node) if stored else None

    def _quarantine(self, node: Node, error: StoreCorrupt) -> None:
        what = "checkpoint" if node.kind == Kind.CHECKPOINT else "block"
        log.warning("[disk-cache] %s %s is damaged and will be removed: %s", what, node.name.hex(), error)
        self.writer.quarantine(node.name, node.parent)


@dataclass
class _Loader:
    """Verifies, decodes and copies pieces on the reading threads, which take them one after the other."""

    nodes: PromptNodes
    layout: Layout
    matches: list[_Match]
    snapshot: Snapshot
    mapped: set[bytes]
    arena: KVArena
    logits: torch.Tensor | None = None
    num_bytes: int = 0

    def __post_init__(self) -> None:
        end = self.matches[-1].node.end if self.matches else 0
        self._first_needed = [group.first_needed(end) for group in self.layout.groups]
        self._loads = self._in_order()
        self._taking = threading.Lock()
        self._bad: dict[int, StoreCorrupt] = {}

    def run(self, readers: Executor) -> tuple[Node, StoreCorrupt] | None:
        """Load everything. Answers the first node that cannot be used and what is wrong with it, None if all can."""
        threads = [readers.submit(self._take) for _ in range(READER_THREADS)]
        # The views belong to the snapshot: no thread may still read them when it is closed.
        wait(threads)
        for thread in threads:
            thread.result()
        if not self._bad:
            return None
        match, error = min(self._bad.items(), key=itemgetter(0))
        return self.matches[match].node, error

    def _in_order(self) -> Iterator[_Load]:
        """All pieces of the matches. One thread at a time: a snapshot serves no two at once."""
        for match, (node, queued) in enumerate(self.matches):
            cuts = self.nodes.cuts(node)
            needed = [number for number, cut in enumerate(cuts) if self._is_needed(node, cut)]
            if queued is not None:
                starts = list(accumulate((cut.piece.num_bytes for cut in cuts), initial=0))
                for number in needed:
                    raw = queued.payload[starts[number] : starts[number + 1]]
                    yield _Load(match, number, cuts[number], raw, is_queued=True, is_cold=False)
                continue
            is_cold = bool(needed) and not self._is_mapped(node, needed)
            for number in needed:
                stored = self.snapshot.piece(node.name, number)
                yield _Load(match, number, cuts[number], stored, is_queued=False, is_cold=is_cold)

    def _is_needed(self, node: Node, cut: Cut) -> bool:
        """Whether the run will look at it: of a layer with a window, only the blocks under the window."""
        if cut.group < len(self._first_needed):
            return node.end > self._first_needed[cut.group]
        return True

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
                self.num_bytes += load.cut.piece.num_bytes
            try:
                self._load(load)
            except StoreCorrupt as error:
                self._bad.setdefault(load.match, error)

    def _load(self, load: _Load) -> None:
        node, cut, stored = self.matches[load.match].node, load.cut, load.stored
        if stored is None:
            raise StoreCorrupt("a piece of its payload is missing")

        def write(out: Bytes) -> None:
            if load.is_queued:
                out[...] = np.frombuffer(stored, dtype=np.uint8).reshape(out.shape)
            else:
                if load.is_cold:
                    populate(stored)
                decode_piece(stored, cut.piece, piece_seed(node.name, load.number), out)

        if cut.group == self.nodes.layout.logits_group:
            logits = np.empty((1, cut.piece.row_bytes), dtype=np.uint8)
            write(logits)
            self.logits = self.arena.logits_from(logits)
        else:
            rows = slice(cut.first_row, cut.first_row + cut.piece.num_rows)
            self.arena.fill(node.position, node.num_tokens, cut.group, rows, write)


def _is_queued(queued: NewNode, node: Node, token_ids: bytes) -> bool:
    there = queued.parent, queued.position, queued.kind, queued.generated
    return there == (node.parent, node.position, node.kind, node.generated) and queued.token_ids.tobytes() == token_ids


def _source(matches: list[_Match]) -> Source:
    if not matches:
        return "none"
    return "disk" if any(match.queued is None for match in matches) else "memory"
