"""The parameters of rotary positions, by the names of today: one set, or one for each kind of layers.

`own` and `extra` are those of `derived_options`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from diskprefix.errors import ModelError
from diskprefix.model.families.derived_options import Options
from diskprefix.printable import shown

_AS_THEY_ARE = "cohere_compass_text gemma4_text gemma4_unified_text laguna mellum mimo_v2_flash step3p5"
"""Types whose configurations have no older names of them."""
_OF_KINDS = {"gemma3_text": (1e6, 1e4), "gemma3n_text": (1e6, 1e4), "olmo3": (5e5, 5e5)}
"""Types with other positions in layers with a window: the bases of full attention and of windows."""
_PARTS = {
    **dict.fromkeys(("bamba", "glm", "glm4", "glm4_moe", "nemotron", "persimmon", "phi"), 0.5),
    **dict.fromkeys(("gpt_neox", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "stablelm"), 0.25),
    "phi3": 1.0,
}
"""The part of a head that turns, where no configuration says it."""
_WITH_LENGTHS = ("llama3", "yarn", "longrope")
_NEEDED: Mapping[Any, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "rope_theta"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
_MSCALES = ("short_mscale", "long_mscale")
_YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
_SCALED = {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
_GEMMA_4: Options = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_DEFAULTS: Mapping[str, Options] = {
    "cwm": {
        "rope_type": "llama3",
        "rope_theta": 1e6,
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
    "gemma4_text": _GEMMA_4,
    "gemma4_unified_text": _GEMMA_4,
    "gpt_oss": {**_YARN, "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
    "laguna": {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
    "mellum": {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "mimo_v2_flash": {
        "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334},
    },
    "ministral3": {**_SCALED, "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384},
    "mistral4": {**_SCALED, "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192},
}
"""What a type has without parameters of its own."""


def set_rotary(kind: str, base: float, own: Options, extra: Options) -> None:
    """Sets the parameters of positions of a type of model whose base is `base`, unless its heads do not turn."""
    if kind == "cohere2_moe":
        own["rope_parameters"] = extra.pop("rope_parameters", None) or {"rope_theta": own["rope_theta"]}
    if "rope_parameters" not in own:
        # Older configurations may have them. The heads of these types do not turn.
        for name in ("rope_parameters", "rope_scaling"):
            extra.pop(name, None)
        return
    if own["rope_parameters"] is None:
        own["rope_parameters"] = deepcopy(_DEFAULTS.get(kind))
    if kind == "mistral4":
        part = own["qk_rope_head_dim"] / (own["qk_nope_head_dim"] + own["qk_rope_head_dim"])
        own["rope_parameters"].setdefault("partial_rotary_factor", part)
    labels = own.get("layer_types") or own.get("layers_block_type") or ()
    if kind == "step3p5":
        own["rope_parameters"] = _of_step_3(own, extra, base)
    elif kind in _AS_THEY_ARE.split():
        _take_as_it_is(kind, own, extra, labels)
    else:
        scaling = extra.pop("rope_scaling", None)
        if kind in _OF_KINDS:
            found = _of_kinds(own["rope_parameters"], scaling, _OF_KINDS[kind], extra)
        else:
            found = scaling or own["rope_parameters"] or {}
            names, part = ("rope_theta", "partial_rotary_factor"), _PARTS.get(kind)
            if kind == "gpt_neox":
                names = ("rotary_emb_base", "rotary_pct")
            if kind == "minimax_m2" and (turned := extra.get("rotary_dim")) is not None:
                part = turned / own["head_dim"]
            theta = extra.pop(names[0], base)
            part = part if kind in _FIXED_PARTS else extra.pop(names[1], part)
            nested = [found[name] for name in found if name in labels] if kind not in _FLAT else []
            for one in nested or [found]:
                if one is not None:
                    one.setdefault("rope_theta", theta)
                    if part is not None:
                        one.setdefault("partial_rotary_factor", part)
            if kind in _WITH_AXES and found.get("rope_type", found.get("type")) == "mrope":
                found["rope_type"] = "default"
        _standardise(own, found, labels)
        if kind == "phi3" and found["rope_type"] in ("su", "yarn"):
            found["rope_type"] = "longrope"
        if kind in ("phi3", "phimoe") and found["rope_type"] not in ("default", "longrope"):
            raise ModelError(f"no model of this type scales positions so: {found['rope_type']}")
        own["rope_parameters"] = found
    _require_keys(kind, own["rope_parameters"] or {}, labels)
    if "layer_rope_theta" in own and own["layer_rope_theta"] is None:
        own["layer_rope_theta"] = [own["rope_parameters"]["rope_theta"]] * own["num_hidden_layers"]


def _require_keys(kind: str, found: Options, labels: Any) -> None:
    for one in [found[name] for name in found if name in labels] or [found]:
        if not one:
            continue
        needed = _NEEDED.get(one["rope_type"], ())
        if kind == "phimoe" and one["rope_type"] == "longrope":
            needed = (*needed, *_MSCALES)
        if missing := [name for name in needed if name not in one]:
            raise ModelError(f"the rope_parameters of the configuration lack {missing[0]}")
        for name in needed:
            values = one[name] if isinstance(one[name], list) else [one[name]]
            if one["rope_type"] == "longrope" and not all(_is_positive(value) for value in values):
                raise ModelError(f"the {name} of the rope_parameters is {shown(repr(one[name]))}, not positive")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


_FIXED_PARTS = ("bamba", "qwen2_5_vl_text", "qwen2_vl_text")
_FLAT = ("gpt_neox", "phi3")
_WITH_AXES = ("qwen2_5_vl_text", "qwen2_vl_text")


def _of_kinds(found: Options | None, scaling: Options | None, bases: tuple[float, float], extra: Options) -> Options:
    of_kinds = ("full_attention", "sliding_attention")
    found = {name: {"rope_type": "default"} for name in of_kinds} if found is None else found
    if scaling is not None:
        found["full_attention"].update(scaling)
    of_windows = extra.pop("rope_local_base_freq", bases[1]) if bases[0] != bases[1] else bases[1]
    for name, theta in zip(of_kinds, (extra.pop("rope_theta", bases[0]), of_windows), strict=True):
        if found.get(name) is None:
            found[name] = {"rope_type": "default"}
        found[name].setdefault("rope_theta", theta)
    return found


def _of_step_3(own: Options, extra: Options, base: float) -> Options:
    """Lists by layer have a value for each kind of layers."""
    theta, parts = extra.pop("rope_theta", base), extra.pop("partial_rotary_factors", None)
    scaling, kinds, given = extra.pop("rope_scaling", None), own["layer_types"], own["rope_parameters"] or {}
    if all(isinstance(given.get(kind), dict) for kind in kinds):
        for kind in kinds:
            given[kind].setdefault("rope_theta", base)
        _standardise(own, given, kinds)
        return {kind: given[kind] for kind in dict.fromkeys(kinds)}
    found: Options = {}
    for kind in dict.fromkeys(kinds):
        first = kinds.index(kind)
        found[kind] = {"rope_type": "default", "rope_theta": theta[first] if isinstance(theta, list) else theta}
        if parts:
            found[kind]["partial_rotary_factor"] = parts[first]
    if scaling and "full_attention" in found:
        found["full_attention"].update(scaling)
    return found


def _take_as_it_is(kind: str, own: Options, extra: Options, labels: Any) -> None:
    found = own["rope_parameters"] or {}
    if kind == "cohere_compass_text":
        if not {*found}.isdisjoint(labels):
            found.pop("rope_theta", None)
            found.pop("rope_type", None)
        _standardise(own, found, labels)
        own["rope_parameters"] = found
    is_of_kinds = kind == "cohere_compass_text" or not found or not {*found}.isdisjoint(labels)
    if extra.pop("rope_scaling", None) is not None or not is_of_kinds:
        # transformers' classes read nothing else.
        own["rope_parameters"] = {"rope_type": "older"}
    for one in [found[name] for name in found if name in labels] or [found]:
        if one:
            one.setdefault("rope_type", one.get("type", "default"))


def _standardise(own: Options, found: Options, labels: Any) -> None:
    """Gives parameters their kind, and those that scale the length of training."""
    nested, length = [found[name] for name in found if name in labels], "original_max_position_embeddings"
    for one in nested or ([found] if found else []):
        if one is None:
            continue
        one.setdefault("rope_type", one.get("type", "default"))
        one.setdefault("rope_theta", None)
        if one["rope_type"] in _WITH_LENGTHS:
            if length in own and not nested:
                # Phi 3 has it outside.
                one[length] = own[length]
            else:
                one.setdefault(length, own["max_position_embeddings"])
