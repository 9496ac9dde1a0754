"""Weights as they are in memory: what identifies them, and whether they were changed since.

The daemon identifies a model by its files. Whoever works with a model in a notebook may have changed what the files
said: trained it, merged an adapter, edited a layer. So the tensors themselves are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

import torch

from diskprefix.errors import ModelError
from diskprefix.tokens import checksum

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PIECE_BYTES = 64 << 20
"""Read at a time: what is on a GPU is brought to main memory for it."""

Stamp: TypeAlias = tuple[object, ...]


def memory_bytes(model: PreTrainedModel) -> int:
    """What `memory_digest` will read."""
    return sum(tensor.nbytes for _, tensor in _distinct(model))


def memory_digest(model: PreTrainedModel, advance: Callable[[int], None]) -> str:
    """Identity of the content of all parameters and buffers, wherever they are: 32 hex digits.

    `advance` is told after each piece how many bytes were read so far. Raises `ModelError` for weights that are not in
    memory (offloaded ones) or cannot be read as bytes.
    """
    digest, done = hashlib.sha256(), 0
    try:
        for name, tensor in _distinct(model):
            digest.update(f"{len(name)}:{name}:{tensor.dtype}:{tuple(tensor.shape)}:".encode())
            flat = tensor.reshape(-1).view(torch.uint8)
            for start in range(0, len(flat), _PIECE_BYTES):
                piece = flat[start : start + _PIECE_BYTES].cpu().numpy()
                digest.update(checksum(piece.data).to_bytes(8, "little"))
                done += len(piece)
                advance(done)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        first_line = next(iter(str(error).splitlines()), "")
        raise ModelError(f"the weights of {type(model).__name__} cannot be read as they are: {first_line}") from error
    return digest.hexdigest()[:32]


def stamp(model: PreTrainedModel) -> Stamp:
    """Equal as long as nobody put other tensors into the model or wrote to them.

    It reads no weights: torch counts the writes to a tensor. What is written through `tensor.data` it does not count.
    """
    tensors = [*model.parameters(), *model.buffers()]
    return tuple((t.data_ptr(), t.dtype, t.device, 0 if t.is_inference() else t._version) for t in tensors)


def _distinct(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """All that the model computes with: its state dict, which quantised layers add their scales to, and the buffers
    that are not in it. Tied weights come once."""
    named = dict(model.named_buffers()) | model.state_dict()
    seen: set[tuple[object, ...]] = set()
    for name, value in sorted(named.items()):
        if not isinstance(value, torch.Tensor):
            raise ModelError(f"the weights of {type(model).__name__} cannot be read as they are: {name} is no tensor")
        tensor = value.detach()
        place = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        # The empty tensor is nowhere, and so are those that are not in memory.
        if tensor.data_ptr() and place in seen:
            continue
        seen.add(place)
        yield name, tensor
