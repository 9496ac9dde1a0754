"""A model that transformers has put together of tensors that are not read yet, and the reading of them into place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import modeling_utils

from diskprefix.model.load.beside import Task, WorkBeside
from diskprefix.model.load.memory import LINE_BYTES, large_pages, one_thread
from diskprefix.model.load.stored_tensors import StoredTensor, UnreadTensor
from diskprefix.model.quants.parameter_stream import taking_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_COMPARED_BYTES = 1 << 25


@dataclass(eq=False)
class UnreadWeights:
    """The weights of a model that are not read yet, by their names. Until then they have no memory."""

    tensors: dict[str, UnreadTensor] = field(default_factory=dict)

    def begin(
        self, model: PreTrainedModel, work: WorkBeside, memory_of: Callable[[int], torch.Tensor] = large_pages
    ) -> None:
        """Begins to read them side by side into memory of so many bytes, and moves the other weights there. Each begins
        with a line of the caches. The model is complete when the `work` is. Raises `MemoryError`."""
        named: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        named |= model.named_buffers(remove_duplicate=False)
        unread = {id(named[name]): tensor for name, tensor in self.tensors.items() if name in named}
        moved = {id(one): one for one in named.values()}
        memory, used, tasks = memory_of(sum(map(_room, moved.values()))), 0, list[Task]()
        # One thread is enough for the memory bus. Waiting for more, at each of hundreds of tensors, cost up to 1.6 s.
        with one_thread():
            for key, tensor in moved.items():
                place = memory[used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                used += _room(tensor)
                if key in unread:
                    tasks += unread[key].reading(place)
                    tensor.data = place
                elif tensor.is_contiguous():
                    tensor.data = place.copy_(tensor.data)
                else:
                    tensor.data = tensor.data.clone()
        work.begin(tasks)

    @contextmanager
    def leaving(self, stored: Mapping[str, StoredTensor]) -> Iterator[None]:
        """Gives a context in which transformers loads a model without reading these `stored` tensors."""
        convert: Callable[..., Any] = modeling_utils.convert_and_load_state_dict_in_model

        def converted(model: PreTrainedModel, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            found = convert(model, {name: stored[name].unread() for name in state_dict}, *args, **kwargs)
            self._note_untied(model)
            return found

        modeling_utils.convert_and_load_state_dict_in_model = converted
        try:
            with taking_parameters(self._take):
                yield
        finally:
            modeling_utils.convert_and_load_state_dict_in_model = convert

    def _take(self, _: PreTrainedModel, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Takes a parameter from transformers. Returns what the model gets instead."""
        if not isinstance(tensor, UnreadTensor):
            return tensor
        self.tensors[name] = tensor
        return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)

    def _note_untied(self, model: PreTrainedModel) -> None:
        """Makes parameters differ that would be tied if they were equal, and are not."""
        for target, source in model.all_tied_weights_keys.items():
            one, other = self.tensors.get(target), self.tensors.get(source)
            if one is not None and other is not None and not _are_equal(one, other):
                model.get_parameter(target).data.fill_(1)


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // LINE_BYTES) * LINE_BYTES


def _are_equal(one: UnreadTensor, other: UnreadTensor) -> bool:
    if one.shape != other.shape:
        return False
    rows = max(1, _COMPARED_BYTES * len(one) // max(1, one.nbytes))
    pieces = zip(torch.split(one, rows), torch.split(other, rows), strict=True)
    return all(torch.equal(left, right) for left, right in pieces)
