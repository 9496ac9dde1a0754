"""The bits that each operator computes, kept: a change of the sources that changes them is seen, and meant.

The inputs are whole numbers times powers of 2, so they are the same on every CPU and with every numpy. Variants that no
machine of ours has had (AMX, ARM64) are not in the table. `python -m tests.native.test_golden_bits` prints it, on a CPU
that has all of its variants. It was made with GCC 12.
"""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from diskprefix.model.quants.quant_form import FILE_FORMS
from diskprefix.native.library import Operators
from diskprefix.native.matrix import Matrix
from tests.native.one_operation import (
    Experts,
    attention,
    convolution,
    delta_rule,
    head_products,
    matrix,
    matrix_of,
    norm,
    pack,
    product,
    rows_of,
    state_space,
)
from tests.native.pages import Pages
from tests.native.variants import of_this_cpu, print_kept

DTYPES = (torch.float32, torch.bfloat16)
ROWS, WIDTH, INNER, HEADS, DIM = 21, 64, 96, 4, 32
"""More rows than a kernel for few takes; sizes that fill no unit of several vectors."""
START, TOKENS = 270, 512
"""The rows of a step begin behind a tile of attention."""


def below(limit: int, *shape: int, seed: int) -> npt.NDArray[np.int64]:
    """Made-up whole numbers from 0 to `limit` - 1: the upper bits of SplitMix64."""
    state = np.arange(1, 1 + math.prod(shape), dtype=np.uint64) + np.uint64(seed << 32)
    state *= np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((state >> np.uint64(33)) % np.uint64(limit)).astype(np.int64).reshape(shape)


