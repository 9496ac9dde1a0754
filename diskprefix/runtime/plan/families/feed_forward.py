"""The feed-forward parts of layers: gated or plain products, or a mixture of experts."""

from __future__ import annotations

import math

from diskprefix.runtime.plan.config import DecoderConfig, LayerConfig, MixtureConfig
from diskprefix.runtime.plan.operands import Buffer
from diskprefix.runtime.plan.plan import ComputePlan
from diskprefix.runtime.plan.slots import Slots

_XIELU_BOUND = -1e-6
"""The largest x for which exp(x) - 1 is computed. bfloat16 has only a number near it."""


def gated_products(plan: ComputePlan, config: DecoderConfig, layer: LayerConfig, slots: Slots, rows: Buffer) -> Buffer:
    """Returns down(f(gate) × up)."""
    if config.gates.is_joined:
        both = plan.product(rows, slots.matrix("gate_up_proj"))
        gate, up = both.part(0, both.width // 2), both.part(both.width // 2, both.width // 2)
    else:
        gate, up = plan.products(rows, slots.matrix("gate_proj"), slots.matrix("up_proj"))
    if layer.gate_sparsity_deviations:
        plan.sparsify_gate(gate, layer.gate_sparsity_deviations)
    plan.scale(gate, config.multipliers.gates)
    gated = plan.gated(gate, up, config.gates.activation)
    if config.norms.inner:
        gated = plan.norm(gated, slots.norm("inner_norm"))
    out = plan.product(gated, slots.matrix("down_proj"))
    plan.scale(out, config.multipliers.products)
    return out


def plain_products(plan: ComputePlan, config: DecoderConfig, _layer: LayerConfig, slots: Slots, rows: Buffer) -> Buffer:
    """Returns down(f(up))."""
    up = plan.product(rows, slots.matrix("up_proj"))
    activation = config.gates.activation
    inner = xielu(plan, slots.within("act_fn"), up) if activation == "xielu" else plan.gated(up, None, activation)
    return plan.product(inner, slots.matrix("down_proj"))


def xielu(plan: ComputePlan, slots: Slots, rows: Buffer) -> Buffer:
    """Returns xIELU: p x² + b x for x above zero, and n (exp(x) - 1 - x) + b x for other x. The learned numbers are
    p = softplus(alpha_p) and n = b + softplus(alpha_n). Raises `ValueError` for another bound of x below zero."""
    above, below, slope, bound = (slots.factor(name) for name in ("alpha_p", "alpha_n", "beta", "eps"))
    if not math.isclose(bound, _XIELU_BOUND, rel_tol=0.01):
        raise ValueError(f"act_fn.eps is {bound}, {_XIELU_BOUND} expected")
    total = plan.gated(rows, None, "squared_relu")
    plan.scale(total, math.log1p(math.exp(above)))
    plan.add(total, plan.gated(rows, None, "expm1_excess"), slope + math.log1p(math.exp(below)))
    plan.add(total, rows, slope)
    return total


def router_logits(plan: ComputePlan, mix: MixtureConfig, slots: Slots, rows: Buffer) -> Buffer:
    """Returns the score of each expert for each row, before a function makes weights of them."""
    is_float = mix.has_float_router
    return plan.product(plan.widened(rows) if is_float else rows, slots.matrix("gate", is_float=is_float))


def mixture(
    plan: ComputePlan,
    config: DecoderConfig,
    layer: LayerConfig,
    slots: Slots,
    rows: Buffer,
    logits: Buffer | None = None,
) -> Buffer:
    """Returns Σ weight × expert over the experts that the router chooses, plus the shared products. `logits` are those
    of the router if it has read other rows."""
    mix = config.mixture
    assert mix is not None
    logits = router_logits(plan, mix, slots, rows) if logits is None else logits
    routes = plan.routes(logits, mix.router, slots.numbers("gate.e_score_correction_bias"))
    inputs = plan.product(rows, slots.matrix("fc1_latent_proj")) if mix.has_latents else rows
    mixed = plan.experts(inputs, routes, slots.experts("experts"), mix.gating)
    if mix.has_latents:
        mixed = plan.product(mixed, slots.matrix("fc2_latent_proj"))
    if mix.shared:
        products = plain_products if mix.shared == "ungated" else gated_products
        shared = products(plan, config, layer, slots.within("shared_experts"), rows)
        if mix.shared == "weighed":
            shared = plan.gated(plan.product(rows, slots.matrix("shared_expert_gate")), shared, "sigmoid")
        plan.add(mixed, shared)
        if mix.is_average:
            plan.scale(mixed, 0.5)
    return plan.norm(mixed, slots.norm("post_mlp_layernorm")) if mix.has_norm else mixed


FEED_FORWARD = {
    "gated": gated_products,
    "gated plus mixture": gated_products,
    "plain": plain_products,
    "mixture": mixture,
}
"""The functions by their names in `LayerConfig`."""
