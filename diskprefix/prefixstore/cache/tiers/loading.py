"""Reading the nodes of a prefix into memory, piece by piece, on several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter

import numpy as np

from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.cache.tiers.nodes import Node, PromptNodes
from diskprefix.prefixstore.cache.tiers.tier import Fill, View, Write
from diskprefix.prefixstore.store.codec.codec import Piece
from diskprefix.prefixstore.store.codec.planes import Bytes

READER_THREADS = 2
"""The threads of one load, which runs beside a model on the same cores."""
MAX_LOADS = 3
"""The maximum number of loads at a time: a short load need not wait for two long ones."""


@dataclass
class Loader:
    """Verifies, decodes and copies pieces on the reading threads, which take them one after the other.

    `path` has the nodes of the first `stop` tokens, each with the view that has the node, except nodes within the first
    `in_memory_tokens` tokens, which the target has already. The last node may reach further; all of it is verified.
    `first_needed` is the first token to load for each group of per-token tensors, and for the logits: layers with a
    window need no earlier ones. `num_bytes` is the size of the loaded pieces before encoding. On a reading thread,
    `on_logits` is called with the next-token logits as soon as they are loaded, and `on_block` with the number of each
    full block. The logits come first, then the nodes in the order of the store. `is_wanted` is called before each
    piece; if it returns False, no more is read.
    """

    nodes: PromptNodes
    path: Sequence[tuple[Node, View]]
    in_memory_tokens: int
    stop: int
    first_needed: Mapping[int, int]
    fill: Fill
    on_logits: Callable[[Bytes], None] = lambda _: None
    on_block: Callable[[int], None] = lambda _: None
    is_wanted: Callable[[], bool] = lambda: True
    became_unwanted: bool = False
    """Set if pieces are missing because `is_wanted` returned False."""
    logits: Bytes | None = None
    """The next-token logits as bytes, shape [1, bytes], if they were loaded."""
    num_bytes: int = 0

    def __post_init__(self) -> None:
        self._loads = self._in_order()
        self._taking = threading.Lock()
        self._bad: dict[int, StoreCorrupt] = {}
        self._left: dict[int, int] = {}
        """The number of pieces that are still to be loaded, by the index of the node."""

    def run(self, readers: Executor) -> tuple[Node, View, StoreCorrupt] | None:
        """Loads everything. Returns the first damaged node, its view, and the error; None if all nodes are sound. When
        this ends or raises, no thread reads or writes any more."""
        reading: list[Future[None]] = []
        try:
            for _ in range(READER_THREADS):
                reading.append(readers.submit(self._load_pieces))  # noqa: PERF401 (those that began are waited for)
        finally:
            # The caller closes the views, and others get the pages.
            wait(reading)
        for thread in reading:
            thread.result()
        if not self._bad:
            return None
        index, error = min(self._bad.items(), key=itemgetter(0))
        return *self.path[index], error

    def _in_order(self) -> Iterator[tuple[int, Piece, Write]]:
        """Yields all pieces to load, each with the index of its node and the function that writes the piece. For one
        thread at a time, like the views."""
        # A reply can begin with the logits while the rest is loaded.
        for of_logits in (True, False):
            for index, needed in groupby(self._needed(of_logits), key=itemgetter(0)):
                node, view = self.path[index]
                pieces, numbers = self.nodes.pieces(node), [number for _, number in needed]
                self._left[index] = len(numbers)
                for number, write in zip(numbers, view.piece_writes(node, pieces, numbers), strict=True):
                    yield index, pieces[number], write

    def _needed(self, of_logits: bool) -> Iterator[tuple[int, int]]:
        """Yields the index of a node and the number of a piece there: pieces of logits, or all others."""
        for index, (node, _) in enumerate(self.path):
            if of_logits and index < len(self.path) - 1:
                continue
            # Layers with a window need only the blocks under the window.
            stop = min(node.end, self.stop)
            for number, piece in enumerate(self.nodes.pieces(node)):
                is_logits = piece.group == self.nodes.layout.logits_group
                if stop > self.first_needed.get(piece.group, -1) and is_logits == of_logits:
                    yield index, number

    def _load_pieces(self) -> None:
        loaded: int | None = None
        # Bound: each round takes a piece of the path, which ends.
        while not self._bad:
            with self._taking:
                number = self._count_piece(loaded)
                self.became_unwanted = self.became_unwanted or not self.is_wanted()
                load = None if self.became_unwanted else next(self._loads, None)
                self.num_bytes += load[1].num_bytes if load else 0
            if number is not None:
                self.on_block(number)
            if load is None:
                return
            loaded, piece, write = load
            try:
                self._load(self.path[loaded][0], piece, write)
            except StoreCorrupt as error:
                self._bad.setdefault(loaded, error)

    def _count_piece(self, index: int | None) -> int | None:
        """Counts a loaded piece of a node. If it completes a full block, returns the number of the block."""
        if index is None:
            return None
        self._left[index] -= 1
        (node, _), size = self.path[index], self.nodes.block_size
        is_whole = node.num_tokens == size and node.end <= self.stop and node.position >= self.in_memory_tokens
        return node.position // size if is_whole and not self._left[index] else None

    def _load(self, node: Node, piece: Piece, write: Write) -> None:
        if piece.group == self.nodes.layout.logits_group:
            logits = np.empty((1, piece.row_bytes), dtype=np.uint8)
            write(logits)
            self.logits = logits
            self.on_logits(logits)
        else:
            start, stop = max(node.position, self.in_memory_tokens), min(node.end, self.stop)
            if stop - start < node.num_tokens and piece.group < len(self.nodes.layout.groups):
                first_byte = (start - node.position) * (piece.row_bytes // node.num_tokens)
                write = partial(_write_part, piece, write, first_byte)
            self.fill(start, stop - start, piece.group, piece.rows, write)


def _write_part(piece: Piece, write: Write, first_byte: int, out: Bytes) -> None:
    """Writes a part of each row of a piece, from `first_byte` on: the tokens in a row lie one after the other."""
    whole = np.empty((piece.num_rows, piece.row_bytes), dtype=np.uint8)
    write(whole)
    out[...] = whole[:, first_byte : first_byte + out.shape[1]]
