"""Reading the nodes of a prefix into memory, piece by piece, on several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import numpy as np

from diskprefix.cache.tiers.nodes import Node, PromptNodes
from diskprefix.cache.tiers.tier import BlockSink, View, Write
from diskprefix.errors import StoreCorrupt
from diskprefix.store.codec.codec import Piece
from diskprefix.store.codec.planes import Bytes
from diskprefix.store.pieces import Cut

READER_THREADS = 2


@dataclass
class Loader:
    """Verifies, decodes and copies pieces on the reading threads, which take them one after the other.

    `path` has the nodes of the prefix that ends at `end`, each with the view that has it, except those that end among
    the first `have` tokens, which the sink has already. The last node may reach further; it is verified as a whole.
    `first_needed` gives, for each group of per-token tensors and for the logits, the first token that is needed: layers
    with a window need no earlier ones. `num_bytes` is the size of what was loaded, before encoding. `on_logits` is
    called with the next-token logits as soon as they are loaded, on a reading thread.
    """

    nodes: PromptNodes
    path: Sequence[tuple[Node, View]]
    have: int
    end: int
    first_needed: Mapping[int, int]
    sink: BlockSink
    on_logits: Callable[[Bytes], None] = lambda _: None
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
        threads = [readers.submit(self._take) for _ in range(READER_THREADS)]
        # What is read belongs to the views: no thread may still read it when they are closed.
        wait(threads)
        for thread in threads:
            thread.result()
        if not self._bad:
            return None
        index, error = min(self._bad.items(), key=itemgetter(0))
        return *self.path[index], error

    def _in_order(self) -> Iterator[tuple[int, Cut, Write]]:
        """For each piece, the index of its node, what it holds, and what writes it into memory. One thread at a time: a
        view serves no two at once. Logits come first: a reply can begin while the rest is loaded."""
        yield from self._pieces(len(self.path) - 1, are_logits=True)
        for index in range(len(self.path)):
            yield from self._pieces(index, are_logits=False)

    def _pieces(self, index: int, *, are_logits: bool) -> Iterator[tuple[int, Cut, Write]]:
        node, view = self.path[index]
        cuts, logits_group = self.nodes.cuts(node), self.nodes.layout.logits_group
        # Of layers with a window, the run looks at the blocks under the window only.
        end = min(node.end, self.end)
        needed = [
            number
            for number, cut in enumerate(cuts)
            if (cut.group == logits_group) == are_logits and end > self.first_needed.get(cut.group, -1)
        ]
        for number, write in zip(needed, view.pieces(node, cuts, needed), strict=True):
            yield index, cuts[number], write

    def _take(self) -> None:
        while not self._bad:
            with self._taking:
                load = next(self._loads, None)
                if load is None:
                    return
                index, cut, write = load
                self.num_bytes += cut.piece.num_bytes
            try:
                self._load(self.path[index][0], cut, write)
            except StoreCorrupt as error:
                self._bad.setdefault(index, error)

    def _load(self, node: Node, cut: Cut, write: Write) -> None:
        if cut.group == self.nodes.layout.logits_group:
            logits = np.empty((1, cut.piece.row_bytes), dtype=np.uint8)
            write(logits)
            self.logits = logits
            self.on_logits(logits)
        else:
            rows = slice(cut.first_row, cut.first_row + cut.piece.num_rows)
            start, end = max(node.position, self.have), min(node.end, self.end)
            if end - start < node.num_tokens and cut.group < len(self.nodes.layout.groups):
                first_byte = (start - node.position) * (cut.piece.row_bytes // node.num_tokens)
                write = partial(_write_part, write, cut.piece, first_byte)
            self.sink.fill(start, end - start, cut.group, rows, write)


def _write_part(write: Write, piece: Piece, first_byte: int, out: Bytes) -> None:
    """Writes a part of each row of a piece, from `first_byte` on: a row holds its tokens one after the other."""
    whole = np.empty((piece.num_rows, piece.row_bytes), dtype=np.uint8)
    write(whole)
    out[...] = whole[:, first_byte : first_byte + out.shape[1]]
