"""The layer of a checkpoint that predicts the token after the next one (MTP).

Embeddings, logits and positions are the model's; copies of them in the checkpoint are not loaded. Of several layers
the first is used, and none where no model is exact at every token. A checkpoint that counts such a layer and has no
tensor of it is served without; one that lacks some is refused.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from typing import Any

from diskprefix.runtime.plan.families.types.known_types import TYPES, type_of

_FURTHER = re.compile(r"(?:model\.)?(?:(mtp)\.(?:layers\.(\d{1,9})\.)?|layers\.(\d{1,9})\.)(.+)")
"""The pattern of names in layers of checkpoints, draft layers included: the layer, and the name within it."""
_OWN = {
    **{name: name for name in ("enorm", "hnorm", "eh_proj")},
    **dict.fromkeys(("norm", "shared_head.norm", "final_layernorm"), "post_norm"),
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "pre_mlp_layernorm": "mtp_block.post_attention_layernorm",
}
"""What is not called in the draft layer as in other layers of its model, without its ending."""
_COPIES = ("embed_tokens", "shared_head.head")
"""Tensors of a draft layer that the model has."""


def further_layers(names: Iterable[str], num_layers: int) -> dict[str, str | None]:
    """Returns the tensors of a checkpoint of the layers after the last of `num_layers`, which predict further tokens:
    by name the name of each in the draft layer, or None if the draft layer does not have it."""
    own_names = dict[str, str | None]()
    for name in names:
        match = _FURTHER.fullmatch(name)
        if match is None or (layer := int(match[2] or 0) if match[1] else int(match[3]) - num_layers) < 0:
            continue
        stem, _, end = match[4].rpartition(".")
        is_used = layer == 0 and stem not in _COPIES
        own_names[name] = (f"{_OWN[stem]}.{end}" if stem in _OWN else f"mtp_block.{match[4]}") if is_used else None
    return own_names


def has_known_draft_layer(kind: str | None) -> bool:
    """Returns whether the draft layer of models of a type is used, if they have one."""
    record = TYPES.get(kind or "")
    return record is not None and record.draft_layer is not None


def with_one_more(config: Any) -> Any:
    """Returns the configuration of a decoder whose last layer is the draft layer."""
    extended = copy.deepcopy(config)
    extended.num_hidden_layers += 1
    for name, its_own in (type_of(config).draft_layer or {}).items():
        setattr(extended, name, [*getattr(config, name)[: config.num_hidden_layers], its_own])
    return extended
