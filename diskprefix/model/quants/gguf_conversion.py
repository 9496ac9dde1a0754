"""Makes a model's folder of a GGUF file. transformers maps and transforms the tensors as it does when it loads the
file, but each parameter is written as soon as it is made, and the model itself stays on torch's meta device.

Matrices whose quants are computed with as they are stay in the file: transformers is shown the numbers of their rows,
and the folder says which rows make which matrix (`file_matrix.py`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel
from transformers import modeling_gguf_pytorch_utils as legacy
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.gguf import reader
from transformers.integrations.gguf.reader import GgufHeader, TensorInfo
from transformers.integrations.gguf.utils import is_gguf_arch_supported
from transformers.quantizers import auto as quantizers
from transformers.quantizers.quantizer_gguf import GgufHfQuantizer

from diskprefix.errors import ModelError
from diskprefix.model.exact.mixtures import matrices_of, named_halves
from diskprefix.model.load.gguf_header import FileTensor
from diskprefix.model.load.memory import one_thread
from diskprefix.model.quants.file_matrix import FileMatrix, numbered, numbers_in, save_matrices
from diskprefix.model.quants.forms import quantised
from diskprefix.model.quants.parameter_stream import TensorOnRequest, name_of_loaded, taking_parameters
from diskprefix.model.quants.quant_form import form_of
from diskprefix.model.quants.quantised import (
    FILE,
    bits_for,
    is_plain_embedding,
    is_untied,
    metadata_of,
    quantisable,
    quantisable_experts,
    untie,
)
from diskprefix.model.quants.tensor_writer import TensorWriter
from diskprefix.native import COLUMNS, ROWS
from diskprefix.native.matrix import fills_blocks

_ENTRY_BYTES = 512
"""The greatest length of a tensor's entry in the header, with its form."""
_MOST_HEADER_BYTES = 10**8
"""safetensors refuses longer headers."""
_BIAS = "_bias"
"""The end of the names of the biases of experts."""


