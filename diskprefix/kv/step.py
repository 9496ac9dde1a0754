"""The rows that one forward computes: tokens of one or several sequences, each with memory of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Run:
    """A run of consecutive tokens of one sequence in a step: positions `start` … `start + num_rows`."""

    start: int
    num_rows: int

    @property
    def end(self) -> int:
        return self.start + self.num_rows


@dataclass(frozen=True, eq=False)
class Step:
    """The rows of a forward, in order. `tables` keeps where an accelerator finds the memory of layers, by the addresses
    of the first sequence's. `states` has the recurrent states that a layer has just asked for, one for each run: its
    recurrence takes them."""

    runs: tuple[Run, ...]
    tables: dict[Any, Any] = field(default_factory=dict)
    states: list[list[torch.Tensor]] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return sum(run.num_rows for run in self.runs)


def is_accelerated(device: torch.device) -> bool:
    """Returns whether kernels in Triton (`accelerator`) compute on a device: a GPU of NVIDIA or AMD (both are `cuda`)
    or of Intel, and where they are interpreted, any device whose memory Python can read."""
    return device.type in ("cuda", "xpu") or (_IS_INTERPRETED and device.type != "mps")


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
