"""The weights of a folder of safetensors, whose tensors have the names of published checkpoints.

They become transformers' parameters as in its `conversion_mapping`: other names, the experts of a mixture in one
tensor, several tensors concatenated. The experts of gpt-oss may be in MXFP4 (`load.mxfp4`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from diskprefix.errors import ModelError
from diskprefix.prefixstore.kv.numbers import array_dtype, converted, dtype_of
from diskprefix.runtime.files.checkpoint import StoredTensor
from diskprefix.runtime.files.file_matrix import MatrixPacking
from diskprefix.runtime.files.mxfp4 import Mxfp4Experts
from diskprefix.runtime.files.table_file import TableFile
from diskprefix.runtime.memory import LargePages
from diskprefix.runtime.plan.draft_layer import further_layers
from diskprefix.runtime.plan.families.slot_names import SlotNames, kept_in_float32
from diskprefix.runtime.plan.families.types.known_types import type_of
from diskprefix.runtime.plan.part_options import ExpertsForm
from diskprefix.runtime.plan.slots import HEAD
from diskprefix.runtime.plan.weights import Quants, TablePart, Weights

_TYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
"""The types of tensors that are read."""
_PIECE_BYTES = 1 << 24
"""What is read of a tensor at a time."""
_HEADS = ("lm_head", "embed_out", "output_projection")
"""Names of the matrix of the logits."""
_EXPERTS = re.compile(r"(.+\.experts)\.(gate_up_proj|up_proj|down_proj)")
_SHARD = re.compile(r"shard_(\d+)\.weight")
"""The end of the name of a part of a table."""
_OF_EXPERT = {"gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2")}
"""The names of an expert's matrices."""


