"""Parts of Gemma 3n and 4: inputs of layers, a branch of low rank, and a mixture beside the gated products.

e = (norm(P · x × width^-½) + E × inner^½) ÷ √2 for all layers, where x are the embeddings and E those of the layers; z
becomes z + norm(p · (f(g · z) × e)) behind a layer.
"""

from __future__ import annotations

from msgspec.structs import replace

from diskprefix.model.config import DecoderConfig
from diskprefix.model.operands import Buffer
from diskprefix.model.plan import ComputePlan
from diskprefix.model.slots import Slots
from diskprefix.native import calls


def inputs_of_layers(plan: ComputePlan, config: DecoderConfig, slots: Slots, embedded: Buffer) -> Buffer:
    """Returns the inputs of all layers, [rows, layers × numbers of each]."""
    norm = slots.norm("per_layer_projection_norm")
    inputs = plan.product(embedded, slots.matrix("per_layer_model_projection"))
    plan.scale(inputs, embedded.width**-0.5)
    plan.heads(inputs, norm.weight.shape[0], norm=norm)
    of_layers = plan.embeddings(slots.table("embed_tokens_per_layer"))
    plan.scale(of_layers, config.layer_input_multiplier)
    plan.add(inputs, of_layers)
    plan.scale(inputs, 2**-0.5)
    return inputs


def layer_input(
    plan: ComputePlan, config: DecoderConfig, slots: Slots, hidden: Buffer, inputs: Buffer, layer: int
) -> Buffer:
    """Returns what a layer makes of its input, to be added behind it."""
    gate = plan.product(hidden, slots.matrix("per_layer_input_gate"))
    gated = plan.gated(gate, inputs.part(layer * gate.width, gate.width), config.activation)
    projected = plan.product(gated, slots.matrix("per_layer_projection"))
    return plan.norm(projected, slots.norm("post_per_layer_input_norm"))


def laurel(plan: ComputePlan, slots: Slots, rows: Buffer) -> Buffer:
    """Returns rows + norm(right · left · rows)."""
    found = plan.product(plan.product(rows, slots.matrix("linear_left")), slots.matrix("linear_right"))
    found = plan.norm(found, slots.norm("post_laurel_norm"))
    plan.add(found, rows)
    return found


def mixture_beside(plan: ComputePlan, config: DecoderConfig, slots: Slots, hidden: Buffer, gated: Buffer) -> Buffer:
    """Returns the gated products plus a mixture of `hidden`. Its router has a norm of its own."""
    mix = config.mixture
    assert mix is not None
    rounded = replace(slots.norm("router.scale"), kind=calls.ROUNDED)
    rows = plan.norm(hidden, rounded)
    plan.scale(rows, hidden.width**-0.5)
    logits = plan.product(rows, slots.matrix("router.proj"))
    routes = plan.routes(logits, mix.router, None, slots.numbers("router.per_expert_scale"))
    rows = plan.norm(hidden, slots.norm("pre_feedforward_layernorm_2"))
    found = plan.experts(rows, routes, slots.experts("experts"), mix.gating)
    total = plan.norm(gated, slots.norm("post_feedforward_layernorm_1"))
    plan.add(total, plan.norm(found, slots.norm("post_feedforward_layernorm_2")))
    return total
