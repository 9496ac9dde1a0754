"""Describes what a model's order of operations depends on beside its configuration: code and forms of its parts.

Two models with one configuration and one structure call the same kernels with tensors of the same shapes and places in
memory, whatever numbers are in these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from itertools import chain
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from diskprefix.model.exact.layer_kinds import ALIGNMENT

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def structure_of(model: PreTrainedModel) -> str:
    """Returns a digest, the same in every process, of each module: its class, the types, shapes and places of its
    tensors, which of these are one, the form of its quants, and what its methods are replaced by."""
    digest, known = hashlib.sha256(), dict[int, int]()
    for name, module in model.named_modules():
        for line in (name, *_lines(module, known)):
            digest.update(f"{line}\n".encode())
    return digest.hexdigest()


def _lines(module: nn.Module, known: dict[int, int]) -> Iterator[str]:
    yield f"{type(module).__module__}.{type(module).__qualname__} {vars(module).get('form', '')}"
    for name, tensor in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
        first = known.setdefault(tensor.data_ptr(), len(known)) if tensor.numel() else 0
        place = tensor.data_ptr() % ALIGNMENT
        yield f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {place} {first}"
    for name, value in sorted(vars(module).items()):
        if callable(value) and not isinstance(value, nn.Module | type):
            yield f"{name} {_named(value)}"


def _named(value: Any) -> str:
    """Returns the names of what a value is made of."""
    match value:
        case partial():
            return f"{_named(value.func)}({', '.join(map(_named, value.args))})"
        case MethodType():
            return f"{_named(value.__self__)}.{value.__name__}"
        case FunctionType():
            return f"{value.__module__}.{value.__qualname__}"
        case torch.Tensor():
            return f"{value.dtype} {tuple(value.shape)}"
        case nn.Module():
            return type(value).__qualname__
    return f"{type(value).__module__}.{type(value).__qualname__}"