class TensorwiseQuantizer(GgufHfQuantizer):  # type: ignore[misc]
    """The quantizer of transformers that loads GGUF files, with tensors that are read one by one."""

    def __init__(self, conversion: TensorwiseConversion, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._conversion = conversion

    def read_header(self, gguf_file: str) -> None:
        # transformers refuses types here that it does not compute with.
        architecture = reader.read_gguf_metadata(gguf_file)[0]["general.architecture"]
        tensors = (TensorInfo(one.name, one.shape, one.type, 0, 0) for one in self._conversion.tensors)
        self.supported = is_gguf_arch_supported(architecture)
        self.header = GgufHeader(gguf_file, architecture, tuple(tensors), 0)

    def get_state_dict(self, checkpoint_file: str, model: PreTrainedModel) -> dict[str, TensorOnRequest]:
        return self._conversion.begin(model, checkpoint_file, is_legacy=not self.supported)

    def update_weight_conversions(self, weight_conversions: list[Any], _: PreTrainedModel) -> list[Any]:
        # Without the steps that unpack blocks and cast: none comes in blocks, and all are cast when they are written.
        self._conversion.renamed_by = None if self.supported else weight_conversions
        found: list[Any] = self.mapping if self.supported else weight_conversions
        return found


class TensorwiseConversion:
    """The conversion of `tensors` to the form `weights`, into the folder `made`. `advance` takes the elements done."""

    def __init__(self, tensors: Sequence[FileTensor], weights: str, made: Path, advance: Callable[[int], None]) -> None:
        self.tensors, self._weights, self._made, self._advance = tensors, weights, made, advance
        self._firsts = [0, *accumulate(tensor.num_rows for tensor in tensors)][:-1]
        """The numbers of the tensors' first rows."""
        self._first_of = {tensor.name: first for tensor, first in zip(tensors, self._firsts, strict=True)}
        self._unclear: set[str] = set()
        """Tensors of which more than the rows is changed, so that they are converted by their weights."""
        self.renamed_by: list[Any] | None = None
        """transformers' conversions of names, which a saved model reverts; None for its own choice."""
        self._begin()

    def _begin(self) -> None:
        self._done = 0
        self._users: dict[str, list[str]] = {}
        """Names that share a parameter, by the name that it comes with."""
        self._written: set[str] = set()
        self._forms: dict[str, str] = {}
        self._matrices: dict[str, FileMatrix] = {}
        """Parameters that are rows of the file's tensors."""
        self._rows: dict[str, np.ndarray] = {}
        """The numbers of the rows of experts, by the name of the parameter."""
        self._biases: dict[str, torch.Tensor] = {}
        """The biases of experts, by the name of the parameter."""
        self._read: list[FileTensor] = []
        """Tensors of the file that the present parameter is made of."""
        self._is_used = False
        self._taken: set[str] = set()
        """Names of tensors that something is made of."""

    def run(self, source: Path, name: str, config: Any) -> PreTrainedModel:
        """Converts the file `name` of the folder `source`, and returns the model without its weights.

        Raises `ModelError` if the file lacks tensors or has others, or the model has no matrix that can be quantised.
        """
        with self._streaming(), torch.no_grad(), one_thread():
            while True:
                num_unclear = len(self._unclear)
                try:
                    model, info = self._load(source, name, config)
                except (MemoryError, OSError, ModelError):
                    raise
                except Exception:
                    self._note_unclear()
                    if len(self._unclear) == num_unclear:
                        raise
                    continue
                self._note_unclear()
                if len(self._unclear) == num_unclear:
                    break
            if surplus := [tensor.name for tensor in self.tensors if tensor.name not in self._taken]:
                raise ModelError(f"nothing in the model takes these tensors of the file: {', '.join(surplus[:3])}")
            if info["missing_keys"]:
                names = ", ".join(sorted(info["missing_keys"])[:3])
                raise ModelError(f"the file lacks tensors of the model: {names}")
            kept = self._settle_matrices(model)
            if self._weights in ("int8", "int4") and not self._forms and not kept:
                raise ModelError("--weights: the model has no matrix that can be quantised; add --weights native")
            self._write_others(model)
            metadata = {"format": "pt"} if self._weights == "native" else metadata_of(model, self._forms, kept)
            self._writer.finish(metadata)
        if kept:
            save_matrices(kept, list(dict.fromkeys(tensor.file for tensor in self.tensors)), self._made)
        if is_untied(metadata):
            untie(model.config)
        if self._weights == "native":
            # As `save_pretrained` does. Quantised models keep what they were loaded with.
            model.config.dtype = str(model.dtype).removeprefix("torch.")
            model.config.architectures = [type(model).__name__]
        return model

    def _load(self, source: Path, name: str, config: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
        self._begin()
        with taking_parameters(self._take):
            found: tuple[PreTrainedModel, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(
                source,
                config=deepcopy(config),
                gguf_file=name,
                dtype=torch.bfloat16,
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
                trust_remote_code=False,
            )
        return found

    @contextmanager
    def _streaming(self) -> Iterator[None]:
        mapping = quantizers.AUTO_QUANTIZER_MAPPING
        quantizer = mapping["gguf"]
        mapping["gguf"] = partial(TensorwiseQuantizer, self)
        try:
            yield
        finally:
            mapping["gguf"] = quantizer
            self._close()

    def _close(self) -> None:
        if hasattr(self, "_writer"):
            self._writer.close()

    def begin(self, model: PreTrainedModel, file: str, *, is_legacy: bool) -> dict[str, TensorOnRequest]:
        """Returns the tensors as transformers expects them: by their names in the file, or by those in the model."""
        tied = dict(model.all_tied_weights_keys)
        if is_legacy:
            state = self._by_parameter(model, file, tied)
        else:
            state = {tensor.name: TensorOnRequest(partial(self._content, tensor)) for tensor in self.tensors}
        users = defaultdict(list)
        for name in model.state_dict():
            users[name_of_loaded(name, tied, state if is_legacy else {})].append(name)
        self._users = dict(users)
        self._linears = {f"{name}.weight" for name, _ in quantisable(model)} if self._weights != "native" else set()
        embedding = model.get_input_embeddings()
        self._experts: dict[str, Any] = {} if self._weights == "native" else dict(quantisable_experts(model))
        self._embeddings = {
            f"{name}.weight" for name, one in model.named_modules() if one is embedding and is_plain_embedding(one)
        }
        num_entries = len(model.state_dict()) + 1
        if self._weights == "native":
            # A saved model has a tensor for each expert.
            num_entries += 2 * sum(param.shape[0] for param in model.parameters() if param.ndim == 3)
        if (header := _ENTRY_BYTES * num_entries) > _MOST_HEADER_BYTES:
            raise ModelError(f"the model has too many tensors for one file: {num_entries}")
        self._close()
        self._writer = TensorWriter(self._made / FILE, header)
        return state

    def _by_parameter(self, model: PreTrainedModel, file: str, tied: Mapping[str, str]) -> dict[str, TensorOnRequest]:
        """Returns a tensor for each parameter, as the mapping of `load_gguf_checkpoint` has them."""
        config = legacy.load_gguf_checkpoint(file)["config"]
        architecture = legacy.read_field(gguf.GGUFReader(file), "general.architecture")[0]
        processor = legacy.TENSOR_PROCESSORS.get(architecture, legacy.TensorProcessor)(config=config)
        names = legacy.get_gguf_hf_weights_map(model, processor)
        sources: dict[str, list[FileTensor]] = defaultdict(list)
        unchanged = set()
        for tensor in self.tensors:
            parameters, is_same = _parameters_of(tensor, processor, names)
            for parameter in parameters:
                sources[parameter].append(tensor)
            if is_same:
                unchanged.add(tensor.name)
        for target, source in tied.items():
            if target in sources and source in sources and _are_equal(sources[target], sources[source]):
                # They would be tied after both are loaded.
                self._taken.update(tensor.name for tensor in sources.pop(target))

        def read(parameter: str) -> torch.Tensor:
            made: dict[str, torch.Tensor] = {}
            for tensor in sources[parameter]:
                self._begin_reading(tensor)
                if self._is_numbered(tensor):
                    _process(tensor, self._numbers(tensor).numpy(), processor, names, made)
                elif tensor.name in unchanged:
                    made[parameter] = _dequantised(tensor)
                else:
                    _process(tensor, gguf.dequantize(tensor.content(), tensor.type), processor, names, made)
            return made[parameter]

        return {parameter: TensorOnRequest(partial(read, parameter)) for parameter in sources}

    def _content(self, tensor: FileTensor) -> torch.Tensor:
        """Returns the numbers of a tensor as transformers' converters expect them: floating point as it is stored,
        because they subtract from norms."""
        self._begin_reading(tensor)
        if self._is_numbered(tensor):
            return self._numbers(tensor)
        if len(tensor.shape) == 1:
            return torch.from_numpy(gguf.dequantize(tensor.content(), tensor.type))
        return _dequantised(tensor)

    def _is_numbered(self, tensor: FileTensor) -> bool:
        """Returns whether transformers is shown the numbers of a tensor's rows."""
        is_matrix = len(tensor.shape) > 1 and tensor.shape[-1] % COLUMNS == 0
        is_kept = self._weights != "native" and is_matrix and form_of(tensor.kind) is not None
        return is_kept and tensor.name not in self._unclear

    def _numbers(self, tensor: FileTensor) -> torch.Tensor:
        return numbered(self._first_of[tensor.name], tensor.shape)

    def _begin_reading(self, tensor: FileTensor) -> None:
        if self._is_used:
            self._note_unclear()
            self._read.clear()
            self._is_used = False
        self._read.append(tensor)
        self._taken.add(tensor.name)

    def _note_unclear(self) -> None:
        """Notes the tensors that were shown by numbers, and of which nothing was made that has them."""
        found = {tensor.name for matrix in self._matrices.values() for tensor in matrix.tensors}
        self._unclear |= {one.name for one in self._read if self._is_numbered(one) and one.name not in found}

    def _take(self, model: PreTrainedModel, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Takes a parameter: a matrix of the file, or weights, which are written at once. Returns one of its
        shape on torch's meta device."""
        self._is_used = True
        experts = self._experts.get(name.rpartition(".")[0])
        if any(map(self._is_numbered, self._read)):
            rows = numbers_in(_turned(tensor, experts))
            matrix = None if rows is None else FileMatrix.of(rows, self.tensors, self._firsts)
            if matrix is None:
                self._unclear |= {one.name for one in self._read if self._is_numbered(one)}
                return _empty(tensor.shape)
            self._matrices[name] = matrix
            if experts is not None and rows is not None:
                self._rows[name] = rows
            return _turned(_empty(matrix.shape), experts)
        tensor = tensor.to(_dtype_of(model, name))
        if experts is not None and name.endswith(_BIAS):
            self._biases[name] = tensor
        else:
            self._put(model, name, tensor)
        return _empty(tensor.shape)

    def _put(self, model: PreTrainedModel, name: str, tensor: torch.Tensor) -> None:
        """Writes a parameter, quantised where `weights` wants it."""
        users = [user for user in self._users.get(name, [name]) if user not in self._written]
        plain = []
        for user in users:
            linear = user.removesuffix(".weight")
            bits = bits_for(model, linear, self._weights) if user in self._linears else None
            if bits is None or not fills_blocks(tensor):
                plain.append(user)
            else:
                quants = quantised(tensor, bits)
                self._writer.add(f"{linear}.packed", quants.packed())
                self._forms[linear] = str(quants.form)
        if plain:
            self._write(model, plain[0], tensor)
        self._written.update(users)
        self._advanced(tensor.numel())

    def _advanced(self, num_elements: int) -> None:
        self._done += num_elements
        self._advance(self._done)

    def _settle_matrices(self, model: PreTrainedModel) -> dict[str, FileMatrix]:
        """Writes the matrices whose quants are not used as they are. Returns the others, by their modules."""
        kept = self._kept_experts(model)
        for name, matrix in self._matrices.items():
            if name in self._written:
                continue
            users = self._users.get(name, [name])
            staying = [user for user in users if self._stays(model, user, matrix)]
            kept |= {user.removesuffix(".weight"): matrix for user in staying}
            self._written.update(staying)
            if len(staying) < len(users):
                self._put(model, name, _turned(matrix.dequantised(), self._experts.get(name.rpartition(".")[0])))
            else:
                self._advanced(prod(matrix.shape))
        return kept

    def _kept_experts(self, model: PreTrainedModel) -> dict[str, FileMatrix]:
        """Returns the matrices of the experts that stay in the file, by their modules: those of a mixture all stay, or
        none does. Writes the biases of all experts."""
        kept: dict[str, FileMatrix] = {}
        for owner, experts in self._experts.items():
            biases = {name: bias for name, bias in self._biases.items() if name.rpartition(".")[0] == owner}
            parameters = [name for name in self._rows if name.rpartition(".")[0] == owner]
            found = {
                f"{owner}.{part}": FileMatrix.of(rows.numpy(), self.tensors, self._firsts)
                for name in parameters
                for part, rows in named_halves(
                    experts, name.rpartition(".")[2], torch.from_numpy(self._rows[name])
                ).items()
            }
            matrices = {part: matrix for part, matrix in found.items() if matrix is not None and _has_form(matrix)}
            if len(matrices) == len(matrices_of(experts)):
                kept |= matrices
                self._written.update(parameters)
                self._advanced(sum(prod(matrix.shape) for matrix in matrices.values()))
                biases = {
                    f"{owner}.{part}.bias": of_part.contiguous()
                    for name, bias in biases.items()
                    for part, of_part in named_halves(
                        experts, name.rpartition(".")[2].removesuffix(_BIAS), bias
                    ).items()
                }
            for name, bias in biases.items():
                self._write(model, name, bias)
        return kept

    def _stays(self, model: PreTrainedModel, user: str, matrix: FileMatrix) -> bool:
        form = None if matrix.kind is None else form_of(matrix.kind)
        if form is None or len(matrix.shape) != 2 or not _has_form(matrix):
            return False
        bits = bits_for(model, user.removesuffix(".weight"), self._weights)
        return user in self._embeddings or (user in self._linears and (bits is None or form.bits <= bits))

    def _write(self, model: PreTrainedModel, name: str, tensor: torch.Tensor) -> None:
        if self._weights != "native":
            self._writer.add(name, tensor)
            return
        # As `save_pretrained` does, which has the whole model.
        if name in (model._keys_to_ignore_on_save or ()):
            return
        used = None if self.renamed_by is None else [found for found in self.renamed_by if found.was_used()]
        model._weight_conversions = used
        for saved, part in revert_weight_conversion(model, {name: tensor}).items():
            self._writer.add(saved, part)

    def _write_others(self, model: PreTrainedModel) -> None:
        """Writes what the model has and no file."""
        for name, tensor in model.state_dict().items():
            if name not in self._written and tensor.device.type != "meta":
                self._write(model, name, tensor)


def _has_form(matrix: FileMatrix) -> bool:
    """Returns whether the operators take the quants of a matrix, or of those of several experts."""
    return matrix.kind is not None and form_of(matrix.kind) is not None and matrix.shape[-2] % ROWS == 0


def _turned(weights: torch.Tensor, experts: Any) -> torch.Tensor:
    """Returns the matrices of a parameter with rows and columns exchanged, if its module has experts that way."""
    return weights.transpose(1, 2) if experts is not None and experts.is_transposed and weights.ndim == 3 else weights


def _dtype_of(model: PreTrainedModel, name: str) -> torch.dtype:
    """Returns the type of a parameter in a model in bfloat16."""
    is_float32 = any(part in name for part in model._keep_in_fp32_modules_strict or ())
    return torch.float32 if is_float32 else torch.bfloat16


def _empty(shape: Sequence[int]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def _parameters_of(tensor: FileTensor, processor: Any, names: Mapping[str, str]) -> tuple[list[str], bool]:
    """Returns the parameters that are made of a tensor, and whether its weights are left as they are.

    The processor shows it on weights of the same number of rows with one column.
    """
    probe = np.zeros((tensor.shape[0], *(1 for _ in tensor.shape[1:])), np.float32)
    made: dict[str, torch.Tensor] = {}
    try:
        is_same = _process(tensor, probe, processor, names, made)
    except ValueError:
        # The processor splits the columns too.
        return ([names[tensor.name]] if tensor.name in names else []), False
    return list(made), is_same


def _process(
    tensor: FileTensor, weights: Any, processor: Any, names: Mapping[str, str], made: dict[str, torch.Tensor]
) -> bool:
    """Puts into `made` what the processor makes of the weights, as `load_gguf_checkpoint` does. Returns whether it left
    them as they are."""
    with np.errstate(all="ignore"):
        result = processor.process(
            weights=weights, name=tensor.name, tensor_key_mapping=names, parsed_parameters={"tensors": made}
        )
    if result.name in names:
        made[names[result.name]] = torch.from_numpy(np.ascontiguousarray(result.weights)).to(torch.bfloat16)
    return result.weights is weights and result.name == tensor.name


def _dequantised(tensor: FileTensor) -> torch.Tensor:
    """Returns the weights, bfloat16. Only a piece at a time is in float32."""
    if len(tensor.shape) == 1:
        return torch.from_numpy(gguf.dequantize(tensor.content(), tensor.type)).to(torch.bfloat16)
    found = torch.empty(tensor.shape, dtype=torch.bfloat16)
    for first, last in tensor.pieces():
        weights = gguf.dequantize(tensor.content(first, last), tensor.type)
        found[first:last] = torch.from_numpy(weights).view(found[first:last].shape)
    return found


def _are_equal(left: Sequence[FileTensor], right: Sequence[FileTensor]) -> bool:
    """Returns whether both have the same bytes of the same type."""
    if [(tensor.type, tensor.shape) for tensor in left] != [(tensor.type, tensor.shape) for tensor in right]:
        return False
    return all(
        np.array_equal(one.content(*piece), other.content(*piece))
        for one, other in zip(left, right, strict=True)
        for piece in one.pieces()
    )
