"""The state of sequences that are not cached: transformers' own, as `generate` uses it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformersState:
    """The state of a sequence in place of a `KVSequence`, for unsupported models and for prompts with `media`.

    It calls the two hooks that each model class has for `generate`, so a reply is the one of `generate`.
    """

    def __init__(self, model: PreTrainedModel, media: Mapping[str, Any] | None = None) -> None:
        self._model = model
        self._media = {name: _placed(value, model) for name, value in (media or {}).items()}
        self._accepted = inspect.signature(type(model).forward).parameters
        self._ids: torch.Tensor | None = None
        self._carried: dict[str, Any] = {}
        self._shifted = [module for module in model.modules() if hasattr(module, "rope_deltas")]
        self._shifts: list[Any] = [None for _ in self._shifted]
        """The shifts of positions by the images of this prompt. The model keeps them in its modules."""
        self.truncate(0)

    def truncate(self, num_tokens: int) -> None:
        assert num_tokens == 0
        self._ids = None
        self._carried = {"use_cache": True}
        if "logits_to_keep" in self._accepted:
            self._carried["logits_to_keep"] = 1
        if "past_key_values" in self._accepted and self._model._supports_default_dynamic_cache():
            self._carried["past_key_values"] = DynamicCache(config=self._model.config.get_text_config(decoder=True))

    def forward(self, _model: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
        """Runs [1, n] more tokens. Returns the next-token logits, shape [vocab], in the model's dtype."""
        self._put_shifts(self._shifts)
        try:
            return self._forward(token_ids.to(self._model.device))
        finally:
            self._shifts = [module.rope_deltas for module in self._shifted]
            # They must not shift another prompt.
            self._put_shifts([None for _ in self._shifted])

    def _put_shifts(self, shifts: list[Any]) -> None:
        for module, shift in zip(self._shifted, shifts, strict=True):
            module.rope_deltas = shift

    def _forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        is_first = self._ids is None
        self._ids = token_ids if self._ids is None else torch.cat([self._ids, token_ids], dim=-1)
        if is_first and self._media:
            self._carry_media(self._ids)
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

    def _carry_media(self, token_ids: torch.Tensor) -> None:
        self._carried |= self._media
        if "position_ids" in self._accepted:
            self._carried["position_ids"] = self._model._prepare_position_ids_for_generation(token_ids, self._carried)
        mask = self._carried.get("attention_mask")
        if mask is not None and bool((mask == 1).all()):
            del self._carried["attention_mask"]

    def fork(self) -> TransformersState:
        """Returns a copy. It is deep, because recurrent state is updated in place."""
        forked = copy.copy(self)
        forked._carried, forked._shifts = copy.deepcopy(self._carried), list(self._shifts)
        return forked


def _placed(value: Any, model: PreTrainedModel) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(model.device, model.dtype if value.is_floating_point() else None)
