"""Writes a safetensors file tensor by tensor, without all of them in memory at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_utils import str_to_torch_dtype

_KINDS = {dtype: kind for kind, dtype in str_to_torch_dtype.items()}
_ALIGNMENT = 8
"""Bytes. Each tensor begins at a multiple of the largest element, and the format allows no gaps."""


class TensorWriter:
    """Writes the header last, into space that is kept for it at the front. `header_bytes` is its greatest length."""

    def __init__(self, file: Path, header_bytes: int) -> None:
        self._reserved = -(-header_bytes // _ALIGNMENT) * _ALIGNMENT
        self._out = file.open("wb")
        self._out.seek(8 + self._reserved)
        self._at = 0
        self._entries: dict[str, Any] = {}
        self._uneven: dict[str, torch.Tensor] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Writes a tensor. One that would leave those after it unaligned is kept in memory until the end."""
        tensor = tensor.detach().contiguous()
        if tensor.nbytes % _ALIGNMENT:
            self._uneven[name] = tensor.clone()
        else:
            self._write(name, tensor)

    def _write(self, name: str, tensor: torch.Tensor) -> None:
        self._out.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        offsets = [self._at, self._at + tensor.nbytes]
        self._entries[name] = {"dtype": _KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        self._at = offsets[1]

    def finish(self, metadata: dict[str, str]) -> None:
        """Writes what is left and the header. Raises `ValueError` if there is not enough space for it."""
        for name, tensor in sorted(self._uneven.items(), key=lambda item: -item[1].element_size()):
            self._write(name, tensor)
        header = json.dumps({"__metadata__": metadata, **self._entries}, separators=(",", ":")).encode()
        if len(header) > self._reserved:
            raise ValueError(f"the header of {len(self._entries)} tensors takes {len(header)} bytes")
        self._out.seek(0)
        self._out.write(self._reserved.to_bytes(8, "little"))
        self._out.write(header.ljust(self._reserved))

    def close(self) -> None:
        self._out.close()
