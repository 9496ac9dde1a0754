"""The weights of a folder of safetensors, whose tensors are called as published checkpoints call them.

They become those of transformers' parameters as its `conversion_mapping` says: other names, the experts of a mixture in
one tensor, several tensors behind each other. The experts of gpt-oss may be in MXFP4 (`load.mxfp4`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from diskprefix.errors import ModelError
from diskprefix.kv.numbers import array_dtype, converted, dtype_of
from diskprefix.model.families.slot_names import SlotNames, kept_in_float32
from diskprefix.model.load.checkpoint import StoredTensor
from diskprefix.model.load.draft_layer import further_layers
from diskprefix.model.load.memory import LargePages
from diskprefix.model.load.mxfp4 import Mxfp4Experts
from diskprefix.model.slots import HEAD
from diskprefix.model.weights import ExpertsForm, Quants, Weights

_TYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
"""The types of tensors that are read."""
_PIECE_BYTES = 1 << 24
"""What is read of a tensor at a time."""
_HEADS = ("lm_head", "embed_out", "output_projection")
"""Names of the matrix of the logits."""
_EXPERTS = re.compile(r"(.+\.experts)\.(gate_up_proj|up_proj|down_proj)")
_OF_EXPERT = {"gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2")}
"""The names of an expert's matrices."""
_MIXTRAL = ((r"\.block_sparse_moe\.", ".mlp."),)
_GRANITE = (
    (r"block_sparse_moe\.input_linear\.weight", "block_sparse_moe.experts.gate_up_proj"),
    (r"block_sparse_moe\.output_linear\.weight", "block_sparse_moe.experts.down_proj"),
    (r"block_sparse_moe\.router\.layer\.weight", "block_sparse_moe.router.weight"),
)
_RENAMED: Mapping[str, Sequence[tuple[str, str]]] = {
    **dict.fromkeys(("mixtral", "minimax_m2"), _MIXTRAL),
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoehybrid"), _GRANITE),
    "aria_text": (
        (r"mlp\.experts\.fc1\.weight", "mlp.experts.gate_up_proj"),
        (r"mlp\.experts\.fc2\.weight", "mlp.experts.down_proj"),
    ),
    "axk1": ((r"(?<!mlp\.)post_mlp_layernorm", "mlp.post_mlp_layernorm"),),
    "ernie4_5_moe": ((r"mlp\.moe_statics\.", "mlp.gate.moe_statics."),),
    "exaone_moe": ((r"mlp\.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),),
    "flint": ((r"self_attn\.softmax_offset", "self_attn.sinks"),),
    "hy_v3": (
        (r"mlp\.router\.gate\.weight", "mlp.gate.weight"),
        (r"mlp\.expert_bias", "mlp.e_score_correction_bias"),
        (r"mlp\.shared_mlp\.", "mlp.shared_experts."),
    ),
    "kimi_linear": (*_MIXTRAL, (r"self_attn\.(f_a_proj\.|f_b_proj\.|dt_bias|A_log)", r"self_attn.forget_gate.\1")),
    "kolibri1": (
        (r"moe\.router\.expert_bias", "mlp.gate.e_score_correction_bias"),
        ("post_attn_norm", "post_self_attn_layernorm"),
        ("post_ffn_norm", "post_mlp_layernorm"),
    ),
    "laguna": (
        (r"mlp\.experts\.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
        (r"mlp\.shared_expert\.", "mlp.shared_experts."),
    ),
    "mimo_v2_flash": ((r"self_attn\.attention_sink_bias", "self_attn.sinks"),),
    "olmo_hybrid": (
        ("attention_layer_norm", "input_layernorm"),
        ("feedforward_layer_norm", "post_attention_layernorm"),
    ),
    "phimoe": (*_MIXTRAL, (r"\.gate\.weight", ".router.weight")),
    "step3p5": (
        (r"\.moe\.gate\.weight", ".mlp.gate.weight"),
        (r"\.moe\.router_bias", ".mlp.gate.e_score_correction_bias"),
        (r"\.moe\.(gate|up|down)_proj\.weight", r".mlp.experts.\1_proj"),
        (r"\.share_expert\.", ".mlp.shared_experts."),
    ),
}
"""Patterns in the names of checkpoints, and what stands for them in those of parameters."""


class FolderWeights(Weights):
    """The weights of a decoder in a folder. `config` is that of the whole model. `is_unread`: memory has any numbers,
    nothing is read. `keeps_quants`: in bfloat16, the MXFP4 of gpt-oss stays as it is. Raises `ModelError` if there are
    no embeddings."""

    def __init__(
        self,
        tensors: Sequence[StoredTensor],
        config: Any,
        dtype: str,
        *,
        has_draft_layer: bool = False,
        is_unread: bool = False,
        keeps_quants: bool = True,
    ) -> None:
        super().__init__(dtype, has_draft_layer=has_draft_layer)
        self._keeps_quants, self._quants = keeps_quants, dict[str, Mapping[str, Quants]]()
        self._config, self._is_unread = config.get_text_config(decoder=True), is_unread
        self._is_tied = getattr(config, "tie_word_embeddings", False)  # The text's own says nothing.
        self._form = SlotNames.of(self._config).experts
        self._folder = tensors[0].file.parent if tensors else "the folder"
        self._in_float32 = kept_in_float32(config)
        self._places = LargePages()
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
        for pattern, own in _RENAMED.get(self._config.model_type, ()):
            name = re.sub(pattern, own, name)
        head, _, end = name.rpartition(".")
        return f"{HEAD}.{end}" if head.rpartition(".")[2] in _HEADS else name

    def has(self, name: str) -> bool:
        return bool(self._parts(name) or Mxfp4Experts.of(name, self._found)) or (
            name == f"{HEAD}.weight" and not self._is_tied
        )

    def finish(self) -> None:
        """All weights are in memory."""

    def expert_quants(self, name: str, form: ExpertsForm) -> Mapping[str, Quants]:
        if not self._keeps_quants:
            return {}
        if name not in self._quants:
            found = dict[str, Quants]()
            for one in (form.first, "down_proj"):
                if (stored := Mxfp4Experts.of(f"{name}.{one}", self._found)) is None:
                    return {}
                found |= stored.packed(one, form, self._places, is_unread=self._is_unread)
            self._quants[name] = found
        return self._quants[name]

    def named(self) -> Iterator[tuple[str, np.ndarray]]:
        yield from super().named()
        for name, parts in self._quants.items():
            yield from ((f"{name}.{part}", one.packed) for part, one in parts.items())

    def _parts(self, name: str) -> list[list[StoredTensor]]:
        """Returns the tensors of a parameter: those that lie behind each other of each of its experts. Returns nothing
        if there is no such parameter."""
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
        found, names = list[list[StoredTensor]](), _OF_EXPERT
        while of_expert := next(
            (
                one
                for number in (0, 1)
                if (one := self._joined([f"{experts[1]}.{len(found)}.{names[part][number]}.weight" for part in parts]))
            ),
            None,
        ):
            found += of_expert
        return found

    def _joined(self, names: Sequence[str]) -> list[list[StoredTensor]]:
        """Returns tensors that all have to be there."""
        return [[self._found[name] for name in names]] if all(name in self._found for name in names) else []

    def _read(self, name: str) -> np.ndarray:
        if (in_mxfp4 := Mxfp4Experts.of(name, self._found)) is not None:
            count, rows, columns = in_mxfp4.shape
            whole, numbers = [count, columns, rows], array_dtype(self.dtype)
            if self._is_unread:
                return np.empty(whole, numbers)
            return in_mxfp4.turned(self._places.take(whole, numbers))
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
            return self._turned(name, np.empty(whole, dtype))
        found = self._places.take(whole, dtype)
        for place, of_one in zip(found if is_stacked else [found], parts, strict=True):
            ends = [*accumulate(part.shape[dim] for part in of_one)] if len(of_one) > 1 else []
            for part, to in zip(of_one, np.split(place, ends[:-1], axis=dim) if ends else [place], strict=True):
                _read_into(to, part)
        return self._turned(name, found)

    def _turned(self, name: str, found: np.ndarray) -> np.ndarray:
        """Returns the experts of Qwen3-VL, whose checkpoints may have rows and columns exchanged."""
        if self._config.model_type != "qwen3_vl_moe_text" or (experts := _EXPERTS.fullmatch(name)) is None:
            return found
        is_right = found.shape[1 if experts[2] == "down_proj" else 2] == self._config.hidden_size
        return found if is_right else np.ascontiguousarray(found.swapaxes(1, 2))


def _is_copy(one: StoredTensor, other: StoredTensor) -> bool:
    """Returns whether two tensors are stored with the same bytes. Raises `ModelError` for a file that is cut short."""
    if (one.kind, one.shape) != (other.kind, other.shape):
        return False
    pieces = np.empty((2, min(_PIECE_BYTES, one.num_bytes)), np.uint8)
    for first in range(0, one.num_bytes, _PIECE_BYTES):
        found, expected = pieces[:, : one.num_bytes - first]
        one.read_into(found, first)
        other.read_into(expected, first)
        if not np.array_equal(found, expected):
            return False
    return True


def _read_into(to: np.ndarray, tensor: StoredTensor) -> None:
    """Reads a tensor into memory of its shape, and rounds its numbers to those of the memory. Raises `ModelError`."""
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
