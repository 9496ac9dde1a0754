"""A `.gguf` file of Nemotron-H, as llama.cpp's converter writes it, gives the numbers of its model."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from diskprefix.daemon.settings import Settings
from diskprefix.errors import ModelError
from diskprefix.runtime.files.gguf.gguf import GgufModel
from diskprefix.runtime.load.loader import load_model
from tests.runtime.plan import plans
from tests.runtime.plan.gguf_files import HEADS, KV_HEADS, Tensors, made, written
from tests.runtime.plan.recurrent_reference import in_float64
from tests.runtime.plan.test_plan import oracle
from tests.runtime.plan.test_slow_decays import error, prompt
from tests.slow_decays import remember

DENSE: dict[str, Any] = {
    "head_dim": 16, "ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
    "layer_norm_epsilon": 3e-3, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
}  # fmt: skip
MIXTURE: dict[str, Any] = DENSE | {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
MODELS = {"nemotron_h": DENSE, "nemotron_h_moe": MIXTURE, "nemotron_h_moe/super": MIXTURE | {"moe_latent_size": 32}}
"""By the architecture of their files; the last one is as Nemotron 3 Super."""
NAMES = {
    "embeddings": "token_embd", "norm_f": "output_norm", "lm_head": "output", "norm": "attn_norm",
    "mixer.in_proj": "ssm_in", "mixer.out_proj": "ssm_out", "mixer.conv1d": "ssm_conv1d", "mixer.norm": "ssm_norm",
    "mixer.dt": "ssm_dt", "mixer.A_log": "ssm_a", "mixer.D": "ssm_d",
    "mixer.q_proj": "attn_q", "mixer.k_proj": "attn_k", "mixer.v_proj": "attn_v", "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up", "mixer.down_proj": "ffn_down", "mixer.gate": "ffn_gate_inp",
    "mixer.gate.e_score_correction": "exp_probs_b",
    "mixer.experts.up_proj": "ffn_up_exps", "mixer.experts.down_proj": "ffn_down_exps",
    "mixer.shared_experts.up_proj": "ffn_up_shexp", "mixer.shared_experts.down_proj": "ffn_down_shexp",
    "mixer.fc1_latent_proj": "ffn_latent_down", "mixer.fc2_latent_proj": "ffn_latent_up",
}  # fmt: skip


@cache
def model_of(name: str) -> PreTrainedModel:
    model = made("nemotron_h", MODELS[name])
    remember(model)
    return model


@cache
def expected_of(name: str) -> torch.Tensor:
    return oracle(in_float64(model_of(name)), ids())


def ids() -> torch.Tensor:
    return prompt() % len(model_of("nemotron_h").get_input_embeddings().weight)


def tensors_of(model: PreTrainedModel) -> Tensors:
    found = Tensors()
    for name, tensor in model.state_dict().items():
        name = name.removeprefix("model.").replace("_bias", ".bias")
        at, _, within = name.removeprefix("layers.").partition(".") if "layers" in name else ("", "", name)
        part, _, end = within.rpartition(".")
        if end not in ("weight", "bias"):
            part, end = within, "" if within in ("mixer.A_log", "mixer.D") else "weight"
        if part == "mixer.A_log":
            tensor = -tensor.exp()
        if not end:
            tensor = tensor[:, None]
        elif part == "mixer.conv1d":
            tensor = tensor.squeeze()
        elif part == "mixer.norm":
            tensor = tensor.reshape(model.config.n_groups, -1)
        found[f"{'blk.' * bool(at)}{at}{'.' * bool(at)}{NAMES[part]}{'.' * bool(end)}{end}"] = tensor
    return found


def write_file(path: Path, name: str, changes: dict[str, Any] | None = None, without: str = "no tensor") -> Path:
    """`changes` replace metadata. `without`: a part of the names of tensors that the file lacks."""
    config = model_of(name).config
    kinds = config.layers_block_type
    width = config.moe_intermediate_size if "moe" in kinds else config.intermediate_size
    values: dict[str, Any] = {
        "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.inner_size": 128,
        "ssm.time_step_rank": 8, "attention.key_length": 16, "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 3e-3, "rope.dimension_count": 16,
        "attention.head_count": HEADS,
        "attention.head_count_kv": [KV_HEADS * (kind == "full_attention") for kind in kinds],
        "feed_forward_length": [width * (kind in ("moe", "mlp")) for kind in kinds],
    }  # fmt: skip
    if "moe" in kinds:
        values |= {
            "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "expert_shared_count": 1,
            "expert_shared_feed_forward_length": 48, "expert_weights_norm": True, "expert_weights_scale": 2.5,
            "expert_group_count": 1, "moe_latent_size": config.moe_latent_size,
        }  # fmt: skip
    tensors = {one: tensor for one, tensor in tensors_of(model_of(name)).items() if without not in one}
    return written(path, name.partition("/")[0], config, values | (changes or {}), tensors)


def of_file(file: Path) -> torch.Tensor:
    read = GgufModel.read(file, print)
    return plans.logits_of(read.decoder_weights("float32"), read.config, ids()[0].numpy())


@pytest.mark.parametrize("name", MODELS)
def test_a_file_remembers_as_its_model_does(name: str, tmp_path: Path) -> None:
    assert error(of_file(write_file(tmp_path / "tiny.gguf", name)), expected_of(name)) < 1e-4


def test_the_epsilon_of_rms_norms_counts_if_there_are_two(tmp_path: Path) -> None:
    file = write_file(tmp_path / "tiny.gguf", "nemotron_h", {"attention.layer_norm_epsilon": 0.5})
    assert error(of_file(file), expected_of("nemotron_h")) < 1e-4


@pytest.mark.parametrize(
    ("without", "changes", "message"),
    [
        ("1.ffn_latent_down", {}, "the file lacks the tensor blk.1.ffn_latent_down.weight"),
        ("no tensor", {"moe_latent_size": None}, "its weights do not fit together"),
    ],
)
def test_a_file_whose_latents_do_not_fit_is_refused(
    without: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = write_file(tmp_path / "tiny.gguf", "nemotron_h_moe/super", changes, without)
    with pytest.raises(ModelError, match=message):
        load_model(Settings(model=str(file)), print)
