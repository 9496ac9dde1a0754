"""The options of the decoders that have a plan, by their type in transformers, as far as their configurations do not
say them. `of_model` reads these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

from diskprefix.model.config import DecoderConfig, LatentConfig, LayerConfig, Tempering
from diskprefix.model.families.mixture_types import feed_forward_of, mixture_of
from diskprefix.model.plan import Location, Rotary
from diskprefix.native import calls

_PLAIN = """
    cwm ernie4_5 granite internlm3 iquestcoder llama ministral ministral3 mistral qwen2 qwen2_5_vl_text qwen2_vl_text
    seed_oss smollm3
"""
_MIXTURES = "glm4_moe granitemoe mimo_v2_flash mixtral qwen2_moe solar_open"
_WITH_HEAD_NORMS = "dots1 exaone_moe hy_v3 mellum qwen3 qwen3_moe qwen3_vl_text"
_NOTHING: Mapping[str, Any] = {}
_HEAD_NORMS: Mapping[str, Any] = {"has_head_norms": True}
_LATENT: Mapping[str, Any] = {}
_OLMO: Mapping[str, Any] = {"has_row_norms": True, "norm": "rms_unrounded", "norms": "behind"}
_HUNYUAN: Mapping[str, Any] = {"has_head_norms": True, "has_norms_behind_rotary": True}
_GEMMA: Mapping[str, Any] = {"norm": "rms_plus_one", "embedding_multiplier": "root of hidden_size"}
_GEMMA_4: Mapping[str, Any] = {
    "norm": "rms_unrounded",
    "norms": "around",
    "has_head_norms": True,
    "has_value_norms": True,
    "has_layer_scales": True,
    "embedding_multiplier": "root of hidden_size",
    "scale": 1.0,
}

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(_PLAIN.split(), _NOTHING),
    **dict.fromkeys(_WITH_HEAD_NORMS.split(), _HEAD_NORMS),
    **dict.fromkeys(_MIXTURES.split(), _NOTHING),
    "afmoe": {"has_head_norms": True, "norm": "rms_unrounded", "norms": "around", "attention_gate": "sigmoid"},
    "ernie4_5_moe": _NOTHING,
    "exaone4": {"has_head_norms": True, "norms": "behind"},
    **dict.fromkeys(("flex_olmo", "olmo2", "olmo3"), _OLMO),
    "gpt_oss": {"norm": "rms_unrounded"},
    "granitemoe_swa": {"has_joined_gate_up": True},
    "granitemoeshared": {"has_joined_gate_up": True},
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), _HUNYUAN),
    "laguna": {"has_head_norms": True, "attention_gate": "softplus"},
    "minimax_m2": {"has_row_norms": True},
    "olmoe": {"has_row_norms": True},
    "llama4_text": {"has_norms_behind_rotary": True},
    "youtu": _LATENT,
    "minicpm3": _LATENT,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT,
    "gemma": _GEMMA,
    "gemma2": {**_GEMMA, "norms": "around"},
    "gemma3_text": {**_GEMMA, "norms": "around", "has_head_norms": True},
    "gemma3n_text": {**_GEMMA_4, "has_layer_scales": False},
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _GEMMA_4),
}

SECTIONS_IN_ORDER = ("qwen2_vl_text", "qwen2_5_vl_text")
"""Those whose frequencies for the three dimensions of a position follow each other. Others take turns."""

_BIAS_OF_ROUTER = "mlp.gate.e_score_correction_bias"
_GRANITE = {
    "mlp": "block_sparse_moe",
    "mlp.gate": "block_sparse_moe.router",
    "mlp.shared_experts": "shared_mlp",
    "mlp.shared_experts.gate_up_proj": "shared_mlp.input_linear",
    "mlp.shared_experts.down_proj": "shared_mlp.output_linear",
}

_HUNYUAN_NORMS = {
    "self_attn.q_norm": "self_attn.query_layernorm",
    "self_attn.k_norm": "self_attn.key_layernorm",
}

NAMES: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(["granitemoe", "granitemoe_swa", "granitemoeshared"], _GRANITE),
    "hy_v3": {_BIAS_OF_ROUTER: "mlp.e_score_correction_bias"},
    "minimax_m2": {_BIAS_OF_ROUTER: "mlp.e_score_correction_bias"},
    "afmoe": {
        "mlp.gate": "mlp.router.gate",
        _BIAS_OF_ROUTER: "mlp.expert_bias",
        "pre_feedforward_layernorm": "pre_mlp_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    },
    "ernie4_5_moe": {_BIAS_OF_ROUTER: "mlp.gate.moe_statics.e_score_correction_bias"},
    "gpt_oss": {"mlp.gate": "mlp.router"},
    "hunyuan_v1_dense": _HUNYUAN_NORMS,
    "hunyuan_v1_moe": {"mlp.gate": "mlp.gate.wg", "mlp.shared_experts": "mlp.shared_mlp", **_HUNYUAN_NORMS},
    "laguna": {"self_attn.gate_proj": "self_attn.g_proj"},
    "llama4_text": {
        "mlp": "feed_forward",
        "mlp.gate": "feed_forward.router",
        "mlp.shared_experts": "feed_forward.shared_expert",
    },
    "qwen2_moe": {"mlp.shared_experts": "mlp.shared_expert"},
}
"""The names of the slots of layers, where they are not the usual ones."""

_ROTARY_IN_WINDOWS = ("afmoe", "exaone4", "exaone_moe")
"""Those whose layers without a window have no positions."""

_NEIGHBOURS_TURN = ("ernie4_5", "ernie4_5_moe", "llama4_text")
"""Those whose neighbouring numbers of a head turn together."""

_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "squared_relu",
}


def has_plan(config: Any) -> bool:
    """Returns whether a model of this configuration has a plan: its type has one, and no option that a plan lacks."""
    if config.model_type == "gemma3n":
        # With encoders, some of its tokens are embedded by these.
        return False
    config = config.get_text_config(decoder=True)
    counts = getattr(config, "num_experts_per_tok", None)
    is_even = not isinstance(counts, list) or len(set(counts)) == 1
    is_known = config.model_type in OPTIONS and _activation(config) in _ACTIVATIONS
    has_usual_streams = not getattr(config, "altup_active_idx", 0) and getattr(config, "altup_correct_scale", True)
    has_usual_streams &= getattr(config, "altup_num_inputs", 1) <= calls.MAX_STREAMS
    return is_known and is_even and has_usual_streams and getattr(config, "clip_qkv", None) is None


def _activation(config: Any) -> str:
    return getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None) or ""


def pairing_of(config: Any) -> int:
    """Returns which numbers of a head turn together; see `Rotary`."""
    if config.model_type in _NEIGHBOURS_TURN:
        return 1
    return 1 if config.model_type == "deepseek_v2" else 2 if getattr(config, "rope_interleave", False) else 0


def padded_tokens(config: Any) -> list[int]:
    """Returns a token and those that are embedded as it is: the placeholders of some models. `config` is the whole."""
    if config.model_type not in ("gemma4", "gemma4_unified"):
        return []
    of_kinds = (getattr(config, f"{kind}_token_id", None) for kind in ("image", "video", "audio"))
    return [config.get_text_config(decoder=True).pad_token_id, *(one for one in of_kinds if one is not None)]


def _latent(config: Any) -> LatentConfig | None:
    if getattr(config, "kv_lora_rank", None) is None:
        return None
    return LatentConfig(
        config.kv_lora_rank,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        has_query_latents=config.q_lora_rank is not None,
    )


def of_model(
    config: Any,
    windows: Sequence[int],
    places: Sequence[Mapping[str, Location]],
    rotary: Mapping[str, Rotary],
    sees_pictures: str,
) -> DecoderConfig:
    """Returns what a configuration of transformers' says of a decoder of text, with the window of each layer, 0
    without, and its places in memory."""
    options = {**OPTIONS[config.model_type]}
    if options.get("embedding_multiplier") == "root of hidden_size" or getattr(config, "mup_enabled", False):
        options["embedding_multiplier"] = config.hidden_size**0.5
    activation = _ACTIVATIONS[_activation(config)]
    layer_input_dim = getattr(config, "hidden_size_per_layer_input", None) or 0
    residual = getattr(config, "residual_multiplier", 1.0)
    if hasattr(config, "scale_depth"):
        residual = config.scale_depth / config.num_hidden_layers**0.5
    found: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "num_attention_heads": config.num_attention_heads,
        "layers": tuple(_layer_of(config, number, windows, places, rotary) for number in range(len(places))),
        "rotary": rotary,
        "epsilon": config.rms_norm_eps,
        "activation": activation,
        "has_head_norms": getattr(config, "use_qk_norm", False) and config.model_type != "llama4_text",
        "has_unweighted_norms": getattr(config, "use_qk_norm", False) and config.model_type == "llama4_text",
        "value_multiplier": getattr(config, "attention_value_scale", None) or 1.0,
        "mixture": mixture_of(config, activation),
        "latent": _latent(config),
        "scale": options.get("scale") or _scale_of(config),
        "softcap": getattr(config, "attn_logit_softcapping", None) or 0.0,
        "embedding_multiplier": getattr(config, "embedding_multiplier", getattr(config, "scale_emb", 1.0)),
        "residual_multiplier": residual,
        "has_layer_inputs": layer_input_dim > 0,
        "layer_input_multiplier": layer_input_dim**0.5,
        "num_streams": getattr(config, "altup_num_inputs", 1),
        "logits_divisor": getattr(config, "logits_scaling", 1.0),
        "logits_softcap": getattr(config, "final_logit_softcapping", None) or 0.0,
        "sees_pictures": sees_pictures,
    }
    return DecoderConfig(**(found | options))


def _scale_of(config: Any) -> float:
    """Returns the factor of the products of queries and keys."""
    if found := getattr(config, "attention_multiplier", None):
        return float(found)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return float(getattr(config, "query_pre_attn_scalar", head_dim) ** -0.5)


def _layer_of(
    config: Any,
    number: int,
    windows: Sequence[int],
    places: Sequence[Mapping[str, Location]],
    rotary: Mapping[str, Rotary],
) -> LayerConfig:
    kinds = getattr(config, "layer_types", None) or {number: ""}
    sparsity = getattr(config, "activation_sparsity_pattern", ())
    kind, source = kinds[number], number
    only_reads = bool(getattr(config, "num_kv_shared_layers", 0)) and not places[number]
    if only_reads:
        # Layers without memory read that of the last one of their kind.
        source = max(i for i in range(number) if places[i] and kinds[i] == kind)
    window = windows[source]
    name = _rotary_of(config, number, window, kind, rotary)
    tempering = None
    if name is None and getattr(config, "attn_temperature_tuning", False):
        tempering = Tempering(1, config.floor_scale, config.attn_scale)
    if config.model_type == "ministral3" and (beta := config.rope_parameters.get("llama_4_scaling_beta")):
        tempering = Tempering(0, config.rope_parameters["original_max_position_embeddings"], beta)
    return LayerConfig(
        places[source],
        mixer="latent" if "latent" in places[source] else "attention",
        feed_forward=feed_forward_of(config, number),
        only_reads=only_reads,
        cut_off=NormalDist().inv_cdf(sparsity[number]) if sparsity and sparsity[number] else 0.0,
        window=0 if kind == "chunked_attention" else window,
        chunk=window if kind == "chunked_attention" else 0,
        rotary=name,
        tempering=tempering,
    )


def _rotary_of(config: Any, number: int, window: int, kind: str, rotary: Mapping[str, Rotary]) -> str | None:
    """Returns which positions a layer has, None without."""
    with_rotary, thetas = getattr(config, "no_rope_layers", None), getattr(config, "layer_rope_theta", None)
    if (with_rotary and not with_rotary[number]) or (thetas and not thetas[number]):
        return None
    if config.model_type in _ROTARY_IN_WINDOWS and not window and config.sliding_window is not None:
        return None
    return str(thetas[number]) if thetas else "" if "" in rotary else kind
