"""The memory that a model needs, and whether it fits: a sum of its weights in their form, KV memory and a measured
constant, from headers alone. The start refuses by it, and `doctor`, `list`, `show` and the front tell it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diskprefix.errors import ModelError
from diskprefix.kv.sizes import EIGHTS, EIGHTS_BYTES, longest_within, num_pages
from diskprefix.model.load.checkpoint import (
    StoredTensor,
    read_config,
    require_plain_weights,
    stored_tensors,
    text_config,
)
from diskprefix.model.load.draft_layer import HAVE_DRAFT_LAYER, further_layers
from diskprefix.model.load.gguf_file import part_paths, read_tensors, within_block
from diskprefix.model.load.gguf_header import FileTensor
from diskprefix.model.load.projector import projector_beside
from diskprefix.model.quants.quant_form import FILE_FORMS
from diskprefix.native import COLUMNS, ROWS
from diskprefix.printable import first_line
from diskprefix.units import format_size, whole_size

if TYPE_CHECKING:
    from diskprefix.model.gguf.architecture import Architecture

ROOM_BYTES = 640 * 1024**2
"""Memory for the libraries, and for what is computed in a step: measured."""
_KV_SHARE = 0.5
"""The part of the memory that is free beside the weights that KV may take without `--kv-memory`."""
_BUFFER_SHARE = 0.5
"""The part of what KV leaves that state may take while it waits to be written."""
_LEAST_BUFFER_BYTES = 64 * 1024**2
_LEAST_CONTEXT = 2048
_BLOCK_SIZE = 256
_UNNAMED_POSITIONS = 1 << 17
"""The longest sequence of a model whose configuration names none."""
_WINDOWED = {"gpt-oss": 2, "gemma2": 2, "gemma3": 6}
"""Architectures with windows whose files do not say in which layers: each of so many layers sees all tokens."""
_LAYER = re.compile(r"(.*?)\b(?:blk|layers|h)\.(\d+)\.(.*)")
_OF_STATE = re.compile(r"((?:\w+\.)*)(?:attn_)?(k|v|kv_a)(?:_proj|_mqa|_proj_with_mqa)?\.weight")
_OF_RECURRENT = re.compile(r"((?:\w+\.)*?)(?:(?:\w+\.)?A_log|ssm_a|conv\.weight)")
_NO_TEXT = re.compile("vision|visual|audio|talker|mtp")
_FLOATING = re.compile(r"B?F\d")
_EXPANSION = "attn_kv_b"
"""The matrix of latent attention that is multiplied from both sides: floating point."""

_IN_FILE = {
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "hidden_size": "embedding_length",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "mamba_n_heads": "ssm.inner_size",
    "mamba_d_state": "ssm.state_size",
}
"""How a `.gguf` file calls what is in a `config.json`."""


@dataclass(frozen=True)
class TokenState:
    """The most bytes that the state of a sequence takes: `per_token`, of which `windowed` only for the last `window`
    tokens, and `fixed`, which is that of recurrent layers. `positions` is the longest sequence."""

    per_token: int
    windowed: int = 0
    window: int = 0
    fixed: int = 0
    positions: int = _UNNAMED_POSITIONS
    in_q8: tuple[int, int] = field(default=(0, 0), compare=False)
    """`per_token` and `windowed` with `--kv-type q8`."""

    def of_type(self, kv_type: str) -> TokenState:
        """Returns the state with keys and values of a `--kv-type`."""
        per_token, windowed = self.in_q8 if kv_type == "q8" else (self.per_token, self.windowed)
        return replace(self, per_token=per_token, windowed=windowed)

    def num_bytes(self, num_tokens: int) -> int:
        """Returns the bytes of the pages of a sequence."""
        pages, in_window = num_pages(num_tokens, _BLOCK_SIZE), num_pages(num_tokens, _BLOCK_SIZE, self.window)
        return self.fixed + _BLOCK_SIZE * (self.per_token * pages + self.windowed * in_window)

    def tokens_in(self, num_bytes: int) -> int:
        """Returns the longest sequence that fits in so many bytes."""
        return longest_within(num_bytes, self.num_bytes, self.positions, _BLOCK_SIZE)


@dataclass(frozen=True, kw_only=True)
class ModelNeeds:
    """The needs of a model: `weights` has the bytes of its weights in memory by form. `takes_pictures`: it has an
    encoder of pictures."""

    name: str
    weights: Mapping[str, int] = field(default_factory=dict)
    state: TokenState
    takes_pictures: bool = False

    def of_type(self, kv_type: str) -> ModelNeeds:
        """Returns the needs with keys and values of a `--kv-type`."""
        return replace(self, state=self.state.of_type(kv_type))

    @property
    def weights_bytes(self) -> int:
        return sum(self.weights.values())


@dataclass(frozen=True)
class Fit:
    """A model's needs beside the memory that is `free_bytes`. `kv_limit` is what `--kv-memory` says, or follows from
    what is free; `kv_bytes` is what of it must be there: without `--kv-memory` one sequence has to fit."""

    needs: ModelNeeds
    free_bytes: int
    kv_limit: int
    kv_bytes: int

    @property
    def context(self) -> int:
        """The tokens of the longest sequence that is served."""
        return self.needs.state.tokens_in(self.kv_limit)

    @property
    def context_line(self) -> str:
        """The context for people, and a longer one that `--kv-type q8` makes of the same memory."""
        found = f"{self.context:,} of {self.needs.state.positions:,} tokens"
        in_q8 = self.needs.state.of_type("q8").tokens_in(self.kv_limit)
        return f"{found}, {in_q8:,} with --kv-type q8" if self.needs.state.in_q8[0] and in_q8 > self.context else found

    @property
    def needed_bytes(self) -> int:
        return self.needs.weights_bytes + self.kv_bytes + ROOM_BYTES

    def buffer_bytes(self, asked: int) -> int:
        """Returns how much of the `asked` bytes state may take while it waits to be written."""
        left = self.free_bytes - self.needs.weights_bytes - ROOM_BYTES - self.kv_limit
        least = max(_LEAST_BUFFER_BYTES, self.needs.state.num_bytes(_BLOCK_SIZE))
        return min(asked, max(least, int(left * _BUFFER_SHARE)))

    @property
    def is_enough(self) -> bool:
        return self.needed_bytes <= self.free_bytes

    def rows(self) -> list[tuple[str, int]]:
        """Returns the sum as a table: what, and its bytes."""
        found = [(f"weights in {form}", num_bytes) for form, num_bytes in self.needs.weights.items()]
        return [*found, (f"KV memory for {self.context:,} tokens", self.kv_bytes), ("room to compute", ROOM_BYTES)]

    def lines(self) -> list[str]:
        """Returns the table as text."""
        rows = [*self.rows(), ("all together", self.needed_bytes), ("free", self.free_bytes)]
        return [f"{what:<34} {format_size(num_bytes):>10}" for what, num_bytes in rows]

    def refusal(self, others: Iterable[tuple[str, ModelNeeds]] = ()) -> str:
        """Returns one line with the sum, and which of the `others` would fit: forms, with how each is asked for."""
        parts = ", ".join(f"{what} {format_size(num_bytes)}" for what, num_bytes in self.rows())
        return (
            f"{self.needs.name} does not fit: about {format_size(self.needed_bytes)} of memory needed ({parts}), "
            f"{format_size(self.free_bytes)} available; {'; '.join(self.advice(others))}"
        )

    def advice(self, others: Iterable[tuple[str, ModelNeeds]] = ()) -> list[str]:
        """Returns what would fit. For `others` see `refusal`."""
        found, left = list[str](), self.free_bytes - (self.needed_bytes - self.kv_bytes)
        context = self.needs.state.tokens_in(left)
        if 0 < context < self.context:
            found.append(f"a context of {context:,} tokens would fit: --kv-memory {whole_size(left)}")
        for how, needs in others:
            if (other := fitted(needs, self.free_bytes)).is_enough:
                found.append(f"{how} would fit: {format_size(other.needed_bytes)}")
        return found or ["free some, or choose a smaller model or one with fewer bits"]


def fitted(needs: ModelNeeds, free_bytes: int, kv_memory: int | None = None) -> Fit:
    """Returns a model's needs with KV memory of `kv_memory` bytes, or else of the share of what it leaves free."""
    if kv_memory is not None:
        return Fit(needs, free_bytes, kv_memory, kv_memory)
    state, left = needs.state, free_bytes - needs.weights_bytes - ROOM_BYTES
    limit = max(state.num_bytes(min(_LEAST_CONTEXT, state.positions)), int(left * _KV_SHARE))
    return Fit(needs, free_bytes, limit, min(limit, state.num_bytes(state.positions)))


