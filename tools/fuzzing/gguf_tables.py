"""The tables of `.gguf` architectures: metadata and tensors become the parts of a model, or are refused in one line.

A file of bytes would mostly say something of its length. Here the bytes choose the architecture, then a value for each
key that is asked for, then tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain, repeat
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from diskprefix.model.gguf.configuration import make_configuration
from diskprefix.model.gguf.known_families import NAMES, architecture_of
from diskprefix.model.gguf.metadata import Metadata
from diskprefix.model.load.gguf import quiet_transformers
from diskprefix.model.load.gguf_header import FileTensor, GgufHeader
from diskprefix.model.load.gguf_rope import scale_positions
from diskprefix.model.load.kinds import ModelKind

_SOUND: dict[str, Any] = {
    "block_count": 2,
    "embedding_length": 64,
    "context_length": 512,
    "feed_forward_length": 32,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.key_length_mla": 32,
    "attention.key_length_swa": 16,
    "attention.kv_lora_rank": 16,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.scale": 0.25,
    "attention.shared_kv_layers": 0,
    "attention.sliding_window": 16,
    "attention.sliding_window_pattern": (True, False),
    "attention.value_length": 16,
    "rope.dimension_count": 16,
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_shared_count": 1,
    "interleave_moe_layer_step": 1,
    "logit_scale": 0.5,
    "shortconv.l_cache": 3,
    "ssm.conv_kernel": 4,
    "ssm.group_count": 2,
    "ssm.inner_size": 128,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 4,
    "kda.head_dim": 16,
    "activation_sparsity_scale": (0.0, 1.5),
    "altup.active_idx": 0,
    "altup.num_inputs": 4,
    "embedding_length_per_layer_input": 16,
}
"""What small models have. They lack other keys."""
_OF_SOME: dict[str, tuple[str, ...]] = {
    "attention.scale": ("granite", "granitehybrid", "granitemoe"),
    "attention.sliding_window": ("gemma3n", "gemma4", "mimo2"),
    "attention.sliding_window_pattern": ("gemma3n", "gemma4", "mimo2"),
}
"""Keys that only these architectures have."""
_ODD = (
    *(0, 1, 2, 3, 4, 16, 64, 128, 512, 513, -1, 2**31, 2**63, 0.0, 0.5, 1.0, 2.5, -1.5, 1e-300, 1e300),
    *(float("nan"), float("inf"), True, False, "", "yarn", "linear", "longrope", "none", "8", (), (0, 2), (2, 0)),
    *((1, 0), (True, False), (False, True), (64, 32), (0.5, 0.5), (3, 3, 2, 0), ("a", "b"), (16,) * 600),
)
"""Values of damaged files."""
_SCALING = ("type", "factor", "finetuned", "original_context_length", "attn_factor", "yarn_log_multiplier", "alpha")
_TENSORS = (
    *("output.weight", "per_layer_token_embd.weight", "rope_freqs.weight", "rope_factors_long.weight"),
    *("rope_factors_short.weight", "blk.0.attn_q.bias", "blk.0.attn_qkv.bias", "blk.0.attn_q_norm.weight"),
    *("blk.0.ffn_up.bias", "blk.0.ffn_norm.weight", "blk.1.ffn_gate_inp.weight", "blk.0.exp_probs_b.bias"),
    *("blk.0.attn_v.weight", "blk.1.attn_v.weight", "blk.0.ssm_conv1d.bias", "blk.0.ssm_norm.weight"),
    *("blk.0.laurel_l.weight", "blk.0.shortconv.in_proj.bias"),
)
"""Those by which configurations differ."""
_NUMBERS = np.repeat(np.array([1, 1e30, 8, 0, -1, np.nan], np.float32), 64)
"""The content of all tensors."""
_MOST_SHAPES = 192
"""Larger choices leave a tensor out."""


class _Chosen(dict[str, Any]):
    """Values by key, each of which is chosen when it is asked for."""

    def __init__(self, name: str, choices: Iterator[int]) -> None:
        self._sound = {key: value for key, value in _SOUND.items() if name in _OF_SOME.get(key, (name,))}
        self._choices, self._asked = choices, set[str]()

    def choose(self, key: str) -> None:
        if key in self._asked:
            return
        self._asked.add(key)
        choice = next(self._choices)
        if choice == 0 and key in self._sound:
            self[key] = self._sound[key]
        elif 0 < choice <= len(_ODD):
            self[key] = _ODD[choice - 1]

    def __contains__(self, key: object) -> bool:
        self.choose(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.choose(key)
        return super().get(key, default)


class _Every(dict[str, FileTensor]):
    """A file that has each tensor that is asked for."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> FileTensor:
        return FileTensor(name, "F32", (1,), Path(name), 0, np.dtype(np.float32), (1,))


