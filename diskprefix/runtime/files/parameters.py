"""Models of transformers' modules, from tensors that are read one by one. transformers names, merges and casts them as
in any checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from transformers.modeling_utils import str_to_torch_dtype

from diskprefix.errors import ModelError
from diskprefix.runtime.files.checkpoint import StoredTensor
from diskprefix.runtime.files.gguf.architecture import Architecture, SourcedParameter
from diskprefix.runtime.files.gguf.gguf_header import FileTensor
from diskprefix.runtime.files.gguf.gguf_weights import GgufWeights
from diskprefix.runtime.plan.families.slot_names import SlotNames

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Source: TypeAlias = Callable[[], torch.Tensor]
"""Reads a tensor of a checkpoint, perhaps later."""


def stored(tensor: StoredTensor) -> torch.Tensor:
    """Reads a tensor of a folder. Raises `ModelError` if its type is not known, or if its file is cut short."""
    if tensor.kind not in str_to_torch_dtype:
        raise ModelError(f"{tensor.file.name}: {tensor.name} is of the type {tensor.kind}, which is not known")
    content = torch.empty(tensor.shape, dtype=str_to_torch_dtype[tensor.kind])
    tensor.read_into(content.view(-1).view(torch.uint8).numpy())
    return content


def parameters_of(
    model: PreTrainedModel, architecture: Architecture, tensors: Sequence[FileTensor], dtype: str
) -> dict[str, Source]:
    """Returns a function for each parameter of `model`, which has no weights. It makes the parameter, and raises
    `ModelError` for a wrong shape and a truncated file, `OSError`. Raises `ModelError` if the file lacks tensors, or
    has others."""
    weights, tied = GgufWeights(architecture, model.config, tensors, dtype), model.all_tied_weights_keys
    parameters = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    is_transposed = SlotNames.of(model.config.get_text_config(decoder=True)).experts.is_transposed
    return {
        name: partial(_module_parameter, weights, name, part, parameters[name], is_transposed and ".experts." in name)
        for name, part in architecture.parts_of(parameters, {tensor.name: tensor for tensor in tensors}).items()
    }


def _module_parameter(
    weights: GgufWeights, name: str, part: SourcedParameter, parameter: torch.Tensor, is_transposed: bool
) -> torch.Tensor:
    array = weights.parameter(name, part)
    made = torch.from_numpy(array)
    made = made.view(torch.bfloat16) if array.dtype == np.uint16 else made
    if is_transposed and made.ndim == 3:
        made = made.mT
    if parameter.ndim == 1 and made.numel() == len(parameter):
        return made.flatten()
    sizes, expected = ([size for size in shape if size > 1] for shape in (made.shape, parameter.shape))
    if sizes != expected:
        raise ModelError(
            f"the model takes {tuple(parameter.shape)} where the file has {tuple(made.shape)}: {part.names}"
        )
    return made.reshape(parameter.shape)


class _TensorOnRequest:
    """A tensor that transformers reads on demand, on its own threads. Errors are added to `failures`."""

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
    """Returns the model of a class, made of `sources` by their names in the checkpoint. They are read one by one.

    Raises `ModelError` if `weights` lack tensors of the model or have other shapes, and the errors of sources."""
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
        name, shape, expected = mismatched[0]
        raise ModelError(f"{weights} do not match its config.json: {name} is {tuple(shape)}, not {tuple(expected)}")
    set_step_limits(model)
    return model


def set_step_limits(model: PreTrainedModel) -> None:
    """Sets the limits of the steps of state spaces that the configuration says, or none.

    transformers' modules of Nemotron-H and Zamba2 take `time_step_min` for the least step. It is about the biases that
    training begins with; with it, heads that should keep their state forget it."""
    limits = getattr(model.config.get_text_config(decoder=True), "time_step_limit", None) or (0.0, float("inf"))
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(limits)
