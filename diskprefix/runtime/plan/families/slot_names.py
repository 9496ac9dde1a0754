"""The names of the weights of a model, and the order of their rows, from its type and its configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from msgspec import Struct

from diskprefix.runtime.plan.families.declared import first_of
from diskprefix.runtime.plan.families.optional_weights import has_tensor, modules_with_bias
from diskprefix.runtime.plan.families.types.known_types import type_of
from diskprefix.runtime.plan.part_options import ExpertsForm


class SlotNames(Struct, frozen=True):
    """The names of the weights of a model. `own` maps the usual names, within a layer or outside of layers, to the
    model's. With `has_plain_norms`, norms of hidden states have no weights. `epsilons` has the norms whose epsilon
    differs from the model's."""

    hidden_size: int
    own: Mapping[str, str]
    experts: ExpertsForm
    epsilons: Mapping[str, float]
    has_plain_norms: bool
    has_transposed_matrices: bool
    with_bias: re.Pattern[str] | None = None
    """The modules that have biases, by their usual names; None if the weights decide."""
    has: Callable[[str, str], bool | None] = lambda _layer, _name: None
    """Returns whether there is a tensor, by its layer and its usual name; None if the weights decide."""
    num_experts: int | None = None

    @classmethod
    def of(cls, config: Any) -> SlotNames:
        """Returns the names of a decoder's weights, from its configuration."""
        record = type_of(config)
        return cls(
            hidden_size=config.hidden_size,
            own=record.names,
            experts=ExpertsForm() if record.experts is None else record.experts.form,
            epsilons=record.epsilons,
            has_plain_norms=record.unweighted_norms,
            has_transposed_matrices=record.transposed,
            with_bias=modules_with_bias(config),
            has=partial(has_tensor, config),
            num_experts=first_of(config, "num_experts num_local_experts n_routed_experts moe_num_experts", None),
        )


def kept_in_float32(config: Any) -> tuple[str, ...]:
    """Returns parts of the names of parameters that are float32 whatever the dtype of the model."""
    return type_of(config.get_text_config(decoder=True)).in_float32
