"""A file whose metadata or tensors are not those of a model is refused in one line that names the fault. Nothing is
kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.files.gguf.test_gguf_refusals import require_refused
from tests.runtime.plan import tiny
from tests.runtime.plan.gguf_files import EPSILON, RMS, Tensors, made, rope, tensors_of, write_deepseek, written

pytestmark = pytest.mark.usefixtures("cache")
VALUES = RMS | {"rope.dimension_count": 16, "rope.freq_base": 250000.0}
Q, NORM = "blk.0.attn_q.weight", "blk.1.ffn_norm.weight"


# A tensor that gets another shape, is added or (None) left out, and what is said. `test_gguf_refusals.py` has more.
OF_TENSORS: list[tuple[str, tuple[int, ...] | None, str]] = [
    ("blk.0.attn_q.bias", (64,), "the file lacks the tensor blk.0.attn_output.bias"),
    ("blk.2.attn_q.weight", (64, 64), "takes these tensors of the file: blk.2.attn_q"),
    (NORM, None, "the file lacks the tensor blk.1.ffn_norm.weight"),
    ("token_embd.weight", None, "the file lacks the tensor token_embd.weight"),
    ("token_embd.weight", (16, 64), f"token_embd.weight has 16 rows, and it has {len(tiny.tokens())} tokens"),
    *((Q, shape, rf"self_attn.q_proj.weight is \({shape[0]}") for shape in ((32, 64), (64, 96), (64,))),
    (Q, (63, 64), Q),
    (Q, (2, 64, 64), Q),
    (NORM, (32,), r"layers.1.post_attention_layernorm.weight is \(32,\)"),
]
# A key of the metadata with another value or (None) without one, and what is said.
OF_KEYS: list[tuple[str, Any, str]] = [
    ("feed_forward_length", [96, 64], r"llama.feed_forward_length is \(96, 64\), which is not a number"),
    ("feed_forward_length", [96, 96, 96], r"llama.feed_forward_length is \(96, 96, 96\), which is not a number"),
    ("attention.head_count", [4, 2], r"llama.attention.head_count is \(4, 2\), which is not a number"),
    ("attention.head_count_kv", [2, 4], r"llama.attention.head_count_kv is \(2, 4\), and nothing here"),
    ("attention.causal", [False, True], r"llama.attention.causal is \(False, True\), which is not a number"),
    ("rope.freq_base", [1e4, 1e5], r"llama.rope.freq_base is \(1.*\), which is not a number"),
    ("rope.freq_base", -1e4, "llama.rope.freq_base is -10000, which is not above zero"),
    ("rope.scaling.factor", [2.0, 4.0], r"rope.scaling.factor is \(2.0, 4.0\), and nothing"),
    ("rope.scaling.factor", "2", "rope.scaling.factor is '2', and nothing here reads it"),
    ("block_count", [2], r"llama.block_count is \(2,\), which is not a number"),
    ("embedding_length", "64", "llama.embedding_length is '64', which is not a number"),
    ("embedding_length", None, "the file lacks llama.embedding_length"),
    ("embedding_length", 96, "llama.embedding_length is 96, and the model would have 64"),
    ("embedding_length", 0, "llama.embedding_length is 0, and the model would have 64"),
    ("block_count", 0, "llama.block_count is 0: no model has so many"),
    ("block_count", 10_000, "llama.block_count is 10000: no model has so many"),
    ("nextn_predict_layers", 2, "llama.block_count is 2, of which 2 predict further tokens: no model has so many"),
    ("attention.head_count", None, "the file lacks llama.attention.head_count"),
    ("attention.head_count", 0, "llama.attention.head_count is 0"),
    ("attention.head_count_kv", 0, "llama.attention.head_count_kv is 0"),
    ("context_length", 0.5, "max_position_embeddings is 0.5, not a whole number"),
]


def llama_tensors() -> tuple[Any, Tensors]:
    model = made("llama", EPSILON | {"rope_parameters": rope()})
    return model.config, tensors_of(model, "llama")


@pytest.mark.parametrize(("name", "shape", "message"), OF_TENSORS)
def test_other_tensors_than_those_of_the_model_are_refused_by_name(
    name: str, shape: tuple[int, ...] | None, message: str, cache: Path, tmp_path: Path
) -> None:
    config, tensors = llama_tensors()
    tensors |= {name: torch.ones(shape or 1)}
    if shape is None:
        del tensors[name]
    require_refused(written(tmp_path / "tiny.gguf", "llama", config, VALUES, tensors), message)
    assert not [path for path in cache.rglob("*") if path.is_file() and path.suffix in (".safetensors", ".json")]


@pytest.mark.parametrize(("key", "value", "message"), OF_KEYS)
def test_metadata_of_no_model_are_refused_by_name(key: str, value: Any, message: str, tmp_path: Path) -> None:
    config, tensors = llama_tensors()
    require_refused(written(tmp_path / "tiny.gguf", "llama", config, VALUES | {key: value}, tensors), message)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"expert_count": 0}, "deepseek2.leading_dense_block_count is 1, and the model would have 3"),
        ({"expert_count": 4}, "mlp.experts.down_proj is .8,"),
        ({"expert_used_count": 0}, "deepseek2.expert_used_count is 0, of 8 experts"),
        ({"expert_used_count": 9}, "deepseek2.expert_used_count is 9, of 8 experts"),
        ({"expert_count": [8, 8, 4]}, r"deepseek2.expert_count is \(8, 8, 4\), which is not a number"),
    ],
)
def test_a_mixture_with_other_experts_is_refused_by_name(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    require_refused(write_deepseek(tmp_path / "tiny.gguf", "V3", **values), message)
