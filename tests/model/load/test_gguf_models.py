"""A GGUF file gives the numbers of the model that llama.cpp's converter would write it from, whatever its age."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from diskprefix.errors import ModelError
from diskprefix.model.gguf.metadata import Metadata
from diskprefix.model.load.fit import needs_of_gguf
from diskprefix.model.load.gguf import GgufModel
from diskprefix.model.load.gguf_header import TYPES, FileTensor, GgufHeader
from diskprefix.model.load.gguf_rope import scale_positions
from diskprefix.model.load.loader import load_model
from diskprefix.model.planned import plan_layout
from diskprefix.model.quants.file_matrix import MatrixPacking
from diskprefix.model.quants.forms import compiled
from diskprefix.model.self_check import check
from diskprefix.model.weights import ExpertsForm
from diskprefix.native.library import operators
from diskprefix.settings import Settings
from tests.arrays import array_of
from tests.model import plans, tiny
from tests.model.tensor_weights import require_numbers

pytestmark = pytest.mark.usefixtures("cache")
F32 = gguf.GGMLQuantizationType.F32
Tensors = dict[str, torch.Tensor]
"""By the names of llama.cpp."""
HEADS, KV_HEADS, WINDOW = 4, 2, 16
BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": len(tiny.tokens()),
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
RMS = {"attention.layer_norm_rms_epsilon": 3e-3}
EPSILON = {"rms_norm_eps": 3e-3}
# The root of its hidden size has no rounding, by which it scales embeddings.
GEMMA = EPSILON | {"head_dim": 32, "sliding_window": WINDOW, "tie_word_embeddings": True}
GEMMA_VALUES: dict[str, Any] = RMS | {
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.sliding_window": WINDOW,
}


def rope(base: float = 250000.0, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base, **more}


# By name: the architecture of the file, the model type, what its configuration has, and the metadata for that.
FAMILIES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "Gemma 3 27B": (
        "gemma3",
        "gemma3_text",
        GEMMA
        | {"num_hidden_layers": 62, "query_pre_attn_scalar": 16}
        | {"rope_parameters": {"sliding_attention": rope(20000.0), "full_attention": rope()}},
        GEMMA_VALUES | {"rope.freq_base": 250000.0, "rope.freq_base_swa": 20000.0},
    ),
    "Gemma 3": (
        "gemma3",
        "gemma3_text",
        GEMMA
        | {"query_pre_attn_scalar": 32, "final_logit_softcapping": 2.0}
        | {"rope_parameters": {"sliding_attention": rope(10000.0), "full_attention": rope()}},
        GEMMA_VALUES | {"rope.freq_base": 250000.0, "final_logit_softcapping": 2.0},
    ),
    "Gemma 2 27B": (
        "gemma2",
        "gemma2",
        GEMMA | {"num_hidden_layers": 46, "query_pre_attn_scalar": 16, "rope_parameters": rope(10000.0)},
        GEMMA_VALUES | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "Gemma 2 with other caps": (
        "gemma2",
        "gemma2",
        GEMMA
        | {"query_pre_attn_scalar": 32, "rope_parameters": rope(10000.0)}
        | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0},
        GEMMA_VALUES | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0},
    ),
    "Phi-4-mini": (
        "phi3",
        "phi3",
        EPSILON | {"rope_parameters": rope(partial_rotary_factor=0.75)},
        RMS | {"rope.dimension_count": 12, "rope.freq_base": 250000.0},
    ),
    "Phi-3 with a window": (
        "phi3",
        "phi3",
        EPSILON | {"rope_parameters": rope(), "sliding_window": WINDOW},
        RMS | {"rope.dimension_count": 16, "rope.freq_base": 250000.0, "attention.sliding_window": WINDOW},
    ),
    "StarCoder 2": (
        "starcoder2",
        "starcoder2",
        {"norm_epsilon": 3e-3, "use_bias": True, "rope_parameters": rope(), "tie_word_embeddings": True},
        {"attention.layer_norm_epsilon": 3e-3, "rope.freq_base": 250000.0},
    ),
    "Granite Code": (
        "llama",
        "llama",
        EPSILON | {"attention_bias": True, "mlp_bias": True, "rope_parameters": rope()},
        RMS | {"rope.dimension_count": 16, "rope.freq_base": 250000.0},
    ),
    "Llama without the base of positions": (
        "llama",
        "llama",
        EPSILON | {"rope_parameters": rope(10000.0)},
        RMS | {"rope.dimension_count": 16},
    ),
    "Qwen 3 with biases": (
        "qwen3",
        "qwen3",
        EPSILON | {"head_dim": 32, "attention_bias": True, "rope_parameters": rope()},
        RMS | {"attention.key_length": 32, "attention.value_length": 32, "rope.freq_base": 250000.0},
    ),
}


def made(model_type: str, sizes: dict[str, Any]) -> PreTrainedModel:
    """A random model in float32, of numbers that bfloat16 has. No bias and no norm is what it starts with."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(BASE | sizes))
    return filled(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def filled(model: PreTrainedModel) -> PreTrainedModel:
    for name, tensor in model.state_dict().items():
        if name.endswith(("_min", "_max")):
            tensor.fill_(-2.5 if name.endswith("_min") else 2.25)
        elif tensor.ndim < 2:
            tensor += 0.2 * torch.randn_like(tensor)
        else:
            tensor.normal_(0, 1 if "embed" in name else 1.2 * tensor.shape[-1] ** -0.5)
        tensor.copy_(tensor.bfloat16())
    model.tie_weights()
    return model.eval()


def paired(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def tensors_of(model: PreTrainedModel, architecture: str) -> Tensors:
    names, found = names_of(model, architecture), Tensors()
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stem, _, end = name.rpartition(".")
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(stem.rpartition(".")[2], 0)
        if architecture == "llama" and heads:
            tensor = paired(tensor, heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        found[f"{names.get_name(stem)}.{end}"] = tensor
    return found


def names_of(model: PreTrainedModel, architecture: str) -> Any:
    kind = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)


def written(
    path: Path,
    architecture: str,
    config: Any,
    values: dict[str, Any],
    tensors: Tensors,
    kind: gguf.GGMLQuantizationType = F32,
    more: Sequence[str] = (),
) -> Path:
    """Writes a file whose matrices have this type. `values` replace metadata, or leave them out. `more` are special
    tokens. An encoder has neither `config` nor tokens."""
    writer = gguf.GGUFWriter(path, architecture)
    common: dict[str, Any] = (
        {}
        if config is None
        else {
            "block_count": config.num_hidden_layers,
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "feed_forward_length": config.intermediate_size,
            "attention.head_count": config.num_attention_heads,
            "attention.head_count_kv": config.num_key_value_heads,
        }
    )
    for key, value in (common | values).items():
        if value is not None:
            tiny.add_value(writer, f"{architecture}.{key}", value)
    if config is not None:
        tiny.add_tokenizer(writer, more=more)
        writer.add_pad_token_id(2)
    for name, tensor in tensors.items():
        numbers = np.ascontiguousarray(tensor.numpy())
        type_ = kind if is_quantised(name, tensor) else F32
        writer.add_tensor(name, gguf.quantize(numbers, type_), raw_dtype=type_)
    tiny.finish(writer)
    return path


def is_quantised(name: str, tensor: torch.Tensor) -> bool:
    return tensor.ndim > 1 and tensor.shape[-1] % 32 == 0 and "ffn_gate_inp" not in name


def loaded(file: Path) -> PreTrainedModel:
    """As modules of transformers."""
    return load_model(Settings(model=str(file)), lambda _: None).read_modules()


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=torch.arange(5, 85)[None], use_cache=False).logits[0]
    return found.float()


def require_logits_of(model: PreTrainedModel, file: Path) -> None:
    expected = logits_of(model)
    torch.testing.assert_close(logits_of(loaded(file).float()), expected, rtol=0, atol=1e-4 * float(expected.std()))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_gives_the_logits_of_its_model(family: str, tmp_path: Path) -> None:
    architecture, model_type, sizes, values = FAMILIES[family]
    model = made(model_type, sizes)
    file = written(tmp_path / "tiny.gguf", architecture, model.config, values, tensors_of(model, architecture))
    require_logits_of(model, file)


@pytest.mark.parametrize("length", [16, 128], ids=["long texts", "short texts"])
def test_the_length_that_phi_was_trained_with_is_that_of_the_file(length: int, tmp_path: Path) -> None:
    """80 tokens are longer than it or shorter, so that the divisors for long texts count or those for short ones."""
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [1.0 + 3.0 * i for i in range(6)]}
    scaled = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, **factors}
    scaled |= {"original_max_position_embeddings": length, "attention_factor": 1.3}
    model = made("phi3", {"rope_parameters": scaled, "original_max_position_embeddings": length, **EPSILON})
    values = RMS | {"rope.dimension_count": 12, "rope.scaling.original_context_length": length}
    tensors = tensors_of(model, "phi3")
    tensors |= {f"rope_factors_{name[:-7]}.weight": torch.tensor(numbers) for name, numbers in factors.items()}
    file = written(tmp_path / "tiny.gguf", "phi3", model.config, values | {"rope.scaling.attn_factor": 1.3}, tensors)
    require_logits_of(model, file)


