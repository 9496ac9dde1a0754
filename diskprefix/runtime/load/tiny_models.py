"""Tiny decoders of each family with made-up weights, whose numbers are the same everywhere: `bits` runs them.

The weights are whole numbers times powers of 2, so bfloat16 has them all. Their sizes fill no panel of a kernel, and
some no vector.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from diskprefix.native import ROWS, calls
from diskprefix.native.library import Operators
from diskprefix.native.packing import TYPES, pack
from diskprefix.prefixstore.kv.numbers import converted
from diskprefix.prefixstore.kv.sizes import Q8_BLOCK, Q8_BLOCK_BYTES
from diskprefix.runtime.plan.config import (
    DecoderConfig,
    IndexerConfig,
    Inputs,
    LatentConfig,
    LayerConfig,
    MixtureConfig,
    NGramConfig,
    PositionScaling,
    SpaceConfig,
)
from diskprefix.runtime.plan.families.slot_names import SlotNames
from diskprefix.runtime.plan.operands import Gating, Location, Rotary, Router, StateLocation
from diskprefix.runtime.plan.part_options import DeltaConfig, ExpertsForm, Gates, Norms
from diskprefix.runtime.plan.quants.quant_form import FILE_FORMS
from diskprefix.runtime.plan.weights import Quants, Weights

VOCAB, WIDTH, HEADS, KV_HEADS, DIM, EXPERTS = 96, 256, 4, 2, 64, 4
PAGE_TOKENS = 256
_PERIOD = 65_537
_LATENT = LatentConfig(HEADS, 128, DIM, 32, DIM, has_query_latents=True)

_FLOATS_AT = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "MXFP4": (),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,),
    "TQ1_0": (52,), "TQ2_0": (64,), "NVFP4": (), "Q1_0": (0,), "Q2_0": (0,),
}  # fmt: skip
"""Where the blocks of a file's quants have float16 numbers."""
_OF_FEW_BITS = ("NVFP4", "Q1_0", "Q2_0")
_QUANTS = {
    **{kind: (kind, kind) for kind in _FLOATS_AT},
    **{kind: ("Q3_K", kind) for kind in ("IQ1_M", "IQ2_S")},
    **{kind: ("IQ4_XS", kind) for kind in ("IQ3_XXS", "IQ3_S")},
}
"""Forms of matrices, by the quants that are packed for each, and by those whose numbers the codes have then."""


def below(limit: int, count: int, seed: int) -> np.ndarray:
    """Returns made-up whole numbers from 0 to `limit` - 1: the upper bits of SplitMix64."""
    state = np.arange(1, 1 + count, dtype=np.uint64) + np.uint64(seed << 32)
    state *= np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((state >> np.uint64(33)) % np.uint64(limit)).astype(np.int64)


@cache
def _pool(dtype: int | None) -> np.ndarray:
    """Returns made-up numbers of eight bits between -1 and 1 in a type of plans, or bytes. They have many sizes, so
    that the order of a sum shows. They come again and again, for the largest weight."""
    numbers = (below(255, _PERIOD, 1) - 127) * 2.0 ** -(7 + below(8, _PERIOD, 2))
    period = below(256, _PERIOD, 3).astype(np.uint8) if dtype is None else in_dtype(numbers, dtype)
    return np.tile(period, 9)


def made_up(shape: Sequence[int], seed: int, dtype: int | None = calls.FLOAT32) -> np.ndarray:
    """Returns made-up numbers, or bytes."""
    start = seed % _PERIOD
    return _pool(dtype)[start : start + math.prod(shape)].reshape(shape)


def in_dtype(numbers: np.ndarray, dtype: int) -> np.ndarray:
    """Returns numbers in a type of plans."""
    return converted(numbers, "float32" if dtype == calls.FLOAT32 else "bfloat16")


