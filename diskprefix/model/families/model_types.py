"""The options of the decoders that have a plan, by their type in transformers, as far as their configurations do not
say them. `of_model` reads these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any, Literal

from diskprefix.kv.layout import Layout
from diskprefix.model.config import (
    DecoderConfig,
    DeltaConfig,
    LatentConfig,
    LayerConfig,
    Multipliers,
    SpaceConfig,
    Tempering,
)
from diskprefix.model.families.known_options import unknown_option
from diskprefix.model.families.mixture_types import feed_forward_of, first_of, mixture_of
from diskprefix.model.families.rotary import KINDS, kinds_of_rotary, rotary_of, scaled_by_yarn
from diskprefix.model.families.type_table import LATENT, is_declared
from diskprefix.model.operands import Location, Rotary, StateLocation
from diskprefix.native import calls

_PLAIN = """
    aria_text cwm ernie4_5 granite granite_swa internlm3 iquestcoder llama ministral ministral3 mistral qwen2
    qwen2_5_vl_text qwen2_vl_text seed_oss smollm3
"""
_MIXTURES = "glm4_moe granitemoe mimo_v2_flash mixtral qwen2_moe solar_open"
_WITH_HEAD_NORMS = "dots1 exaone_moe flint hy_v3 mellum qwen3 qwen3_moe qwen3_vl_moe_text qwen3_vl_text"
_NOTHING: Mapping[str, Any] = {}
_HEAD_NORMS: Mapping[str, Any] = {"has_head_norms": True}
_OLMO: Mapping[str, Any] = {"has_row_norms": True, "norm": "rms_unrounded", "norms": "behind"}
_HUNYUAN: Mapping[str, Any] = {"has_head_norms": True, "has_norms_behind_rotary": True}
_COHERE = ("cohere", "cohere2", "cohere2_moe", "cohere_compass_text")
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

_QWEN: Mapping[str, Any] = {
    "norm": "rms_plus_one",
    "has_head_norms": True,
    "attention_gate": "sigmoid",
    "has_gate_in_query": True,
    "delta": DeltaConfig("together"),
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
    **dict.fromkeys(LATENT.split(), _NOTHING),
    "glm": {"has_joined_gate_up": True},
    "glm4": {"has_joined_gate_up": True, "norms": "around"},
    "phi3": {"has_joined_gate_up": True, "joined": "in_parts"},
    "arcee": _NOTHING,
    "helium": {"norm": "rms_unrounded"},
    "biogpt": {"norm": "layer", "position_offset": 2, "epsilon": 1e-5},
    "gpt2": {"norm": "layer", "position_offset": 0, "joined": "in_parts"},
    "gpt_bigcode": {"norm": "layer", "position_offset": 0, "joined": "in_heads"},
    "gpt_neox": {"norm": "layer", "joined": "in_heads"},
    "opt": {"norm": "layer", "position_offset": 2},
    "persimmon": {"norm": "layer", "joined": "in_heads"},
    "bitnet": {"has_inner_norms": True},
    **{name: {"norm": "layer", "parallel": "one_norm"} for name in _COHERE},
    "hyperclovax": {"norms": "around"},
    "jais2": {"norm": "layer"},
    "kolibri1": {"norms": "around", "has_head_norms": True},
    "nanochat": {
        "norm": "rms_unrounded",
        "has_unweighted_norms": True,
        "has_norms_behind_rotary": True,
        "has_embedding_norm": True,
    },
    "olmo": {"norm": "layer"},
    "phimoe": {"norm": "layer"},
    "step3p5": {"norm": "rms_plus_one", "has_head_norms": True, "attention_gate": "sigmoid"},
    "nemotron": {"norm": "layer_plus_one"},
    "phi": {"norm": "layer", "parallel": "one_norm"},
    "stablelm": {"norm": "layer"},
    "starcoder2": {"norm": "layer"},
    "vaultgemma": _GEMMA,
    **dict.fromkeys(("bamba", "falcon_h1", "mamba2", "nemotron_h"), _NOTHING),
    "granitemoehybrid": {"has_joined_gate_up": True},
    "kimi_linear": {"delta": DeltaConfig("apart", has_narrow_gates=True, gate="sigmoid")},
    **dict.fromkeys(("lfm2", "lfm2_moe"), _HEAD_NORMS),
    "olmo_hybrid": _OLMO,
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), _QWEN),
    "qwen3_next": {**_QWEN, "delta": DeltaConfig("by_key_heads")},
    "gemma": _GEMMA,
    "gemma2": {**_GEMMA, "norms": "around"},
    "gemma3_text": {**_GEMMA, "norms": "around", "has_head_norms": True},
    "gemma3n_text": {**_GEMMA_4, "has_layer_scales": False},
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _GEMMA_4),
}

_UNGATED = "arcee biogpt gpt2 gpt_bigcode gpt_neox jais2 nanochat nemotron opt persimmon phi starcoder2"
"""Those whose feed-forward part is of two plain products."""

_ROTARY_IN_WINDOWS = ("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1")
"""Those whose layers without a window have no positions."""

_ONE_PART = ("mamba2", "nemotron_h")
"""Those whose layers have one part each."""

_WITHOUT = {
    "add_cross_attention": False,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "clip_qkv": None,
    "do_layer_norm_before": True,
    "mamba_hidden_act": "silu",
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "swiglu_limits": None,
    "swiglu_limits_shared": None,
    "use_post_norm": True,
    "_remove_final_layer_norm": False,
}
"""What fields say of a model without an option that plans lack."""

_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "squared_relu",
}


def without_plan(config: Any) -> str:
    """Returns what plans lack that a model of this configuration needs, "" if it has a plan."""
    if config.model_type == "gemma3n":
        return "its encoders embed some tokens"
    config = config.get_text_config(decoder=True)
    if config.model_type not in OPTIONS:
        return f"no family has {config.model_type}"
    if _activation(config) not in _ACTIVATIONS:
        return f"no plan has the activation {_activation(config)}"
    counts = getattr(config, "num_experts_per_tok", None)
    if isinstance(counts, list) and len(set(counts)) > 1:
        return "no plan has another number of experts in some layers"
    if getattr(config, "altup_num_inputs", 1) > calls.MAX_STREAMS:
        return "no plan has so many streams"
    without = _WITHOUT | {"word_embed_proj_dim": config.hidden_size}
    if unknown := sorted(kinds_of_rotary(config) - KINDS.keys()):
        return f"no plan has {unknown[0]} RoPE"
    others = (name for name, said in without.items() if getattr(config, name, said) != said)
    name = next(others, "") or unknown_option(config)
    return f"no plan has this {name}" if name else ""


def _activation(config: Any) -> str:
    return str(first_of(config, "hidden_activation mlp_hidden_act hidden_act activation_function", "silu"))


def sees_pictures_whole(config: Any) -> Literal["", "all", "windowed", "otherwise"]:
    """Returns the layers in which the tokens of a picture see each other: none, all, or those with a window. Pictures
    with no other token between them count as one. "otherwise": not so that a plan can. PaliGemma sees the whole
    prompt so, and Molmo 2 all pictures as one. For Gemma 4 Unified, transformers makes two different masks."""
    text = config.get_text_config(decoder=True)
    does = getattr(text, "use_bidirectional_attention", None) == "vision"
    if config.model_type in ("paligemma", "molmo2") or (does and text.model_type != "gemma4_text"):
        return "otherwise"
    return "windowed" if does else "all" if text.model_type == "gemma3_text" else ""


def pictures_problem(config: Any, layout: Layout) -> str | None:
    """Returns why a model takes no pictures with the layout of its state; None if it may take some."""
    if layout.unsupported:
        return "its state cannot be cached"
    whole = sees_pictures_whole(config)
    if whole == "otherwise" or (whole and layout.exact_at != "token"):
        return "its tokens see later ones of the same picture, or of others"
    return None


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
        config.num_attention_heads,
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
    states: Sequence[Mapping[tuple[str, int], StateLocation]],
    sees_pictures: str,
) -> DecoderConfig:
    """Returns what a configuration of transformers' says of a decoder of text, with the window of each layer, 0
    without, its places in memory and those of its states."""
    rotary = rotary_of(config)
    options = {**OPTIONS[config.model_type]}
    norms = options.pop("norms", "before")
    is_scaled = getattr(config, "mup_enabled", False) or getattr(config, "scale_embedding", False)
    if options.get("embedding_multiplier") == "root of hidden_size" or is_scaled:
        options["embedding_multiplier"] = config.hidden_size**0.5
    if config.model_type == "cohere2_moe" and config.rms_norm_eps is not None:
        options["norm"] = "rms"
    activation = _ACTIVATIONS[_activation(config)]
    layer_input_dim = getattr(config, "hidden_size_per_layer_input", None) or 0
    residual = getattr(config, "residual_multiplier", 1.0)
    if hasattr(config, "scale_depth"):
        residual = config.scale_depth / config.num_hidden_layers**0.5
    if getattr(config, "linear_allow_neg_eigval", None) is not None:
        options["delta"] = DeltaConfig("apart", beta_factor=2.0 if config.linear_allow_neg_eigval else 1.0)
    parallel = "two_norms" if config.model_type == "gpt_neox" else "one_norm"
    scaling, is_multiplied = getattr(config, "logits_scaling", 1.0), config.model_type == "hyperclovax"
    has_norms = getattr(config, "use_qk_norm", False) or getattr(config, "qk_layernorm", False)
    found: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "layers": tuple(
            _layer_of(config, number, windows, places, states[number], rotary, norms) for number in range(len(places))
        ),
        "rotary": rotary,
        "epsilon": first_of(config, "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon norm_eps", 1e-5),
        "activation": activation,
        "parallel": parallel if getattr(config, "use_parallel_residual", False) else "",
        "has_head_norms": has_norms and config.model_type != "llama4_text",
        "has_unweighted_norms": has_norms and config.model_type == "llama4_text",
        "multipliers": _multipliers(config),
        "has_float_residual": is_declared(config.model_type, "residual_in_fp32") and config.residual_in_fp32,
        "mixture": mixture_of(config, activation),
        "latent": _latent(config),
        "space": _space(config),
        "scale": options.get("scale") or _scale_of(config),
        "softcap": getattr(config, "attn_logit_softcapping", None) or 0.0,
        "embedding_multiplier": getattr(config, "embedding_multiplier", getattr(config, "scale_emb", 1.0)),
        "residual_multiplier": residual,
        "has_layer_inputs": layer_input_dim > 0,
        "layer_input_multiplier": layer_input_dim**0.5,
        "num_streams": getattr(config, "altup_num_inputs", 1),
        "logits_multiplier": first_of(
            config, "logit_scale lm_head_multiplier", scaling if is_multiplied else 1 / scaling
        ),
        "logits_softcap": getattr(config, "final_logit_softcapping", None) or 0.0,
        "sees_pictures": sees_pictures,
    }
    return DecoderConfig(**(found | options))


def _scale_of(config: Any) -> float:
    """Returns the factor of the products of queries and keys."""
    if getattr(config, "kv_lora_rank", None) is not None:
        return scaled_by_yarn(config, (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5)
    if found := getattr(config, "attention_multiplier", None):
        return float(found)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return float(getattr(config, "query_pre_attn_scalar", head_dim) ** -0.5)


def _layer_of(
    config: Any,
    number: int,
    windows: Sequence[int],
    places: Sequence[Mapping[str, Location]],
    states: Mapping[tuple[str, int], StateLocation],
    rotary: Mapping[str, Rotary],
    norms: Any,
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
    if config.model_type in ("ministral3", "mistral4") and (beta := config.rope_parameters.get("llama_4_scaling_beta")):
        tempering = Tempering(0, config.rope_parameters["original_max_position_embeddings"], beta)
    return LayerConfig(
        places[source],
        mixer=_mixer_of(config, places[source], states),
        feed_forward=_feed_forward_of(config, number, kind),
        # Layers of OLMo Hybrid without attention have them before.
        norms=norms if places[source] else "before",
        only_reads=only_reads,
        cut_off=NormalDist().inv_cdf(sparsity[number]) if sparsity and sparsity[number] else 0.0,
        window=0 if kind == "chunked_attention" else window,
        chunk=window if kind == "chunked_attention" else 0,
        rotary=name,
        tempering=tempering,
        states=states,
    )


def _mixer_of(config: Any, places: Mapping[str, Location], states: Mapping[tuple[str, int], StateLocation]) -> Any:
    if ("recurrent", 0) in states:
        if _space(config) is None:
            return "delta_rule"
        return "space_and_attention" if places else "state_space"
    if places:
        return "latent" if "latent" in places else "attention"
    return "short_convolution" if states else "none"


def _feed_forward_of(config: Any, number: int, kind: str) -> Any:
    if config.model_type in _ONE_PART:
        return {"moe": "mixture", "mlp": "plain"}.get(kind, "none")
    found = feed_forward_of(config, number)
    return "plain" if found == "gated" and config.model_type in _UNGATED.split() else found


def _multipliers(config: Any) -> Multipliers:
    gates, products = getattr(config, "mlp_multipliers", None) or (1.0, 1.0)
    return Multipliers(
        attention_in=getattr(config, "attention_in_multiplier", 1.0),
        attention_out=getattr(config, "attention_out_multiplier", 1.0),
        keys=getattr(config, "key_multiplier", 1.0),
        values=getattr(config, "attention_value_scale", None) or 1.0,
        gates=gates,
        products=products,
    )


def _space(config: Any) -> SpaceConfig | None:
    if not is_declared(config.model_type, "time_step_limit"):
        return None
    # Not `time_step_min`, which is about the biases that training begins with: steps of trained ones are far smaller.
    least, most = config.time_step_limit or (0.0, float("inf"))
    return SpaceConfig(
        (least, most),
        gates_first=not getattr(config, "mamba_norm_before_gate", False),
        in_multiplier=getattr(config, "ssm_in_multiplier", 1.0),
        out_multiplier=getattr(config, "ssm_out_multiplier", 1.0),
        multipliers=tuple(getattr(config, "ssm_multipliers", None) or ()),
    )


def _rotary_of(config: Any, number: int, window: int, kind: str, rotary: Mapping[str, Rotary]) -> str | None:
    """Returns which positions a layer has, None without."""
    with_rotary, thetas = getattr(config, "no_rope_layers", None), getattr(config, "layer_rope_theta", None)
    if not rotary or (with_rotary and not with_rotary[number]) or (thetas and not thetas[number]):
        return None
    if (getattr(config, "rope_parameters", None) or {}).get(kind, "") is None:
        return None
    is_dense = (
        getattr(config, "prefix_dense_sliding_window_pattern", 0) == 1 and feed_forward_of(config, number) != "mixture"
    )
    if config.model_type in _ROTARY_IN_WINDOWS and not (window or is_dense) and config.sliding_window is not None:
        return None
    return str(thetas[number]) if thetas else "" if "" in rotary else kind