# The scaling of positions, of which no tiny model shows the numbers.

PLAIN = {"rope_type": "default", "rope_theta": 5e5}


def scaled(parameters: dict[str, Any], values: dict[str, Any], *tensors: FileTensor) -> dict[str, Any]:
    config = SimpleNamespace(rope_parameters=parameters, head_dim=64, max_position_embeddings=8192)
    found = {f"llama.rope.scaling.{name}": value for name, value in values.items()}
    header = GgufHeader({"general.architecture": "llama"} | found, {}, {}, tensors)
    scale_positions(config, Metadata(header, tensors), tensors, print)
    return parameters


def test_yarn_and_linear_scaling_are_read_for_the_layers_without_a_window() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 32768}
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert scaled({**PLAIN}, yarn) == PLAIN | expected
    assert scaled({**PLAIN}, yarn | {"type": "none"}) == PLAIN
    both = scaled({"full_attention": {**PLAIN}, "sliding_attention": {**PLAIN}}, {"type": "linear", "factor": 8.0})
    assert both == {"full_attention": PLAIN | {"rope_type": "linear", "factor": 8.0}, "sliding_attention": PLAIN}


def test_the_frequencies_of_llama_3_are_recognised_and_others_are_used_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = PLAIN | {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    wanted |= {"original_max_position_embeddings": 8192}

    def frequencies(kind: str, parameters: dict[str, Any], length: int | None = None) -> np.ndarray[Any, Any]:
        config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=parameters)
        found, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), length)
        assert factor == 1.0
        return found.numpy()  # type: ignore[no-any-return]

    def divisors(numbers: np.ndarray[Any, Any]) -> FileTensor:
        (file := tmp_path / "divisors").write_bytes(numbers.astype(np.float32).tobytes())
        return FileTensor("rope_freqs.weight", "F32", numbers.shape, file, 0, np.dtype(np.float32), numbers.shape)

    plain = 5e5 ** -(np.arange(32) / 32)
    of_file = plain / frequencies("llama3", wanted)
    assert scaled({**PLAIN}, {}, divisors(of_file)) == wanted
    assert not capsys.readouterr().out
    other = scaled({**PLAIN}, {}, divisors(of_file[::-1]))
    assert "without the cache: rope_freqs.weight" in capsys.readouterr().out
    for length in (1, 1 << 20):
        np.testing.assert_allclose(frequencies("longrope", other, length), plain / of_file[::-1], rtol=1e-5)


