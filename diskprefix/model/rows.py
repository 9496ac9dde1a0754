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
    flat = rows.reshape(-1, inner)
    token = is_ours.set(True)
    try:
        calls = _calls(len(flat), inner, outer, matrix.dtype, bias is not None, is_plain, torch.get_num_threads())
        if len(calls) == 1:
            out = _called(calls[0], flat, matrix, bias, is_plain).contiguous()
        else:
            out, start = flat.new_empty(len(flat), outer), 0
            for call in calls:
                piece = flat[start : start + call.num_rows]
                out[start : start + call.num_rows] = _called(call, piece, matrix, bias, is_plain)
                start += call.num_rows
    finally:
        is_ours.reset(token)
    return out.view(*rows.shape[:-1], outer)


def _called(
    call: Call, piece: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, is_plain: bool
) -> torch.Tensor:
    """Returns what a call gives for a piece of at most its number of rows."""
    if len(piece) == call.num_rows:
        return call.compute(piece, matrix, bias, is_plain)
    return call.compute(_filled(piece, call.num_rows), matrix, bias, is_plain)[: len(piece)]


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
        self.kept: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}


_filling = _Filling()


def _filled(piece: torch.Tensor, count: int) -> torch.Tensor:
    """Returns [count, inner] that begins with the rows of `piece`; it is good until the next call."""
    name = (count, piece.shape[1], piece.dtype)
    if name not in _filling.kept:
        # Not in inference mode, as it is written to outside that too.
        with torch.inference_mode(False):
            _filling.kept[name] = torch.zeros(count, piece.shape[1], dtype=piece.dtype)
    filled = _filling.kept[name]
    filled[: len(piece)] = piece
    return filled
