"""Runs a plan: computes a step in one call, without Python between the operators."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import numpy as np

from diskprefix.native import address_of, calls
from diskprefix.native.library import Operators
from diskprefix.runtime.plan.operands import Buffer, EncodedRows, PlannedRun
from diskprefix.runtime.plan.plan import ComputePlan, OperatorCall

_UNREADABLE = 3
"""What `run` returns if a row of a table cannot be read."""
_Part: TypeAlias = Literal["all", "without logits", "states"]
"""The operations of a step to compute: all of them, those without logits, or those over states once more."""


class PlanRunner:
    """Computes steps by a plan, over pages of `page_tokens` tokens. One thread at a time uses it. The plan is complete
    before the first step."""

    def __init__(self, operators: Operators, plan: ComputePlan, page_tokens: int) -> None:
        self.plan, self.operators, self._page_tokens = plan, operators, page_tokens
        self._operations = dict[_Part, tuple[Any, calls.Operations]]()

    def run(
        self,
        runs: Sequence[PlannedRun],
        ids: np.ndarray,
        positions: np.ndarray,
        threads: int,
        pictures: EncodedRows | None = None,
    ) -> None:
        """Computes a step. The plan's `logits` and `hidden` have its results until the next one.

        `ids` are int64 [rows], `positions` [1, rows] or [3, rows]. Memory must have room for the rows. Raises
        `IndexError` for a token or a position that the model does not have, `MemoryError`, and `OSError` if a row of a
        table cannot be read from its file.
        """
        num_logits = sum(run.num_logits for run in runs)
        if not (0 < len(ids) <= self.plan.max_rows and num_logits <= len(ids)):
            raise ValueError("a step of more rows than the plan has")
        ends = accumulate(run.num_rows for run in runs)
        logit_rows = [np.arange(end - run.num_logits, end) for end, run in zip(ends, runs, strict=True)]
        self.plan.inputs.fill(ids, positions, np.concatenate(logit_rows))
        for level, call in enumerate(self.plan.picture_calls):
            call.count = 0 if pictures is None else len(pictures.numbers)
            if pictures is not None:
                call.numbers, call.from_ = address_of(pictures.numbers), pictures.level(level)
        self._compute(
            "all" if num_logits else "without logits", runs, [run.num_rows for run in runs], num_logits, threads
        )

    def replay(self, run: PlannedRun, num_rows: int, threads: int) -> None:
        """Computes again the states after the first rows of a run, from the states before it and the kept inputs."""
        self._compute("states", [run], [num_rows], 0, threads)

    def put(self, to: Buffer, rows: np.ndarray) -> None:
        """Fills the first rows of a buffer, which a step reads, with uint8 [rows, bytes of a row]."""
        self.plan.buffers[to.address][: rows.size] = rows.reshape(-1)

    def copied(self, rows: Buffer, num_rows: int) -> np.ndarray:
        """Returns a copy of the first rows of a buffer, uint8 [rows, bytes of a row]."""
        size = num_rows * rows.width * rows.item_bytes
        return np.frombuffer(bytearray(ctypes.string_at(rows.address, size)), np.uint8).reshape(num_rows, -1)

    def _compute(
        self, part: _Part, runs: Sequence[PlannedRun], num_rows: Sequence[int], num_logits: int, threads: int
    ) -> None:
        """Computes a part of the operations for the first rows of each run."""
        if part not in self._operations:
            self._operations[part] = _listed(self._operations_of(part))
        lists = [[array("Q", addresses) for addresses in (run.tables, run.befores, run.states)] for run in runs]
        described = (calls.PlanRun * len(runs))()
        for number, (run, of_run) in enumerate(zip(runs, lists, strict=True)):
            spans = run.spans.buffer_info()[0], len(run.spans) // 2
            addresses = (addresses.buffer_info()[0] for addresses in of_run)
            described[number] = calls.PlanRun(
                run.start, num_rows[number], run.num_logits, *spans, *addresses, address_of(run.kept), run.num_rows
            )
        is_replay = part == "states"
        step = calls.PlanStep(
            sum(num_rows), num_logits, len(runs), self._page_tokens, is_replay, ctypes.addressof(described), threads
        )
        failed = self.operators.run(bytes(self._operations[part][1]), bytes(step))
        if failed == _UNREADABLE:
            raise OSError("a row of a table cannot be read from its file")
        if failed:
            raise MemoryError("there is no memory left for a step")

    def _operations_of(self, part: _Part) -> list[OperatorCall]:
        operations = self.plan.state_operations if part == "states" else self.plan.operations
        return [operation for operation in operations if part == "all" or not operation.is_of_logits]


def _listed(operations: Sequence[OperatorCall]) -> tuple[Any, calls.Operations]:
    """Returns the operations as the operators read them, and the array in which they are."""
    listed = (calls.Operation * len(operations))()
    for place, operation in zip(listed, operations, strict=True):
        place.kind, place.is_of_logits = operation.kind, operation.is_of_logits
        place.call = ctypes.addressof(operation.call)
    return listed, calls.Operations(len(listed), ctypes.addressof(listed))
