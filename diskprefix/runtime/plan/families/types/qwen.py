"""The models of Qwen (Alibaba)."""

from __future__ import annotations

from collections.abc import Mapping

from diskprefix.errors import ModelError
from diskprefix.runtime.plan.families.types.derivations import (
    FULL,
    INDEXED,
    LINEAR,
    SLIDING,
    every,
    layers_of,
    windows_from_max,
)
from diskprefix.runtime.plan.families.types.model_type import (
    QUERIES,
    SILU_ONLY,
    Experts,
    ModelType,
    Options,
    Rotation,
    WholeType,
)
from diskprefix.runtime.plan.part_options import DeltaConfig, Gates, Norms


def _window_if_used(own: Options, _: Options) -> None:
    if not own["use_sliding_window"]:
        own["sliding_window"] = None


def _zero_unless_used(own: Options, _: Options) -> None:
    own["sliding_window"] = own["sliding_window"] if own["use_sliding_window"] else 0


def _no_window(own: Options, _: Options) -> None:
    own["sliding_window"] = None


def _every_second_window(own: Options, _: Options) -> list[str]:
    last = own["max_window_layers"] if own["use_sliding_window"] else 0
    return [SLIDING if (i + 1) % 2 and i < last else FULL for i in layers_of(own)]


_OF_INDEXER = [f"indexer_{name}" for name in ("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio")]


def _indexed_layers(own: Options, extra: Options) -> list[str]:
    return [INDEXED if kind == FULL else kind for kind in own["layer_types"] or _LAYERS(own, extra)]


def _derive_qwen4(own: Options, extra: Options) -> None:
    """Derives options. Raises `ModelError` for options that no model of Qwen4 can have, by their names."""
    own["layer_types"] = _indexed_layers(own, extra)
    sizes = ["hc_lowrank", "num_experts", "moe_intermediate_size", "shared_expert_intermediate_size"]
    has_indexer = any(own[name] is not None for name in _OF_INDEXER)
    for name in sizes + (_OF_INDEXER if has_indexer else []):
        if not (own[name] or 0) > 0:
            raise ModelError(f"the configuration's {name} is {own[name]}, not a number above 0")
    if own["hc_count"] < 2:
        raise ModelError(f"the configuration's hc_count is {own['hc_count']}, not a number above 1")
    if has_indexer and own["indexer_kv_heads"] != 1:
        raise ModelError(f"the configuration's indexer_kv_heads is {own['indexer_kv_heads']}, not 1")
    if has_indexer and own["indexer_budget"] % own["indexer_compress_ratio"]:
        raise ModelError("the configuration's indexer_budget is not a multiple of its indexer_compress_ratio")
    if not 0 < own["num_experts_per_tok"] <= own["num_experts"]:
        raise ModelError(
            f"the configuration has {own['num_experts_per_tok']} of {own['num_experts']} experts for a token"
        )
    if own["output_gate_type"] not in (None, "silu", "sigmoid"):
        raise ModelError(f"the configuration's output_gate_type is {own['output_gate_type']}, not silu or sigmoid")
    own["ple_layer_ids"] = sorted({*(own["ple_layer_ids"] or ())})
    own["ple_embed_dim"] = own["hidden_size"] if own["ple_embed_dim"] is None else own["ple_embed_dim"]
    if own["ple_layer_ids"]:
        _require_ngrams(own)


def _require_ngrams(own: Options) -> None:
    size, kernel = own["ngram_size"], (own["ple_conv_kernel_size"] - 1) * own["ngram_size"] + 1
    if not 2 <= size <= 8 or own["heads_per_ngram"] < 1 or not 1 <= kernel <= 16:
        raise ModelError(f"no plan has an ngram_size of {size}, or its ple_conv_kernel_size")
    heads = (size - 1) * own["heads_per_ngram"]
    if own["ple_embed_dim"] < 1 or own["ple_embed_dim"] % heads:
        raise ModelError(f"the ple_embed_dim {own['ple_embed_dim']} of the configuration is not a multiple of {heads}")
    if own["eos_token_id"] in (None, []):
        raise ModelError("the configuration has ple_layer_ids, and no eos_token_id, which ends an n-gram")
    if own["ngram_vocab_size_base"] < 1 or not 0 < own["vocab_size"] < 1 << 24:
        raise ModelError("the configuration's ngram_vocab_size_base or vocab_size is not one of a table of n-grams")
    for number in own["ple_layer_ids"]:
        if not 1 <= number <= own["num_hidden_layers"] or own["layer_types"][number - 1] != LINEAR:
            raise ModelError(f"the configuration's ple_layer_ids has {number}, which is no layer with linear attention")


