"""The scaling of rotary positions: what the metadata of a GGUF file make of a configuration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from diskprefix.model.load.gguf_file import FileTensor
from diskprefix.model.load.gguf_rope import scale_positions


def scaled(parameters: dict[str, Any], values: dict[str, Any], *tensors: FileTensor) -> dict[str, Any]:
    config = SimpleNamespace(rope_parameters=parameters)
    scale_positions(config, {f"any.rope.scaling.{name}": value for name, value in values.items()}, tensors, print)
    return parameters


def divisors(path: Path, name: str, numbers: np.ndarray[Any, Any]) -> FileTensor:
    file = path / name
    numbers.astype(np.float32).tofile(file)
    return FileTensor(name, "F32", numbers.shape, file, 0, np.dtype(np.float32), numbers.shape)


def test_yarn_and_linear_scaling_are_read_for_the_layers_without_a_window() -> None:
    plain = {"rope_type": "default", "rope_theta": 1e6}
    values = {"type": "yarn", "factor": 4.0, "original_context_length": 32768}
    assert scaled({**plain}, values) == {
        **plain,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    }
    both = scaled({"full_attention": {**plain}, "sliding_attention": {**plain}}, {"type": "linear", "factor": 8.0})
    assert both["full_attention"] == {**plain, "rope_type": "linear", "factor": 8.0}
    assert both["sliding_attention"] == plain
    assert scaled({**plain}, {"type": "none", "factor": 8.0}) == plain


def test_the_frequencies_of_llama_3_are_recognised_and_others_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = {
        "rope_theta": 5e5,
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=wanted)
    found, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    of_file = (5e5 ** -(np.arange(32) / 32)) / found.numpy()
    plain = {"rope_type": "default", "rope_theta": 5e5}
    assert scaled({**plain}, {}, divisors(tmp_path, "rope_freqs.weight", of_file)) == wanted
    assert not capsys.readouterr().out
    assert scaled({**plain}, {}, divisors(tmp_path, "rope_freqs.weight", of_file[::-1].copy())) == plain
    assert "rope_freqs.weight is not used" in capsys.readouterr().out
