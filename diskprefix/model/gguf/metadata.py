"""The metadata of a `.gguf` file below its architecture. What nobody read changes no number, or the file is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diskprefix.errors import ModelError
from diskprefix.model.load.gguf_header import FileTensor, GgufHeader

_DESCRIPTIVE = frozenset(
    {
        "context_length",
        "vocab_size",
        "tensor_data_layout",
        "pooling_type",
        # Tensors of further tokens are left out.
        "nextn_predict_layers",
        # Checked before.
        "attention.causal",
        # Its part of a head is checked with the model itself.
        "rope.dimension_count_swa",
        # A model with other values has tensors of other names or shapes, which are refused.
        "use_parallel_residual",
        "feed_forward_length",
        "expert_count",
        "expert_feed_forward_length",
        "expert_shared_count",
        "expert_shared_feed_forward_length",
        "leading_dense_block_count",
        "attention.q_lora_rank",
        "attention.kv_lora_rank",
        "shortconv.l_cache",
        "ssm.conv_kernel",
        "ssm.inner_size",
        "ssm.state_size",
        "ssm.time_step_rank",
        "ssm.group_count",
    }
)
"""Keys of numbers and strings that change no number, or that something else checks."""
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
}
"""Values that change nothing, of keys that nothing reads."""
_OF_ENCODERS = ("mm.", "vision.", "audio.")
"""What some files of text models say of the encoders of pictures and sound, which are other files."""
_MOST_LAYERS = 512
"""Those of llama.cpp (`LLAMA_MAX_LAYERS`). To make a model of many more takes minutes, before any tensor is missed."""
SCALING = "rope.scaling."
"""Keys of the scaling of positions, which are checked where they are read."""


class Metadata:
    """The values of a file, without the name of its architecture, and the names of its tensors. An array is a tuple."""

    def __init__(self, header: GgufHeader, tensors: Sequence[FileTensor]) -> None:
        self.architecture = str(header.values.get("general.architecture"))
        self.header = header
        self.tensors = {tensor.name: tensor for tensor in tensors}
        prefix = f"{self.architecture}."
        found = {**header.values, **header.lists}
        self._values = {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}
        self._read: set[str] = set()

    def __call__(self, key: str) -> Any:
        """Returns a value. Raises `ModelError` if it is not there."""
        found = self.get(key)
        if found is None:
            raise ModelError(f"the file lacks {self.architecture}.{key}")
        return found

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a number, or `default`. Raises `ModelError` for a list or a string."""
        found = self.of_any_kind(key, default)
        if key in self and not isinstance(found, int | float):
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
        """The blocks of the model, without those that predict further tokens. Raises `ModelError` if no model has so
        many."""
        blocks, predictors = self("block_count"), self.get("nextn_predict_layers", 0)
        if not 0 < blocks - predictors <= _MOST_LAYERS:
            of_them = f", of which {predictors} predict further tokens" if predictors else ""
            raise ModelError(f"the file's {self.architecture}.block_count is {blocks}{of_them}: no model has so many")
        return int(blocks - predictors)

    def token(self, kind: str) -> int | None:
        found = self.header.values.get(f"tokenizer.ggml.{kind}_token_id")
        return None if found is None else int(found)

    def has(self, *endings: str) -> bool:
        """Returns whether a tensor ends so."""
        return any(name.endswith(endings) for name in self.tensors)

    def num_rows(self, tensor: str) -> int:
        """Returns the rows of a tensor, or 0 if it is not there."""
        return self.tensors[tensor].shape[0] if tensor in self.tensors else 0

    def scaling(self) -> dict[str, Any]:
        """Returns what the file says of the scaling of positions."""
        return {key.removeprefix(SCALING): value for key, value in self._values.items() if key.startswith(SCALING)}

    def _is_scaling(self, key: str) -> bool:
        kind = str if key == f"{SCALING}type" else int | float
        return key.startswith(SCALING) and isinstance(self._values[key], kind)

    def require_read(self) -> None:
        """Raises `ModelError` with the name of a key that changes numbers and that nothing has read."""
        has_experts = bool(self._values.get("expert_count"))
        for key, value in self._values.items():
            descriptive = _DESCRIPTIVE_LISTS if self.is_list(key) else _DESCRIPTIVE
            is_known = key in self._read or key in descriptive or key.startswith(_OF_ENCODERS)
            if (
                is_known
                or self._is_scaling(key)
                or value in _NEUTRAL.get(key, ())
                or (key.startswith("expert_") and not has_experts)
            ):
                continue
            raise ModelError(f"the file's {self.architecture}.{key} is {shown(value)}, and nothing here reads it")


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    found = "an array" if value is None else repr(value)
    return found if len(found) <= 60 else f"{found[:57]}..."
