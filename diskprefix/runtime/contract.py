"""The interface of what computes the steps of a model. It takes and gives arrays, so its callers know no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from diskprefix.prefixstore.kv.layout import Layout
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.prefixstore.kv.step import Run
from diskprefix.runtime.plan.drafts import DraftRow
from diskprefix.tokens import Logits


class UncachedState:
    """The state of a sequence that is not cached. Only its runtime reads it."""


State: TypeAlias = KVSequence | UncachedState
Hidden: TypeAlias = npt.NDArray[np.float32]
"""Hidden states after the last norm, [rows, hidden_size]."""


class PictureRows(Struct, frozen=True, eq=False):
    """The input besides token ids for the rows of a step that belong to a prompt with pictures. `is_picture`, bool
    [num_rows], marks the rows of pictures; `encoded` has their output of `encoder` (a `VisionEncoder`), [levels, count,
    hidden] in the type of the model. `positions` are int64 [axes, num_rows], None for a model whose positions count
    tokens. For `spans` see `Run`."""

    encoder: Any
    is_picture: npt.NDArray[np.bool_]
    encoded: np.ndarray
    positions: npt.NDArray[np.int64] | None = None
    spans: tuple[tuple[int, int], ...] = ()


class Rows(Struct, frozen=True):
    """The next tokens of a sequence, int64 [num_rows], and its state. The last `num_logits` rows get logits. All of
    them but the first may be taken back, unless `num_guesses` gives the number of rows that may. `pictures` has the
    encoder's output and the positions, if the sequence has pictures. `may_lag`: the pages may be
    completed later (`KVSequence.complete_pages`)."""

    state: State
    token_ids: npt.NDArray[np.int64]
    num_logits: int = 1
    pictures: PictureRows | None = None
    may_lag: bool = False
    num_guesses: int | None = None

    @property
    def num_taken_back(self) -> int:
        """The number of the last tokens that may be taken back."""
        return self.num_logits - 1 if self.num_guesses is None else self.num_guesses


class StepOutput(Struct, frozen=True):
    """The result of a step: the logits of each sequence's last rows, [num_logits, vocab], and if asked for the hidden
    states of all rows."""

    logits: list[Logits]
    hidden: Hidden | None = None


class Runtime(Protocol):
    """Computes the steps of one model over the memory of its layout."""

    layout: Layout
    vocab_size: int

    @property
    def has_hidden(self) -> bool:
        """True if it can give hidden states."""

    def prepare(self) -> None:
        """Prepares the first step, which would otherwise take longer."""

    def run(self, step: Sequence[Rows], *, needs_hidden: bool = False) -> StepOutput:
        """Computes a step. It has several sequences only if the layout packs."""

    def draft(self, rows: Sequence[DraftRow]) -> tuple[list[tuple[int, float]], np.ndarray]:
        """Computes guesses by the draft layer of a layout that has one (`DraftLayer.draft`)."""

    def new_state(self) -> UncachedState:
        """Returns an empty state, for a layout that is not cached."""


def begin_step(step: Sequence[Rows]) -> tuple[list[KVSequence], tuple[Run, ...]]:
    """Prepares the memory of the sequences of a step."""
    sequences = [rows.state for rows in step if isinstance(rows.state, KVSequence)]
    runs = tuple(
        sequence.begin_step(
            len(rows.token_ids), () if rows.pictures is None else rows.pictures.spans, rows.num_taken_back
        )
        for sequence, rows in zip(sequences, step, strict=True)
    )
    return sequences, runs
