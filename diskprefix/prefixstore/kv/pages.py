"""Pages: the memory of blocks. A page holds one block of one group of tensors, with the same bytes as the block's
payload.

Sequences with equal prefixes, blocks that are kept by name (`kv.kept_blocks`) and payloads that wait to be written
share pages. Each of them counts as a user. A page with several users is not written to.
"""

from __future__ import annotations

import math
import mmap
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from msgspec import Struct

from diskprefix.errors import ContextTooLong, NotReady
from diskprefix.prefixstore.kv.layout import Layout
from diskprefix.prefixstore.kv.numbers import Array, array_dtype
from diskprefix.prefixstore.kv.sizes import num_pages
from diskprefix.prefixstore.kv.transfer import give_back, populate
from diskprefix.prefixstore.store.codec.codec import Piece
from diskprefix.prefixstore.store.codec.planes import Bytes
from diskprefix.thread_pool import start_helper
from diskprefix.units import format_size

_READ_EVERY_S = 1.0
"""The seconds for which the free memory is not read again. A read takes about seventy system calls, and after each of
them the engine's thread may wait for Python's lock."""
_SLAB_BYTES = 64 << 20
"""Main memory is taken for many pages at once, because the kernel gives huge pages to large areas only."""


class Page(Struct, eq=False):
    """The memory of one block of per-token tensors, [tensors, heads, block_size, items], or of the states of one
    position, [tensors, *shape]. Groups are numbered as in payloads (`store.pieces`)."""

    group: int
    tensor: Array
    address: int
    """The address of the page's memory, for operators and the kernel."""
    num_rows: int
    """The number of rows, which are the rows of payloads: a row is one head of one tensor, or a part of a state."""
    rows: Bytes
    """The content of the page as bytes, shape [num_rows, bytes]."""
    users: int = 0
    num_holds: int = 0
    """The number of users that are holds (`Captured`)."""
    is_secret: bool = False
    """The content was purged and must be wiped once the last user has ended."""
    kept_in: object = None
    """The block that keeps the page by name (`kv.kept_blocks`)."""

    @property
    def num_bytes(self) -> int:
        return self.tensor.nbytes

    def payload(self, rows: slice = slice(None), row_bytes: int | None = None) -> memoryview:
        """Returns the first `row_bytes` bytes of each of these rows: a view of the memory, or a copy if there are gaps
        between the rows."""
        return np.ascontiguousarray(self.rows[rows, :row_bytes]).reshape(-1).data