QWEN2 = ModelType(
    biases=QUERIES, head_dim_undeclared=True, derive=_window_if_used, layer_types=windows_from_max, wide_keys=True
)
QWEN2_VL = ModelType(
    rotary=Rotation(
        sections=(16, 24, 24), sections_in_order=True, part_is_fixed=True, renamed_kinds={"mrope": "default"}
    ),
    biases=QUERIES,
    derive=_window_if_used,
    layer_types=windows_from_max,
    wide_keys=True,
)
_SHARED = {"mlp.shared_experts": "mlp.shared_expert"}
QWEN2_MOE = ModelType(
    experts=Experts(shared="weighed"),
    names=_SHARED,
    head_dim_undeclared=True,
    derive=_zero_unless_used,
    layer_types=_every_second_window,
    wide_keys=True,
)
QWEN3 = ModelType(norms=Norms(query_key="head"), derive=_window_if_used, layer_types=windows_from_max)
QWEN3_MOE = ModelType(
    norms=Norms(query_key="head"), experts=Experts(), head_dim_undeclared=True, derive=_window_if_used
)
QWEN3_VL = ModelType(norms=Norms(query_key="head"), rotary=Rotation(sections=(24, 20, 20)))
QWEN3_VL_MOE = ModelType(
    norms=Norms(query_key="head"),
    rotary=Rotation(sections=(24, 20, 20)),
    experts=Experts(is_normed=True),
    either_order=True,
    derive=_no_window,
    derives=("sliding_window",),
)
_NORMS = Norms("rms_plus_one", query_key="head")
_GATES = Gates(attention="sigmoid", is_in_query=True)
_LAYERS = every(("full_attention_interval", 4), LINEAR)
_DRAFT_LAYER = {"layer_types": FULL}
QWEN3_NEXT = ModelType(
    norms=_NORMS,
    gates=_GATES,
    rotary=Rotation(partial=True, part=0.25),
    experts=Experts(shared="weighed"),
    delta=DeltaConfig("by_key_heads"),
    names=_SHARED,
    layer_types=_LAYERS,
    draft_layer=_DRAFT_LAYER,
    only=SILU_ONLY,
)
QWEN3_5 = ModelType(
    norms=_NORMS,
    gates=_GATES,
    rotary=Rotation(partial=True, part=0.25, sections=(11, 11, 10)),
    delta=DeltaConfig("together"),
    layer_types=_LAYERS,
    draft_layer=_DRAFT_LAYER,
    only=SILU_ONLY,
)
QWEN3_5_MOE = ModelType(
    norms=_NORMS,
    gates=_GATES,
    rotary=Rotation(partial=True, part=0.25, sections=(11, 11, 10)),
    experts=Experts(is_normed=True, shared="weighed"),
    delta=DeltaConfig("together"),
    names=_SHARED,
    layer_types=_LAYERS,
    draft_layer=_DRAFT_LAYER,
    only=SILU_ONLY,
)
QWEN4_EXP = ModelType(
    norms=_NORMS,
    gates=_GATES,
    rotary=Rotation(partial=True, sections=(11, 11, 10)),
    experts=Experts(shared="weighed"),
    delta=DeltaConfig("together"),
    names=_SHARED,
    derive=_derive_qwen4,
    only=SILU_ONLY,
)
TYPES: Mapping[str, ModelType] = {
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2_MOE,
    "qwen2_vl_text": QWEN2_VL,
    "qwen2_5_vl_text": QWEN2_VL,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_vl_text": QWEN3_VL,
    "qwen3_vl_moe_text": QWEN3_VL_MOE,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "qwen4_exp_text": QWEN4_EXP,
}
WHOLES: Mapping[str, WholeType] = {
    "qwen4_exp": WholeType(picture_problem="no plan has the places of pictures in an indexer"),
}
