"""The tensors of a model as its files have them and as they are served: the form and the bytes of each, from headers
alone. Nothing here needs torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from diskprefix.model.load.gguf_file import FileTensor
from diskprefix.model.load.safetensors_header import StoredShape
from diskprefix.model.quants.gguf_quants import form_of
from diskprefix.native import COLUMNS, ROWS

OTHERS = "norms and others"
PARTS = ("embeddings", "attention", "recurrent layers", "feed forward", "experts", "logits", "media", OTHERS)
"""The parts of a model, in the order of tables."""

_NEW_BITS = {"int4": 5.0, "int8": 8.5}
"""Bits of a weight that is quantised here, with scale and zero."""
_FLOATING = re.compile(r"B?F\d")
_GGUF_MATRIX = re.compile(
    r"(output|blk\.\d+\.(attn_(q|k|v|qkv|output|q_a|q_b|kv_a_mqa)|ffn_(gate|up|down)(_exps|_shexp)?|shortconv\.(in|out)_proj))\.weight"
)
"""Names of matrices that are kept as quants, if their type has a form."""
_GGUF_RECURRENT = re.compile(r"(blk\.\d+\.)(ssm|time_mix)")
"""Names of tensors of recurrent layers. In their blocks `attn_qkv` belongs to the layer, and is not quantised."""
_PARTS_OF_NAMES = {
    "media": re.compile(r"visual|vision|audio|multi_modal|image"),
    "experts": re.compile(r"_exps\b|ffn_gate_inp|\.experts\.|\.router\b|mlp\.gate\.|block_sparse_moe\.gate"),
    "logits": re.compile(r"^output\.weight|lm_head|embed_out"),
    "embeddings": re.compile(r"token_embd|embed|\bwte\b|\bwpe\b|per_layer"),
    OTHERS: re.compile(r"norm|\bln_"),
    "recurrent layers": re.compile(r"ssm_|shortconv|time_mix|linear_attn|mamba|mixer|\.conv\b|delta|rwkv"),
    "attention": re.compile(r"attn|attention|\.att\."),
    "feed forward": re.compile(r"ffn|mlp|feed_forward|\.ff\.|shared_expert"),
}

_LINEAR = re.compile(
    r"\.(\w+_proj|qkv|q|k|v|o|query_key_value|dense\w*|fc1|fc2|fc_in|fc_out|w[123]|gate_up|linear\w*|Wqkv|out_proj|"
    r"q_[ab]_proj\w*|kv_a_proj\w*)(\.weight|)$|(lm_head|embed_out)\.weight$"
)
"""Names of matrices of checkpoints that are quantised. A name that is not known counts as one that is not."""
_NOT_LINEAR = re.compile(r"\bc_proj\b|kv_b_proj|router|shared_expert_gate|\.gate\.weight")
_RECURRENT = re.compile(r"^(.*?)\.(?:A_log|dt_bias|conv1d|rg_lru|time_decay)\b")
"""Names that a layer is known by whose projections are not quantised."""
_EXPERT = re.compile(r"\.experts\.\d+\..*")
"""The end of the name of a tensor that is merged with those of the other experts."""
QUANTISED = ("int8", "int4")
"""Forms that are made of weights in floating point."""


@dataclass(frozen=True, kw_only=True)
class ServedTensor:
    """A tensor that has the type `kind` and `stored_bytes` in a file, and `num_bytes` in the form `form` when it is
    served.

    `is_in_file`: it is read from the user's file at each start, and nothing is written beside that. `working_bytes` is
    the memory of making the form.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    stored_bytes: int
    form: str
    num_bytes: int
    part: str
    is_in_file: bool = False
    working_bytes: int = 0

    @property
    def bits(self) -> float:
        """Bits of a weight as it is served."""
        return self.num_bytes * 8 / max(prod(self.shape), 1)


