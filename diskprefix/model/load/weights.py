"""Weights in memory: their identity, and whether they were changed.

A user of the library may have changed a model since it was read, so the library identifies it by its tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from diskprefix.errors import ModelError
from diskprefix.printable import first_line
from diskprefix.tokens import checksum

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PIECE_BYTES = 64 << 20
"""Read at a time. Weights on a GPU are copied to main memory for this."""


def memory_digest(model: PreTrainedModel) -> str:
    """Returns the identity of the content of all parameters and buffers, on any device: 32 hex digits.

    Raises `ModelError` for weights that are not in memory (offloaded ones) or cannot be read as bytes.
    """
    digest = hashlib.sha256()
    try:
        for name, tensor in _distinct(model):
            digest.update(f"{len(name)}:{name}:{tensor.dtype}:{tuple(tensor.shape)}:".encode())
            flat = tensor.reshape(-1).view(torch.uint8)
            for start in range(0, len(flat), _PIECE_BYTES):
                piece = flat[start : start + _PIECE_BYTES].cpu().numpy()
                digest.update(checksum(piece.data).to_bytes(8, "little"))
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        name = type(model).__name__
        raise ModelError(f"the weights of {name} cannot be read as they are: {first_line(error)}") from error
    return digest.hexdigest()[:32]


def stamp(model: PreTrainedModel) -> tuple[object, ...]:
    """Returns a value that stays equal as long as no tensor of the model is replaced or written to.

    It does not read the weights: torch counts the writes to a tensor. Writes through `tensor.data` are not counted.
    """
    tensors = [*model.parameters(), *model.buffers()]
    return tuple((t.data_ptr(), t.dtype, t.device, 0 if t.is_inference() else t._version) for t in tensors)


def _distinct(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors that the model computes with: its state dict, to which quantised layers add their scales, and
    the buffers that are not in it. Tied weights come once."""
    named = dict(model.named_buffers()) | model.state_dict()
    seen: set[tuple[object, ...]] = set()
    for name, value in sorted(named.items()):
        if not isinstance(value, torch.Tensor):
            raise ModelError(f"the weights of {type(model).__name__} cannot be read as they are: {name} is no tensor")
        tensor = value.detach()
        place = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        # Empty tensors, and those that are not in memory, have no address.
        if tensor.data_ptr() and place in seen:
            continue
        seen.add(place)
        yield name, tensor
