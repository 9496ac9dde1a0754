"""The configuration that the metadata of a `.gguf` file describe.

`_COMMON` has the keys that most architectures share; an `Architecture` adds the others. A missing key has llama.cpp's
default.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from diskprefix.errors import ModelError
from diskprefix.printable import first_line
from diskprefix.runtime.files.gguf.metadata import Metadata, shown
from diskprefix.runtime.files.gguf.sources import head_dim
from diskprefix.runtime.plan.families.type_table import is_declared
from diskprefix.runtime.plan.families.types.known_types import TYPES
from diskprefix.runtime.plan.model_config import ModelConfig

if TYPE_CHECKING:
    from diskprefix.runtime.files.gguf.architecture import Architecture

_LEFT = object()
"""No default: the default of the class stays, or the architecture sets the option."""
BASE = 10000.0
"""The base of the rotary embedding if a file has none."""
_ROTARY, _ROTARY_OF_WINDOWS = "rope.dimension_count", "rope.dimension_count_swa"
_EPSILONS = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
_EPSILON_KEYS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")

_COMMON: tuple[tuple[str, str, Any], ...] = (
    ("embedding_length", "hidden_size", None),
    ("context_length", "max_position_embeddings", None),
    ("attention.head_count", "num_attention_heads", None),
    ("feed_forward_length", "intermediate_size", _LEFT),
    ("attention.sliding_window", "sliding_window", 0),
    ("attn_logit_softcapping", "attn_logit_softcapping", 0),
    ("final_logit_softcapping", "final_logit_softcapping", 0),
    ("expert_count", "num_experts num_local_experts n_routed_experts moe_num_experts", _LEFT),
    ("expert_used_count", "num_experts_per_tok top_k_experts num_experts_per_token moe_k moe_topk", _LEFT),
    ("expert_feed_forward_length", "moe_intermediate_size", _LEFT),
    ("moe_latent_size", "moe_latent_size", _LEFT),
    ("expert_shared_feed_forward_length", "shared_expert_intermediate_size moe_shared_expert_intermediate_size", _LEFT),
    ("expert_shared_count", "n_shared_experts num_shared_experts moe_num_shared_experts", _LEFT),
    ("expert_weights_scale", "routed_scaling_factor", 1.0),
    ("expert_weights_norm", "norm_topk_prob", _LEFT),
    ("expert_group_count", "n_group", 1),
    ("expert_group_used_count", "topk_group", 1),
    ("leading_dense_block_count", "first_k_dense_replace num_dense_layers moe_layer_start_index", 0),
    ("attention.q_lora_rank", "q_lora_rank", _LEFT),
    ("attention.kv_lora_rank", "kv_lora_rank", _LEFT),
    ("embedding_scale", "embedding_multiplier", 1.0),
    ("residual_scale", "residual_multiplier", 1.0),
    ("attention.scale", "attention_multiplier", _LEFT),
    ("logit_scale", "logits_scaling logit_scale", _LEFT),
    ("attention.shared_kv_layers", "num_kv_shared_layers", 0),
    ("embedding_length_per_layer_input", "hidden_size_per_layer_input", 0),
    ("shortconv.l_cache", "conv_L_cache", None),
    ("ssm.time_step_rank", "linear_num_value_heads mamba_n_heads mamba_num_heads num_heads", None),
    ("ssm.group_count", "linear_num_key_heads mamba_n_groups n_groups", None),
    ("ssm.state_size", "linear_key_head_dim mamba_d_state ssm_state_size state_size", None),
    ("ssm.conv_kernel", "linear_conv_kernel_dim mamba_d_conv conv_kernel", None),
    ("ssm.inner_size", "mamba_d_ssm", None),
)
"""Keys, the names of their options in configurations, and the value if the key is missing. None: it is required."""
_OFF_AS_NONE = {"sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}
"""Options that are None if a file has zero."""
_FLAGS: Mapping[str, tuple[str, ...]] = {
    "attention_bias": ("attn_q.bias", "attn_qkv.bias", "attn_output.bias"),
    "attention_out_bias": ("attn_output.bias",),
    "mlp_bias": ("ffn_up.bias", "ffn_down.bias"),
    **dict.fromkeys(("use_bias", "use_qkv_bias"), ("attn_q.bias", "ssm_in.bias")),
    "conv_bias": ("shortconv.in_proj.bias",),
    **dict.fromkeys(("mamba_conv_bias", "use_conv_bias"), ("ssm_conv1d.bias",)),
    "mamba_proj_bias": ("ssm_in.bias",),
    "mamba_rms_norm": ("ssm_norm.weight",),
    "use_expert_bias": ("exp_probs_b.bias",),
}
"""Options that are true if the model has one of these tensors."""
_QUOTIENTS = (
    ("ssm.time_step_rank", ("linear_value_head_dim", "mamba_d_head", "mamba_head_dim")),
    ("embedding_length", ("mamba_expand", "expand")),
)
"""Keys by which `ssm.inner_size` is divided, and the options that have the quotient."""


def make_configuration(architecture: Architecture, metadata: Metadata) -> ModelConfig:
    """Returns the configuration, without the scaling of rotary embeddings. Raises `ModelError` for a key that is
    missing, that nothing reads, or that contradicts the configuration."""
    kind = architecture.model_type
    options = {"num_hidden_layers": metadata.num_layers, **_tokens(metadata)}
    expected = _common(kind, metadata, options, architecture.own)
    _attention(kind, metadata, options)
    options |= {name: metadata.has(*tensors) for name, tensors in _FLAGS.items() if is_declared(kind, name)}
    options |= _epsilon(kind, metadata)
    if is_declared(kind, "rope_parameters"):
        options["rope_parameters"] = _rotary(metadata, options)
    elif not architecture.is_rotary:
        for key in ("rope.freq_base", _ROTARY):
            metadata.get(key)
    config = _checked(architecture, metadata, options)
    gate = metadata.get("expert_gating_func")
    if count := metadata.get("expert_count", 0):
        if gate not in (None, 0, architecture.gate):
            raise ModelError(f"experts that are weighted so are not served: expert_gating_func {gate}")
        if not 0 < (used := metadata.get("expert_used_count", 0)) <= count:
            raise ModelError(f"the file's {metadata.architecture}.expert_used_count is {used}, of {count} experts")
    _require_scale(config, metadata)
    metadata.require_read()
    for key, name in expected.items():
        if not _is_same(metadata(key), getattr(config, name)):
            raise _differs(metadata, key, metadata(key), getattr(config, name))
    return config


def _checked(architecture: Architecture, metadata: Metadata, options: dict[str, Any]) -> ModelConfig:
    """Returns the configuration with these options. Raises `ModelError` for values of a wrong type, or that exclude
    each other."""
    kind = architecture.model_type
    try:
        own = {
            name: metadata("ssm.inner_size") // metadata(divisor)
            for divisor, names in _QUOTIENTS
            for name in names
            if is_declared(kind, name)
        }
        own |= dict(architecture.fixed) | architecture.config(metadata, options)
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise ModelError(f"the metadata of the file are not those of {kind}: {first_line(error)}") from error
    return ModelConfig.of({"model_type": kind, **options, **own})


def _require_scale(config: ModelConfig, metadata: Metadata) -> None:
    """Raises `ModelError` if the file scales attention scores otherwise than a model without an option for it."""
    if is_declared(config.model_type, "attention_multiplier") or not (scale := metadata.get("attention.scale", 0)):
        return
    expected = float(getattr(config, "query_pre_attn_scalar", None) or head_dim(config)) ** -0.5
    if not _is_same(scale, expected):
        raise _differs(metadata, "attention.scale", scale, expected)


def _differs(metadata: Metadata, key: str, value: Any, has: Any) -> ModelError:
    return ModelError(
        f"the file's {metadata.architecture}.{key} is {shown(value)}, and the model would have {shown(has)}"
    )


def _tokens(metadata: Metadata) -> dict[str, Any]:
    embeddings = metadata.tensors.get("token_embd.weight")
    if embeddings is None:
        raise ModelError("the file lacks the tensor token_embd.weight")
    if (width := metadata("embedding_length")) != embeddings.shape[-1]:
        raise _differs(metadata, "embedding_length", width, embeddings.shape[-1])
    tokens = metadata.header.arrays.get("tokenizer.ggml.tokens")
    if tokens is not None and embeddings.shape[0] < tokens.count:
        raise ModelError(
            f"the file's token_embd.weight has {embeddings.shape[0]} rows, and it has {tokens.count} tokens"
        )
    return {
        "vocab_size": embeddings.shape[0],
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
        "bos_token_id": metadata.token("bos"),
        "eos_token_id": metadata.token("eos"),
        "pad_token_id": metadata.token("padding"),
    }


def _common(kind: str, metadata: Metadata, options: dict[str, Any], own: Collection[str]) -> dict[str, str]:
    """Sets the `options` of most architectures, except for `own` keys. Returns the options' names by key."""
    expected = {}
    for key, names, default in _COMMON:
        name = next((name for name in names.split() if is_declared(kind, name)), None)
        if name is None or key in own:
            continue
        value = metadata(key) if default is None else metadata.get(key, default)
        if value is _LEFT:
            continue
        options[name] = value or None if name in _OFF_AS_NONE else value
        if key in metadata:
            expected[key] = name
    return expected