def part_of(name: str) -> str:
    """Returns the part of a model, of `PARTS`, that a tensor belongs to."""
    return next((part for part, pattern in _PARTS_OF_NAMES.items() if pattern.search(name)), OTHERS)


def _fills_blocks(shape: Sequence[int]) -> bool:
    # native.matrix.fills_blocks, which needs torch. Experts have a matrix each.
    return len(shape) >= 2 and shape[-2] % ROWS == 0 and shape[-1] % COLUMNS == 0


# -- .gguf files -----------------------------------------------------------------------------------------------------

_MATRIX_BYTES, _EXPERTS_BYTES, _ROWS_BYTES = 10, 24, 3
"""Memory for converting an element of a matrix, of experts, which transformers stacks in float32, and of matrices of
which only rows are put into another order."""


def of_gguf(tensors: Sequence[FileTensor], weights: str, dtype_bytes: int = 2) -> list[ServedTensor]:
    """Returns the tensors of a `.gguf` file in the form `weights`, told by their names and types. A matrix that gives
    the logits in another form than the embeddings is an entry of its own."""
    recurrent = {match[1] for tensor in tensors if (match := _GGUF_RECURRENT.match(tensor.name))}
    has_head = any(tensor.name == "output.weight" for tensor in tensors)
    found = []
    for tensor in tensors:
        is_recurrent = any(tensor.name == f"{block}attn_qkv.weight" for block in recurrent)
        is_matrix = _fills_blocks(tensor.shape) and weights != "native" and not is_recurrent
        form, is_kept = "", False
        if is_matrix and _GGUF_MATRIX.fullmatch(tensor.name):
            form, is_kept = _gguf_form(tensor, weights)
        elif is_matrix and tensor.name == "token_embd.weight":
            is_kept = form_of(tensor.kind) is not None
            form = tensor.kind if is_kept else ""
        found.append(_of_file(tensor, form, dtype_bytes, part_of(tensor.name), weights, is_kept=is_kept))
        if is_matrix and tensor.name == "token_embd.weight" and not has_head:
            # The logits have this matrix too, in their own form or in the same one.
            of_head, is_same = _gguf_form(tensor, weights)
            if of_head and not is_same:
                found.append(_of_file(tensor, of_head, dtype_bytes, "logits", weights, is_kept=False))
    return found


def _of_file(
    tensor: FileTensor, form: str, dtype_bytes: int, part: str, weights: str, *, is_kept: bool
) -> ServedTensor:
    bits, known = 8.0 * dtype_bytes, form_of(tensor.kind)
    if is_kept and known is not None:
        bits = known.weight_bits
    elif form:
        bits = _NEW_BITS[form]
    each = _EXPERTS_BYTES if len(tensor.shape) > 2 else _MATRIX_BYTES
    if weights != "native" and known is not None:
        each = _ROWS_BYTES
    return ServedTensor(
        name=tensor.name,
        shape=tensor.shape,
        kind=tensor.kind,
        stored_bytes=prod(tensor.stored_shape) * tensor.dtype.itemsize,
        form=form or _plain(dtype_bytes),
        num_bytes=int(tensor.num_elements * bits / 8),
        part=part,
        is_in_file=is_kept,
        working_bytes=tensor.num_elements * each,
    )


def _gguf_form(tensor: FileTensor, weights: str) -> tuple[str, bool]:
    """Returns the form of a matrix, "" if it has no quants, and whether it is that of the file."""
    own = form_of(tensor.kind)
    if weights == "auto" or "_exps." in tensor.name:
        return (tensor.kind, True) if own is not None else ("", False)
    wanted = "int8" if tensor.name in ("output.weight", "token_embd.weight") else weights
    is_kept = own is not None and (wanted == "int8" or own.weight_bits <= _NEW_BITS["int4"])
    return (tensor.kind, True) if is_kept else (wanted, False)


def _plain(dtype_bytes: int) -> str:
    return "bfloat16" if dtype_bytes == 2 else f"{8 * dtype_bytes} bits"


