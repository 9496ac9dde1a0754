"""The rows that one forward computes: tokens of one or several sequences, each with memory of its own."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import torch


@dataclass(frozen=True)
class Run:
    """A run of consecutive tokens of one sequence in a step: positions `start` … `start + num_rows`. `spans` are the
    positions [begin, end) of the pictures in it, in order, for models whose pictures see themselves whole. A run may
    begin within a picture but not end in it, as the first tokens of a picture see its last ones. `replays` is for a
    step with guesses in a sequence with states: each recurrence adds a function that computes its state behind the
    first so many rows again.
    """

    start: int
    num_rows: int
    spans: tuple[tuple[int, int], ...] = ()
    replays: list[Callable[[int], object]] | None = field(default=None, compare=False)

    @property
    def end(self) -> int:
        return self.start + self.num_rows

    @cached_property
    def flat_spans(self) -> array[int]:
        """The spans as memory for an operator."""
        return array("q", chain.from_iterable(self.spans))


@dataclass(frozen=True, eq=False)
class Step:
    """The rows of a forward, in order. `states` has for each run the recurrent state before its rows, and the memory
    for the state behind them: `get_recurrent_state` sets it, and the next recurrence takes it. `gathers`: the model
    uses the keys and values of a layer before attention does, so it gets a copy of them side by side. Then there is one
    run."""

    runs: tuple[Run, ...]
    gathers: bool = False
    states: list[list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return sum(run.num_rows for run in self.runs)


_current: ContextVar[Step | None] = ContextVar("step", default=None)


def current_step() -> Step | None:
    """Returns the step that is being computed. Models do not pass it to layers and attention."""
    return _current.get()


@contextmanager
def computing(step: Step | None) -> Iterator[None]:
    """Sets the step that a model computes inside; None if the attention is not ours."""
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)
