"""transformers' cache of one sequence: filled from pages, and read when a step has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from diskprefix.prefixstore.kv.numbers import Array, array_dtype
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.prefixstore.kv.step import Run

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class GridCache(DynamicCache):  # type: ignore[misc]
    """The state of a sequence side by side, on the model's device. Notes the rows that a step adds."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.num_tokens = 0
        """The number of tokens, which some layers do not count."""
        self._added: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Adds rows to a layer, [1, heads, n, head_dim]. Returns all rows that the new tokens may attend to."""
        self._added[layer_idx] = keys, values
        return super().update(keys, values, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of tokens that a layer has."""
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        return layer.get_seq_length() if isinstance(layer, CacheLayerMixin) else self.num_tokens

    def save(self, sequence: KVSequence, run: Run) -> None:
        """Writes the rows and states that a step computed to the pages of a sequence. States stay in this cache as
        contiguous tensors, as after `filled`: from strided tensors a kernel may compute other last bits."""
        added, self._added, self.num_tokens = self._added, {}, run.end
        for table in sequence.tables:
            rows = torch.stack([_rows(added, spec.layer, spec.part)[0] for spec in table.group.specs])
            if rows.shape[2] != run.num_rows:
                raise RuntimeError(f"the model adds {rows.shape[2]} of {run.num_rows} tokens to its cache")
            table.write_rows(run.start, rows.cpu().view(torch.uint8).numpy().view(array_dtype(table.group.dtype)))
        for page, group in zip(sequence.states, sequence.layout.states, strict=True):
            states = torch.stack([self._state(spec.layer, spec.part, spec.index) for spec in group.specs])
            _tensor(page.tensor, group.dtype).copy_(states)

    def _state(self, layer_idx: int, part: str, index: int) -> torch.Tensor:
        layer: Any = self.layers[layer_idx]
        states = layer.conv_states if part == "conv" else layer.recurrent_states
        if states[index] is None:
            raise RuntimeError(f"the model leaves a state of layer {layer_idx} empty")
        if not states[index].is_contiguous():
            states[index] = states[index].contiguous()
        state: torch.Tensor = states[index]
        return state


def _rows(added: dict[int, tuple[torch.Tensor, torch.Tensor]], layer_idx: int, part: str) -> torch.Tensor:
    if layer_idx not in added:
        raise RuntimeError(f"the model adds nothing to layer {layer_idx} of its cache")
    keys, values = added[layer_idx]
    return torch.cat([keys, values], dim=-1) if part == "latent" else keys if part == "keys" else values


def _tensor(numbers: Array, dtype: str) -> torch.Tensor:
    """Returns the memory of an array as a tensor."""
    return torch.from_numpy(numbers).view(getattr(torch, dtype))


def filled(cache: DynamicCache, sequence: KVSequence, device: torch.device) -> DynamicCache:
    """Copies all of a sequence's state to an empty cache of its model on a device. Returns the cache."""
    num_tokens, layers = sequence.num_tokens, sequence.layout.layers
    if not num_tokens:
        return cache
    # States come before rows, as in a forward: in a layer with both, the first update decides how it is initialised.
    for page, group in zip(sequence.states, sequence.layout.states, strict=True):
        for of_state, state in zip(group.specs, _tensor(page.tensor, group.dtype).to(device), strict=True):
            update = cache.update_conv_state if of_state.part == "conv" else cache.update_recurrent_state
            update(state, of_state.layer, of_state.index)
    rows: dict[int, dict[str, torch.Tensor]] = {}
    for table in sequence.tables:
        # A layer with a window keeps a view of its arguments, so it does not get all tokens.
        content = table.gathered(table.group.first_needed(num_tokens), num_tokens)
        for spec, part in zip(table.group.specs, _tensor(content, table.group.dtype).to(device), strict=True):
            rows.setdefault(spec.layer, {})[spec.part] = part[None]
    for number, parts in rows.items():
        if (latent := parts.get("latent")) is not None:
            dim = layers[number].latent_dim
            parts = {"keys": latent[..., :dim], "values": latent[..., dim:]}
        cache.update(parts["keys"], parts["values"], number)
        if layers[number].window is not None:
            cache.layers[number].cumulative_length = num_tokens
    if isinstance(cache, GridCache):
        cache.num_tokens, cache._added = num_tokens, {}
    return cache