# -- checkpoints -----------------------------------------------------------------------------------------------------

_QUANTISING_BYTES, _QUANTISING_EXPERTS_BYTES = 2.25, 5
"""Memory for quantising a weight, beside the weight: its quants, twice; and for one of the experts of a layer, which
are quantised as a whole."""


def of_checkpoint(tensors: Sequence[StoredShape], weights: str, dtype_bytes: int) -> list[ServedTensor]:
    """Returns the tensors of safetensors in the form `weights`, told by their names and types. A matrix that gives the
    logits in another form than the embeddings is an entry of its own."""
    recurrent = tuple(f"{match[1]}." for tensor in tensors if (match := _RECURRENT.match(tensor.name)))
    has_head = any(part_of(tensor.name) == "logits" for tensor in tensors)
    found: list[ServedTensor] = []
    for tensor in tensors:
        part, form = part_of(tensor.name), ""
        if weights in QUANTISED and _is_linear(tensor, part) and not tensor.name.startswith(recurrent or "\0"):
            form = "int8" if part == "logits" else weights
        found.append(_in_form(tensor, form, dtype_bytes, part, weights))
        if weights in QUANTISED and not has_head and part == "embeddings" and len(tensor.shape) == 2:
            found.append(_in_form(tensor, "int8", dtype_bytes, "logits", weights))
    return found


def _is_linear(tensor: StoredShape, part: str) -> bool:
    if part == "media" or not _FLOATING.match(tensor.kind) or not _fills_blocks(tensor.shape):
        return False
    return part == "experts" or bool(_LINEAR.search(tensor.name) and not _NOT_LINEAR.search(tensor.name))


def _in_form(tensor: StoredShape, form: str, dtype_bytes: int, part: str, weights: str) -> ServedTensor:
    is_floating = bool(_FLOATING.match(tensor.kind))
    bits = _NEW_BITS.get(form, 8.0 * dtype_bytes)
    each = _QUANTISING_EXPERTS_BYTES if part == "experts" else _QUANTISING_BYTES
    # It is cast, and put together with others, while it is read.
    read_bytes = tensor.num_elements * 2 if is_floating else tensor.num_bytes
    return ServedTensor(
        name=tensor.name,
        shape=tensor.shape,
        kind=tensor.kind,
        stored_bytes=tensor.num_bytes,
        form=form or (_plain(dtype_bytes) if is_floating else tensor.kind),
        num_bytes=int(tensor.num_elements * bits / 8) if is_floating else tensor.num_bytes,
        part=part,
        working_bytes=read_bytes + (int(tensor.num_elements * each) if weights in QUANTISED else 0),
    )


def made_peak(tensors: Sequence[ServedTensor]) -> int:
    """Returns the memory of making the forms of all tensors, which are made one by one. Experts of a layer are one."""
    steps: dict[str, int] = {}
    for tensor in tensors:
        name = _EXPERT.sub(".experts", tensor.name)
        steps[name] = steps.get(name, 0) + tensor.working_bytes
    return max(steps.values(), default=0)


def packed_tensor(name: str, shape: tuple[int, ...], kind: str, num_bytes: int) -> ServedTensor:
    """Returns a matrix of a `.gguf` file that is packed at each start."""
    return ServedTensor(
        name=name,
        shape=shape,
        kind=kind,
        stored_bytes=0,
        form=kind,
        num_bytes=num_bytes,
        part=part_of(f"{name}.weight"),
        is_in_file=True,
    )


def whole_file(name: str, num_bytes: int) -> ServedTensor:
    """Returns a file of which only the size is known, as if it were one tensor that is served as it is."""
    return ServedTensor(
        name=name,
        shape=(num_bytes,),
        kind="U8",
        stored_bytes=num_bytes,
        form="as in the file",
        num_bytes=num_bytes,
        part=OTHERS,
    )
