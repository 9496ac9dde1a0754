"""A view of a model whose `generate` takes the state of the prompt from somewhere else.

transformers asks the model for the first forward in `_prefill`, and the view is an object of a subclass that answers
there. The model itself is not changed: other threads, and other sessions, may use it meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from diskprefix.errors import InvalidRequest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

Answer: TypeAlias = "Callable[[Mapping[str, Any]], ModelOutput | None]"
"""Takes the arguments of the first forward. Returns its output, or None to have the model compute it."""


def with_prefill(model: PreTrainedModel, answer: Answer) -> Any:
    """Returns a view of `model` whose `generate` has its first forward answered by `answer`."""
    view = object.__new__(_view_class(type(model)))  # type: ignore[arg-type]
    # Not with `=`: a module would take both for attributes of its own.
    object.__setattr__(view, "__dict__", vars(model))
    object.__setattr__(view, "_answer_of_view", answer)
    return view


@cache
def _view_class(model_class: Any) -> Any:
    def prefill(
        self: Any, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any], **kwargs: Any
    ) -> Any:
        if generation_config.prefill_chunk_size is not None:
            raise InvalidRequest("generate: a session prefills in steps of its own; leave prefill_chunk_size out")
        inputs = self.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **model_kwargs)
        output = self._answer_of_view(inputs)
        if output is not None:
            return output
        return model_class._prefill(self, input_ids, generation_config, model_kwargs, **kwargs)

    # The slot keeps the answer out of the attributes that the view shares with the model.
    members = {"__slots__": ("_answer_of_view",), "__module__": model_class.__module__, "_prefill": prefill}
    return type(model_class.__name__, (model_class,), members)