def needs_of_gguf(gguf: Path, weights: str, dtype_bytes: int = 2, *, uses_draft_layer: bool = True) -> ModelNeeds:
    """Returns what a `.gguf` file needs, in all its parts. `uses_draft_layer`: if it has one. Raises `ModelError` if it
    is damaged or not read."""
    # They need numpy.
    from diskprefix.model.gguf.known_families import architecture_of
    from diskprefix.model.gguf.metadata import Metadata

    try:
        metadata = Metadata(*read_tensors(part_paths(gguf)))
    except OSError as error:
        raise ModelError(f"cannot read {gguf}: {first_line(error)}") from error
    header, tensors = metadata.header, [*metadata.tensors.values()]
    kind, architecture = metadata.architecture, architecture_of(metadata)
    draft_layer = metadata.draft_layer if uses_draft_layer and architecture.model_type in HAVE_DRAFT_LAYER else []
    config = {name: header.values.get(f"{kind}.{key}") for name, key in _IN_FILE.items()}
    config |= {"model_type": kind, "num_hidden_layers": metadata.num_layers if "block_count" in metadata else None}
    windows = header.lists.get(f"{kind}.attention.sliding_window_pattern") or ()
    # The last layers may share the keys of others.
    own = windows[: len(windows) - header.values.get(f"{kind}.attention.shared_kv_layers", 0)]
    config["layer_types"] = ["sliding_attention" if has_window else "full_attention" for has_window in own]
    projector = projector_beside(gguf, metadata)
    encoder = [] if projector is None else projector.metadata.tensors.values()
    return ModelNeeds(
        name=gguf.name,
        weights=_weights_of_gguf([*tensors, *draft_layer], weights, dtype_bytes, architecture, encoder),
        state=state_of(tensors, config, dtype_bytes, draft_layer),
        takes_pictures=projector is not None,
    )


