"""All that changes the numbers of a decoder, with the field's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from diskprefix.model.plan import Gating, Location, Rotary, Router

NormKind = Literal["rms", "rms_unrounded", "rms_plus_one", "layer", "layer_plus_one"]


class Tempering(NamedTuple):
    """Queries grow with their position: × 1 + factor × log(1 + floor((position + offset) / period))."""

    offset: int
    period: int
    factor: float


@dataclass(frozen=True)
class LayerConfig:
    """One layer. `mixer` is what computes from other tokens, `feed_forward` what follows. `window` and `chunk` are in
    tokens, 0 without; `rotary` names its positions, None without. `places` are its parts in memory, by their names in
    the layout: those of a layer before it if it only reads them. A gate is cut off `cut_off` deviations above the mean
    of its row."""

    places: Mapping[str, Location]
    mixer: Literal["attention", "latent"] = "attention"
    feed_forward: Literal["gated", "plain", "mixture", "gated beside mixture"] = "gated"
    only_reads: bool = False
    cut_off: float = 0.0
    window: int = 0
    chunk: int = 0
    rotary: str | None = ""
    tempering: Tempering | None = None


@dataclass(frozen=True)
class MixtureConfig:
    """The mixture of experts of layers. With `has_float_router` the logits of routers are float32. `shared`: gated
    products that all rows have besides, which a gate of their own may weigh. They are added, or the average is taken.
    What is found may have a norm."""

    router: Router
    gating: Gating
    has_float_router: bool = False
    shared: Literal["", "plain", "weighed"] = ""
    is_average: bool = False
    has_norm: bool = False


@dataclass(frozen=True)
class LatentConfig:
    """The sizes of latent attention: of heads, latents, the parts of a head's query for keys and with the rotary
    positions, and a head's values. With `has_query_latents`, queries are products of latents of their own."""

    num_heads: int
    latent_dim: int
    key_dim: int
    rotary_dim: int
    value_dim: int
    has_query_latents: bool


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder. The fields have transformers' names where it has one. `norms` are before a part of a layer, around it
    or behind it; parallel parts read the hidden states before the layer, by one norm or two. With `has_head_norms`,
    queries and keys have a norm a head, with `has_row_norms` one of all heads. The unweighted ones are of turned heads,
    and of values. Joined queries, keys and values are one product, with those of a head of keys together if they are
    joined in heads. With `has_layer_inputs` each layer has embeddings of its own, with `has_layer_scales` a factor.
    Several streams of hidden states are predicted and corrected (AltUp). The first position has row `position_offset`
    of a table, None without one. Inner norms are before the last product of a part. `attention_gate` is the function of
    a gate behind attention. `sees_pictures`: in which layers the tokens of a picture see each other. Behind the first
    `deepstack` layers, further levels of an encoder are added."""

    vocab_size: int
    layers: tuple[LayerConfig, ...]
    rotary: Mapping[str, Rotary]
    norm: NormKind = "rms"
    epsilon: float = 1e-6
    norms: Literal["before", "around", "behind"] = "before"
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
    value_multiplier: float = 1.0
    attention_gate: str = ""
    has_embedding_norm: bool = False
    has_inner_norms: bool = False
    has_joined_gate_up: bool = False
    activation: str = "silu"
    mixture: MixtureConfig | None = None
    latent: LatentConfig | None = None
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

    @property
    def num_writing(self) -> int:
        """Returns the number of layers up to the last one that writes to memory. Behind it, rows count alone."""
        return max((number for number, layer in enumerate(self.layers, 1) if not layer.only_reads), default=0)