class TinyModel(Struct, frozen=True):
    """A model: its options without places in memory, and the shapes of its weights. Names in layers are without the
    layer. `kinds` are the types in `_QUANTS` that its matrices have."""

    config: DecoderConfig
    shapes: Mapping[str, tuple[int, ...]]
    kinds: Sequence[str] = tuple(sorted(_QUANTS.keys() - {*_OF_FEW_BITS}))

    def placed(self, item_bytes: int, kv_type: str = "auto") -> tuple[DecoderConfig, list[int], list[int]]:
        """Returns the options with places, and the bytes of a page of each table and of each group of states. Each
        layer with memory has its own table, and its indexer another one."""
        size, of_item = (Q8_BLOCK_BYTES, Q8_BLOCK) if kv_type == "q8" else (item_bytes, 1)
        tables, states, layers = list[int](), list[int](), list[LayerConfig]()
        draft_layer = self.config.draft_layer
        for layer in (*self.config.layers, *([] if draft_layer is None else [draft_layer])):
            if layer.only_reads:
                layers.append(replace(layer, places=layers[0].places))
                continue
            places = {}
            if layer.mixer in ("attention", "latent"):
                latent = self.config.latent
                parts = {"keys": (KV_HEADS, DIM), "values": (KV_HEADS, DIM)}
                parts = parts if latent is None else {"latent": (1, latent.latent_dim + latent.rotary_dim)}
                offset = 0
                for part, (heads, dim) in parts.items():
                    of_row = dim // of_item
                    form = heads, dim, size, PAGE_TOKENS * of_row, of_row, of_item
                    places[part] = Location(len(tables), offset, *form)
                    offset += heads * PAGE_TOKENS * of_row * size
                tables.append(offset)
                if self.config.indexer is not None:
                    # Its keys are in the type of the plan.
                    places["index"] = Location(len(tables), 0, 1, DIM, item_bytes, PAGE_TOKENS * DIM, DIM)
                    tables.append(PAGE_TOKENS * DIM * item_bytes)
            of_layer = {}
            shapes = _STATES_OF.get(layer.mixer, {}) | ({} if layer.ngrams is None else _STATES_OF_NGRAMS)
            for key, (shape, num_bytes) in shapes.items():
                of_layer[key] = StateLocation(len(states), 0, shape, num_bytes or item_bytes)
                states.append(math.prod(shape) * (num_bytes or item_bytes))
            layers.append(replace(layer, places=places, states=of_layer))
        if draft_layer is not None:
            draft_layer = layers.pop()
        return replace(self.config, layers=tuple(layers), draft_layer=draft_layer), tables, states


_States: TypeAlias = dict[tuple[str, int], tuple[tuple[int, ...], int]]
_STATES_OF: dict[str, _States] = {
    "short_convolution": {("conv", 0): ((256, 4), 0)},
    "delta_rule": {("conv", 0): ((512, 4), 0), ("recurrent", 0): ((4, 64, 64), 4)},
    "state_space": {("conv", 0): ((384, 4), 0), ("recurrent", 0): ((16, 16, 32), 4)},
}
_STATES_OF_NGRAMS: _States = {("conv", 1): ((1024, 10), 0), ("ngrams", 0): ((2,), 4)}
"""The shapes of the states of layers, and the bytes of a number; 0: as in the plan."""


