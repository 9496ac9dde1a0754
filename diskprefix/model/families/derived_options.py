"""Options that the classes of transformers make of others, as far as a configuration does not say them.

`own` are the options that a type of model has, `extra` what else the configuration says. Both are changed in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from diskprefix.errors import ModelError
from diskprefix.printable import shown

Options: TypeAlias = dict[str, Any]

_FULL, _SLIDING, _LINEAR, _CHUNKED = "full_attention", "sliding_attention", "linear_attention", "chunked_attention"
_QWEN = ("qwen2", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3", "qwen3_moe")
_LATENT = ("axk1", "deepseek_v2", "deepseek_v3", "kimi_linear", "minicpm3", "youtu")
_NEMOTRON_H = {"M": _LINEAR, "E": "moe", "*": _FULL, "-": "mlp"}
_OLDER_NAMES: Mapping[str, Mapping[str, str]] = {
    "lfm2": {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
    "lfm2_moe": {"tie_embedding": "tie_word_embeddings"},
    "nemotron_h": {
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_expand": "expand",
        "mamba_dt_limit": "time_step_limit",
        "mamba_conv_bias": "use_conv_bias",
    },
}
OLDER_LAYERS = {"mamba": _LINEAR, "attention": _FULL}


def derive(kind: str, own: Options, extra: Options) -> None:
    """Sets the options of a decoder of text of the type `kind` that follow from others, but for those of positions.
    Raises `ModelError`, and whatever numbers of other types raise."""
    for older, name in _OLDER_NAMES.get(kind, {}).items():
        if older in extra:
            own[name] = extra.pop(older)
    heads = own.get("num_attention_heads", own.get("n_head"))
    if own.get("num_key_value_heads", 0) is None:
        own["num_key_value_heads"] = heads
    if own.get("head_dim", 0) is None:
        own["head_dim"], surplus = divmod(own["hidden_size"], heads)
        if surplus:
            raise ModelError(f"the width of the model, {own['hidden_size']}, is not a multiple of its {heads} heads")
    if own.get("time_step_limit") is not None:
        _require_limits(own["time_step_limit"])
    if kind in _QWEN and not own["use_sliding_window"]:
        own["sliding_window"] = None
    if kind in _LATENT:
        own["head_dim"] = own["qk_rope_head_dim"]
    if kind in _OTHERS:
        _OTHERS[kind](own, extra)
    for name, made in (("layer_types", _LAYERS), ("layers_block_type", _LAYERS), ("mlp_layer_types", _FEED_FORWARD)):
        if kind in made and name in own and own[name] is None:
            own[name] = made[kind](own, extra)
    if kind == "nemotron_h":
        own["num_hidden_layers"] = len(own["layers_block_type"])


def _require_limits(found: Any) -> None:
    """Raises `ModelError` if these are not the least and the largest step of a state space."""
    are_numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in found)
    if not are_numbers or len(found) != 2 or not 0 <= found[0] <= found[1]:
        raise ModelError(f"the configuration's time_step_limit is {shown(repr(found))}, not a least and a largest step")


def _count(own: Options) -> range:
    return range(own["num_hidden_layers"])


def _each(every: Any, other: str = _SLIDING) -> Callable[[Options, Options], list[str]]:
    """Returns what makes kinds of layers: full attention in each one of `every`, a number, or a key and its default."""

    def made(own: Options, extra: Options) -> list[str]:
        if isinstance(every, int):
            step = every
        else:
            name, default = every
            step = own[name] if name in own else extra.get(name, default)
        return [_FULL if (i + 1) % step == 0 else other for i in _count(own)]

    return made


def _all(kind: str) -> Callable[[Options, Options], list[str]]:
    return lambda own, _: [kind for _ in _count(own)]


def _behind_full(own: Options, _: Options) -> list[str]:
    first = own["num_hidden_layers"] if own["sliding_window"] is None else own["max_window_layers"]
    return [_SLIDING if i >= first else _FULL for i in _count(own)]


def _first_full(every: int) -> Callable[[Options, Options], list[str]]:
    return lambda own, _: [_SLIDING if i % every else _FULL for i in _count(own)]


def _exaone(own: Options, extra: Options) -> list[str]:
    if own["sliding_window"] is None:
        raise ModelError("the configuration says neither a window nor the kinds of its layers")
    return _each(("sliding_window_pattern", 4))(own, extra)


def _cohere_2_moe(own: Options, extra: Options) -> list[str]:
    dense = extra.get("first_k_dense_replace", 0)
    steps = own["prefix_dense_sliding_window_pattern"], own["sliding_window_pattern"]
    numbers = [(i, steps[0]) for i in range(dense)] + [(i, steps[1]) for i in range(own["num_hidden_layers"] - dense)]
    return [_SLIDING if (i + 1) % step else _FULL for i, step in numbers]


def _qwen_2_moe(own: Options, _: Options) -> list[str]:
    last = own["max_window_layers"] if own["use_sliding_window"] else 0
    return [_SLIDING if (i + 1) % 2 and i < last else _FULL for i in _count(own)]


def _kimi(own: Options, extra: Options) -> list[str]:
    of_checkpoint = extra.get("linear_attn_config", {})
    if "full_attn_layers" not in of_checkpoint or "kda_layers" not in of_checkpoint:
        return [_FULL if i and i % 4 == 0 else _LINEAR for i in _count(own)]
    kinds = {
        layer - 1: kind
        for kind, name in ((_FULL, "full_attn_layers"), (_LINEAR, "kda_layers"))
        for layer in of_checkpoint[name]
    }
    return [kinds[i] for i in _count(own)]


def _lfm_2(own: Options, _: Options) -> list[str]:
    full = own["full_attn_idxs"]
    return [_FULL if full is None or i in full else "conv" for i in _count(own)]


def _nemotron_h(_: Options, extra: Options) -> list[str]:
    return [_NEMOTRON_H[one] for one in extra.get("hybrid_override_pattern", "ME*-")]


def _olmo_hybrid(own: Options, _: Options) -> list[str]:
    found = [_FULL if i % 4 == 3 else _LINEAR for i in _count(own)]
    return found if _FULL in found else [*found[:-1], _FULL]


_LAYERS: Mapping[str, Callable[[Options, Options], list[str]]] = {
    "afmoe": _each(("global_attn_every_n_layers", 0)),
    "cohere2": _each(("sliding_window_pattern", 4)),
    "cohere2_moe": _cohere_2_moe,
    **dict.fromkeys(("cohere_compass_text", "laguna", "mellum", "step3p5"), _all(_FULL)),
    "cwm": _first_full(4),
    **dict.fromkeys(("dots1", "qwen2", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3"), _behind_full),
    **dict.fromkeys(("exaone4", "exaone_moe"), _exaone),
    "flint": lambda own, _: [
        _FULL if i < 2 or i % 4 == 1 or i == own["num_hidden_layers"] - 1 else _SLIDING for i in _count(own)
    ],
    **dict.fromkeys(("gemma2", "gpt_oss", "vaultgemma"), _each(2)),
    "gemma3_text": _each(("sliding_window_pattern", 6)),
    **dict.fromkeys(("gemma3n_text", "kolibri1"), _each(5)),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _each(6)),
    **dict.fromkeys(("granite_swa", "granitemoe_swa"), _first_full(4)),
    "granitemoehybrid": _all(_LINEAR),
    "kimi_linear": _kimi,
    "lfm2": _lfm_2,
    "llama4_text": lambda own, _: [_CHUNKED if one else _FULL for one in own["no_rope_layers"]],
    "mimo_v2_flash": lambda own, _: [_FULL if i == 0 or (i + 1) % 6 == 0 else _SLIDING for i in _count(own)],
    "ministral": lambda own, _: [_FULL if own["sliding_window"] is None else _SLIDING for _ in _count(own)],
    "nemotron_h": _nemotron_h,
    "olmo3": _each(4),
    "olmo_hybrid": _olmo_hybrid,
    "qwen2_moe": _qwen_2_moe,
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _each(("full_attention_interval", 4), _LINEAR)),
    "smollm3": lambda own, _: [
        _SLIDING if own["use_sliding_window"] and own["sliding_window"] is not None and not one else _FULL
        for one in own["no_rope_layers"][: own["num_hidden_layers"]]
    ],
}
"""What layers compute from other tokens with, by type."""


def _behind_dense(name: str, default: int) -> Callable[[Options, Options], list[str]]:
    """Returns what makes kinds of feed-forward parts: mixtures behind so many layers."""

    def made(own: Options, extra: Options) -> list[str]:
        first = own[name] if name in own else extra.get(name, default)
        return ["dense" if i < first else "sparse" for i in _count(own)]

    return made


def _axk_1(own: Options, extra: Options) -> list[str]:
    every = extra.get("moe_layer_freq", 1)
    kinds = _behind_dense("first_k_dense_replace", 1)(own, extra)
    return ["dense" if i % every else kind for i, kind in enumerate(kinds)]


def _step_3(own: Options, extra: Options) -> list[str]:
    listed = extra.get("moe_layers_enum")
    items = listed.split(",") if isinstance(listed, str) else listed
    numbers = range(3, own["num_hidden_layers"]) if items is None else {int(i) for i in items if str(i).strip()}
    return ["sparse" if i in numbers else "dense" for i in _count(own)]


_FEED_FORWARD: Mapping[str, Callable[[Options, Options], list[str]]] = {
    "axk1": _axk_1,
    "cohere2_moe": _behind_dense("first_k_dense_replace", 0),
    "exaone_moe": _behind_dense("first_k_dense_replace", 0),
    "kimi_linear": _behind_dense("first_k_dense_replace", 1),
    **dict.fromkeys(("glm4_moe_lite", "hy_v3", "laguna", "mimo_v2_flash"), _behind_dense("", 1)),
    "mellum": _behind_dense("", 0),
    "step3p5": _step_3,
}
"""What follows attention, by type."""


def _set(name: str, make: Callable[[Options], Any]) -> Callable[[Options, Options], None]:
    """Returns what sets an option that is not set."""

    def found(own: Options, _: Options) -> None:
        if own[name] is None:
            own[name] = make(own)

    return found


def _state_space(own: Options, extra: Options) -> None:
    width = own.get("mamba_d_ssm")
    if own["mamba_d_head"] == "auto":
        width = own["mamba_expand"] * own["hidden_size"] if width is None else width
        own["mamba_d_head"] = width // own["mamba_n_heads"]
    for name, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
        if own.get(name, ()) is None:
            own[name] = [1.0] * count
    if "layers_block_type" in extra:
        raise ModelError("the kinds of layers of this type follow from other options")
    if "attn_layer_indices" in own:
        full = own["attn_layer_indices"] or ()
        own["layers_block_type"] = [_FULL if i in full else _LINEAR for i in _count(own)]
    elif "layer_types" not in own:
        own["layers_block_type"] = _all("hybrid")(own, {})


def _gemma(own: Options, _: Options) -> None:
    if own["hidden_act"] == "gelu":
        own["hidden_act"] = "gelu_pytorch_tanh"


def _gemma_3n(own: Options, _: Options) -> None:
    count = own["num_hidden_layers"]
    if isinstance(own["intermediate_size"], int):
        own["intermediate_size"] = [own["intermediate_size"]] * count
    if own["activation_sparsity_pattern"] is None:
        num_sparse = 10 if count > 10 else 0
        own["activation_sparsity_pattern"] = [0.95] * num_sparse + [0.0] * (count - num_sparse)


def _of_whole_layers(name: str) -> Callable[[Options, Options], None]:
    def found(own: Options, extra: Options) -> None:
        """Layers without a window have heads of another size, and may have another number of them."""
        size, heads = extra.pop("global_head_dim", 512), extra.pop("num_global_key_value_heads", None)
        own["layer_types"] = [*(own["layer_types"] or _LAYERS[name](own, extra))[:-1], _FULL]
        if "per_layer_config" not in extra:
            changed = {"head_dim": size}
            if heads is not None and own.get("attention_k_eq_v", True):
                changed["num_key_value_heads"] = heads
            extra["per_layer_config"] = {i: changed for i, kind in enumerate(own["layer_types"]) if kind == _FULL}

    return found


def _kimi_sizes(own: Options, extra: Options) -> None:
    of_checkpoint = extra.get("linear_attn_config") or {}
    for name, key in (
        ("linear_head_dim", "head_dim"),
        ("linear_num_heads", "num_heads"),
        ("linear_conv_kernel_dim", "short_conv_kernel_size"),
    ):
        own[name] = of_checkpoint.get(key, own[name])


def _llama_4(own: Options, _: Options) -> None:
    step, count = own["interleave_moe_layer_step"], own["num_hidden_layers"]
    own["no_rope_layers"] = own["no_rope_layers"] or _turning(own)
    if own["moe_layers"] is None:
        own["moe_layers"] = [*range(step - 1, count, step)]


def _turning(own: Options) -> list[int]:
    return [int((i + 1) % own["no_rope_layer_interval"] != 0) for i in _count(own)]


def _mimo(own: Options, extra: Options) -> None:
    if own["routed_scaling_factor"] is None:
        own["routed_scaling_factor"] = 1.0
    if extra.get("sliding_window_size") is not None:
        # It counts the tokens before the present one.
        own["sliding_window"] = extra["sliding_window_size"] + 1


def _minicpm(own: Options, _: Options) -> None:
    if own["v_head_dim"] is None:
        own["v_head_dim"] = own["hidden_size"] // own["num_attention_heads"]
    if own["scale_depth"] is None:
        own["scale_depth"] = math.sqrt(own["num_hidden_layers"])
    if own["dim_model_base"] is None:
        own["dim_model_base"] = own["hidden_size"]
    own["logits_scaling"] = own["hidden_size"] / own["dim_model_base"]


def _mistral_4(own: Options, _: Options) -> None:
    own["head_dim"] = own["qk_nope_head_dim"] + own["qk_rope_head_dim"]


def _delta_of_olmo(own: Options, _: Options) -> None:
    heads = own["num_attention_heads"]
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        own[name] = heads if own[name] is None else own[name]
    if own["linear_key_head_dim"] is None:
        own["linear_key_head_dim"] = int(0.75 * own["hidden_size"] / own["linear_num_key_heads"])
    if own["linear_value_head_dim"] is None:
        own["linear_value_head_dim"] = 2 * own["linear_key_head_dim"]


def _step_sizes(own: Options, extra: Options) -> None:
    count = own["num_hidden_layers"]
    own["num_nextn_predict_layers"] = further = extra.pop(
        "num_nextn_predict_layers", own.get("num_nextn_predict_layers", 0)
    )
    for options, names in (
        (own, ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared")),
        (extra, ("rope_theta", "partial_rotary_factors")),
    ):
        for name in names:
            if isinstance(found := options.get(name), list) and len(found) == count + further:
                options[name] = found[:count]
    if own["num_sliding_attention_heads"] is None:
        of_windows = extra.get("attention_other_setting") or {}
        own["num_sliding_attention_heads"] = of_windows.get("num_attention_heads", own["num_attention_heads"])
    kinds = own["layer_types"] or []
    heads = {"num_attention_heads": own["num_sliding_attention_heads"]}
    extra.setdefault("per_layer_config", {i: heads for i, kind in enumerate(kinds) if kind == _SLIDING})
    if own["query_pre_attn_scalar"] is None:
        own["query_pre_attn_scalar"] = own["head_dim"]
    own["hidden_act"] = "silu"


def _plain_heads(own: Options, _: Options) -> None:
    own["head_dim"] = own["hidden_size"] // own["num_attention_heads"]


def _iquest_coder(_: Options, extra: Options) -> None:
    if extra.get("use_sliding_window") or extra.get("clip_qkv") is not None:
        raise ModelError("windows and clipped queries are not known of this type")


def _big_code(own: Options, _: Options) -> None:
    own["num_key_value_heads"] = 1 if own["multi_query"] else own["n_head"]


def _no_window(own: Options, _: Options) -> None:
    own["sliding_window"] = own["sliding_window"] if own["use_sliding_window"] else 0


_OTHERS: Mapping[str, Callable[[Options, Options], None]] = {
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), _state_space),
    **dict.fromkeys(("cohere2", "cohere_compass_text"), _plain_heads),
    "ernie4_5_moe": lambda own, _: own.update(
        {} if own["moe_layer_end_index"] != -1 else {"moe_layer_end_index": own["num_hidden_layers"] - 1}
    ),
    "flint": _set("mlp_only_layers", lambda _: [0, 1]),
    "gemma": _gemma,
    "gemma3n_text": _gemma_3n,
    **{name: _of_whole_layers(name) for name in ("gemma4_text", "gemma4_unified_text")},
    "gpt_bigcode": _big_code,
    "iquestcoder": _iquest_coder,
    "hyperclovax": _set("attention_multiplier", lambda own: own["head_dim"] ** -0.5),
    "kimi_linear": _kimi_sizes,
    "laguna": _set(
        "num_attention_heads_per_layer", lambda own: [own["num_attention_heads"]] * own["num_hidden_layers"]
    ),
    "llama4_text": _llama_4,
    "mamba2": lambda own, _: own.update(layer_types=_all(_LINEAR)(own, {})),
    "mimo_v2_flash": _mimo,
    "minicpm3": _minicpm,
    "mistral4": _mistral_4,
    "olmo_hybrid": _delta_of_olmo,
    "opt": _set("word_embed_proj_dim", lambda own: own["hidden_size"]),
    "qwen2_moe": _no_window,
    "qwen3_vl_moe_text": lambda own, _: own.update(sliding_window=None),
    "smollm3": _set("no_rope_layers", _turning),
    "step3p5": _step_sizes,
}
"""Other options, by type."""
