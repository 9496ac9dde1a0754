"""Tensors of torch as arrays, and back, over the same memory (`kv.numbers`)."""

from __future__ import annotations

import numpy as np
import torch


def array_of(numbers: torch.Tensor) -> np.ndarray:
    """bfloat16 becomes uint16."""
    numbers = numbers.detach()
    return (numbers.view(torch.uint16) if numbers.dtype is torch.bfloat16 else numbers).numpy()


def tensor_of(numbers: np.ndarray) -> torch.Tensor:
    """uint16 becomes bfloat16."""
    found = torch.from_numpy(numbers)
    return found.view(torch.bfloat16) if numbers.dtype == np.uint16 else found
