"""Checkpoints that were published quantised: which are served in their own numbers, and how these are read.

A weight is (code - zero) × scale in all of them. Groups of 32 or more weights of a row share zero and scale. The
layouts are those of AutoGPTQ and GPTQModel (`qweight` packed along the columns, `qzeros` along the rows), AutoAWQ (both
along the rows, in an order of its own), compressed-tensors (`weight_packed`, `weight_scale`) and DeepSeek (`weight` in
FP8, `weight_scale_inv` by block). FP8 has no zeros, and its codes are float8 numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from diskprefix.errors import ModelError
from diskprefix.model.load.stored_tensors import StoredTensor
from diskprefix.model.quants.exact_quants import ExactQuants, ExpertQuants, exact_quants, halves_of
from diskprefix.model.quants.forms import Quants
from diskprefix.model.quants.quant_form import FLOAT8_FORMS
from diskprefix.native import COLUMNS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Parts: TypeAlias = Mapping[str, StoredTensor]
"""The tensors of one matrix, by the ends of their names."""
Source: TypeAlias = Callable[[], torch.Tensor | ExactQuants]
"""Reads a tensor of a checkpoint, perhaps later, or the quants that the checkpoint has for it."""
Block: TypeAlias = tuple[int, int]
"""Rows and columns that share a scale."""

_ANOTHER = "give another quant of the model: GPTQ, AWQ, compressed-tensors (int4, int8) or a .gguf file"
_AWQ_ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
"""Where AutoAWQ puts 8 neighbouring weights in a word of 32 bits."""
_PACKED_BITS = (4, 8)
_FLOAT8_BITS = 16
"""No form of integers with fewer bits has the numbers of float8."""
_MOST_BITS = {"int4": 4, "int8": 8}
"""Of the quants that a form keeps."""
_COMPRESSED = ("pack-quantized", "int-quantized", "naive-quantized", "mixed-precision")


@dataclass(frozen=True)
class MatrixLayout:
    """The tensors in which a checkpoint holds a matrix, or the matrices of all experts of a layer: their names begin
    with the same stem and end with `main` (that of the codes) or one of `others`."""

    main: str
    others: tuple[str, ...]
    bits: Callable[[Parts], int]
    """Returns the bits of a code, from the shapes alone. Raises `ValueError` with what is not served."""
    read: Callable[[Parts], ExactQuants | torch.Tensor]
    """Returns weights in bfloat16 where no operator has the form."""
    target: str = ".weight"
    """What follows the stem in the name of the matrix without quants."""


def _nibbles(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the codes, uint8, that the last dimension of int32 words holds from the lowest bits up."""
    content = packed.contiguous().view(torch.uint8)
    return content if bits == 8 else halves_of(content)


