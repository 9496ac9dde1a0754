"""The memory that a model needs, and whether it fits: a sum of its weights in their form, KV memory and a measured
constant, from headers alone. The start refuses by it, and `doctor`, `list`, `show` and the router tell it."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from diskprefix.errors import ModelError, SettingsError
from diskprefix.native import COLUMNS, ROWS
from diskprefix.prefixstore.kv.sizes import longest_within, num_pages
from diskprefix.printable import first_line
from diskprefix.runtime.files.checkpoint import (
    BLOCKS,
    MXFP4,
    SCALES,
    StoredTensor,
    number_type,
    read_config,
    require_plain_weights,
    stored_tensors,
    text_config,
)
from diskprefix.runtime.files.gguf.gguf_file import within_block
from diskprefix.runtime.files.gguf.gguf_header import FileTensor
from diskprefix.runtime.files.kinds import config_of_plan
from diskprefix.runtime.plan.draft_layer import further_layers, has_known_draft_layer
from diskprefix.runtime.plan.quants.quant_form import FILE_FORMS
from diskprefix.units import format_size, whole_size

if TYPE_CHECKING:
    from diskprefix.prefixstore.kv.layout import Layout
    from diskprefix.runtime.files.gguf.architecture import Architecture
    from diskprefix.runtime.files.gguf.gguf import GgufModel
    from diskprefix.runtime.plan.model_config import ModelConfig

ROOM_BYTES = 640 * 1024**2
"""Memory for the libraries and the computation of a step, as measured."""
_KV_SHARE = 0.5
"""The part of the memory left by the weights that KV may take without `--kv-memory`."""
_BUFFER_SHARE = 0.5
"""The part of what KV leaves that state may take while it waits to be written."""
_LEAST_BUFFER_BYTES = 64 * 1024**2
_TELLING = 0.02
"""The part of the weights from which a form gets its own row."""
_LEAST_CONTEXT = 2048
_BLOCK_SIZE = 256
_UNNAMED_POSITIONS = 1 << 17
"""The longest sequence of a model whose configuration names none."""
_FLOATING = re.compile(r"B?F\d")
ON_DISK = ".ngram_embedding."
"""A part of the names of tables that stay in their files."""
_EXPANSION = "attn_kv_b"
"""The matrix of latent attention that is multiplied from both sides: floating point."""


@dataclass(frozen=True)
class TokenState:
    """The largest size of the state of a sequence in bytes: `per_token` (`windowed` bytes of it count only for the last
    `window` tokens), and `fixed` for recurrent layers. `positions` is the longest sequence."""

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
        return dataclasses.replace(self, per_token=per_token, windowed=windowed)

    def num_bytes(self, num_tokens: int) -> int:
        """Returns the bytes of the pages of a sequence."""
        pages, in_window = num_pages(num_tokens, _BLOCK_SIZE), num_pages(num_tokens, _BLOCK_SIZE, self.window)
        return self.fixed + _BLOCK_SIZE * (self.per_token * pages + self.windowed * in_window)

    def tokens_in(self, num_bytes: int) -> int:
        """Returns the longest sequence that fits in a number of bytes."""
        return longest_within(num_bytes, self.num_bytes, self.positions, _BLOCK_SIZE)


class ModelNeeds(Struct, frozen=True, kw_only=True):
    """The needs of a model: `weights` has the bytes of its weights in memory by form. `takes_pictures`: it has an
    encoder of pictures."""

    name: str
    weights: Mapping[str, int] = msgspec.field(default_factory=dict)
    state: TokenState
    takes_pictures: bool = False

    def of(self, kv_type: str, context: int | None) -> ModelNeeds:
        """Returns the needs with keys and values of a `--kv-type`, for sequences of `--context` tokens."""
        state = self.state.of_type(kv_type)
        positions = min(state.positions, context or state.positions)
        return replace(self, state=dataclasses.replace(state, positions=positions))

    @property
    def weights_bytes(self) -> int:
        return sum(self.weights.values())


class Fit(Struct, frozen=True):
    """A model's needs and the memory that is free (`free_bytes`). `kv_limit` is `--kv-memory`, or follows from the free
    memory; `kv_bytes` is the part of it that must be free: without `--kv-memory`, room for one sequence."""

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
        fitting = f"{self.context:,} of {self.needs.state.positions:,} tokens"
        in_q8 = self.needs.state.of_type("q8").tokens_in(self.kv_limit)
        return (
            f"{fitting}, {in_q8:,} with --kv-type q8" if self.needs.state.in_q8[0] and in_q8 > self.context else fitting
        )

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
        """Returns the sum as a table: what, and its bytes. Forms of few weights, such as norms in bfloat16, are counted
        with the form of most."""
        weights = dict(self.needs.weights)
        most = max(weights, key=weights.__getitem__, default="")
        for form in [form for form, num_bytes in weights.items() if num_bytes < _TELLING * self.needs.weights_bytes]:
            weights[most] += weights.pop(form)
        needs = [(f"weights in {form}", num_bytes) for form, num_bytes in weights.items()]
        return [*needs, (f"KV memory for {self.context:,} tokens", self.kv_bytes), ("room to compute", ROOM_BYTES)]

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
        proposals, left = list[str](), self.free_bytes - (self.needed_bytes - self.kv_bytes)
        context = self.needs.state.tokens_in(left)
        if 0 < context < self.context:
            proposals.append(f"a context of {context:,} tokens would fit: --kv-memory {whole_size(left)}")
        for how, needs in others:
            if (other := fitted(needs, self.free_bytes)).is_enough:
                proposals.append(f"{how} would fit: {format_size(other.needed_bytes)}")
        return proposals or ["free some, or choose a smaller model or one with fewer bits"]


def fitted(needs: ModelNeeds, free_bytes: int, kv_memory: int | None = None) -> Fit:
    """Returns a model's needs with `kv_memory` bytes of KV memory, or else with KV's share of the memory that the model
    leaves free."""
    if kv_memory is not None:
        return Fit(needs, free_bytes, kv_memory, kv_memory)
    state, left = needs.state, free_bytes - needs.weights_bytes - ROOM_BYTES
    limit = max(state.num_bytes(min(_LEAST_CONTEXT, state.positions)), int(left * _KV_SHARE))
    return Fit(needs, free_bytes, limit, min(limit, state.num_bytes(state.positions)))


def needs_of_gguf(gguf: Path, weights: str, dtype_bytes: int = 2, *, uses_draft_layer: bool = True) -> ModelNeeds:
    """Returns the needs of a `.gguf` file with all its parts. `uses_draft_layer`: if it has one. Raises `ModelError` if
    it is damaged or not supported."""
    # It needs numpy, and the router counts memory without it.
    from diskprefix.runtime.files.gguf.gguf import GgufModel

    try:
        file_model = GgufModel.read(gguf, lambda _line: None, uses_draft_layer=uses_draft_layer)
    except OSError as error:
        raise ModelError(f"cannot read {gguf}: {first_line(error)}") from error
    return needs_of_file_model(file_model, gguf.name, weights, dtype_bytes)


def needs_of_file_model(model: GgufModel, name: str, weights: str, dtype_bytes: int) -> ModelNeeds:
    """Returns the needs of the model of a `.gguf` file."""
    return ModelNeeds(
        name=name,
        weights=_weights_of_gguf(model.tensors, weights, dtype_bytes, model.architecture),
        state=_state_by_layout(model.config, dtype_bytes, with_draft_layer=model.kind.has_draft_layer),
        takes_pictures=model.pictures is not None,
    )


def needs_of_folder(
    folder: Path, files: Sequence[Path], dtype: str, weights: str = "auto", *, uses_draft_layer: bool = True
) -> ModelNeeds:
    """Returns the needs of a model in a folder with these weight `files`. Raises `ModelError` if a header is
    damaged."""
    stored, config = stored_tensors(folder, files), read_config(folder)
    return needs_of_checkpoint(folder.name, stored, config, dtype, weights, uses_draft_layer=uses_draft_layer)


def needs_of_checkpoint(
    name: str,
    stored: Sequence[StoredTensor],
    config: Mapping[str, Any],
    dtype: str,
    weights: str = "auto",
    *,
    uses_draft_layer: bool = True,
) -> ModelNeeds:
    """Returns the needs of a checkpoint. `dtype` and `weights` are the options of these names. Raises `ModelError`
    for published quants that are not served."""
    require_plain_weights(name, config)
    dtype_bytes = 4 if number_type(dtype, config) == "float32" else 2
    text = text_config(config)
    num_layers = text.get("num_hidden_layers")
    further = further_layers((tensor.name for tensor in stored), num_layers) if isinstance(num_layers, int) else {}
    used = further if uses_draft_layer and has_known_draft_layer(text.get("model_type")) else {}
    kept = [tensor for tensor in stored if tensor.name not in further or used.get(tensor.name)]
    state = state_of(name, config, dtype_bytes, with_draft_layer=any(used.values()))
    # Steps read single rows of these.
    kept = [tensor for tensor in kept if ON_DISK not in tensor.name]
    served = _weights_of_checkpoint(kept, dtype_bytes, keeps_quants=weights == "auto" and dtype_bytes == 2)
    return ModelNeeds(name=name, weights=served, state=state, takes_pictures="vision_config" in config)


def state_of(name: str, config: Mapping[str, Any], dtype_bytes: int, *, with_draft_layer: bool = False) -> TokenState:
    """Returns the state of a sequence of the model `name` with this `config.json`. Of one that has no plan, a layer
    counts as one that sees all tokens unless the configuration says something else. Raises `ModelError` for options
    that do not fit together, and for a model that is not served."""
    if (plan_config := config_of_plan(name, config)) is not None:
        return _state_by_layout(plan_config, dtype_bytes, with_draft_layer=with_draft_layer)
    text = text_config(config)

    def size(*names: str) -> int:
        return int(next((text[name] for name in names if isinstance(text.get(name), int)), 0))

    heads, window = size("num_attention_heads", "n_head", "n_heads"), size("sliding_window")
    head_dim = size("head_dim") or size("hidden_size", "n_embd", "d_model") // max(heads, 1)
    row = 2 * (1 if text.get("multi_query") else size("num_key_value_heads") or heads) * head_dim
    if size("kv_lora_rank"):
        row = size("kv_lora_rank") + size("qk_rope_head_dim")
    num_layers = size("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    kinds = Counter(text.get("layer_types") or ["full_attention"] * num_layers)
    windowed = kinds["sliding_attention"] if window else 0
    full = sum(count for kind, count in kinds.items() if "attention" in kind and kind != "linear_attention") - windowed
    return TokenState(
        per_token=full * row * dtype_bytes,
        windowed=windowed * row * dtype_bytes,
        window=window if windowed else 0,
        positions=size("max_position_embeddings", "n_positions", "max_seq_len") or _UNNAMED_POSITIONS,
    )


def _state_by_layout(config: ModelConfig, dtype_bytes: int, *, with_draft_layer: bool) -> TokenState:
    from diskprefix.runtime.plan.families.memory_layout import layout_of

    def bytes_of(layout: Layout) -> tuple[int, int]:
        return layout.bytes_per_token, sum(group.bytes_per_token for group in layout.groups if group.window is not None)

    layout = layout_of(config, _floating(dtype_bytes), with_draft_layer=with_draft_layer)
    every, windowed = bytes_of(layout)
    in_q8 = (0, 0)
    # Latents of some sizes have no place there.
    with suppress(SettingsError):
        in_8_bits = layout_of(config, _floating(dtype_bytes), "q8", with_draft_layer=with_draft_layer)
        of_all, of_windows = bytes_of(in_8_bits)
        in_q8 = of_all - of_windows, of_windows
    text: Any = config.get_text_config()
    return TokenState(
        per_token=every - windowed,
        windowed=windowed,
        window=max((group.window or 0 for group in layout.groups), default=0),
        fixed=layout.state_bytes,
        positions=getattr(text, "max_position_embeddings", None) or _UNNAMED_POSITIONS,
        in_q8=in_q8,
    )


def _fills_blocks(shape: Sequence[int]) -> bool:
    # native.matrix.fills_blocks, which needs torch. Experts have a matrix each.
    return len(shape) >= 2 and shape[-2] % ROWS == 0 and shape[-1] % COLUMNS == 0


def _floating(dtype_bytes: int) -> str:
    return "bfloat16" if dtype_bytes == 2 else "float32"


def _weights_of_gguf(
    tensors: Sequence[FileTensor], weights: str, dtype_bytes: int, architecture: Architecture
) -> dict[str, int]:
    """Returns the bytes of tensors of a `.gguf` file by form. Quants that cannot stay become floating point, as do all
    of an encoder."""
    from diskprefix.runtime.files.gguf.architecture import OF_ENCODERS

    changed, served = {*architecture.changed, _EXPANSION}, Counter[str]()
    for tensor in tensors:
        is_kept = tensor.kind in FILE_FORMS and within_block(tensor.name) not in changed
        is_kept &= _fills_blocks(tensor.shape) and not tensor.name.startswith(OF_ENCODERS)
        if is_kept and weights != "native":
            served[tensor.kind] += int(tensor.num_elements * FILE_FORMS[tensor.kind].weight_bits / 8)
        else:
            served[_floating(dtype_bytes)] += tensor.num_elements * dtype_bytes
    return served


def _weights_of_checkpoint(tensors: Sequence[StoredTensor], dtype_bytes: int, *, keeps_quants: bool) -> dict[str, int]:
    """Returns the bytes of tensors of safetensors by form."""
    served = Counter[str]()
    for tensor in tensors:
        if tensor.kind == "U8" and tensor.name.endswith((BLOCKS, SCALES)):
            # The size of packed quants: blocks and their scales. A byte has two codes.
            if keeps_quants:
                served[MXFP4] += tensor.num_bytes
            elif tensor.name.endswith(BLOCKS):
                served[_floating(dtype_bytes)] += 2 * tensor.num_bytes * dtype_bytes
            continue
        if _FLOATING.match(tensor.kind):
            served[_floating(dtype_bytes)] += tensor.num_elements * dtype_bytes
        else:
            served[tensor.kind] += tensor.num_bytes
    return served
