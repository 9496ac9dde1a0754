"""The metadata of a `.gguf` file below its architecture. What nobody read changes no number, or the file is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from diskprefix.errors import ModelError
from diskprefix.model.load.gguf_file import block_of, within_block
from diskprefix.model.load.gguf_header import FileTensor, GgufHeader

_HARMLESS = """
    context_length vocab_size tensor_data_layout pooling_type nextn_predict_layers attention.causal
    rope.dimension_count_swa use_parallel_residual feed_forward_length expert_count expert_feed_forward_length
    expert_shared_count expert_shared_feed_forward_length leading_dense_block_count attention.q_lora_rank
    attention.kv_lora_rank shortconv.l_cache ssm.conv_kernel ssm.inner_size ssm.state_size ssm.time_step_rank
    ssm.group_count
"""
"""Keys of numbers and strings that change no number, or that something else checks: a model with other sizes has
tensors of other names or shapes, which are refused."""
_DESCRIPTIVE = frozenset(_HARMLESS.split())
# All sections have the same position in text.
_DESCRIPTIVE_LISTS = frozenset({"classifier.output_labels", "rope.dimension_sections"})
_NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "router_logit_softcapping": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.temperature_scale": (0,),
    "attention.sliding_window": (0,),
    "attention.head_count": (0,),
    "ssm.dt_b_c_rms": (0,),
    "expert_weights_scale": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    **dict.fromkeys(("has_text_encoder", "has_llava_projector", "use_gelu", "use_silu"), (0,)),
}
"""Values that change nothing, of keys that nothing reads."""
_OF_ENCODERS = ("mm.", "vision.", "audio.")
"""What some files of text models say of the encoders of pictures and sound, which are other files."""
_OF_SOUND = ("audio.", "has_audio_encoder")
"""What files of encoders say of sound, which is not read."""
MOST_LAYERS = 512
"""Those of llama.cpp (`LLAMA_MAX_LAYERS`). To make a model of many more takes minutes, before any tensor is missed."""
SCALING = "rope.scaling."
"""The beginning of keys of the scaling of positions, which are checked where they are read."""
_COPIES = ("nextn.embed_tokens", "nextn.shared_head_head")
"""Tensors of a draft layer that the model has."""
ENDS_OF_TURN = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "[e~[", "<|endoftext|>", "<|end_of_text|>"),
    *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<｜end▁of▁sentence｜>", "<end_of_utterance>"),
)
"""Tokens that end a turn in each vocabulary that has them (llama.cpp's `src/llama-vocab.cpp`), likeliest first."""

_ENDS_OF_CALLS = "<|call|>", "<|calls|>"


class Metadata:
    """The values of a file, without the name of its architecture, and the names of its tensors. An array is a tuple.

    `tensors` are without those of the last blocks if these predict tokens after the next one. `draft_layer` are those
    of the first such block.
    """

    def __init__(self, header: GgufHeader, tensors: Sequence[FileTensor]) -> None:
        self.architecture = str(header.values.get("general.architecture"))
        self.header = header
        prefix = f"{self.architecture}."
        found = {**header.values, **header.lists}
        self._values = {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}
        self._read: set[str] = set()
        blocks, predictors = (self._values.get(key) for key in ("block_count", "nextn_predict_layers"))
        num_layers = math.inf
        if isinstance(blocks, int) and isinstance(predictors, int) and predictors > 0:
            num_layers = blocks - predictors
        self.tensors = {one.name: one for one in tensors if block_of(one.name) < num_layers}
        behind = [one for one in tensors if block_of(one.name) == num_layers]
        if not any(within_block(one.name).startswith("nextn.") for one in behind):
            # Some files count such blocks, and have no tensors of theirs.
            behind = []
        self.draft_layer = [one for one in behind if within_block(one.name) not in _COPIES]
        self._of_others = _OF_SOUND if self.architecture == "clip" else _OF_ENCODERS

    def __call__(self, key: str) -> Any:
        """Returns a value. Raises `ModelError` if it is not there."""
        found = self.get(key)
        if found is None:
            raise ModelError(f"the file lacks {self.architecture}.{key}")
        return found

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a finite number, or `default`. Raises `ModelError` for anything else."""
        found = self.of_any_kind(key, default)
        if key in self and not is_finite(found):
            raise ModelError(f"the file's {self.architecture}.{key} is {shown(found)}, which is not a number")
        return found

    def of_any_kind(self, key: str, default: Any = None) -> Any:
        """Returns a number, a string or a tuple, or `default`."""
        self._read.add(key)
        return self._values.get(key, default)

    def is_list(self, key: str) -> bool:
        return key in self and not isinstance(self._values[key], int | float | str)

    def each_layer(self, key: str) -> tuple[Any, ...]:
        """Returns a value for each block. Raises `ModelError` if the file has another number of them."""
        found, count = self.of_any_kind(key), self.num_layers
        if found is None:
            raise ModelError(f"the file lacks {self.architecture}.{key}")
        values = found if isinstance(found, tuple) else (found,) * count
        if len(values) < count:
            raise ModelError(f"the file's {self.architecture}.{key} has {len(values)} values for {count} blocks")
        return values[:count]

    @property
    def num_layers(self) -> int:
        """The blocks without those that predict further tokens. Raises `ModelError` if no model has so many."""
        blocks, predictors = self("block_count"), self.get("nextn_predict_layers", 0)
        if not 0 < blocks - predictors <= MOST_LAYERS:
            of_them = f", of which {predictors} predict further tokens" if predictors else ""
            raise ModelError(f"the file's {self.architecture}.block_count is {blocks}{of_them}: no model has so many")
        return int(blocks - predictors)

    def token(self, kind: str, default: int | None = None) -> int | None:
        """Returns the number of a special token, or `default`. The one that ends a turn is found by its text if the
        file does not say it. Raises `ModelError` for a value that is no number of a token."""
        tokens, key = self.header.arrays.get("tokenizer.ggml.tokens"), f"tokenizer.ggml.{kind}_token_id"
        found = self.header.values.get(key, default)
        if found is None:
            return self._end_of_turn(tokens.content) if tokens is not None and kind == "eot" else None
        if not isinstance(found, int) or (tokens is not None and not 0 <= found < tokens.count):
            of_them = f", and it has {tokens.count} tokens" if tokens is not None else ", which is not a number"
            raise ModelError(f"the file's {key} is {shown(found)}{of_them}")
        return found

    def _end_of_turn(self, tokens: Any) -> int | None:
        """Returns the likeliest new one. Messages within a reply end with `<|end|>` where calls have their own end."""
        wanted = {*ENDS_OF_TURN, *_ENDS_OF_CALLS}
        numbers = {token: number for number, token in enumerate(tokens) if token in wanted}
        if not numbers.keys().isdisjoint(_ENDS_OF_CALLS):
            numbers.pop("<|end|>", None)
        ends = (numbers[token] for token in ENDS_OF_TURN if token in numbers)
        return next((number for number in ends if number != self.token("eos")), None)

    def has(self, *endings: str) -> bool:
        """Returns whether a tensor ends so."""
        return any(name.endswith(endings) for name in self.tensors)

    def num_rows(self, tensor: str) -> int:
        """Returns the rows of a tensor, or 0 if it is not there."""
        return self.tensors[tensor].shape[0] if tensor in self.tensors else 0

    def scaling(self) -> dict[str, Any]:
        """Returns what the file says of the scaling of positions."""
        return {key.removeprefix(SCALING): value for key, value in self._values.items() if key.startswith(SCALING)}

    def require_read(self) -> None:
        """Raises `ModelError` with the name of a key that changes numbers and that nothing has read."""
        has_experts = bool(self._values.get("expert_count"))
        for key, value in self._values.items():
            descriptive = _DESCRIPTIVE_LISTS if self.is_list(key) else _DESCRIPTIVE
            is_known = key in self._read or key in descriptive or key.startswith((*self._of_others, SCALING))
            if is_known or value in _NEUTRAL.get(key, ()) or (key.startswith("expert_") and not has_experts):
                continue
            raise ModelError(f"the file's {self.architecture}.{key} is {shown(value)}, and nothing here reads it")


def is_finite(value: Any) -> bool:
    """Returns whether a value is a number with which one can compute."""
    return isinstance(value, int | float) and math.isfinite(value)


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    found = "an array" if value is None else repr(value)
    return found if len(found) <= 60 else f"{found[:57]}..."
