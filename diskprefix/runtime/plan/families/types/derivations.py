"""Functions for records that derive options from others, as the classes of transformers do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diskprefix.errors import ModelError
from diskprefix.runtime.plan.families.types.model_type import Derive, MakeList, Options

FULL, SLIDING, LINEAR, CHUNKED = "full_attention", "sliding_attention", "linear_attention", "chunked_attention"
INDEXED = "indexed_attention"


def layers_of(own: Options) -> range:
    """Returns the indices of the layers."""
    return range(own["num_hidden_layers"])


def every(step: int | tuple[str, int], other: str = SLIDING) -> MakeList:
    """Returns a function that gives every `step`th layer full attention, and the others the kind `other`. `step` is a
    number, or the name of an option and its default."""

    def kinds(own: Options, extra: Options) -> list[str]:
        size = step
        if not isinstance(size, int):
            name, default = size
            size = own[name] if name in own else extra.get(name, default)
        return [FULL if (i + 1) % size == 0 else other for i in layers_of(own)]

    return kinds


def first_of_each(step: int) -> MakeList:
    """Returns a function that gives the first of every `step` layers full attention, and the others a window."""
    return lambda own, _: [SLIDING if i % step else FULL for i in layers_of(own)]


def all_of(kind: str) -> MakeList:
    """Returns a function that gives all layers the same kind."""
    return lambda own, _: [kind for _ in layers_of(own)]


def windows_from_max(own: Options, _: Options) -> list[str]:
    """Returns kinds of layers: if there is a window, the layers from `max_window_layers` on have it."""
    first = own["num_hidden_layers"] if own["sliding_window"] is None else own["max_window_layers"]
    return [SLIDING if i >= first else FULL for i in layers_of(own)]


def sparse_from(name: str, default: int) -> MakeList:
    """Returns a function that makes the feed-forward parts mixtures from layer `name` (an option) or `default` on."""

    def kinds(own: Options, extra: Options) -> list[str]:
        first = own[name] if name in own else extra.get(name, default)
        return ["dense" if i < first else "sparse" for i in layers_of(own)]

    return kinds


def unless_set(name: str, make: Callable[[Options], Any]) -> Derive:
    """Returns a function that sets an option if it is None."""

    def derive(own: Options, _: Options) -> None:
        if own[name] is None:
            own[name] = make(own)

    return derive


def heads_of_width(own: Options, _: Options) -> None:
    """Sets `head_dim` to the width divided by the number of heads, whatever the configuration says."""
    own["head_dim"] = own["hidden_size"] // own["num_attention_heads"]


def heads_of_rotary(own: Options, _: Options) -> None:
    """Sets `head_dim` of latent attention to the size of the rotary part of a head."""
    own["head_dim"] = own["qk_rope_head_dim"]


def rotary_layers(own: Options) -> list[int]:
    """Returns 1 for each layer with a rotary embedding: all except every `no_rope_layer_interval`th, which gets 0."""
    return [int((i + 1) % own["no_rope_layer_interval"] != 0) for i in layers_of(own)]


def state_space(own: Options, extra: Options) -> None:
    """Derives the sizes and layers of models with Mamba 2 and attention."""
    width = own.get("mamba_d_ssm")
    if own["mamba_d_head"] == "auto":
        width = own["mamba_expand"] * own["hidden_size"] if width is None else width
        own["mamba_d_head"] = width // own["mamba_n_heads"]
    for name, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
        if own.get(name, ()) is None:
            own[name] = [1.0] * count
    if "layers_block_type" in extra:
        raise ModelError("the kinds of layers of this type follow from other options")
    if "attn_layer_indices" in own:
        full = own["attn_layer_indices"] or ()
        own["layers_block_type"] = [FULL if i in full else LINEAR for i in layers_of(own)]
    elif "layer_types" not in own:
        own["layers_block_type"] = all_of("hybrid")(own, {})


_WITH_LENGTHS = ("llama3", "yarn", "longrope")


def standardise_rotary(own: Options, parameters: Options, labels: Any) -> None:
    """Sets the kind of `rope_parameters`, and the original length of kinds that need it. `labels` are the kinds of
    layers that may have their own set."""
    nested, length = [parameters[name] for name in parameters if name in labels], "original_max_position_embeddings"
    for each in nested or ([parameters] if parameters else []):
        if each is None:
            continue
        each.setdefault("rope_type", each.get("type", "default"))
        each.setdefault("rope_theta", None)
        if each["rope_type"] in _WITH_LENGTHS:
            if length in own and not nested:
                # Phi 3 has it outside of the parameters.
                each[length] = own[length]
            else:
                each.setdefault(length, own["max_position_embeddings"])
