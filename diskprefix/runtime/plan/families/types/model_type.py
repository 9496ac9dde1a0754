"""The record of a type of models: the properties of its models that their configurations do not contain.

A field that a record leaves out has the usual value, which is Llama's. `tests/runtime/plan/test_types.py` checks that
no other module asks for a type by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from diskprefix.runtime.plan.part_options import (
    DeltaConfig,
    ExpertsForm,
    Gates,
    JoinedKind,
    NormPlace,
    Norms,
    ParallelKind,
)

Options: TypeAlias = dict[str, Any]
"""The options of a configuration, by name."""
Derive: TypeAlias = Callable[[Options, Options], None]
"""Sets options that follow from others. The arguments are the options that the type declares, and the other keys of the
configuration. Both may be changed. Raises `ModelError`."""
MakeList: TypeAlias = Callable[[Options, Options], list[str]]
"""Returns an option that lists a value for each layer, from the same arguments."""
MakeRotary: TypeAlias = Callable[[Options, Options, float], Options]
"""Returns `rope_parameters` from the same arguments and the base of the type."""

NORMS, HEAD_NORMS = r"(input|post_attention)_layernorm|norm", r"self_attn\.[qk]_norm"
QUERIES, OUT = r"self_attn\.(qkv|q|k|v)_proj", r"self_attn\.o_proj"
ATTENTION = f"{QUERIES}|{OUT}"
LATENTS = rf"self_attn\.(q_a_proj|kv_a_proj_with_mqa)|{OUT}"
FEED_FORWARD = r"mlp\.(shared_experts\.)?(gate|up|down)_proj"
NO_MODULE = r"(?!)"
"""Patterns of modules that may have biases."""
SILU_ONLY = {"hidden_act": "silu"}
"""The activation of convolutions and of gated norms."""
CORRECTION = "mlp.gate.e_score_correction_bias"
"""The slot of the correction that a router adds to its scores before it chooses."""


class Rotation(Struct, frozen=True, kw_only=True):
    """The rotary embedding of a type."""

    interleaved: bool = False
    """Pairs of adjacent elements rotate, instead of elements half a head apart."""
    partial: bool = False
    """The default kind may rotate a part of a head. Scaled kinds may do so in all types."""
    part: float | None = None
    """The rotated part of a head, if the configuration does not say it."""
    part_is_fixed: bool = False
    reverses: bool = False
    """Heads rotate in the opposite direction."""
    windows_only: bool = False
    """Layers without a window have no positions."""
    sections: tuple[int, ...] | None = None
    """The number of frequencies for each of three dimensions of positions, if the configuration does not say it. None:
    positions have one dimension."""
    sections_in_order: bool = False
    """The frequencies of a dimension are consecutive. Otherwise the dimensions are interleaved."""
    takes_alpha: bool = False
    """The kind "dynamic" with an `alpha` does not depend on the length."""
    own_factors: bool = False
    """`longrope` has a factor of cosines and sines for long texts and one for short texts."""
    bases: tuple[float, float] | None = None
    """The bases of full attention and of windows, for types in which the two differ."""
    defaults: Mapping[str, Any] | None = None
    """`rope_parameters` for a configuration without them."""
    older_names: bool = True
    """Configurations may have `rope_theta` and `rope_scaling`. False: only `rope_parameters`, by kind of layer."""
    one_for_all: bool = False
    """Without older names: `rope_parameters` may also be one set for all layers."""
    nests: bool = True
    """`rope_parameters` may be by kind of layer."""
    option_names: tuple[str, str] = ("rope_theta", "partial_rotary_factor")
    """The older names of the base and of the part of a head that rotates."""
    renamed_kinds: Mapping[str, str] = {}
    kinds: tuple[str, ...] = ()
    """The kinds of rotary embeddings that models of this type may have; () for all."""
    parameters: MakeRotary | None = None
    """Reads rotary parameters that are written in another way."""
    scales_queries: bool = False
    """`llama_4_scaling_beta` scales queries by their position."""


class Experts(Struct, frozen=True, kw_only=True):
    """The mixtures of experts of a type. A field that is None follows from the configuration."""

    scores: str = "softmax"
    is_normed: bool | None = None
    floor: float | None = None
    of_group: int = 2
    """A group of experts is rated by the sum of this number of its best scores."""
    float_router: bool = False
    """The logits of routers are float32."""
    reads_input: bool = False
    """Routers read the input of their layer, before attention and without a norm."""
    correction: bool = False
    """Routers add a number to each score before they choose."""
    shared: Literal["", "plain", "weighed", "ungated"] | None = None
    """Products for all rows, which are added to the mixture."""
    added_to_gated: bool = False
    """The mixture is added to gated products, instead of replacing them."""
    weighs_rows: bool = False
    """The weights of experts multiply their inputs instead of their outputs."""
    has_norm: bool = False
    """A norm follows the mixture."""
    form: ExpertsForm = ExpertsForm()
    """The form of the matrices in transformers' parameters."""
    published_mxfp4: bool = False
    """Published folders have experts in MXFP4, which plans keep."""


