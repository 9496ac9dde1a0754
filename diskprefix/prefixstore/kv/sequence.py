"""A sequence: a list of pages for each group of tensors, and its states. Runtimes read and write the pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from diskprefix.prefixstore.kv.numbers import Array, array_dtype, converted
from diskprefix.prefixstore.kv.page_table import PageTable
from diskprefix.prefixstore.kv.pages import Captured, Page, PagePool
from diskprefix.prefixstore.kv.sizes import MAX_TAKEN_BACK
from diskprefix.prefixstore.kv.step import Run
from diskprefix.prefixstore.store.codec.codec import Piece
from diskprefix.prefixstore.store.codec.planes import Bytes
from diskprefix.tokens import Logits, TokenIds, TokenPath


class Owner(NamedTuple):
    """The owner of state that prompts may share: the root and the secret of the tenant's names, and the tenant with the
    id of its last purge (see `Purges`), so that no later prompt finds purged state. A request that shares nothing has
    its own owner, with a key as `private`: its replies may begin with state of this owner or of the tenant."""

    root: bytes
    secret: int
    tenant: str = ""
    last_purge: bytes = b""
    private: bytes = b""

    @property
    def sources(self) -> tuple[Owner, ...]:
        """The owners whose state prompts of this owner may begin with."""
        return (self, self._replace(private=b"")) if self.private else (self,)

    def path(self, token_ids: TokenIds, block_size: int) -> TokenPath:
        return TokenPath(self.secret, self.root, token_ids, block_size)


class Prefix(Struct, frozen=True):
    """The state of the first `num_tokens` tokens of a sequence: pages by group, None for pages that a window has
    passed, and pages of states. A sequence that begins with a prefix shares its complete pages, and copies the last
    page and the states."""

    num_tokens: int = 0
    pages: Sequence[Sequence[Page | None]] = ()
    states: Sequence[Page] = ()


class KVSequence:
    """The state of one sequence. For the engine's thread; `fill` and `prepare_restore` are for the threads of a fetch.
    `close` gives the pages back.

    Groups are numbered as in payloads (`store.pieces`): first per-token tensors, then states.
    """

    def __init__(self, pool: PagePool) -> None:
        """Raises `ContextTooLong` or `NotReady` if there is no memory for its states (`PagePool.lacking`)."""
        self.pool, self.layout = pool, pool.layout
        self.tables = [PageTable(group, pool.block_size) for group in self.layout.groups]
        self.num_tokens = 0
        self.num_drafted = 0
        """The number of tokens for which the draft layer's state is computed."""
        self.undrafted: list[int] = []
        """The ids of the tokens after the first `num_drafted`. `complete` computes the draft layer's state for them."""
        self.mark: object = None
        """Set by a runtime that has a copy of the state. Any change except a step sets it to None."""
        self.complete: Callable[[Sequence[KVSequence]], None] | None = None
        """Set by a runtime that does not complete the pages with each step."""
        self._is_secret = False
        states = pool.take_pages([len(self.tables) + number for number in range(len(self.layout.states))])
        if states is None:
            raise pool.lacking(1)
        self.states = states
        """Pages of the states after the last token."""
        self._spares: list[Page] = []
        """As many pages as `states`, or none. From a step with guesses to `take_back`, they keep the states before the
        step."""
        self._guessed: Run | None = None
        """The last step, if its guesses may be taken back."""
        self._needs_spares = False

    @property
    def capacity(self) -> int:
        """The number of tokens for which layers without a window have memory."""
        sizes = (len(table.pages) * self.pool.block_size for table in self.tables if table.group.window is None)
        return min(sizes, default=1 << 62)

    @property
    def complete_from(self) -> int:
        """The first token whose state every group has."""
        return max((table.complete_from for table in self.tables), default=0)

    def pages(self) -> list[Page | None]:
        """Returns all pages that the sequence uses."""
        return [*(page for table in self.tables for page in table.pages), *self.states, *self._spares]

    def slides(self, num_tokens: int) -> bool:
        """Returns whether a window has passed tokens, or will pass some before the sequence has `num_tokens`."""
        return self.complete_from > 0 or any(table.group.first_needed(num_tokens) > 0 for table in self.tables)

    def begin_step(self, num_rows: int, spans: tuple[tuple[int, int], ...] = (), num_guesses: int = 0) -> Run:
        """Prepares the memory for a step of `num_rows` tokens, of which the last `num_guesses` may be taken back. With
        states, this needs spares. Raises `ContextTooLong` or `NotReady` if there is no memory."""
        keeps_states = num_guesses > 0 and bool(self.states) and self.take_spares()
        run = Run(self.num_tokens, num_rows, spans, [] if keeps_states else None)
        if not self.take_pages_to(run.end):
            raise self.pool.lacking(run.end)
        if keeps_states:
            self._swap_states()
        self._guessed, self._needs_spares = run if keeps_states else None, keeps_states
        return run

    def end_step(self, run: Run) -> None:
        """Counts the tokens of a step. Their state must be computed."""
        self.num_tokens = run.end

    def take_pages_to(self, stop: int) -> bool:
        """Takes pages for the tokens before `stop`. Gives pages back that a window has passed. Returns False, and takes
        no page, if there are too few."""
        start, size = self.num_tokens, self.pool.block_size
        for table in self.tables:
            # The last tokens may be taken back.
            self._drop_before(table, table.group.first_needed(max(0, start - MAX_TAKEN_BACK)) // size)
        ranges = [(n, max(start // size, table.first), -(-stop // size)) for n, table in enumerate(self.tables)]
        return self._take_ranges(ranges)

    def take_prompt_pages(self, num_tokens: int) -> bool:
        """Takes the pages for a prompt of `num_tokens`, in the groups without a window. Returns False, and takes none,
        if there are too few."""
        first, stop = (-(-count // self.pool.block_size) for count in (self.num_tokens, num_tokens))
        whole = [number for number, table in enumerate(self.tables) if table.group.window is None]
        return self._take_ranges([(number, first, stop) for number in whole])

    def reserve(self, num_tokens: int) -> None:
        """Calls `take_prompt_pages`. Raises `ContextTooLong` or `NotReady` if there are too few pages."""
        if not self.take_prompt_pages(num_tokens):
            raise self.pool.lacking(num_tokens)

    def begin_with(self, prefix: Prefix) -> bool:
        """Begins an empty sequence with the state of a prefix. Returns False if there is no page for a copy."""
        for table, pages in zip(self.tables, prefix.pages, strict=False):
            self.pool.hold(pages)
            for number, page in enumerate(pages):
                table.set(number, page)
            table.first = next((n for n, page in enumerate(pages) if page is not None), len(pages))
        for state, source in zip(self.states, prefix.states, strict=bool(prefix.num_tokens)):
            state.tensor[:] = source.tensor
        self.truncate(prefix.num_tokens)
        # The last page is copied, because it is written to.
        return self.take_pages_to(prefix.num_tokens + 1)

    def prefix(self) -> Prefix:
        """Returns the state of all tokens of the sequence."""
        stop = -(-self.num_tokens // self.pool.block_size)
        return Prefix(self.num_tokens, [table.pages[:stop] for table in self.tables], self.states)

    def continues_at(self, num_tokens: int) -> bool:
        """Returns whether the sequence still has every token that the next token after `num_tokens` attends to."""
        return all(table.complete_from <= table.group.first_needed(num_tokens) for table in self.tables)

    def truncate(self, num_tokens: int) -> None:
        """Sets the number of tokens. Their state must be in the pages, and `states` must be the states after the last
        of them."""
        self.mark = None
        if not num_tokens:
            with self.pool.lock:
                for table in (table for table in self.tables if table.first):
                    self.pool.release_pages(table.pages)
                    table.clear()
        if num_tokens > self.num_drafted + len(self.undrafted):
            # These tokens were restored.
            self.undrafted.clear()
        del self.undrafted[max(0, num_tokens - self.num_drafted) :]
        self.num_drafted = num_tokens - len(self.undrafted)
        self.num_tokens = num_tokens

    def complete_pages(self) -> None:
        """Completes the pages before others read the sequence."""
        if self.complete is not None:
            self.complete([self])

    def take_back(self, num_tokens: int) -> None:
        """Forgets the last tokens, which were guesses, so that `num_tokens` remain. With states, only guesses of the
        last step can be forgotten."""
        run, self._guessed = self._guessed, None
        if self.states and num_tokens < self.num_tokens:
            assert run is not None, "the last step has no spares"
            assert run.start <= num_tokens, "only guesses of the last step can be taken back"
            if num_tokens == run.start:
                self._swap_states()
            else:
                for replay in run.replays or ():
                    replay(num_tokens - run.start)
        # Not earlier, because other threads may drop idle spares.
        self._needs_spares = False
        self.truncate(num_tokens)

    def take_spares(self) -> bool:
        """Takes spares for a step with guesses, if there are states. Returns False if there is no memory for them."""
        with self.pool.lock:
            if not self._spares:
                self._spares = self.pool.take_pages([page.group for page in self.states]) or []
            self._needs_spares = bool(self._spares)
            return self._needs_spares or not self.states

    @property
    def idle_spares(self) -> list[Page]:
        """The pages that `drop_spares` gives back: none from `take_spares` to the end of the step with guesses."""
        return [] if self._needs_spares else self._spares

    @property
    def spares(self) -> Sequence[Page]:
        """The pages of the states before a step with guesses."""
        return self._spares

    def drop_spares(self) -> bool:
        """Gives idle spares back. Returns False if there are none. For any thread."""
        with self.pool.lock:
            idle = self.idle_spares
            for page in idle:
                page.is_secret |= self._is_secret
            self.pool.release_pages(idle)
            if idle:
                self._spares = []
            return bool(idle)

    def prepare_restore(self, group: int, start: int, stop: int) -> None:
        """Takes the pages of a group for a restore of those tokens from `start` to `stop` that the sequence lacks.
        Raises `MemoryError` if there are too few."""
        table, size = self.tables[group], self.pool.block_size
        if not self._take_ranges([(group, max(self.num_tokens, start) // size, -(-stop // size))]):
            raise MemoryError("there is no KV memory for a restore")
        if start > self.num_tokens:
            # The window passes all tokens of the sequence.
            self._drop_before(table, start // size)

    def fill(self, position: int, num_tokens: int, group: int, rows: slice, write: Callable[[Bytes], None]) -> None:
        """Calls `write` to fill rows of a group; see `cache.tiers.tier.Fill`. All tokens are in one page. `write`
        gets bytes of shape [rows, row_bytes], each row contiguous."""
        if group >= len(self.tables):
            page, part = self.states[group - len(self.tables)], slice(None)
        else:
            block, size = self.tables[group].pages[position // self.pool.block_size], self.pool.block_size
            assert block is not None
            page, at, width = block, position % size, block.num_bytes // block.num_rows // size
            part = slice(at * width, (at + num_tokens) * width)
        write(page.rows[rows, part])

    def block(self, number: int) -> list[Page | None]:
        """Returns the pages of a block, by group."""
        return [table.pages[number] if number < len(table.pages) else None for table in self.tables]

    def logits_from(self, payload: Bytes) -> Logits:
        """Returns the logits in a tail's payload, shape [vocab]. `payload` must not change afterwards."""
        return converted(payload.reshape(-1).view(array_dtype(self.layout.logits_dtype)), "float32")

    def capture(self, position: int, pieces: Sequence[Piece], logits: Logits | None = None) -> Captured | None:
        """Returns the payload of a node that begins at `position`: the pages of its tokens, copies of the states now,
        and `logits`, shape [vocab]. Returns None if there are no pages for the copies."""
        first = len(self.tables)
        groups = sorted({piece.group for piece in pieces if piece.group < first + len(self.states)})
        block = self.block(position // self.pool.block_size)
        pages = {group: page for group in groups if group < first and (page := block[group]) is not None}
        at_end = memoryview(b"") if logits is None else self.logits_bytes(logits)
        with self.pool.lock:
            copies = self.pool.take_pages([group for group in groups if group >= first])
            if copies is None:
                return None
            try:
                pages |= {copied.group: copied for copied in copies}
                assert len(pages) == len(groups), "tokens that left the window are not read"
                captured = Captured(self.pool, pages, pieces, at_end)
            finally:
                self.pool.release_pages(copies)
        try:
            for copied in copies:
                copied.tensor[:] = self.states[copied.group - first].tensor
                copied.is_secret |= self._is_secret
        except BaseException:
            captured.release()
            raise
        return captured

    def content(self, start: int = 0, stop: int | None = None) -> bytes:
        """Returns the bytes of the per-token tensors for the tokens from `start` to `stop`, and of the states, for
        comparisons."""
        size, stop, parts = self.pool.block_size, self.num_tokens if stop is None else stop, list[Array]()
        for table in self.tables if start < stop else ():
            pages = [page for page in table.pages[start // size : -(-stop // size)] if page is not None]
            assert len(pages) == -(-stop // size) - start // size, "tokens that left the window are not read"
            parts.append(
                np.concatenate([page.tensor for page in pages], axis=2)[:, :, start % size :][:, :, : stop - start]
            )
        parts += [page.tensor for page in self.states]
        return b"".join(part.tobytes() for part in parts)

    def logits_bytes(self, logits: Logits) -> memoryview:
        """Returns next-token logits, shape [vocab], in the form of a tail's payload."""
        return converted(logits, self.layout.logits_dtype).copy().view(np.uint8).data

    def make_secret(self) -> None:
        """Marks all pages, including pages taken later, to be wiped once their last users have ended: the content was
        purged."""
        self._is_secret = True
        for page in self.pages():
            if page is not None:
                page.is_secret = True

    def close(self) -> None:
        """Gives all pages back. The sequence cannot be used any more."""
        if self._is_secret:
            self.make_secret()
        self.pool.release_pages(self.pages())
        vars(self).clear()

    def _take_ranges(self, ranges: Sequence[tuple[int, int, int]]) -> bool:
        """Makes pages writable: takes missing pages, and copies pages with other users. Each range has a group, the
        number of its first page, and a stop. Returns False, and takes none, if there are too few."""
        size, start = self.pool.block_size, self.num_tokens
        wanted = [(group, n) for group, first, stop in ranges for n in self.tables[group].unwritable(first, stop)]
        if not wanted:
            return True
        with self.pool.lock:
            taken = self.pool.take_pages([group for group, _ in wanted])
            for page, (group, number) in zip(taken or (), wanted, strict=taken is not None):
                table = self.tables[group]
                shared = table.pages[number] if number < len(table.pages) else None
                if shared is not None and (at := start - number * size) > 0:
                    page.tensor[:, :, :at] = shared.tensor[:, :, :at]
                table.set(number, page)
                self.pool.release_pages([shared])
        return taken is not None

    def _drop_before(self, table: PageTable, first: int) -> None:
        with self.pool.lock:
            for number in range(table.first, min(first, len(table.pages))):
                if (page := table.pages[number]) is not None:
                    page.is_secret |= self._is_secret
                self.pool.release_pages([page])
                table.set(number, None)
        table.first = max(table.first, first)

    def _swap_states(self) -> None:
        with self.pool.lock:
            self.states, self._spares = self._spares, self.states
