"""The bytes of a model's weights in the forms in which they are served, told by the names and types in headers. Nothing
here needs torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from diskprefix.model.load.checkpoint import StoredTensor
from diskprefix.model.load.gguf_file import within_block
from diskprefix.model.load.gguf_header import FileTensor
from diskprefix.model.quants.quant_form import FILE_FORMS
from diskprefix.native import COLUMNS, ROWS

if TYPE_CHECKING:
    from diskprefix.model.gguf.architecture import Architecture

_FLOATING = re.compile(r"B?F\d")
_EXPANSION = "attn_kv_b"
"""The matrix of latent attention that is multiplied from both sides: floating point."""


def _fills_blocks(shape: Sequence[int]) -> bool:
    # native.matrix.fills_blocks, which needs torch. Experts have a matrix each.
    return len(shape) >= 2 and shape[-2] % ROWS == 0 and shape[-1] % COLUMNS == 0


def _floating(dtype_bytes: int) -> str:
    return "bfloat16" if dtype_bytes == 2 else "float32"


def of_gguf(
    tensors: Sequence[FileTensor],
    weights: str,
    dtype_bytes: int,
    architecture: Architecture,
    encoder: Iterable[FileTensor] = (),
) -> dict[str, int]:
    """Returns the bytes of tensors of a `.gguf` file by form. Quants that cannot stay become floating point, as do all
    of an `encoder`."""
    changed, served = {*architecture.changed, _EXPANSION}, Counter[str]()
    for tensor in tensors:
        is_kept = tensor.kind in FILE_FORMS and within_block(tensor.name) not in changed
        if is_kept and _fills_blocks(tensor.shape) and weights != "native":
            served[tensor.kind] += int(tensor.num_elements * FILE_FORMS[tensor.kind].weight_bits / 8)
        else:
            served[_floating(dtype_bytes)] += tensor.num_elements * dtype_bytes
    if num_elements := sum(tensor.num_elements for tensor in encoder):
        served[_floating(dtype_bytes)] += num_elements * dtype_bytes
    return served


def of_checkpoint(tensors: Sequence[StoredTensor], dtype_bytes: int) -> dict[str, int]:
    """Returns the bytes of tensors of safetensors by form."""
    served = Counter[str]()
    for tensor in tensors:
        if _FLOATING.match(tensor.kind):
            served[_floating(dtype_bytes)] += tensor.num_elements * dtype_bytes
        else:
            served[tensor.kind] += tensor.num_bytes
    return served
