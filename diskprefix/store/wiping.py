"""Overwriting what deleted records have left in `data.mdb`, while other processes read and write the store.

LMDB overwrites nothing. Bytes of deleted records stay in four places, all of which are filled with zeros:
* free pages. No open reader needs those that LMDB itself could use again, nor does LMDB after a crash. Younger ones
  have to wait. No process reads the pages that a killed process wrote behind the last one;
* the gap in the middle of a page, which LMDB never reads. It may hold anything, because LMDB uses its buffers for pages
  again without clearing them;
* the end of an overflow run, behind its data;
* the keys in branch pages. Such a key only separates two children, and outlives its record. It is cleared behind the
  first byte that differs from the last key before it: no key is smaller than the old key and not smaller than the new
  one. While bytes are written one by one, each mixture of both separates as well.

No other byte of a page in use is changed. So a reader sees the same records as before, whatever it has read already,
and a kill leaves a file in order. The whole file is checked before the first byte is written.
"""

from __future__ import annotations

import os
from itertools import groupby

import numpy as np
import numpy.typing as npt

from diskprefix.errors import StoreUnavailable
from diskprefix.store.environment import Environment
from diskprefix.store.filecheck import RUN_HEADER_BYTES, FileCheck, Page
from diskprefix.store.folder import DATA, file_errors

_AT_ONCE_BYTES = 1 << 20


def wipe(env: Environment, *, again: bool = False) -> bool:
    """Overwrites what was deleted before the last commit but one. Returns False if a reader that is still open may need
    some of it. Raises `CacheError`; a file in which anything is damaged is left as it is.

    `again` is for what could not be made durable: the kernel shows the zeros, but may never write them. So what is zero
    is written too.
    """
    # Nobody else writes to the file while this transaction is open, and it changes nothing itself.
    with env.transaction(write=True), file_errors(env.path):
        last, oldest = env.last_transactions()
        fd = os.open(env.path / DATA, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            leftovers = _Leftovers(fd, 0 if again else env.clean_before, oldest, again)
            # The lock of a file that was replaced says nothing about the one in its place.
            if not env.is_file(fd) or leftovers.txnid != last:
                raise StoreUnavailable(f"{env.path} was removed or replaced")
            for start, num_bytes in leftovers.found():
                os.pwrite(fd, bytes(num_bytes), start)
            os.fsync(fd)
        finally:
            os.close(fd)
        env.clean_before = oldest
    return oldest == last


class _Leftovers(FileCheck):
    """Finds what to overwrite. Of the free pages, those that transactions from `since` to `oldest` freed, the latter
    not included. `since` is 0 the first time, and then also what a killed process wrote behind the last page counts.
    `zeros`: what is zero counts too."""

    def __init__(self, fd: int, since: int, oldest: int, zeros: bool) -> None:
        self._size = os.fstat(fd).st_size
        super().__init__(fd, self._size)
        self._since, self._oldest, self._zeros = since, oldest, zeros
        self._found: list[tuple[int, int]] = []

    def found(self) -> list[tuple[int, int]]:
        """Returns the places, with the number of bytes. Raises `StoreCorrupt`."""
        self.run()
        if not self._since:
            self._note_range(self.end, self._size)
        return self._found

    def see_page(self, page: Page) -> None:
        lower, upper = page.gap
        self._note(page.number * self.page_bytes + lower, page.content[lower:upper])

    def see_separator(self, page: Page, index: int, before: bytes | None) -> None:
        key = page.keys[index]
        start = page.data_at[index] - len(key)
        # LMDB ignores the first one.
        kept = 0 if before is None else _num_common(key, before) + 1
        self._note(page.number * self.page_bytes + start + kept, key[kept:])

    def see_run(self, number: int, num_pages: int, data_bytes: int) -> None:
        start = number * self.page_bytes + RUN_HEADER_BYTES + data_bytes
        self._note_range(start, (number + num_pages) * self.page_bytes)

    def see_free(self, txnid: int, pages: npt.NDArray[np.uint64]) -> None:
        if not self._since <= txnid < self._oldest:
            return
        numbers = np.sort(pages.astype(np.int64))
        for _, run in groupby(enumerate(numbers.tolist()), key=lambda numbered: numbered[1] - numbered[0]):
            found = [number for _, number in run]
            self._note_range(found[0] * self.page_bytes, (found[-1] + 1) * self.page_bytes)

    def _note_range(self, start: int, end: int) -> None:
        for at in range(start, end, _AT_ONCE_BYTES):
            self._note(at, self.read(at, min(_AT_ONCE_BYTES, end - at)))

    def _note(self, start: int, content: bytes) -> None:
        """`content` is what the file has there."""
        if content and (self._zeros or content.count(0) != len(content)):
            self._found.append((start, len(content)))


def _num_common(a: bytes, b: bytes) -> int:
    """Returns how many leading bytes are the same."""
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
