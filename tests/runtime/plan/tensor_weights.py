"""The weights of a model of transformers, in the form that a plan takes, also quantised as in files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from diskprefix.errors import ModelError
from diskprefix.native.matrix import fills_blocks
from diskprefix.native.packing import pack
from diskprefix.runtime.files.file_matrix import in_order
from diskprefix.runtime.load.loader import LoadedModel
from diskprefix.runtime.plan.families.slot_names import SlotNames
from diskprefix.runtime.plan.part_options import ExpertsForm
from diskprefix.runtime.plan.quants.forms import compiled
from diskprefix.runtime.plan.quants.forms import weights_of as numbers_of
from diskprefix.runtime.plan.quants.quant_form import FILE_FORMS
from diskprefix.runtime.plan.slots import HEAD
from diskprefix.runtime.plan.weights import Quants, Weights
from tests.arrays import array_of, tensor_of

QUANTS = "quants"
"""The attribute of a model with the type of quants that its matrices get."""
WEIGHTS = "weights_of_plan"
"""The attribute of a loaded model with the weights of its plan."""


class TensorWeights(Weights):
    """Weights in memory. With a `kind`, matrices get quants of this type. `transposed` is the prefix of the names of
    matrices that are stored transposed."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, kind: str = "", transposed: str | None = None
    ) -> None:
        has_draft_layer = any(name.startswith("draft_layer.") for name in tensors)
        super().__init__(str(dtype).removeprefix("torch."), has_draft_layer=has_draft_layer)
        self._parameters, self._kind, self._transposed = tensors, kind, transposed
        self.made: dict[str, Quants] = {}
        """The quants of modules, `experts.gate` for a part of experts."""

    def has_parameter(self, name: str) -> bool:
        return name in self._parameters

    def _read_tensor(self, name: str) -> np.ndarray:
        if name not in self._parameters:
            raise ModelError(f"the weights lack {name}")
        return array_of(self._parameters[name])

    def quants(self, name: str) -> Quants | None:
        own = name.removesuffix(".weight")
        # No plan takes quants of positions.
        if self._kind and own not in self.made and not own.endswith(("wpe", "embed_positions")):
            weight = self._parameters[name]
            if self._transposed is not None and name.startswith(self._transposed):
                weight = weight.T
            if fills_blocks(array_of(weight)):
                self.made[own] = quantised(weight[None], self._kind, is_one=True)
        return self.made.get(own)

    def expert_quants(self, name: str, form: ExpertsForm) -> Mapping[str, Quants]:
        if not self._kind:
            return {}
        rows = {part: self._parameters[f"{name}.{part}"] for part in (form.first, "down_proj")}
        halves = {
            half: weight
            for part, of_part in rows.items()
            for half, weight in form.halves(part, array_of(of_part.mT if form.is_transposed else of_part)).items()
        }
        if not all(fills_blocks(half[0]) for half in halves.values()):
            return {}
        for half, weight in halves.items():
            if f"{name}.{half}" not in self.made:
                self.made[f"{name}.{half}"] = quantised(tensor_of(weight), self._kind)
        return {half: self.made[f"{name}.{half}"] for half in halves}

    def finish_reading(self) -> None:
        """All weights are in memory."""

    def named(self) -> Iterator[tuple[str, np.ndarray]]:
        yield from super().named()
        yield from ((name, quants.packed) for name, quants in self.made.items())


def quantised(weights: torch.Tensor, kind: str, *, is_one: bool = False) -> Quants:
    """Returns matrices [experts, rows, columns] in quants of a type, or with `is_one` the only matrix."""
    form, packed = FILE_FORMS[kind], list[np.ndarray]()
    for weight in weights:
        content = gguf.quantize(weight.detach().float().numpy(), gguf.GGMLQuantizationType[kind])
        packed.append(np.empty(form.packed_shape(*weight.shape), np.uint8))
        pack(compiled(), kind, content, None, packed[-1])
    return Quants(packed[0] if is_one else np.stack(packed), form)


def require_numbers(quants: Mapping[str, Quants], tensor: Callable[[str], np.ndarray], form: ExpertsForm) -> None:
    """Requires that quants have the numbers of the parameters that `tensor` returns by their names."""
    for name, matrix in quants.items():
        owner, _, part = name.rpartition(".")
        if owner.endswith("experts") and part in ("gate", "up", "down"):
            parameter = "down_proj" if part == "down" else form.first
            expected = form.halves(parameter, tensor(f"{owner}.{parameter}"))[part]
            numbers = np.stack([numbers_of(packed, matrix.form) for packed in matrix.packed])
        else:
            expected = tensor(f"{name}.weight")
            numbers = in_order(numbers_of(matrix.packed, matrix.form), matrix.columns)
        assert torch.equal(tensor_of(numbers), tensor_of(expected)), name


def decoder_of(model: PreTrainedModel) -> Any:
    """Returns the module whose layers decode text."""
    decoder: Any = model.get_decoder()
    return getattr(decoder, "model", decoder)


def weights_of(model: PreTrainedModel) -> Weights:
    """Returns the weights of a model, which stay where they are; quantised if it has the attribute `QUANTS`."""
    loaded: Weights | None = getattr(model, WEIGHTS, None)
    return tensors_of(model) if loaded is None else loaded


def tensors_of(model: PreTrainedModel) -> TensorWeights:
    """Returns the weights of a model of modules."""
    tensors, head = dict(decoder_of(model).state_dict()), model.get_output_embeddings()
    is_tied = head.weight is model.get_input_embeddings().weight
    own = {name: tensor for name, tensor in head.state_dict().items() if not (is_tied and name == "weight")}
    tensors |= {f"{HEAD}.{name}": tensor for name, tensor in own.items()}
    names = SlotNames.of(model.config.get_text_config(decoder=True))
    return TensorWeights(
        tensors, model.dtype, getattr(model, QUANTS, ""), "h." if names.has_transposed_matrices else None
    )


def modules_of(loaded: LoadedModel) -> PreTrainedModel:
    """Returns a loaded model as modules, with the weights of its plan."""
    model = loaded.read_modules() if loaded.model is None else loaded.model
    setattr(model, WEIGHTS, loaded.weights)
    return model
