"""The calls of a kernel that compute a matrix product so that a row does not depend on how many there are.

A kernel chooses by the sizes of a product in which order it sums. So calls are measured for each form of product: with
several numbers of rows, and with the rows or the matrix as the first factor. Those in one class give the same bits for
every row. A product is then computed by calls of one class. The class is chosen by a fixed rule, not by the clock, so
that it is the same in every process with the same kernels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from diskprefix.memo import Memo
from diskprefix.model.load.kernel_settings import cpu_kind, environment

MAX_ROWS = 512
"""A product of more rows takes several calls."""
_COUNTS = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, MAX_ROWS + 1, 64))
_MANY_COLUMNS, _FEW_ROWS = 16384, 64
"""A product with this many columns (logits) is measured for few rows, because only few are computed."""
_PROBED_COLUMNS = 64

_measured = Memo("calls", version=1)


@dataclass(frozen=True)
class Form:
    """A product of rows [n, inner] with a matrix that is stored as [outer, inner], or [inner, outer] if `is_plain`."""

    inner: int
    outer: int
    dtype: torch.dtype
    has_bias: bool = False
    is_plain: bool = False
    threads: int = 0

    @classmethod
    def parse(cls, described: Any) -> Form:
        """Returns the form that `describe` described, with the present number of threads. Raises `ValueError`."""
        match described:
            case [int(inner), int(outer), str(name), bool(has_bias), bool(is_plain)]:
                dtype = getattr(torch, name, None)
                if isinstance(dtype, torch.dtype):
                    return cls(inner, outer, dtype, has_bias, is_plain, torch.get_num_threads())
        raise ValueError("not a form of a product")

    def describe(self) -> list[Any]:
        """Returns it as JSON values, without the number of threads."""
        return [self.inner, self.outer, str(self.dtype).removeprefix("torch."), self.has_bias, self.is_plain]


class KernelCall(NamedTuple):
    """A call of a kernel with `num_rows` rows. With `matrix_first` it computes matrix × rowsᵀ, which is turned then."""

    num_rows: int
    matrix_first: bool = False

    def compute(
        self, rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, is_plain: bool
    ) -> torch.Tensor:
        """Returns [num_rows, outer] for [num_rows, inner]. With `matrix_first` it is turned in memory."""
        if self.matrix_first:
            return matrix_first(rows.t(), matrix, bias, is_plain).t()
        if not is_plain:
            return functional.linear(rows, matrix, bias)
        return torch.mm(rows, matrix) if bias is None else torch.addmm(bias, rows, matrix)

    @property
    def cost(self) -> int:
        """The cost in rows of a large product. It is a fixed rule, because the choice must be the same every time."""
        if not self.matrix_first:
            return _REARRANGED + self.num_rows
        return (_READ if _has_tiles() else _REARRANGED) + self.num_rows + self.num_rows // 2


def matrix_first(
    columns: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, is_plain: bool
) -> torch.Tensor:
    """Returns [outer, num_rows] for [inner, num_rows]."""
    left = matrix.t() if is_plain else matrix
    return torch.mm(left, columns) if bias is None else torch.addmm(bias.unsqueeze(1), left, columns)


_READ, _REARRANGED = 70, 110
"""The cost of the matrix: read as it lies, and rearranged. A CPU with AMX rearranges it if it is the second factor."""


def calls_of(form: Form, num_rows: int) -> tuple[KernelCall, ...]:
    """Returns the calls for `num_rows` rows. Their rows add up to `num_rows`, or with the last one to more."""
    calls, most = safe_calls(form), _most_rows(form)
    whole, rest = divmod(num_rows, most)
    cheapest = _cheapest(calls, most)
    return cheapest[most][1] * whole + cheapest[rest][1]


@lru_cache(maxsize=1024)
def safe_calls(form: Form) -> tuple[KernelCall, ...]:
    """Returns calls that give a row of a product of this form the same bits, whatever its place among the rows. The
    inputs of the measurement nearly cancel. What remains is rounding error, which reveals the summation order."""
    key = f"{form} {_kernels()}"
    known = {str([*call]): call for call in _candidates(form)}
    remembered = _measured.get(key)
    if isinstance(remembered, list) and remembered and all(str(one) in known for one in remembered):
        return tuple(known[str(one)] for one in remembered)
    calls = min(_classes(form), key=lambda calls: (_cost(calls, _most_rows(form)), calls))
    _measured.put(key, [list(call) for call in calls])
    return calls


def digest(forms: Iterable[Form]) -> str:
    """Returns a digest of the safe calls of some forms: with other calls, products have other bits."""
    lines = sorted(f"{form.describe()} {[list(call) for call in safe_calls(form)]}" for form in forms)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@lru_cache
def _kernels() -> str:
    """Returns what chooses torch's kernels beside the form of a product."""
    return f"{torch.__version__} {cpu_kind()} {sorted(environment().items())}"