def _attention(kind: str, metadata: Metadata, options: dict[str, Any]) -> None:
    heads, keys = options.get("num_attention_heads"), "attention.head_count_kv"
    if heads is None:
        return
    if not 0 < heads <= options["hidden_size"]:
        raise ModelError(
            f"the file's {metadata.architecture}.attention.head_count is {heads}, of a width of "
            f"{options['hidden_size']}"
        )
    if is_declared(kind, "num_key_value_heads") and not metadata.varies(keys):
        options["num_key_value_heads"] = metadata.get(keys, heads)
        if options["num_key_value_heads"] <= 0:
            raise ModelError(f"the file's {metadata.architecture}.{keys} is {options['num_key_value_heads']}")
    plain = options["hidden_size"] // heads
    width = metadata.get("attention.key_length", plain)
    if not is_declared(kind, "v_head_dim") and (values := metadata.get("attention.value_length", width)) != width:
        raise _differs(metadata, "attention.value_length", values, width)
    # Some classes read `head_dim` without declaring it. If a class does not, its matrices have other shapes.
    if is_declared(kind, "head_dim") or width != plain:
        options["head_dim"] = width


def _epsilon(kind: str, metadata: Metadata) -> dict[str, float]:
    """Returns the epsilon of norms by the names of its options. As in llama.cpp, if a file has two, the key for the
    model's kind of norms counts."""
    names = [name for name in _EPSILONS if is_declared(kind, name)]
    order = _EPSILON_KEYS[::-1] if TYPES[kind].norms.kind.startswith("layer") else _EPSILON_KEYS
    key = next((key for key in order if key in metadata), _EPSILON_KEYS[0])
    if not any("rms" in name for name in names):
        # Converters write both keys for a configuration with both names.
        for other in _EPSILON_KEYS:
            metadata.get(other)
    return dict.fromkeys(names, metadata(key))


