"""Keys and values of a layer in pages that are scattered in memory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from diskprefix.native.calls import PagedRowsCall, RunCall

NO_SPANS = array("q")
_OFFSET = 32
"""The numbers in a page before those of the layer."""


class Pages:
    """Copies of keys and values, each [kv_heads, tokens, dim]. The rest of the pages is no number. Pages with tokens
    before `first` only are not there. Values that begin where keys do are a part of them, as latents are. Bytes are
    numbers of 8 bits with their scales."""

    def __init__(self, memory: Sequence[torch.Tensor], page_tokens: int, first: int = 0) -> None:
        keys, values = memory
        self._page_tokens, self._num_tokens = page_tokens, keys.shape[1]
        self._order = torch.randperm(-(-keys.shape[1] // page_tokens), generator=torch.Generator().manual_seed(1))
        parts = [keys] if values.data_ptr() == keys.data_ptr() else [keys, values]
        ends = [_OFFSET, *(part.shape[0] * page_tokens * part.shape[2] for part in parts)]
        self._in_q8 = keys.dtype == torch.uint8
        nothing = 255 if self._in_q8 else float("nan")
        pages = torch.full((len(self._order), sum(ends)), nothing, dtype=keys.dtype)
        self._parts = [
            place.view(len(pages), part.shape[0], page_tokens, part.shape[2])
            for place, part in zip(torch.split(pages, ends, dim=1)[1:], parts, strict=True)
        ]
        for place, part in zip(self._parts, parts, strict=True):
            for token in range(self._num_tokens):
                place[self._order[token // page_tokens], :, token % page_tokens] = part[:, token]
        self._table = array("Q", [pages[number].data_ptr() for number in self._order])
        for number in range(first // page_tokens):
            self._table[number] = 0

    def run(self, start: int, num_rows: int, spans: array[int] = NO_SPANS) -> RunCall:
        """The run of a sequence. Keep the pages and the spans until an operator has returned."""
        table, _ = self._table.buffer_info()
        size = 34 if self._in_q8 else 1
        rows = [
            PagedRowsCall(
                *(table, int(part.storage_offset()) * part.itemsize, part.stride(1) // size, part.stride(2) // size),
                self._in_q8,
            )
            for part in self._parts
        ]
        address, count = spans.buffer_info()
        return RunCall(start, num_rows, self._page_tokens, rows[0], rows[-1], address, count // 2)
