"""The rotary embeddings of models: the angles by which elements of a head rotate from one position to the next.

They are the results of transformers' `ROPE_INIT_FUNCTIONS` for a configuration, in float32, with powers rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from diskprefix.errors import ModelError
from diskprefix.native.calls import Pairing
from diskprefix.runtime.plan.families.declared import option
from diskprefix.runtime.plan.families.types.known_types import type_of
from diskprefix.runtime.plan.operands import Rotary

Frequencies: TypeAlias = tuple[np.ndarray, float]
"""The angle of each rotated pair for one position, float32 [half], and the factor of cosines and sines."""

_ALPHA = "ntk_alpha"
"""Our name for the kind that transformers calls "dynamic", with a fixed `alpha`."""


def rotary_of(config: Any) -> dict[str, Rotary]:
    """Returns the rotary embeddings of a decoder by key. The key is "" if all layers have the same one, or else the
    kind of the layers or their base."""
    parameters: Mapping[str, Any] = option(config, "rope_parameters") or {}
    if not parameters or option(config, "position_embedding_type", "rope") != "rope":
        return {}
    if thetas := option(config, "layer_rope_theta"):
        return {str(theta): _rotary(config, {**parameters, "rope_theta": theta}) for theta in thetas if theta}
    if "rope_theta" in parameters:
        return {"": _rotary(config, parameters)}
    kinds = sorted({*config.layer_types} & {kind for kind, given in parameters.items() if given is not None})
    return {kind: _rotary(_of_layers(config, kind), parameters[kind]) for kind in kinds}


def _of_layers(config: Any, kind: str) -> Any:
    """Returns the configuration of the layers of a kind. The size of their heads may differ from other kinds."""
    return config.per_layer_config[kind] if getattr(config, "is_heterogeneous", False) else config


def _rotary(config: Any, parameters: Mapping[str, Any]) -> Rotary:
    frequencies, factor = KINDS[_kind(config, parameters)](config, parameters)
    if type_of(config).rotary.reverses:
        frequencies = -frequencies
    return Rotary(frequencies, factor, _pairing(config), axes=_axes(config, parameters, len(frequencies)))


def _pairing(config: Any) -> Pairing:
    """Returns the pairing of rotated elements."""
    if type_of(config).rotary.interleaved:
        return Pairing.INTERLEAVED
    return Pairing.INTERLEAVED_TO_HALVES if option(config, "rope_interleave", False) else Pairing.HALVES


def _axes(config: Any, parameters: Mapping[str, Any], count: int) -> np.ndarray | None:
    """Returns the dimension of positions that each frequency uses, int64 [count]; None if positions have one dimension.
    The frequencies of the dimensions are in consecutive sections, or interleaved."""
    rules = type_of(config).rotary
    if rules.sections is None:
        return None
    sections: Sequence[int] = parameters.get("mrope_section", rules.sections)
    if rules.sections_in_order:
        return np.repeat(np.arange(len(sections)) % 3, sections)
    axes = np.zeros(count, np.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def _head_dim(config: Any) -> int:
    return int(option(config, "head_dim") or config.hidden_size // config.num_attention_heads)


def _rotated_dim(config: Any, parameters: Mapping[str, Any]) -> int:
    """Returns the number of rotated elements of a head."""
    part = parameters.get("partial_rotary_factor")
    return int(_head_dim(config) * (1.0 if part is None else part))


def _periods(parameters: Mapping[str, Any], count: int, width: int) -> np.ndarray:
    """Returns base ** (2 × i ÷ width) for i < count ÷ 2, float32."""
    exponents = np.arange(0, count, 2).astype(np.float32) / np.float32(width)
    periods: np.ndarray = (np.float64(parameters["rope_theta"]) ** exponents.astype(np.float64)).astype(np.float32)
    return periods


def _default(config: Any, parameters: Mapping[str, Any]) -> Frequencies:
    width, rules = _head_dim(config), type_of(config).rotary
    if rules.partial:
        width = _rotated_dim(config, {"partial_rotary_factor": rules.part, **parameters})
    return 1 / _periods(parameters, width, width), 1.0


def _linear(config: Any, parameters: Mapping[str, Any]) -> Frequencies:
    width = _rotated_dim(config, parameters)
    return 1 / _periods(parameters, width, width) / np.float32(parameters["factor"]), 1.0


def _proportional(config: Any, parameters: Mapping[str, Any]) -> Frequencies:
    """Every pair of a head has a frequency; those after the rotated part are zero."""
    width = _head_dim(config)
    count = int(parameters.get("partial_rotary_factor", 1.0) * width // 2)
    frequencies = np.zeros(width // 2, np.float32)
    frequencies[:count] = 1 / _periods(parameters, 2 * count, width)
    return frequencies / np.float32(parameters.get("factor", 1.0)), 1.0


def _llama_3(config: Any, parameters: Mapping[str, Any]) -> Frequencies:
    """Low frequencies are divided by a factor, high ones are not; between them is a smooth transition."""
    width = _rotated_dim(config, parameters)
    frequencies = 1 / _periods(parameters, width, width)
    factor, low, high = (parameters[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    length = parameters["original_max_position_embeddings"]
    waves = 1 / frequencies * np.float32(2 * math.pi)
    scaled = np.where(waves > length / low, frequencies / np.float32(factor), frequencies)
    smooth = (1 / waves * np.float32(length) - np.float32(low)) / np.float32(high - low)
    between = (1 - smooth) * scaled / np.float32(factor) + smooth * scaled
    is_between = ~(waves < length / high) & ~(waves > length / low)
    return np.where(is_between, between, scaled), 1.0


def _yarn(config: Any, parameters: Mapping[str, Any]) -> Frequencies:
    """Frequencies with many rotations in the original length are kept, others are divided, with a ramp between."""
    width, base = _rotated_dim(config, parameters), parameters["rope_theta"]
    original, factor = parameters["original_max_position_embeddings"], parameters["factor"]
    if factor is None:
        factor = config.max_position_embeddings / original
    angle_factor, scale, all_dims = (parameters.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if angle_factor is None and scale and all_dims:
        angle_factor = yarn_scale(factor, scale) / yarn_scale(factor, all_dims)
    rotations = parameters.get("beta_fast") or 32, parameters.get("beta_slow") or 1
    first, last = (width * math.log(original / (count * 2 * math.pi)) / (2 * math.log(base)) for count in rotations)
    if (option(config, "rope_parameters") or {}).get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    distance = last - first or 0.001
    ramp = ((np.arange(width // 2, dtype=np.float32) - np.float32(first)) / np.float32(distance)).clip(0, 1)
    periods, kept = _periods(parameters, width, width), 1 - ramp
    frequencies = 1 / (np.float32(factor) * periods) * (1 - kept) + 1 / periods * kept
    return frequencies, float(yarn_scale(factor) if angle_factor is None else angle_factor)


def yarn_scale(factor: float, scale: float = 1.0) -> float:
    """Returns YaRN's factor of cosines and sines, or the square root of its factor of scores."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _by_alpha(config: Any, parameters: Mapping[str, Any]) -> Frequencies:
    """The base is multiplied by a power of `alpha`."""
    width = _head_dim(config)
    base = parameters["rope_theta"] * parameters["alpha"] ** (width / (width - 2))
    return 1 / _periods({"rope_theta": base}, width, width), 1.0


