"""Weights with which layers remember for thousands of tokens, as trained ones do. Random ones forget within a few."""

from __future__ import annotations

import math
from typing import Any

import torch

LEAST_STEP, LARGEST_STEP, LARGEST_RATE = 1e-5, 0.3, 16.0
"""The steps that the biases of a layer make, and the largest decay of a step of one. Mamba 2 and the gated delta rule
begin their training with rates up to this one."""
SPREAD = 2.5
"""How much more than before a step depends on its token: it is large for a few tokens, whose inputs stay."""


@torch.no_grad()
def remember(model: Any) -> None:
    """Makes the biases of a model's steps those of steps from `LEAST_STEP` on, spread evenly by their logarithm over
    its heads (over their channels with Kimi's delta rule), and the rates of decay 1 to `LARGEST_RATE`. The heads with
    the smallest steps have the slowest decays. All numbers are such as bfloat16 has."""
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if "A_log" not in own:
            continue
        bias, rates = own["dt_bias"], own["A_log"]
        steps = torch.logspace(math.log10(LEAST_STEP), math.log10(LARGEST_STEP), bias.numel(), dtype=torch.float64)
        # softplus(x + log(1 - exp(-x))) = x
        bias.copy_((steps + torch.log(-torch.expm1(-steps))).bfloat16())
        rates.copy_(torch.linspace(0, math.log(LARGEST_RATE), rates.numel()).reshape(rates.shape).bfloat16())
        heads = rates.numel()
        for name, first in (("in_proj", -heads), ("in_proj_a", 0), ("in_proj_ba", 0), ("a_proj", 0), ("f_b_proj", 0)):
            if (matrix := getattr(module, name, None)) is not None:
                matrix.weight[first:] = (matrix.weight[first:] * SPREAD).bfloat16()
