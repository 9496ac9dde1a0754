"""Models of transformers' modules, of tensors that are read when their turn comes. transformers names, merges and casts
them as those of any checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from transformers.modeling_utils import str_to_torch_dtype

from diskprefix.errors import ModelError
from diskprefix.model.load.checkpoint import StoredTensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Source: TypeAlias = Callable[[], torch.Tensor]
"""Reads a tensor of a checkpoint, perhaps later."""


def stored(tensor: StoredTensor) -> torch.Tensor:
    """Reads a tensor of a folder. Raises `ModelError` if its type is not known, or if its file is cut short."""
    if tensor.kind not in str_to_torch_dtype:
        raise ModelError(f"{tensor.file.name}: {tensor.name} is of the type {tensor.kind}, which is not known")
    found = torch.empty(tensor.shape, dtype=str_to_torch_dtype[tensor.kind])
    tensor.read_into(found.view(-1).view(torch.uint8).numpy())
    return found


def made(read: Callable[[], np.ndarray]) -> torch.Tensor:
    """Returns the numbers of an array that is read now."""
    array = read()
    found = torch.from_numpy(array)
    return found.view(torch.bfloat16) if array.dtype == np.uint16 else found


class _TensorOnRequest:
    """A tensor that transformers reads when its turn comes, on threads of its own. Errors go to `failures`."""

    def __init__(self, read: Source, failures: list[Exception]) -> None:
        self._read, self._failures = read, failures

    def __getitem__(self, _: Any) -> torch.Tensor:
        try:
            return self._read()
        except Exception as error:
            self._failures.append(error)
            raise

    def is_floating_point(self) -> bool:
        return True


def load_parameters(
    kind: type[PreTrainedModel],
    config: PreTrainedConfig,
    sources: Mapping[str, Source],
    weights: str,
    dtype: str,
    device: str,
) -> PreTrainedModel:
    """Returns the model of a class, made of `sources` by their names in the checkpoint: each is read when its turn
    comes.

    Raises `ModelError` if `weights` lack tensors of the model, or have some of other shapes, and what a source
    raises."""
    failures = list[Exception]()
    try:
        model, info = kind.from_pretrained(
            None,
            config=config,
            state_dict={name: _TensorOnRequest(read, failures) for name, read in sources.items()},
            dtype=getattr(torch, dtype),
            device_map=None if device == "cpu" else {"": device},
            local_files_only=True,
            output_loading_info=True,
            # Without this, a mismatch is only logged. It is refused below.
            ignore_mismatched_sizes=True,
        )
    except RuntimeError as error:
        # transformers raises only that there were some.
        raise (failures or [error])[0] from error
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"{weights} lack {len(missing)} tensors of the model, for example {missing[0]}")
    if mismatched := sorted(info["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise ModelError(f"{weights} do not match its config.json: {name} is {tuple(found)}, not {tuple(expected)}")
    return model
