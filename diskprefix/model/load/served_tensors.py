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

QUANTISED = {"int8": "Q8_0", "int4": "Q4_1"}
"""Forms that are made of weights in floating point: what the matrices become. That of the logits becomes `_HEAD`."""
_HEAD, _FLOATING = "Q8_0", re.compile(r"B?F\d")
_EXPANSION = "attn_kv_b"
"""The matrix of latent attention that is multiplied from both sides: floating point."""

_LINEAR = re.compile(
    r"\.(\w+_proj|qkv|q|k|v|o|query_key_value|dense\w*|fc1|fc2|fc_in|fc_out|w[123]|gate_up|linear\w*|Wqkv|out_proj|"
    r"q_[ab]_proj\w*|kv_a_proj\w*)(\.weight|)$|\.experts\."
)
"""Names of matrices of checkpoints that are quantised. A name that is not known counts as one that is not."""
_NOT_LINEAR = re.compile(
    r"\bc_proj\b|kv_b_proj|router|shared_expert_gate|\.gate\.weight|visual|vision|audio|linear_attn|mamba|mixer|\bconv"
)
_EMBEDDINGS, _LOGITS = re.compile(r"embed_tokens|\bwte\b|word_embeddings|embed_in"), re.compile(r"lm_head|embed_out")
_EXPERT = re.compile(r"\.experts\.\d+\..*")
"""The end of the name of a tensor that is merged with those of the other experts of its layer."""
_QUANTISING_BYTES, _QUANTISING_EXPERTS_BYTES = 4.25, 7
"""Memory for quantising a weight, and one of the experts of a layer, which are quantised as a whole: measured."""


def _fills_blocks(shape: Sequence[int]) -> bool:
    # native.matrix.fills_blocks, which needs torch. Experts have a matrix each.
    return len(shape) >= 2 and shape[-2] % ROWS == 0 and shape[-1] % COLUMNS == 0


def _quant_bytes(num_elements: int, kind: str) -> int:
    return int(num_elements * FILE_FORMS[kind].weight_bits / 8)


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
            served[tensor.kind] += _quant_bytes(tensor.num_elements, tensor.kind)
        else:
            served[_floating(dtype_bytes)] += tensor.num_elements * dtype_bytes
    if num_elements := sum(tensor.num_elements for tensor in encoder):
        served[_floating(dtype_bytes)] += num_elements * dtype_bytes
    return served


def of_checkpoint(tensors: Sequence[StoredTensor], weights: str, dtype_bytes: int) -> tuple[dict[str, int], int]:
    """Returns the bytes of tensors of safetensors by form, and the most memory of quantising one."""
    has_head = any(_LOGITS.search(tensor.name) for tensor in tensors)
    served, working = Counter[str](), Counter[str]()
    for tensor in tensors:
        is_head, is_floating = bool(_LOGITS.search(tensor.name)), bool(_FLOATING.match(tensor.kind))
        is_linear = is_head or (_LINEAR.search(tensor.name) and not _NOT_LINEAR.search(tensor.name))
        is_matrix = weights in QUANTISED and is_floating and _fills_blocks(tensor.shape)
        if is_matrix and is_linear:
            kind = _HEAD if is_head else QUANTISED[weights]
            served[kind] += _quant_bytes(tensor.num_elements, kind)
        elif is_floating:
            served[_floating(dtype_bytes)] += tensor.num_elements * dtype_bytes
        else:
            served[tensor.kind] += tensor.num_bytes
        if is_matrix and not has_head and _EMBEDDINGS.search(tensor.name):
            # The logits get a matrix of their own.
            served[_HEAD] += _quant_bytes(tensor.num_elements, _HEAD)
        step = _EXPERT.sub(".experts", tensor.name)
        each = _QUANTISING_EXPERTS_BYTES if ".experts" in step else _QUANTISING_BYTES
        working[step] += int(tensor.num_elements * each)
    return served, max(working.values(), default=0)
