"""The rows of a sequence that a step computes."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain


@dataclass(frozen=True)
class Run:
    """A run of consecutive tokens of one sequence in a step: positions [start, start + num_rows). `spans` are the
    positions [begin, end) of the pictures in the run, in order, for models in which all tokens of a picture attend to
    each other. A run may begin within a picture but not end in it, because the first tokens of a picture attend to its
    last ones. `replays` is for a step with guesses in a sequence with states: each recurrence adds a function of n that
    computes its state after the first n rows of the run again.
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