def needs_of_folder(folder: Path, files: Sequence[Path], dtype: str, *, uses_draft_layer: bool = True) -> ModelNeeds:
    """Returns what a model in a folder needs, with these weight `files`. Raises `ModelError` if a header is damaged."""
    stored, config = stored_tensors(folder, files), read_config(folder)
    return needs_of_checkpoint(folder.name, stored, config, dtype, uses_draft_layer=uses_draft_layer)


def needs_of_checkpoint(
    name: str, stored: Sequence[StoredTensor], config: Mapping[str, Any], dtype: str, *, uses_draft_layer: bool = True
) -> ModelNeeds:
    """Returns what a checkpoint needs. `dtype` is that of `--dtype`. Raises `ModelError` for published quants."""
    require_plain_weights(name, config)
    dtype_bytes = _dtype_bytes(dtype, config)
    text = text_config(config)
    num_layers = text.get("num_hidden_layers")
    further = further_layers((one.name for one in stored), num_layers) if isinstance(num_layers, int) else {}
    used = further if uses_draft_layer and text.get("model_type") in HAVE_DRAFT_LAYER else {}
    draft_layer = [replace(one, name=f"layers.{num_layers}.{used[one.name]}") for one in stored if used.get(one.name)]
    stored = [one for one in stored if one.name not in further]
    weights = _weights_of_checkpoint([*stored, *draft_layer], dtype_bytes)
    state = state_of(stored, config, dtype_bytes, draft_layer)
    return ModelNeeds(name=name, weights=weights, state=state, takes_pictures="vision_config" in config)


def _dtype_bytes(dtype: str, config: Mapping[str, Any]) -> int:
    """Returns the bytes of a number in the type that `--dtype` asks for, or that a configuration names."""
    parts = (config, text_config(config))
    named = next((str(part.get(key)) for part in parts for key in ("dtype", "torch_dtype") if part.get(key)), "float32")
    return 4 if (named if dtype == "auto" else dtype) == "float32" else 2


