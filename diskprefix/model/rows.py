"""Matrix products whose rows do not depend on how many rows are computed with them.

A product is computed by calls that give each row the same bits (`model.calls`), the last one filled up. A function of
one number is computed by the same code for every number.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional

from diskprefix.model.calls import Call, Form, calls_of

_VECTOR, _UNSHARED = 64, 32768
"""Numbers that fill the vectors of a loop, and so many that torch does not share them between threads."""

is_ours: ContextVar[bool] = ContextVar("is_ours", default=False)
"""Whether a product is being computed here, for who watches what a model computes."""


def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns what `torch.nn.functional.linear` does: [.., inner] × [outer, inner] → [.., outer]."""
    return _product(rows, weight, bias, is_plain=False)


def times(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns rows × matrix: [.., inner] × [inner, outer] → [.., outer]."""
    return _product(rows, matrix, bias, is_plain=True)


def in_whole_vectors(function: Callable[..., torch.Tensor], numbers: torch.Tensor, *args: Any) -> torch.Tensor:
    """Returns what `function` does number by number. torch has another code for numbers that do not fill a vector, and
    for those that are not side by side."""
    token = is_ours.set(True)
    try:
        if are_whole(numbers.numel(), torch.get_num_threads()):
            return function(numbers.contiguous(), *args)
        flat = numbers.reshape(-1)
        parts = [
            function(functional.pad(part, (0, -len(part) % _VECTOR)), *args)[: len(part)]
            for part in torch.split(flat, _UNSHARED)
        ]
    finally:
        is_ours.reset(token)
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(numbers.shape)


def are_whole(count: int, threads: int) -> bool:
    """Returns whether `count` numbers side by side fill vectors, in the part of each thread."""
    return count % (_VECTOR * max(1, min(threads, -(-count // _UNSHARED)))) == 0


def _product(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, *, is_plain: bool) -> torch.Tensor:
    if not matrix.is_contiguous():
        # The calls were measured for matrices that lie row after row.
        is_plain, matrix = (not is_plain, matrix.t()) if matrix.t().is_contiguous() else (is_plain, matrix.contiguous())
    inner, outer = matrix.shape if is_plain else matrix.shape[::-1]
    *shape, _ = rows.shape
    flat = rows.reshape(-1, inner)
    num_rows = flat.shape[0]
    token = is_ours.set(True)
    try:
        calls = _calls(num_rows, inner, outer, matrix.dtype, bias is not None, is_plain, torch.get_num_threads())
        if len(calls) == 1:
            return _called(calls[0], flat, num_rows, matrix, bias, is_plain).contiguous().view(*shape, outer)
        out, start = flat.new_empty(num_rows, outer), 0
        for call in calls:
            end = min(start + call.num_rows, num_rows)
            out[start:end] = _called(call, flat[start:end], end - start, matrix, bias, is_plain)
            start = end
        return out.view(*shape, outer)
    finally:
        is_ours.reset(token)


def _called(
    call: Call, rows: torch.Tensor, num_rows: int, matrix: torch.Tensor, bias: torch.Tensor | None, is_plain: bool
) -> torch.Tensor:
    """Returns what a call gives for at most its number of rows."""
    if num_rows == call.num_rows:
        return call.compute(rows, matrix, bias, is_plain)
    filled, head = _filling.take(call.num_rows, num_rows, rows.shape[1], rows.dtype)
    head.copy_(rows)
    return call.compute(filled, matrix, bias, is_plain)[:num_rows]


@lru_cache(maxsize=8192)
def _calls(
    num_rows: int, inner: int, outer: int, dtype: torch.dtype, has_bias: bool, is_plain: bool, threads: int
) -> tuple[Call, ...]:
    """Returns `calls_of` for the parts of a form: a product is so fast that making the form would show."""
    return calls_of(Form(inner, outer, dtype, has_bias, is_plain, threads), num_rows)


class _Filling(threading.local):
    """Memory for rows that are filled up, kept for each thread. Other rows may be in the rest: a row of a product
    depends on no other."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._heads: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = {}

    def take(self, count: int, num_rows: int, inner: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns [count, inner] that is good until the next call, and its first `num_rows` rows."""
        name = (count, inner, dtype)
        if name not in self._kept:
            # Not in inference mode, as it is written to outside that too.
            with torch.inference_mode(False):
                self._kept[name] = torch.zeros(count, inner, dtype=dtype)
        filled = self._kept[name]
        head = self._heads.get((num_rows, *name))
        if head is None:
            with torch.inference_mode(False):
                head = self._heads[num_rows, *name] = filled[:num_rows]
        return filled, head


_filling = _Filling()
