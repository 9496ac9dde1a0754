"""DeepSeek's layers in a GGUF file are those of transformers' model, whatever the age of the file."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from diskprefix.errors import ModelError
from diskprefix.model.exact.mixtures import matrices_of
from diskprefix.model.exact.self_check import make_exact
from diskprefix.model.load.fit import needs_of_gguf
from diskprefix.model.load.loader import load_model
from diskprefix.model.quants.quantised import QuantisedLinear
from diskprefix.model.quants.quantised_experts import QuantisedExperts
from diskprefix.native.library import operators
from diskprefix.settings import Settings
from tests.model import tiny

HEADS, KEY, ROTARY, VALUE, LATENT = 4, 32, 16, 32, 64
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": KEY,
    "qk_rope_head_dim": ROTARY,
    "v_head_dim": VALUE,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "vocab_size": len(tiny.tokens()),
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
KINDS: dict[str, dict[str, Any]] = {
    "V2-Lite": {
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "topk_method": "greedy",
        "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "V2": {
        "model_type": "deepseek_v2",
        "q_lora_rank": 32,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 16.0,
    },
    "V3": {
        "model_type": "deepseek_v3",
        "q_lora_rank": 32,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "dense": {"model_type": "deepseek_v3", "q_lora_rank": 32, "first_k_dense_replace": 3},
}
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}


def type_of(model: PreTrainedModel) -> gguf.GGMLQuantizationType:
    """Q5_0 is what llama.cpp gives DeepSeek V2 Lite's experts in Q4_K_M, and transformers does not know it."""
    types = gguf.GGMLQuantizationType
    return types.Q5_0 if model.config.q_lora_rank is None else types.Q8_0


def made(kind: str) -> PreTrainedModel:
    """A random model; biases that choose experts are not zeros."""
    from transformers import AutoConfig

    changes = dict(KINDS[kind])
    torch.manual_seed(0)
    config = AutoConfig.for_model(**(SIZES | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("e_score_correction_bias", "norm.weight")):
            tensor.data += torch.randn_like(tensor) * 0.1
        elif tensor.ndim > 1:
            tensor.data.normal_(0, 0.1)
    return model


def tensors_of(model: PreTrainedModel, *, is_split: bool) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors as llama.cpp names them. `is_split`: as newer files have the matrix that expands latents."""
    ends = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    ends["lm_head.weight"] = "output.weight"
    found: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name in ends:
            found[ends[name]] = tensor
            continue
        layer, _, inner = name.removeprefix("model.layers.").partition(".")
        at, (module, _, end) = f"blk.{layer}.", inner.rpartition(".")
        if module == "self_attn.kv_b_proj" and is_split:
            keys, values = tensor.view(HEADS, KEY + VALUE, LATENT).split([KEY, VALUE], dim=1)
            found |= {f"{at}attn_k_b.weight": keys.transpose(1, 2), f"{at}attn_v_b.weight": values}
        elif module == "self_attn.kv_b_proj":
            found[f"{at}attn_kv_b.weight"] = tensor
        elif end == "e_score_correction_bias":
            found[f"{at}exp_probs_b.bias"] = tensor
        elif end == "gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            found |= {f"{at}ffn_gate_exps.weight": gate, f"{at}ffn_up_exps.weight": up}
        elif end == "down_proj":
            found[f"{at}ffn_down_exps.weight"] = tensor
        else:
            found[f"{at}{NAMES[module]}.{end}"] = tensor
    return {name: tensor.detach().contiguous().numpy() for name, tensor in found.items()}


def values_of(model: PreTrainedModel, *, is_split: bool) -> dict[str, Any]:
    """The metadata as llama.cpp's converter writes them; older ones where not `is_split`."""
    config = model.config
    rope = config.rope_parameters
    found: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": HEADS,
        "attention.head_count_kv": 1 if is_split else HEADS,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.kv_lora_rank": LATENT,
        "attention.key_length": LATENT + ROTARY if is_split else KEY + ROTARY,
        "attention.value_length": LATENT if is_split else VALUE,
        "rope.dimension_count": ROTARY,
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": config.vocab_size,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
    }
    if is_split:
        found |= {"attention.key_length_mla": KEY + ROTARY, "attention.value_length_mla": VALUE}
    if config.q_lora_rank is not None:
        found["attention.q_lora_rank"] = config.q_lora_rank
    if rope["rope_type"] == "yarn":
        found |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if config.first_k_dense_replace < config.num_hidden_layers:
        is_third = config.model_type == "deepseek_v3"
        found |= {"expert_count": config.n_routed_experts, "expert_used_count": config.num_experts_per_tok}
        found["expert_weights_scale"] = float(config.routed_scaling_factor)
        if (config.n_group or 1) > 1:
            found |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
        if is_third:
            found["expert_weights_norm"] = config.norm_topk_prob
        if is_split:
            found["expert_gating_func"] = 2 if is_third else 1
    return found


