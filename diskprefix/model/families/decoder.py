"""Decoders: attention and gated products in each layer, and what takes their place in some.

y = x + o(attention(q(n), k(n), v(n))), z = y + down(f(gate(m)) × up(m)), where n and m are norms of x and y. With norms
around a part, what is added has a norm of its own.
"""

from __future__ import annotations

from diskprefix.model.config import DecoderConfig, LayerConfig
from diskprefix.model.families.latent_decoder import latent_attention
from diskprefix.model.families.state_layers import delta_rule, short_convolution, state_space
from diskprefix.model.plan import Buffer, ComputePlan, RotaryAngles
from diskprefix.model.slots import Slots


def decoder(plan: ComputePlan, config: DecoderConfig, slots: Slots) -> None:
    """Writes the plan of a step."""
    angles = {name: plan.angles(rotary) for name, rotary in config.rotary.items()}
    hidden = plan.embeddings(slots.table("embed_tokens"))
    if config.embedding_multiplier != 1:
        plan.scale(hidden, config.embedding_multiplier)
    plan.pictures(hidden)
    for number, layer in enumerate(config.layers):
        with plan.scratch():
            decoder_layer(plan, config, layer, slots.within(f"layers.{number}"), hidden, angles)
        if number < config.deepstack:
            plan.pictures(hidden, number + 1)
    plan.hidden = plan.norm(hidden, slots.norm("norm"))
    plan.logits = plan.product(plan.that_get_logits(plan.hidden), slots.head())
    if config.logits_divisor != 1:
        plan.scale(plan.logits, 1 / config.logits_divisor)
    if config.logits_softcap:
        plan.logits = plan.gated(plan.logits, None, "tanh", config.logits_softcap)


def decoder_layer(
    plan: ComputePlan,
    config: DecoderConfig,
    layer: LayerConfig,
    slots: Slots,
    hidden: Buffer,
    angles: dict[str, RotaryAngles],
) -> None:
    """Adds what a layer computes to `hidden`."""
    rows = plan.norm(hidden, slots.norm("input_layernorm")) if layer.norms != "behind" else hidden
    if layer.mixer == "short_convolution":
        rows = short_convolution(plan, layer, slots.within("conv"), rows)
    elif layer.mixer == "delta_rule":
        rows = delta_rule(plan, config, layer, slots.within("linear_attn"), rows)
    elif layer.mixer == "state_space":
        rows = state_space(plan, config, layer, slots.within("mamba"), rows)
    else:
        mixer = latent_attention if layer.mixer == "latent" else attention
        rows = mixer(plan, config, layer, slots.within("self_attn"), rows, angles)
    if layer.norms != "before":
        rows = plan.norm(rows, slots.norm("post_attention_layernorm"))
    plan.add(hidden, rows, config.residual_multiplier)
    before = "pre_feedforward_layernorm" if layer.norms == "around" else "post_attention_layernorm"
    rows = plan.norm(hidden, slots.norm(before)) if layer.norms != "behind" else hidden
    feed_forward = mixture if layer.feed_forward == "mixture" else gated_products
    rows = feed_forward(plan, config, slots.within("mlp"), rows)
    if layer.norms != "before":
        rows = plan.norm(rows, slots.norm("post_feedforward_layernorm"))
    plan.add(hidden, rows, config.residual_multiplier)


def attention(
    plan: ComputePlan,
    config: DecoderConfig,
    layer: LayerConfig,
    slots: Slots,
    rows: Buffer,
    angles: dict[str, RotaryAngles],
) -> Buffer:
    """Returns the attention of a layer. Keys and values go to memory first."""
    dim, keys, values = config.head_dim, layer.places["keys"], layer.places["values"]
    query, key, value = plan.products(rows, *(slots.matrix(name) for name in ("q_proj", "k_proj", "v_proj")))
    gate = None
    if config.has_gate_in_query:
        both = plan.by_parts(query, query.width // (2 * dim), dim, dim)
        query, gate = both.part(0, both.width // 2), both.part(both.width // 2, both.width // 2)
    elif config.attention_gate:
        gate = plan.product(rows, slots.matrix("gate_proj"))
    num_kv_heads = key.width // dim
    value_dim = value.width // num_kv_heads
    if config.has_row_norms:
        query, key = plan.norm(query, slots.norm("q_norm")), plan.norm(key, slots.norm("k_norm"))
    of_query, of_key = (slots.norm(f"{one}_norm") if config.has_head_norms else None for one in "qk")
    turned = None if layer.rotary is None else angles[layer.rotary]
    if config.has_unweighted_norms and turned is not None:
        of_query = of_key = slots.unweighted_norm(dim)
    if config.has_norms_behind_rotary and turned is not None:
        plan.heads(query, dim, angles=turned)
        plan.heads(key, dim, angles=turned)
        turned = None
    plan.heads(query, dim, norm=of_query, angles=turned)
    plan.heads(key, dim, norm=of_key, angles=turned, to=keys)
    if layer.tempering is not None:
        plan.temper(query, *layer.tempering)
    if config.value_multiplier != 1:
        plan.scale(value, config.value_multiplier)
    plan.heads(value, value_dim, to=values)
    attended = plan.attention(
        query,
        keys,
        values,
        key_dim=dim,
        value_dim=value_dim,
        num_kv_heads=num_kv_heads,
        scale=config.scale,
        window=layer.window,
        chunk=layer.chunk,
        softcap=config.softcap,
        sinks=slots.numbers("sinks"),
        sees_pictures=config.sees_pictures == "all" or (config.sees_pictures == "windowed" and layer.window > 0),
    )
    if gate is not None:
        attended = plan.gated(gate, attended, config.attention_gate)
    return plan.product(attended, slots.matrix("o_proj"))


def gated_products(plan: ComputePlan, config: DecoderConfig, slots: Slots, rows: Buffer) -> Buffer:
    """Returns down(f(gate) × up)."""
    if config.has_joined_gate_up:
        both = plan.product(rows, slots.matrix("gate_up_proj"))
        gate, up = both.part(0, both.width // 2), both.part(both.width // 2, both.width // 2)
    else:
        gate, up = plan.products(rows, slots.matrix("gate_proj"), slots.matrix("up_proj"))
    return plan.product(plan.gated(gate, up, config.activation), slots.matrix("down_proj"))


def mixture(plan: ComputePlan, config: DecoderConfig, slots: Slots, rows: Buffer) -> Buffer:
    """Returns Σ weight × expert over the experts that the router chooses, plus the shared products."""
    mix = config.mixture
    assert mix is not None
    is_float = mix.has_float_router
    logits = plan.product(plan.widened(rows) if is_float else rows, slots.matrix("gate", is_float=is_float))
    routes = plan.routes(logits, mix.router, slots.numbers("gate.e_score_correction_bias"))
    found = plan.experts(rows, routes, slots.experts("experts"), mix.gating)
    if mix.shared:
        shared = gated_products(plan, config, slots.within("shared_experts"), rows)
        if mix.shared == "weighed":
            shared = plan.gated(plan.product(rows, slots.matrix("shared_expert_gate")), shared, "sigmoid")
        plan.add(found, shared)
    return found