class TinyWeights(Weights):
    """The made-up weights of a tiny model. With `has_quants`, matrices that can be are in the form of `_QUANTS` that
    their name chooses."""

    def __init__(self, operators: Operators, model: TinyModel, dtype: int, *, has_quants: bool) -> None:
        super().__init__("float32" if dtype == calls.FLOAT32 else "bfloat16")
        self._operators, self._shapes, self._kind = operators, model.shapes, dtype
        self._forms = model.kinds if has_quants else ()

    def _shape(self, name: str) -> tuple[int, ...] | None:
        path = name.removesuffix(".weight").split(".")
        is_in_layer = path[0] == "layers" or path[1:2] == ["mtp_block"]
        return self._shapes.get(".".join(path[2:] if is_in_layer else path))

    def has_parameter(self, name: str) -> bool:
        return self._shape(name) is not None

    def _read_tensor(self, name: str) -> np.ndarray:
        shape = self._shape(name)
        assert shape is not None, f"no tiny model has {name}"
        numbers = made_up(shape, _seed(name)) * np.float32(4 if "norm" in name else 0.25)
        return in_dtype(numbers, self._kind)

    def quants(self, name: str) -> Quants | None:
        shape = self._shape(name) or (0,)
        has_them = len(shape) == 2 and shape[1] % 256 == 0 and shape[0] % ROWS == 0 and "positions" not in name
        return self._packed(name, [name], shape) if self._forms and has_them else None

    def head_quants(self, name: str) -> Sequence[Quants]:
        sizes = ((_LATENT.latent_dim, DIM), (DIM, _LATENT.latent_dim)) if self._forms else ()
        parts = [[f"{name}.{of}.{head}" for head in range(HEADS)] for of in ("keys", "values")]
        return [self._packed(names[0], names, size) for names, size in zip(parts, sizes, strict=False)]

    def expert_quants(self, name: str, form: ExpertsForm) -> Mapping[str, Quants]:
        shape = self._shape(f"{name}.down_proj")
        if shape is None or not (self._forms and form.has_up):
            return {}
        parts = {part: [f"{name}.{part}.{number}" for number in range(EXPERTS)] for part in ("gate", "up", "down")}
        return {part: self._packed(names[0], names, shape[1:]) for part, names in parts.items()}

    def _packed(self, name: str, matrices: Sequence[str], size: Sequence[int]) -> Quants:
        """Returns matrices of this size, one or several of one form."""
        rows, columns = size
        forms = [form for form in self._forms if columns % FILE_FORMS[form].unit_columns == 0]
        packed_as, kind = _QUANTS[forms[_seed(name) % len(forms)]]
        out = np.zeros((len(matrices), *FILE_FORMS[packed_as].packed_shape(rows, columns)), np.uint8)
        for matrix, packed in zip(matrices, out, strict=True):
            pack(self._operators, packed_as, _made_up_quants(packed_as, rows, columns, _seed(matrix)), None, packed)
        return Quants(out[0] if len(matrices) == 1 else out, FILE_FORMS[kind])

    def finish_reading(self) -> None:
        """All weights are in memory."""


