"""Matrix products whose rows do not depend on how many rows are computed with them: by calls that give each row the
same bits (`model.exact.kernel_calls`). A function of one number is computed by the same code for every number."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch.nn import functional

from diskprefix.model.exact.kernel_calls import Form, calls_of, matrix_first

_VECTOR, _UNSHARED = 64, 32768
"""The count of numbers that fill the vectors of a loop, and the count up to which torch uses one thread."""

MAX_TERMS = 8
"""The most inner numbers of products that are computed number by number."""
_MAX_PLANS = 8192
_CURVES = frozenset({"sigmoid", "silu", "gelu", "softplus", "mish", "log_sigmoid", "elu", "pow", "exp2"})
_CURVES_OF_HALF = frozenset({"gelu", "mish", "pow", "rsqrt"})
"""The second set is that of bfloat16 and float16."""

_Found = TypeVar("_Found")
is_ours: ContextVar[bool] = ContextVar("is_ours", default=False)
"""True while a product is computed here. `invariance` does not watch the operators of that time."""


def as_ours(function: Callable[..., _Found], *args: Any, **kwargs: Any) -> _Found:
    """Returns the result of a function of ours, while `is_ours`."""
    token = is_ours.set(True)
    try:
        return function(*args, **kwargs)
    finally:
        is_ours.reset(token)


def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the result of `torch.nn.functional.linear`: [.., inner] × [outer, inner] → [.., outer]."""
    return _product(rows, weight, bias, is_plain=False)


def times(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns rows × matrix: [.., inner] × [inner, outer] → [.., outer]."""
    return _product(rows, matrix, bias, is_plain=True)


def each_times(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Returns the product of matrices with few inner numbers, such as those that each token has of its own: [.., rows,
    inner] × [.., inner, outer]. Terms are added up one after the other, in float32 at least."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    left, right = rows.to(wide), matrices.to(wide)
    total = left[..., :1] * right[..., :1, :]
    for term in range(1, rows.shape[-1]):
        total = total + left[..., term : term + 1] * right[..., term : term + 1, :]
    return total.to(rows.dtype)


def spread_of_rows(function: Callable[..., torch.Tensor], rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Returns the result of `torch.std` along rows. torch has other code for a single number in float32 and float64."""
    if rows.ndim < 2 or args or kwargs.get("dim") != -1 or not kwargs.get("keepdim"):
        return function(rows, *args, **kwargs)
    return as_ours(function, torch.cat([rows, rows[..., -1:, :]], dim=-2), **kwargs)[..., :-1, :]


def forget_forms() -> None:
    """Forgets products: `forms` then returns those of later products only."""
    _plans.known.clear()
    _plans.forms.clear()


def forms() -> frozenset[Form]:
    """Returns the forms of the products that were computed in this thread."""
    return frozenset(_plans.forms)


def is_curve(name: str, dtype: torch.dtype) -> bool:
    """Returns whether torch has several codes for this function of one number, which differ in the last bits: for
    numbers that fill vectors, for the rest, and for numbers that are not side by side."""
    return name in (_CURVES_OF_HALF if dtype in (torch.bfloat16, torch.float16) else _CURVES)


def in_whole_vectors(function: Callable[..., torch.Tensor], numbers: torch.Tensor, *args: Any) -> torch.Tensor:
    """Returns the result of `function`, which works number by number. torch has other code for numbers that do not fill
    a vector or are not side by side."""
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
    name = (rows.shape, matrix.shape, matrix.dtype, bias is None, is_plain, torch.get_num_threads())
    token = is_ours.set(True)
    try:
        plan = _plans.known.get(name) or _plans.make(name)
        return plan.compute(rows, matrix, bias)
    finally:
        is_ours.reset(token)


class _Calls:
    """The calls that compute a product of one form for rows of one shape, `[.., inner]`. `filled` returns memory for
    the rows of a call. Only its first rows are written: a row of a product depends on no other."""

    def __init__(self, form: Form, shape: torch.Size, filled: Callable[[int], torch.Tensor]) -> None:
        self._num_rows = math.prod(shape[:-1])
        self._form, self._shape = form, (*shape[:-1], form.outer)
        self._calls, self._filled = calls_of(form, self._num_rows), filled

    def compute(self, rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        flat = rows.reshape(self._num_rows, self._form.inner)
        out, start = flat.new_empty(self._num_rows, self._form.outer), 0
        for call in self._calls:
            piece = flat[start : start + call.num_rows]
            found = call.compute(self._whole(piece, call.num_rows), matrix, bias, self._form.is_plain)
            if len(self._calls) == 1 and len(found) == self._num_rows:
                return found.contiguous().view(self._shape)
            out[start : start + call.num_rows] = found[: len(piece)]
            start += call.num_rows
        return out.view(self._shape)

    def _whole(self, piece: torch.Tensor, num_rows: int) -> torch.Tensor:
        if len(piece) == num_rows:
            return piece
        filled = self._filled(num_rows)
        filled[: len(piece)] = piece
        return filled


class _MatrixFirst:
    """One prepared call with the matrix first, as for most products of a step of few rows: a few microseconds each."""

    def __init__(self, form: Form, shape: torch.Size, count: int, filled: Callable[[int], torch.Tensor]) -> None:
        self._num_rows, self._form = math.prod(shape[:-1]), form
        self._head: torch.Tensor | None = None
        if self._num_rows < count:
            self._head, self._columns = filled(count)[: self._num_rows].view(shape), filled(count).t()
        self._size = (*shape[:-1], form.outer)
        self._strides = (*torch.empty(shape[:-1], device="meta").stride(), count)

    def compute(self, rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._head is None:
            columns = rows.reshape(self._num_rows, self._form.inner).t()
        else:
            self._head.copy_(rows)
            columns = self._columns
        return torch.as_strided_copy(
            matrix_first(columns, matrix, bias, self._form.is_plain), self._size, self._strides
        )


class _Plans(threading.local):
    """The prepared products of a thread, with memory for rows that are filled up."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], _Calls | _MatrixFirst] = {}
        self.forms: set[Form] = set()
        self._buffers: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def make(self, name: tuple[Any, ...]) -> _Calls | _MatrixFirst:
        shape, sizes, dtype, has_no_bias, is_plain, threads = name
        inner, outer = sizes if is_plain else reversed(sizes)
        form = Form(inner, outer, dtype, not has_no_bias, is_plain, threads)
        if len(self.known) >= _MAX_PLANS:
            self.known.clear()

        def filled(count: int) -> torch.Tensor:
            return self._filled(count, inner, dtype)

        self.forms.add(form)
        calls = calls_of(form, math.prod(shape[:-1]))
        one = len(calls) == 1 and calls[0].matrix_first
        # Not in inference mode, as its memory is written to outside that too.
        with torch.inference_mode(False):
            plan = _MatrixFirst(form, shape, calls[0].num_rows, filled) if one else _Calls(form, shape, filled)
        return self.known.setdefault(name, plan)

    def _filled(self, count: int, inner: int, dtype: torch.dtype) -> torch.Tensor:
        name = (count, inner, dtype)
        if name not in self._buffers:
            # As in `make`.
            with torch.inference_mode(False):
                self._buffers[name] = torch.zeros(count, inner, dtype=dtype)
        return self._buffers[name]


_plans = _Plans()
