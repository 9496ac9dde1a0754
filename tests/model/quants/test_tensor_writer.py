"""A file that is written tensor by tensor is one that safetensors reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from diskprefix.model.quants.tensor_writer import TensorWriter

TENSORS = {
    "odd": torch.arange(3, dtype=torch.bfloat16),
    "number": torch.tensor(2.5),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "even": torch.arange(16.0).view(4, 4),
    "turned": torch.arange(8, dtype=torch.int64).view(2, 4).t(),
}


def test_what_is_written_is_read_whatever_its_size(tmp_path: Path) -> None:
    writer = TensorWriter(tmp_path / "model.safetensors", 4096)
    for name, tensor in TENSORS.items():
        writer.add(name, tensor)
    writer.finish({"format": "pt"})
    writer.close()
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(TENSORS)
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in TENSORS.items())


def test_a_header_without_enough_space_is_refused(tmp_path: Path) -> None:
    writer = TensorWriter(tmp_path / "model.safetensors", 64)
    writer.add("even", TENSORS["even"])
    with pytest.raises(ValueError, match="the header of 1 tensors"):
        writer.finish({"format": "pt"})
    writer.close()