class _File:
    """A file of which the bytes of an input choose what it says. The first byte chooses its architecture."""

    def __init__(self, numbers: Path, data: bytes) -> None:
        self.name = sorted(NAMES)[data[0] % len(NAMES)]
        self.choices = chain(data[1:], repeat(0))
        self._numbers = numbers
        values = _Chosen(self.name, self.choices)
        tokens = {f"tokenizer.ggml.{kind}_token_id": values.get(kind) for kind in ("bos", "eos", "padding")}
        tokens = {key: value for key, value in tokens.items() if not isinstance(value, tuple)}
        tensors = [self.tensor("token_embd.weight", (next(self.choices) or 64, 64))]
        more = zip(_TENSORS, self.choices, strict=False)
        tensors += [self.tensor(name, (choice % 16 + 1,), 4 * choice) for name, choice in more if choice]
        header = GgufHeader({"general.architecture": self.name} | tokens, {}, {}, tuple(tensors))
        self.metadata = Metadata(header, tensors)
        self.metadata._values = values
        for key in _SCALING if next(self.choices) else ():
            values.choose(f"rope.scaling.{key}")
        self.architecture = architecture_of(self.metadata)
        self.config = make_configuration(self.architecture, self.metadata)
        scale_positions(self.config, self.metadata, tensors, lambda _line: None)

    def tensor(self, name: str, shape: tuple[int, ...], offset: int = 0) -> FileTensor:
        return FileTensor(name, "F32", shape, self._numbers, offset, np.dtype(np.float32), shape)

    def make_parts(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Makes the parameters that have these shapes in a sound model."""
        tensors = dict[str, FileTensor]()
        for name, part in self.architecture.parts_of(shapes, _Every()).items():
            for one in part.tensors:
                shape, choice = shapes[name], next(self.choices)
                if choice:
                    at, size = choice % 4, choice // 4 % 16
                    shape = (*shape[:at], *([size] if size else []), *shape[at + 1 :])[-4:] or (1,)
                if choice < _MOST_SHAPES:
                    tensors[one.name] = self.tensor(one.name, shape)
        if next(self.choices):
            tensors["blk.0.of_tomorrow.weight"] = self.tensor("blk.0.of_tomorrow.weight", (1,))
        for part in self.architecture.parts_of(shapes, tensors).values():
            sizes = [one.shape[:-1] if part.is_matrix else one.shape for one in part.tensors]
            arrays = [np.arange(prod(size), dtype=np.float32).reshape(size) for size in sizes]
            with np.errstate(all="ignore"):
                found = part.rows(self.config, arrays)
                if part.source.values is not None:
                    part.source.values(self.config, found)


def check(refused: Callable[[Callable[[], object]], None], folder: Path) -> Callable[[bytes], None]:
    """Returns the check of one input. `refused` calls, and lets one-line errors of the project pass."""
    numbers = folder / "numbers"
    _NUMBERS.tofile(numbers)
    quiet_transformers()

    @cache
    def shapes_of(name: str, model_type: str) -> dict[str, tuple[int, ...]]:
        found = _File(numbers, bytes([sorted(NAMES).index(name)]))
        return _shapes(found.config) if found.architecture.model_type == model_type else {}

    def act(data: bytes) -> None:
        file = _File(numbers, data)
        file.make_parts(shapes_of(file.name, file.architecture.model_type))

    return lambda data: refused(lambda: act(data)) if data else None


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a model's parameters."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    is_of_text = type(config) in AutoModelForCausalLM._model_mapping
    loader = AutoModelForCausalLM if is_of_text else AutoModelForMultimodalLM
    model = ModelKind(loader, is_multimodal=False, has_own_generate=False).skeleton(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def seeds(_folder: Path) -> Iterable[bytes]:
    """A sound model of each architecture, as far as one is made of the values that all have in common."""
    return (bytes([number]) for number in range(len(NAMES)))
