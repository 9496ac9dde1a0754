"""The metadata of a GGUF file, below its architecture, compared with the configuration that was made of them.

transformers reads some keys and takes the defaults of a class for the others. Here what it leaves is put into the
configuration. Then every key is compared with it: one that changes numbers and that nothing reads is refused by name.
A key that is not there has the value that llama.cpp takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from diskprefix.errors import ModelError
from diskprefix.model.load.gguf_header import GgufHeader
from diskprefix.model.load.gguf_rope import SCALING, full_parameters

_LATENT, _GEMMA_4 = "deepseek2", "gemma4"
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the models with 27B parameters. Their queries are scaled by another number, which the file lacks."""
_OF_GEMMA_2: Mapping[str, Any] = {
    "attention.sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
"""What its older files lack."""
_BASE = 10000.0
_EPSILONS = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
_EPSILON_KEYS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_ROTARY, _ROTARY_OF_WINDOWS = "rope.dimension_count", "rope.dimension_count_swa"
_GATES = {
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_5_moe_text", "deepseek_v2"), 1),
    **dict.fromkeys(("deepseek_v3", "minimax_m2"), 2),
    "gpt_oss": 3,
}
"""How the routers of transformers' models make weights of scores: softmax, sigmoid, softmax of the chosen ones."""

_SHOWN_BY_TENSORS = {
    "vocab_size",
    "embedding_length",
    "block_count",
    "nextn_predict_layers",
    "feed_forward_length",
    "leading_dense_block_count",
    "expert_count",
    "expert_feed_forward_length",
    "expert_shared_count",
    "expert_shared_feed_forward_length",
    "use_parallel_residual",
    "attention.q_lora_rank",
    "attention.kv_lora_rank",
    "shortconv.l_cache",
    "ssm.conv_kernel",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
    "ssm.group_count",
}
"""A model with other values has tensors of other names or shapes, which are refused."""
_DESCRIPTIVE = {
    "context_length",
    "tensor_data_layout",
    "pooling_type",
    "classifier.output_labels",
    # Checked before.
    "attention.causal",
    # All sections have the same position in text.
    "rope.dimension_sections",
    # Checked with the model itself.
    _ROTARY,
    _ROTARY_OF_WINDOWS,
}
_NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "router_logit_softcapping": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.temperature_scale": (0,),
    "ssm.dt_b_c_rms": (0,),
}
"""Values that change nothing, of keys that nothing reads."""
_OF_ENCODERS = ("mm.", "vision.", "audio.")
"""What some files of text models say of the encoders of pictures and sound, which are other files."""
_OF_LATENT = {
    "attention.key_length",
    "attention.value_length",
    "attention.key_length_mla",
    "attention.value_length_mla",
    "attention.head_count_kv",
}
"""What `gguf_architectures` reads of DeepSeek's layers, where it means something else."""


def own_values(header: GgufHeader) -> dict[str, Any]:
    """Returns the metadata below the file's architecture: numbers, strings, tuples, and None for an array that is too
    long to be kept."""
    prefix = f"{header.values.get('general.architecture')}."
    found = {**header.values, **header.lists}
    return {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}


def complete(config: Any, header: GgufHeader, tensor_names: Iterable[str]) -> None:
    """Puts what transformers does not read of the file into the configuration that it made."""
    architecture, values = header.values["general.architecture"], own_values(header)
    for key in _EPSILON_KEYS:
        if key in values and (name := _epsilon_name(config)):
            setattr(config, name, values[key])
    for cap in _CAPS:
        if cap in values and _is_declared(config, cap):
            setattr(config, cap, values[cap] or None)
    window = "attention.sliding_window"
    if window in values and _is_declared(config, "sliding_window") and not _is_declared(config, "use_sliding_window"):
        config.sliding_window = values[window] or None
    if architecture not in (_LATENT, _GEMMA_4):
        if _is_declared(config, "head_dim"):
            config.head_dim = values.get("attention.key_length", _plain_head_dim(config))
        _rotate(config, values)
    if (layers := _LARGEST_GEMMA.get(architecture)) is not None:
        is_largest = config.num_hidden_layers == layers
        config.query_pre_attn_scalar = _plain_head_dim(config) if is_largest else config.head_dim
    endings = {".".join(name.split(".")[-2:]) for name in tensor_names}
    if _is_declared(config, "attention_bias"):
        config.attention_bias = bool(endings & {"attn_q.bias", "attn_qkv.bias", "attn_output.bias"})
    if _is_declared(config, "mlp_bias"):
        config.mlp_bias = bool(endings & {"ffn_up.bias", "ffn_down.bias"})


