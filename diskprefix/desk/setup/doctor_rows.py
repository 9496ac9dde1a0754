"""The cost of each kind of `--rows` on this machine, in `diskprefix doctor`: products of made-up weights."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import numpy as np
from msgspec import Struct

from diskprefix.daemon.catalogue.adviser import AGENT_TOKENS
from diskprefix.daemon.settings import Settings
from diskprefix.desk.setup.doctor_machine import Finding
from diskprefix.errors import DiskPrefixError
from diskprefix.native import address_of, calls
from diskprefix.native.compute_threads import num_threads
from diskprefix.native.library import ROWS, Operators, choose, operators
from diskprefix.native.matrix import Matrix
from diskprefix.runtime.plan.quants.forms import matrix_of
from diskprefix.runtime.plan.quants.quant_form import FILE_FORMS

_SIZE = 2048, 4096
_NUM_MATRICES = 16
"""More than a cache holds, so that a single row waits for memory as in a reply."""
_PREFILL_ROWS = 256
_TRIES = 3
_FASTER = 1.2
"""How many times as fast another kind computes prompts, to be advised."""
_SHARED = {"bf16": "; saved prompts are then for CPUs with AMX only"}


class RowsCost(Struct, frozen=True):
    """The seconds of a product for each weight and row: of many rows, and of one."""

    of_prompt: float
    of_reply: float

    @property
    def text(self) -> str:
        prompt_s, speed = AGENT_TOKENS * 1e9 * self.of_prompt, 1e-9 / self.of_reply
        return f"a prompt of {AGENT_TOKENS:,} tokens in {prompt_s:,.0f} s, replies of {speed:.0f} tokens/s"


def rows_finding(settings: Settings) -> Finding:
    """Returns the finding about the kinds of rows, for a model of a billion weights per token in Q4_K. The process's
    choice is then that of `settings`."""
    costs = dict[str, RowsCost]()
    for rows in ROWS:
        # Some CPUs, and some of --kernels, have none.
        with suppress(DiskPrefixError):
            choose(settings.kernels, rows)
            if (compiled := operators()) is not None:
                costs[rows] = _cost(compiled)
    choose(settings.kernels, settings.rows)
    return _finding(costs, settings.rows)


def _finding(costs: Mapping[str, RowsCost], chosen: str) -> Finding:
    if chosen not in costs:
        return Finding("speed", "skipped", "there are no compiled operators")
    text = f"per billion parameters in 4 bits: {costs[chosen].text}"
    fastest = min(costs, key=lambda rows: costs[rows].of_prompt)
    if costs[fastest].of_prompt * _FASTER > costs[chosen].of_prompt:
        return Finding("speed", "ok", f"{text} (--rows {chosen}, the fastest here)")
    advice = f"--rows {fastest}: {costs[fastest].text}{_SHARED.get(fastest, '')}"
    return Finding("speed", "note", f"{text} (--rows {chosen})", advice)


def _cost(operators: Operators) -> RowsCost:
    form = FILE_FORMS["Q4_K"]
    # Any finite scales.
    packed = np.full((_NUM_MATRICES, *form.packed_shape(*_SIZE)), 0x2C, np.uint8)
    matrices = [matrix_of(weights, form, None) for weights in packed]
    num_weights = _SIZE[0] * _SIZE[1]
    prompt = _least_s(lambda: _multiply(operators, matrices[:1], _PREFILL_ROWS)) / num_weights / _PREFILL_ROWS
    return RowsCost(prompt, _least_s(lambda: _multiply(operators, matrices, 1)) / num_weights / _NUM_MATRICES)


def _multiply(operators: Operators, matrices: list[Matrix], num_rows: int) -> None:
    rows, out = np.zeros((num_rows, _SIZE[1]), np.uint16), np.empty((num_rows, _SIZE[0]), np.uint16)
    products = (calls.ProductCall * len(matrices))()
    operations = (calls.Operation * len(matrices))()
    for call, operation, matrix in zip(products, operations, matrices, strict=True):
        call.num_matrices, call.rows = 1, address_of(rows)
        call.matrices[0], call.outs[0] = matrix.address, address_of(out)
        operation.kind, operation.call = calls.PRODUCT, ctypes.addressof(call)
    plan = calls.Operations(len(matrices), ctypes.addressof(operations))
    step = calls.PlanStep(num_rows, 0, 0, 1, 0, 0, num_threads())
    if operators.run(bytes(plan), bytes(step)):
        raise MemoryError("there is no memory left for a product")


def _least_s(work: Callable[[], None]) -> float:
    def once() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    work()
    return min(once() for _ in range(_TRIES))
