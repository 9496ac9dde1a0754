"""The state of sequences that are not cached: transformers' own, as `generate` uses it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import DynamicCache

from diskprefix.runtime.contract import UncachedState
from diskprefix.runtime.grid.cache_argument import cache_argument, renamed, takes_state

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformersState(UncachedState):
    """The state of a sequence in place of a `KVSequence`, for unsupported models. Calls the two hooks of a model class
    for `generate`, so replies equal `generate`'s."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._ids: torch.Tensor | None = None
        self._inputs: dict[str, Any] = {"use_cache": True}
        self._function = type(model).forward
        if "logits_to_keep" in inspect.signature(self._function).parameters:
            self._inputs["logits_to_keep"] = 1
        argument = cache_argument(self._function)
        if argument is not None and model._supports_default_dynamic_cache():
            self._inputs[argument] = DynamicCache(config=model.config.get_text_config(decoder=True))

    def forward(self, tokens: npt.NDArray[np.int64]) -> torch.Tensor:
        """Runs more tokens. Returns the next-token logits, shape [vocab], in the model's dtype.

        Raises `RuntimeError` if the forward takes no state of the tokens before."""
        token_ids = torch.from_numpy(tokens)[None].to(self._model.device)
        is_first = self._ids is None
        self._ids = token_ids if self._ids is None else torch.cat([self._ids, token_ids], dim=-1)
        prepare = self._model.prepare_inputs_for_generation
        inputs = prepare(
            self._ids,
            next_sequence_length=None if is_first else token_ids.shape[1],
            is_first_iteration=is_first,
            **renamed(self._inputs, prepare),
        )
        inputs = renamed(inputs, self._function)
        given = inputs.get("input_ids")
        if given is not None and given.shape[1] < self._ids.shape[1] and not takes_state(inputs, self._function):
            raise RuntimeError(f"{type(self._model).__name__} takes no cache")
        output = self._model(**inputs, return_dict=True)
        self._inputs = self._model._update_model_kwargs_for_generation(output, self._inputs)
        logits: torch.Tensor = output.logits[0, -1]
        return logits
