"""The scaling of rotary positions: what the metadata of a GGUF file make of a configuration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from diskprefix.model.load.gguf_header import FileTensor
from diskprefix.model.load.gguf_rope import scale_positions


def scaled(parameters: dict[str, Any], values: dict[str, Any], *tensors: FileTensor) -> dict[str, Any]:
    config = SimpleNamespace(rope_parameters=parameters, head_dim=64, max_position_embeddings=8192)
    scale_positions(config, {f"deepseek2.rope.scaling.{name}": value for name, value in values.items()}, tensors, print)
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


def test_the_length_correction_of_deepseek_is_read() -> None:
    values = {"type": "yarn", "factor": 40.0, "yarn_log_multiplier": float(np.float32(0.0707))}
    found = scaled({"rope_type": "default", "rope_theta": 1e4}, values)
    assert (found["mscale"], found["mscale_all_dim"]) == (0.707, 0.707)


def test_the_frequencies_of_llama_3_are_recognised_and_others_are_used_and_said(
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
    other = of_file[::-1].astype(np.float32)
    of_other = scaled({**plain}, {}, divisors(tmp_path, "rope_freqs.weight", other))
    assert "without the cache: rope_freqs.weight" in capsys.readouterr().out
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=of_other)
    for length in (1, 1 << 20):
        found, factor = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), length)
        assert factor == 1.0
        np.testing.assert_allclose(found.numpy(), 5e5 ** -(np.arange(32) / 32) / other, rtol=1e-5)


def test_phi_3_has_other_frequencies_for_short_and_long_texts(tmp_path: Path) -> None:
    short, long = np.linspace(1, 2, 24), np.linspace(3, 60, 24)
    values = {"original_context_length": 4096, "attn_factor": 1.19}
    tensors = [divisors(tmp_path, f"rope_factors_{name}.weight", of) for name, of in (("short", short), ("long", long))]
    found = scaled({"rope_type": "default", "rope_theta": 1e4}, values, *tensors)
    config = Phi3Config(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_parameters=found,
    )
    # Phi-4-mini rotates three quarters of a head.
    assert found["partial_rotary_factor"] == 0.75
    for length, expected in ((4096, short), (4097, long)):
        frequencies, factor = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), length)
        assert factor == 1.19
        of_file = expected.astype(np.float32) * 1e4 ** (np.arange(24) / 24)
        np.testing.assert_allclose(frequencies.numpy(), 1 / of_file, rtol=1e-5)