# DeepSeek's layers: latent attention and mixtures of experts.

KEY, ROTARY, VALUE, LATENT = 32, 16, 32, 64
DEEPSEEK = {
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": KEY,
    "qk_rope_head_dim": ROTARY,
    "v_head_dim": VALUE,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
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


def deepseek(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    # The tokens at which texts begin and end are those of the class.
    sizes = {name: BASE[name] for name in BASE if not name.endswith("token_id")} | DEEPSEEK | KINDS[kind]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes), dtype=torch.float32).eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("e_score_correction_bias", "norm.weight")):
            tensor.data += torch.randn_like(tensor) * 0.1
        elif tensor.ndim > 1:
            tensor.data.normal_(0, 0.1)
    return model


def deepseek_tensors(model: PreTrainedModel, *, is_split: bool) -> Tensors:
    """Views of the model's tensors. `is_split`: as newer files have the matrix that expands latents."""
    names, found = names_of(model, "deepseek2"), Tensors()
    for name, tensor in model.state_dict().items():
        stem, _, end = name.rpartition(".")
        at = f"blk.{stem.split('.')[2]}." if "layers" in stem else ""
        if stem.endswith("kv_b_proj") and is_split:
            keys, values = tensor.view(HEADS, KEY + VALUE, LATENT).split([KEY, VALUE], dim=1)
            found |= {f"{at}attn_k_b.weight": keys.transpose(1, 2), f"{at}attn_v_b.weight": values}
        elif end == "e_score_correction_bias":
            found[f"{at}exp_probs_b.bias"] = tensor
        elif end == "gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            found |= {f"{at}ffn_gate_exps.weight": gate, f"{at}ffn_up_exps.weight": up}
        elif end == "down_proj":
            found[f"{at}ffn_down_exps.weight"] = tensor
        else:
            found[f"{names.get_name(stem)}.{end}"] = tensor
    return found


