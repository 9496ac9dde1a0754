"""The metadata of a `.gguf` file within its architecture. A file with an unread key that changes numbers is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from diskprefix.errors import ModelError
from diskprefix.runtime.files.gguf.gguf_file import block_of, within_block
from diskprefix.runtime.files.gguf.gguf_header import FLOAT32, FileArray, FileTensor, GgufHeader
from diskprefix.runtime.plan.reply_tokens import ReplyTokens

_HARMLESS = """
    context_length vocab_size tensor_data_layout pooling_type nextn_predict_layers attention.causal
    rope.dimension_count_swa use_parallel_residual feed_forward_length expert_count expert_feed_forward_length
    expert_shared_count expert_shared_feed_forward_length leading_dense_block_count attention.q_lora_rank
    attention.kv_lora_rank shortconv.l_cache ssm.conv_kernel ssm.inner_size ssm.state_size ssm.time_step_rank
    ssm.group_count
"""
"""Keys of numbers and strings that change no number, or whose value is checked indirectly: a model with other sizes has
tensors of other names or shapes, which are refused."""
_DESCRIPTIVE = frozenset(_HARMLESS.split())
# In text, all sections have the same position.
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
"""Unread keys, and the values with which they change nothing."""
_OF_ENCODERS = ("mm.", "vision.", "audio.")
"""Prefixes of keys in text files about encoders, which are in other files."""
_OF_SOUND = ("audio.", "has_audio_encoder")
"""Prefixes of keys in encoders' files about sound, which is not read."""
_WIDTHS = frozenset(
    f"{name}{ending}"
    for name in ("attention.key_length", "attention.value_length", "rope.dimension_count", "kda.head_dim")
    for ending in ("", "_mla", "_swa")
)
_MOST_WIDTH = 1 << 16
"""The largest width of heads. Without it, a file could cause long work before its tensors are refused."""
_NUMBERS_OF_BLOCKS = ("block_count", "nextn_predict_layers")
_TEXTS = (
    *(f"tokenizer.ggml.{name}" for name in ("model", "pre", "tokens", "merges")),
    *("tokenizer.chat_template", "tokenizer.chat_template.tool_use"),
)
_SUPPRESSED = "tokenizer.ggml.suppress_tokens"
_UNNEEDED = ("padding", "unknown")
"""Special tokens that occur in no prompt and no reply."""
MOST_LAYERS = 512
"""The limit of llama.cpp (`LLAMA_MAX_LAYERS`). To make a model of many more layers takes minutes."""
SCALING = "rope.scaling."
"""The prefix of keys about the scaling of rotary embeddings, which are checked where they are read."""
_COPIES = ("nextn.embed_tokens", "nextn.shared_head_head")
"""Tensors of a draft layer that repeat tensors of the model."""
ENDS_OF_TURN = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "[e~[", "<|endoftext|>", "<|end_of_text|>"),
    *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<｜end▁of▁sentence｜>", "<end_of_utterance>"),
)
"""Tokens that end a turn in each vocabulary that has them (llama.cpp's `src/llama-vocab.cpp`), likeliest first."""

_ENDS_OF_CALLS = "<|call|>", "<|calls|>"


