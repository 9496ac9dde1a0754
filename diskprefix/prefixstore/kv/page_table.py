"""The pages of one group of tensors of a sequence."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
from msgspec import Struct, field

from diskprefix.prefixstore.kv.layout import Group
from diskprefix.prefixstore.kv.numbers import Array
from diskprefix.prefixstore.kv.pages import Page


class PageTable(Struct, eq=False):
    """The pages of one group of a sequence, in the order of its tokens; None for a missing page. From the page `first`
    on, no page is missing."""

    group: Group
    block_size: int
    pages: list[Page | None] = field(default_factory=list)
    first: int = 0
    addresses: array[int] = field(default_factory=lambda: array("Q"))
    """The address of each page, for operators; 0 for a missing page."""

    def set(self, number: int, page: Page | None) -> None:
        """Sets page `number` of the sequence."""
        self.pages += [None] * (number + 1 - len(self.pages))
        self.addresses.extend([0] * (number + 1 - len(self.addresses)))
        self.pages[number] = page
        self.addresses[number] = 0 if page is None else page.address

    def unwritable(self, first: int, stop: int) -> list[int]:
        """Returns the numbers of the pages in [first, stop) that are missing or have other users too."""
        pages = self.pages
        return [n for n in range(first, stop) if n >= len(pages) or (page := pages[n]) is None or page.users > 1]

    def clear(self) -> None:
        self.pages.clear()
        del self.addresses[:]
        self.first = 0

    @property
    def complete_from(self) -> int:
        """The first position from which on no token is missing."""
        return self.first * self.block_size

    def write_rows(self, position: int, rows: Array) -> None:
        """Writes rows of all tensors, shape [tensors, heads, n, head_dim], to the tokens from `position` on."""
        for page, at, done, count in self.parts(position, position + rows.shape[2]):
            page.tensor[:, :, at : at + count] = rows[:, :, done : done + count]

    def gathered(self, position: int, stop: int) -> Array:
        """Returns a copy of the rows from `position` to `stop`, [tensors, heads, n, head_dim]."""
        parts = self.parts(position, stop)
        return np.concatenate([page.tensor[:, :, at : at + count] for page, at, _, count in parts], axis=2)

    def parts(self, position: int, stop: int) -> Iterator[tuple[Page, int, int, int]]:
        """Yields the pages of the tokens from `position` to `stop`. With each page: the index of its first of these
        tokens in the page, the number of tokens in the pages before, and the number of these tokens in this page."""
        done = 0
        while position + done < stop:
            number, at = divmod(position + done, self.block_size)
            count, page = min(self.block_size - at, stop - position - done), self.pages[number]
            assert page is not None
            yield page, at, done, count
            done += count
