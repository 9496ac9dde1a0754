"""The rows that one forward computes: tokens of one or several sequences, each with memory of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Run:
    """A run of consecutive tokens of one sequence in a step: positions `start` … `start + num_rows`. `spans` are the
    positions of pictures whose tokens see each other, each [begin, end): those with tokens in the run, which may begin
    within one, but does not end there."""

    start: int
    num_rows: int
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.num_rows


@dataclass(frozen=True, eq=False)
class Step:
    """The rows of a forward, in order. `states` has the recurrent states that a layer has just asked for, one for each
    run: its recurrence takes them. `gathers`: the model uses the memory of a layer before attention does, so it gets a
    copy of it side by side. Then there is one run."""

    runs: tuple[Run, ...]
    gathers: bool = False
    states: list[list[torch.Tensor]] = field(default_factory=list)

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
