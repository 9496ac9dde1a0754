"""Everything that changes the numbers of a decoder, by standard names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from msgspec import Struct, field

from diskprefix.runtime.plan.operands import Gating, Location, Rotary, Router, StateLocation
from diskprefix.runtime.plan.part_options import DeltaConfig, Gates, JoinedKind, NormPlace, Norms, ParallelKind


class PositionScaling(NamedTuple):
    """Multiplies queries by 1 + factor × log(1 + floor((position + offset) / period))."""

    offset: int
    period: int
    factor: float


class NGramConfig(Struct, frozen=True):
    """The n-grams of a layer: the last 2 to `len(multipliers)` tokens name rows of a table, as
    `native/source/interface.h` says. `sizes` and `offsets` have the rows of each head, first those of pairs.
    `end_token` hides the tokens before it."""

    end_token: int
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]


class IndexerConfig(Struct, frozen=True):
    """The indexer of layers with attention: `num_heads` heads choose `num_chosen` blocks of `block` tokens."""

    num_heads: int
    block: int
    num_chosen: int


class LayerConfig(Struct, frozen=True):
    """A layer: a `mixer`, which reads other tokens, and a `feed_forward` part. Both have norms at `norm_place`.

    `places` has the keys and values in memory, by their names in the layout; a layer that `only_reads` has the places
    of an earlier layer. `states` has the states by part and index. `window` and `chunk` are in tokens, 0 for none.
    `rotary` is the key of the rotary embedding in `DecoderConfig.rotary`, None for none. A gate's numbers become 0
    unless they are more than `gate_sparsity_deviations` standard deviations above the mean of their row (0: no limit).
    """

    places: Mapping[str, Location]
    mixer: Literal[
        "attention", "latent", "short_convolution", "delta_rule", "state_space", "space_and_attention", "none"
    ] = "attention"
    feed_forward: Literal["gated", "plain", "mixture", "gated plus mixture", "none"] = "gated"
    norm_place: NormPlace = "before"
    only_reads: bool = False
    gate_sparsity_deviations: float = 0.0
    window: int = 0
    chunk: int = 0
    rotary: str | None = ""
    position_scaling: PositionScaling | None = None
    ngrams: NGramConfig | None = None
    states: Mapping[tuple[str, int], StateLocation] = field(default_factory=dict)


class MixtureConfig(Struct, frozen=True):
    """The mixture of experts of layers. With `has_float_router` the logits of routers are float32. With `has_latents`
    one product reduces the inputs of experts, and another one expands their outputs.

    `shared` says which products all rows get, too: none, gated ones, gated ones weighed by their own gate, or ungated
    ones. They are added to the mixture; with `is_average` the mean of both is taken. With `has_norm` a norm follows.
    With `reads_input` routers read the input of their layer.
    """

    router: Router
    gating: Gating
    has_float_router: bool = False
    reads_input: bool = False
    shared: Literal["", "plain", "weighed", "ungated"] = ""
    is_average: bool = False
    has_latents: bool = False
    has_norm: bool = False


class LatentConfig(Struct, frozen=True):
    """The sizes of latent attention. A head's query has `key_dim` numbers for keys, and `rotary_dim` rotated ones. With
    `has_query_latents`, queries are computed from their own latents."""

    num_heads: int
    latent_dim: int
    key_dim: int
    rotary_dim: int
    value_dim: int
    has_query_latents: bool


class SpaceConfig(Struct, frozen=True):
    """The layers with a state space. `step_limits` are the smallest and the largest step. With `gates_first` the gate
    precedes the norm. The factors are for inputs, outputs, and the parts of the first product: gate, x, B, C, steps."""

    step_limits: tuple[float, float]
    gates_first: bool = True
    in_multiplier: float = 1.0
    out_multiplier: float = 1.0
    multipliers: tuple[float, ...] = ()


class Multipliers(NamedTuple):
    """Factors of the inputs and outputs of attention, of keys, values, gates, and the outputs of gated products."""

    attention_in: float = 1.0
    attention_out: float = 1.0
    keys: float = 1.0
    values: float = 1.0
    gates: float = 1.0
    products: float = 1.0


class Inputs(Struct, frozen=True):
    """The inputs of the layers: embeddings × `multiplier`, plus row position + `position_offset` of a table (None: no
    table of positions).

    With `of_layers`, each layer has its own embeddings, × `layer_multiplier`; there the `padded_tokens` all get the row
    of the first of them. `sees_pictures` says in which layers the tokens of a picture see each other. After each of the
    first `deepstack` layers, a further level of the encoder's output is added.
    """

    multiplier: float = 1.0
    position_offset: int | None = None
    of_layers: bool = False
    layer_multiplier: float = 1.0
    padded_tokens: tuple[int, ...] = ()
    sees_pictures: str = ""
    deepstack: int = 0


class DecoderConfig(Struct, frozen=True):
    """A decoder. Fields have transformers' names if there are any.

    With `parallel`, attention and the feed-forward part of a layer both read the layer's input, through one norm or
    two. With `joined`, one product computes queries, keys and values: in three parts, or in a group for each key-value
    head. A step of the decoder does not compute the `draft_layer`.
    """

    vocab_size: int
    layers: tuple[LayerConfig, ...]
    rotary: Mapping[str, Rotary]
    norms: Norms = Norms()
    gates: Gates = Gates()
    inputs: Inputs = Inputs()
    parallel: ParallelKind = ""
    joined: JoinedKind = ""
    has_layer_scales: bool = False
    """Each layer's output is multiplied by a factor."""
    num_streams: int = 1
    """Several streams of hidden states are predicted and corrected (AltUp)."""
    hyper_streams: int = 0
    """Layers read a mean of several streams of hidden states, and add to all of them (hyper-connections)."""
    has_float_residual: bool = False
    """The sums of the layers are float32."""
    multipliers: Multipliers = Multipliers()
    mixture: MixtureConfig | None = None
    latent: LatentConfig | None = None
    delta: DeltaConfig | None = None
    space: SpaceConfig | None = None
    indexer: IndexerConfig | None = None
    scale: float = 1.0
    softcap: float = 0.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    logits_softcap: float = 0.0
    draft_layer: LayerConfig | None = None

    @property
    def ends_early(self) -> bool:
        """Returns whether the last layer may compute only the rows that get logits, except for keys and values."""
        has_more = self.inputs.of_layers or self.num_streams > 1 or self.inputs.deepstack >= len(self.layers)
        return self.num_writing == len(self.layers) and not has_more

    @property
    def num_writing(self) -> int:
        """Returns the number of layers up to the last one that writes to memory. The layers after it may compute only
        the rows that get logits."""
        return max((number for number, layer in enumerate(self.layers, 1) if not layer.only_reads), default=0)
