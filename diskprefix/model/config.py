"""All that changes the numbers of a decoder, with the field's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from diskprefix.model.plan import Location, Rotary, Router, StateLocation

NormKind = Literal["rms", "rms_unrounded", "rms_plus_one"]


@dataclass(frozen=True)
class LayerConfig:
    """One layer. `mixer` is what computes from other tokens, `feed_forward` what follows. `window` is in tokens, 0
    without; `rotary` names its positions, None without. `places` are its parts in memory, by their names in the
    layout, `states` those that are states, by part and index."""

    places: Mapping[str, Location]
    mixer: Literal["attention", "short_convolution"] = "attention"
    feed_forward: Literal["gated", "mixture"] = "gated"
    window: int = 0
    rotary: str | None = ""
    states: Mapping[tuple[str, int], StateLocation] = field(default_factory=dict)


@dataclass(frozen=True)
class MixtureConfig:
    """The mixture of experts of layers. With `has_float_router` the logits of routers are float32. `shared` names the
    gated products that all rows have besides, and `shared_gate` what their sum is weighted by, as a sigmoid."""

    router: Router
    has_float_router: bool = False
    shared: str = ""
    shared_gate: str = ""


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder. The fields have transformers' names where it has one. `norms` are before a part of a layer or around
    it. With `has_head_norms`, queries and keys have a norm a head. `sees_pictures`: in which layers the tokens of a
    picture see each other. Behind the first `deepstack` layers, further levels of an encoder are added. `names`
    has other names of weights."""

    hidden_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    rotary: Mapping[str, Rotary]
    norm: NormKind = "rms"
    epsilon: float = 1e-6
    norms: Literal["before", "around"] = "before"
    has_head_norms: bool = False
    activation: str = "silu"
    mixture: MixtureConfig | None = None
    scale: float = 1.0
    softcap: float = 0.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    logits_softcap: float = 0.0
    sees_pictures: str = ""
    deepstack: int = 0
    names: Mapping[str, str] = field(default_factory=dict)
