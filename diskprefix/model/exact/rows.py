"""Products and functions of one number whose rows do not depend on how many rows are computed with them.

Products are those of `native.dense`. A function of one number is computed by the same code for every number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from diskprefix.model.exact.patterns import NotInvariant
from diskprefix.native import dense
from diskprefix.native.attention_operator import DTYPES
from diskprefix.native.library import Operators, operators
from diskprefix.native.unseen import unseen

_VECTOR, _UNSHARED = 64, 32768
"""The count of numbers that fill the vectors of a loop, and the count up to which torch uses one thread."""
_CURVES = frozenset({"sigmoid", "silu", "gelu", "softplus", "mish", "log_sigmoid", "elu", "pow", "exp2"})
_CURVES_OF_HALF = frozenset({"gelu", "mish", "pow", "rsqrt"})
"""The second set is that of bfloat16 and float16."""


@unseen
def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the result of `torch.nn.functional.linear`: [.., inner] × [outer, inner] → [.., outer]. Raises
    `NotInvariant` for dtypes and devices of which there is no compiled product."""
    return dense.linear(_compiled(rows, weight), rows, weight, bias)


@unseen
def times(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns rows × matrix: [.., inner] × [inner, outer] → [.., outer]. Raises as `linear`."""
    return dense.linear(_compiled(rows, matrix), rows, matrix.t(), bias)


@unseen
def each_times(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Returns the product of rows with matrices of their own, [.., rows, inner] × [.., inner, outer], such as those of
    each token or of each expert. Raises as `linear`."""
    return dense.batched(_compiled(rows, matrices), rows, matrices)


def _compiled(rows: torch.Tensor, matrix: torch.Tensor) -> Operators:
    found = operators() if rows.device.type == "cpu" else None
    if found is None or rows.dtype is not matrix.dtype or rows.dtype not in DTYPES:
        raise NotInvariant(f"products of {rows.dtype} and {matrix.dtype} on {rows.device.type}")
    return found


@unseen
def spread_of_rows(function: Callable[..., torch.Tensor], rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Returns the result of `torch.std` along rows. torch has other code for a single number in float32 and float64."""
    if rows.ndim < 2 or args or kwargs.get("dim") != -1 or not kwargs.get("keepdim"):
        return function(rows, *args, **kwargs)
    return function(torch.cat([rows, rows[..., -1:, :]], dim=-2), **kwargs)[..., :-1, :]


def is_curve(name: str, dtype: torch.dtype | None) -> bool:
    """Returns whether torch has several codes for this function of one number (None: of any dtype), which differ in the
    last bits: for numbers that fill vectors, for the rest, and for numbers that are not side by side."""
    if dtype is None:
        return name in _CURVES | _CURVES_OF_HALF
    return name in (_CURVES_OF_HALF if dtype in (torch.bfloat16, torch.float16) else _CURVES)


@unseen
def in_whole_vectors(function: Callable[..., torch.Tensor], numbers: torch.Tensor, *args: Any) -> torch.Tensor:
    """Returns the result of `function`, which works number by number, of whole vectors (see `is_curve`)."""
    # Numbers side by side fill vectors, in the part of each thread.
    count = numbers.numel()
    if count % (_VECTOR * max(1, min(torch.get_num_threads(), -(-count // _UNSHARED)))) == 0:
        return function(numbers.contiguous(), *args)
    flat = numbers.reshape(-1)
    parts = [
        function(functional.pad(part, (0, -len(part) % _VECTOR)), *args)[: len(part)]
        for part in torch.split(flat, _UNSHARED)
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(numbers.shape)
