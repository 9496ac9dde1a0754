"""A sequence: a list of pages for each group of tensors, and its states.

The layers that models see write to the pages and read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from diskprefix.kv.caches import StepCache
from diskprefix.kv.layers import StateLayer, TokenLayer, make_layer
from diskprefix.kv.page_table import LayerRows, PageTable
from diskprefix.kv.pages import Captured, Page, PagePool
from diskprefix.kv.sizes import MOST_TAKEN_BACK
from diskprefix.kv.step import Run
from diskprefix.kv.transfer import fill_device, read
from diskprefix.store.codec.planes import Bytes
from diskprefix.store.pieces import Cut
from diskprefix.tokens import TokenIds, TokenPath


class Owner(NamedTuple):
    """Whose prompts may share state: the root of the tenant's names with the store's secret, and the time of the
    store's last purge. State of before a purge is not found behind it. A request that shares nothing has an owner of
    its own, with a key as `private`: its replies begin with the state of each other, and with what its tenant shares.
    """

    root: bytes
    secret: int
    purged_at: bytes | None
    private: bytes = b""

    @property
    def sources(self) -> tuple[Owner, ...]:
        """The owners of the state that its prompts may begin with."""
        return (self, self._replace(private=b"")) if self.private else (self,)

    def path(self, token_ids: TokenIds, block_size: int) -> TokenPath:
        return TokenPath(self.secret, self.root, token_ids, block_size)


@dataclass(frozen=True)
class Prefix:
    """The state of the first `num_tokens` tokens of a sequence: pages by group, None for one that no window reaches,
    and pages of states. A sequence that begins with it shares all pages but the last one, if that is not complete, and
    those of states, which it copies."""

    num_tokens: int = 0
    pages: Sequence[Sequence[Page | None]] = ()
    states: Sequence[Page] = ()


class KVSequence:
    """The state of one sequence. Not thread-safe: it belongs to the engine's thread, but for `fill` and
    `prepare_restore` while a fetch fills it. `close` gives the pages back.

    Groups are numbered as in payloads (`store.pieces`): first those of per-token tensors, then those of states.
    """

    def __init__(self, pool: PagePool) -> None:
        """Raises `ContextTooLong` if there is no memory for its states."""
        self.pool, self.layout, self.device = pool, pool.layout, pool.device
        self.tables = [PageTable(group, pool.block_size) for group in self.layout.groups]
        layers = [make_layer(spec) for spec in self.layout.layers]
        self.layers = layers
        self.token_layers = [layer for layer in layers if isinstance(layer, TokenLayer)]
        self._state_layers = [layer for layer in layers if isinstance(layer, StateLayer)]
        self._num_tokens = 0
        self.hidden: LayerRows | None = None
        """The last hidden states, [1, tokens, hidden_size], for a draft layer."""
        self.num_drafted = 0
        """The tokens that the memory of a draft layer is complete for."""
        self.undrafted: list[int] = []
        """The tokens behind those: `complete` computes what is missing."""
        self.complete: Callable[[Sequence[KVSequence]], None] | None = None
        self._is_secret = False
        states = pool.take([len(self.tables) + number for number in range(len(self.layout.states))])
        if states is None:
            raise pool.too_long(1)
        self.states = states
        """Pages of the states after the last token."""
        self._spares: list[Page] = []
        """As many pages. Those of the states before a step with guesses, until `take_back`."""
        self._guessed: Run | None = None
        """The last step, if it had guesses that may be taken back."""
        self._needs_spares = False
        self._bind()
        self.cache = StepCache(layers, lambda: self.num_tokens)

    @property
    def num_tokens(self) -> int:
        return self.token_layers[0].length if self.token_layers else self._num_tokens

    @property
    def capacity(self) -> int:
        """The number of tokens that there is memory for, or for their windows."""
        sizes = (len(table.pages) * self.pool.block_size for table in self.tables if table.group.window is None)
        return min(sizes, default=1 << 62)

    @property
    def complete_from(self) -> int:
        """The first token that every group has the state of."""
        return max((table.complete_from for table in self.tables), default=0)

    def pages(self) -> list[Page | None]:
        """Returns all pages that it is a user of."""
        return [*(page for table in self.tables for page in table.pages), *self.states, *self._spares]

    def slides(self, num_tokens: int) -> bool:
        """Returns True if pages have left windows, or will before the sequence has so many tokens."""
        return self.complete_from > 0 or any(table.group.first_needed(num_tokens) > 0 for table in self.tables)

    def begin_step(self, num_rows: int, spans: tuple[tuple[int, int], ...] = (), num_guesses: int = 0) -> Run:
        """Prepares the memory for a step of `num_rows` tokens, of which the last `num_guesses` may be taken back: from
        states only if `take_spares` returns True. Raises `ContextTooLong` if there is no memory."""
        keeps_states = num_guesses > 0 and bool(self._state_layers) and self.take_spares()
        run = Run(self.num_tokens, num_rows, spans, [] if keeps_states else None)
        if not self.make_room(run.end):
            raise self.pool.too_long(run.end)
        if keeps_states:
            self._swap_states()
        self._guessed, self._needs_spares = run if keeps_states else None, keeps_states
        return run

    def end_step(self, run: Run) -> None:
        """Counts the tokens of a step: states do not."""
        self._num_tokens = run.end
        assert self._num_tokens == self.num_tokens, "the model must add all tokens of a step to its state"

    def make_room(self, end: int) -> bool:
        """Makes room for tokens up to `end`, in layers with a window from those on that the next token looks at. Pages
        before these are given back. Returns False, and changes nothing else, if there are not as many pages."""
        start, size = self.num_tokens, self.pool.block_size
        for table in self.tables:
            # Guesses may be taken back.
            self._drop_before(table, table.group.first_needed(max(0, start - MOST_TAKEN_BACK)) // size)
        end = -(-end // size)
        return self._take_ranges([(n, max(start // size, table.first), end) for n, table in enumerate(self.tables)])

    def take_pages(self, num_tokens: int) -> bool:
        """Takes the pages for a prompt of so many tokens, but for those of windows. Returns False if there are not as
        many, and takes none."""
        first, end = (-(-count // self.pool.block_size) for count in (self.num_tokens, num_tokens))
        whole = [number for number, table in enumerate(self.tables) if table.group.window is None]
        return self._take_ranges([(number, first, end) for number in whole])

    def reserve(self, num_tokens: int) -> None:
        """Does what `take_pages` does. Raises `ContextTooLong` if there are not as many pages."""
        if not self.take_pages(num_tokens):
            raise self.pool.too_long(num_tokens)

    def begin_with(self, prefix: Prefix) -> bool:
        """Begins an empty sequence with the state of a prefix. Returns False if there is no page for a copy."""
        for table, pages in zip(self.tables, prefix.pages, strict=False):
            self.pool.hold(pages)
            for number, page in enumerate(pages):
                table.set(number, page)
            table.first = next((n for n, page in enumerate(pages) if page is not None), len(pages))
        for state, source in zip(self.states, prefix.states, strict=bool(prefix.num_tokens)):
            state.tensor.copy_(source.tensor)
        self.truncate(prefix.num_tokens)
        # The last page is copied: it is written to.
        return self.make_room(prefix.num_tokens + 1)

    def prefix(self) -> Prefix:
        """Returns the state of all its tokens."""
        end = -(-self.num_tokens // self.pool.block_size)
        return Prefix(self.num_tokens, [table.pages[:end] for table in self.tables], self.states)

    def continues_at(self, num_tokens: int) -> bool:
        """Returns whether all is there that is needed to go on behind so many of its tokens."""
        return all(table.complete_from <= table.group.first_needed(num_tokens) for table in self.tables)

    def truncate(self, num_tokens: int) -> None:
        """Keeps the first `num_tokens` tokens, whose state must be there. The states must be those after these
        tokens."""
        if not num_tokens:
            with self.pool.lock:
                for table in (table for table in self.tables if table.first):
                    self.pool.release(table.pages)
                    table.clear()
        if num_tokens > self.num_drafted + len(self.undrafted):
            # It was restored.
            self.undrafted.clear()
        del self.undrafted[max(0, num_tokens - self.num_drafted) :]
        self.num_drafted = num_tokens - len(self.undrafted)
        self._num_tokens = num_tokens
        for token_layer in self.token_layers:
            token_layer.length = num_tokens
        for state_layer in self._state_layers:
            state_layer.set_has_state(num_tokens > 0)

    def settle(self) -> None:
        """Completes the memory of a draft layer, before others read the sequence. For the engine's thread."""
        if self.undrafted:
            assert self.complete is not None, "who leaves tokens out says how they are computed"
            self.complete([self])

    def take_back(self, num_tokens: int) -> None:
        """Forgets the last tokens, which were guesses, so that `num_tokens` remain. With states, those of the last
        step."""
        run, self._guessed = self._guessed, None
        if self._state_layers and num_tokens < self.num_tokens:
            assert run is not None, "the step kept no states"
            assert run.start <= num_tokens, "only states of the last step are kept"
            if num_tokens == run.start:
                self._swap_states()
            else:
                for replay in run.replays or ():
                    replay(num_tokens - run.start)
        # Not before: other threads take idle spares.
        self._needs_spares = False
        self.truncate(num_tokens)

    def take_spares(self) -> bool:
        """Takes pages that keep the states before a step with guesses. Returns False if there are none."""
        with self.pool.lock:
            if self._state_layers and not self._spares:
                self._spares = self.pool.take([page.group for page in self.states]) or []
                for layer in self._state_layers if self._spares else ():
                    layer.spares = {}
                for layer, part, index, state in self._parts_of(self._spares):
                    layer.spares[part, index] = state
            self._needs_spares = bool(self._spares)
            return self._needs_spares or not self._state_layers

    @property
    def idle_spares(self) -> list[Page]:
        """The pages that `drop_spares` gives back: none between `take_spares` and the end of the step with guesses."""
        return [] if self._needs_spares else self._spares

    @property
    def spares(self) -> Sequence[Page]:
        """The pages of the states before a step with guesses."""
        return self._spares

    def drop_spares(self) -> bool:
        """Gives idle spares back. Returns False without any. For any thread."""
        with self.pool.lock:
            idle = self.idle_spares
            for page in idle:
                page.is_secret |= self._is_secret
            self.pool.release(idle)
            if idle:
                self._spares = []
            return bool(idle)

    def prepare_restore(self, group: int, start: int, end: int) -> None:
        """Prepares a group for a restore of the tokens up to `end`, behind those of the sequence: of layers with a
        window of those from `start` on. Raises `MemoryError` if there is none for them."""
        table, size = self.tables[group], self.pool.block_size
        if not self._take_ranges([(group, max(self.num_tokens, start) // size, -(-end // size))]):
            raise MemoryError("there is no KV memory for it")
        if start > self.num_tokens:
            # The window has passed all that is there.
            self._drop_before(table, start // size)

    def fill(self, position: int, num_tokens: int, group: int, rows: slice, write: Callable[[Bytes], None]) -> None:
        """Has `write` fill rows of a group; of per-token tensors for tokens `position` … `position + num_tokens`, all
        of one page.

        A row is one head of one tensor, or a part of a state. `write` gets bytes of shape [rows, row_bytes], each row
        contiguous. Different threads may fill different rows at once.
        """
        if group >= len(self.tables):
            page, part = self.states[group - len(self.tables)], slice(None)
        else:
            at, found = position % self.pool.block_size, self.tables[group].pages[position // self.pool.block_size]
            assert found is not None
            page, width = found, found.num_bytes // found.num_rows // self.pool.block_size
            part = slice(at * width, (at + num_tokens) * width)
        if page.rows is not None:
            # By numpy: for a small piece, torch takes longer than the copy.
            write(page.rows[rows, part])
        else:
            fill_device(page.tensor.view(torch.uint8).view(page.num_rows, -1)[rows, part], write)

    def block(self, number: int) -> list[Page | None]:
        """Returns the pages of a block, by group."""
        return [table.pages[number] if number < len(table.pages) else None for table in self.tables]

    def logits_from(self, payload: Bytes) -> torch.Tensor:
        """Returns the logits in a tail's payload, shape [vocab], on its device. `payload` must not change
        afterwards."""
        return torch.from_numpy(payload.reshape(-1)).view(self.layout.logits_dtype).to(self.device)

    def capture(self, position: int, cuts: Sequence[Cut], logits: torch.Tensor | None = None) -> Captured | None:
        """Returns the payload of a node that begins at `position`: tokens where they lie, copies of the states as they
        are now, and `logits`, shape [vocab]. Returns None if there are no pages for the copies."""
        first = len(self.tables)
        groups = sorted({cut.group for cut in cuts if cut.group < first + len(self.states)})
        block = self.block(position // self.pool.block_size)
        pages = {group: page for group in groups if group < first and (page := block[group]) is not None}
        at_end = memoryview(b"") if logits is None else self.logits_bytes(logits)
        with self.pool.lock:
            copies = self.pool.take([group for group in groups if group >= first])
            if copies is None:
                return None
            try:
                pages |= {copied.group: copied for copied in copies}
                assert len(pages) == len(groups), "tokens that left the window are not read"
                captured = Captured(self.pool, pages, cuts, at_end)
            finally:
                self.pool.release(copies)
        try:
            for copied in copies:
                copied.tensor.copy_(self.states[copied.group - first].tensor)
                copied.is_secret |= self._is_secret
        except BaseException:
            captured.release()
            raise
        return captured

    def content(self, start: int = 0, end: int | None = None) -> bytes:
        """Returns a copy of the state of the tokens from `start` to `end`, and of the states: what sequences are
        compared by."""
        size, end, found = self.pool.block_size, self.num_tokens if end is None else end, list[torch.Tensor]()
        for table in self.tables if start < end else ():
            pages = [page for page in table.pages[start // size : -(-end // size)] if page is not None]
            assert len(pages) == -(-end // size) - start // size, "tokens that left the window are not read"
            found.append(torch.cat([page.tensor for page in pages], dim=2)[:, :, start % size :][:, :, : end - start])
        found += [page.tensor for page in self.states]
        return b"".join(part.cpu().contiguous().view(torch.uint8).numpy().tobytes() for part in found)

    def logits_bytes(self, logits: torch.Tensor) -> memoryview:
        """Returns next-token logits, shape [vocab], as in a tail's payload."""
        found = bytearray(self.layout.logits_bytes)
        read(np.frombuffer(found, np.uint8), logits.detach().to(self.layout.logits_dtype))
        return memoryview(found)

    def make_secret(self) -> None:
        """Has nothing of what it holds, now or later, stay in memory when its last user has ended: it was purged."""
        self._is_secret = True
        for page in self.pages():
            if page is not None:
                page.is_secret = True

    def close(self) -> None:
        """Gives all pages back. Nothing may use the sequence any more."""
        if self._is_secret:
            self.make_secret()
        self.pool.release(self.pages())
        # Its layers and its cache refer to it, and a garbage collection may be long in coming.
        vars(self).clear()

    def _take_ranges(self, ranges: Sequence[tuple[int, int, int]]) -> bool:
        """Takes pages of these groups, from a first one to an end: those that are not there, or that others use too and
        that a step must not write to. Returns False, and takes none, if there are not as many."""
        size, start = self.pool.block_size, self.num_tokens
        wanted = [(group, n) for group, first, end in ranges for n in self.tables[group].to_take(first, end)]
        if not wanted:
            return True
        with self.pool.lock:
            taken = self.pool.take([group for group, _ in wanted])
            for page, (group, number) in zip(taken or (), wanted, strict=taken is not None):
                table = self.tables[group]
                shared = table.pages[number] if number < len(table.pages) else None
                if shared is not None and (at := start - number * size) > 0:
                    page.tensor[:, :, :at] = shared.tensor[:, :, :at]
                table.set(number, page)
                self.pool.release([shared])
        return taken is not None

    def _drop_before(self, table: PageTable, first: int) -> None:
        gone = range(table.first, min(first, len(table.pages)))
        with self.pool.lock:
            for page in (page for number in gone if (page := table.pages[number]) is not None):
                page.is_secret |= self._is_secret
            self.pool.release([table.pages[number] for number in gone])
            for number in gone:
                table.set(number, None)
        table.first = max(table.first, first)

    def _bind(self) -> None:
        parts: dict[int, dict[str, LayerRows]] = {}
        for table in self.tables:
            for number, spec in enumerate(table.group.specs):
                parts.setdefault(spec.layer, {})[spec.part] = LayerRows(table, number, 0, spec.head_dim)
        for number, of_layer in parts.items():
            self.hidden = of_layer.pop("hidden", self.hidden)
            if (rows := of_layer.get("latent")) is not None:
                dim = self.layout.layers[number].latent_dim
                of_layer = {"keys": replace(rows, end=dim), "values": replace(rows, start=dim)}
            self.layers[number].bind(of_layer["keys"], of_layer["values"], self.device)
        for layer, part, index, state in self._parts_of(self.states):
            layer.bind_state(part, index, state)
        for layer in self._state_layers:
            layer.set_has_state(False)

    def _parts_of(self, states: Sequence[Page]) -> Iterator[tuple[StateLayer, str, int, torch.Tensor]]:
        """Yields the states in some pages, each with its layer, part and index there."""
        for group, page in zip(self.layout.states, states, strict=bool(states)):
            for spec, state in zip(group.specs, page.tensor, strict=True):
                yield self.layers[spec.layer], spec.part, spec.index, state

    def _swap_states(self) -> None:
        with self.pool.lock:
            self.states, self._spares = self._spares, self.states
        for layer in self._state_layers:
            layer.swap_states()
