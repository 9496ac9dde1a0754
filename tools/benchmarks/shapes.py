"""GGUF files of the shape of models that people run, with random numbers and a real tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from diskprefix.errors import ModelError
from diskprefix.model.load.made_once import require_disk
from diskprefix.progress import Report
from diskprefix.settings import cache_home
from tools.benchmarks.random_blocks import num_bytes, random_blocks

_WIDTHS = 256
"""Scaled widths are multiples of this, the block of the K quants."""
_CONTEXT = 32_768
_NORM_STD, _BIAS_STD = 0.05, 0.02


@dataclass(frozen=True)
class Drawn:
    """A tensor of type `kind` and torch's `shape`, to be filled with random numbers."""

    name: str
    kind: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.kind, self.shape)


@dataclass(frozen=True, kw_only=True)
class GgufShape:
    """`inner` is the width of the gated product, or of an expert's; `experts` is 0 in a dense model, `used` how many of
    them a token uses. `most_bytes` bounds the file: it has as many of the `layers` as fit."""

    what: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    experts: int = 0
    used: int = 0
    most_bytes: int = 12 * 10**9
    kind: str = "Q4_K"
    """The type of most matrices."""
    values: dict[str, Any] = field(default_factory=dict)
    """More metadata, without the architecture before their names."""

    def scaled(self, scale: int) -> GgufShape:
        """Returns the shape with layers, widths, heads and experts divided by `scale`."""
        if scale == 1:
            return self
        hidden, kv_heads = _scaled(self.hidden, scale), max(1, self.kv_heads // scale)
        heads = -(-self.heads // self.kv_heads // 4) * 4 * kv_heads
        if not self.experts:
            # Readers take the size of a head from these two.
            heads = hidden // self.head_dim
            kv_heads = max(number for number in range(1, kv_heads + 1) if heads % number == 0)
        experts = max(self.experts // scale, 4) if self.experts else 0
        return replace(
            self,
            layers=max(self.layers // scale, 1),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            # Readers take the width of Qwen3's experts from the architecture.
            inner=self.inner if self.architecture == "qwen3moe" else _scaled(self.inner, scale),
            experts=experts,
            used=min(self.used, experts // 2),
        )

    @cached_property
    def is_mxfp4(self) -> bool:
        return self.architecture == "gpt-oss"

    def _matrix(self, name: str, kind: str, *shape: int) -> Drawn:
        return Drawn(f"{name}.weight", "Q8_0" if self.is_mxfp4 and kind != "MXFP4" else kind, shape, shape[-1] ** -0.5)

    def _norm(self, name: str, size: int) -> Drawn:
        return Drawn(f"{name}.weight", "F32", (size,), _NORM_STD, 1.0)

    def _mixed(self, layer: int) -> str:
        """Returns the type of the values and the last product of a layer, as llama.cpp mixes Q4_K_M."""
        if self.kind != "Q4_K":
            return self.kind
        eighth = self.layers // 8
        return "Q6_K" if layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2 else "Q4_K"

    def layer(self, number: int) -> Iterator[Drawn]:
        at, hidden, of_heads, of_kv = (
            f"blk.{number}",
            self.hidden,
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
        )
        yield self._norm(f"{at}.attn_norm", hidden)
        yield self._matrix(f"{at}.attn_q", self.kind, of_heads, hidden)
        yield self._matrix(f"{at}.attn_k", self.kind, of_kv, hidden)
        yield self._matrix(f"{at}.attn_v", self._mixed(number), of_kv, hidden)
        yield self._matrix(f"{at}.attn_output", self.kind, hidden, of_heads)
        if self.architecture != "qwen3moe":
            for name, size in (("q", of_heads), ("k", of_kv), ("v", of_kv)):
                yield Drawn(f"{at}.attn_{name}.bias", "F32", (size,), _BIAS_STD)
        else:
            yield self._norm(f"{at}.attn_q_norm", self.head_dim)
            yield self._norm(f"{at}.attn_k_norm", self.head_dim)
        yield self._norm(f"{at}.{'post_attention_norm' if self.is_mxfp4 else 'ffn_norm'}", hidden)
        yield from self._experts(at, number) if self.experts else self._dense(at, number)
        if self.is_mxfp4:
            yield Drawn(f"{at}.attn_output.bias", "F32", (hidden,), _BIAS_STD)
            yield Drawn(f"{at}.attn_sinks.weight", "F32", (self.heads,), 1.0)

    def _dense(self, at: str, number: int) -> Iterator[Drawn]:
        yield self._matrix(f"{at}.ffn_gate", self.kind, self.inner, self.hidden)
        yield self._matrix(f"{at}.ffn_up", self.kind, self.inner, self.hidden)
        yield self._matrix(f"{at}.ffn_down", self._mixed(number), self.hidden, self.inner)

    def _experts(self, at: str, number: int) -> Iterator[Drawn]:
        kind, last = ("MXFP4", "MXFP4") if self.is_mxfp4 else ("Q4_K", self._mixed(number))
        yield Drawn(f"{at}.ffn_gate_inp.weight", "F32", (self.experts, self.hidden), self.hidden**-0.5)
        yield self._matrix(f"{at}.ffn_gate_exps", kind, self.experts, self.inner, self.hidden)
        yield self._matrix(f"{at}.ffn_up_exps", kind, self.experts, self.inner, self.hidden)
        yield self._matrix(f"{at}.ffn_down_exps", last, self.experts, self.hidden, self.inner)
        if self.is_mxfp4:
            yield Drawn(f"{at}.ffn_gate_inp.bias", "F32", (self.experts,), _BIAS_STD)
            for name, size in (("gate", self.inner), ("up", self.inner), ("down", self.hidden)):
                yield Drawn(f"{at}.ffn_{name}_exps.bias", "F32", (self.experts, size), _BIAS_STD)

    def ends(self, vocabulary: int) -> Iterator[Drawn]:
        yield replace(self._matrix("token_embd", self.kind, vocabulary, self.hidden), std=1.0)
        yield self._norm("output_norm", self.hidden)
        yield self._matrix("output", "Q6_K", vocabulary, self.hidden)

    def tensors(self, vocabulary: int) -> list[Drawn]:
        """Returns the tensors of as many layers as fit into `most_bytes`. Raises `ModelError` if none fits."""
        ends = list(self.ends(vocabulary))
        fitting: list[Drawn] = []
        left = self.most_bytes - sum(tensor.num_bytes for tensor in ends)
        for number in range(self.layers):
            layer = list(self.layer(number))
            left -= sum(tensor.num_bytes for tensor in layer)
            if left < 0:
                break
            fitting += layer
        if not fitting:
            raise ModelError(f"not one layer of {self.architecture} fits into {self.most_bytes} bytes")
        return [*ends, *fitting]

    def metadata(self, layers: int, vocabulary: int) -> dict[str, Any]:
        found = {
            "block_count": layers,
            "context_length": _CONTEXT,
            "embedding_length": self.hidden,
            "feed_forward_length": self.inner,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 1e6,
            "vocab_size": vocabulary,
        }
        if self.experts:
            found |= {"expert_count": self.experts, "expert_used_count": self.used}
            found["expert_feed_forward_length"] = self.inner
        return found | self.values


def _scaled(width: int, scale: int) -> int:
    return max(_WIDTHS, width // scale // _WIDTHS * _WIDTHS)


def write_gguf(shape: GgufShape, tokenizer: Path, file: Path, report: Report, seed: int = 0) -> Path:
    """Writes a file of this shape with the tokenizer of the GGUF file `tokenizer`, tensor by tensor. Returns its path.

    Raises `ModelError` if the disk has no room for it.
    """
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

    fields = {name: one for name, one in GGUFReader(tokenizer).fields.items() if name.startswith("tokenizer.")}
    vocabulary = len(fields["tokenizer.ggml.tokens"].data)
    tensors = shape.tensors(vocabulary)
    total = sum(tensor.num_bytes for tensor in tensors)
    require_disk(file.parent, total)
    layers = len({tensor.name.split(".")[1] for tensor in tensors if tensor.name.startswith("blk.")})
    work = file.with_suffix(".partial")
    writer = GGUFWriter(work, shape.architecture)
    for name, value in shape.metadata(layers, vocabulary).items():
        kinds = {int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}
        writer.add_key_value(f"{shape.architecture}.{name}", value, kinds[type(value)])
    for name, one in fields.items():
        writer.add_key_value(name, one.contents(), one.types[0], one.types[-1] if len(one.types) > 1 else None)
    for tensor in tensors:
        kind = GGMLQuantizationType[tensor.kind]
        # Of a quantised tensor the writer takes the shape in bytes.
        stored = (*tensor.shape[:-1], num_bytes(tensor.kind, tensor.shape[-1:]))
        is_plain = tensor.kind == "F32"
        dtype = np.dtype(np.float32 if is_plain else np.uint8)
        writer.add_tensor_info(tensor.name, tensor.shape if is_plain else stored, dtype, tensor.num_bytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    choose, written = np.random.Generator(np.random.SFC64(seed)), 0
    for tensor in tensors:
        writer.write_tensor_data(random_blocks(tensor.kind, tensor.shape, tensor.std, choose, tensor.mean))
        written += tensor.num_bytes
        report(f"{file.name}: {written / total:.0%} of {total / 1e9:.2f} GB, {layers} layers")
    writer.close()
    return work.replace(file)


SHAPES = {
    "3b": GgufShape(
        what="a dense 3B (Qwen2.5), Q4_0",
        architecture="qwen2",
        layers=36,
        hidden=2048,
        heads=16,
        kv_heads=2,
        head_dim=128,
        inner=11_008,
        kind="Q4_0",
    ),
    "7b": GgufShape(
        what="a dense 7B (Qwen2.5), Q4_K_M",
        architecture="qwen2",
        layers=28,
        hidden=3584,
        heads=28,
        kv_heads=4,
        head_dim=128,
        inner=18_944,
    ),
    "mixture": GgufShape(
        what="30B-A3B (Qwen3-MoE), Q4_K and Q6_K, layers that fit in 12 GB",
        architecture="qwen3moe",
        layers=48,
        hidden=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        inner=768,
        experts=128,
        used=8,
    ),
    "gpt-oss": GgufShape(
        what="gpt-oss-20b, MXFP4 and Q8_0",
        architecture="gpt-oss",
        layers=24,
        hidden=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        inner=2880,
        experts=32,
        used=4,
        values={
            "attention.sliding_window": 128,
            "rope.freq_base": 150_000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
            "context_length": 131_072,
        },
    ),
}


def shape_file(name: str, folder: Path | None, tokenizer: Path, scale: int, report: Report) -> Path:
    """Returns the file of a shape, which is made in `folder` (None: the cache folder) if it is not there, with the
    tokenizer of the GGUF file `tokenizer`. Raises `ModelError` if the disk has no room for it."""
    shape, folder = SHAPES[name].scaled(scale), folder or cache_home() / "shapes"
    path = folder / f"{name}-{hashlib.sha256(repr((shape, tokenizer.name)).encode()).hexdigest()[:8]}.gguf"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    return write_gguf(shape, tokenizer, path, report)
