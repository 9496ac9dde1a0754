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
    """A run of consecutive tokens of one sequence in a step: positions `start` … `start + num_rows`. `spans`: positions
    [begin, end) of the pictures in it, in order, for models whose pictures see themselves whole. It may begin within
    one, but ends in none: the last tokens of a picture are seen by its first ones. `replays`: of a step with guesses in
    a sequence with states. Each recurrence adds a function that computes its state behind the first so many rows again.
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
        """The spans for an operator, which gets the address of this memory."""
        return array("q", chain.from_iterable(self.spans))


@dataclass(frozen=True, eq=False)
class Step:
    """The rows of a forward, in order. `states` has the recurrent states that a layer has just asked for, for each run
    that before its rows and the place of that behind them: its recurrence takes them. `gathers`: the model uses the
    memory of a layer before attention does, so it gets a copy of it side by side. Then there is one run."""

    runs: tuple[Run, ...]
    gathers: bool = False
    states: list[list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return sum(run.num_rows for run in self.runs)


_current: ContextVar[Step | None] = ContextVar("step", default=None)


def current_step() -> Step | None:
    """Returns the step that is being computed: a model passes to layers and attention only its own arguments."""
    return _current.get()


@contextmanager
def computing(step: Step | None) -> Iterator[None]:
    """Sets the step that a model computes inside; None if its attention is not ours."""
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)
