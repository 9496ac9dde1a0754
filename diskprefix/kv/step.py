"""What one forward computes: rows of tokens of one or several sequences, each with memory of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

TILE = 512
"""Attention reads keys in tiles of so many tokens, counted from position 0 of a sequence. The memory of a sequence is a
multiple of it."""


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one sequence in a step: positions `start` … `start + num_rows`."""

    start: int
    num_rows: int

    @property
    def end(self) -> int:
        return self.start + self.num_rows


@dataclass(frozen=True, eq=False)
class Step:
    """The rows of a forward, in order. `masks` keeps the masks of attention, which all layers of a kind share."""

    runs: tuple[Run, ...]
    masks: dict[Any, torch.Tensor] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return sum(run.num_rows for run in self.runs)


_current: ContextVar[Step | None] = ContextVar("step", default=None)


def current_step() -> Step | None:
    """Returns what is being computed, for layers and attention: a model hands them nothing that it does not know."""
    return _current.get()


@contextmanager
def computing(step: Step | None) -> Iterator[None]:
    """Within it, a model computes the rows of `step`; None if its attention is not ours."""
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)