@lru_cache
def _has_tiles() -> bool:
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())


def _most_rows(form: Form) -> int:
    return _FEW_ROWS if form.outer >= _MANY_COLUMNS else MAX_ROWS


def _candidates(form: Form) -> list[KernelCall]:
    counts = [count for count in _COUNTS if count <= _most_rows(form)]
    # torch has a slower kernel for a matrix and one row.
    return [KernelCall(count) for count in counts] + [KernelCall(count, True) for count in counts if count > 1]


@lru_cache(maxsize=64)
def _cheapest(calls: tuple[KernelCall, ...], most: int) -> list[tuple[int, tuple[KernelCall, ...]]]:
    """Returns the calls that cost least and their cost, the larger ones first, for each number of rows from 0 to
    `most`."""
    best: list[tuple[int, tuple[KernelCall, ...]]] = [(0, ())]
    for n in range(1, most + 1):
        tried = [(best[max(0, n - call.num_rows)], call) for call in calls]
        best.append(min((cost + call.cost, (*rest, call)) for (cost, rest), call in tried))
    # The filled up call is the last one: only a whole call can come before it.
    return [(cost, tuple(sorted(chosen, reverse=True))) for cost, chosen in best]


def _cost(calls: tuple[KernelCall, ...], most: int) -> float:
    """Returns the cost of one row and of many, relative to a call that takes them as they are."""
    return sum(_cheapest(calls, most)[rows][0] / (_READ + rows) for rows in (1, most))


def _classes(form: Form) -> list[tuple[KernelCall, ...]]:
    rows, matrix, bias = _probe(form)
    found: list[tuple[list[KernelCall], torch.Tensor, torch.Tensor]] = []
    for call in _candidates(form):
        result, is_known, is_same = _at_several_places(call, form.is_plain, rows, matrix, bias)
        if not is_same:
            continue
        for calls, known, has in found:
            both = has & is_known
            if torch.equal(known[both], result[both]):
                calls.append(call)
                known[is_known] = result[is_known]
                has |= is_known
                break
        else:
            found.append(([call], result, is_known))
    return [tuple(calls) for calls, _, _ in found]


def _at_several_places(
    call: KernelCall, is_plain: bool, rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Returns the first and last columns of such calls, which rows are known, and whether each is the same anywhere."""

    def compute(some: torch.Tensor) -> torch.Tensor:
        product = call.compute(some, matrix, bias, is_plain)
        return torch.cat([product[:, :_PROBED_COLUMNS], product[:, -_PROBED_COLUMNS:]], dim=1)

    count, last = call.num_rows, len(rows) - call.num_rows
    starts = sorted({0, last // 3, last})
    parts = [compute(rows[start : start + count]) for start in starts]
    result = rows.new_zeros(len(rows), parts[0].shape[1])
    is_known = torch.zeros(len(rows), dtype=torch.bool)
    for start, new in zip(starts, parts, strict=True):
        at = slice(start, start + count)
        again = is_known[at].clone()
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
    most = _most_rows(form)
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
