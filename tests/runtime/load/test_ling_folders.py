"""Folders of Ling 2.0, of which transformers has no class, give what GLM 4 MoE computes with the same weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from diskprefix.daemon.settings import Settings
from diskprefix.errors import ModelError
from diskprefix.native.library import operators
from diskprefix.runtime.load.loader import load_model
from diskprefix.runtime.load.self_check import check
from diskprefix.runtime.plan.planned import plan_layout
from tests.runtime.files.gguf.test_gguf_models import FAMILIES, TOKENS, logits_of, require_equal
from tests.runtime.plan import plans, tiny
from tests.runtime.plan.gguf_files import made

pytestmark = pytest.mark.usefixtures("cache")
PUBLISHED = {
    "model_type": "bailing_moe",
    "architectures": ["BailingMoeV2ForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_bailing_moe_v2.BailingMoeV2ForCausalLM"},
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "norm_topk_prob": True,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_bias": False,
    "use_rmsnorm": True,
    "rope_scaling": None,
    "router_dtype": "fp32",
    "torch_dtype": "bfloat16",
}
"""What the `config.json` of Ling mini 2.0 says, beside sizes."""
NAMES = {
    "model.embed_tokens": "model.word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
}
SIZES = """
    hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size head_dim
    max_position_embeddings first_k_dense_replace num_experts_per_tok moe_intermediate_size n_group topk_group
    routed_scaling_factor rms_norm_eps tie_word_embeddings
"""
"""What both configurations call the same."""


def ling() -> PreTrainedModel:
    """A model of GLM 4 MoE with the sizes of a tiny Ling."""
    return made(FAMILIES["Ling mini 2.0"][1], FAMILIES["Ling mini 2.0"][2])


def published(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns weights as published folders have them: each expert alone, one matrix for queries, keys and values."""
    found = dict[str, torch.Tensor]()
    for name, tensor in state.items():
        stem, _, part = name.rpartition(".")
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        if stem.endswith("self_attn.q_proj"):
            others = (state[f"{stem.removesuffix('q_proj')}{kind}_proj.{part}"] for kind in "kv")
            joined = name.replace("self_attn.q_proj", "attention.query_key_value")
            found[joined] = torch.cat([tensor, *others])
        elif part == "gate_up_proj":
            for number, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                found |= {f"{stem}.{number}.gate_proj.weight": gate, f"{stem}.{number}.up_proj.weight": up}
        elif part == "down_proj":
            found |= {f"{stem}.{number}.down_proj.weight": expert for number, expert in enumerate(tensor)}
        elif not stem.endswith(("self_attn.k_proj", "self_attn.v_proj")):
            found[name] = tensor
    return {name: tensor.contiguous().clone() for name, tensor in found.items()}


def write(folder: Path, model: PreTrainedModel, **changes: Any) -> Path:
    config = model.config
    sizes = {name: getattr(config, name) for name in SIZES.split()}
    sizes |= {"num_experts": config.n_routed_experts, "num_shared_experts": config.n_shared_experts}
    sizes |= {"rope_theta": 600000, "partial_rotary_factor": 0.5}
    tiny.tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(PUBLISHED | sizes | changes))
    save_file(published(model.state_dict()), folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_folder_gives_the_logits_of_its_model(tmp_path: Path) -> None:
    model = ling()
    served = load_model(Settings(model=str(write(tmp_path, model)), dtype="float32"), lambda _: None)
    assert served.weights is not None
    require_equal(plans.logits_of(served.weights, served.config, TOKENS), logits_of(model))


def test_a_folder_is_exact_at_every_token(tmp_path: Path) -> None:
    if operators() is None:
        pytest.skip("no compiled operators")
    served = load_model(Settings(model=str(write(tmp_path, ling()))), lambda _: None)
    assert served.weights is not None
    assert served.dtype == "bfloat16"
    check(served.weights, served.config, plan_layout(served.weights, served.config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BailingMoeForCausalLM"]}, "it comes with code of its own"),
        ({"score_function": "softmax"}, "models alone are served that weigh experts by normed sigmoids"),
        ({"norm_topk_prob": False}, "models alone are served that weigh experts by normed sigmoids"),
        ({"norm_head": True}, "a normed matrix of logits"),
    ],
)
def test_a_folder_of_another_model_of_the_same_name_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, ling(), auto_map={"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}, **changes)
    with pytest.raises(ModelError, match=message) as raised:
        load_model(Settings(model=str(folder)), lambda _: None)
    assert "\n" not in str(raised.value)
