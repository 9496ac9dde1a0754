"""The rotary positions of models: the angles by which numbers of a head turn from one position to the next.

They are what transformers' `ROPE_INIT_FUNCTIONS` compute for a configuration, in float32, with powers that are rounded
once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from diskprefix.errors import ModelError
from diskprefix.model.operands import Rotary

Frequencies: TypeAlias = tuple[np.ndarray, float]
"""The angles, float32 [half], and the factor of their cosines and sines."""

_IN_PART = """
    bamba glm glm4 glm4_moe glm4_moe_lite gpt_neox laguna mellum mimo_v2_flash minimax_m2 nemotron persimmon phi phi3
    qwen3_5_moe_text qwen3_5_text qwen3_next solar_open stablelm step3p5
"""
"""Those whose unscaled positions may turn a part of a head. Scaled ones may do so in all types."""
_NEIGHBOURS_TURN = "cohere cohere2 cohere2_moe deepseek_v2 ernie4_5 ernie4_5_moe glm glm4 helium llama4_text"
"""Those whose neighbouring numbers of a head turn together."""
_TURN_BACK = ("nanochat",)
"""Those whose heads turn the other way."""
_WITH_ALPHA, _ALPHA = ("hunyuan_v1_dense", "hunyuan_v1_moe"), "ntk_alpha"
"""Those whose "dynamic" positions have a fixed `alpha`, and what transformers calls these positions."""
_WITH_MSCALES = ("phimoe",)
"""Those whose cosines and sines have a factor of their own for long texts and for short ones."""
_SECTIONS = {
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), (16, 24, 24)),
    **dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text"), (24, 20, 20)),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), (11, 11, 10)),
    "cohere_compass_text": (24, 20, 20),
}
"""Those with positions of three dimensions, and how many frequencies each has if the configuration does not say."""
_SECTIONS_IN_ORDER = ("qwen2_vl_text", "qwen2_5_vl_text")
"""Those whose sections of frequencies follow each other. Others take turns."""


def rotary_of(config: Any) -> dict[str, Rotary]:
    """Returns the rotary positions of a decoder's layers: one kind for all, "", or several by the kinds of layers or by
    their bases."""
    parameters: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    if not parameters or getattr(config, "position_embedding_type", "rope") != "rope":
        return {}
    if thetas := getattr(config, "layer_rope_theta", None):
        return {str(theta): _rotary(config, {**parameters, "rope_theta": theta}) for theta in thetas if theta}
    if "rope_theta" in parameters:
        return {"": _rotary(config, parameters)}
    kinds = sorted({*config.layer_types} & {kind for kind, found in parameters.items() if found is not None})
    return {kind: _rotary(_of_layers(config, kind), parameters[kind]) for kind in kinds}


def _of_layers(config: Any, kind: str) -> Any:
    """Returns the configuration of the layers of a kind, whose heads may have another size."""
    return config.per_layer_config[kind] if getattr(config, "is_heterogeneous", False) else config


def _rotary(config: Any, parameters: Mapping[str, Any]) -> Rotary:
    frequencies, factor = KINDS[_kind(config, parameters)](config, parameters)
    if config.model_type in _TURN_BACK:
        frequencies = -frequencies
    return Rotary(frequencies, factor, _pairing(config), axes=_axes(config, parameters, len(frequencies)))


def _pairing(config: Any) -> int:
    """Returns which numbers of a head turn together; see `Rotary`."""
    if config.model_type in _NEIGHBOURS_TURN.split():
        return 1
    return 2 if getattr(config, "rope_interleave", False) else 0


def _axes(config: Any, parameters: Mapping[str, Any], count: int) -> np.ndarray | None:
    """Returns which dimension of a position each frequency has, int64 [count], None if positions have one. Sections of
    frequencies follow each other, or take turns."""
    if config.model_type not in _SECTIONS:
        return None
    sections: Sequence[int] = parameters.get("mrope_section", _SECTIONS[config.model_type])
    if config.model_type in _SECTIONS_IN_ORDER:
        return np.repeat(np.arange(len(sections)) % 3, sections)
    axes = np.zeros(count, np.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _turned(config: Any, parameters: Mapping[str, Any]) -> int:
    """Returns how many numbers of a head turn."""
    part = parameters.get("partial_rotary_factor")
    return int(_head_dim(config) * (1.0 if part is None else part))


def _periods(parameters: Mapping[str, Any], count: int, width: int) -> np.ndarray:
    """Returns base ** (2 × number ÷ width), float32 [count ÷ 2]."""
    exponents = np.arange(0, count, 2).astype(np.float32) / np.float32(width)
    found: np.ndarray = (np.float64(parameters["rope_theta"]) ** exponents.astype(np.float64)).astype(np.float32)
    return found


def _default(config: Any, parameters: Mapping[str, Any]) -> Frequencies:
    width = _head_dim(config)
    if config.model_type in _IN_PART.split():
        in_file = {"partial_rotary_factor": 0.334} if config.model_type == "mimo_v2_flash" else {}
        width = _turned(config, {**in_file, **parameters})
    return 1 / _periods(parameters, width, width), 1.0


def _linear(config: Any, parameters: Mapping[str, Any]) -> Frequencies:
    width = _turned(config, parameters)
    return 1 / _periods(parameters, width, width) / np.float32(parameters["factor"]), 1.0


def _proportional(config: Any, parameters: Mapping[str, Any]) -> Frequencies:
    """All numbers of a head have an angle, which is zero behind a part of them."""
    width = _head_dim(config)
    turned = int(parameters.get("partial_rotary_factor", 1.0) * width // 2)
    found = np.zeros(width // 2, np.float32)
    found[:turned] = 1 / _periods(parameters, 2 * turned, width)
    return found / np.float32(parameters.get("factor", 1.0)), 1.0


def _llama_3(config: Any, parameters: Mapping[str, Any]) -> Frequencies:
    """Low frequencies are divided by a factor, high ones are not, those between them in part."""
    width = _turned(config, parameters)
    found = 1 / _periods(parameters, width, width)
    factor, low, high = (parameters[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    length = parameters["original_max_position_embeddings"]
    waves = 1 / found * np.float32(2 * math.pi)
    scaled = np.where(waves > length / low, found / np.float32(factor), found)
    smooth = (1 / waves * np.float32(length) - np.float32(low)) / np.float32(high - low)
    between = (1 - smooth) * scaled / np.float32(factor) + smooth * scaled
    is_between = ~(waves < length / high) & ~(waves > length / low)
    return np.where(is_between, between, scaled), 1.0


def _yarn(config: Any, parameters: Mapping[str, Any]) -> Frequencies:
    """Between two numbers of turns in the original length, a ramp leads from plain frequencies to divided ones."""
    width, base = _turned(config, parameters), parameters["rope_theta"]
    original, factor = parameters["original_max_position_embeddings"], parameters["factor"]
    if factor is None:
        factor = config.max_position_embeddings / original
    of_angles, scale, of_all = (parameters.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if of_angles is None and scale and of_all:
        of_angles = yarn_scale(factor, scale) / yarn_scale(factor, of_all)
    turns = parameters.get("beta_fast") or 32, parameters.get("beta_slow") or 1
    first, last = (width * math.log(original / (one * 2 * math.pi)) / (2 * math.log(base)) for one in turns)
    if (config.rope_parameters or {}).get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    distance = last - first or 0.001
    ramp = ((np.arange(width // 2, dtype=np.float32) - np.float32(first)) / np.float32(distance)).clip(0, 1)
    periods, kept = _periods(parameters, width, width), 1 - ramp
    found = 1 / (np.float32(factor) * periods) * (1 - kept) + 1 / periods * kept
    return found, float(yarn_scale(factor) if of_angles is None else of_angles)


def yarn_scale(factor: float, scale: float = 1.0) -> float:
    """Returns what YaRN multiplies cosines and sines with, or the root of what it multiplies scores with."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _by_alpha(config: Any, parameters: Mapping[str, Any]) -> Frequencies:
    """The base grows by a power of a fixed number."""
    width = _head_dim(config)
    base = parameters["rope_theta"] * parameters["alpha"] ** (width / (width - 2))
    return 1 / _periods({"rope_theta": base}, width, width), 1.0