class FolderWeights(Weights):
    """The weights of a decoder in a folder. `config` is the configuration of the whole model. `is_unread`: nothing is
    read, memory has arbitrary numbers. With a `packing`, in bfloat16, the MXFP4 of gpt-oss is kept. Raises `ModelError`
    if there are no embeddings."""

    def __init__(
        self,
        tensors: Sequence[StoredTensor],
        config: Any,
        dtype: str,
        *,
        has_draft_layer: bool = False,
        is_unread: bool = False,
        packing: MatrixPacking | None = None,
    ) -> None:
        super().__init__(dtype, has_draft_layer=has_draft_layer)
        self._packing, self._quants = packing, dict[str, Mapping[str, Quants]]()
        self._config, self._is_unread = config.get_text_config(decoder=True), is_unread
        self._is_tied = getattr(config, "tie_word_embeddings", False)  # The text's own says nothing.
        self._form = SlotNames.of(self._config).experts
        self._folder = tensors[0].file.parent if tensors else "the folder"
        self._in_float32 = kept_in_float32(config)
        self._places = LargePages()
        self._table_files = dict[Path, TableFile]()
        further = further_layers((tensor.name for tensor in tensors), self._config.num_hidden_layers)
        own = {name: f"draft_layer.{of_draft}" for name, of_draft in further.items() if of_draft is not None}
        self._found = {self._own_name(own.get(tensor.name, tensor.name)): tensor for tensor in tensors}
        embeddings = f"{SlotNames.of(self._config).own.get('embed_tokens', 'embed_tokens')}.weight"
        ends = [name for name in self._found if name == embeddings or name.endswith(f".{embeddings}")]
        if not ends:
            raise ModelError(f"{self._folder} lacks {embeddings}")
        prefix = min(ends, key=len).removesuffix(embeddings)
        self._found = {name.removeprefix(prefix): tensor for name, tensor in self._found.items()}
        head = self._found.get(f"{HEAD}.weight")
        # A file that has the tied matrix twice may have two.
        if self._is_tied and head is not None and _is_copy(head, self._found[embeddings]):
            del self._found[f"{HEAD}.weight"]

    def _own_name(self, name: str) -> str:
        """Returns the name of a tensor among parameters."""
        for pattern, own in type_of(self._config).published:
            name = re.sub(pattern, own, name)
        head, _, end = name.rpartition(".")
        return f"{HEAD}.{end}" if head.rpartition(".")[2] in _HEADS else name

    @property
    def keeps_quants(self) -> bool:
        return bool(self._quants)

    def has_parameter(self, name: str) -> bool:
        return bool(self._parts(name) or Mxfp4Experts.of(name, self._found)) or (
            name == f"{HEAD}.weight" and not self._is_tied
        )

    def finish_reading(self) -> None:
        """Raises `ModelError` for a file that is cut short, `OSError`, `MemoryError`."""
        if self._packing is not None:
            self._packing.finish_packing()

    def expert_quants(self, name: str, form: ExpertsForm) -> Mapping[str, Quants]:
        if self._packing is None:
            return {}
        if name not in self._quants:
            quants = dict[str, Quants]()
            for matrix in (form.first, "down_proj"):
                if (stored := Mxfp4Experts.of(f"{name}.{matrix}", self._found)) is None:
                    return {}
                quants |= stored.packed(matrix, form, self._packing, is_unread=self._is_unread)
            self._quants[name] = quants
        return self._quants[name]

    def named(self) -> Iterator[tuple[str, np.ndarray]]:
        yield from super().named()
        for name, parts in self._quants.items():
            yield from ((f"{name}.{part}", quants.packed) for part, quants in parts.items())

    def table(self, name: str) -> Sequence[TablePart]:
        """Raises `ModelError` if the folder lacks the table or a part of it, or has it in a type that is not read."""
        stem = name.removesuffix("weight")
        parts = {own.removeprefix(stem): tensor for own, tensor in self._found.items() if own.startswith(stem)}
        shards = {int(shard[1]): parts[part] for part in parts if (shard := _SHARD.fullmatch(part))}
        numbers = sorted(shards)
        if numbers != [*range(len(numbers))]:
            raise ModelError(f"{self._folder} lacks {stem}shard_{min({*range(len(numbers))} - {*numbers})}.weight")
        tensors = [shards[number] for number in numbers] or [part for parts in self._parts(name) for part in parts]
        if not tensors:
            raise ModelError(f"{self._folder} lacks {name}")
        return [self._part_of_table(tensor) for tensor in tensors]

    def _part_of_table(self, tensor: StoredTensor) -> TablePart:
        dtype = _TYPES.get(tensor.kind, "")
        if dtype not in ("bfloat16", "float32") or len(tensor.shape) != 2:
            form = f"{tensor.kind} {[*tensor.shape]}"
            raise ModelError(f"{tensor.file.name}: {tensor.name} is {form}, not a table of floating-point numbers")
        shape = tensor.shape[0], tensor.shape[1]
        if self._is_unread:
            return TablePart(shape, dtype)
        if tensor.file not in self._table_files:
            self._table_files[tensor.file] = TableFile(tensor.file)
        file = self._table_files[tensor.file]
        return TablePart(shape, dtype, None, file.descriptor, tensor.offset, file)

    def integers(self, name: str) -> np.ndarray | None:
        tensor = self._found.get(name)
        if tensor is None or tensor.kind != "I64" or self._is_unread:
            return None
        numbers = np.empty(tensor.shape, np.int64)
        tensor.read_into(numbers)
        return numbers

    def _parts(self, name: str) -> list[list[StoredTensor]]:
        """Returns the tensors of a parameter: for each of its experts, the tensors to concatenate. Returns nothing if
        there is no such parameter."""
        if name in self._found:
            return [[self._found[name]]]
        if name.endswith("conv1d.weight"):
            owner = name.removesuffix("conv1d.weight")
            return self._joined([f"{owner}{part}_conv1d.weight" for part in "qkv"])
        if (experts := _EXPERTS.fullmatch(name)) is None:
            return []
        parts = ("gate", "up") if experts[2] == "gate_up_proj" else (experts[2].partition("_")[0],)
        if stacked := self._joined([f"{experts[1]}.{part}_proj" for part in parts]):
            return stacked
        experts_read, names = list[list[StoredTensor]](), _OF_EXPERT
        while of_expert := next(
            (
                tensor
                for number in (0, 1)
                if (
                    tensor := self._joined(
                        [f"{experts[1]}.{len(experts_read)}.{names[part][number]}.weight" for part in parts]
                    )
                )
            ),
            None,
        ):
            experts_read += of_expert
        return experts_read

    def _joined(self, names: Sequence[str]) -> list[list[StoredTensor]]:
        """Returns tensors that all have to be there."""
        return [[self._found[name] for name in names]] if all(name in self._found for name in names) else []

    def _read_tensor(self, name: str) -> np.ndarray:
        if (in_mxfp4 := Mxfp4Experts.of(name, self._found)) is not None:
            count, rows, columns = in_mxfp4.shape
            whole, numbers = [count, columns, rows], array_dtype(self.dtype)
            if self._is_unread:
                return np.empty(whole, numbers)
            return in_mxfp4.transposed(self._places.take(whole, numbers))
        parts, experts = self._parts(name), _EXPERTS.fullmatch(name)
        if not parts:
            raise ModelError(f"{self._folder} lacks {name}")
        dim = 0 if experts is None else -2
        shape = [*parts[0][0].shape]
        if len(parts[0]) > 1:
            shape[dim] = sum(part.shape[dim] for part in parts[0])
        is_stacked = experts is not None and len(shape) == 2
        whole = [len(parts), *shape] if is_stacked else shape
        is_float32 = any(part in name for part in self._in_float32)
        dtype = array_dtype("float32" if is_float32 else self.dtype)
        for part, first in ((part, first) for of_one in parts for part, first in zip(of_one, parts[0], strict=True)):
            across = [size for at, size in enumerate(part.shape) if at != dim % len(shape)]
            expected = [size for at, size in enumerate(shape) if at != dim % len(shape)]
            if part.shape != first.shape or across != expected:
                raise ModelError(f"the weights of {name} do not fit together: {part.name} is {part.shape}")
        if self._is_unread:
            return self._transposed(name, np.empty(whole, dtype))
        memory = self._places.take(whole, dtype)
        for place, of_one in zip(memory if is_stacked else [memory], parts, strict=True):
            ends = [*accumulate(part.shape[dim] for part in of_one)] if len(of_one) > 1 else []
            for part, to in zip(of_one, np.split(place, ends[:-1], axis=dim) if ends else [place], strict=True):
                _read_into(to, part)
        return self._transposed(name, memory)

    def _transposed(self, name: str, experts_read: np.ndarray) -> np.ndarray:
        """Returns a parameter in its own order: checkpoints of some types may have rows and columns exchanged."""
        if not type_of(self._config).either_order or (experts := _EXPERTS.fullmatch(name)) is None:
            return experts_read
        is_right = experts_read.shape[1 if experts[2] == "down_proj" else 2] == self._config.hidden_size
        return experts_read if is_right else np.ascontiguousarray(experts_read.swapaxes(1, 2))