def _length_served(config: Any, parameters: Mapping[str, Any]) -> str:
    """Returns `long` if texts of more than the original length are served, else `short`."""
    positions = config.max_position_embeddings
    longest = min(getattr(config, "context", None) or positions, positions)
    return "long" if longest > parameters["original_max_position_embeddings"] else "short"


def _long_or_short(config: Any, parameters: Mapping[str, Any]) -> Frequencies:
    """Frequencies are divided by the factors for long texts, or by those for texts of the original length. As in
    llama.cpp, the longest served sequence decides: `--context`, or else all positions of the model. In transformers, a
    sequence changes its factors when it grows, so its prefixes could not be cached."""
    width, length = _rotated_dim(config, parameters), parameters["original_max_position_embeddings"]
    positions, name = config.max_position_embeddings, _length_served(config, parameters)
    factors = np.array(parameters[f"{name}_factor"], np.float32)
    if factors.shape != (width // 2,):
        raise ModelError(
            f"the rope_parameters have {factors.size} numbers in {name}_factor, and {width // 2} pairs rotate"
        )
    factor = parameters.get("factor") or positions / length
    angle_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
    if type_of(config).rotary.own_factors:
        angle_factor = parameters[f"{name}_mscale"]
    if parameters.get("attention_factor") is not None:
        angle_factor = parameters["attention_factor"]
    return 1 / (factors * _periods(parameters, width, width)), float(angle_factor)


KINDS: Mapping[str, Callable[[Any, Mapping[str, Any]], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "llama3": _llama_3,
    "yarn": _yarn,
    "longrope": _long_or_short,
    _ALPHA: _by_alpha,
}
"""The kinds of rotary embeddings that plans have. In other kinds, frequencies depend on the length of the text."""


def _kind(config: Any, parameters: Mapping[str, Any]) -> str:
    """Returns the kind of rotary embedding. In some types, "dynamic" with an `alpha` does not depend on the length."""
    kind = str(parameters["rope_type"])
    has_alpha = kind == "dynamic" and type_of(config).rotary.takes_alpha and parameters.get("alpha")
    return _ALPHA if has_alpha else kind


def kinds_of_rotary(config: Any) -> set[str]:
    """Returns the kinds of rotary embeddings that a configuration has."""
    return {_kind(config, each) for each in _sets(config)}


def factors_in_use(config: Any) -> str:
    """Returns `long` or `short` for a model with two sets of factors, "" for others."""
    return next((_length_served(config, each) for each in _sets(config) if _kind(config, each) == "longrope"), "")


def _sets(config: Any) -> list[Mapping[str, Any]]:
    """Returns the parameters of each kind of layer, or those of all."""
    parameters = option(config, "rope_parameters") or {}
    sets = [each for each in parameters.values() if isinstance(each, Mapping)] or [parameters]
    return [each for each in sets if "rope_type" in each]


def scaled_by_yarn(config: Any, scale: float) -> float:
    """Returns the factor of the scores of latent attention: `scale`, or `scale` times YaRN's factor."""
    parameters = option(config, "rope_parameters") or {}
    if parameters.get("rope_type", "default") == "default" or not (all_dims := parameters.get("mscale_all_dim", 0)):
        return scale
    root = yarn_scale(parameters["factor"], all_dims)
    return scale * root * root
