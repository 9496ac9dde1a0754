"""The loading of a model by transformers with each parameter in large pages as soon as it is made, so that no more than
one of them is in memory twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import modeling_utils

from diskprefix.model.load.memory import LINE_BYTES, large_pages
from diskprefix.model.load.stored_tensors import StoredTensor
from diskprefix.model.quants.parameter_stream import TensorOnRequest, taking_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PIECE_BYTES = 1 << 26
"""The memory that small parameters share."""


class _Places:
    """Large pages, which are filled from the first to the last."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy that begins with a line of the caches. Raises `MemoryError`."""
        room = -(-tensor.nbytes // LINE_BYTES) * LINE_BYTES
        if room > len(self._free):
            self._free = large_pages(max(room, _PIECE_BYTES))
        place, self._free = self._free[: tensor.nbytes], self._free[room:]
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


@contextmanager
def placing(stored: Mapping[str, StoredTensor]) -> Iterator[None]:
    """Gives a context in which transformers loads a model of these `stored` tensors, each read when its turn comes, and
    every parameter gets its place as soon as it is made."""
    convert: Callable[..., Any] = modeling_utils.convert_and_load_state_dict_in_model

    def converted(model: PreTrainedModel, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return convert(model, {name: TensorOnRequest(stored[name].read) for name in state_dict}, *args, **kwargs)

    modeling_utils.convert_and_load_state_dict_in_model = converted
    try:
        with placing_all():
            yield
    finally:
        modeling_utils.convert_and_load_state_dict_in_model = convert


@contextmanager
def placing_all(*, on_cpu: bool = True) -> Iterator[None]:
    """Gives a context in which every parameter gets its place as soon as transformers has made it: in large pages, or
    where it is."""
    places = _Places()

    def put(_: PreTrainedModel, _name: str, tensor: torch.Tensor) -> torch.Tensor:
        return places.put(tensor) if on_cpu else tensor

    with taking_parameters(put):
        yield