def _rotary(metadata: Metadata, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the rotary parameters, without their scaling."""
    heads = options.get("num_attention_heads") or 1
    width = options.get("head_dim") or options["hidden_size"] // heads
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base", BASE)}
    if (part := metadata.get("rope.dimension_count", width)) != width:
        parameters["partial_rotary_factor"] = part / width
    return parameters


def _is_same(expected: Any, actual: Any) -> bool:
    if isinstance(expected, int | float) and isinstance(actual, int | float | None):
        return math.isclose(float(expected), float(actual or 0), rel_tol=1e-6)
    return bool(expected == actual)


def require_rotary(config: Any, rotated_dims: Collection[int], architecture: Architecture, metadata: Metadata) -> None:
    """Raises `ModelError` if the file says another number of rotated elements of a head than the model has:
    `rotated_dims`, one for each kind of layers. `config` is the decoder's."""
    has_none = not architecture.is_rotary or not metadata.scaling().get("finetuned", True)
    if not rotated_dims and (has_none or _ROTARY not in metadata):
        return
    heads = getattr(config, "num_attention_heads", 0)
    plain = config.hidden_size // heads if heads else 0
    expected = metadata.get(_ROTARY, metadata.get("attention.key_length", plain))
    kinds = getattr(config, "layer_types", None) or ("sliding_attention",)
    of_windows = metadata.get(_ROTARY_OF_WINDOWS, expected) if "sliding_attention" in kinds else expected
    if {*rotated_dims} != {expected, of_windows}:
        key, value = (_ROTARY, expected) if expected not in rotated_dims else (_ROTARY_OF_WINDOWS, of_windows)
        rotated = " and ".join(map(str, sorted(rotated_dims))) or "nothing"
        raise ModelError(f"the file's {metadata.architecture}.{key} is {value}, and the model would rotate {rotated}")
