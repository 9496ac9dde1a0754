"""The state of a model that is not cached: transformers' own, driven as transformers' own `generate` drives it."""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformersState:
    """Stands where a `KVArena` stands in the engine, for models whose state we cannot cut into blocks.

    The names under which models take and give back their state differ (`past_key_values`, `cache_params`, `state`,
    none at all), and some recompute where others continue. Each model class tells `generate` how to go on through two
    hooks; the same hooks are called here, so a reply is what `generate` would have given.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._ids: torch.Tensor | None = None
        self._carried: dict[str, Any] = {}
        self._marked: tuple[torch.Tensor | None, dict[str, Any]] | None = None
        self.truncate(0)

    def truncate(self, num_tokens: int) -> None:
        """Start again; other lengths cannot be had from state that is not ours."""
        assert num_tokens == 0
        self._ids, self._marked = None, None
        self._carried = {"use_cache": True}
        accepted = inspect.signature(type(self._model).forward).parameters
        if "logits_to_keep" in accepted:
            self._carried["logits_to_keep"] = 1
        if "past_key_values" in accepted and self._model._supports_default_dynamic_cache():
            self._carried["past_key_values"] = DynamicCache(config=self._model.config.get_text_config(decoder=True))

    def reserve(self, num_tokens: int) -> None:
        """Nothing to prepare: this state grows by itself."""

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Run [1, n] more tokens and answer the next-token logits, shape [vocab], in the model's dtype."""
        is_first = self._ids is None
        self._ids = token_ids if self._ids is None else torch.cat([self._ids, token_ids], dim=-1)
        inputs = self._model.prepare_inputs_for_generation(
            self._ids,
            next_sequence_length=None if is_first else token_ids.shape[1],
            is_first_iteration=is_first,
            **self._carried,
        )
        output = self._model(**inputs, return_dict=True)
        self._carried = self._model._update_model_kwargs_for_generation(output, self._carried)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def mark(self) -> None:
        """Remember this point for `rewind`. The copy is deep: recurrent state is updated in place."""
        self._marked = self._ids, copy.deepcopy(self._carried)

    def rewind(self) -> None:
        assert self._marked is not None
        self._ids, carried = self._marked
        self._carried = copy.deepcopy(carried)
