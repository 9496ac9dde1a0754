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
_WIDTHS = frozenset(
    f"{name}{ending}"
    for name in ("attention.key_length", "attention.value_length", "rope.dimension_count", "kda.head_dim")
    for ending in ("", "_mla", "_swa")
)
_MOST_WIDTH = 1 << 16
"""Of heads, for each of whose numbers something is computed before a tensor of another shape is refused."""
_NUMBERS_OF_BLOCKS = ("block_count", "nextn_predict_layers")
_TEXTS = (
    *(f"tokenizer.ggml.{name}" for name in ("model", "pre", "tokens", "merges")),
    *("tokenizer.chat_template", "tokenizer.chat_template.tool_use"),
)
_UNNEEDED = ("padding", "unknown")
"""Special tokens that no prompt and no reply has."""
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
        self.architecture = header.shown("general.architecture")
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
        """Returns a finite number, or `default`. An array of equal numbers, one for each block, is the number. Raises
        `ModelError` for anything else."""
        self._read.add(key)
        if key not in self:
            return default
        found = self._one_number(key, self._values[key])
        if not is_finite(found):
            raise self.fault(key, "a number")
        if key in _WIDTHS and found > _MOST_WIDTH:
            raise self.fault(key, "the width of any model's heads")
        if key.startswith("rope.freq_base") and found <= 0:
            raise self.fault(key, "above zero")
        return found

    def text(self, key: str, default: str = "") -> str:
        """Returns a text, or `default`. Raises `ModelError` for anything else."""
        self._read.add(key)
        found = self._values[key] if key in self else default
        if not isinstance(found, str):
            raise self.fault(key, "a text")
        return found

    def numbers(self, key: str) -> tuple[Any, ...]:
        """Returns the numbers of an array, () without one. Raises `ModelError` for anything else."""
        self._read.add(key)
        found = self._values[key] if key in self else ()
        if not isinstance(found, tuple) or not all(map(is_finite, found)):
            raise self.fault(key, "an array of numbers")
        return found

    def sections(self) -> list[int]:
        """Returns how many frequencies count the text, the rows and the columns of a picture. Raises `ModelError` for
        other sections."""
        key = "rope.dimension_sections"
        found = [section for section in self.numbers(key) if section]
        if key not in self:
            raise ModelError(f"the file lacks {self.architecture}.{key}")
        if len(found) != 3 or not all(isinstance(one, int) and one > 0 for one in found):
            raise self.fault(key, "three numbers")
        return found

    def mark_read(self, key: str) -> None:
        """Notes that a value was read, whatever it is."""
        self._read.add(key)

    def fault(self, key: str, wanted: str) -> ModelError:
        """Returns the error of a value that is not what is `wanted`."""
        return ModelError(f"the file's {self.architecture}.{key} is {shown(self._values[key])}, which is not {wanted}")

    def is_array(self, key: str) -> bool:
        """Returns whether a value is an array, of whatever."""
        return key in self and not isinstance(self._values[key], int | float | str | bytes)

    def varies(self, key: str) -> bool:
        """Returns whether a value is an array that is not one number for all blocks."""
        return self.is_array(key) and not is_finite(self._one_number(key, self._values[key]))

    def each_layer(self, key: str) -> tuple[Any, ...]:
        """Returns a number for each block. Raises `ModelError` if the file has another number of them, or anything
        else."""
        self._read.add(key)
        if key not in self:
            raise ModelError(f"the file lacks {self.architecture}.{key}")
        found, count = self._values[key], self.num_layers
        values = found if isinstance(found, tuple) else (found,) * count
        if not all(map(is_finite, values)):
            raise self.fault(key, "a number for each block")
        if len(values) not in (count, self("block_count")):
            raise ModelError(f"the file's {self.architecture}.{key} has {len(values)} values for {count} blocks")
        return values[:count]

    def _one_number(self, key: str, value: Any) -> Any:
        """Returns the number of an array that has it for each block, and other values as they are. Programs that prune
        or merge models write such arrays."""
        owner = "vision." if self.architecture == "clip" else ""
        blocks, predictors = (self._values.get(owner + name) for name in _NUMBERS_OF_BLOCKS)
        if not isinstance(value, tuple) or key.removeprefix(owner) in _NUMBERS_OF_BLOCKS or not isinstance(blocks, int):
            return value
        counts = {blocks, blocks - predictors} if isinstance(predictors, int) else {blocks}
        is_one = bool(value) and len(value) in counts and all(is_finite(one) and one == value[0] for one in value)
        return value[0] if is_one else value

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
        file does not say it. A value that is no number of a token is `default` for those that nothing needs
        (`unusable_tokens`). Raises `ModelError` for that of another."""
        tokens, key = self.header.arrays.get("tokenizer.ggml.tokens"), f"tokenizer.ggml.{kind}_token_id"
        if fault := self._fault_of_token(key):
            if kind not in _UNNEEDED:
                raise ModelError(fault)
            return default
        found = self.header.values.get(key, default)
        if found is None:
            return self._end_of_turn(tokens.content) if tokens is not None and kind == "eot" else None
        return int(found)

    def tokenizer_flag(self, name: str, *, default: bool) -> bool:
        """Returns an option of the tokenizer. Raises `ModelError` for a value that is neither true nor false."""
        key = f"tokenizer.ggml.{name}"
        found = self.header.values.get(key, default)
        if key in self.header.arrays or not isinstance(found, int) or found not in (0, 1):
            said = "an array" if key in self.header.arrays else shown(found)
            raise ModelError(f"the file's {key} is {said}, which is neither true nor false")
        return bool(found)

    def require_texts(self) -> None:
        """Raises `ModelError` if a text on which a prompt depends is not UTF-8."""
        for key in _TEXTS:
            array = self.header.arrays.get(key)
            if isinstance(value := self.header.values.get(key), bytes):
                raise ModelError(f"the file's {key} is {shown(value)}")
            if array is not None and array.undecoded is not None:
                # It says which element.
                _ = array.content

    def unusable_tokens(self) -> list[str]:
        """Returns what is wrong with the numbers of special tokens that nothing needs."""
        faults = (self._fault_of_token(f"tokenizer.ggml.{kind}_token_id") for kind in _UNNEEDED)
        return [fault for fault in faults if fault]

    def _fault_of_token(self, key: str) -> str:
        """Returns why a value is no number of a token, "" if it is one or is not there."""
        tokens, found = self.header.arrays.get("tokenizer.ggml.tokens"), self.header.values.get(key)
        if key in self.header.arrays:
            return f"the file's {key} is an array, which is not a number"
        is_number = isinstance(found, int) and not isinstance(found, bool)
        if found is None or (is_number and (tokens is None or 0 <= found < tokens.count)):
            return ""
        of_them = f", and it has {tokens.count} tokens" if tokens is not None else ", which is not a number"
        return f"the file's {key} is {shown(found)}{of_them}"

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
        values = {key: value for key, value in self._values.items() if key.startswith(SCALING)}
        return {key.removeprefix(SCALING): self._one_number(key, value) for key, value in values.items()}

    def require_read(self) -> None:
        """Raises `ModelError` with the name of a key that changes numbers and that nothing has read."""
        has_experts = bool(self._values.get("expert_count"))
        for key, found in self._values.items():
            value = self._one_number(key, found)
            is_described = key in _DESCRIPTIVE_LISTS if self.is_array(key) else key in _DESCRIPTIVE
            is_described |= key in _DESCRIPTIVE and not self.varies(key)
            is_known = key in self._read or is_described or key.startswith((*self._of_others, SCALING))
            if is_known or value in _NEUTRAL.get(key, ()) or (key.startswith("expert_") and not has_experts):
                continue
            raise ModelError(f"the file's {self.architecture}.{key} is {shown(value)}, and nothing here reads it")


def is_finite(value: Any) -> bool:
    """Returns whether a value is a number with which one can compute."""
    return isinstance(value, int | float) and math.isfinite(value)


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, bytes):
        return f"not UTF-8 ({value[:20]!r})"
    found = "an array" if value is None else repr(value)
    return found if len(found) <= 60 else f"{found[:57]}..."
