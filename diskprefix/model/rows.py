"""Matrix products whose rows do not depend on how many rows are computed with them.

A kernel chooses by the number of rows in which order it sums a product. So the row counts are measured for each form
of product: those in one class give the same bits for every row. A product is then computed in pieces with row counts of
one class, the last piece filled up. The class is chosen by a fixed rule, not by the clock, so that it is the same in
every process with the same kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional

from diskprefix.memo import Memo
from diskprefix.model.kernel_settings import cpu_kind, environment

MOST_ROWS = 256
"""A product of more rows is computed in pieces."""
_COUNTS = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, MOST_ROWS + 1, 32))
_OVERHEAD_ROWS = 16
"""What a call costs beside its rows, in rows. A rule and no measurement: what is chosen must be the same every time."""
_MANY_COLUMNS, _FEW_ROWS = 16384, 64
"""A product with so many columns, of which few rows are computed (logits), is measured for few."""
_PROBED_COLUMNS = 64
_VECTOR, _UNSHARED = 64, 32768
"""Numbers that fill the vectors of a loop, and so many that torch does not share them between threads."""

_measured = Memo("rows", version=1)

is_ours: ContextVar[bool] = ContextVar("is_ours", default=False)
"""Whether a product is being computed here, for who watches what a model computes."""


@dataclass(frozen=True)
class Form:
    """A product of rows [n, inner] with a matrix that is stored as [outer, inner], or [inner, outer] if `is_plain`."""

    inner: int
    outer: int
    dtype: torch.dtype
    has_bias: bool = False
    is_plain: bool = False
    threads: int = 0


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
        # The counts were measured for matrices that lie row after row.
        is_plain, matrix = (not is_plain, matrix.t()) if matrix.t().is_contiguous() else (is_plain, matrix.contiguous())
    inner, outer = matrix.shape if is_plain else matrix.shape[::-1]
    flat = rows.reshape(-1, inner)
    token = is_ours.set(True)
    try:
        threads = torch.get_num_threads()
        pieces = _pieces(len(flat), inner, outer, matrix.dtype, bias is not None, is_plain, threads)
        if pieces == (len(flat),):
            return _computed(flat, matrix, bias, is_plain).view(*rows.shape[:-1], outer)
        if len(pieces) == 1:
            filled = _filled(flat, pieces[0])
            return _computed(filled, matrix, bias, is_plain)[: len(flat)].view(*rows.shape[:-1], outer)
        out, start = flat.new_empty(len(flat), outer), 0
        for count in pieces:
            piece = flat[start : start + count]
            filled = piece if len(piece) == count else _filled(piece, count)
            out[start : start + count] = _computed(filled, matrix, bias, is_plain)[: len(piece)]
            start += count
    finally:
        is_ours.reset(token)
    return out.view(*rows.shape[:-1], outer)


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


def _computed(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, is_plain: bool) -> torch.Tensor:
    if not is_plain:
        return functional.linear(rows, matrix, bias)
    return torch.mm(rows, matrix) if bias is None else torch.addmm(bias, rows, matrix)


@lru_cache(maxsize=8192)
def _pieces(
    num_rows: int, inner: int, outer: int, dtype: torch.dtype, has_bias: bool, is_plain: bool, threads: int
) -> tuple[int, ...]:
    """Returns `pieces_of` for the parts of a form: a product is so fast that making the form would show."""
    return pieces_of(Form(inner, outer, dtype, has_bias, is_plain, threads), num_rows)


@lru_cache(maxsize=4096)
def pieces_of(form: Form, num_rows: int) -> tuple[int, ...]:
    """Returns the row counts of the calls for `num_rows` rows. They add up to `num_rows`, or the last one to more."""
    counts, most = safe_counts(form), most_rows(form)
    whole, rest = divmod(num_rows, most)
    return _cheapest(counts, most) * whole + _cheapest(counts, rest)


def most_rows(form: Form) -> int:
    return _FEW_ROWS if form.outer >= _MANY_COLUMNS else MOST_ROWS


@lru_cache(maxsize=4096)
def _cheapest(counts: tuple[int, ...], num_rows: int) -> tuple[int, ...]:
    """Returns the pieces that cost least, the larger ones first."""
    best: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    for n in range(1, num_rows + 1):
        tried = [(*best[max(0, n - count)], count) for count in counts]
        best.append(min((cost + count + _OVERHEAD_ROWS, (*rest, count)) for cost, rest, count in tried))
    # The filled up piece is the last one: only a whole piece can come before it.
    return tuple(sorted(best[num_rows][1], reverse=True))


@lru_cache(maxsize=1024)
def safe_counts(form: Form) -> tuple[int, ...]:
    """Returns row counts for which a row of a product of this form has the same bits, whatever its place among them.

    Measured with numbers whose sums cancel, so that what is left is the rounding, which shows the order of the sum.
    """
    key = f"{form} {_kernels()}"
    remembered = _measured.get(key)
    if isinstance(remembered, list) and remembered and all(count in _COUNTS for count in remembered):
        return tuple(remembered)
    counts = min(_classes(form), key=lambda counts: (_cost(counts, most_rows(form)), counts))
    _measured.put(key, list(counts))
    return counts


@lru_cache
def _kernels() -> str:
    """Returns what chooses torch's kernels beside the form of a product."""
    return f"{torch.__version__} {cpu_kind()} {sorted(environment().items())}"


