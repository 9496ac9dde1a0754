"""Computes a model by llama.cpp's library, one sequence a step, exact at multiples of the block size.

Each of the sequences that were computed last has a context. It is filled from the sequence's pages when the sequence
begins or comes back, and blocks are copied to the pages as they become complete. The rows of replies, which are no
complete blocks, are copied when something else is about to read the pages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from diskprefix.prefixstore.kv.layout import Layout
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.runtime.contract import Rows, StepOutput, UncachedState, begin_step
from diskprefix.runtime.llama.llama_context import Failed, LlamaContext, LlamaModel, NoMemory
from diskprefix.runtime.llama.llama_layout import LlamaLayout
from diskprefix.runtime.llama.state_form import Bytes, StateForm, block_state, checkpoint_state, rows_of, states_of
from diskprefix.units import format_size

if TYPE_CHECKING:
    from diskprefix.runtime.plan.drafts import DraftRow

log = logging.getLogger("diskprefix")

_LEAST_CELLS, _CELLS = 2048, 256
"""The cells of the smallest context; the library rounds up to a multiple of the other number."""
_ROOM_BYTES = 256 << 20
"""The most bytes that a context takes besides its cells: buffers to compute with."""


class LlamaState(UncachedState):
    """The tokens of a sequence that is not cached. Another context computes them again."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.mark: object = None


class _Held(Struct, eq=False):
    """A context, and the sequence that it has. `num_copied` tokens of the sequence are in its pages."""

    context: LlamaContext
    sequence: KVSequence | LlamaState | None = None
    mark: object = None
    num_copied: int = 0

    @property
    def owner(self) -> KVSequence | LlamaState | None:
        """The sequence, unless it has ended or changed since."""
        return self.sequence if getattr(self.sequence, "mark", None) is self.mark else None