class ModelType(Struct, frozen=True, kw_only=True):
    """A type of models."""

    # Layers.
    norms: Norms = Norms()
    norm_place: NormPlace = "before"
    gates: Gates = Gates()
    is_gated: bool = True
    """The feed-forward part has gated products. False: two plain ones."""
    experts: Experts | None = None
    rotary: Rotation = Rotation()
    delta: DeltaConfig | None = None
    """Layers with the delta rule."""
    joined: JoinedKind = ""
    is_parallel: bool = False
    """Attention and the feed-forward part are parallel. False: only if the configuration says so."""
    parallel: ParallelKind = "one_norm"
    """The norms of parallel parts."""
    single_part: bool = False
    """Each layer has a single part: attention, a recurrence, or a feed-forward part."""
    query_key_norms: Literal["head", "without_weights"] = "head"
    """The norms of queries and keys, if an option enables them."""
    rms_by_epsilon: bool = False
    """Norms are RMS norms if the configuration has `rms_norm_eps`."""
    scale: float | None = None
    """The factor of attention scores. None: it follows from the size of heads, or from options."""
    # Embeddings and logits.
    root_of_width: bool = False
    """Embeddings are multiplied by the square root of their width."""
    position_offset: int | None = None
    """The row of position 0 in a table of positions. None: there is no table."""
    layer_scales: bool = False
    multiplies_logits: bool = False
    """Logits are multiplied by `logits_scaling`. False: they are divided by it."""
    pictures: Literal["", "all"] = ""
    """The layers in which the tokens of a picture always see each other."""
    pictures_by_option: Literal["", "windowed", "otherwise"] = ""
    """The layers in which they do so if `use_bidirectional_attention` is "vision". "otherwise": as in no plan."""
    # Names and forms of weights.
    names: Mapping[str, str] = {}
    """Names of weights in transformers' parameters by the names of their slots, where the two differ."""
    published: Sequence[tuple[str, str]] = ()
    """Patterns in the names of published tensors, with their replacements in transformers' names."""
    biases: str = NO_MODULE
    """The pattern of modules that always have biases."""
    biases_by_option: Mapping[str, str] = {}
    """Patterns of modules that have biases if an option is true, for options that mean other modules in this type."""
    sinks: Literal["", "all", "windowed"] = ""
    """The layers whose attention has sinks."""
    in_float32: tuple[str, ...] = ()
    """Parts of names of parameters that are float32 whatever the dtype of the model."""
    epsilons: Mapping[str, float] = {}
    """Epsilons of norms for which there is no option."""
    unweighted_norms: bool = False
    """Norms of hidden states have no weights."""
    transposed: bool = False
    """Matrices are stored transposed."""
    either_order: bool = False
    """Files may have the matrices of experts transposed."""
    # Options.
    only: Mapping[str, Any] = {}
    """Options that plans of this type do not read, with the value that they compute with: with another one, a model
    has no plan."""
    head_dim_undeclared: bool = False
    """transformers' modules read `head_dim`, which the class does not declare. Published configurations have it."""
    renamed_options: Mapping[str, str] = {}
    """The current names of options by their older names."""
    derive: Derive | None = None
    derives: tuple[str, ...] = ()
    """Options that `derive` sets and that the class does not declare."""
    layer_types: MakeList | None = None
    """Returns the kinds of layers, for a configuration that does not list them."""
    mlp_layer_types: MakeList | None = None
    """Returns the kinds of feed-forward parts, for a configuration that does not list them."""
    draft_layer: Mapping[str, str] | None = None
    """The entries of the draft layer in lists by layer, for types whose draft layer is used."""
    # State.
    wide_keys: bool = False
    """In 8-bit KV memory, keys keep the dtype of the model: their biases make a number up to 300 times as large as the
    others that would share its scale. In 8 bits, the perplexity of Qwen2.5-Coder-0.5B rises by 0.6 %."""
    float_logits: bool = False
    """Logits are float32 whatever the dtype of the model."""
    all_layers: str = "full_attention"
    """The kind of all layers, if the configuration lists no kinds."""
    windows_double_heads: bool = False
    """Layers with a window have twice the key-value heads. The values of all layers have the size `v_head_dim`."""


class WholeType(Struct, frozen=True, kw_only=True):
    """A type of models with encoders. Its text model has a `ModelType`."""

    problem: str = ""
    """Why its models have no plan."""
    pictures: Literal["", "otherwise"] = ""
    """"otherwise": the tokens of its pictures see each other in a way that no plan has."""
    picture_problem: str = ""
    """Why the plans of its models take no pictures."""
    pads_placeholders: bool = False
    """The embeddings of layers take the padding token for placeholders."""
