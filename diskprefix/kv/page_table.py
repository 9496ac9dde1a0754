"""The rows of one layer in the pages of a sequence."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from functools import cached_property

import torch

from diskprefix.kv.layout import Group
from diskprefix.kv.pages import Page


@dataclass(eq=False)
class PageTable:
    """The pages of one group of a sequence, in the order of its tokens; None for one that is not there. `first` is the
    first of those that are there up to the end."""

    group: Group
    block_size: int
    pages: list[Page | None] = field(default_factory=list)
    first: int = 0
    addresses: array[int] = field(default_factory=lambda: array("Q"))
    """Of each page, for operators; 0 for one that is not there."""

    def set(self, number: int, page: Page | None) -> None:
        """Puts a page in its place."""
        self.pages += [None] * (number + 1 - len(self.pages))
        self.addresses.extend([0] * (number + 1 - len(self.addresses)))
        self.pages[number] = page
        self.addresses[number] = 0 if page is None else page.tensor.data_ptr()

    def to_take(self, first: int, end: int) -> list[int]:
        """Returns which pages from `first` to `end` are not there, or are used by others too."""
        pages = self.pages
        return [n for n in range(first, end) if n >= len(pages) or (page := pages[n]) is None or page.users > 1]

    def clear(self) -> None:
        self.pages.clear()
        del self.addresses[:]
        self.first = 0

    @property
    def complete_from(self) -> int:
        """The first token from which on all are there."""
        return self.first * self.block_size


@dataclass(frozen=True, eq=False)
class LayerRows:
    """The rows of tensor number `index` of a table's group, [heads, tokens, dim]; of each the numbers from `start` to
    `end`."""

    table: PageTable
    index: int
    start: int
    end: int

    @property
    def heads(self) -> int:
        return self.table.group.heads

    @property
    def dim(self) -> int:
        return self.end - self.start

    @cached_property
    def dtype(self) -> torch.dtype:
        return self.table.group.dtype

    @cached_property
    def _in_page(self) -> tuple[int, int, int]:
        group, of_head = self.table.group, self.table.block_size * self.table.group.head_dim
        return (self.index * group.heads * of_head + self.start) * group.dtype.itemsize, of_head, group.head_dim

    def described(self) -> tuple[int, int, int, int]:
        """Returns `Rows` of `native/source/interface.h`: an address of addresses, bytes, two numbers of elements. It
        holds until the table changes."""
        return self.table.addresses.buffer_info()[0], *self._in_page

    def holds(self, first: int, end: int) -> bool:
        """Returns whether there is memory for the tokens from `first` to `end`."""
        return self.table.complete_from <= first and end <= len(self.table.pages) * self.table.block_size

    def part(self, number: int) -> torch.Tensor:
        """Returns the rows in a page, [heads, block_size, dim]."""
        page = self.table.pages[number]
        assert page is not None
        return page.tensor[self.index, :, :, self.start : self.end]

    def put(self, position: int, rows: torch.Tensor) -> None:
        """Writes [heads, n, dim] from a position on."""
        size, done = self.table.block_size, 0
        while done < rows.shape[1]:
            number, at = divmod(position + done, size)
            count = min(size - at, rows.shape[1] - done)
            self.part(number)[:, at : at + count] = rows[:, done : done + count]
            done += count

    def gathered(self, position: int, end: int) -> torch.Tensor:
        """Returns a copy of the rows from `position` to `end`, [1, heads, n, dim]."""
        size, parts = self.table.block_size, []
        while position < end:
            number, at = divmod(position, size)
            count = min(size - at, end - position)
            parts.append(self.part(number)[:, at : at + count])
            position += count
        return torch.cat(parts, dim=1)[None]
