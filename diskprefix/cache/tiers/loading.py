"""Reading the nodes of a prefix into memory, piece by piece, on several threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TypeAlias

import numpy as np

from diskprefix.cache.tiers.nodes import Node, PromptNodes
from diskprefix.cache.tiers.tier import BlockSink, View, Write
from diskprefix.errors import StoreCorrupt
from diskprefix.store.codec.planes import Bytes
from diskprefix.store.pieces import Cut

READER_THREADS = 2
"""Beside a model that computes on the same cores."""
_MOST_READERS = 8
_LOGITS = -2
"""The stage of logits, before that of states."""

Pieces: TypeAlias = list[tuple[Cut, Write]]
"""Consecutive pieces of one node and group, and what writes each."""


def reader_threads(*, is_direct: bool) -> int:
    """Returns the number of reading threads. `is_direct`: the state is in main memory. Otherwise another device
    computes, and leaves the cores to them."""
    return READER_THREADS if is_direct else min(_MOST_READERS, max(READER_THREADS, (os.cpu_count() or 1) // 2))


@dataclass(frozen=True)
class LoadOrder:
    """The order of loading for a device: layer by layer, `layers_each` layers of all nodes at a time, so that the first
    layers can compute while the last are on their way. `layer_of(group, row)` returns the layer of a row. Pieces of up
    to `run_bytes` go to the sink at once."""

    layer_of: Callable[[int, int], int]
    layers_each: int
    run_bytes: int

    def stage_of(self, cut: Cut) -> int:
        return self.layer_of(cut.group, cut.first_row) // self.layers_each


@dataclass
class Loader:
    """Verifies, decodes and copies pieces on the reading threads, which take them one after the other.

    `path` has the nodes of the prefix that ends at `end`, each with the view that has it, except those that end among
    the first `have` tokens, which the sink has already. The last node may reach further; it is verified as a whole.
    `first_needed` gives, for each group of per-token tensors and for the logits, the first token that is needed: layers
    with a window need no earlier ones. `num_bytes` is the size of what was loaded, before encoding. `on_logits` is
    called with the next-token logits as soon as they are loaded, on a reading thread. Without an `order`, nodes are
    loaded one after the other, as they lie in the store.
    """

    nodes: PromptNodes
    path: Sequence[tuple[Node, View]]
    have: int
    end: int
    first_needed: Mapping[int, int]
    sink: BlockSink
    on_logits: Callable[[Bytes], None] = lambda _: None
    order: LoadOrder | None = None
    num_threads: int = READER_THREADS
    logits: Bytes | None = None
    """The next-token logits as bytes, shape [1, bytes], if they were loaded."""
    num_bytes: int = 0

    def __post_init__(self) -> None:
        self._loads = self._in_order()
        self._taking = threading.Lock()
        self._bad: dict[int, StoreCorrupt] = {}

    def run(self, readers: Executor) -> tuple[Node, View, StoreCorrupt] | None:
        """Loads everything. Returns the first node that cannot be used, its view, and its fault; None if all can be
        used."""
        threads = [readers.submit(self._take) for _ in range(self.num_threads)]
        # What is read belongs to the views: no thread may still read it when they are closed.
        wait(threads)
        for thread in threads:
            thread.result()
        if not self._bad:
            return None
        index, error = min(self._bad.items(), key=itemgetter(0))
        return *self.path[index], error

    def _in_order(self) -> Iterator[tuple[int, Pieces]]:
        """The index of a node, and a run of its pieces, for all that is to be loaded. One thread at a time: a view
        serves no two at once."""
        for (_, index), pieces in groupby(sorted(self._needed()), key=itemgetter(0, 1)):
            node, view = self.path[index]
            cuts, numbers, run = self.nodes.cuts(node), [number for *_, number in pieces], Pieces()
            for number, write in zip(numbers, view.pieces(node, cuts, numbers), strict=True):
                if run and not self._continues(run, cuts[number]):
                    yield index, run
                    run = []
                run.append((cuts[number], write))
            yield index, run

    def _needed(self) -> Iterator[tuple[int, int, int]]:
        """The stage of each piece, the index of its node, and its number there."""
        for index, (node, _) in enumerate(self.path):
            # Of layers with a window, the run looks at the blocks under the window only.
            end = min(node.end, self.end)
            for number, cut in enumerate(self.nodes.cuts(node)):
                is_logits = cut.group == self.nodes.layout.logits_group
                if end > self.first_needed.get(cut.group, -1) and (not is_logits or index == len(self.path) - 1):
                    # Logits come first: a reply can begin while the rest is loaded.
                    yield _LOGITS if is_logits else self.order.stage_of(cut) if self.order else 0, index, number

    def _continues(self, run: Pieces, cut: Cut) -> bool:
        """Returns whether a piece goes to the sink with those before it."""
        last, num_bytes = run[-1][0], cut.piece.num_bytes + sum(cut.piece.num_bytes for cut, _ in run)
        is_next = (cut.group, cut.first_row) == (last.group, last.first_row + last.piece.num_rows)
        return is_next and self.order is not None and num_bytes <= self.order.run_bytes

    def _take(self) -> None:
        while not self._bad:
            with self._taking:
                load = next(self._loads, None)
                if load is None:
                    return
                index, run = load
                self.num_bytes += sum(cut.piece.num_bytes for cut, _ in run)
            try:
                self._load(self.path[index][0], run)
            except StoreCorrupt as error:
                self._bad.setdefault(index, error)

    def _load(self, node: Node, run: Pieces) -> None:
        first, last = run[0][0], run[-1][0]
        if first.group == self.nodes.layout.logits_group:
            logits = np.empty((1, first.piece.row_bytes), dtype=np.uint8)
            _write(run, 0, logits)
            self.logits = logits
            self.on_logits(logits)
        else:
            rows = slice(first.first_row, last.first_row + last.piece.num_rows)
            start, end = max(node.position, self.have), min(node.end, self.end)
            first_byte = 0
            if end - start < node.num_tokens and first.group < len(self.nodes.layout.groups):
                first_byte = (start - node.position) * (first.piece.row_bytes // node.num_tokens)
            self.sink.fill(start, end - start, first.group, rows, partial(_write, run, first_byte))


def _write(run: Pieces, first_byte: int, out: Bytes) -> None:
    """Writes pieces one behind the other, or a part of each row, from `first_byte` on: a row holds its tokens one after
    the other."""
    start = run[0][0].first_row
    for cut, write in run:
        piece, rows = cut.piece, out[cut.first_row - start :][: cut.piece.num_rows]
        if out.shape[1] == piece.row_bytes:
            write(rows)
        else:
            whole = np.empty((piece.num_rows, piece.row_bytes), dtype=np.uint8)
            write(whole)
            rows[...] = whole[:, first_byte : first_byte + out.shape[1]]
