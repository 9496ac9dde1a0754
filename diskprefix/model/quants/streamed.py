"""Quantises a model parameter by parameter, into a folder. In memory are one parameter and what it is made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from diskprefix.errors import ModelError
from diskprefix.model.exact.mixtures import named_halves, weight_names
from diskprefix.model.load.memory import one_thread
from diskprefix.model.load.stored_tensors import read_now
from diskprefix.model.quants.exact_quants import ExactQuants, ExpertQuants, JoinedQuants, OneMatrix
from diskprefix.model.quants.file_matrix import numbered, numbers_in
from diskprefix.model.quants.forms import quantised, unpacked
from diskprefix.model.quants.parameter_stream import (
    TensorOnRequest,
    name_of_loaded,
    require_whole,
    taking_parameters,
)
from diskprefix.model.quants.published import Source
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


_Held: TypeAlias = torch.Tensor | ExpertQuants | JoinedQuants


class StreamedQuantising:
    """The quantising of a checkpoint to the form `weights`, into the folder `made`. `sources` has its tensors by their
    names there; `singles` names those of single experts that are kept if they come with quants. `advance` takes the
    elements done."""

    def __init__(
        self,
        sources: Mapping[str, Source],
        singles: Collection[str],
        weights: str,
        made: Path,
        advance: Callable[[int], None],
    ) -> None:
        self._sources, self._weights, self._made, self._advance = sources, weights, made, advance
        self._singles = singles
        self._num_threads = torch.get_num_threads()
        self._done = 0
        self._own: tuple[torch.Tensor, ExactQuants] | None = None
        """The last matrix that came with quants, and they."""
        self._users: dict[str, list[str]] = {}
        """Names that share a parameter, by the name that it comes with."""
        self._linears: set[str] = set()
        self._mixtures: set[str] = set()
        self._held: dict[str, _Held] = {}
        """Parameters of the experts of a layer, until all are there."""
        self._read_singles: list[OneMatrix] = []
        """The quants of the single experts that were read for the next parameter."""
        self._written: set[str] = set()
        self._forms: dict[str, str] = {}
        self._failure: Exception | None = None
        self._writer: TensorWriter | None = None

    def run(self, model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
        """Quantises, and returns the model without its weights. Raises `ModelError` if the checkpoint lacks tensors, or
        nothing in it can be quantised, `OSError` if the disk is full."""
        state = {name: TensorOnRequest(self._reader(name, source)) for name, source in self._sources.items()}
        try:
            with taking_parameters(self._take), torch.no_grad(), one_thread():
                model, info = model_class.from_pretrained(
                    None,
                    config=config,
                    state_dict=state,
                    dtype=torch.bfloat16,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,
                    local_files_only=True,
                )
                self._check(info)
                self._finish(model)
        except Exception as error:
            # transformers collects what goes wrong while it reads.
            raise self._failure or error from error
        finally:
            if self._writer is not None:
                self._writer.close()
        return model

    def _reader(self, name: str, source: Source) -> Callable[[], torch.Tensor]:
        def read() -> torch.Tensor:
            try:
                found = source()
                if isinstance(found, torch.Tensor):
                    return found
                if name in self._singles and not isinstance(found, ExpertQuants):
                    # Numbers of rows instead of weights. What transformers makes of them says where each row lies.
                    first = sum(len(one.scales) for one in self._read_singles)
                    self._read_singles.append(found)
                    return numbered(first, (len(found.scales), 0))
                # Experts that come with quants are not computed with in another form.
                weight = found.outline if isinstance(found, ExpertQuants) else found.dequantised()
                self._own = weight, found
            except Exception as error:
                self._failure = self._failure or error
                raise
            return weight

        return read

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
        tensor = self._read(tensor)
        own = self._own_of(tensor)
        held = own if isinstance(own, ExpertQuants) else self._joined(tensor)
        if owner in self._mixtures:
            self._hold(model, owner, part, held)
        else:
            self._write(model, name, held if isinstance(held, torch.Tensor) else held.dequantised())
        self._written.update(self._users.get(name, [name]))
        shape = model.get_parameter(name).shape if isinstance(held, JoinedQuants) else tensor.shape
        self._done += shape.numel()
        self._advance(self._done)
        self._own = None
        self._read_singles = []
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    def _read(self, tensor: torch.Tensor) -> torch.Tensor:
        try:
            found: torch.Tensor = read_now(tensor)
            return found
        except Exception as error:
            self._failure = self._failure or error
            raise

    def _joined(self, tensor: torch.Tensor) -> torch.Tensor | JoinedQuants:
        """Returns the matrices of single experts that a parameter was made of, or the parameter if it was not."""
        if not self._read_singles:
            return tensor
        rows = numbers_in(tensor)
        if rows is None:
            raise ModelError("quantised experts are put together in a way that is not served; add --weights native")
        return JoinedQuants(torch.from_numpy(rows), self._read_singles)

    def _write(self, model: PreTrainedModel, name: str, tensor: torch.Tensor) -> None:
        assert self._writer is not None
        plain = []
        for user in self._users.get(name, [name]):
            linear = user.removesuffix(".weight")
            found = self._packed(model, linear, tensor) if user in self._linears and fills_blocks(tensor) else None
            if found is None:
                plain.append(user)
            else:
                packed, form = found
                self._writer.add(f"{linear}.packed", packed)
                self._forms[linear] = str(form)
        if plain:
            self._writer.add(plain[0], tensor)

    def _hold(self, model: PreTrainedModel, name: str, part: str, held: _Held) -> None:
        """Holds a parameter of the experts of a layer, until all are there or it is known that none is quantised."""
        self._held[part] = held
        experts = model.get_submodule(name)
        is_plain = part in weight_names(experts) and isinstance(held, torch.Tensor)
        if is_plain and self._weights == "auto":
            for one, parameter in _plain(self._held).items():
                self._write(model, f"{name}.{one}", parameter)
            self._mixtures.remove(name)
        elif len(self._held) == len(experts._parameters):
            self._write_experts(model, name)
        else:
            return
        self._held.clear()

    def _write_experts(self, model: PreTrainedModel, name: str) -> None:
        """Writes the experts of a layer, whose parameters are all there, in the quants that they came with or in new
        ones."""
        assert self._writer is not None
        experts = model.get_submodule(name)
        if not any(isinstance(self._held[part], torch.Tensor) for part in weight_names(experts)):
            self._write_own_experts(experts, name)
            return
        empty = dict(experts._parameters)
        experts._parameters.update({part: nn.Parameter(tensor, False) for part, tensor in _plain(self._held).items()})
        bits = bits_for(model, name, self._weights)
        assert bits is not None, "these are not held"
        made = quantised_experts(experts, partial(quantised, bits=bits))
        for part, tensor in made.state_dict().items():
            self._writer.add(f"{name}.{part}", tensor)
        self._forms |= {f"{name}.{part}": str(matrices.form) for part, matrices in made.parts().items()}
        experts._parameters.update(empty)

    def _write_own_experts(self, experts: nn.Module, name: str) -> None:
        """Writes the experts of a layer in the quants that they came with."""
        assert self._writer is not None
        for parameter, held in self._held.items():
            if isinstance(held, torch.Tensor):
                biases = named_halves(experts, parameter.removesuffix("_bias"), held)
                for part, bias in biases.items():
                    self._writer.add(f"{name}.{part}.bias", bias)
                continue
            for part, (packed, form) in _packed_halves(experts, parameter, held).items():
                self._writer.add(f"{name}.{part}.packed", packed)
                self._forms[f"{name}.{part}"] = str(form)

    def _own_of(self, weight: torch.Tensor) -> ExactQuants | None:
        """Returns the quants that a parameter came with, if transformers left it as it was."""
        if self._own is None:
            return None
        given, quants = self._own
        is_same = (given.data_ptr(), given.shape, given.stride()) == (
            *(weight.data_ptr(), weight.shape, weight.stride()),
        )
        assert is_same or not isinstance(quants, ExpertQuants), "these have no weights"
        return quants if is_same else None

    def _packed(
        self, model: PreTrainedModel, linear: str, weight: torch.Tensor
    ) -> tuple[torch.Tensor, QuantForm] | None:
        own = self._own_of(weight)
        if own is not None:
            return own.packed(), own.form
        bits = bits_for(model, linear, self._weights)
        return None if bits is None else pack_in_pieces(weight, bits, self._num_threads)

    def _check(self, info: Mapping[str, set[Any]]) -> None:
        if self._failure is not None:
            raise self._failure
        require_whole(info, "the weights")

    def _finish(self, model: PreTrainedModel) -> None:
        if not self._forms or self._writer is None:
            raise ModelError("--weights: the model has no matrix that can be quantised; add --weights native")
        for name, tensor in model.state_dict().items():
            # What the model has and no file.
            if name not in self._written and tensor.device.type != "meta":
                self._writer.add(name, tensor)
        self._writer.finish(metadata_of(model, self._forms))


def _plain(held: Mapping[str, _Held]) -> dict[str, torch.Tensor]:
    return {part: one if isinstance(one, torch.Tensor) else one.dequantised() for part, one in held.items()}


def _packed_halves(
    experts: nn.Module, parameter: str, held: ExpertQuants | JoinedQuants
) -> dict[str, tuple[torch.Tensor, QuantForm]]:
    """Returns the packed matrices of all experts and their form, by the parts that a parameter has."""
    if isinstance(held, JoinedQuants):
        return {part: held.packed(rows) for part, rows in named_halves(experts, parameter, held.rows).items()}
    blocks, scales = (named_halves(experts, parameter, part) for part in (held.blocks, held.scales))
    return {part: (ExpertQuants(of_part, scales[part]).packed(), held.form) for part, of_part in blocks.items()}


def pack_in_pieces(weight: torch.Tensor, bits: int, num_threads: int) -> tuple[torch.Tensor, QuantForm]:
    """Returns a matrix of floating-point numbers quantised and packed, and its form: the smallest that all its rows
    have."""

    def piece(part: torch.Tensor) -> tuple[torch.Tensor, QuantForm]:
        with torch.no_grad():
            quants = quantised(part, bits)
            return quants.packed(), quants.form

    parts = torch.split(weight, max(ROWS, _AT_ONCE // weight.shape[1] // ROWS * ROWS))
    with ThreadPoolExecutor(num_threads) as threads:
        pieces = list(threads.map(piece, parts))
    widest = max((form for _, form in pieces), key=lambda form: form.weight_bits)
    found = [packed if form == widest else unpacked(packed, form).packed(widest) for packed, form in pieces]
    return torch.cat(found), widest
