"""The tables of `.gguf` architectures: metadata and tensors become the parts of a model, or are refused in one line.

A file of bytes would mostly say something of its length. Here the bytes choose the architecture, then a value for each
key that is asked for, then tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, repeat
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils import logging

from diskprefix.runtime.files.gguf.configuration import make_configuration
from diskprefix.runtime.files.gguf.gguf_header import FileTensor, GgufHeader
from diskprefix.runtime.files.gguf.gguf_rope import scale_positions
from diskprefix.runtime.files.gguf.known_families import MODEL_TYPES, architecture_of
from diskprefix.runtime.files.gguf.metadata import Metadata
from diskprefix.runtime.files.gguf.names import NAMES

SOUND: dict[str, Any] = {
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
    "rope.dimension_sections": (3, 3, 2, 0),
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
    "activation_sparsity_scale": (1.5, -float("inf")),
    "altup.active_idx": 0,
    "altup.num_inputs": 4,
    "embedding_length_per_layer_input": 16,
}
"""The metadata of small models, as llama.cpp's converter writes them. They lack other keys."""
_WINDOWED = ("afmoe", "exaone-moe", "cohere2moe", "granite_swa")
OF_SOME: dict[str, tuple[str, ...]] = {
    "attention.scale": ("granite", "granitehybrid", "granitemoe", "granite_swa"),
    "attention.sliding_window": ("gemma3n", "gemma4", "mimo2", *_WINDOWED),
    "attention.sliding_window_pattern": ("gemma3n", "gemma4", "mimo2", "exaone-moe", "cohere2moe", "granite_swa"),
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
"""The tensors on which configurations depend."""
_NUMBERS = np.repeat(np.array([1, 1e30, 8, 0, -1, np.nan], np.float32), 64)
"""The content of all tensors."""
_SHAPES = (
    *((64, 64), (128, 64), (192, 64), (64, 128), (32, 64), (384, 64), (4, 32, 64), (4, 64, 32), (4, 64), (64, 1, 4)),
    *((1, 64, 1, 4), (64,), (4,), (1,), (16, 4, 16), (5, 7)),
)


class _Chosen(dict[str, Any]):
    """Values by key, each of which is chosen when it is asked for."""

    def __init__(self, name: str, choices: Iterator[int]) -> None:
        self._sound = {key: value for key, value in SOUND.items() if name in OF_SOME.get(key, (name,))}
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
    """A file that has every requested tensor."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> FileTensor:
        return FileTensor(name, "F32", (1,), Path(name), 0, np.dtype(np.float32), (1,))


class _File:
    """A file whose metadata and tensors the bytes of an input choose. The first byte chooses the architecture."""

    def __init__(self, numbers: Path, data: bytes) -> None:
        self.name = sorted(MODEL_TYPES)[data[0] % len(MODEL_TYPES)]
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
        scale_positions(self.config, self.metadata, tensors)

    def tensor(self, name: str, shape: tuple[int, ...], offset: int = 0) -> FileTensor:
        return FileTensor(name, "F32", shape, self._numbers, offset, np.dtype(np.float32), shape)

    def make_parts(self) -> Iterator[Callable[[], object]]:
        """Yields a function that makes a parameter, for each parameter of this architecture or of most."""
        for stem in {**NAMES, **self.architecture.sources}:
            outside = stem.startswith(("model.", "backbone.", "lm_head"))
            name = f"{stem}.weight" if outside else f"model.layers.0.{stem}.weight"
            tensors = dict[str, FileTensor]()
            for tensor in self.architecture.parts_of([name], _Every())[name].tensors:
                if (choice := next(self.choices)) < len(_SHAPES):
                    tensors[tensor.name] = self.tensor(tensor.name, _SHAPES[choice])
            yield partial(self._make, name, tensors)

    def _make(self, name: str, tensors: dict[str, FileTensor]) -> None:
        part = self.architecture.parts_of([name], tensors)[name]
        sizes = [tensor.shape[:-1] if part.is_matrix else tensor.shape for tensor in part.tensors]
        arrays = [np.arange(prod(size), dtype=np.float32).reshape(size) for size in sizes]
        with np.errstate(all="ignore"):
            rows = part.rows(self.config, arrays)
            if part.source.values is not None:
                part.source.values(self.config, rows)


def check(refused: Callable[[Callable[[], object]], None], folder: Path) -> Callable[[bytes], None]:
    """Returns the check of one input. `refused` calls, and lets one-line errors of the project pass."""
    numbers = folder / "numbers"
    _NUMBERS.tofile(numbers)
    logging.set_verbosity_error()

    def act(data: bytes) -> None:
        for make in _File(numbers, data).make_parts():
            refused(make)

    # What is imported once is no part of the first input's time.
    refused(lambda: act(bytes(1)))
    return lambda data: refused(lambda: act(data)) if data else None


def seeds(_folder: Path) -> Iterable[bytes]:
    """Returns an input for a sound model of each architecture whose values are common ones."""
    return (bytes([number]) for number in range(len(MODEL_TYPES)))