def made_up(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of eight bits between -1 and 1, so that all types have them. Of many sizes, so that the order of a sum
    shows."""
    numbers = (below(255, *shape, seed=seed) - 127) * 2.0 ** -(7 + below(8, *shape, seed=seed + 1000))
    return torch.from_numpy(numbers).to(dtype)


def quantised(operators: Operators, rows: int, columns: int, seed: int, kind: str = "Q4_0") -> Matrix:
    """A matrix of a GGUF file, with scales of eleven bits."""
    num_bytes = {"Q4_0": 18, "Q8_0": 34}[kind]
    content = below(256, rows, columns // 32, num_bytes, seed=seed).astype(np.uint8)
    scales = ((1024 + below(1024, *content.shape[:2], seed=seed + 1000)) / 2.0**15).astype("<f2")
    content[..., :2] = scales[..., None].view(np.uint8)
    form = FILE_FORMS[kind]
    assert form is not None
    out = torch.zeros(form.packed_shape(rows, columns), dtype=torch.uint8)
    pack(operators, kind, torch.from_numpy(content.reshape(rows, -1)), None, out)
    return matrix_of(out, form, None)


def curve() -> torch.Tensor:
    """The table of x / 2, 0 for what is not finite."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return torch.nn.functional.pad(torch.where(numbers.isfinite(), numbers / 2, 0), (0, 1))


def of_attention(operators: Operators, dtype: torch.dtype) -> list[torch.Tensor]:
    query = made_up(HEADS, ROWS, DIM, seed=1, dtype=dtype)
    memory = Pages([made_up(2, TOKENS, DIM, seed=seed, dtype=dtype) for seed in (2, 3)], TOKENS)
    form: dict[str, Any] = {"kv_heads": 2, "value_dim": DIM, "scale": 0.25}
    cases: tuple[dict[str, Any], ...] = ({}, {}, {"window": 200, "softcap": 2.0}, {"chunk": 200})
    found = []
    for num_rows, settings in zip((ROWS, 1, ROWS, ROWS), cases, strict=True):
        run = memory.run(START, num_rows)
        found.append(attention(operators, query[:, :num_rows], [run], **form, **settings))
    return [*found, attention(operators, query, [memory.run(START, ROWS)], **form, sinks=made_up(HEADS, seed=4))]


def of_products(operators: Operators) -> list[torch.Tensor]:
    rows = made_up(ROWS, INNER, seed=1, dtype=torch.bfloat16)
    matrices = [quantised(operators, WIDTH, INNER, 5, kind) for kind in ("Q4_0", "Q8_0")]
    matrices.append(matrix(made_up(WIDTH, INNER, seed=6, dtype=torch.bfloat16), (WIDTH, INNER)))
    found = [product(operators, rows[:count], matrix) for matrix in matrices for count in (1, ROWS)]
    return [*found, rows_of(operators, matrices[0], torch.tensor([0, 17, 63]))]


def of_norms(operators: Operators, dtype: torch.dtype) -> list[torch.Tensor]:
    rows, weight = made_up(ROWS, WIDTH + 3, seed=1, dtype=dtype), made_up(WIDTH + 3, seed=2, dtype=dtype)
    return [norm(operators, rows, weight, kind, 2.0**-17) for kind in (0, 1, 2)]


def of_experts(operators: Operators) -> list[torch.Tensor]:
    gate, up = ([quantised(operators, INNER, WIDTH, seed + one) for one in range(4)] for seed in (10, 20))
    down = [quantised(operators, WIDTH, INNER, 30 + one) for one in range(4)]
    rows, weights = made_up(ROWS, WIDTH, seed=1, dtype=torch.bfloat16), made_up(ROWS, 2, seed=2).abs()
    first = torch.from_numpy(below(4, ROWS, 1, seed=3))
    return [Experts(gate, up, down, curve())(operators, rows, torch.cat([first, (first + 1) % 4], 1), weights)]


def of_dense_products(operators: Operators, dtype: torch.dtype) -> list[torch.Tensor]:
    rows, out = made_up(HEADS, ROWS, DIM, seed=1, dtype=dtype), torch.empty(HEADS, ROWS, 40, dtype=dtype)
    head_products(operators, rows, made_up(HEADS, DIM, 40, seed=2, dtype=dtype), out, is_turned=False)
    turned = torch.empty_like(out)
    head_products(operators, rows, made_up(HEADS, 40, DIM, seed=2, dtype=dtype), turned, is_turned=True)
    return [out, turned]


def of_scans(operators: Operators, dtype: torch.dtype) -> list[torch.Tensor]:
    rows = made_up(1, ROWS, WIDTH, seed=1, dtype=dtype)
    states = made_up(1, WIDTH, 4, seed=2, dtype=dtype), *(made_up(1, HEADS, DIM, DIM, seed=seed) for seed in (3, 4))
    weight = made_up(WIDTH, 4, seed=5, dtype=dtype)
    found = [convolution(operators, rows, weight, None, [(ROWS, states[0], states[0])], has_silu=True)]
    query, key, into, out_of = (made_up(1, ROWS, 2, DIM, seed=seed, dtype=dtype) for seed in range(6, 10))
    value, steps = made_up(1, ROWS, HEADS, DIM, seed=10, dtype=dtype), made_up(1, ROWS, HEADS, seed=11).abs()
    runs = [(ROWS, states[1], states[1])]
    found.append(delta_rule(operators, query, key, value, -steps, steps, runs, 2.0**-20))
    decay, runs = -made_up(HEADS, seed=12).abs(), [(ROWS, states[2], states[2])]
    found.append(state_space(operators, value, steps, decay, into, out_of, decay, runs))
    return [*found, *states]


COMPUTED: dict[str, Callable[[Operators], list[torch.Tensor]]] = {
    "products": of_products,
    "experts": of_experts,
}
OF_TYPES: dict[str, Callable[[Operators, torch.dtype], list[torch.Tensor]]] = {
    "attention": of_attention,
    "norms": of_norms,
    "dense products": of_dense_products,
    "scans": of_scans,
}
KEPT = ("avx512_bf16", "avx512", "avx2", "baseline") if platform.machine() == "x86_64" else ()
GOLDEN = {
    "products": "7386c854fd13 7386c854fd13 7386c854fd13 7386c854fd13",
    "experts": "8ccb34353804 330486b93301 330486b93301 330486b93301",
    "attention in float32": "b7d712cfd590 b7d712cfd590 ded783286859 d2d30326ce64",
    "attention in bfloat16": "c602dbadeff4 e34e9e9751c5 e34e9e9751c5 b093f50de9ce",
    "norms in float32": "b1cb0ff61f66 b1cb0ff61f66 b1cb0ff61f66 d67b9a64a336",
    "norms in bfloat16": "8bff9c5968a9 8bff9c5968a9 8bff9c5968a9 8bff9c5968a9",
    "dense products in float32": "9fa99578cab6 9fa99578cab6 9fa99578cab6 9fa99578cab6",
    "dense products in bfloat16": "635a84024790 635a84024790 635a84024790 635a84024790",
    "scans in float32": "35b2eea066ca 35b2eea066ca e2bd25f79624 35c49be7c28d",
    "scans in bfloat16": "0637c848d3a1 0637c848d3a1 7d611c237e4c 91dc5b228707",
}
"""Digests, for each of the variants in `KEPT`."""


def bits(operators: Operators) -> dict[str, str]:
    results = {name: compute(operators) for name, compute in COMPUTED.items()}
    for name, compute in OF_TYPES.items():
        results |= {f"{name} in {str(dtype).removeprefix('torch.')}": compute(operators, dtype) for dtype in DTYPES}
    return {name: _digest(tensors) for name, tensors in results.items()}


def _digest(tensors: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        assert tensor.isfinite().all()
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


@pytest.mark.parametrize("operators", of_this_cpu(KEPT), indirect=True)
def test_each_operator_computes_the_bits_that_are_kept(operators: Operators) -> None:
    kept = {name: of_variants.split()[KEPT.index(operators.variant)] for name, of_variants in GOLDEN.items()}
    assert bits(operators) == kept


if __name__ == "__main__":
    print_kept(bits, KEPT)
