"""Experts of mixtures: what lies between their products, and the compiled operator in the place of the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.activations import ACT2FN

from diskprefix.model.exact.mixtures import curves_of, experts, experts_of, is_mixture, matrices_of
from diskprefix.model.exact.rows import linear
from diskprefix.native.library import operators
from tests.exactness.architectures import tiny_model


def mixture_of(name: str) -> Any:
    return next(module for module in tiny_model(name, torch.bfloat16).modules() if is_mixture(module))


def step(num_experts: int, width: int, count: int = 20) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(count, width, generator=generator).bfloat16()
    chosen = torch.rand(count, num_experts, generator=generator).argsort(1)[:, :2]
    return rows, chosen, torch.rand(count, 2, generator=generator)


@pytest.mark.parametrize(
    "name", ["mixtral", "gpt_oss", "deepseek_v4", "minimax_m3_vl_text", "hy_v4", "nemotron_h", "aria_text"]
)
@torch.inference_mode()
def test_matrices_and_curves_are_those_of_the_module(name: str) -> None:
    """Gates that are clamped or not, side by side or behind each other, turned or not, with biases, and none."""
    module = mixture_of(name)
    matrices, curves = matrices_of(module), curves_of(module)
    assert curves is not None
    assert (curves.up is not None) == (name not in ("mixtral", "aria_text", "nemotron_h"))
    rows, _, _ = step(*matrices["gate"][0].shape[::2])
    rows = rows * 8  # so that some are clamped

    def of(part: str, some: torch.Tensor) -> torch.Tensor:
        weight, bias = matrices[part]
        return linear(some, weight[3], None if bias is None else bias[3])

    found = of("down", curves(of("gate", rows), of("up", rows) if "up" in matrices else None))
    chosen, weights = torch.full((len(rows), 1), 3), torch.ones(len(rows), 1)
    assert torch.equal(found, experts(module, rows, chosen, weights))


@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh"])
def test_a_gate_with_gelu_has_curves(name: str) -> None:
    module = mixture_of("mixtral")
    module.act_fn = ACT2FN[name]
    assert curves_of(module) is not None


@pytest.mark.parametrize("name", ["mixtral", "minimax_m3_vl_text", "nemotron_h"])
@torch.inference_mode()
def test_the_operator_gives_what_the_module_gives_but_for_rounding(name: str) -> None:
    compiled, module = operators(), mixture_of(name)
    assert compiled is not None
    found = experts_of(module)
    assert found is not None
    given = step(len(found.gate), found.gate[0].columns)
    expected = experts(module, *given).float()
    assert float((found(compiled, *given).float() - expected).norm() / expected.norm()) < 0.005


@pytest.mark.parametrize("name", ["gpt_oss", "beam"])
def test_experts_that_the_operator_does_not_take_stay_as_they_are(name: str) -> None:
    """Matrices that are turned, and a gate without curves."""
    assert experts_of(mixture_of(name)) is None
