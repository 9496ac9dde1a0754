"""The draft layer of a model, which predicts the token after the next one (MTP), over the memory of sequences.

Its input for a token is the token's embedding and the model's last hidden state of the previous token. So its keys and
values depend on the prefix only, as in any layer, and each step computes them for its tokens. Its logits are
computed only when a draft token is wanted, and not for rare tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from diskprefix.native.compute_threads import num_threads
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.prefixstore.kv.step import Run
from diskprefix.runtime.plan.config import DecoderConfig
from diskprefix.runtime.plan.families.draft_decoder import draft
from diskprefix.runtime.plan.operands import PlannedRun
from diskprefix.runtime.plan.plan_runner import PlanRunner
from diskprefix.runtime.plan.slots import Slots

_MOST_MISSING = 32
"""The largest number of tokens that the memory of the draft layer may lack."""


class DraftRow(Struct, frozen=True, eq=False):
    """A token whose next token is to be drafted. It is at `position`: right after the tokens of `state`, or after
    draft tokens. `hidden` is the hidden state that `draft` returned for the previous token, None for the model's."""

    state: KVSequence
    token_id: int
    position: int
    hidden: np.ndarray | None = None


class _Part(NamedTuple):
    """The tokens of one sequence in a step, and the hidden state of the token before each, uint8 [rows, bytes]."""

    sequence: KVSequence
    run: Run
    token_ids: list[int]
    before: np.ndarray


class DraftLayer:
    """The draft layer of a model. `begin(num_rows)` returns the runner of an empty plan of at least `num_rows` rows,
    and the model's weights. Hidden states are bytes in the type of the plan, uint8 [.., bytes]."""

    def __init__(self, config: DecoderConfig, begin: Callable[[int], tuple[PlanRunner, Slots]]) -> None:
        assert config.draft_layer is not None
        self._config, self._begin = config, begin
        self._memory = config.draft_layer.places["hidden"]
        self._make(0)

    def _make(self, num_rows: int) -> None:
        self.runner, slots = self._begin(num_rows)
        self._before, guessed = draft(self.runner.plan, self._config, slots)
        self._guessed = [*chain(*guessed)]

    def draft(self, rows: Sequence[DraftRow]) -> tuple[list[tuple[int, float]], np.ndarray]:
        """Returns the likeliest next token of each row, with its probability among the tokens that may be drafted, and
        the hidden states for the rows that continue from there.

        A probability is not finite if the layer's scores are not. Each row needs memory (`KVSequence.take_pages_to`)
        and its own sequence. The same step completes the sequence's memory of the draft layer. The length of a sequence
        does not change: its next step overwrites these rows.
        """
        parts = list[_Part]()
        for row in rows:
            missing = row.state.undrafted if row.hidden is None else []
            run = Run(row.position - len(missing), len(missing) + 1)
            before = self._hidden_before(row.state, run) if row.hidden is None else row.hidden[None]
            parts.append(_Part(row.state, run, [*missing, row.token_id], before))
        self._compute(parts, num_logits=1)
        for row in rows:
            if row.hidden is None:
                _count_complete(row.state)
        scores = self.runner.copied(self.runner.plan.logits, len(rows)).view(np.float32)
        guesses = [(self._guessed[place], chance) for place, chance in likeliest(scores)]
        return guesses, self.runner.copied(self.runner.plan.hidden, len(rows))

    def keep_up(
        self,
        sequences: Sequence[KVSequence],
        runs: Sequence[Run],
        token_ids: np.ndarray,
        hidden: np.ndarray,
        *,
        may_lag: bool,
    ) -> None:
        """Stores the hidden states of a step's rows. `token_ids` are int64 [rows].

        Then completes the memory of the draft layer. With `may_lag` this may wait for later tokens, because many tokens
        take hardly longer than one, but a full block is always complete, because other sequences read it.
        """
        first = 0
        for sequence, run in zip(sequences, runs, strict=True):
            for part in self._hidden_of(sequence, run.start, run.end):
                part[:] = hidden[first : first + len(part)]
                first += len(part)
            sequence.num_drafted = run.start - len(sequence.undrafted)
            sequence.undrafted += token_ids[first - run.num_rows : first].tolist()
            sequence.complete = self.complete
            size, num_missing = sequence.pool.block_size, len(sequence.undrafted)
            may_lag = may_lag and num_missing < _MOST_MISSING and run.end // size == sequence.num_drafted // size
        if not may_lag:
            self.complete(sequences)

    def complete(self, sequences: Sequence[KVSequence]) -> None:
        """Completes the memory of the draft layer. Computes only its keys and values."""
        sequences = [sequence for sequence in sequences if sequence.undrafted]
        if not sequences:
            return
        runs = [Run(sequence.num_drafted, len(sequence.undrafted)) for sequence in sequences]
        self._compute(
            [
                _Part(sequence, run, sequence.undrafted, self._hidden_before(sequence, run))
                for sequence, run in zip(sequences, runs, strict=True)
            ],
            num_logits=0,
        )
        for sequence in sequences:
            _count_complete(sequence)

    def _compute(self, parts: Sequence[_Part], *, num_logits: int) -> None:
        """Computes a step. The last `num_logits` rows of each sequence get logits."""
        num_rows = sum(part.run.num_rows for part in parts)
        if num_rows > self.runner.plan.max_rows:
            self._make(num_rows)
        self.runner.put(self._before, np.concatenate([part.before for part in parts]))
        self.runner.run(
            [_planned(part.sequence, part.run, num_logits) for part in parts],
            np.array([token for part in parts for token in part.token_ids], np.int64),
            np.concatenate([np.arange(part.run.start, part.run.end) for part in parts])[None],
            num_threads(),
        )

    def _hidden_before(self, sequence: KVSequence, run: Run) -> np.ndarray:
        """Returns the model's last hidden state of the token before each token of a run; zeros before the first
        token."""
        none = np.zeros((0 if run.start else 1, self._memory.dim * self._memory.item_bytes), np.uint8)
        return np.concatenate([none, *self._hidden_of(sequence, max(0, run.start - 1), run.end - 1)])

    def _hidden_of(self, sequence: KVSequence, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yields the memory of the hidden states of tokens, page by page."""
        size, memory = sequence.pool.block_size, self._memory
        for page, at, _, count in sequence.tables[memory.table].parts(start, stop):
            of_page = page.rows.reshape(-1)[memory.offset :][: size * memory.dim * memory.item_bytes]
            yield of_page.reshape(size, -1)[at : at + count]


def _planned(sequence: KVSequence, run: Run, num_logits: int) -> PlannedRun:
    for table in sequence.tables:
        assert table.complete_from <= table.group.first_needed(run.start), "windows keep the rows that may lag"
        assert run.end <= len(table.pages) * table.block_size, "the sequence has memory for the rows"
    addresses = [table.addresses.buffer_info()[0] for table in sequence.tables]
    return PlannedRun(run.start, run.num_rows, num_logits, addresses, run.flat_spans)


def _count_complete(sequence: KVSequence) -> None:
    sequence.num_drafted += len(sequence.undrafted)
    sequence.undrafted.clear()


def likeliest(scores: np.ndarray) -> list[tuple[int, float]]:
    """Returns the index of the highest score of each row, float32 [rows, tokens], and its probability. A probability is
    not finite if the scores are not."""
    places = scores.argmax(axis=-1)
    with np.errstate(invalid="ignore"):
        chances = 1 / np.exp(scores - scores.max(axis=-1, keepdims=True)).sum(axis=-1)
    return [*zip(places.tolist(), chances.tolist(), strict=True)]