def write(
    path: Path,
    model: PreTrainedModel,
    *,
    is_split: bool = True,
    values: dict[str, Any] | None = None,
    more: dict[str, np.ndarray[Any, Any]] | None = None,
) -> Path:
    """Writes the model as a file, its matrices quantised. `values` replace metadata, or leave them out."""
    writer, kind = gguf.GGUFWriter(path, "deepseek2"), type_of(model)
    for name, value in (values_of(model, is_split=is_split) | (values or {})).items():
        if value is not None:
            tiny.add_value(writer, f"deepseek2.{name}", value)
    tiny.add_tokenizer(writer)
    for name, tensor in (tensors_of(model, is_split=is_split) | (more or {})).items():
        if tensor.ndim > 1 and "ffn_gate_inp" not in name:
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    tiny.finish(writer)
    return path


def dequantised(model: PreTrainedModel, *, is_split: bool) -> PreTrainedModel:
    """The model with the numbers that its file has, as the `gguf` package reads them, in bfloat16."""
    tensors, kind = tensors_of(model, is_split=is_split), type_of(model)
    for name, tensor in tensors.items():
        if tensor.ndim > 1 and "ffn_gate_inp" not in name:
            tensors[name] = gguf.dequantize(gguf.quantize(tensor, kind), kind)
    state = model.state_dict()
    source = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
    for name in state:
        layer, _, inner = name.removeprefix("model.layers.").partition(".")
        at, module = f"blk.{layer}.", inner.rpartition(".")[0]
        if module == "self_attn.kv_b_proj" and is_split:
            parts = [source[f"{at}attn_k_b.weight"].transpose(1, 2), source[f"{at}attn_v_b.weight"]]
            state[name] = torch.cat(parts, dim=1).flatten(0, 1)
        elif module == "self_attn.kv_b_proj":
            state[name] = source[f"{at}attn_kv_b.weight"]
        elif name.endswith("gate_up_proj"):
            state[name] = torch.cat([source[f"{at}ffn_{part}_exps.weight"] for part in ("gate", "up")], dim=1)
        elif name.endswith("experts.down_proj"):
            state[name] = source[f"{at}ffn_down_exps.weight"]
        elif module in NAMES and name.endswith("weight"):
            state[name] = source[f"{at}{NAMES[module]}.weight"]
    state["model.embed_tokens.weight"], state["lm_head.weight"] = source["token_embd.weight"], source["output.weight"]
    found, info = type(model).from_pretrained(
        None, config=model.config, state_dict=state, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(info.values())
    return found.eval()


def loaded(file: Path, weights: str) -> PreTrainedModel:
    return load_model(Settings(model=str(file), weights=weights), lambda _: None).model


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.arange(96)[None], use_cache=False).logits[0]
    return logits.float()


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The median of the tokens' errors: a router may choose another expert where two are nearly equal."""
    return float(((found - exact).norm(dim=1) / exact.norm(dim=1)).median())


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("is_split", [True, False], ids=["new", "old"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_gives_the_parameters_and_logits_of_the_model(kind: str, is_split: bool, tmp_path: Path) -> None:
    model = made(kind)
    expected = dequantised(model, is_split=is_split)
    file = write(tmp_path / "tiny.gguf", model, is_split=is_split)
    plain = loaded(file, "native")
    assert type(plain) is type(expected)
    state = plain.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.state_dict().items())
    assert torch.equal(logits_of(plain), logits_of(expected))
    served = loaded(file, "auto")
    kept = {name: module for name, module in served.named_modules() if isinstance(module, QuantisedLinear)}
    assert {name.rpartition(".")[2] for name in kept} >= {"kv_a_proj_with_mqa", "o_proj", "down_proj"}
    assert "model.layers.0.self_attn.kv_b_proj" not in kept
    for name, module in kept.items():
        assert torch.equal(module.weight, expected.get_submodule(name).weight), name
    mixtures = {name: module for name, module in served.named_modules() if isinstance(module, QuantisedExperts)}
    assert len(mixtures) == (0 if kind == "dense" else 2)
    for name, mixture in mixtures.items():
        for part, (weight, _) in matrices_of(expected.get_submodule(name)).items():
            assert torch.equal(mixture.parts()[part].weight, weight), name
    # All of the difference is rounding to bfloat16, of which transformers has as much on the same numbers.
    exact = logits_of(copy.deepcopy(expected).float())
    assert distance(logits_of(served), exact) < 1.5 * distance(logits_of(expected), exact)
    assert needs_of_gguf(file, "auto").weights_bytes == pytest.approx(needs_of(served), rel=0.02)


def needs_of(model: PreTrainedModel) -> int:
    return sum({part.data_ptr(): part.nbytes for part in (*model.parameters(), *model.buffers())}.values())


@pytest.mark.usefixtures("cache")
def test_what_chooses_experts_keeps_its_precision(tmp_path: Path) -> None:
    model = made("V3")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    file = write(tmp_path / "tiny.gguf", model)
    for weights in ("native", "auto"):
        found = loaded(file, weights).state_dict()[name]
        assert found.dtype is torch.float32
        assert torch.equal(found, model.state_dict()[name])


@pytest.mark.usefixtures("cache")
def test_blocks_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    model = made("V3")
    sizes = {"nextn.eh_proj": (64, 128), "attn_norm": (64,)}
    more = {f"blk.3.{name}.weight": np.ones(size, np.float32) for name, size in sizes.items()}
    plain = write(tmp_path / "plain.gguf", model)
    file = write(tmp_path / "tiny.gguf", model, values={"block_count": 4, "nextn_predict_layers": 1}, more=more)
    assert needs_of_gguf(file, "auto").weights_bytes == needs_of_gguf(plain, "auto").weights_bytes
    assert torch.equal(logits_of(loaded(file, "native")), logits_of(loaded(plain, "native")))


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attention.kv_lora_rank": None}, "the file lacks deepseek2.attention.kv_lora_rank"),
        ({"expert_weights_norm": True}, "experts that are weighted so are not served"),
        ({"attention.temperature_scale": 0.1}, "queries that are scaled by their position"),
    ],
)
def test_what_no_model_computes_is_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf", made("V2-Lite"), values=values)
    with pytest.raises(ModelError, match=message):
        loaded(file, "native")


@pytest.mark.usefixtures("cache")
def test_latent_attention_of_a_file_is_exact_at_every_token(tmp_path: Path) -> None:
    if operators() is None:
        pytest.skip("no compiled operators")
    model = loaded(write(tmp_path / "tiny.gguf", made("V3")), "auto")
    layout, reason = make_exact(model)
    assert (layout.exact_at, reason) == ("token", "")