class LlamaRuntime:
    """Computes the steps of a model (`model.runtime`). For one thread at a time."""

    def __init__(
        self,
        model: LlamaModel,
        form: StateForm | None,
        placed: LlamaLayout | Layout,
        *,
        max_contexts: int = 1,
        free_bytes: Callable[[], int] = lambda: 1 << 62,
    ) -> None:
        """`form` and `placed` are those of the model's states; without a `form`, `placed` is the layout of a model that
        is not cached. `free_bytes` returns the free memory of its device."""
        self._placed = placed if isinstance(placed, LlamaLayout) else None
        self.layout = placed.layout if isinstance(placed, LlamaLayout) else placed
        self.vocab_size, self._model, self._form = model.vocab_size, model, form
        self._max_contexts, self._free_bytes = max_contexts, free_bytes
        self._held: list[_Held] = []
        """The contexts, the one that was used last at the end."""

    @property
    def has_hidden(self) -> bool:
        return False

    def prepare(self) -> None:
        """Does nothing."""

    def run(self, step: Sequence[Rows], *, needs_hidden: bool = False) -> StepOutput:
        """Computes the rows of one sequence."""
        assert not needs_hidden, "a request for hidden states was refused before"
        (rows,) = step
        if isinstance(rows.state, LlamaState):
            return self._run_uncached(rows, rows.state)
        assert isinstance(rows.state, KVSequence), "a state is this runtime's own, or has pages"
        # Before the step begins: a step with guesses swaps the states.
        held = self._held_by(rows.state, rows.state.num_tokens + len(rows.token_ids))
        (sequence,), (run,) = begin_step(step)
        # Until the step ends, the context belongs to no sequence.
        held.sequence = None
        try:
            logits = held.context.compute(rows.token_ids, run.start, rows.num_logits)
        except BaseException:
            # The rows that were not copied are lost with the context.
            if held.num_copied < sequence.num_tokens:
                sequence.truncate(held.num_copied)
            raise
        sequence.end_step(run)
        self._take_over(held, sequence)
        sequence.complete = self._complete
        if not rows.may_lag or run.end % sequence.pool.block_size == 0:
            self._copy(held, sequence)
        return StepOutput([logits])

    def draft(self, rows: Sequence[DraftRow]) -> tuple[list[tuple[int, float]], np.ndarray]:
        """Raises `NotImplementedError`: the library's draft layers are not used."""
        raise NotImplementedError

    def new_state(self) -> LlamaState:
        """Returns the state of a sequence that is not cached."""
        return LlamaState()

    def close(self) -> None:
        """Frees all contexts."""
        while self._held:
            self._held.pop().context.close()

    def _run_uncached(self, rows: Rows, state: LlamaState) -> StepOutput:
        token_ids = [*state.token_ids, *rows.token_ids.tolist()]
        held = self._held_by(state, len(token_ids))
        held.sequence, size = None, self._model.options.step
        logits = np.empty((0, self.vocab_size), np.float32)
        # Bound: the steps of the sequence. All but the last are of tokens that need no logits, or were computed before.
        while (start := held.context.end) < len(token_ids):
            part = np.array(token_ids[start : start + size])
            logits = held.context.compute(part, start, min(rows.num_logits, len(part)))
        state.token_ids = token_ids
        self._take_over(held, state)
        return StepOutput([logits])

    def _take_over(self, held: _Held, sequence: KVSequence | LlamaState) -> None:
        held.sequence, held.mark = sequence, object()
        sequence.mark = held.mark

    def _held_by(self, sequence: KVSequence | LlamaState, num_tokens: int) -> _Held:
        """Returns a context that has the sequence, with room for `num_tokens`. Raises `NoMemory` and `Failed`."""
        held = next((held for held in self._held if held.owner is sequence), None)
        if held is not None and held.context.num_cells >= num_tokens:
            self._held.remove(held)
        else:
            if held is not None:
                self._release(held)
            held = self._new_held(num_tokens)
            try:
                if isinstance(sequence, KVSequence):
                    self._fill(held, sequence)
            except BaseException:
                held.context.close()
                raise
        self._held.append(held)
        return held

    def _new_held(self, num_tokens: int) -> _Held:
        """Returns an empty context that is not in the list. Contexts that were not used for longest end for it."""
        num_cells = max(_LEAST_CELLS, 1 << (num_tokens - 1).bit_length())
        most = self._model.options.most_cells or -(-self._model.num_positions // _CELLS) * _CELLS
        num_cells = max(min(num_cells, most), -(-num_tokens // _CELLS) * _CELLS, self._model.options.least_cells)
        wanted_bytes = num_cells * self.layout.bytes_per_token + _ROOM_BYTES
        # Bound: each round ends a context.
        while self._held and (len(self._held) >= self._max_contexts or self._free_bytes() < wanted_bytes):
            oldest = min(self._held, key=lambda held: (held.owner is not None, self._held.index(held)))
            self._copy_owner(oldest)
            self._held.remove(oldest)
            if oldest.context.num_cells == num_cells:
                oldest.context.clear()
                return _Held(oldest.context)
            oldest.context.close()
        # Bound: each round ends a context.
        while True:
            try:
                return _Held(LlamaContext(self._model, num_cells))
            except NoMemory as error:
                if not self._held:
                    size = format_size(wanted_bytes)
                    raise NoMemory(f"{error}; it takes about {size}: lower --context or --gpu-layers") from error
            self._release(self._held[0])

    def _release(self, held: _Held) -> None:
        self._copy_owner(held)
        self._held.remove(held)
        held.context.close()

    def _complete(self, sequences: Sequence[KVSequence]) -> None:
        """Copies what the contexts of sequences have and their pages have not."""
        for held in self._held:
            if held.owner is not None and held.owner in sequences:
                self._copy_owner(held)

    def _copy_owner(self, held: _Held) -> None:
        if isinstance(held.owner, KVSequence):
            self._copy(held, held.owner)

    def _copy(self, held: _Held, sequence: KVSequence) -> None:
        """Copies the rows and states that the pages lack."""
        assert self._form is not None, "sequences have pages"
        assert self._placed is not None, "sequences have pages"
        start, stop = held.num_copied, sequence.num_tokens
        if start == stop:
            return
        for first, last in self._pieces(sequence, start, stop) if self._placed.rows else ():
            parts = rows_of(held.context.take(first, last), self._form)
            for part, places in zip(parts, self._placed.rows, strict=True):
                if (part.position, part.num_cells) != (first, last - first):
                    got = f"{part.num_cells} tokens from {part.position} on"
                    raise Failed(f"llama.cpp gave the state of {got}, not of all")
                for place, rows in zip(places, part.tensors, strict=True):
                    _write(sequence, place.group, place.index, first, rows)
        if self._placed.states:
            states = states_of(held.context.take_states(), self._form)
            for of_state, state in zip(self._placed.states, states, strict=True):
                if of_state is not None:
                    _bytes_of(sequence, of_state.group, of_state.index)[:] = state
        held.num_copied = stop

    def _pieces(self, sequence: KVSequence, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yields ranges of tokens within blocks. A state has only the tokens within the window of its last token, so
        none is longer than a window."""
        size = sequence.pool.block_size
        most = min((group.window for group in self.layout.groups if group.window is not None), default=size)
        while start < stop:
            last = min(stop, (start // size + 1) * size, start + most)
            yield start, last
            start = last

    def _fill(self, held: _Held, sequence: KVSequence) -> None:
        """Puts the state of a sequence into an empty context."""
        assert self._form is not None, "sequences have pages"
        assert self._placed is not None, "sequences have pages"
        num_tokens, size = sequence.num_tokens, sequence.pool.block_size
        for start in range(0, num_tokens, size) if self._placed.rows else ():
            count = min(size, num_tokens - start)
            sections = zip(self._form.attention, self._placed.rows, strict=True)
            rows = [
                [
                    _read(sequence, place.group, place.index, start, count, tensor.row_bytes)
                    for tensor, place in zip(section.tensors, places, strict=True)
                ]
                for section, places in sections
            ]
            held.context.put(block_state(self._form, start, rows, 1))
        if num_tokens and self._placed.states:
            empty = np.empty(0, np.uint8)
            states = [
                empty if place is None else _bytes_of(sequence, place.group, place.index)
                for place in self._placed.states
            ]
            held.context.put_states(checkpoint_state(self._form, num_tokens - 1, states, 0))
        if held.context.end != num_tokens:
            raise Failed(f"llama.cpp took the state of {held.context.end} of {num_tokens} tokens")
        held.num_copied = num_tokens


def _write(sequence: KVSequence, group: int, index: int, start: int, rows: Bytes) -> None:
    """Writes rows of a tensor, uint8 [tokens, row_bytes], which are within one block."""
    table = sequence.tables[group]
    # A window has passed pages that are not there.
    page = table.pages[start // table.block_size]
    if page is not None:
        at = start % table.block_size
        page.tensor[index, 0, at : at + len(rows)].view(np.uint8).reshape(rows.shape)[:] = rows


def _read(sequence: KVSequence, group: int, index: int, start: int, count: int, row_bytes: int) -> Bytes:
    """Returns rows of a tensor, uint8 [count, row_bytes], from the beginning of a block on. Those that a window has
    passed are zeros: any finite numbers give the same bits, and nobody knows what is in the pages."""
    table = sequence.tables[group]
    first = min(count, max(0, table.group.first_needed(sequence.num_tokens) - start))
    page = table.pages[start // table.block_size]
    if page is None or first == count:
        return np.zeros((count, row_bytes), np.uint8)
    rows = page.tensor[index, 0, :count].view(np.uint8).reshape(count, row_bytes)
    return rows if not first else np.concatenate([np.zeros((first, row_bytes), np.uint8), rows[first:]])


def _bytes_of(sequence: KVSequence, group: int, index: int) -> Bytes:
    """Returns the bytes of a state, uint8 [bytes]. They can be written."""
    state: Bytes = sequence.states[group].tensor[index].view(np.uint8).reshape(-1)
    return state
