"""Quantises a model parameter by parameter, into a folder. In memory are one parameter and what it is made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from diskprefix.errors import ModelError
from diskprefix.model.load.memory import one_thread
from diskprefix.model.quants.forms import quantised
from diskprefix.model.quants.parameter_stream import Source, load_parameters, name_of_loaded
from diskprefix.model.quants.quant_form import QuantForm
from diskprefix.model.quants.quantised import FILE, bits_for, metadata_of, quantisable, quantisable_experts
from diskprefix.model.quants.quantised_experts import quantised_experts
from diskprefix.model.quants.tensor_writer import TensorWriter
from diskprefix.native import ROWS
from diskprefix.native.matrix import fills_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_ENTRY_BYTES = 512
"""The greatest length of a tensor's entry in the header, with its form."""
_AT_ONCE = 1 << 20
"""Weights that a thread quantises at a time, so that the work does not take several times the memory of the matrix."""


class StreamedQuantising:
    """The quantising of a checkpoint to the form `weights`, into the folder `made`. `sources` has its tensors by their
    names there. `advance` takes the elements done."""

    def __init__(self, sources: Mapping[str, Source], weights: str, made: Path, advance: Callable[[int], None]) -> None:
        self._sources, self._weights, self._made, self._advance = sources, weights, made, advance
        self._num_threads = torch.get_num_threads()
        self._done = 0
        self._users: dict[str, list[str]] = {}
        """Names that share a parameter, by the name that it comes with."""
        self._linears: set[str] = set()
        self._mixtures: set[str] = set()
        self._held: dict[str, torch.Tensor] = {}
        """Parameters of the experts of a layer, until all are there."""
        self._written: set[str] = set()
        self._forms: dict[str, str] = {}
        self._writer: TensorWriter | None = None

    def run(self, model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
        """Quantises, and returns the model without its weights. Raises `ModelError` if the checkpoint lacks tensors, or
        nothing in it can be quantised, `OSError` if the disk is full."""
        try:
            with torch.no_grad(), one_thread():
                model = load_parameters(model_class, config, self._sources, self._take, "the weights")
                self._finish(model)
        finally:
            if self._writer is not None:
                self._writer.close()
        return model

    def _begin(self, model: PreTrainedModel) -> TensorWriter:
        tied, users = dict(model.all_tied_weights_keys), defaultdict(list)
        loaded = self._loaded_names(model)
        for name in model.state_dict():
            users[name_of_loaded(name, tied, loaded)].append(name)
        self._users = dict(users)
        self._linears = {f"{name}.weight" for name, _ in quantisable(model)}
        self._mixtures = {name for name, _ in quantisable_experts(model)}
        return TensorWriter(self._made / FILE, _ENTRY_BYTES * (len(model.state_dict()) + 1))

    def _loaded_names(self, model: PreTrainedModel) -> dict[str, None]:
        """Returns the names of the parameters that transformers makes of the checkpoint."""
        mapping, meta = get_model_conversion_mapping(model), model.state_dict()
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        prefix = model.base_model_prefix
        return dict.fromkeys(rename_source_key(name, renamings, converters, prefix, meta)[0] for name in self._sources)

    def _take(self, model: PreTrainedModel, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Writes a parameter, quantised where it can be. Returns a tensor of its shape on torch's meta device."""
        if self._writer is None:
            self._writer = self._begin(model)
        owner, _, part = name.rpartition(".")
        if owner in self._mixtures:
            self._hold(model, owner, part, tensor)
        else:
            self._write(model, name, tensor)
        self._written.update(self._users.get(name, [name]))
        self._done += tensor.numel()
        self._advance(self._done)
        return torch.empty_like(tensor, device="meta")

    def _write(self, model: PreTrainedModel, name: str, tensor: torch.Tensor) -> None:
        assert self._writer is not None
        plain = []
        for user in self._users.get(name, [name]):
            linear = user.removesuffix(".weight")
            if user not in self._linears or not fills_blocks(tensor):
                plain.append(user)
            else:
                packed, form = pack_in_pieces(tensor, bits_for(model, linear, self._weights), self._num_threads)
                self._writer.add(f"{linear}.packed", packed)
                self._forms[linear] = str(form)
        if plain:
            self._writer.add(plain[0], tensor)

    def _hold(self, model: PreTrainedModel, name: str, part: str, tensor: torch.Tensor) -> None:
        """Holds a parameter of the experts of a layer until all are there, then writes them quantised."""
        assert self._writer is not None
        self._held[part] = tensor
        experts = model.get_submodule(name)
        if len(self._held) < len(experts._parameters):
            return
        empty = dict(experts._parameters)
        experts._parameters.update({part: nn.Parameter(one, False) for part, one in self._held.items()})
        bits = bits_for(model, name, self._weights)
        made = quantised_experts(experts, partial(quantised, bits=bits))
        for one, packed in made.state_dict().items():
            self._writer.add(f"{name}.{one}", packed)
        self._forms |= {f"{name}.{one}": str(matrices.form) for one, matrices in made.parts().items()}
        experts._parameters.update(empty)
        self._held.clear()

    def _finish(self, model: PreTrainedModel) -> None:
        if not self._forms or self._writer is None:
            raise ModelError("--weights: the model has no matrix that can be quantised; add --weights native")
        for name, tensor in model.state_dict().items():
            # What the model has and no file.
            if name not in self._written and tensor.device.type != "meta":
                self._writer.add(name, tensor)
        self._writer.finish(metadata_of(self._forms))


def pack_in_pieces(weight: torch.Tensor, bits: int, num_threads: int) -> tuple[torch.Tensor, QuantForm]:
    """Returns a matrix of floating-point numbers quantised and packed, and its form."""

    def piece(part: torch.Tensor) -> tuple[torch.Tensor, QuantForm]:
        with torch.no_grad():
            quants = quantised(part, bits)
            return quants.packed(), quants.form

    parts = torch.split(weight, max(ROWS, _AT_ONCE // weight.shape[1] // ROWS * ROWS))
    with ThreadPoolExecutor(num_threads) as threads:
        pieces = list(threads.map(piece, parts))
    return torch.cat([packed for packed, _ in pieces]), pieces[0][1]
