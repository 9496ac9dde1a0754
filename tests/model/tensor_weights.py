"""The weights of a model of transformers, as a plan takes them, also in the quants of a type of files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from diskprefix.errors import ModelError
from diskprefix.model.families.slot_names import SlotNames
from diskprefix.model.load.loader import LoadedModel
from diskprefix.model.quants.file_matrix import in_order
from diskprefix.model.quants.forms import compiled
from diskprefix.model.quants.forms import weights_of as numbers_of
from diskprefix.model.quants.quant_form import FILE_FORMS
from diskprefix.model.slots import HEAD
from diskprefix.model.weights import ExpertsForm, Quants, Weights
from diskprefix.native.matrix import fills_blocks
from diskprefix.native.packing import pack
from tests.arrays import array_of, tensor_of

QUANTS = "quants"
"""The attribute of a model whose matrices shall have the quants of a type of files."""
WEIGHTS = "weights_of_plan"
"""The attribute of a model that was loaded, with the weights that its plan has."""


class TensorWeights(Weights):
    """Weights that are in memory. With a `kind`, each matrix that is asked for has such quants. `turned`: the beginning
    of names of matrices whose rows and columns are exchanged."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, kind: str = "", turned: str | None = None
    ) -> None:
        has_draft_layer = any(name.startswith("draft_layer.") for name in tensors)
        super().__init__(str(dtype).removeprefix("torch."), has_draft_layer=has_draft_layer)
        self._found, self._kind, self._turned = tensors, kind, turned
        self.made: dict[str, Quants] = {}
        """The quants of modules, `experts.gate` for a part of experts."""

    def has(self, name: str) -> bool:
        return name in self._found

    def _read(self, name: str) -> np.ndarray:
        if name not in self._found:
            raise ModelError(f"the weights lack {name}")
        return array_of(self._found[name])

    def quants(self, name: str) -> Quants | None:
        own = name.removesuffix(".weight")
        # No plan takes quants of positions.
        if self._kind and own not in self.made and not own.endswith(("wpe", "embed_positions")):
            weight = self._found[name]
            if self._turned is not None and name.startswith(self._turned):
                weight = weight.T
            if fills_blocks(array_of(weight)):
                self.made[own] = quantised(weight[None], self._kind, is_one=True)
        return self.made.get(own)

    def expert_quants(self, name: str, form: ExpertsForm) -> Mapping[str, Quants]:
        if not self._kind:
            return {}
        rows = {part: self._found[f"{name}.{part}"] for part in (form.first, "down_proj")}
        halves = {
            half: weight
            for part, of_part in rows.items()
            for half, weight in form.halves(part, array_of(of_part.mT if form.is_turned else of_part)).items()
        }
        if not all(fills_blocks(half[0]) for half in halves.values()):
            return {}
        for half, weight in halves.items():
            if f"{name}.{half}" not in self.made:
                self.made[f"{name}.{half}"] = quantised(tensor_of(weight), self._kind)
        return {half: self.made[f"{name}.{half}"] for half in halves}

    def finish(self) -> None:
        """All weights are in memory."""

    def named(self) -> Iterator[tuple[str, np.ndarray]]:
        yield from super().named()
        yield from ((name, one.packed) for name, one in self.made.items())


def quantised(weights: torch.Tensor, kind: str, *, is_one: bool = False) -> Quants:
    """Matrices [experts, rows, columns] in a type of files, or the only one."""
    form, found = FILE_FORMS[kind], list[np.ndarray]()
    for weight in weights:
        content = gguf.quantize(weight.detach().float().numpy(), gguf.GGMLQuantizationType[kind])
        found.append(np.empty(form.packed_shape(*weight.shape), np.uint8))
        pack(compiled(), kind, content, None, found[-1])
    return Quants(found[0] if is_one else np.stack(found), form)


def require_numbers(quants: Mapping[str, Quants], tensor: Callable[[str], np.ndarray], form: ExpertsForm) -> None:
    """Requires that quants have the numbers of the parameters that `tensor` returns by their names."""
    for name, one in quants.items():
        owner, _, part = name.rpartition(".")
        if owner.endswith("experts") and part in ("gate", "up", "down"):
            parameter = "down_proj" if part == "down" else form.first
            expected = form.halves(parameter, tensor(f"{owner}.{parameter}"))[part]
            found = np.stack([numbers_of(packed, one.form) for packed in one.packed])
        else:
            expected, found = tensor(f"{name}.weight"), in_order(numbers_of(one.packed, one.form), one.columns)
        assert torch.equal(tensor_of(found), tensor_of(expected)), name


def decoder_of(model: PreTrainedModel) -> Any:
    """The module whose layers decode text."""
    found: Any = model.get_decoder()
    return getattr(found, "model", found)


def weights_of(model: PreTrainedModel) -> Weights:
    """The weights of a model, which stay where they are; in quants if it has the attribute `QUANTS`."""
    loaded: Weights | None = getattr(model, WEIGHTS, None)
    return tensors_of(model) if loaded is None else loaded


def tensors_of(model: PreTrainedModel) -> TensorWeights:
    """The weights of a model of modules."""
    tensors, head = dict(decoder_of(model).state_dict()), model.get_output_embeddings()
    is_tied = head.weight is model.get_input_embeddings().weight
    own = {name: tensor for name, tensor in head.state_dict().items() if not (is_tied and name == "weight")}
    tensors |= {f"{HEAD}.{name}": tensor for name, tensor in own.items()}
    names = SlotNames.of(model.config.get_text_config(decoder=True))
    return TensorWeights(tensors, model.dtype, getattr(model, QUANTS, ""), "h." if names.has_turned_matrices else None)


def modules_of(loaded: LoadedModel) -> PreTrainedModel:
    """A loaded model as modules, with the weights of its plan."""
    model = loaded.read_modules() if loaded.model is None else loaded.model
    setattr(model, WEIGHTS, loaded.weights)
    return model
