"""Functions whose calls of torch no mode sees."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def unseen(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Returns a function that does the same, but hides its calls of torch from each `TorchFunctionMode`.

    A mode sees the attributes of tensors too. A layer of a mixture reads a hundred of them around its operators, and
    each one would take microseconds.
    """

    @wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call