def type_of(model: PreTrainedModel) -> gguf.GGMLQuantizationType:
    """Q5_0 is what llama.cpp gives DeepSeek V2 Lite's experts in Q4_K_M, and transformers does not know it."""
    types = gguf.GGMLQuantizationType
    return types.Q5_0 if model.config.q_lora_rank is None else types.Q8_0


def deepseek_values(model: PreTrainedModel, *, is_split: bool) -> dict[str, Any]:
    """The metadata as llama.cpp's converter writes them; older ones where not `is_split`."""
    config = model.config
    rope = config.rope_parameters
    found: dict[str, Any] = {
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


def write(path: Path, model: PreTrainedModel, *, is_split: bool = True, **more: Any) -> Path:
    """`values` replace metadata, `tensors` are further ones."""
    values = deepseek_values(model, is_split=is_split) | more.get("values", {})
    tensors = deepseek_tensors(model, is_split=is_split) | more.get("tensors", {})
    return written(path, "deepseek2", model.config, values, tensors, type_of(model))


def dequantised(model: PreTrainedModel, *, is_split: bool) -> PreTrainedModel:
    """The model with the numbers that its file has, as the `gguf` package reads them, in bfloat16."""
    own, kind = copy.deepcopy(model), type_of(model)
    for name, tensor in deepseek_tensors(own, is_split=is_split).items():
        if is_quantised(name, tensor):
            numbers = np.ascontiguousarray(tensor.numpy())
            tensor.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(numbers, kind), kind)))
    found, info = type(model).from_pretrained(
        None, config=model.config, state_dict=own.state_dict(), dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(info.values())
    return found.eval()


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The median of the tokens' errors: a router may choose another expert where two are nearly equal."""
    return float(((found - exact).norm(dim=1) / exact.norm(dim=1)).median())


@pytest.mark.parametrize("is_split", [True, False], ids=["new", "old"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_deepseek_gives_the_parameters_and_logits_of_the_model(
    kind: str, is_split: bool, tmp_path: Path
) -> None:
    model = deepseek(kind)
    expected = dequantised(model, is_split=is_split)
    file = write(tmp_path / "tiny.gguf", model, is_split=is_split)
    plain, state = loaded(file), expected.state_dict()
    assert type(plain) is type(expected)
    assert all(torch.equal(plain.state_dict()[name], tensor) for name, tensor in state.items())
    assert torch.equal(logits_of(plain), logits_of(expected))
    served = GgufModel.read(file, print).decoder_weights("bfloat16", MatrixPacking(compiled()))
    # All of the difference is rounding to bfloat16, of which transformers has as much on the same numbers.
    exact = logits_of(copy.deepcopy(expected).float())
    found = plans.logits_of(served, expected.config, np.arange(5, 85))
    assert distance(found, exact) < 1.5 * distance(logits_of(expected), exact)
    kept = served._quants
    assert {name.rpartition(".")[2] for name in kept} >= {"kv_a_proj_with_mqa", "o_proj", "down_proj"}
    assert "layers.0.self_attn.kv_b_proj" not in kept
    assert len([name for name in kept if name.endswith(".experts.gate")]) == (0 if kind == "dense" else 2)
    assert all((f"layers.0.self_attn.kv_b_proj.{of}" in kept) is is_split for of in ("keys", "values"))
    kept = {name: quants for name, quants in kept.items() if ".kv_b_proj." not in name}
    require_numbers(kept, lambda name: array_of(state[name if name in state else f"model.{name}"]), ExpertsForm())
    taken = sum({part.ctypes.data: part.nbytes for _, part in served.named()}.values())
    assert needs_of_gguf(file, "auto").weights_bytes == pytest.approx(taken, rel=0.02)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attention.kv_lora_rank": None}, "the file lacks deepseek2.attention.kv_lora_rank"),
        ({"expert_weights_norm": True}, "experts that are weighted so are not served"),
        ({"attention.temperature_scale": 0.1}, "deepseek2.attention.temperature_scale is 0.1"),
    ],
)
def test_what_no_model_computes_is_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf", deepseek("V2-Lite"), values=values)
    with pytest.raises(ModelError, match=message):
        loaded(file)


def test_latent_attention_of_a_file_is_exact_at_every_token(tmp_path: Path) -> None:
    if operators() is None:
        pytest.skip("no compiled operators")
    file = write(tmp_path / "tiny.gguf", deepseek("V3"))
    served = load_model(Settings(model=str(file)), lambda _: None)
    assert served.weights is not None
    check(served.weights, served.config, plan_layout(served.weights, served.config))


def test_types_of_tensors_are_those_of_the_library() -> None:
    known = {kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert known.items() <= TYPES.items()