class PagePool:
    """The pages of one model, within `limit_bytes` and the free memory (in bytes) that `free_bytes` returns; while
    there is room, what it returned a second ago at most. For any thread.

    `reclaim` is called with a number of pages when no page is free: it frees about that many, or returns False.
    `idle_bytes` returns the bytes that it could free.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        block_size: int,
        limit_bytes: int = sys.maxsize,
        free_bytes: Callable[[], int] = lambda: sys.maxsize,
    ) -> None:
        self.layout, self.block_size, self.limit_bytes = layout, block_size, limit_bytes
        self.lock = threading.RLock()
        """Guards the pages, their users, and the blocks that are kept by name."""
        self.reclaim: Callable[[int], bool] = lambda _num_pages: False
        self.idle_bytes: Callable[[], int] = lambda: 0
        self.on_free: Callable[[], None] = lambda: None
        """Called on any thread when a hold was released."""
        self.holds: set[Captured] = set()
        """The users of pages other than sequences and kept blocks."""
        self.changed: set[Any] = set()
        """The kept blocks whose pages got or lost a user. `KeptBlocks.sums` counts them again."""
        self._free_bytes = free_bytes
        self._read_at, self._affordable_bytes = -math.inf, 0
        """When the free memory was read, and what all pages could take then."""
        self._forms = [
            *(((len(of.specs), of.heads, block_size, of.items), array_dtype(of.dtype)) for of in layout.groups),
            *(((len(of.specs), 1, *of.shape), array_dtype(of.dtype)) for of in layout.states),
        ]
        self._num_rows = [
            *(len(group.specs) * group.heads for group in layout.groups),
            *(len(group.specs) * group.rows_each for group in layout.states),
        ]
        self.page_bytes = [math.prod(shape) * dtype.itemsize for shape, dtype in self._forms]
        """The size of a page, by group."""
        self._free: list[list[Page]] = [[] for _ in self._forms]
        """Pages without users that were used before. They are faster to fill than blank pages."""
        self._blank: list[list[Page]] = [[] for _ in self._forms]
        """Pages whose memory was given back to the kernel."""
        self._unused: list[Iterator[Page]] = [iter(()) for _ in self._forms]
        """The pages of the last slab that were never taken. Each `Page` is made when it is taken."""
        self.taken_bytes = 0
        """The bytes of all pages except the blank and the unused ones."""
        self._is_refused = False
        """There was room for the pages that were asked for last, but the kernel refused the memory."""

    @property
    def used_bytes(self) -> int:
        """The bytes of pages with users."""
        return self.taken_bytes - sum(len(of) * size for of, size in zip(self._free, self.page_bytes, strict=True))

    @property
    def room_bytes(self) -> int:
        """The bytes that more pages with users may take."""
        return max(0, self._most_bytes(max_age_s=0.0) - self.used_bytes)

    def _most_bytes(self, *, max_age_s: float) -> int:
        """Returns how many bytes all pages may take, by the free memory of `max_age_s` ago at most."""
        with self.lock:
            # Memory that was taken but not written to yet still counts as free in `free_bytes`.
            if (now := time.monotonic()) - self._read_at >= max_age_s:
                self._read_at, self._affordable_bytes = now, self.taken_bytes + self._free_bytes()
            return min(self.limit_bytes, self._affordable_bytes)

    def sequence_bytes(self, num_tokens: int) -> int:
        """Returns the maximum size in bytes of a sequence of `num_tokens`."""
        sizes = zip(self.layout.groups, self.page_bytes, strict=False)
        return self.layout.state_bytes + sum(
            num_pages(num_tokens, self.block_size, group.window) * size for group, size in sizes
        )

    def lacking(self, num_tokens: int) -> ContextTooLong | NotReady:
        """Returns the error of a sequence of `num_tokens` for which `take_pages` has just returned None: `NotReady` if
        the kernel refused memory, which it may have again for the next request."""
        needed, room = format_size(self.sequence_bytes(num_tokens)), format_size(self.room_bytes)
        if self._is_refused:
            return NotReady(f"the system refuses memory for {num_tokens} tokens, which need {needed}; try again")
        return ContextTooLong(
            f"{num_tokens} tokens need {needed} of KV memory, {room} are available; use a shorter prompt or a machine "
            "with more memory"
        )

    def take_pages(self, groups: Sequence[int]) -> list[Page] | None:
        """Returns one page for each of these groups, with one user and undefined content; None if there are too few
        pages."""
        taken: list[Page] = []
        if not groups:
            return taken
        with self.lock:
            needed = self.used_bytes + sum(self.page_bytes[group] for group in groups)
            limit_bytes = self._most_bytes(max_age_s=_READ_EVERY_S)
            if needed > limit_bytes:
                limit_bytes = self._most_bytes(max_age_s=0.0)
            excess, self._is_refused = needed - limit_bytes, False
            if excess > 0 and excess > self.idle_bytes():
                # Reclaiming pages would not be enough, so none are reclaimed.
                return None
            for group in groups:
                page = self._take_page(group, limit_bytes, len(groups) - len(taken))
                if page is None:
                    self._is_refused = True
                    self.release_pages(taken)
                    return None
                page.users = 1
                taken.append(page)
        return taken

    def hold(self, pages: Iterable[Page | None]) -> None:
        """Adds a user to each page."""
        with self.lock:
            for page in filter(None, pages):
                page.users += 1
                if page.kept_in is not None:
                    self.changed.add(page.kept_in)

    def release_pages(self, pages: Iterable[Page | None]) -> None:
        """Removes a user from each page. A page without users becomes free."""
        with self.lock:
            for page in filter(None, pages):
                page.users -= 1
                if page.kept_in is not None:
                    self.changed.add(page.kept_in)
                assert page.users >= 0, "a page has fewer users than are released"
                if not page.users:
                    self._free[page.group].append(page)
                    if page.is_secret:
                        self._give_back(self._free[page.group])

    def wipe(self) -> None:
        """Wipes all free pages, because their content may have been purged, and gives their memory back to the
        kernel."""
        with self.lock:
            for pages in self._free:
                # Bound: each round gives a page back.
                while pages:
                    pages[-1].is_secret = True
                    self._give_back(pages)

    def make_ahead(self, num_tokens: int, is_wanted: Callable[[], bool]) -> None:
        """Has the kernel populate the memory of a sequence of `num_tokens`, on a new thread and while `is_wanted`
        returns True: fresh memory would slow down the first restore."""
        counts = (num_pages(num_tokens, self.block_size, group.window) for group in self.layout.groups)
        taken = self.take_pages([number for number, count in enumerate(counts) for _ in range(count)])
        if taken:
            self.release_pages(taken)
            # The last page is taken first.
            made = [(page.address, page.num_bytes) for page in reversed(taken)], is_wanted
            start_helper(partial(populate, *made), "kv-memory")

    def check(self, users: Iterable[Page | None]) -> list[str]:
        """Checks the numbers of users, the free pages and the sums. Returns the errors. `users` are the pages of all
        sequences and kept blocks."""
        with self.lock:
            counts = Counter(filter(None, users))
            counts.update(page for hold in self.holds for page in hold.pages)
            free = [page for pages in (*self._free, *self._blank) for page in pages]
            errors = [f"a page has {page.users} users, not {n}" for page, n in counts.items() if page.users != n]
            errors += ["a free page is used" for page in free if page in counts or page.users]
            errors += ["a page is free twice"] * (len(free) != len(set(free)))
            used_bytes = sum(page.num_bytes for page in counts)
            if used_bytes != self.used_bytes:
                errors.append(f"{self.used_bytes} bytes are used, of which {used_bytes} have known users")
            return errors

    def _take_page(self, group: int, limit_bytes: int, num_missing: int) -> Page | None:
        # Bound: each round gives a free page back, or frees kept pages.
        while not self._free[group]:
            size = self.page_bytes[group]
            if self.taken_bytes + size <= limit_bytes and (page := self._make_blank(group)) is not None:
                self.taken_bytes += size
                return page
            others = next((of for of in self._free if of), None)
            if others is not None:
                self._give_back(others)
            elif not self.reclaim(num_missing):
                return None
        return self._free[group].pop()

    def _make_blank(self, group: int) -> Page | None:
        """Returns a page that occupies no memory yet; None if the kernel refuses memory for a slab."""
        if self._blank[group]:
            return self._blank[group].pop()
        page = next(self._unused[group], None)
        if page is None:
            (shape, dtype), size = self._forms[group], self.page_bytes[group]
            count = max(1, _SLAB_BYTES // max(size, _SLAB_BYTES >> 10))
            try:
                slab = zeros((count, *shape), dtype)
            except MemoryError:
                return None
            num_rows, address = self._num_rows[group], slab.ctypes.data
            rows = slab.reshape(count, num_rows, -1).view(np.uint8)
            self._unused[group] = (
                Page(group, slab[index], address + index * size, num_rows, rows[index]) for index in range(count)
            )
            page = next(self._unused[group])
        return page

    def _give_back(self, free: list[Page]) -> None:
        """Takes the last page from a list of free pages and gives its memory back to the kernel. The content is
        lost."""
        page = free.pop()
        self.taken_bytes -= page.num_bytes
        page.is_secret = False
        give_back(page.address, page.num_bytes)
        self._blank[page.group].append(page)


class Captured(Sequence[memoryview]):
    """The payload of a node in its `pages`, by group. It is a user of these pages until `release`, so they do not
    change. The pieces are the rows of the pages, cut to the node's tokens, followed by `logits`. A piece is read when
    it is indexed. For any thread."""

    def __init__(self, pool: PagePool, pages: Mapping[int, Page], pieces: Sequence[Piece], logits: memoryview) -> None:
        self.pages = list(pages.values())
        self._pool, self._by_group, self._pieces, self._logits = pool, pages, pieces, logits
        with pool.lock:
            pool.hold(self.pages)
            pool.holds.add(self)
            for page in self.pages:
                page.num_holds += 1

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: Any) -> Any:
        piece = self._pieces[index]
        page = self._by_group.get(piece.group)
        return self._logits if page is None else page.payload(piece.rows, piece.row_bytes)

    def frees(self) -> bool:
        """Returns whether a release can free a page: a page has no users except holds and the block that keeps it by
        name."""
        return any(page.users <= page.num_holds + (page.kept_in is not None) for page in self.pages)

    def release(self) -> None:
        """Ends the use of the pages. A second call does nothing."""
        with self._pool.lock:
            is_held = self in self._pool.holds
            if is_held:
                self._pool.holds.remove(self)
                for page in self.pages:
                    page.num_holds -= 1
                self._pool.release_pages(self.pages)
        if is_held:
            self._pool.on_free()


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Returns an array of zeros that begins at a page of the kernel. Raises `MemoryError`."""
    # numpy asks the kernel for huge pages: without them, a restore loses a quarter of its speed. The kernel fills pages
    # with zeros when they are first written.
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + mmap.PAGESIZE, dtype=np.uint8)
    first = -memory.ctypes.data % mmap.PAGESIZE
    return memory[first : first + num_bytes].view(dtype).reshape(shape)
