"""Files that mix types, as Q4_K_M and those called dynamic do: what a model joins stays in the quants of the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from diskprefix.runtime.files.file_matrix import MatrixPacking
from diskprefix.runtime.files.gguf.gguf import GgufModel
from diskprefix.runtime.files.gguf.gguf_weights import GgufWeights
from diskprefix.runtime.plan.quants.forms import compiled
from tests.arrays import tensor_of
from tests.native.test_products import content_of
from tests.runtime.plan import plans
from tests.runtime.plan.gguf_files import RMS, Tensors, made, rope, stored, written
from tools.benchmarks.file_models import DELTA, EXPERTS, FACTORS, GRANITE_HYBRID, MAMBA, SHARED

pytestmark = pytest.mark.usefixtures("cache")
HIDDEN, LAYERS = 256, 2
WIDE: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": 256, "num_hidden_layers": LAYERS}
DELTA_LAYERS = {"num_hidden_layers": LAYERS, "layer_types": ["linear_attention", "full_attention"]}
MIXTURE = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 256}


def qwen3_next() -> PreTrainedModel:
    sizes = DELTA | EXPERTS | SHARED | WIDE | DELTA_LAYERS | {"rope_parameters": rope(partial_rotary_factor=0.25)}
    return made("qwen3_next", sizes | {"rms_norm_eps": 3e-3, "norm_topk_prob": True})


def of_qwen3_next(model: PreTrainedModel) -> Tensors:
    """What the converter changes in layers with the delta rule; the joined matrix is replaced."""
    state, found = model.state_dict(), Tensors()
    usual = {name: one for name, one in state.items() if "linear_attn" not in name}
    at = "model.layers.0.linear_attn."
    found["ssm_ba.weight"] = state[f"{at}in_proj_ba.weight"]
    found["ssm_conv1d.weight"] = state[f"{at}conv1d.weight"].squeeze(1)
    found["ssm_a"] = -state[f"{at}A_log"].exp()
    found["ssm_dt.bias"] = state[f"{at}dt_bias"]
    found["ssm_norm.weight"] = state[f"{at}norm.weight"]
    found["ssm_out.weight"] = state[f"{at}out_proj.weight"]
    return stored(usual, "qwen3next", LAYERS) | {f"blk.0.{name}": one for name, one in found.items()}


def granite() -> PreTrainedModel:
    sizes = FACTORS | MAMBA | GRANITE_HYBRID | WIDE | {"num_local_experts": 0, "num_experts_per_tok": 0}
    sizes |= {"layer_types": ["full_attention"] * LAYERS, "tie_word_embeddings": True, "rms_norm_eps": 3e-3}
    return made("granitemoehybrid", sizes)


def of_granite(model: PreTrainedModel) -> Tensors:
    state = {
        name: one for name, one in model.state_dict().items() if "input_linear" not in name and name != "lm_head.weight"
    }
    state = {name.replace("shared_mlp.output_linear", "mlp.down_proj"): one for name, one in state.items()}
    return stored(state, "granitehybrid", LAYERS)


FILES: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[PreTrainedModel], Tensors], dict[str, Any]]] = {
    "qwen3next": (
        qwen3_next,
        of_qwen3_next,
        MIXTURE
        | RMS
        | {"ssm.conv_kernel": 4, "ssm.state_size": 32, "ssm.group_count": 2, "ssm.time_step_rank": 4}
        | {"ssm.inner_size": 128, "attention.recurrent_layers": [True, False], "rope.dimension_count": 16}
        | {"attention.key_length": 64, "attention.value_length": 64, "expert_shared_feed_forward_length": 256}
        | {"rope.freq_base": 250000.0},
    ),
    "granitehybrid": (
        granite,
        of_granite,
        RMS
        | {"embedding_scale": 3.0, "logit_scale": 2.0, "residual_scale": 0.5, "attention.scale": 0.11}
        | {"ssm.conv_kernel": 4, "ssm.state_size": 32, "ssm.group_count": 2, "ssm.time_step_rank": 8}
        | {"ssm.inner_size": 512, "rope.scaling.finetuned": False, "attention.head_count_kv": [2] * LAYERS}
        | {"expert_count": 0, "expert_used_count": 0},
    ),
}
"""By architecture: the model, the tensors of its file but those that are joined, and the metadata."""
JOINED = {
    "qwen3next": {"linear_attn.in_proj_qkvz": {"attn_qkv": 256, "attn_gate": 128}},
    "granitehybrid": {"shared_mlp.input_linear": {"ffn_gate": 256, "ffn_up": 256}},
}
"""Joined matrices, and the rows of their tensors."""


def write(path: Path, architecture: str, kinds: tuple[str, str]) -> Path:
    make, tensors_of, values = FILES[architecture]
    model = make()
    raw = {}
    num_layers = 1 if architecture == "qwen3next" else LAYERS
    for layer in range(num_layers):
        for tensors in JOINED[architecture].values():
            for kind, (name, rows) in zip(kinds, tensors.items(), strict=True):
                content = content_of(kind, rows, HIDDEN, seed=layer)
                raw[f"blk.{layer}.{name}.weight"] = gguf.GGMLQuantizationType[kind], content
    return written(path, architecture, model.config, values, tensors_of(model), raw=raw)


def weights_of(file: Path, *, has_quants: bool) -> tuple[GgufWeights, Any]:
    read = GgufModel.read(file, print)
    return read.decoder_weights("bfloat16", MatrixPacking(compiled()) if has_quants else None), read.config


@pytest.mark.cases(3)
@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("Q6_K", "Q4_K"), ("Q8_0", "BF16"), ("Q4_K", "Q4_K")])
@pytest.mark.parametrize("architecture", FILES)
def test_joined_matrices_of_two_types_keep_their_quants(
    architecture: str, kinds: tuple[str, str], tmp_path: Path
) -> None:
    file = write(tmp_path / "a.gguf", architecture, kinds)
    weights, config = weights_of(file, has_quants=True)
    found = plans.logits_of(weights, config)
    kept = {name: one for name, one in weights.named() if any(joined in name for joined in JOINED[architecture])}
    (joined,) = JOINED[architecture]
    names = {name.partition(f"{joined}")[2] for name in kept}
    parts = {f".{name}" for name in JOINED[architecture][joined]}
    assert names == ({""} if kinds[0] == kinds[1] else parts)
    is_plain = {name.rpartition(".")[2]: one.dtype == np.uint16 for name, one in kept.items()}
    assert sum(is_plain.values()) == kinds.count("BF16")
    plain, _ = weights_of(file, has_quants=False)
    expected = plans.logits_of(plain, config)
    # Weights in quants are not rounded to bfloat16; a router may choose another expert.
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(errors.median()) < 0.03
    # In the order of the parameter: each part's rows are those of the whole matrix.
    for name in kept:
        layer = name.partition(joined)[0]
        whole = tensor_of(plain.tensor(f"{layer}{joined}.weight"))
        for part in weights.parts(f"{layer}{joined}.weight"):
            if isinstance(part.weights, np.ndarray):
                assert torch.equal(whole[torch.from_numpy(part.places)], tensor_of(part.weights))


def test_memory_is_that_of_the_quants(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", "granitehybrid", ("Q4_K", "Q6_K"))
    weights, config = weights_of(file, has_quants=True)
    plans.logits_of(weights, config)
    num_bytes = {name.rpartition(".")[2]: one.nbytes for name, one in weights.named() if "input_linear" in name}
    assert num_bytes == {"ffn_gate": 256 * 256 * 4.625 / 8, "ffn_up": 256 * 256 * 6.5625 / 8}
