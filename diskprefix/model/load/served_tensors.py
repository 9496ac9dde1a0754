"""The bytes of a model's weights in the forms in which they are served, told by the names and types in headers. Nothing
here needs torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

from diskprefix.model.load.gguf_header import FileTensor
from diskprefix.model.load.safetensors_header import StoredShape
from diskprefix.model.quants.quant_form import form_of
from diskprefix.native import COLUMNS, ROWS

QUANTISED = {"int8": "Q8_0", "int4": "Q4_1"}
"""Forms that are made of weights in floating point: what the matrices become. That of the logits becomes `_HEAD`."""
_HEAD, _FLOATING = "Q8_0", re.compile(r"B?F\d")
_KEPT_IN_FILE = re.compile(
    r"(output|token_embd|blk\.\d+\.(attn_(q|k|v|qkv|output|q_a|q_b|kv_a_mqa)|ffn_(gate|up|down|gate_up)(_exps|_shexp)?"
    r"|shortconv\.(in|out)_proj))\.weight"
)
"""Names of matrices of `.gguf` files that may be quants."""
_FLOATING_EXPERTS = {"llama4"}
"""Architectures of files whose experts are floating point: the model has them with rows and columns exchanged."""
_RECURRENT_IN_FILE = re.compile(r"(blk\.\d+\.)(ssm|time_mix)")
"""Names of tensors of recurrent layers. In their blocks `attn_qkv` belongs to the layer, and is not quantised."""
_MATRIX_BYTES, _EXPERTS_BYTES, _ROWS_BYTES = 10, 24, 3
"""Memory for converting an element of a matrix, of experts, which transformers stacks in float32, and of matrices of
which only rows are put into another order: measured."""

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
    form = form_of(kind)
    assert form is not None, "it is served as it is"
    return int(num_elements * form.weight_bits / 8)


def _floating(dtype_bytes: int) -> str:
    return "bfloat16" if dtype_bytes == 2 else "float32"


def quants_of_gguf(tensors: Sequence[FileTensor], weights: str, architecture: str) -> dict[str, str]:
    """Returns the type of quants in which tensors of a `.gguf` file are served in the form `weights`, by name. One that
    has the same type in the file stays there; all others are floating point."""
    recurrent = {match[1] for tensor in tensors if (match := _RECURRENT_IN_FILE.match(tensor.name))}
    found: dict[str, str] = {}
    for tensor in tensors if weights != "native" else ():
        is_matrix = _KEPT_IN_FILE.fullmatch(tensor.name) and _fills_blocks(tensor.shape)
        if "_exps." in tensor.name and architecture in _FLOATING_EXPERTS:
            continue
        if is_matrix and tensor.name.removesuffix("attn_qkv.weight") not in recurrent:
            own, anew = form_of(tensor.kind), QUANTISED.get(weights, "")
            if "_exps." in tensor.name or tensor.name == "token_embd.weight":
                anew = ""
            elif anew and tensor.name == "output.weight":
                anew = _HEAD
            is_own = own is not None and (anew != "Q4_1" or _quant_bytes(256, tensor.kind) <= _quant_bytes(256, anew))
            if kind := tensor.kind if is_own else anew:
                found[tensor.name] = kind
    return found


def of_gguf(
    tensors: Sequence[FileTensor], weights: str, dtype_bytes: int, architecture: str
) -> tuple[dict[str, int], int, int]:
    """Returns the bytes of a `.gguf` file's tensors in memory by form, those that its folder takes on the disk, and the
    memory of the conversion, which makes tensor after tensor."""
    quants, served, written, working = quants_of_gguf(tensors, weights, architecture), dict[str, int](), 0, 0
    is_tied = all(tensor.name != "output.weight" for tensor in tensors)
    for tensor in tensors:
        kind = quants.get(tensor.name)
        if kind is None and is_tied and weights in QUANTISED and tensor.name == "token_embd.weight":
            # The logits get a matrix of their own.
            served[_HEAD] = served.get(_HEAD, 0) + _quant_bytes(tensor.num_elements, _HEAD)
            written += _quant_bytes(tensor.num_elements, _HEAD)
        num_bytes = tensor.num_elements * dtype_bytes if kind is None else _quant_bytes(tensor.num_elements, kind)
        form = kind or _floating(dtype_bytes)
        served[form] = served.get(form, 0) + num_bytes
        if kind is None or kind != tensor.kind:
            written += tensor.num_elements * 2 if kind is None else num_bytes
        each = _EXPERTS_BYTES if len(tensor.shape) > 2 else _MATRIX_BYTES
        is_moved = weights != "native" and form_of(tensor.kind) is not None
        working = max(working, tensor.num_elements * (_ROWS_BYTES if is_moved else each))
    return served, written, working


def of_checkpoint(tensors: Sequence[StoredShape], weights: str, dtype_bytes: int) -> tuple[dict[str, int], int]:
    """Returns the bytes of the tensors of safetensors in memory by form, and the memory of quantising them, which is
    done one by one."""
    has_head = any(_LOGITS.search(tensor.name) for tensor in tensors)
    served, working = dict[str, int](), dict[str, int]()

    def serve(form: str, num_bytes: int) -> None:
        served[form] = served.get(form, 0) + num_bytes

    for tensor in tensors:
        is_head = bool(_LOGITS.search(tensor.name))
        is_matrix = _fills_blocks(tensor.shape) and bool(_FLOATING.match(tensor.kind))
        is_linear = is_head or (_LINEAR.search(tensor.name) and not _NOT_LINEAR.search(tensor.name))
        if weights in QUANTISED and is_matrix and is_linear:
            kind = _HEAD if is_head else QUANTISED[weights]
            serve(kind, _quant_bytes(tensor.num_elements, kind))
        elif _FLOATING.match(tensor.kind):
            serve(_floating(dtype_bytes), tensor.num_elements * dtype_bytes)
        else:
            serve(tensor.kind, tensor.num_bytes)
        if weights in QUANTISED and is_matrix and not has_head and _EMBEDDINGS.search(tensor.name):
            # The logits get a matrix of their own.
            serve(_HEAD, _quant_bytes(tensor.num_elements, _HEAD))
        step = _EXPERT.sub(".experts", tensor.name)
        each = _QUANTISING_EXPERTS_BYTES if ".experts" in step else _QUANTISING_BYTES
        working[step] = working.get(step, 0) + int(prod(tensor.shape) * each)
    return served, max(working.values(), default=0)
