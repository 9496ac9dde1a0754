"""Gemma 3n: windows in most layers, layers that share keys and values, inputs of each layer, and four streams, of which
a layer computes one and predicts the others."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

from diskprefix.errors import ModelError
from diskprefix.model.gguf.architecture import Architecture
from diskprefix.model.gguf.dense_families import AROUND, kinds_of_layers, windows_and_all
from diskprefix.model.gguf.gemma4 import OF_SHARED
from diskprefix.model.gguf.metadata import Metadata
from diskprefix.model.gguf.sources import Sources, TensorSource, moved

NUM_STREAMS = 4


def _stream(tensor: str, i: int) -> TensorSource:
    return moved(tensor, lambda _, streams: streams[i])


SOURCES: Sources = {
    **AROUND,
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "altup.correction_coefs": "altup_correct_coef",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
    **{f"model.altup_projections.{i}": _stream("altup_proj", i) for i in range(NUM_STREAMS - 1)},
    **{f"model.altup_unembed_projections.{i}": _stream("altup_unembd_proj", i) for i in range(NUM_STREAMS - 1)},
}


def _config(metadata: Metadata, found: dict[str, Any]) -> dict[str, Any]:
    """Older files lack the cap. A file has how many deviations above the mean a number must be, and a configuration the
    part of the numbers that are below that."""
    deviations = metadata.each_layer("activation_sparsity_scale")
    if metadata("altup.num_inputs") != NUM_STREAMS:
        raise ModelError(f"Gemma 3n has {NUM_STREAMS} streams: altup.num_inputs is {metadata('altup.num_inputs')}")
    return windows_and_all(metadata, found) | {
        "layer_types": kinds_of_layers(metadata, 5),
        "intermediate_size": list(metadata.each_layer("feed_forward_length")),
        "final_logit_softcapping": metadata.get("final_logit_softcapping", 30.0),
        "activation_sparsity_pattern": [round(NormalDist().cdf(one), 6) for one in deviations],
        "altup_active_idx": metadata("altup.active_idx"),
        "altup_num_inputs": NUM_STREAMS,
        "laurel_rank": metadata.num_rows("blk.0.laurel_l.weight"),
        "num_kv_shared_layers": metadata("attention.shared_kv_layers"),
        "vocab_size_per_layer_input": metadata.num_rows("per_layer_token_embd.weight"),
    }


GEMMA_3N = Architecture(
    model_type="gemma3n_text", sources=SOURCES, config=_config, own=("feed_forward_length",), unused=OF_SHARED
)
