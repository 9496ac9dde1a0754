"""Parts of Gemma 3n and 4: inputs of layers, a low-rank branch, and a mixture added to gated products.

e = (norm(P · x × width^-½) + E × inner^½) ÷ √2 for all layers, where x are the embeddings and E the embeddings of the
layers. After each layer, z becomes z + norm(p · (f(g · z) × e)).
"""

from __future__ import annotations

from msgspec.structs import replace

from diskprefix.native import calls
from diskprefix.runtime.plan.config import DecoderConfig
from diskprefix.runtime.plan.operands import Buffer
from diskprefix.runtime.plan.plan import ComputePlan
from diskprefix.runtime.plan.slots import Slots


def inputs_of_layers(plan: ComputePlan, config: DecoderConfig, slots: Slots, embedded: Buffer) -> Buffer:
    """Returns the inputs of all layers, [rows, layers × numbers of each]."""
    norm = slots.norm("per_layer_projection_norm")
    inputs = plan.product(embedded, slots.matrix("per_layer_model_projection"))
    plan.scale(inputs, embedded.width**-0.5)
    plan.norm_rotate_store(inputs, norm.weight.shape[0], norm=norm)
    embedded_by_layer = plan.embeddings(slots.table("embed_tokens_per_layer"))
    plan.scale(embedded_by_layer, config.inputs.layer_multiplier)
    plan.add(inputs, embedded_by_layer)
    plan.scale(inputs, 2**-0.5)
    return inputs


def layer_input(
    plan: ComputePlan, config: DecoderConfig, slots: Slots, hidden: Buffer, inputs: Buffer, layer: int
) -> Buffer:
    """Returns the result of a layer's own input, which is added after the layer."""
    gate = plan.product(hidden, slots.matrix("per_layer_input_gate"))
    gated = plan.gated(gate, inputs.part(layer * gate.width, gate.width), config.gates.activation)
    projected = plan.product(gated, slots.matrix("per_layer_projection"))
    return plan.norm(projected, slots.norm("post_per_layer_input_norm"))


def laurel(plan: ComputePlan, slots: Slots, rows: Buffer) -> Buffer:
    """Returns rows + norm(right · left · rows)."""
    branch = plan.product(plan.product(rows, slots.matrix("linear_left")), slots.matrix("linear_right"))
    branch = plan.norm(branch, slots.norm("post_laurel_norm"))
    plan.add(branch, rows)
    return branch


def gated_plus_mixture(plan: ComputePlan, config: DecoderConfig, slots: Slots, hidden: Buffer, gated: Buffer) -> Buffer:
    """Returns the gated products plus a mixture over `hidden`, whose router has its own norm."""
    mix = config.mixture
    assert mix is not None
    rounded = replace(slots.norm("router.scale"), kind=calls.ROUNDED)
    rows = plan.norm(hidden, rounded)
    plan.scale(rows, hidden.width**-0.5)
    logits = plan.product(rows, slots.matrix("router.proj"))
    routes = plan.routes(logits, mix.router, None, slots.numbers("router.per_expert_scale"))
    rows = plan.norm(hidden, slots.norm("pre_feedforward_layernorm_2"))
    mixed = plan.experts(rows, routes, slots.experts("experts"), mix.gating)
    total = plan.norm(gated, slots.norm("post_feedforward_layernorm_1"))
    plan.add(total, plan.norm(mixed, slots.norm("post_feedforward_layernorm_2")))
    return total