def _rotate(config: Any, values: Mapping[str, Any]) -> None:
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        return
    full, windows = full_parameters(config), parameters.get("sliding_attention")
    full["rope_theta"] = values.get("rope.freq_base", _BASE)
    if windows is not None:
        windows["rope_theta"] = values.get("rope.freq_base_swa", _BASE)
    factor = values.get(_ROTARY, _head_dim(config)) / _head_dim(config)
    if factor != full.get("partial_rotary_factor", 1):
        full["partial_rotary_factor"] = factor


def require_all_read(config: Any, header: GgufHeader) -> None:
    """Raises `ModelError` with the name of a key if the model with this configuration has other numbers than the file
    says, or if it is not known what the key means."""
    # As it is read from the folder later: transformers changes some values then.
    config = type(config).from_dict(config.to_dict())
    config.allow_global_per_layer_attribute_access = True
    architecture, values = str(header.values["general.architecture"]), own_values(header)
    ignored = _SHOWN_BY_TENSORS | _DESCRIPTIVE | (_OF_LATENT if architecture == _LATENT else set())
    if not values.get("expert_count"):
        ignored |= {key for key in (*_FOUND, *values) if key.startswith("expert_")}
    if not any(key in values for key in _EPSILON_KEYS):
        raise ModelError(f"the file lacks {architecture}.{_EPSILON_KEYS[0]}")
    for key, expected in values.items():
        name = f"{architecture}.{key}"
        if (
            key in ignored
            or key in _FOUND
            or name.removeprefix(architecture).startswith(SCALING)
            or key.startswith(_OF_ENCODERS)
        ):
            continue
        if expected not in _NEUTRAL.get(key, ()):
            raise ModelError(f"the file's {name} is {_shown(expected)}, and nothing here reads it")
    for key, find in _FOUND.items():
        if key in ignored:
            continue
        found = find(config, values)
        if (expected := values.get(key, _default(key, architecture, config, values))) is None and key not in values:
            continue
        if not _is_same(key, expected, found):
            is_there = "is" if key in values else "is not there, which means"
            raise ModelError(
                f"the file's {architecture}.{key} {is_there} {_shown(expected)}, and the model would have "
                f"{_shown(found)}"
            )


def require_rotary(model: Any, header: GgufHeader) -> None:
    """Raises `ModelError` if the model rotates another part of its heads than the file says."""
    architecture, values = header.values["general.architecture"], own_values(header)
    found = {
        2 * int(buffer.numel())
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and "original" not in name
    }
    if not found and _ROTARY not in values:
        return
    expected = values.get(_ROTARY, values.get("attention.key_length", _plain_head_dim(model.config)))
    of_windows = values.get(_ROTARY_OF_WINDOWS, expected)
    if found != {expected, of_windows}:
        key = _ROTARY if expected not in found else _ROTARY_OF_WINDOWS
        raise ModelError(
            f"the file's {architecture}.{key} is {expected if key == _ROTARY else of_windows}, and the model would "
            f"rotate {' and '.join(map(str, sorted(found))) or 'nothing'}"
        )


def _is_declared(config: Any, name: str) -> bool:
    """Returns whether the class of the configuration has a value of this name, which can be set."""
    found = getattr(type(config), name, property())
    return not isinstance(found, property)


def _epsilon_name(config: Any) -> str | None:
    return next((name for name in _EPSILONS if _is_declared(config, name)), None)


def _plain_head_dim(config: Any) -> int:
    num_heads = getattr(config, "num_attention_heads", 0)
    return int(config.hidden_size // num_heads) if num_heads else 0


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or _plain_head_dim(config)


def _key_dim(config: Any) -> int:
    """Returns the width of heads in the layers without a window."""
    if config.model_type != "gemma4_text" or "full_attention" not in config.layer_types:
        return _head_dim(config)
    return int(config.per_layer_config[config.layer_types.index("full_attention")].head_dim)


def _num_kv_heads(config: Any) -> Any:
    if config.model_type == "falcon":
        is_single = config.multi_query and not config.new_decoder_architecture
        return 1 if is_single else config.num_kv_heads
    found = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 0)
    kinds = getattr(config, "layer_types", None) or ()
    return tuple(found if kind == "full_attention" else 0 for kind in kinds) if "conv" in kinds else found


def _theta(config: Any) -> Any:
    return full_parameters(config).get("rope_theta")


def _theta_of_windows(config: Any) -> Any:
    windows = (getattr(config, "rope_parameters", None) or {}).get("sliding_attention")
    return _theta(config) if windows is None else windows["rope_theta"]


def _layers_of(config: Any, kind: str, pattern: Any) -> Any:
    """Returns which layers are of a kind; for a number, itself if all but every so many layers are."""
    found = tuple(one == kind for one in getattr(config, "layer_types", None) or ())
    if isinstance(pattern, tuple) or pattern is None:
        return found
    every = tuple((i + 1) % pattern != 0 for i in range(len(found))) if pattern else (True,) * len(found)
    return pattern if found and found == every else found


