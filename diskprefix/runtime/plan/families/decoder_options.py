"""The options of a decoder that has a plan, from the record of its type and the declared options of a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any, Literal

from msgspec.structs import replace

from diskprefix.native import calls
from diskprefix.prefixstore.kv.layout import Layout
from diskprefix.runtime.plan.config import (
    DecoderConfig,
    IndexerConfig,
    Inputs,
    LatentConfig,
    LayerConfig,
    Multipliers,
    PositionScaling,
    SpaceConfig,
)
from diskprefix.runtime.plan.families.declared import first_of, is_option, option
from diskprefix.runtime.plan.families.known_options import unknown_option
from diskprefix.runtime.plan.families.mixture_options import feed_forward_of, mixture_of
from diskprefix.runtime.plan.families.ngram_options import ngrams_of
from diskprefix.runtime.plan.families.rotary import KINDS, kinds_of_rotary, rotary_of, scaled_by_yarn
from diskprefix.runtime.plan.families.types.known_types import TYPES, type_of, whole_of
from diskprefix.runtime.plan.operands import Location, Rotary, StateLocation
from diskprefix.runtime.plan.part_options import DeltaConfig, Norms

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
"""Options that no plan supports, with the value that means off."""

_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "squared_relu",
    "xielu": "xielu",
}


def without_plan(config: Any) -> str:
    """Returns why a model of this configuration has no plan, "" if it has one."""
    if problem := whole_of(config).problem:
        return problem
    config = config.get_text_config(decoder=True)
    if config.model_type not in TYPES:
        return f"no family has {config.model_type}"
    if _activation(config) not in _ACTIVATIONS:
        return f"no plan has the activation {_activation(config)}"
    counts = option(config, "num_experts_per_tok")
    if isinstance(counts, list) and len(set(counts)) > 1:
        return "no plan has another number of experts in some layers"
    if option(config, "altup_num_inputs", 1) > calls.MAX_STREAMS:
        return "no plan has so many streams"
    if "indexed_attention" in (option(config, "layer_types") or ()) and option(config, "indexer_budget") is None:
        return "no plan has layers with an indexer whose options are missing"
    without = {**_WITHOUT, "word_embed_proj_dim": config.hidden_size, **type_of(config).only}
    if unknown := sorted(kinds_of_rotary(config) - KINDS.keys()):
        return f"no plan has {unknown[0]} RoPE"
    others = (name for name, value in without.items() if option(config, name, value) != value)
    name = next(others, "") or unknown_option(config)
    return f"no plan has this {name}" if name else ""


def _activation(config: Any) -> str:
    return str(first_of(config, "hidden_activation mlp_hidden_act hidden_act activation_function", "silu"))


def sees_pictures_whole(config: Any) -> Literal["", "all", "windowed", "otherwise"]:
    """Returns the layers in which the tokens of a picture see each other: none, all, or those with a window. Pictures
    with no other token between them count as one. "otherwise": in a way that no plan has."""
    text = config.get_text_config(decoder=True)
    record = TYPES.get(text.model_type)
    if getattr(text, "use_bidirectional_attention", None) == "vision":
        is_windowed = record is not None and record.pictures_by_option == "windowed"
        return whole_of(config).pictures or ("windowed" if is_windowed else "otherwise")
    return whole_of(config).pictures or ("" if record is None else record.pictures)


def pictures_problem(config: Any, layout: Layout) -> str | None:
    """Returns why a model takes no pictures with the layout of its state; None if it may take some."""
    if layout.unsupported:
        return "its state cannot be cached"
    if layout.exact_at == "token" and (problem := whole_of(config).picture_problem):
        return problem
    whole = sees_pictures_whole(config)
    if whole == "otherwise" or (whole and layout.exact_at != "token"):
        return "its tokens see later ones of the same picture, or of others"
    return None


def padded_tokens(config: Any) -> list[int]:
    """Returns the padding token and the placeholders that get its embedding, [] if there are none. `config` is the
    configuration of the whole model."""
    if not whole_of(config).pads_placeholders:
        return []
    placeholders = (getattr(config, f"{kind}_token_id", None) for kind in ("image", "video", "audio"))
    padding = config.get_text_config(decoder=True).pad_token_id
    return [padding, *(token for token in placeholders if token is not None)]


def options_of_model(
    config: Any,
    windows: Sequence[int],
    places: Sequence[Mapping[str, Location]],
    states: Sequence[Mapping[tuple[str, int], StateLocation]],
    sees_pictures: str,
) -> DecoderConfig:
    """Returns the options of a text decoder with this configuration of transformers'. `windows` has the window of each
    layer (0: none), `places` and `states` its places in memory."""
    record, rotary = type_of(config), rotary_of(config)
    gates = replace(record.gates, activation=_ACTIVATIONS[_activation(config)])
    is_parallel = record.is_parallel or option(config, "use_parallel_residual", False)
    return DecoderConfig(
        vocab_size=config.vocab_size,
        layers=tuple(
            _layer_of(config, number, windows, places, states[number], rotary) for number in range(len(places))
        ),
        rotary=rotary,
        norms=_norms(config),
        gates=gates,
        inputs=_inputs(config, sees_pictures),
        parallel=record.parallel if is_parallel else "",
        joined=record.joined,
        has_layer_scales=record.layer_scales,
        num_streams=option(config, "altup_num_inputs", 1),
        has_float_residual=option(config, "residual_in_fp32", False),
        multipliers=_multipliers(config),
        mixture=mixture_of(config, gates.activation),
        latent=_latent(config),
        delta=_delta(config),
        space=_space(config),
        indexer=_indexer(config),
        hyper_streams=option(config, "hc_count", 0),
        scale=_scale_of(config) if record.scale is None else record.scale,
        softcap=option(config, "attn_logit_softcapping") or 0.0,
        residual_multiplier=_residual_multiplier(config),
        logits_multiplier=_logits_multiplier(config),
        logits_softcap=option(config, "final_logit_softcapping") or 0.0,
    )


def _norms(config: Any) -> Norms:
    """Returns the norms, with their common epsilon from the type or the configuration."""
    record, default = type_of(config), Norms()
    norms = record.norms
    epsilons = "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon norm_eps"
    if norms.epsilon == default.epsilon:
        norms = replace(norms, epsilon=first_of(config, epsilons, 1e-5))
    if option(config, "use_qk_norm", False) or option(config, "qk_layernorm", False):
        norms = replace(norms, query_key=norms.query_key or record.query_key_norms)
    # In such a type, the kind of norms follows from the epsilon that is set.
    has_rms = record.rms_by_epsilon and config.rms_norm_eps is not None
    return replace(norms, kind="rms") if has_rms else norms


def _inputs(config: Any, sees_pictures: str) -> Inputs:
    record, layer_dim = type_of(config), option(config, "hidden_size_per_layer_input") or 0
    multiplier = option(config, "embedding_multiplier", option(config, "scale_emb", 1.0))
    if record.root_of_width or option(config, "mup_enabled", False) or option(config, "scale_embedding", False):
        multiplier = config.hidden_size**0.5
    return Inputs(
        multiplier,
        record.position_offset,
        of_layers=layer_dim > 0,
        layer_multiplier=layer_dim**0.5,
        sees_pictures=sees_pictures,
    )


def _residual_multiplier(config: Any) -> float:
    if is_option(config.model_type, "scale_depth"):
        return float(config.scale_depth / config.num_hidden_layers**0.5)
    return float(option(config, "residual_multiplier", 1.0))


def _logits_multiplier(config: Any) -> float:
    scaling = option(config, "logits_scaling", 1.0)
    default = scaling if type_of(config).multiplies_logits else 1 / scaling
    return float(first_of(config, "logit_scale lm_head_multiplier", default))


def _latent(config: Any) -> LatentConfig | None:
    if option(config, "kv_lora_rank") is None:
        return None
    return LatentConfig(
        config.num_attention_heads,
        config.kv_lora_rank,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        has_query_latents=config.q_lora_rank is not None,
    )


def _delta(config: Any) -> DeltaConfig | None:
    delta = type_of(config).delta
    if delta is None:
        return None
    if gate := option(config, "output_gate_type"):
        delta = replace(delta, gate=gate)
    if option(config, "linear_allow_neg_eigval") is None:
        return delta
    return replace(delta, beta_factor=2.0 if config.linear_allow_neg_eigval else 1.0)


def _indexer(config: Any) -> IndexerConfig | None:
    if (budget := option(config, "indexer_budget")) is None:
        return None
    return IndexerConfig(config.indexer_n_heads, config.indexer_compress_ratio, budget // config.indexer_compress_ratio)


def _scale_of(config: Any) -> float:
    """Returns the factor of attention scores."""
    if option(config, "kv_lora_rank") is not None:
        return scaled_by_yarn(config, (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5)
    if multiplier := option(config, "attention_multiplier"):
        return float(multiplier)
    head_dim = option(config, "head_dim") or config.hidden_size // config.num_attention_heads
    return float(option(config, "query_pre_attn_scalar", head_dim) ** -0.5)


def _layer_of(
    config: Any,
    number: int,
    windows: Sequence[int],
    places: Sequence[Mapping[str, Location]],
    states: Mapping[tuple[str, int], StateLocation],
    rotary: Mapping[str, Rotary],
) -> LayerConfig:
    kinds = option(config, "layer_types") or {number: ""}
    sparsity = option(config, "activation_sparsity_pattern", ())
    kind, source = kinds[number], number
    only_reads = bool(option(config, "num_kv_shared_layers", 0)) and not places[number]
    if only_reads:
        # Layers without memory read the memory of the last layer of their kind.
        source = max(i for i in range(number) if places[i] and kinds[i] == kind)
    window = windows[source]
    name = _rotary_name(config, number, window, kind, rotary)
    return LayerConfig(
        places[source],
        mixer=_mixer_of(config, places[source], states),
        feed_forward=_feed_forward_of(config, number, kind),
        # Layers of OLMo Hybrid without attention have their norms before.
        norm_place=type_of(config).norm_place if places[source] else "before",
        only_reads=only_reads,
        gate_sparsity_deviations=NormalDist().inv_cdf(sparsity[number]) if sparsity and sparsity[number] else 0.0,
        window=0 if kind == "chunked_attention" else window,
        chunk=window if kind == "chunked_attention" else 0,
        rotary=name,
        position_scaling=_position_scaling(config, has_rotary=name is not None),
        ngrams=ngrams_of(config, number),
        states=states,
    )


def _position_scaling(config: Any, *, has_rotary: bool) -> PositionScaling | None:
    """Returns how the queries of a layer are scaled by their position, None if they are not."""
    if type_of(config).rotary.scales_queries:
        parameters = config.rope_parameters
        beta = parameters.get("llama_4_scaling_beta")
        return PositionScaling(0, parameters["original_max_position_embeddings"], beta) if beta else None
    if not has_rotary and option(config, "attn_temperature_tuning", False):
        return PositionScaling(1, config.floor_scale, config.attn_scale)
    return None


def _mixer_of(config: Any, places: Mapping[str, Location], states: Mapping[tuple[str, int], StateLocation]) -> Any:
    if ("recurrent", 0) in states:
        if _space(config) is None:
            return "delta_rule"
        return "space_and_attention" if places else "state_space"
    if places:
        return "latent" if "latent" in places else "attention"
    return "short_convolution" if states else "none"


def _feed_forward_of(config: Any, number: int, kind: str) -> Any:
    record = type_of(config)
    if record.single_part:
        return {"moe": "mixture", "mlp": "plain"}.get(kind, "none")
    part = feed_forward_of(config, number)
    return part if part != "gated" or record.is_gated else "plain"


def _multipliers(config: Any) -> Multipliers:
    gates, products = option(config, "mlp_multipliers") or (1.0, 1.0)
    return Multipliers(
        attention_in=option(config, "attention_in_multiplier", 1.0),
        attention_out=option(config, "attention_out_multiplier", 1.0),
        keys=option(config, "key_multiplier", 1.0),
        values=option(config, "attention_value_scale") or 1.0,
        gates=gates,
        products=products,
    )


def _space(config: Any) -> SpaceConfig | None:
    if not is_option(config.model_type, "time_step_limit"):
        return None
    # Not `time_step_min`, a range for initialising biases: the steps of trained models are far smaller.
    least, most = config.time_step_limit or (0.0, float("inf"))
    return SpaceConfig(
        (least, most),
        gates_first=not option(config, "mamba_norm_before_gate", False),
        in_multiplier=option(config, "ssm_in_multiplier", 1.0),
        out_multiplier=option(config, "ssm_out_multiplier", 1.0),
        multipliers=tuple(option(config, "ssm_multipliers") or ()),
    )


def _rotary_name(config: Any, number: int, window: int, kind: str, rotary: Mapping[str, Rotary]) -> str | None:
    """Returns the key of a layer's rotary embedding, None if it has none."""
    with_rotary, thetas = option(config, "no_rope_layers"), option(config, "layer_rope_theta")
    if not rotary or (with_rotary and not with_rotary[number]) or (thetas and not thetas[number]):
        return None
    if (option(config, "rope_parameters") or {}).get(kind, "") is None:
        return None
    dense_pattern = option(config, "prefix_dense_sliding_window_pattern", 0)
    is_dense = dense_pattern == 1 and feed_forward_of(config, number) != "mixture"
    has_windows = type_of(config).rotary.windows_only and config.sliding_window is not None
    if has_windows and not (window or is_dense):
        return None
    return str(thetas[number]) if thetas else "" if "" in rotary else kind