class Metadata:
    """The values of a file, without the name of its architecture, and the names of its tensors. An array is a tuple.

    `tensors` excludes the last blocks if they are draft layers. `draft_layer` has the tensors of the first draft layer.
    """

    def __init__(self, header: GgufHeader, tensors: Sequence[FileTensor]) -> None:
        self.architecture = header.shown("general.architecture")
        self.header = header
        prefix = f"{self.architecture}."
        values = {**header.values, **header.lists}
        self._values = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
        self._read: set[str] = set()
        blocks, predictors = (self._values.get(key) for key in ("block_count", "nextn_predict_layers"))
        num_layers = math.inf
        if isinstance(blocks, int) and isinstance(predictors, int) and predictors > 0:
            num_layers = blocks - predictors
        self.tensors = {tensor.name: tensor for tensor in tensors if block_of(tensor.name) < num_layers}
        draft_tensors = [tensor for tensor in tensors if block_of(tensor.name) == num_layers]
        if not any(within_block(tensor.name).startswith("nextn.") for tensor in draft_tensors):
            # Some files count draft layers and do not contain their tensors.
            draft_tensors = []
        self.draft_layer = [tensor for tensor in draft_tensors if within_block(tensor.name) not in _COPIES]
        self._of_others = _OF_SOUND if self.architecture == "clip" else _OF_ENCODERS

    def __call__(self, key: str) -> Any:
        """Returns a value. Raises `ModelError` if it is missing."""
        value = self.get(key)
        if value is None:
            raise ModelError(f"the file lacks {self.architecture}.{key}")
        return value

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a finite number, or `default`. An array of equal numbers, one for each block, is the number. Raises
        `ModelError` for anything else."""
        self._read.add(key)
        if key not in self:
            return default
        value = self._one_number(key, self._values[key])
        if not is_finite(value):
            raise self.fault(key, "a number")
        if key in _WIDTHS and value > _MOST_WIDTH:
            raise self.fault(key, "the width of any model's heads")
        if key.startswith("rope.freq_base") and value <= 0:
            raise self.fault(key, "above zero")
        return value

    def text(self, key: str, default: str = "") -> str:
        """Returns a text, or `default`. Raises `ModelError` for anything else."""
        self._read.add(key)
        value = self._values[key] if key in self else default
        if not isinstance(value, str):
            raise self.fault(key, "a text")
        return value

    def numbers(self, key: str) -> tuple[Any, ...]:
        """Returns the numbers of an array, () without one. Raises `ModelError` for anything else."""
        self._read.add(key)
        value = self._values[key] if key in self else ()
        if not isinstance(value, tuple) or not all(map(is_finite, value)):
            raise self.fault(key, "an array of numbers")
        return value

    def sections(self) -> list[int]:
        """Returns the numbers of frequencies for the positions in text, and in rows and columns of a picture. Raises
        `ModelError` for other sections."""
        key = "rope.dimension_sections"
        sections = [section for section in self.numbers(key) if section]
        if key not in self:
            raise ModelError(f"the file lacks {self.architecture}.{key}")
        if len(sections) != 3 or not all(isinstance(section, int) and section > 0 for section in sections):
            raise self.fault(key, "three numbers")
        return sections

    def mark_read(self, key: str) -> None:
        """Marks a key as read."""
        self._read.add(key)

    def fault(self, key: str, wanted: str) -> ModelError:
        """Returns the error of a value that is not what is `wanted`."""
        return ModelError(f"the file's {self.architecture}.{key} is {shown(self._values[key])}, which is not {wanted}")

    def is_array(self, key: str) -> bool:
        """Returns whether a value is an array."""
        return key in self and not isinstance(self._values[key], int | float | str | bytes)

    def varies(self, key: str) -> bool:
        """Returns whether a value is an array with different numbers."""
        return self.is_array(key) and not is_finite(self._one_number(key, self._values[key]))

    def each_layer(self, key: str, *others: float) -> tuple[Any, ...]:
        """Returns a number for each block: a finite one, or one of `others`. Raises `ModelError` if the file has
        numbers for more or fewer blocks, or anything else."""
        self._read.add(key)
        if key not in self:
            raise ModelError(f"the file lacks {self.architecture}.{key}")
        value, count = self._values[key], self.num_layers
        values = value if isinstance(value, tuple) else (value,) * count
        if not all(is_finite(number) or number in others for number in values):
            raise self.fault(key, "a number for each block")
        if len(values) not in (count, self("block_count")):
            raise ModelError(f"the file's {self.architecture}.{key} has {len(values)} values for {count} blocks")
        return values[:count]

    def tensors_of_array(self, key: str, name: str) -> list[FileTensor]:
        """Returns a tensor `name` of one number for each block, of an array that has them. Raises `ModelError` without
        such an array."""
        array, values, count = self.header.arrays.get(key), self.header.lists.get(key) or (), self.num_layers
        if array is None or array.kind != FLOAT32 or len(values) != count or not all(map(is_finite, values)):
            raise ModelError(f"the file's {key} is no array of {count} float32 numbers, one for each block")
        return array.as_tensors([f"blk.{i}.{name}" for i in range(count)])

    def _one_number(self, key: str, value: Any) -> Any:
        """Returns the number of an array that repeats it for each block, as programs that prune or merge models write;
        returns other values unchanged."""
        owner = "vision." if self.architecture == "clip" else ""
        blocks, predictors = (self._values.get(owner + name) for name in _NUMBERS_OF_BLOCKS)
        if not isinstance(value, tuple) or key.removeprefix(owner) in _NUMBERS_OF_BLOCKS or not isinstance(blocks, int):
            return value
        counts = {blocks, blocks - predictors} if isinstance(predictors, int) else {blocks}
        if not value or len(value) not in counts:
            return value
        return value[0] if all(is_finite(number) and number == value[0] for number in value) else value

    @property
    def num_layers(self) -> int:
        """The number of blocks without draft layers. Raises `ModelError` if it is more than `MOST_LAYERS`."""
        blocks, predictors = self("block_count"), self.get("nextn_predict_layers", 0)
        if not 0 < blocks - predictors <= MOST_LAYERS:
            of_them = f", of which {predictors} predict further tokens" if predictors else ""
            raise ModelError(f"the file's {self.architecture}.block_count is {blocks}{of_them}: no model has so many")
        return int(blocks - predictors)

    def token(self, kind: str, default: int | None = None) -> int | None:
        """Returns the id of a special token, or `default`. If the file does not say which token ends a turn, it is
        found by its text. For an invalid id, returns `default` if the token is not needed (`unusable_tokens`), or else
        raises `ModelError`."""
        tokens, key = self.header.arrays.get("tokenizer.ggml.tokens"), f"tokenizer.ggml.{kind}_token_id"
        if fault := self._fault_of_token(key):
            if kind not in _UNNEEDED:
                raise ModelError(fault)
            return default
        number = self.header.values.get(key, default)
        if number is None:
            return self._end_of_turn(tokens) if tokens is not None and kind == "eot" else None
        return int(number)

    @property
    def reply_tokens(self) -> ReplyTokens:
        """The tokens that end a reply, and those that never come. Raises `ModelError` for an invalid token."""
        ends = [token for token in map(self.token, ("eos", "eot", "eom")) if token is not None]
        return ReplyTokens(list(dict.fromkeys(ends)), self._suppressed())

    def _suppressed(self) -> list[int]:
        array = self.header.arrays.get(_SUPPRESSED)
        if array is None and _SUPPRESSED not in self.header.values:
            return []
        if array is None or isinstance(content := array.content, list) or content.dtype.kind not in "iu":
            raise ModelError(f"the file's {_SUPPRESSED} is no array of tokens")
        return [int(token) for token in content]

    def tokenizer_flag(self, name: str, *, default: bool) -> bool:
        """Returns an option of the tokenizer. Raises `ModelError` for a value that is neither true nor false."""
        key = f"tokenizer.ggml.{name}"
        value = self.header.values.get(key, default)
        if key in self.header.arrays or not isinstance(value, int) or value not in (0, 1):
            said = "an array" if key in self.header.arrays else shown(value)
            raise ModelError(f"the file's {key} is {said}, which is neither true nor false")
        return bool(value)

    def require_texts(self) -> None:
        """Raises `ModelError` if a text on which a prompt depends is not UTF-8."""
        for key in _TEXTS:
            array = self.header.arrays.get(key)
            if isinstance(value := self.header.values.get(key), bytes):
                raise ModelError(f"the file's {key} is {shown(value)}")
            if array is not None and array.undecoded is not None:
                # This raises, with the number of the element.
                _ = array.content

    def unusable_tokens(self) -> list[str]:
        """Returns the faults of the ids of special tokens that are not needed."""
        faults = (self._fault_of_token(f"tokenizer.ggml.{kind}_token_id") for kind in _UNNEEDED)
        return [fault for fault in faults if fault]

    def _fault_of_token(self, key: str) -> str:
        """Returns why a value is no id of a token, "" if it is one or is missing."""
        tokens, number = self.header.arrays.get("tokenizer.ggml.tokens"), self.header.values.get(key)
        if key in self.header.arrays:
            return f"the file's {key} is an array, which is not a number"
        is_number = isinstance(number, int) and not isinstance(number, bool)
        if number is None or (is_number and (tokens is None or 0 <= number < tokens.count)):
            return ""
        of_them = f", and it has {tokens.count} tokens" if tokens is not None else ", which is not a number"
        return f"the file's {key} is {shown(number)}{of_them}"

    def _end_of_turn(self, tokens: FileArray) -> int | None:
        """Returns the likeliest end of a turn, other than EOS. If calls have their own end, `<|end|>` only ends
        messages within a reply."""
        numbers = {} if tokens.strings is None else tokens.strings.numbers_of((*ENDS_OF_TURN, *_ENDS_OF_CALLS))
        if not numbers.keys().isdisjoint(_ENDS_OF_CALLS):
            numbers.pop("<|end|>", None)
        ends = (numbers[token] for token in ENDS_OF_TURN if token in numbers)
        return next((number for number in ends if number != self.token("eos")), None)

    def has(self, *endings: str) -> bool:
        """Returns whether the name of a tensor has one of these endings."""
        return any(name.endswith(endings) for name in self.tensors)

    def num_rows(self, tensor: str) -> int:
        """Returns the number of rows of a tensor, 0 if it is missing."""
        return self.tensors[tensor].shape[0] if tensor in self.tensors else 0

    def scaling(self) -> dict[str, Any]:
        """Returns the values about the scaling of rotary embeddings."""
        values = {key: value for key, value in self._values.items() if key.startswith(SCALING)}
        return {key.removeprefix(SCALING): self._one_number(key, value) for key, value in values.items()}

    def require_read(self) -> None:
        """Raises `ModelError` with the name of an unread key that changes numbers."""
        has_experts = bool(self._values.get("expert_count"))
        for key, given in self._values.items():
            value = self._one_number(key, given)
            is_described = key in _DESCRIPTIVE_LISTS if self.is_array(key) else key in _DESCRIPTIVE
            is_described |= key in _DESCRIPTIVE and not self.varies(key)
            is_known = key in self._read or is_described or key.startswith((*self._of_others, SCALING))
            if is_known or value in _NEUTRAL.get(key, ()) or (key.startswith("expert_") and not has_experts):
                continue
            raise ModelError(f"the file's {self.architecture}.{key} is {shown(value)}, and nothing here reads it")


def is_finite(value: Any) -> bool:
    """Returns whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, bytes):
        return f"not UTF-8 ({value[:20]!r})"
    text = "an array" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
