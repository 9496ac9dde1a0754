"""The parts of layers behind attention: gated or plain products, or a mixture of experts."""

from __future__ import annotations

from diskprefix.model.config import DecoderConfig, LayerConfig
from diskprefix.model.operands import Buffer
from diskprefix.model.plan import ComputePlan
from diskprefix.model.slots import Slots


def gated_products(plan: ComputePlan, config: DecoderConfig, layer: LayerConfig, slots: Slots, rows: Buffer) -> Buffer:
    """Returns down(f(gate) × up)."""
    if config.has_joined_gate_up:
        both = plan.product(rows, slots.matrix("gate_up_proj"))
        gate, up = both.part(0, both.width // 2), both.part(both.width // 2, both.width // 2)
    else:
        gate, up = plan.products(rows, slots.matrix("gate_proj"), slots.matrix("up_proj"))
    if layer.cut_off:
        plan.cut_off(gate, layer.cut_off)
    plan.scale(gate, config.multipliers.gates)
    gated = plan.gated(gate, up, config.activation)
    if config.has_inner_norms:
        gated = plan.norm(gated, slots.norm("inner_norm"))
    out = plan.product(gated, slots.matrix("down_proj"))
    plan.scale(out, config.multipliers.products)
    return out


def plain_products(plan: ComputePlan, config: DecoderConfig, _layer: LayerConfig, slots: Slots, rows: Buffer) -> Buffer:
    """Returns down(f(up))."""
    up = plan.product(rows, slots.matrix("up_proj"))
    return plan.product(plan.gated(up, None, config.activation), slots.matrix("down_proj"))


def mixture(plan: ComputePlan, config: DecoderConfig, layer: LayerConfig, slots: Slots, rows: Buffer) -> Buffer:
    """Returns Σ weight × expert over the experts that the router chooses, plus the shared products."""
    mix = config.mixture
    assert mix is not None
    is_float = mix.has_float_router
    logits = plan.product(plan.widened(rows) if is_float else rows, slots.matrix("gate", is_float=is_float))
    routes = plan.routes(logits, mix.router, slots.numbers("gate.e_score_correction_bias"))
    of_experts = plan.product(rows, slots.matrix("fc1_latent_proj")) if mix.has_latents else rows
    found = plan.experts(of_experts, routes, slots.experts("experts"), mix.gating)
    if mix.has_latents:
        found = plan.product(found, slots.matrix("fc2_latent_proj"))
    if mix.shared:
        products = plain_products if mix.shared == "ungated" else gated_products
        shared = products(plan, config, layer, slots.within("shared_experts"), rows)
        if mix.shared == "weighed":
            shared = plan.gated(plan.product(rows, slots.matrix("shared_expert_gate")), shared, "sigmoid")
        plan.add(found, shared)
        if mix.is_average:
            plan.scale(found, 0.5)
    return plan.norm(found, slots.norm("post_mlp_layernorm")) if mix.has_norm else found


FEED_FORWARD = {
    "gated": gated_products,
    "gated beside mixture": gated_products,
    "plain": plain_products,
    "mixture": mixture,
}
"""By the names in `LayerConfig`."""
