"""What an operator would read or write beside is refused before it gets the addresses, with -O too."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from diskprefix.native.library import Operators
from diskprefix.native.matrix import Matrix
from diskprefix.native.packing import pack

HALF = np.uint16


def zeros(*shape: int, dtype: type = HALF) -> np.ndarray:
    return np.zeros(shape, dtype)


def matrix(rows: int = 32, columns: int = 64) -> Matrix:
    return Matrix(zeros(rows, columns), (rows, columns))


REFUSED: dict[str, Callable[[Operators], object]] = {
    "a matrix that lies turned": lambda _: Matrix(zeros(64, 32).T, (32, 64)),
    "a form of quants that has no code": lambda _: Matrix(
        zeros(2, 2, 16, dtype=np.uint8), (32, 64), bits=7, group=32, numbers=[0.0]
    ),
    "quants of fewer bytes": lambda _: Matrix(
        zeros(2, 2, 543, dtype=np.uint8), (32, 64), bits=8, group=32, numbers=range(256)
    ),
    "rows that end inside a unit": lambda _: Matrix(
        zeros(2, 1, 544, dtype=np.uint8), (32, 32), bits=6, group=16, scales="bytes", numbers=range(64)
    ),
    "a table without numbers": lambda _: Matrix(
        zeros(2, 2, 576 // 2, dtype=np.uint8), (32, 64), bits=4, group=32, has_table=True
    ),
    "a matrix with part of a block": lambda _: Matrix(zeros(40, 64), (40, 64)),
    "fewer weights than a matrix has": lambda _: Matrix(zeros(32, 64), (64, 64)),
    "weights of another type": lambda _: Matrix(zeros(32, 64, dtype=np.float32), (32, 64)),
    "a bias of another type": lambda _: Matrix(zeros(32, 64), (32, 64), bias=zeros(32)),
    "a bias of fewer rows": lambda _: Matrix(zeros(32, 64), (32, 64), bias=zeros(16, dtype=np.float32)),
    "fewer bytes than a matrix has": lambda found: pack(
        found, "Q4_0", zeros(15, 36, dtype=np.uint8), None, zeros(1, 2, 288, dtype=np.uint8)
    ),
    "an order beside the file's rows": lambda found: pack(
        found, "Q4_0", zeros(16, 36, dtype=np.uint8), np.full(16, 16, np.int32), zeros(1, 2, 288, dtype=np.uint8)
    ),
    "units of another size": lambda found: pack(
        found, "Q4_0", zeros(16, 36, dtype=np.uint8), None, zeros(1, 3, 288, dtype=np.uint8)
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tensors_of_another_form_are_refused(operators: Operators, name: str) -> None:
    with pytest.raises(ValueError, match="does not take"):
        REFUSED[name](operators)
