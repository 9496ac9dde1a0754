"""The prompt and the model that a user of the library gives to a session.

A view of the model is an object of a subclass whose `_prefill`, transformers' first forward, returns a given output.
The model itself is not changed. It is identified by its tensors, because users may change it after loading.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from diskprefix.errors import InvalidRequest, ModelError
from diskprefix.printable import first_line
from diskprefix.tokens import TokenIds, as_token_ids, checksum

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

Ids: TypeAlias = "torch.Tensor | npt.NDArray[Any] | Sequence[int] | Mapping[str, Any] | str"
"""A prompt: token ids as a list or a tensor of shape [n] or [1, n], the result of a tokenizer, or text."""


def unpacked(input_ids: Ids, tokenizer: Any) -> tuple[TokenIds, dict[str, Any]]:
    """Returns the token ids, and the other results of a tokenizer. Text needs a `tokenizer`. Raises `InvalidRequest`
    unless there is one prompt of at least one token."""
    if isinstance(input_ids, str):
        if tokenizer is None:
            raise InvalidRequest.at("input_ids", "text needs a session with a tokenizer")
        return _one_prompt(tokenizer(input_ids)["input_ids"]), {}
    if isinstance(input_ids, Mapping):
        others = {name: value for name, value in input_ids.items() if name != "input_ids"}
        return _one_prompt(input_ids["input_ids"]), others
    return _one_prompt(input_ids), {}


def _one_prompt(value: Any) -> TokenIds:
    """Returns the token ids. Raises `InvalidRequest` unless `value` is one non-empty list of them."""
    ids = in_main_memory(value)
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        got = f"{ids.dtype} of shape {list(ids.shape)}"
        raise InvalidRequest.at("input_ids", f"one prompt of at least one token id is needed, not {got}")
    if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        raise InvalidRequest.at("input_ids", "some ids are negative or too large for any vocabulary")
    return as_token_ids(ids)


def in_main_memory(value: Any) -> npt.NDArray[Any]:
    """Returns an array, or a tensor on any device, as a numpy array. Raises `InvalidRequest` for ragged lists."""
    try:
        return np.asarray(value.cpu() if isinstance(value, torch.Tensor) else value)
    except ValueError as error:
        raise InvalidRequest.at("input_ids", "prompts of several lengths; a session takes one") from error


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


_PIECE_BYTES = 64 << 20
"""Bytes that are read at a time. Weights on a GPU are copied to main memory for this."""


def memory_digest(model: PreTrainedModel) -> str:
    """Returns the identity of the content of all parameters and buffers, on any device: 32 hex digits. Raises
    `ModelError` for weights that are not in memory (offloaded ones) or cannot be read as bytes."""
    digest = hashlib.sha256()
    try:
        for name, tensor in _distinct(model):
            digest.update(f"{len(name)}:{name}:{tensor.dtype}:{tuple(tensor.shape)}:".encode())
            flat = tensor.reshape(-1).view(torch.uint8)
            for start in range(0, len(flat), _PIECE_BYTES):
                piece = flat[start : start + _PIECE_BYTES].cpu().numpy()
                digest.update(checksum(piece.data).to_bytes(8, "little"))
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        name = type(model).__name__
        raise ModelError(f"the weights of {name} cannot be read as they are: {first_line(error)}") from error
    return digest.hexdigest()[:32]


def stamp(model: PreTrainedModel) -> tuple[object, ...]:
    """Returns a value that changes when a tensor of the model is replaced or written to. Does not read the weights:
    torch counts the writes to a tensor, except through `tensor.data`."""
    tensors = [*model.parameters(), *model.buffers()]
    return tuple((t.data_ptr(), t.dtype, t.device, 0 if t.is_inference() else t._version) for t in tensors)


def _distinct(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors that the model computes with: its state dict, to which quantised layers add their scales, and
    the buffers that are not in it. Tied weights come once."""
    named = dict(model.named_buffers()) | model.state_dict()
    seen: set[tuple[object, ...]] = set()
    for name, value in sorted(named.items()):
        if not isinstance(value, torch.Tensor):
            raise ModelError(f"the weights of {type(model).__name__} cannot be read as they are: {name} is no tensor")
        tensor = value.detach()
        place = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        # Empty tensors, and those that are not in memory, have no address.
        if tensor.data_ptr() and place in seen:
            continue
        seen.add(place)
        yield name, tensor
