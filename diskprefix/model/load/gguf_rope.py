"""The scaling of rotary positions that a GGUF file asks for, which transformers does not read, or misreads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diskprefix.model.load.gguf_file import FileTensor
from diskprefix.progress import Report

if TYPE_CHECKING:
    import numpy as np

SCALING = ".rope.scaling."
"""In the keys of the metadata about it, after the architecture."""
_DIVISORS, _SHORT, _LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
"""Tensors of numbers that the frequencies are divided by."""
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What every model has whose frequencies are scaled as those of Llama 3. The file has only the divisors."""
_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
_MSCALE = "yarn_log_multiplier"
"""A tenth of `mscale` and `mscale_all_dim` of DeepSeek's models, which are equal in all of them."""


def scale_positions(config: Any, values: Mapping[str, Any], tensors: Sequence[FileTensor], report: Report) -> None:
    """Puts the scaling of a file into the configuration that transformers made of it. `values` are its metadata.

    If the model has layers with a window, only the others are scaled.
    """
    import numpy as np

    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    if parameters.get("rope_type") not in ("default", "yarn"):
        # It has no rotary positions, or transformers knows how the architecture scales them.
        return
    parameters |= _scaling({key.partition(SCALING)[2]: value for key, value in values.items() if SCALING in key})
    divisors = {
        tensor.name: tensor.content().astype(float)
        for tensor in tensors
        if tensor.name in (_DIVISORS, _SHORT, _LONG) and tensor.kind == "F32"
    }
    if _SHORT in divisors and _LONG in divisors:
        parameters |= _divided_by(divisors[_SHORT], divisors[_LONG])
        # Of heads that are rotated in part, transformers reads the part for few architectures.
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        parameters["partial_rotary_factor"] = 2 * divisors[_SHORT].size / head_dim
    elif _DIVISORS in divisors:
        found = divisors[_DIVISORS]
        factor = float(found.max())
        if np.allclose(found, _llama_3_divisors(parameters["rope_theta"], factor, found.size), rtol=1e-3):
            parameters |= {"rope_type": "llama3", "factor": factor, **_LLAMA_3}
        else:
            report(f"warning: without the cache: {_DIVISORS} does not scale the frequencies as Llama 3 does")
            parameters |= _divided_by(found, found) | {"attention_factor": 1.0}
            parameters["original_max_position_embeddings"] = config.max_position_embeddings


def _scaling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns transformers' names for the metadata about scaling."""
    kind, factor = values.get("type", "linear"), float(values.get("factor", 1))
    if kind == "none":
        return {}
    found: dict[str, Any] = {}
    if "original_context_length" in values:
        found["original_max_position_embeddings"] = int(values["original_context_length"])
    if kind == "yarn":
        found |= {known: float(values[name]) for name, known in _YARN.items() if name in values}
        if _MSCALE in values:
            # The file has it in float32.
            found |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * float(values[_MSCALE]), 5))
    elif "attn_factor" in values:
        found["attention_factor"] = float(values["attn_factor"])
    if kind in ("linear", "yarn") and factor not in (0, 1):
        found |= {"rope_type": kind, "factor": factor}
    return found


def _divided_by(short: np.ndarray[Any, Any], long: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"rope_type": "longrope", "short_factor": short.tolist(), "long_factor": long.tolist()}


def _llama_3_divisors(base: float, factor: float, size: int) -> np.ndarray[Any, Any]:
    """Returns what llama.cpp's converter writes for a model of this family."""
    import numpy as np

    low, high, original = _LLAMA_3.values()
    turns = original / (2 * math.pi * base ** (np.arange(size) / size))
    smooth = ((turns - low) / (high - low)).clip(0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))