def _made_up_quants(kind: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Returns made-up rows of a file's quants, uint8 [rows, bytes]. Scales have eleven bits."""
    weights, num_bytes = TYPES[kind].weights, TYPES[kind].num_bytes
    content = made_up((rows, columns // weights, num_bytes), seed, None).copy()
    for place in _FLOATS_AT[kind]:
        scales = np.abs(made_up(content.shape[:2], seed + place)) * 2.0 ** (-5 if weights < 256 else -9)
        content[..., place : place + 2] = scales.astype("<f2")[..., None].view(np.uint8)
    if kind == "MXFP4":
        content[..., 0] = 118 + content[..., 0] % 4
    if kind == "NVFP4":
        content[..., :4] = 8 + content[..., :4] % 32
    return content.reshape(rows, -1)


def _seed(name: str) -> int:
    return zlib.crc32(name.removesuffix(".weight").encode())


NAMES = SlotNames(WIDTH, {}, ExpertsForm(), {}, has_plain_norms=False, has_transposed_matrices=False)
_ROTARY = Rotary((2.0 ** -(np.arange(DIM // 2) / 4)).astype(np.float32))

_ATTENTION = "self_attn. q_proj:256x256 k_proj:128x256 v_proj:128x256 o_proj:256x256 "
_AROUND = """
    / embed_tokens:96x256 norm:256 input_layernorm:256 post_attention_layernorm:256
    mlp. gate_proj:512x256 up_proj:512x256 down_proj:256x512
"""
_EXPERTS = "mlp. gate:4x256 experts.gate_up_proj:4x512x256 experts.down_proj:4x256x256 "
_HEAD_NORMS = "self_attn. q_norm:64 k_norm:64 "


def _layer(mixer: Any = "attention", **fields: Any) -> LayerConfig:
    return LayerConfig({}, mixer, **fields)


def _model(layers: Sequence[LayerConfig], weights: str, kinds: Sequence[str] = (), **fields: Any) -> TinyModel:
    """Returns a model with these weights: names with shapes, below the module before them."""
    fields, shapes, within = {"rotary": {"": _ROTARY}, "scale": DIM**-0.5} | fields, dict[str, tuple[int, ...]](), ""
    for word in (_AROUND + weights).split():
        name, colon, shape = word.partition(":")
        if colon:
            shapes[within + name] = tuple(map(int, shape.split("x"))) if shape else ()
        else:
            within = word.strip("/")
    config = DecoderConfig(vocab_size=VOCAB, layers=tuple(layers), **fields)
    return TinyModel(config, shapes, kinds) if kinds else TinyModel(config, shapes)


MODELS: Mapping[str, TinyModel] = {
    "dense": _model(
        [
            _layer(window=200),
            _layer(),
            _layer(),
            _layer(rotary=None, chunk=200, position_scaling=PositionScaling(1, 64, 0.125)),
        ],
        _ATTENTION + _HEAD_NORMS,
        norms=Norms(query_key="head"),
    ),
    "dense in few bits": _model([_layer()] * 3, _ATTENTION, kinds=_OF_FEW_BITS),
    "plain": _model(
        [_layer(feed_forward="plain")] * 2,
        """
        / embed_positions:512x256 norm.bias:256 input_layernorm.bias:256 post_attention_layernorm.bias:256
        self_attn. qkv_proj:512x256 qkv_proj.bias:512 o_proj:256x256 mlp. up_proj.bias:512
        """,
        norms=Norms("layer"),
        gates=Gates("gelu_tanh"),
        inputs=Inputs(position_offset=0),
        joined="in_heads",
        parallel="one_norm",
    ),
    "mixture": _model(
        [_layer(feed_forward="mixture")] * 2,
        _ATTENTION
        + _EXPERTS
        + "shared_expert_gate:1x256 mlp.shared_experts. gate_proj:512x256 up_proj:512x256 down_proj:256x512",
        norms=Norms("rms_unrounded"),
        mixture=MixtureConfig(Router(2, is_normed=True), Gating(), shared="weighed"),
    ),
    "mixture with sinks": _model(
        [_layer(feed_forward="mixture")] * 2,
        _ATTENTION + "sinks:4 " + _EXPERTS + "gate.e_score_correction_bias:4",
        mixture=MixtureConfig(
            Router(2, scores="sigmoid", is_normed=True, factor=2.5, groups=2, groups_chosen=1),
            Gating("limited_silu", "limited_and_one", slope=1.75, limit=2.0),
            has_float_router=True,
        ),
    ),
    "latent": _model(
        [_layer("latent")] * 2,
        """
        self_attn. q_a_proj:128x256 q_a_layernorm:128 q_b_proj:384x128 kv_a_proj_with_mqa:160x256 kv_a_layernorm:128
        kv_b_proj:512x128 o_proj:256x256
        """,
        latent=_LATENT,
        rotary={
            "": replace(_ROTARY, frequencies=_ROTARY.frequencies[:16], pairing=calls.Pairing.INTERLEAVED_TO_HALVES)
        },
    ),
    "recurrent": _model(
        [_layer("short_convolution"), _layer("delta_rule"), _layer("state_space"), _layer()],
        _ATTENTION
        + _HEAD_NORMS
        + """
        q_proj:512x256
        conv. in_proj:768x256 conv:256x4 out_proj:256x256
        linear_attn. in_proj_qkv:512x256 in_proj_z:256x256 in_proj_b:4x256 in_proj_a:4x256 conv1d:512x4 dt_bias:4
        A_log:4 norm:64 out_proj:256x256
        mamba. in_proj:656x256 conv1d:384x4 conv1d.bias:384 dt_bias:16 A_log:16 D:16 norm:256 out_proj:256x256
        """,
        norms=Norms("rms_plus_one", query_key="head"),
        gates=Gates(attention="sigmoid", is_in_query=True),
        delta=DeltaConfig("together"),
        space=SpaceConfig((0.0, float("inf"))),
    ),
    "recurrent by numbers": _model(
        [_layer("delta_rule")] * 2,
        """
        linear_attn. q_proj:128x256 k_proj:128x256 v_proj:256x256 in_proj_z:32x256 in_proj_b:4x256 in_proj_a:32x256
        gate_proj:256x32 decay_proj:256x32 conv1d:512x4 dt_bias:256 A_log:4 norm:64 out_proj:256x256
        """,
        delta=DeltaConfig("apart", has_narrow_gates=True, gate="sigmoid"),
    ),
    "streams with an indexer": _model(
        [
            _layer(
                "delta_rule",
                feed_forward="mixture",
                ngrams=NGramConfig(2, (0x1234567, 0x89ABCDF, 0x2468ACF), (47, 43, 41, 37), (0, 47, 90, 131)),
            ),
            _layer(feed_forward="mixture"),
            _layer(feed_forward="mixture"),
        ],
        _ATTENTION
        + _HEAD_NORMS
        + _EXPERTS
        + """
        mlp. shared_expert_gate:1x256 shared_experts.gate_proj:512x256 shared_experts.up_proj:512x256
        shared_experts.down_proj:256x512
        self_attn. q_proj:512x256 indexer.index_qk_proj:192x256 indexer.q_layernorm:64 indexer.k_layernorm:64
        linear_attn. in_proj_qkv:512x256 in_proj_z:256x256 in_proj_b:4x256 in_proj_a:4x256 conv1d:512x4 dt_bias:4
        A_log:4 norm:64 out_proj:256x256
        ple. key_proj:1024x256 value_proj:256x256 norm_key:1024 norm_query:1024 norm_conv:1024 conv1d:1024x4
        ple_embedding.ngram_embedding:168x64
        attn_hyper_connection. hc_norm:1024 input_mix_weight_down:32x1024 input_mix_weight_up:1024x32
        block_inject_weight:4x1024
        mlp_hyper_connection. hc_norm:1024 input_mix_weight_down:32x1024 input_mix_weight_up:1024x32
        block_inject_weight:4x1024
        hyper_connection_mixer. hc_norm:1024 input_mix_weight_down:32x1024 input_mix_weight_up:1024x32
        """,
        norms=Norms("rms_plus_one", query_key="head"),
        gates=Gates(attention="sigmoid", is_in_query=True),
        mixture=MixtureConfig(Router(2, is_normed=True), Gating(), shared="weighed"),
        delta=DeltaConfig("together"),
        indexer=IndexerConfig(2, 4, 3),
        hyper_streams=4,
        rotary={"": replace(_ROTARY, frequencies=_ROTARY.frequencies[:16])},
    ),
    "with draft layer": _model(
        [_layer()],
        _ATTENTION + "draft_layer. enorm:256 hnorm:256 post_norm:256 eh_proj:256x512",
        draft_layer=_layer(),
    ),
    "late gemma": _model(
        [_layer(norm_place="around", gate_sparsity_deviations=1.5), _layer(norm_place="around", only_reads=True)],
        _ATTENTION
        + _HEAD_NORMS
        + """
        / pre_feedforward_layernorm:256 post_feedforward_layernorm:256 layer_scalar:
        per_layer_model_projection:64x256 per_layer_projection_norm:32 embed_tokens_per_layer:96x64
        per_layer_input_gate:32x256 per_layer_projection:256x32 post_per_layer_input_norm:256
        altup_projections.0:256x256 altup_unembed_projections.0:256x256
        altup. router_norm:256 modality_router:2x256 prediction_coefs:4x2 correction_coefs:2x2 correct_output_scale:256
        laurel. linear_left:32x256 linear_right:256x32 post_laurel_norm:256
        """,
        norms=Norms("rms_unrounded", query_key="head", of_values=True),
        gates=Gates("gelu_tanh"),
        inputs=Inputs(16.0, of_layers=True),
        has_layer_scales=True,
        num_streams=2,
        softcap=8.0,
        logits_softcap=32.0,
    ),
}
"""By family. Together they have all operators."""
