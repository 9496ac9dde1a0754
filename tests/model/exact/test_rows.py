"""A row of a product has the same bits in every company, and a function of one number in every place."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from diskprefix.model.exact.patterns import NotInvariant
from diskprefix.model.exact.rows import each_times, in_whole_vectors, linear, times

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = ((64, 96), (96, 64), (576, 192), (192, 576), (63, 10))


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "outer"), SIZES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_row_has_the_same_bits_in_every_company(inner: int, outer: int, dtype: torch.dtype, has_bias: bool) -> None:
    # Numbers of all sizes, so that the order of a sum shows.
    x = numbers(300, inner, dtype=dtype) * torch.exp2(numbers(300, inner, dtype=dtype, seed=1) * 3)
    weight = numbers(outer, inner, dtype=dtype, seed=2)
    bias = numbers(outer, dtype=dtype, seed=3) if has_bias else None
    for product, matrix in ((linear, weight), (times, weight.t().contiguous())):
        whole = product(x, matrix, bias)
        assert whole.shape == (300, outer)
        for count in (1, 2, 3, 5, 8, 17, 33, 65, 130, 299):
            for start in {0, 1, (300 - count) // 2, 300 - count}:
                found = product(x[start : start + count], matrix, bias)
                assert torch.equal(found, whole[start : start + count]), (count, start)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_product(dtype: torch.dtype) -> None:
    x, weight, bias = (numbers(*shape, dtype=dtype, seed=s) for s, shape in enumerate(((2, 7, 96), (64, 96), (64,))))
    exact = functional.linear(x.double(), weight.double(), bias.double())
    for found in (linear(x, weight, bias), times(x, weight.t().contiguous(), bias)):
        assert found.shape == (2, 7, 64)
        assert (found.double() - exact).abs().max() < {2: 0.2, 4: 1e-4}[dtype.itemsize]


@pytest.mark.parametrize("dtype", DTYPES)
def test_matrices_of_their_own_are_the_product_too(dtype: torch.dtype) -> None:
    x, matrices = numbers(3, 2, 5, 24, dtype=dtype), numbers(2, 24, 40, dtype=dtype, seed=1)
    exact, found = x.double() @ matrices.double(), each_times(x, matrices)
    assert found.shape == (3, 2, 5, 40)
    assert (found.double() - exact).abs().max() < {2: 0.1, 4: 1e-4}[dtype.itemsize]
    assert torch.equal(each_times(x[1:2, :, 3:4], matrices), found[1:2, :, 3:4])


@pytest.mark.parametrize(("of_rows", "of_matrix"), [(torch.float64, torch.float64), (torch.float16, torch.float32)])
def test_products_of_other_numbers_are_refused(of_rows: torch.dtype, of_matrix: torch.dtype) -> None:
    with pytest.raises(NotInvariant):
        linear(numbers(2, 8, dtype=of_rows), numbers(2, 8, dtype=of_matrix))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 8, 10, 96, 200])
def test_a_function_of_one_number_has_the_same_bits_in_every_place(width: int, dtype: torch.dtype) -> None:
    x = numbers(300, width, dtype=dtype) * 4
    for function in (torch.sigmoid, functional.silu, functional.gelu, functional.softplus):
        whole = in_whole_vectors(function, x)
        assert torch.allclose(whole, function(x), rtol=2e-2, atol=1e-3)
        for count in (1, 2, 3, 7):
            parts = [in_whole_vectors(function, part) for part in torch.split(x, count)]
            assert torch.equal(torch.cat(parts), whole)
        beside = torch.cat([x, x], dim=1)[:, :width]
        assert torch.equal(in_whole_vectors(function, beside), whole)
