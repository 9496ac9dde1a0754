"""Options that the classes of transformers derive from other options, for configurations that do not set them.

`own` has the options that a type declares, `extra` the other keys of the configuration. Both are changed in place. The
record of a type (`types`) has its own rules.
"""

from __future__ import annotations

from typing import Any

from diskprefix.errors import ModelError
from diskprefix.printable import shown
from diskprefix.runtime.plan.families.types.derivations import FULL, LINEAR
from diskprefix.runtime.plan.families.types.known_types import TYPES
from diskprefix.runtime.plan.families.types.model_type import Options

OLDER_LAYERS = {"mamba": LINEAR, "attention": FULL}


def derive(kind: str, own: Options, extra: Options) -> None:
    """Sets the options of a text decoder of the type `kind` that follow from others, except the options of positions.
    Raises `ModelError`, and for values of another type any error."""
    record = TYPES[kind]
    for older, name in record.renamed_options.items():
        if older in extra:
            own[name] = extra.pop(older)
    heads = own.get("num_attention_heads", own.get("n_head"))
    if own.get("num_key_value_heads", 0) is None:
        own["num_key_value_heads"] = heads
    if own.get("head_dim", 0) is None:
        own["head_dim"], surplus = divmod(own["hidden_size"], heads)
        if surplus:
            raise ModelError(f"the width of the model, {own['hidden_size']}, is not a multiple of its {heads} heads")
    if own.get("time_step_limit") is not None:
        _require_limits(own["time_step_limit"])
    if record.derive is not None:
        record.derive(own, extra)
    for name, make in (
        ("layer_types", record.layer_types),
        ("layers_block_type", record.layer_types),
        ("mlp_layer_types", record.mlp_layer_types),
    ):
        if make is not None and name in own and own[name] is None:
            own[name] = make(own, extra)


def _require_limits(limits: Any) -> None:
    """Raises `ModelError` unless these are the smallest and the largest step of a state space."""
    are_numbers = all(isinstance(limit, int | float) and not isinstance(limit, bool) for limit in limits)
    if not are_numbers or len(limits) != 2 or not 0 <= limits[0] <= limits[1]:
        raise ModelError(
            f"the configuration's time_step_limit is {shown(repr(limits))}, not a least and a largest step"
        )
