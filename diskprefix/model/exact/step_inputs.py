"""The small integers of a step: its tokens, their positions, and where an accelerator finds the memory of sequences.

An accelerator gets all of them in one copy, which nobody waits for. A step that is recorded (`step_graphs`) reads them
from memory that stays, so that other tokens and other memory can take their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from diskprefix.kv.arena import KVArena
from diskprefix.kv.step import Run, Step, is_accelerated
from diskprefix.model.exact import accelerated

if TYPE_CHECKING:
    from diskprefix.accelerator.operators import RunTable

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PlacedInputs:
    """The inputs of a forward on the model's device: `token_ids` and `positions`, int64 [1, rows]; the rows that get
    logits, int64 [logits]; and the step, with the tables of memory."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    kept: torch.Tensor
    step: Step


class StepInputs:
    """The integers of a step over `arenas`: `numbers`, int64, flat. Those of an equal `form` may take their place."""

    def __init__(
        self,
        arenas: Sequence[KVArena],
        runs: tuple[Run, ...],
        token_ids: Sequence[torch.Tensor],
        num_logits: Sequence[int],
    ) -> None:
        """`token_ids` are in main memory, [1, num_rows] for each run. The last `num_logits` of a run get logits."""
        self._runs = runs
        ends = accumulate(run.num_rows for run in runs)
        parts: list[Numbers] = [
            np.concatenate([ids[0].numpy() for ids in token_ids]),
            positions(runs),
            np.concatenate([np.arange(end - count, end) for end, count in zip(ends, num_logits, strict=True)]),
        ]
        self._tables: dict[Any, RunTable | None] = {}
        """By addresses of the first sequence's memory; None for states."""
        if is_accelerated(arenas[0].device):
            parts.append(accelerated.one_tile_each(len(runs)))
            for pair in arenas[0].layout.attended:
                table = _run_table(arenas, runs, pair)
                self._tables[_addresses(arenas[0], pair)] = table
                parts.append(table.rows)
            for number, states in enumerate(arenas[0].states):
                self._tables[states.data_ptr()] = None
                parts.append(_state_rows(arenas, runs, number))
        self._shapes = [part.shape for part in parts]
        self.numbers: Numbers = np.concatenate([part.reshape(-1) for part in parts])

    @property
    def form(self) -> tuple[Any, ...]:
        alignments = [None if table is None else table.alignment for table in self._tables.values()]
        return *self._shapes, *alignments

    def within(self, numbers: torch.Tensor, end: int = 0) -> PlacedInputs:
        """Returns the inputs within `numbers`, the same on the model's device. `end`: see `accelerated.runs`."""
        flat = torch.split(numbers, [int(np.prod(shape)) for shape in self._shapes])
        token_ids, positions, kept, *tables = (part.view(shape) for part, shape in zip(flat, self._shapes, strict=True))
        found: dict[Any, Any] = {}
        for (key, of_runs), table in zip(self._tables.items(), tables[1:], strict=True):
            found[key] = table if of_runs is None else accelerated.runs(of_runs, end, table, tables[0])
        return PlacedInputs(token_ids[None], positions[None], kept, Step(self._runs, found))


def positions(runs: Sequence[Run]) -> Numbers:
    """Returns the positions of the rows of a step, each in its own sequence."""
    return np.concatenate([np.arange(run.start, run.end) for run in runs])


def _addresses(arena: KVArena, pair: tuple[int, int]) -> tuple[int, ...]:
    return tuple(arena.memory[number].tensor.data_ptr() for number in pair)


def _run_table(arenas: Sequence[KVArena], runs: tuple[Run, ...], pair: tuple[int, int]) -> RunTable:
    memory = [(arena.memory[pair[0]], arena.memory[pair[1]]) for arena in arenas]
    return accelerated.run_table(
        [
            (run.start, run.num_rows, keys.tensor, values.tensor, keys.first, values.first)
            for run, (keys, values) in zip(runs, memory, strict=True)
        ]
    )


def _state_rows(arenas: Sequence[KVArena], runs: tuple[Run, ...], number: int) -> Numbers:
    firsts = accumulate((run.num_rows for run in runs), initial=0)
    rows = zip(firsts, runs, arenas, strict=False)
    return np.array([[first, run.num_rows, arena.states[number].data_ptr()] for first, run, arena in rows], np.int64)
