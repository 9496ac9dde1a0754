"""The parameters of a model one by one, as transformers names, merges and transforms them when it loads a checkpoint.
No more than one of them is in memory twice."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import transformers.core_model_loading as loading

from diskprefix.errors import DiskPrefixError, ModelError
from diskprefix.kv.layout import is_out_of_memory
from diskprefix.model.load.imports import without_tracer
from diskprefix.model.load.memory import LargePages
from diskprefix.printable import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Source: TypeAlias = Callable[[], torch.Tensor]
"""Reads a tensor of a checkpoint, perhaps later."""
_SEQUENTIAL = "HF_DEACTIVATE_ASYNC_LOAD"
"""Without this variable, threads of transformers read all tensors ahead."""


class _TensorOnRequest:
    """A tensor that transformers reads when its turn comes."""

    def __init__(self, read: Callable[[], torch.Tensor]) -> None:
        self._read = read

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self._read()

    def is_floating_point(self) -> bool:
        return True


@contextmanager
def _taking_parameters(take: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Gives a context in which transformers reads tensors in its own thread, and hands each parameter that it has made
    of them to `take`. The model gets what `take` returns.

    Of errors while parameters are made, transformers raises only that there were some. Here the last one is raised."""
    set_param, is_sequential = loading.set_param_for_module, os.environ.get(_SEQUENTIAL)
    log_errors, failures = loading.log_conversion_errors, list[Exception]()

    def set_taken(model: PreTrainedModel, name: str, tensor: torch.Tensor, *args: Any) -> None:
        set_param(model, name, take(tensor), *args)

    @contextmanager
    def noting(name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        with log_errors(name, *args, **kwargs):
            try:
                yield
            except Exception as error:
                is_told = isinstance(error, DiskPrefixError | OSError) or is_out_of_memory(error)
                failures[:] = [error if is_told else RuntimeError(f"{name}: {first_line(error)}")]
                raise

    loading.set_param_for_module = set_taken
    loading.log_conversion_errors = noting
    os.environ[_SEQUENTIAL] = "1"
    try:
        yield
    except RuntimeError as error:
        if not failures:
            raise
        raise failures[0] from error
    finally:
        loading.set_param_for_module, loading.log_conversion_errors = set_param, log_errors
        os.environ.pop(_SEQUENTIAL)
        if is_sequential is not None:
            os.environ[_SEQUENTIAL] = is_sequential


def load_parameters(
    kind: type[PreTrainedModel],
    config: PreTrainedConfig,
    sources: Mapping[str, Source],
    weights: str,
    dtype: torch.dtype,
    device: torch.device,
) -> PreTrainedModel:
    """Returns the model of a class, made of `sources` by their names in the checkpoint: each is read when its turn
    comes, and on a CPU each parameter goes to large pages as soon as it is made.

    Raises `ModelError` if `weights` lack tensors of the model, or have some of other shapes, and what a source
    raises."""
    is_on_cpu = device.type == "cpu"
    with without_tracer(), _taking_parameters(LargePages().put if is_on_cpu else lambda tensor: tensor):
        model, info = kind.from_pretrained(
            None,
            config=config,
            state_dict={name: _TensorOnRequest(read) for name, read in sources.items()},
            dtype=dtype,
            device_map=None if is_on_cpu else {"": device},
            local_files_only=True,
            output_loading_info=True,
            # Without this, a mismatch is only logged. It is refused below.
            ignore_mismatched_sizes=True,
        )
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"{weights} lack {len(missing)} tensors of the model, for example {missing[0]}")
    if mismatched := sorted(info["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise ModelError(f"{weights} do not match its config.json: {name} is {tuple(found)}, not {tuple(expected)}")
    return model
