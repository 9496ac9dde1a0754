"""A file whose metadata or tensors are not those of a model is refused in one line that names the fault. Nothing is
kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from diskprefix.errors import ModelError
from tests.model import tiny
from tests.model.load.test_gguf_models import (
    EPSILON,
    RMS,
    Tensors,
    deepseek,
    deepseek_tensors,
    deepseek_values,
    made,
    rope,
    tensors_of,
    written,
)

pytestmark = pytest.mark.usefixtures("cache")
VALUES = RMS | {"rope.dimension_count": 16, "rope.freq_base": 250000.0}
Q, NORM = "blk.0.attn_q.weight", "blk.1.ffn_norm.weight"


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {other: tensor for other, tensor in tensors.items() if other != name}


def shaped(name: str, *shape: int) -> Callable[[Tensors], Tensors]:
    """Replaces a tensor, or adds one."""
    return lambda tensors: tensors | {name: torch.ones(shape)}


def same(tensors: Tensors) -> Tensors:
    return tensors


# What is wrong: metadata, what happens to tensors, and what is said.
FAULTS: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors], str]] = {
    "a tensor too many": (
        {},
        shaped("blk.0.attn_gate.weight", 64, 64),
        "takes these tensors of the file: blk.0.attn_g",
    ),
    "a tensor of no block": ({}, shaped("rope_table.weight", 8), "takes these tensors of the file: rope_table.weight"),
    "a bias too many": ({}, shaped("blk.0.attn_q.bias", 64), "the file lacks the tensor blk.0.attn_k.bias"),
    "a block too many": ({}, shaped("blk.2.attn_q.weight", 64, 64), "takes these tensors of the file: blk.2.attn_q"),
    "a matrix too few": ({}, without(Q), "the file lacks the tensor blk.0.attn_q.weight"),
    "a norm too few": ({}, without(NORM), "the file lacks the tensor blk.1.ffn_norm.weight"),
    "no embeddings": ({}, without("token_embd.weight"), "the file lacks the tensor token_embd.weight"),
    "fewer embeddings than tokens": (
        {},
        shaped("token_embd.weight", 16, 64),
        f"token_embd.weight has 16 rows, and it has {len(tiny.tokens())} tokens",
    ),
    "a matrix with other rows": ({}, shaped(Q, 32, 64), Q),
    "a matrix whose rows are no heads": ({}, shaped(Q, 63, 64), Q),
    "a matrix with other columns": ({}, shaped(Q, 64, 96), Q),
    "a matrix of one dimension": ({}, shaped(Q, 64), Q),
    "a matrix of three dimensions": ({}, shaped(Q, 2, 64, 64), Q),
    "a norm with other numbers": ({}, shaped(NORM, 32), NORM),
    "an unknown key": ({"attention.of_tomorrow": 0.5}, same, "llama.attention.of_tomorrow is 0.5, and nothing here"),
    "a key of others": ({"attention.clamp_kqv": 8.0}, same, "llama.attention.clamp_kqv is 8, and nothing here reads"),
    "an unknown scaling": ({"rope.scaling.of_tomorrow": 2.0}, same, "rope.scaling.of_tomorrow is 2, and nothing"),
    "a list of widths": (
        {"feed_forward_length": [96, 96]},
        same,
        r"llama.feed_forward_length is \(96, 96\), which is not a number",
    ),
    "a list of heads": (
        {"attention.head_count": [4, 4]},
        same,
        r"llama.attention.head_count is \(4, 4\), which is not a number",
    ),
    "a list of KV heads": (
        {"attention.head_count_kv": [2, 2]},
        same,
        r"llama.attention.head_count_kv is \(2, 2\), and nothing here",
    ),
    "a list of bases": (
        {"rope.freq_base": [1e4, 1e4]},
        same,
        r"llama.rope.freq_base is \(1.*\), which is not a number",
    ),
    "a list of factors": (
        {"rope.scaling.factor": [2.0, 2.0]},
        same,
        r"rope.scaling.factor is \(2.0, 2.0\), and nothing",
    ),
    "a text for a factor": (
        {"rope.scaling.factor": "2"},
        same,
        "rope.scaling.factor is '2', and nothing here reads it",
    ),
    "a list of blocks": ({"block_count": [2]}, same, r"llama.block_count is \(2,\), which is not a number"),
    "a text for a number": ({"embedding_length": "64"}, same, "llama.embedding_length is '64', which is not a number"),
    "no number of the width": ({"embedding_length": None}, same, "the file lacks llama.embedding_length"),
    "no blocks": ({"block_count": 0}, same, "llama.block_count is 0: no model has so many"),
    "blocks of predictors alone": (
        {"nextn_predict_layers": 2},
        same,
        "llama.block_count is 2, of which 2 predict further tokens: no model has so many",
    ),
    "10 000 layers": ({"block_count": 10_000}, same, "llama.block_count is 10000: no model has so many"),
    "another width": (
        {"embedding_length": 96},
        same,
        "llama.rope.dimension_count is 16, and the model would rotate 24",
    ),
    "no number of heads": ({"attention.head_count": None}, same, "the file lacks llama.attention.head_count"),
    "no KV heads": ({"attention.head_count_kv": 0}, same, "llama.attention.head_count_kv is 0"),
    "another type": ({"attention.layer_norm_rms_epsilon": 1}, same, "not those of llama: .*rms_norm_eps.*expected fl"),
    "no width": ({"embedding_length": 0}, same, "llama.attention.head_count is 4, of a width of 0"),
    "no heads": ({"attention.head_count": 0}, same, "llama.attention.head_count is 0"),
}


def require_refused(file: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        tiny.read_file(file)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_is_no_model_is_refused_by_name(fault: str, cache: Path, tmp_path: Path) -> None:
    values, changed, message = FAULTS[fault]
    model = made("llama", EPSILON | {"rope_parameters": rope()})
    tensors = changed(tensors_of(model, "llama"))
    require_refused(written(tmp_path / "tiny.gguf", "llama", model.config, VALUES | values, tensors), message)
    assert not [path for path in cache.rglob("*") if path.is_file() and path.suffix in (".safetensors", ".json")]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"expert_count": 0}, "deepseek2.leading_dense_block_count is 1, and the model would have 3"),
        ({"expert_count": 4}, "the model takes .* where the file has .*_exps"),
        ({"expert_used_count": 0}, "deepseek2.expert_used_count is 0, of 8 experts"),
        ({"expert_used_count": 9}, "deepseek2.expert_used_count is 9, of 8 experts"),
        ({"expert_count": [8, 8, 8]}, r"deepseek2.expert_count is \(8, 8, 8\), which is not a number"),
    ],
)
def test_a_mixture_with_other_experts_is_refused_by_name(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = deepseek("V3")
    values = deepseek_values(model, is_split=True) | values
    tensors = deepseek_tensors(model, is_split=True)
    require_refused(written(tmp_path / "tiny.gguf", "deepseek2", model.config, values, tensors), message)