def _cost(counts: tuple[int, ...], most: int) -> float:
    """One row, and many, relative to a kernel that takes them as they are."""
    few, many = (
        sum(count + _OVERHEAD_ROWS for count in _cheapest(counts, rows)) / (rows + _OVERHEAD_ROWS) for rows in (1, most)
    )
    return few + many


def _classes(form: Form) -> list[tuple[int, ...]]:
    rows, matrix, bias = _probe(form)
    found: list[tuple[list[int], torch.Tensor, torch.Tensor]] = []
    for count in _COUNTS:
        if count > most_rows(form):
            break
        result, is_known, is_same = _at_several_places(form, rows, matrix, bias, count)
        if not is_same:
            continue
        for counts, known, has in found:
            both = has & is_known
            if torch.equal(known[both], result[both]):
                counts.append(count)
                known[is_known] = result[is_known]
                has |= is_known
                break
        else:
            found.append(([count], result, is_known))
    return [tuple(counts) for counts, _, _ in found]


def _at_several_places(
    form: Form, rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, count: int
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Returns the first and last columns of calls with `count` rows, which rows are known, and whether each row is the
    same in every place."""

    def compute(some: torch.Tensor) -> torch.Tensor:
        product = _computed(some, matrix, bias, form.is_plain)
        return torch.cat([product[:, :_PROBED_COLUMNS], product[:, -_PROBED_COLUMNS:]], dim=1)

    result = rows.new_zeros(len(rows), 2 * min(form.outer, _PROBED_COLUMNS))
    is_known = torch.zeros(len(rows), dtype=torch.bool)
    for start in sorted({0, (len(rows) - count) // 3, len(rows) - count}):
        at = slice(start, start + count)
        new, again = compute(rows[at]), is_known[at].clone()
        if not torch.equal(new[again], result[at][again]):
            return result, is_known, False
        result[at], is_known[at] = new, True
    # The same rows in other places of one call.
    turned = compute(rows[:count].flip(0)).flip(0)
    return result, is_known, torch.equal(turned, result[:count])


def _probe(form: Form) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns rows and a matrix whose products add up to zero."""
    generator = torch.Generator().manual_seed(0)
    half = form.inner // 2
    order = torch.randperm(2 * half, generator=generator)
    most = most_rows(form)
    scales = torch.exp2(torch.randint(-4, 5, (most, half), generator=generator).float())
    numbers = torch.randn(most, half, generator=generator) * scales
    rows = torch.zeros(most, form.inner)
    rows[:, : 2 * half] = torch.cat([numbers, -numbers], dim=1)[:, order]
    columns = torch.zeros(min(form.outer, _PROBED_COLUMNS), form.inner)
    values = torch.randn(len(columns), half, generator=generator)
    columns[:, : 2 * half] = torch.cat([values, values], dim=1)[:, order]
    matrix = columns.to(form.dtype).repeat(-(-form.outer // len(columns)), 1)[: form.outer]
    # As large as what the rounding leaves, so that neither hides the other.
    bias = torch.randn(form.outer, generator=generator).mul_(1e-5).to(form.dtype) if form.has_bias else None
    return rows.to(form.dtype), (matrix.t() if form.is_plain else matrix).contiguous(), bias
