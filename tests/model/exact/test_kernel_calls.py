"""Calls of a kernel that give a row the same bits are found by measurement, and remembered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from diskprefix.model.exact import kernel_calls as calls
from diskprefix.model.exact.kernel_calls import MAX_ROWS, Form, KernelCall, calls_of, safe_calls


@pytest.fixture(autouse=True)
def nothing_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    safe_calls.cache_clear()
    yield
    safe_calls.cache_clear()


def form(inner: int = 192, outer: int = 64, dtype: torch.dtype = torch.float32) -> Form:
    return Form(inner, outer, dtype, threads=torch.get_num_threads())


def test_the_calls_of_a_product_are_safe_and_have_its_rows() -> None:
    safe = safe_calls(form())
    for num_rows in (0, 1, 5, 31, 200, 256, 257, MAX_ROWS, 1200):
        found = calls_of(form(), num_rows)
        assert set(found) <= set(safe)
        assert sum(call.num_rows for call in found) >= num_rows
        assert sum(call.num_rows for call in found[:-1]) < num_rows or not found


@pytest.mark.parametrize("matrix_first", [False, True])
@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_call_is_the_product(matrix_first: bool, is_plain: bool, has_bias: bool) -> None:
    rows, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for seed, shape in enumerate(((8, 24), (40, 24), (40,)))
    )
    found = KernelCall(8, matrix_first).compute(
        rows, weight.t().contiguous() if is_plain else weight, bias if has_bias else None, is_plain
    )
    expected = torch.nn.functional.linear(rows, weight, bias if has_bias else None)
    assert torch.allclose(found, expected)


def test_few_rows_do_not_take_a_call_of_many() -> None:
    """With rows as the first factor a class of kernels for float32 begins at 16 rows."""
    assert sum(call.num_rows for call in calls_of(form(), 1)) < 16


def test_one_call_alone_is_no_reason_to_be_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that give other bits in another place of the same call are in no class."""
    compute = KernelCall.compute

    def by_place(self: KernelCall, rows: torch.Tensor, *others: object) -> torch.Tensor:
        found = compute(self, rows, *others)  # type: ignore[arg-type]
        return found + torch.arange(len(found)).unsqueeze(1) if self.num_rows == 24 else found

    monkeypatch.setattr(KernelCall, "compute", by_place)
    assert 24 not in {call.num_rows for found in calls._classes(form()) for call in found}


def test_calls_that_sum_in_another_order_are_in_another_class(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = KernelCall.compute

    def reversed_order(self: KernelCall, rows: torch.Tensor, matrix: torch.Tensor, *others: object) -> torch.Tensor:
        if self.num_rows != 40:
            return compute(self, rows, matrix, *others)  # type: ignore[arg-type]
        return compute(self, rows.flip(1), matrix.flip(1), *others)  # type: ignore[arg-type]

    monkeypatch.setattr(KernelCall, "compute", reversed_order)
    classes = [{call.num_rows for call in found} for found in calls._classes(form())]
    assert all(found == {40} or 40 not in found for found in classes)


def test_they_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    first = safe_calls(form())
    safe_calls.cache_clear()
    monkeypatch.setattr(calls, "_classes", lambda _: pytest.fail("measured once more"))
    assert safe_calls(form()) == first


@pytest.mark.parametrize(
    "damaged", [[0], ["a"], [[8]], [[7, False]], [[8, 0]], [[8, [False]]], {"8": 8}, "8", None, []]
)
def test_remembered_calls_that_cannot_be_are_measured_again(damaged: object) -> None:
    first = safe_calls(form())
    calls._measured.put(f"{form()} {calls._kernels()}", damaged)
    safe_calls.cache_clear()
    assert safe_calls(form()) == first
