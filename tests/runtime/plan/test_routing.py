"""Routers choose the experts of a row as transformers' do, ties by number."""

from __future__ import annotations

import ctypes
from array import array

import numpy as np
import pytest
import torch
from transformers.models.dots1.modeling_dots1 import Dots1TopkRouter
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from diskprefix.native import calls
from diskprefix.native.library import operators
from diskprefix.runtime.plan.operands import DenseMatrix, PlannedRun, Router, Weight
from diskprefix.runtime.plan.plan import ComputePlan
from diskprefix.runtime.plan.plan_runner import PlanRunner
from tests.exactness.architectures import shrink

NONE = float("nan")


def weight(numbers: torch.Tensor) -> Weight:
    return Weight(numbers.data_ptr(), tuple(numbers.shape), numbers.numpy())


def routed(logits: torch.Tensor, router: Router, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers and weights of the experts of each row."""
    compiled, count = operators(), len(logits)
    assert compiled is not None
    plan = ComputePlan(calls.FLOAT32, count, count)
    rows = plan.embeddings(DenseMatrix(weight(logits)))
    found = plan.routes(rows, router, None if bias is None else weight(bias))
    positions = np.zeros((1, count), np.int64)
    PlanRunner(compiled, plan, 16).run([PlannedRun(0, count, 0, [], array("q"))], np.arange(count), positions, 1)
    size = count * router.num_chosen
    chosen = np.frombuffer(ctypes.string_at(found.chosen, 8 * size), np.int64)
    weights = np.frombuffer(ctypes.string_at(found.weights, 4 * size), np.float32)
    shape = count, router.num_chosen
    return torch.from_numpy(chosen.copy()).view(shape), torch.from_numpy(weights.copy()).view(shape)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_chosen"])
def test_of_equal_experts_the_lower_number_is_chosen(scores: str) -> None:
    chosen, weights = routed(torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0]]), Router(3, scores, is_normed=True))
    assert chosen.tolist() == [[1, 3, 2]]
    assert weights[0, 0] == weights[0, 1] > weights[0, 2]
    assert weights.sum() == pytest.approx(1)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "softmax_of_chosen", "sparse_mixer"])
def test_a_nan_logit_makes_a_nan_weight(scores: str) -> None:
    chosen, weights = routed(torch.tensor([[1.0, 3.0, NONE], [NONE] * 3]), Router(2, scores, threshold=0.1))
    assert weights.isnan().any(dim=1).all()
    assert chosen.max() < 3


def test_groups_and_biases_decide_as_in_transformers() -> None:
    config = shrink("dots1", n_routed_experts=12, num_experts_per_tok=3, n_group=4, topk_group=2, norm_topk_prob=True)
    config.routed_scaling_factor = 2.5
    module, rows = Dots1TopkRouter(config), random(50, config.hidden_size)
    module.weight.data, module.e_score_correction_bias.data = random(12, config.hidden_size), random(12) / 4
    with torch.inference_mode():
        logits, expected_weights, expected = module(rows)
    router = Router(3, "sigmoid", is_normed=True, factor=2.5, groups=4, groups_chosen=2)
    chosen, weights = routed(logits, router, module.e_score_correction_bias)
    order = expected.argsort(dim=1)
    assert torch.equal(chosen.sort(dim=1).values, expected.gather(1, order))
    assert torch.allclose(weights.gather(1, chosen.argsort(dim=1)), expected_weights.gather(1, order), atol=1e-6)


def test_a_sparse_mixer_weighs_experts_as_in_transformers() -> None:
    logits = random(50, 8)
    expected_weights, expected = sparsemixer(logits, 0.2, False)
    chosen, weights = routed(logits, Router(2, "sparse_mixer", threshold=0.4))
    assert torch.equal(chosen, expected)
    assert torch.allclose(weights, expected_weights, atol=1e-6)


def test_a_router_of_more_experts_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="a router of other experts"):
        routed(random(1, 8), Router(5, groups=4, groups_chosen=2))
