"""Decoders: attention and gated products in each layer, and what takes their place in some.

y = x + o(attention(q(n), k(n), v(n))), z = y + down(f(gate(m)) × up(m)), where n and m are norms of x and y. With norms
around a part, what is added has a norm of its own.
"""

from __future__ import annotations

from diskprefix.model.config import DecoderConfig, LayerConfig
from diskprefix.model.families.recurrent import short_convolution
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
    is_around = config.norms == "around"
    rows = plan.norm(hidden, slots.norm("input_layernorm"))
    if layer.mixer == "short_convolution":
        rows = short_convolution(plan, layer, slots.within("conv"), rows)
    else:
        rows = attention(plan, config, layer, slots.within("self_attn"), rows, angles)
    if is_around:
        rows = plan.norm(rows, slots.norm("post_attention_layernorm"))
    plan.add(hidden, rows, config.residual_multiplier)
    rows = plan.norm(hidden, slots.norm("pre_feedforward_layernorm" if is_around else "post_attention_layernorm"))
    feed_forward = mixture if layer.feed_forward == "mixture" else gated_products
    rows = feed_forward(plan, config, slots.within("mlp"), rows)
    if is_around:
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
    of_query, of_key = (slots.norm(f"{one}_norm") if config.has_head_norms else None for one in "qk")
    turned = None if layer.rotary is None else angles[layer.rotary]
    plan.heads(query, dim, norm=of_query, angles=turned)
    plan.heads(key, dim, norm=of_key, angles=turned, to=keys)
    plan.heads(value, dim, to=values)
    attended = plan.attention(
        query,
        keys,
        values,
        key_dim=dim,
        value_dim=dim,
        num_kv_heads=config.num_key_value_heads,
        scale=config.scale,
        window=layer.window,
        softcap=config.softcap,
        sinks=slots.numbers("sinks"),
        sees_pictures=config.sees_pictures == "all" or (config.sees_pictures == "windowed" and layer.window > 0),
    )
    return plan.product(attended, slots.matrix("o_proj"))


def gated_products(plan: ComputePlan, config: DecoderConfig, slots: Slots, rows: Buffer) -> Buffer:
    """Returns down(f(gate) × up)."""
    gate, up = plan.products(rows, slots.matrix("gate_proj"), slots.matrix("up_proj"))
    return plan.product(plan.gated(gate, up, config.activation), slots.matrix("down_proj"))


def mixture(plan: ComputePlan, config: DecoderConfig, slots: Slots, rows: Buffer) -> Buffer:
    """Returns Σ weight × expert over the experts that the router chooses."""
    assert config.mixture is not None
    of_router = slots.within("gate")
    is_float = config.mixture.has_float_router
    logits = plan.product(plan.widened(rows) if is_float else rows, of_router.matrix("", is_float=is_float))
    routes = plan.routes(logits, config.mixture.router, of_router.numbers("e_score_correction_bias"))
    return plan.experts(rows, routes, slots.experts("experts"), config.activation)