def state_of(
    tensors: Sequence[StoredTensor | FileTensor],
    config: Mapping[str, Any],
    dtype_bytes: int,
    draft_layer: Sequence[StoredTensor | FileTensor] = (),
) -> TokenState:
    """Returns the state of a sequence, from the matrices that make keys and values, or else from the `config.json`. A
    layer counts as one that sees all tokens, unless the configuration or `_WINDOWED` says that it has a window. The
    `draft_layer` is the one behind the last, and keeps the decoder's rows beside its own state."""
    text = text_config(config)

    def size(*names: str) -> int:
        return int(next((text[name] for name in names if isinstance(text.get(name), int)), 0))

    rows, recurrent = _rows_of([*tensors, *draft_layer])
    heads, window = size("num_attention_heads", "n_head", "n_heads"), size("sliding_window")
    head_dim = size("head_dim") or size("hidden_size", "n_embd", "d_model") // max(heads, 1)
    row = 2 * (1 if text.get("multi_query") else size("num_key_value_heads") or heads) * head_dim
    parts = [head_dim or EIGHTS]
    if size("kv_lora_rank"):
        parts = [size("kv_lora_rank"), size("qk_rope_head_dim")]
        row = sum(parts)
    of_items = EIGHTS_BYTES * sum(-(-part // EIGHTS) for part in parts)
    num_layers = size("num_hidden_layers", "n_layer", "num_layers", "n_layers") or max(rows, default=-1) + 1
    full_every = _WINDOWED.get(str(text.get("model_type")).removesuffix("_text").replace("_", "-"), 1)
    of_architecture = [
        "sliding_attention" if (layer + 1) % full_every else "full_attention" for layer in range(num_layers)
    ]
    of_draft = HAVE_DRAFT_LAYER.get(str(text.get("model_type")), {}).get("layer_types", "full_attention")
    kinds = [*(text.get("layer_types") or of_architecture), of_draft]
    windowed, full, hidden = 0, 0, size("hidden_size") * dtype_bytes if draft_layer else 0
    for layer, kind in enumerate(kinds[: num_layers + bool(draft_layer)]):
        is_recurrent = kind == "linear_attention" or (layer in recurrent and layer not in rows)
        num_rows = rows.get(layer, row) if not is_recurrent and ("attention" in kind or "hybrid" in kind) else 0
        if window and kind == "sliding_attention":
            windowed += num_rows
        else:
            full += num_rows
    inner = size("linear_num_value_heads") * size("linear_value_head_dim") * size("linear_key_head_dim")
    inner = inner or size("mamba_n_heads", "mamba_num_heads") * (size("mamba_d_head", "mamba_head_dim") or 1) * (
        size("mamba_d_state", "ssm_state_size") or 1
    )
    return TokenState(
        per_token=full * dtype_bytes + hidden,
        windowed=windowed * dtype_bytes,
        window=window if windowed else 0,
        fixed=4 * inner * len(recurrent),
        positions=size("max_position_embeddings", "n_positions", "max_seq_len") or _UNNAMED_POSITIONS,
        in_q8=(full * of_items // sum(parts) + hidden, windowed * of_items // sum(parts)),
    )


def _rows_of(tensors: Sequence[StoredTensor | FileTensor]) -> tuple[dict[int, int], set[int]]:
    """Returns how many numbers a token has in the keys and values of a layer, by the layer, as far as these have
    matrices of their own; and the layers with a state that does not grow."""
    found, recurrent = defaultdict[tuple[int, str], dict[str, int]](dict), set[tuple[int, str]]()
    for tensor in tensors:
        if (match := _LAYER.match(tensor.name)) is None or _NO_TEXT.search(match[1]):
            continue
        if part := _OF_STATE.fullmatch(match[3]):
            found[int(match[2]), part[1]][part[2]] = tensor.shape[0]
        elif part := _OF_RECURRENT.fullmatch(match[3]):
            recurrent.add((int(match[2]), part[1]))
    # The keys of recurrent layers are not kept. Values without a matrix are the keys.
    rows = {
        layer: one.get("kv_a") or 2 * sum(one.values()) // len(one)
        for (layer, module), one in found.items()
        if not module or (layer, module) not in recurrent
    }
    return rows, {layer for layer, _ in recurrent}


def _fills_blocks(shape: Sequence[int]) -> bool:
    # native.matrix.fills_blocks, which needs torch. Experts have a matrix each.
    return len(shape) >= 2 and shape[-2] % ROWS == 0 and shape[-1] % COLUMNS == 0


def _floating(dtype_bytes: int) -> str:
    return "bfloat16" if dtype_bytes == 2 else "float32"


def _weights_of_gguf(
    tensors: Sequence[FileTensor],
    weights: str,
    dtype_bytes: int,
    architecture: Architecture,
    encoder: Iterable[FileTensor],
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


def _weights_of_checkpoint(tensors: Sequence[StoredTensor], dtype_bytes: int) -> dict[str, int]:
    """Returns the bytes of tensors of safetensors by form."""
    served = Counter[str]()
    for tensor in tensors:
        if _FLOATING.match(tensor.kind):
            served[_floating(dtype_bytes)] += tensor.num_elements * dtype_bytes
        else:
            served[tensor.kind] += tensor.num_bytes
    return served