def _scale(config: Any, _: Mapping[str, Any]) -> float:
    return float((getattr(config, "query_pre_attn_scalar", None) or _head_dim(config) or 1) ** -0.5)


def _attribute(*names: str, default: Any = 0) -> Callable[[Any, Mapping[str, Any]], Any]:
    def find(config: Any, _: Mapping[str, Any]) -> Any:
        return next((found for name in names if (found := getattr(config, name, None)) is not None), default)

    return find


def _epsilon(config: Any, _: Mapping[str, Any]) -> Any:
    name = _epsilon_name(config)
    return None if name is None else getattr(config, name)


_FOUND: Mapping[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    **dict.fromkeys(_EPSILON_KEYS, _epsilon),
    **{cap: _attribute(cap) for cap in _CAPS},
    "attention.head_count": _attribute("num_attention_heads"),
    "attention.head_count_kv": lambda config, _: _num_kv_heads(config),
    "attention.key_length": lambda config, _: _key_dim(config),
    "attention.value_length": lambda config, _: _key_dim(config),
    "attention.key_length_swa": lambda config, _: _head_dim(config),
    "attention.value_length_swa": lambda config, _: _head_dim(config),
    "attention.scale": _scale,
    "attention.sliding_window": _attribute("sliding_window"),
    "attention.sliding_window_pattern": lambda config, values: _layers_of(
        config, "sliding_attention", values.get("attention.sliding_window_pattern")
    ),
    "attention.shared_kv_layers": _attribute("num_kv_shared_layers"),
    "attention.recurrent_layers": lambda config, values: _with_predictors(
        _layers_of(config, "linear_attention", None), values.get("attention.recurrent_layers")
    ),
    "full_attention_interval": lambda config, values: _layers_of(
        config, "linear_attention", values.get("full_attention_interval")
    ),
    "embedding_length_per_layer_input": _attribute("hidden_size_per_layer_input"),
    "expert_used_count": _attribute("num_experts_per_tok", "top_k_experts"),
    "expert_group_count": _attribute("n_group", default=1),
    "expert_group_used_count": _attribute("topk_group", default=1),
    "expert_weights_scale": _attribute("routed_scaling_factor", default=1),
    "expert_weights_norm": _attribute("norm_topk_prob", default=True),
    "expert_gating_func": lambda config, _: _GATES.get(config.model_type),
    "rope.freq_base": lambda config, _: _theta(config),
    "rope.freq_base_swa": lambda config, _: _theta_of_windows(config),
}
"""What the model has of each key, by its configuration. The keys of `SCALING` are checked where they are read."""


def _with_predictors(found: tuple[bool, ...], of_file: Any) -> Any:
    """Returns `found` with the further blocks of the file, which predict further tokens and are not recurrent."""
    return found if of_file is None else (*found, *(False,) * (len(of_file) - len(found)))


def _default(key: str, architecture: str, config: Any, values: Mapping[str, Any]) -> Any:
    """Returns the value of a key that is not there; None if nothing is known."""
    if architecture == "gemma2" and key in _OF_GEMMA_2:
        return _OF_GEMMA_2[key]
    if architecture == _GEMMA_4:
        return 0 if key in ("attention.shared_kv_layers", "embedding_length_per_layer_input") else None
    if key in _CAPS or (key == "attention.sliding_window" and architecture != "gpt-oss"):
        return 0
    if key in ("attention.key_length", "attention.value_length"):
        return _plain_head_dim(config)
    if key == "attention.head_count_kv":
        return values.get("attention.head_count")
    if not getattr(config, "rope_parameters", None):
        return None
    is_nested = "sliding_attention" in config.rope_parameters
    return _BASE if key == "rope.freq_base" or (key == "rope.freq_base_swa" and is_nested) else None


def _is_same(key: str, expected: Any, found: Any) -> bool:
    if isinstance(expected, tuple) and not isinstance(found, tuple):
        return bool(expected) and all(_is_same(key, one, found) for one in expected)
    if isinstance(expected, tuple):
        return tuple(map(float, expected)) == tuple(map(float, found))
    if not isinstance(expected, int | float) or not isinstance(found, int | float | None):
        return bool(expected == found)
    # Zero stands for what a model does without.
    nothing = 1 if key.startswith(("expert_group", "expert_weights_scale")) else 0
    expected, found = expected or nothing, found or nothing
    if key in ("expert_gating_func", "attention.scale") and not expected:
        return True
    return math.isclose(float(expected), float(found), rel_tol=1e-6)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    found = "an array" if value is None else str(value)
    return found if len(found) <= 60 else f"{found[:57]}..."
