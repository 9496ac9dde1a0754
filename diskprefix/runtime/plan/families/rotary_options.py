"""The parameters of rotary embeddings by their current names: one set, or one for each kind of layers.

`own` and `extra` are the same as in `derived_options`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from diskprefix.errors import ModelError
from diskprefix.printable import shown
from diskprefix.runtime.plan.families.types.derivations import standardise_rotary
from diskprefix.runtime.plan.families.types.known_types import TYPES
from diskprefix.runtime.plan.families.types.model_type import Options, Rotation

_NEEDED: Mapping[Any, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "rope_theta"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
_OWN_FACTORS = ("short_mscale", "long_mscale")


def set_rotary(kind: str, base: float, own: Options, extra: Options) -> None:
    """Sets the rotary parameters of a configuration, if the heads of its type `kind` rotate, with the type's `base`."""
    rules = TYPES[kind].rotary
    if "rope_parameters" not in own:
        # The heads of these types do not rotate, but older configurations may have the parameters.
        for name in ("rope_parameters", "rope_scaling"):
            extra.pop(name, None)
        return
    if own["rope_parameters"] is None:
        own["rope_parameters"] = deepcopy(rules.defaults)
    labels = own.get("layer_types") or own.get("layers_block_type") or ()
    if rules.parameters is not None:
        own["rope_parameters"] = rules.parameters(own, extra, base)
    elif rules.older_names:
        own["rope_parameters"] = _of_older_names(rules, base, own, extra, labels)
    else:
        _take_as_it_is(rules, own, extra, labels)
    _require_keys(rules, own["rope_parameters"] or {}, labels)
    if "layer_rope_theta" in own and own["layer_rope_theta"] is None:
        own["layer_rope_theta"] = [own["rope_parameters"]["rope_theta"]] * own["num_hidden_layers"]


def _of_older_names(rules: Rotation, base: float, own: Options, extra: Options, labels: Any) -> Options:
    """Returns the parameters of a configuration that may have older names for them. Raises `ModelError` for a kind of
    rotary embedding that the type does not have."""
    scaling = extra.pop("rope_scaling", None)
    if rules.bases is not None:
        parameters = _by_kind(own["rope_parameters"], scaling, rules.bases, extra)
    else:
        parameters = scaling or own["rope_parameters"] or {}
        theta_name, part_name = rules.option_names
        theta = extra.pop(theta_name, base)
        part = rules.part if rules.part_is_fixed else extra.pop(part_name, rules.part)
        nested = [parameters[name] for name in parameters if name in labels] if rules.nests else []
        for each in nested or [parameters]:
            if each is not None:
                each.setdefault("rope_theta", theta)
                if part is not None:
                    each.setdefault("partial_rotary_factor", part)
    standardise_rotary(own, parameters, labels)
    if renamed := rules.renamed_kinds.get(parameters.get("rope_type", "")):
        parameters["rope_type"] = renamed
    if rules.kinds and parameters["rope_type"] not in rules.kinds:
        raise ModelError(f"no model of this type scales positions so: {parameters['rope_type']}")
    return parameters


def _require_keys(rules: Rotation, parameters: Options, labels: Any) -> None:
    for each in [parameters[name] for name in parameters if name in labels] or [parameters]:
        if not each:
            continue
        needed = _NEEDED.get(each["rope_type"], ())
        if rules.own_factors and each["rope_type"] == "longrope":
            needed = (*needed, *_OWN_FACTORS)
        if missing := [name for name in needed if name not in each]:
            raise ModelError(f"the rope_parameters of the configuration lack {missing[0]}")
        for name in needed:
            values = each[name] if isinstance(each[name], list) else [each[name]]
            if each["rope_type"] == "longrope" and not all(_is_positive(value) for value in values):
                raise ModelError(f"the {name} of the rope_parameters is {shown(repr(each[name]))}, not positive")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _by_kind(given: Options | None, scaling: Options | None, bases: tuple[float, float], extra: Options) -> Options:
    kinds = ("full_attention", "sliding_attention")
    parameters = {name: {"rope_type": "default"} for name in kinds} if given is None else given
    if scaling is not None:
        parameters["full_attention"].update(scaling)
    base_of_windows = extra.pop("rope_local_base_freq", bases[1]) if bases[0] != bases[1] else bases[1]
    for name, theta in zip(kinds, (extra.pop("rope_theta", bases[0]), base_of_windows), strict=True):
        if parameters.get(name) is None:
            parameters[name] = {"rope_type": "default"}
        parameters[name].setdefault("rope_theta", theta)
    return parameters


def _take_as_it_is(rules: Rotation, own: Options, extra: Options, labels: Any) -> None:
    parameters = own["rope_parameters"] or {}
    if rules.one_for_all:
        if not {*parameters}.isdisjoint(labels):
            parameters.pop("rope_theta", None)
            parameters.pop("rope_type", None)
        standardise_rotary(own, parameters, labels)
        own["rope_parameters"] = parameters
    is_by_kind = rules.one_for_all or not parameters or not {*parameters}.isdisjoint(labels)
    if extra.pop("rope_scaling", None) is not None or not is_by_kind:
        # transformers' classes do not read these parameters.
        own["rope_parameters"] = {"rope_type": "older"}
    for each in [parameters[name] for name in parameters if name in labels] or [parameters]:
        if each:
            each.setdefault("rope_type", each.get("type", "default"))