def _gptq_bits(parts: Parts) -> int:
    words, rows = parts[".qweight"].shape
    groups, zero_words = parts[".qzeros"].shape
    bits = _whole(32 * zero_words, rows)
    if bits not in _PACKED_BITS:
        raise ValueError(f"{bits or 'odd'} bits")
    return _checked(bits, 32 * words // bits, groups)


def _gptq(parts: Parts, *, is_second: bool) -> ExactQuants:
    """`is_second`: the format `gptq_v2`, which stores zeros as they are. The first stores them less one."""
    bits = _gptq_bits(parts)
    codes = _nibbles(parts[".qweight"].read().t(), bits)
    zeros = _nibbles(parts[".qzeros"].read(), bits).t()
    if not is_second:
        zeros = (zeros + 1) & ((1 << bits) - 1)
    return exact_quants(bits, codes, zeros, parts[".scales"].read().t())


def _awq_bits(parts: Parts) -> int:
    columns, words = parts[".qweight"].shape
    groups, rows = parts[".scales"].shape
    if 8 * words != rows:
        raise ValueError("a layout other than gemm")
    return _checked(4, columns, groups)


def _awq(parts: Parts) -> ExactQuants:
    codes, zeros = (_nibbles(parts[name].read(), 4) for name in (".qweight", ".qzeros"))
    codes, zeros = (part.view(len(part), -1, 8)[..., _AWQ_ORDER].flatten(1).t() for part in (codes, zeros))
    return exact_quants(4, codes, zeros, parts[".scales"].read().t())


def _packed_bits(parts: Parts) -> int:
    words, (_, columns) = parts[".weight_packed"].shape[1], parts[".weight_shape"].read().tolist()
    bits = _whole(32 * words, columns)
    if bits not in _PACKED_BITS:
        raise ValueError(f"{bits or 'odd'} bits")
    return _checked(bits, columns, parts[".weight_scale"].shape[1])


def _packed(parts: Parts) -> ExactQuants:
    bits = _packed_bits(parts)
    codes, scales = _nibbles(parts[".weight_packed"].read(), bits), parts[".weight_scale"].read()
    # Signed codes and zeros are stored as unsigned ones, both more by the same number.
    zeros = torch.full(scales.shape, 1 << (bits - 1), dtype=torch.uint8)
    if ".weight_zero_point" in parts:
        zeros = _nibbles(parts[".weight_zero_point"].read().t(), bits).t()[: len(codes)]
    return exact_quants(bits, codes, zeros, scales)


def _int8_bits(parts: Parts) -> int:
    return _checked(8, parts[".weight"].shape[1], parts[".weight_scale"].shape[-1] if _is_by_row(parts) else 1)


def _is_by_row(parts: Parts) -> bool:
    return len(parts[".weight_scale"].shape) == 2


def _int8(parts: Parts) -> ExactQuants:
    codes, scales = parts[".weight"].read(), parts[".weight_scale"].read()
    scales = scales if _is_by_row(parts) else scales.reshape(-1, 1).expand(len(codes), 1)
    zeros = parts[".weight_zero_point"].read() if ".weight_zero_point" in parts else torch.zeros(1, dtype=torch.int8)
    return exact_quants(8, codes, zeros.reshape(-1, zeros.shape[-1]).expand(scales.shape), scales)


def _checked(bits: int, columns: int, groups: int) -> int:
    """Returns the bits. Raises `ValueError` for groups that our operators do not have."""
    group = _whole(columns, groups)
    if group % COLUMNS or not group:
        raise ValueError(f"groups of {group or 'different numbers of'} weights")
    return bits


def _whole(number: int, divisor: int) -> int:
    """Returns the quotient, 0 if it is not whole."""
    return number // divisor if divisor and number % divisor == 0 else 0


def _float8_bits(parts: Parts, block: Block) -> int:
    _covered(parts, block)
    return _FLOAT8_BITS


def _float8(parts: Parts, block: Block) -> Quants | torch.Tensor:
    """Raises `ModelError` for codes that are no numbers: the kernels have none for them."""
    weight, (height, width) = parts[".weight"].read(), _covered(parts, block)
    if bool(((weight.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise ModelError(f"{parts['.weight'].name} has weights that are no numbers; fetch the model again")
    (rows, columns), group = weight.shape, gcd(width, weight.shape[1], FLOAT8_FORMS[-1].group)
    scales = _scales_of(parts).read().float().view(-(-rows // height), -1)
    of_groups = scales.repeat_interleave(width // group, dim=1)[:, : columns // group]
    found = Quants(weight, of_groups.repeat_interleave(height, dim=0)[:rows])
    return found if group % COLUMNS == 0 and weight.dtype is torch.float8_e4m3fn else found.dequantised()


def _scales_of(parts: Parts) -> StoredTensor:
    return parts.get(".weight_scale_inv") or parts[".weight_scale"]


def _covered(parts: Parts, block: Block) -> Block:
    """Returns the rows and columns that share a scale: those of a `block`, of a row, or all. Raises `ValueError` for
    scales that do not cover the matrix."""
    size, scales = parts[".weight"].shape, _scales_of(parts).shape
    counts = scales + (1, 1)[len(scales) :]
    sizes = zip(size, counts, block, strict=False)
    covered = [whole if count == 1 else 1 if count == whole else part for whole, count, part in sizes]
    if len(size) != 2 or counts != tuple(-(-whole // part) for whole, part in zip(size, covered, strict=True)):
        raise ValueError(f"scales of the shape {scales} for a matrix of the shape {size}")
    return covered[0], covered[1]


def _mxfp4_bits(parts: Parts) -> int:
    blocks, scales = parts["_blocks"].shape, parts["_scales"].shape
    if len(blocks) != 4 or blocks != (*scales, COLUMNS // 2):
        raise ValueError(f"blocks of the shape {blocks} and scales of the shape {scales}")
    return 4


def _mxfp4(parts: Parts) -> ExpertQuants:
    return ExpertQuants(parts["_blocks"].read(), parts["_scales"].read())


_GPTQ_PARTS, _AWQ_PARTS = (".qzeros", ".scales", ".g_idx"), (".qzeros", ".scales")
_PACKED_PARTS = (".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx")
_PACKED = MatrixLayout(".weight_packed", _PACKED_PARTS, _packed_bits, _packed)
_INT8 = MatrixLayout(".weight", (".weight_scale", ".weight_zero_point"), _int8_bits, _int8)
_MXFP4 = MatrixLayout("_blocks", ("_scales",), _mxfp4_bits, _mxfp4, target="")
_FP8_PARTS = (".weight_scale_inv", ".weight_scale")


@dataclass(frozen=True)
class PublishedWeights:
    """The quants of a model's checkpoint. With `is_float8` no operator of a CPU has the form of its matrices."""

    name: str
    layouts: tuple[MatrixLayout, ...]
    is_float8: bool = False

    def check(self, folder: Path, stored: Mapping[str, StoredTensor]) -> None:
        """Raises `ModelError` for a checkpoint of a folder that is not served. Reads the small tensors that say how
        columns are ordered."""
        matrices = self._matrices(stored)
        if not matrices:
            raise ModelError(
                f"{folder / 'config.json'} says {self.name}, but its weights are not; fetch the model again"
            )
        for layout, parts in matrices.values():
            try:
                layout.bits(parts)
                _require_order(parts)
            except ValueError as error:
                raise ModelError(f"{self.name} weights with {error} are not served; {_ANOTHER}") from error

    def experts(self, stored: Mapping[str, StoredTensor]) -> set[str]:
        """Returns the names of the matrices of single experts, which are put together before they are computed with."""
        return {name for name, (layout, _) in self._matrices(stored).items() if ".experts." in name and layout.target}

    def sources(self, stored: Mapping[str, StoredTensor], weights: str) -> dict[str, Source]:
        """Returns what reads each tensor, by its name without quants. Matrices are read as quants unless they have more
        bits than the form `weights`."""
        matrices, most_bits = self._matrices(stored), _MOST_BITS.get(weights, _FLOAT8_BITS)
        used = {part.name for _, parts in matrices.values() for part in parts.values()}
        found: dict[str, Source] = {name: one.unread for name, one in stored.items() if name not in used}
        for name, (layout, parts) in matrices.items():
            read = partial(layout.read, parts)
            found[name] = read if layout.bits(parts) <= most_bits else partial(_dequantised, read)
        return found

    def _matrices(self, stored: Mapping[str, StoredTensor]) -> dict[str, tuple[MatrixLayout, dict[str, StoredTensor]]]:
        found = {}
        for layout, name in product(self.layouts, stored):
            stem = name.removesuffix(layout.main)
            others = {part: stored[stem + part] for part in layout.others if stem + part in stored}
            if name.endswith(layout.main) and others:
                found[stem + layout.target] = layout, {layout.main: stored[name], **others}
        return found


def _dequantised(read: Source) -> torch.Tensor:
    found = read()
    return found if isinstance(found, torch.Tensor) else found.dequantised()


def _require_order(parts: Parts) -> None:
    """Raises `ValueError` if the groups of a matrix are not runs of neighbouring columns."""
    index = parts.get(".g_idx") or parts.get(".weight_g_idx")
    if index is None:
        return
    groups = index.read()
    size = int((groups == groups[0]).sum())
    if not torch.equal(groups, torch.arange(len(groups), dtype=groups.dtype) // size):
        raise ValueError("columns in another order (desc_act)")


def published_weights(config: PreTrainedConfig) -> PublishedWeights | None:
    """Returns how the checkpoint of a model is quantised; None if it is not. Raises `ModelError` for quants that are
    not read, with what to do."""
    return published_as(settings_of(config))


def published_as(found: Mapping[str, Any] | None) -> PublishedWeights | None:
    """Returns what `published_weights` does, for a `quantization_config`."""
    if not found:
        return None
    method = str(found.get("quant_method") or "an unknown method")
    if method not in _METHODS:
        raise ModelError(f"weights quantised with {method} are not served; {_ANOTHER}")
    return _METHODS[method](found)


def is_float8(found: Mapping[str, Any] | None) -> bool:
    """Returns whether a `quantization_config` says that weights are in FP8."""
    with suppress(ModelError):
        published = published_as(found)
        return published is not None and published.is_float8
    return False


def _of_gptq(found: Mapping[str, Any]) -> PublishedWeights:
    kind, bits = str(found.get("checkpoint_format") or "gptq"), found.get("bits")
    if kind not in ("gptq", "gptq_v2"):
        raise ModelError(f"GPTQ weights in the format {kind} are not served; {_ANOTHER}")
    if bits not in _PACKED_BITS or (bits == 8 and found.get("sym") is False):
        raise ModelError(f"GPTQ weights in {bits} bits{' with zeros' * (bits == 8)} are not served; {_ANOTHER}")
    read = partial(_gptq, is_second=kind == "gptq_v2")
    return PublishedWeights(f"GPTQ int{bits}", (MatrixLayout(".qweight", _GPTQ_PARTS, _gptq_bits, read),))


def _of_awq(found: Mapping[str, Any]) -> PublishedWeights:
    version, bits = str(found.get("version") or found.get("format") or "gemm").lower(), found.get("bits", 4)
    if version != "gemm" or bits != 4:
        raise ModelError(f"AWQ weights in {bits} bits ({version}) are not served; {_ANOTHER}")
    return PublishedWeights("AWQ int4", (MatrixLayout(".qweight", _AWQ_PARTS, _awq_bits, _awq),))


def _of_compressed(found: Mapping[str, Any]) -> PublishedWeights:
    kind = str(found.get("format") or "unknown")
    if found.get("transform_config"):
        raise ModelError(f"compressed-tensors weights that were rotated are not served; {_ANOTHER}")
    schemes = [scheme.get("weights") or {} for scheme in (found.get("config_groups") or {}).values()]
    types = {f"{scheme.get('type', 'int')}{scheme.get('num_bits')}" for scheme in schemes}
    if types == {"float8"} and kind in ("float-quantized", "naive-quantized"):
        return _of_fp8({"weight_block_size": next(iter(schemes)).get("block_structure")})
    if kind not in _COMPRESSED or not types <= {"int4", "int8"}:
        what = " and ".join(sorted(types))
        raise ModelError(f"compressed-tensors weights in {what} ({kind}) are not served; {_ANOTHER}")
    return PublishedWeights("compressed-tensors " + " and ".join(sorted(types)), (_PACKED, _INT8))


def _of_fp8(found: Mapping[str, Any]) -> PublishedWeights:
    height, width = found.get("weight_block_size") or (128, 128)
    bits, read = partial(_float8_bits, block=(height, width)), partial(_float8, block=(height, width))
    return PublishedWeights("FP8", (MatrixLayout(".weight", _FP8_PARTS, bits, read),), is_float8=True)


_METHODS: Mapping[str, Callable[[Mapping[str, Any]], PublishedWeights]] = {
    "gptq": _of_gptq,
    "awq": _of_awq,
    "compressed-tensors": _of_compressed,
    "fp8": _of_fp8,
    "fbgemm_fp8": _of_fp8,
    "mxfp4": lambda _: PublishedWeights("MXFP4", (_MXFP4,)),
}


def settings_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Returns the `quantization_config` of a configuration as a dictionary, None if it has none."""
    for part in (config, config.get_text_config(decoder=True)):
        found = getattr(part, "quantization_config", None)
        if found is not None:
            return dict(found if isinstance(found, dict) else found.to_dict())
    return None
