"""The scaling of rotary positions that a GGUF file asks for, which transformers does not read, or misreads."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diskprefix.errors import ModelError
from diskprefix.runtime.files.gguf.gguf_header import FileTensor
from diskprefix.runtime.files.gguf.metadata import SCALING, Metadata, is_finite, shown

if TYPE_CHECKING:
    import numpy as np

_MSCALES = {"deepseek2": 10, "mistral3": 1, "mistral4": 10}
"""What the value of the file is multiplied with to be `mscale` and `mscale_all_dim`, which are equal in all models."""
_DIVISORS, _SHORT, _LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
"""Tensors of numbers that the frequencies are divided by."""
_LLAMA_3 = {"low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
"""The parameters of all models with Llama 3's scaling of frequencies. The file has only the divisors."""
_HIGH_FACTORS = (4.0, 1.0)
"""`high_freq_factor` of Llama 3 and of Llama 4; the latter has no frequencies between high and low ones."""
_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
_MSCALE = "yarn_log_multiplier"
_FACTOR = "yarn_attn_factor"
_HAVE_FACTOR = ("laguna", "mellum")
"""Architectures whose models say what cosines are multiplied with. The converter copies it, and llama.cpp ignores it:
in Laguna it is 1, where llama.cpp computes with the usual one."""
_NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "alpha": (0, 1),
    "attn_factor": (0, 1),
    _FACTOR: (0, 1),
    "yarn_ext_factor": (-1, 1),
    _MSCALE: (0,),
}
"""Values that change nothing, where a key is not read."""


def scale_positions(config: Any, metadata: Metadata, tensors: Sequence[FileTensor]) -> set[str]:
    """Puts the scaling of a file into the configuration, of layers without a window. Returns the names of the tensors
    that it has used. Raises `ModelError` for a scaling that is not known."""
    import numpy as np

    of_layers: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    parameters, original = of_layers.get("full_attention", of_layers), "original_max_position_embeddings"
    if parameters.get("rope_type") not in ("default", "yarn"):
        # It has no rotary positions, or transformers knows how the architecture scales them.
        _require_read(metadata, set())
        return set()
    divisors = {
        tensor.name: tensor.content().astype(float)
        for tensor in tensors
        if tensor.name in (_DIVISORS, _SHORT, _LONG) and tensor.kind == "F32"
    }
    is_long = _SHORT in divisors and _LONG in divisors
    parameters |= (scaling := _scaling(metadata, is_long=is_long))
    if "rope_type" in scaling and divisors:
        raise ModelError(f"the file scales positions twice: by {min(divisors)} and by a factor")
    if is_long and original not in scaling:
        parameters[original] = config.max_position_embeddings
    if original in parameters and hasattr(config, original):
        # transformers prefers this option, and its default belongs to another model.
        setattr(config, original, parameters[original])
    if is_long:
        parameters |= {"attention_factor": 1.0} | parameters | _divided_by(divisors[_SHORT], divisors[_LONG])
        # Of heads that are rotated in part, transformers reads the part for few architectures.
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        parameters["partial_rotary_factor"] = 2 * divisors[_SHORT].size / head_dim
    elif _DIVISORS in divisors:
        of_file = divisors[_DIVISORS]
        factor = float(of_file.max())
        made = {high: _llama_3_divisors(parameters["rope_theta"], factor, high, of_file.size) for high in _HIGH_FACTORS}
        if known := [high for high, numbers in made.items() if np.allclose(of_file, numbers, rtol=1e-3)]:
            parameters |= {"rope_type": "llama3", "factor": factor, "high_freq_factor": known[0], **_LLAMA_3}
        else:
            # One set of divisors, for texts of any length.
            parameters |= _divided_by(of_file, of_file) | {"attention_factor": 1.0}
            parameters[original] = config.max_position_embeddings
    return {_SHORT, _LONG} if is_long else {_DIVISORS} & divisors.keys()


def _require_read(metadata: Metadata, read: Collection[str]) -> None:
    """Raises `ModelError` for a key that is not `read` and changes numbers, and for a value of another type."""
    harmless = {"finetuned", "original_context_length", *_YARN}
    for name, value in metadata.scaling().items():
        neutral = ("none", "linear") if name == "type" else (0, 1) if name == "factor" else _NEUTRAL.get(name, ())
        is_known = isinstance(value, str) if name == "type" else is_finite(value)
        if not is_known or (name not in read and name not in harmless and value not in neutral):
            key = f"{metadata.architecture}.{SCALING}{name}"
            raise ModelError(f"the file's {key} is {shown(value)}, and nothing here reads it")


def _scaling(metadata: Metadata, *, is_long: bool) -> dict[str, Any]:
    """Returns transformers' names for the metadata about scaling. `is_long`: the file has divisors for long texts."""
    values = metadata.scaling()
    kind, times = values.get("type", "linear"), _MSCALES.get(metadata.architecture, 0)
    if kind == "none":
        _require_read(metadata, values.keys())
        return {}
    read = {"factor"} | ({"type"} if kind in ("linear", "yarn") or (kind == "longrope" and is_long) else set())
    read |= {"attn_factor"} if is_long and kind != "yarn" else set()
    factor: Any = values.get("factor")
    usual = 0.1 * math.log(factor) + 1 if kind == "yarn" and is_finite(factor) and factor > 1 else 1.0
    own: Any = values.get(_FACTOR) if kind == "yarn" else None
    has_own = is_finite(own) and own > 0 and metadata.architecture in _HAVE_FACTOR
    if has_own or (is_finite(own) and math.isclose(own, usual, rel_tol=1e-5)):
        read |= {_FACTOR}
    _require_read(metadata, read | ({_MSCALE} if times and kind == "yarn" else set()))
    scaling: dict[str, Any] = {}
    if "original_context_length" in values:
        scaling["original_max_position_embeddings"] = int(values["original_context_length"])
    if kind == "yarn":
        scaling |= {"attention_factor": float(own)} if has_own else {}
        scaling |= {known: float(values[name]) for name, known in _YARN.items() if name in values}
        if _MSCALE in values and times:
            # The file has it in float32.
            scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), round(times * float(values[_MSCALE]), 5))
    elif is_long and values.get("attn_factor"):
        scaling["attention_factor"] = float(values["attn_factor"])
    if kind in ("linear", "yarn") and (factor := float(values.get("factor", 1))) not in (0, 1):
        scaling |= {"rope_type": kind, "factor": factor}
    return scaling


def _divided_by(short: np.ndarray[Any, Any], long: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"rope_type": "longrope", "short_factor": short.tolist(), "long_factor": long.tolist()}


def _llama_3_divisors(base: float, factor: float, high: float, size: int) -> np.ndarray[Any, Any]:
    """Returns what llama.cpp's converter writes for a model of this family."""
    import numpy as np

    low, original = _LLAMA_3.values()
    with np.errstate(all="ignore"):
        turns = original / (2 * math.pi * base ** (np.arange(size) / size))
        smooth = ((turns - low) / max(high - low, 1e-9)).clip(0, 1)
        return np.asarray(1 / ((1 - smooth) / factor + smooth))
