"""Quantises the weights in a folder once, parameter by parameter: in memory are one parameter and what it is made of.
What is made is kept with the models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_utils import str_to_torch_dtype

from diskprefix.errors import ModelError
from diskprefix.model.exact.mixtures import matrices_of
from diskprefix.model.load.checkpoint import FILE, read_config, require_plain_weights, stored_tensors
from diskprefix.model.load.fingerprint import weights_digest
from diskprefix.model.load.fit import Check, enough_to_make, needs_of_checkpoint
from diskprefix.model.load.gguf_file import file_stamp
from diskprefix.model.load.made_once import build_once, require_disk
from diskprefix.model.load.memory import one_thread
from diskprefix.model.load.parameters import Source, load_parameters
from diskprefix.model.load.served_tensors import QUANTISED
from diskprefix.model.quants.forms import quantised
from diskprefix.model.quants.quantised import bits_for, quantisable, quantisable_experts, write_forms
from diskprefix.native import ROWS
from diskprefix.native.library import has_rows
from diskprefix.native.matrix import fills_blocks
from diskprefix.progress import Report, progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from diskprefix.model.load.kinds import ModelKind

_KINDS = {dtype: kind for kind, dtype in str_to_torch_dtype.items()}
_ENTRY_BYTES = 1024
"""The greatest length of what the header has of a parameter: of experts the entries of gate and up."""
_AT_ONCE = 1 << 20
"""Weights that a thread quantises at a time, so that the work does not take several times the memory of the matrix."""


def weight_files_in(
    weights: str,
    folder: Path,
    files: list[Path],
    config: PreTrainedConfig,
    kind: ModelKind,
    report: Report,
    check: Check = enough_to_make,
) -> list[Path]:
    """Returns the weight files in the form `weights`, made on first use. Raises `ModelError` if there is none."""
    configuration = read_config(folder)
    require_plain_weights(str(folder), configuration)
    if weights not in QUANTISED:
        return files

    def build(work: Path) -> Path:
        stored, before = stored_tensors(folder, files), [file_stamp(file) for file in files]
        needs = needs_of_checkpoint(folder.name, stored, configuration, weights, "bfloat16")
        check(needs)
        require_disk(work, needs.disk_bytes)
        (made := work / "model").mkdir()
        sources = {tensor.name: tensor.read for tensor in stored}
        state = kind.skeleton(config).state_dict()
        total = sum(tensor.numel() for tensor in state.values())
        with progress_bar(f"quantising {folder.name} to {weights}", total, report) as advance:
            streamed = StreamedQuantising(sources, weights, made, lambda done: advance(min(done, total)))
            streamed.run(*kind.model_class(config), _ENTRY_BYTES * (len(state) + 1))
        if [file_stamp(file) for file in files] != before:
            raise ModelError(f"the weights in {folder} were changed while they were read; start again")
        return made

    # The number changes with what is made.
    lines = "-rows" if has_rows() else ""
    name = f"{folder.resolve().name[:100]}-{weights_digest(files)[:12]}-{weights}{lines}.6"
    return [build_once(name, build, report) / FILE]


class StreamedQuantising:
    """The quantising of a checkpoint to the form `weights`, into the folder `made`. `sources` has its tensors by their
    names there. `advance` takes the elements done."""

    def __init__(self, sources: Mapping[str, Source], weights: str, made: Path, advance: Callable[[int], None]) -> None:
        self._sources, self._weights, self._made, self._advance = sources, weights, made, advance
        self._num_threads = torch.get_num_threads()
        self._done = 0
        self._linears: set[str] = set()
        self._mixtures: set[str] = set()
        self._held: dict[str, torch.Tensor] = {}
        """Parameters of the experts of a layer, until all are there."""
        self._loaded: set[str] = set()
        """The names of the parameters that transformers makes of the checkpoint."""
        self._forms: dict[str, str] = {}
        self._header: dict[str, Any] = {}
        self._num_bytes = 0

    def run(self, model_class: type[PreTrainedModel], config: PreTrainedConfig, header_bytes: int) -> None:
        """Quantises. Raises `ModelError` for missing tensors or without any matrix, `OSError` for a full disk."""
        with (self._made / FILE).open("wb") as self._file, torch.no_grad(), one_thread():
            # The header is written at the end.
            self._file.seek(8 + header_bytes)
            model = load_parameters(model_class, config, self._sources, self._take, "the weights")
            if not self._forms:
                raise ModelError("--weights: the model has no matrix that can be quantised; add --weights native")
            for name, tensor in model.state_dict().items():
                # What the model has and no file.
                if tensor.device.type != "meta":
                    self._add(name, tensor)
            header = json.dumps(self._header).encode()
            assert len(header) <= header_bytes, "there is no space for it"
            self._file.seek(0)
            self._file.write(header_bytes.to_bytes(8, "little") + header.ljust(header_bytes))
        write_forms(self._made, self._forms)

    def _take(self, model: PreTrainedModel, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Adds a parameter, quantised where it can be. Returns a tensor of its shape on torch's meta device."""
        if not self._loaded:
            self._loaded = set(self._loaded_names(model))
            self._linears = {f"{name}.weight" for name, _ in quantisable(model)}
            self._mixtures = {name for name, _ in quantisable_experts(model)}
        owner, _, part = name.rpartition(".")
        if owner in self._mixtures:
            self._hold(model, owner, part, tensor)
        else:
            self._add_parameter(model, name, tensor)
        self._done += tensor.numel()
        self._advance(self._done)
        return torch.empty_like(tensor, device="meta")

    def _loaded_names(self, model: PreTrainedModel) -> Iterator[str]:
        mapping, meta = get_model_conversion_mapping(model), model.state_dict()
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        prefix = model.base_model_prefix
        return (rename_source_key(name, renamings, converters, prefix, meta)[0] for name in self._sources)

    def _add_parameter(self, model: PreTrainedModel, name: str, tensor: torch.Tensor) -> None:
        """Adds a parameter for all that share it, but for those that have their own in the checkpoint."""
        tied: Mapping[str, str] = model.all_tied_weights_keys
        source, plain = tied.get(name, name), []
        shared = (source, *(target for target, of in tied.items() if of == source))
        # Those that the checkpoint lacks come with the first that it has.
        first = next((one for one in shared if one in self._loaded), name)
        for user in shared:
            linear = user.removesuffix(".weight")
            if user != name and (name != first or user in self._loaded):
                continue
            if user not in self._linears or not fills_blocks(tensor):
                plain.append(user)
            else:
                packed, kind = pack_in_pieces(tensor, bits_for(model, linear, self._weights), self._num_threads)
                self._add(f"{linear}.packed", packed)
                self._forms[linear] = kind
        if plain:
            self._add(plain[0], tensor)

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        """Writes a tensor, behind those before it."""
        self._file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        offsets = [self._num_bytes, self._num_bytes + tensor.nbytes]
        self._num_bytes = offsets[1]
        self._header[name] = {"dtype": _KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}

    def _hold(self, model: PreTrainedModel, name: str, part: str, tensor: torch.Tensor) -> None:
        """Holds a parameter of the experts of a layer until all are there, then adds them quantised."""
        self._held[part] = tensor
        experts = model.get_submodule(name)
        if len(self._held) < len(experts._parameters):
            return
        empty = dict(experts._parameters)
        experts._parameters.update({part: nn.Parameter(one, False) for part, one in self._held.items()})
        for one, (weight, bias) in matrices_of(experts).items():
            # The matrices of all experts as one, below each other.
            quants = quantised(weight.reshape(-1, weight.shape[2]), bits_for(model, name, self._weights))
            packed = quants.packed()
            self._add(f"{name}.{one}.packed", packed.view(len(weight), -1, *packed.shape[1:]))
            self._forms[f"{name}.{one}"] = quants.kind
            if bias is not None:
                self._add(f"{name}.{one}.bias", bias)
        experts._parameters.update(empty)
        self._held.clear()


def pack_in_pieces(weight: torch.Tensor, bits: int, num_threads: int) -> tuple[torch.Tensor, str]:
    """Returns a matrix of floating-point numbers quantised and packed, and the type of its quants."""

    def piece(part: torch.Tensor) -> tuple[torch.Tensor, str]:
        with torch.no_grad():
            quants = quantised(part, bits)
            return quants.packed(), quants.kind

    parts = torch.split(weight, max(ROWS, _AT_ONCE // weight.shape[1] // ROWS * ROWS))
    with ThreadPoolExecutor(num_threads) as threads:
        pieces = list(threads.map(piece, parts))
    return torch.cat([packed for packed, _ in pieces]), pieces[0][1]
