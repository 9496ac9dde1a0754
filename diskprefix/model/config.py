"""All that changes the numbers of a decoder, with the field's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from diskprefix.model.plan import Gating, Location, Rotary, Router

NormKind = Literal["rms", "rms_unrounded", "rms_plus_one"]


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
    feed_forward: Literal["gated", "mixture", "gated beside mixture"] = "gated"
    only_reads: bool = False
    cut_off: float = 0.0
    window: int = 0
    chunk: int = 0
    rotary: str | None = ""
    tempering: Tempering | None = None


@dataclass(frozen=True)
class MixtureConfig:
    """The mixture of experts of layers. With `has_float_router` the logits of routers are float32. `shared`: gated
    products that all rows have besides, which a gate of their own may weigh."""

    router: Router
    gating: Gating
    has_float_router: bool = False
    shared: Literal["", "plain", "weighed"] = ""


@dataclass(frozen=True)
class LatentConfig:
    """The sizes of latent attention: of latents, of the parts of a head's query for keys and with the rotary
    positions, and of a head's values. With `has_query_latents`, queries are products of latents of their own."""

    latent_dim: int
    key_dim: int
    rotary_dim: int
    value_dim: int
    has_query_latents: bool


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder. The fields have transformers' names where it has one. `norms` are before a part of a layer, around it
    or behind it. With `has_head_norms`, queries and keys have a norm a head, with `has_row_norms` one of all heads. The
    unweighted ones are of heads that are turned, and of values. With `has_layer_inputs` each layer has embeddings of
    its own, with `has_layer_scales` a factor. Several streams of hidden states are predicted and corrected (AltUp).
    `attention_gate` is the function of a gate behind attention.
    `sees_pictures`: in which layers the tokens of a picture see each other. Behind the first `deepstack` layers,
    further levels of an encoder are added."""

    vocab_size: int
    num_attention_heads: int
    layers: tuple[LayerConfig, ...]
    rotary: Mapping[str, Rotary]
    norm: NormKind = "rms"
    epsilon: float = 1e-6
    norms: Literal["before", "around", "behind"] = "before"
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
    has_joined_gate_up: bool = False
    activation: str = "silu"
    mixture: MixtureConfig | None = None
    latent: LatentConfig | None = None
    scale: float = 1.0
    softcap: float = 0.0
    embedding_multiplier: float = 1.0
    layer_input_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    logits_softcap: float = 0.0
    sees_pictures: str = ""
    deepstack: int = 0

    @property
    def num_writing(self) -> int:
        """Returns the number of layers up to the last one that writes to memory. Behind it, rows count alone."""
        return max((number for number, layer in enumerate(self.layers, 1) if not layer.only_reads), default=0)