def _long_or_short(config: Any, parameters: Mapping[str, Any]) -> Frequencies:
    """Frequencies are divided by factors for long texts, or by those for texts of the original length. The longest
    sequence that is served decides, as in llama.cpp: `--context`, or else all positions of the model. So no sequence
    changes its factors as it grows, as those of transformers do, which no prefix could follow."""
    width, length = _turned(config, parameters), parameters["original_max_position_embeddings"]
    positions = config.max_position_embeddings
    name = "long" if min(getattr(config, "context", None) or positions, positions) > length else "short"
    factors = np.array(parameters[f"{name}_factor"], np.float32)
    if factors.shape != (width // 2,):
        raise ModelError(f"the rope_parameters have {factors.size} numbers in {name}_factor, and {width // 2} turn")
    factor = parameters.get("factor") or positions / length
    of_angles = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
    if config.model_type in _WITH_MSCALES:
        of_angles = parameters[f"{name}_mscale"]
    if parameters.get("attention_factor") is not None:
        of_angles = parameters["attention_factor"]
    return 1 / (factors * _periods(parameters, width, width)), float(of_angles)


KINDS: Mapping[str, Callable[[Any, Mapping[str, Any]], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "llama3": _llama_3,
    "yarn": _yarn,
    "longrope": _long_or_short,
    _ALPHA: _by_alpha,
}
"""The kinds of positions that plans have. Frequencies of the others depend on the length of the text."""


def _kind(config: Any, parameters: Mapping[str, Any]) -> str:
    """Returns the kind of positions. "dynamic" ones with an `alpha` depend on nothing else in some types."""
    kind = str(parameters["rope_type"])
    has_alpha = kind == "dynamic" and config.model_type in _WITH_ALPHA and parameters.get("alpha")
    return _ALPHA if has_alpha else kind


def kinds_of_rotary(config: Any) -> set[str]:
    """Returns the kinds of positions that a configuration has."""
    parameters = getattr(config, "rope_parameters", None) or {}
    of_layers = [one for one in parameters.values() if isinstance(one, Mapping)] or [parameters]
    return {_kind(config, one) for one in of_layers if "rope_type" in one}


def scaled_by_yarn(config: Any, scale: float) -> float:
    """Returns the factor of the scores of latent attention, which YaRN may multiply."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type", "default") == "default" or not (of_all := parameters.get("mscale_all_dim", 0)):
        return scale
    return scale * (found := yarn_scale(parameters["factor"], of_all)) * found