def _is_copy(tensor: StoredTensor, other: StoredTensor) -> bool:
    """Returns whether two tensors are stored with the same bytes. Raises `ModelError` for a file that is cut short."""
    if (tensor.kind, tensor.shape) != (other.kind, other.shape):
        return False
    pieces = np.empty((2, min(_PIECE_BYTES, tensor.num_bytes)), np.uint8)
    for first in range(0, tensor.num_bytes, _PIECE_BYTES):
        content, expected = pieces[:, : tensor.num_bytes - first]
        tensor.read_into(content, first)
        other.read_into(expected, first)
        if not np.array_equal(content, expected):
            return False
    return True


def _read_into(to: np.ndarray, tensor: StoredTensor) -> None:
    """Reads a tensor into memory of its shape, and rounds its numbers to the memory's type. Raises `ModelError`."""
    if (stored := _TYPES.get(tensor.kind)) is None:
        raise ModelError(f"{tensor.file.name}: {tensor.name} is of the type {tensor.kind}, which is not read")
    rows = to if to.ndim else to.reshape(1)
    step = max(1, _PIECE_BYTES * len(rows) // max(1, tensor.num_bytes))
    for first in range(0, len(rows), step):
        place = rows[first : first + step]
        is_right = stored == dtype_of(to) and place.flags.c_contiguous
        content = place if is_right else np.empty(place.shape, array_dtype(stored))
        tensor.read_into(content, first * (tensor.num_bytes // len(rows)))
        if not is_right:
            place[...] = converted(content, dtype_of(to))
