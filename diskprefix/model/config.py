"""All that changes the numbers of a decoder, with the field's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from msgspec import Struct, field

from diskprefix.model.operands import Gating, Location, Rotary, Router, StateLocation

NormKind = Literal["rms", "rms_unrounded", "rms_plus_one", "layer", "layer_plus_one"]


class Tempering(NamedTuple):
    """Queries grow with their position: × 1 + factor × log(1 + floor((position + offset) / period))."""

    offset: int
    period: int
    factor: float


class LayerConfig(Struct, frozen=True):
    """One layer. `mixer` is what computes from other tokens, `feed_forward` what follows. `norms` are before both,
    around them or behind them. `window` and `chunk` are in tokens, 0 without; `rotary` names its positions, None
    without. `places` are its parts in memory, by their names in the layout, those of a layer before it if it only reads
    them; `states` its states, by part and index. A gate is cut off `cut_off` deviations above the mean of its row."""

    places: Mapping[str, Location]
    mixer: Literal[
        "attention", "latent", "short_convolution", "delta_rule", "state_space", "space_and_attention", "none"
    ] = "attention"
    feed_forward: Literal["gated", "plain", "mixture", "gated beside mixture", "none"] = "gated"
    norms: Literal["before", "around", "behind"] = "before"
    only_reads: bool = False
    cut_off: float = 0.0
    window: int = 0
    chunk: int = 0
    rotary: str | None = ""
    tempering: Tempering | None = None
    states: Mapping[tuple[str, int], StateLocation] = field(default_factory=dict)


class MixtureConfig(Struct, frozen=True):
    """The mixture of experts of layers. With `has_float_router` the logits of routers are float32. With `has_latents`
    experts get products of rows, and give rows by another one. `shared`: gated products that all rows have besides,
    which a gate of their own may weigh, or ungated ones. They are added, or the average is taken. What is found may
    have a norm."""

    router: Router
    gating: Gating
    has_float_router: bool = False
    shared: Literal["", "plain", "weighed", "ungated"] = ""
    is_average: bool = False
    has_latents: bool = False
    has_norm: bool = False


class LatentConfig(Struct, frozen=True):
    """The sizes of latent attention: of heads, latents, the parts of a head's query for keys and with the rotary
    positions, and a head's values. With `has_query_latents`, queries are products of latents of their own."""

    num_heads: int
    latent_dim: int
    key_dim: int
    rotary_dim: int
    value_dim: int
    has_query_latents: bool


class DeltaConfig(Struct, frozen=True):
    """The layers with the delta rule. Its `inputs` are products apart, or those of the convolution are together, or all
    are, by key heads. With `has_narrow_gates`, the gate and the decays, one of each number of a key, are products of
    fewer numbers. `gate` is the function of the gate behind it. Betas are multiplied by a factor."""

    inputs: Literal["apart", "together", "by_key_heads"]
    has_narrow_gates: bool = False
    gate: str = "silu"
    beta_factor: float = 1.0


class SpaceConfig(Struct, frozen=True):
    """The layers with a state space: the least and the largest step, whether the gate is before the norm, and factors
    of what it takes and gives, and of what its first product gives: the gate, x, B, C and the steps."""

    step_limits: tuple[float, float]
    gates_first: bool = True
    in_multiplier: float = 1.0
    out_multiplier: float = 1.0
    multipliers: tuple[float, ...] = ()


class Multipliers(NamedTuple):
    """Factors of what attention takes and gives, of its keys and values, of gates and of what gated products give."""

    attention_in: float = 1.0
    attention_out: float = 1.0
    keys: float = 1.0
    values: float = 1.0
    gates: float = 1.0
    products: float = 1.0


class DecoderConfig(Struct, frozen=True):
    """A decoder. The fields have transformers' names where it has one. Parallel parts of a layer read the hidden states
    before it, by one norm or two. With `has_head_norms`, queries and keys have a norm a head, with `has_row_norms` one
    of all heads. The unweighted ones are of turned heads, and of values. Joined queries, keys and values are one
    product, with those of a head of keys together if they are joined in heads. The first position has row
    `position_offset` of a table, None without one. Inner norms are before the last product of a part. `attention_gate`
    is the function of a gate behind attention: with `has_gate_in_query` it lies behind each head of the queries. With
    `has_layer_inputs` each layer has embeddings of its own, with `has_layer_scales` a factor. Several streams of hidden
    states are predicted and corrected (AltUp). `sees_pictures`: in which layers the tokens of a picture see each other.
    Behind the first `deepstack` layers, further levels of an encoder are added. A float residual has the sums of layers
    in float32. The draft layer is behind the others, and no step of the decoder computes it. In the embeddings of
    layers, the first of the `padded_tokens` stands for the others."""

    vocab_size: int
    layers: tuple[LayerConfig, ...]
    rotary: Mapping[str, Rotary]
    norm: NormKind = "rms"
    epsilon: float = 1e-6
    parallel: Literal["", "one_norm", "two_norms"] = ""
    joined: Literal["", "in_parts", "in_heads"] = ""
    has_head_norms: bool = False
    has_row_norms: bool = False
    has_unweighted_norms: bool = False
    has_norms_behind_rotary: bool = False
    has_value_norms: bool = False
    has_layer_inputs: bool = False
    has_layer_scales: bool = False
    num_streams: int = 1
    multipliers: Multipliers = field(default_factory=Multipliers)
    attention_gate: str = ""
    has_gate_in_query: bool = False
    has_embedding_norm: bool = False
    has_inner_norms: bool = False
    has_joined_gate_up: bool = False
    activation: str = "silu"
    mixture: MixtureConfig | None = None
    latent: LatentConfig | None = None
    delta: DeltaConfig | None = None
    space: SpaceConfig | None = None
    scale: float = 1.0
    softcap: float = 0.0
    embedding_multiplier: float = 1.0
    layer_input_multiplier: float = 1.0
    position_offset: int | None = None
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    logits_softcap: float = 0.0
    sees_pictures: str = ""
    deepstack: int = 0
    has_float_residual: bool = False
    draft_layer: LayerConfig | None = None
    padded_tokens: tuple[int, ...] = ()

    @property
    def ends_early(self) -> bool:
        """Returns whether the last layer needs no rows but those that get logits, behind its keys and values."""
        has_more = self.has_layer_inputs or self.num_streams > 1 or self.deepstack >= len(self.layers)
        return self.num_writing == len(self.layers) and not has_more

    @property
    def num_writing(self) -> int:
        """Returns the number of layers up to the last one that writes to memory. Behind it, rows count alone."""
        return max((number for number, layer in enumerate(self.layers, 1) if not layer.only_reads), default=0)
