"""The options of the decoders that have a plan, by their type in transformers, as far as their configurations do not
say them. `of_model` reads these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diskprefix.model.config import DecoderConfig, LayerConfig
from diskprefix.model.families.mixture_types import has_mixture, mixture_of
from diskprefix.model.plan import Location, Rotary, StateLocation

_PLAIN = "cwm granite internlm3 iquestcoder llama ministral mistral qwen2 qwen2_5_vl_text qwen2_vl_text seed_oss"
_NOTHING: Mapping[str, Any] = {}
_GEMMA: Mapping[str, Any] = {"norm": "rms_plus_one", "embedding_multiplier": "root of hidden_size"}

_LFM2_NAMES = {
    "norm": "embedding_norm",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "o_proj": "out_proj",
    "mlp": "feed_forward",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(_PLAIN.split(), _NOTHING),
    "qwen3": {"has_head_norms": True},
    "qwen3_moe": {"has_head_norms": True},
    "qwen3_vl_text": {"has_head_norms": True},
    "gemma": _GEMMA,
    "gemma2": {**_GEMMA, "norms": "around"},
    "gemma3_text": {**_GEMMA, "norms": "around", "has_head_norms": True},
    "lfm2": {"has_head_norms": True, "names": _LFM2_NAMES},
}

SECTIONS_IN_ORDER = ("qwen2_vl_text", "qwen2_5_vl_text")
"""Those whose frequencies for the three dimensions of a position follow each other. Others take turns."""

_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "squared_relu",
}


def of_model(
    config: Any,
    windows: Sequence[int],
    places: Sequence[Mapping[str, Location]],
    states: Sequence[Mapping[tuple[str, int], StateLocation]],
    rotary: Mapping[str, Rotary],
    sees_pictures: str,
) -> DecoderConfig:
    """Returns what a configuration of transformers' says of a decoder of text, with the window of each layer, 0
    without, and its places in memory and those of its states."""
    options = {**OPTIONS[config.model_type]}
    if options.get("embedding_multiplier") == "root of hidden_size":
        options["embedding_multiplier"] = config.hidden_size**0.5
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", ())
    scale = getattr(config, "attention_multiplier", None) or getattr(config, "query_pre_attn_scalar", head_dim) ** -0.5
    found: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "layers": tuple(
            LayerConfig(
                of_layer,
                mixer="short_convolution" if kinds and kinds[number] == "conv" else "attention",
                feed_forward="mixture" if has_mixture(config, number) else "gated",
                window=window,
                rotary="" if "" in rotary else kinds[number],
                states=of_states,
            )
            for number, (of_layer, of_states, window) in enumerate(zip(places, states, windows, strict=True))
        ),
        "rotary": rotary,
        "epsilon": config.norm_eps if hasattr(config, "norm_eps") else config.rms_norm_eps,
        "activation": _ACTIVATIONS[getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "silu")],
        "mixture": mixture_of(config),
        "scale": scale,
        "softcap": getattr(config, "attn_logit_softcapping", None) or 0.0,
        "embedding_multiplier": getattr(config, "embedding_multiplier", 1.0),
        "residual_multiplier": getattr(config, "residual_multiplier", 1.0),
        "logits_divisor": getattr(config, "logits_scaling", 1.0),
        "logits_softcap": getattr(config, "final_logit_softcapping", None) or 0.0,
        "sees_pictures": sees_pictures,
    }
    return DecoderConfig(**(found | options))
