"""Decoders: attention and gated products in each layer, and what takes their place in some.

y = x + o(attention(q(n), k(n), v(n))), z = y + down(f(gate(m)) × up(m)), where n and m are norms of x and y. With norms
around a part, what is added has a norm of its own.
"""

from __future__ import annotations

from diskprefix.model.config import DecoderConfig, LayerConfig
from diskprefix.model.families.altup import correct, expanded, joined, predicted
from diskprefix.model.families.late_gemma import inputs_of_layers, laurel, layer_input, mixture_beside
from diskprefix.model.families.latent_decoder import latent_attention
from diskprefix.model.plan import Buffer, ComputePlan, Location, RotaryAngles
from diskprefix.model.slots import Slots


def decoder(plan: ComputePlan, config: DecoderConfig, slots: Slots) -> None:
    """Writes the plan of a step."""
    angles = {name: plan.angles(rotary) for name, rotary in config.rotary.items()}
    hidden = plan.embeddings(slots.table("embed_tokens"))
    if config.embedding_multiplier != 1:
        plan.scale(hidden, config.embedding_multiplier)
    plan.pictures(hidden)
    inputs = inputs_of_layers(plan, config, slots, hidden) if config.has_layer_inputs else None
    streams = expanded(plan, slots, hidden, config.num_streams)
    for number, layer in enumerate(config.layers):
        if number == config.num_writing:
            streams = [plan.that_get_logits(one) for one in streams]
            inputs = None if inputs is None else plan.that_get_logits(inputs)
            angles = {name: plan.angles_of_logits(one) for name, one in angles.items()}
        of_layer = slots.within(f"layers.{number}")
        with plan.scratch():
            before = predicted(plan, of_layer.within("altup"), streams)
            hidden = plan.copy(before[0]) if config.num_streams > 1 else streams[0]
            decoder_layer(plan, config, layer, of_layer, hidden, angles)
            if config.num_streams > 1:
                correct(plan, of_layer.within("altup"), streams, before, hidden)
                hidden = plan.weighed(streams[0], of_layer.vector("altup.correct_output_scale"))
            if inputs is not None:
                found = layer_input(plan, config, of_layer, hidden, inputs, number)
                for stream in streams[1:] or streams:
                    plan.add(stream, found)
            if config.has_layer_scales:
                plan.scale(streams[0], of_layer.factor("layer_scalar"))
        if number < config.deepstack:
            plan.pictures(hidden, number + 1)
    plan.hidden = plan.norm(joined(plan, slots, streams), slots.norm("norm"))
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
    rows = plan.norm(hidden, slots.norm("input_layernorm")) if config.norms != "behind" else hidden
    mixer = latent_attention if layer.mixer == "latent" else attention
    beside = laurel(plan, slots.within("laurel"), rows) if config.num_streams > 1 else None
    rows = mixer(plan, config, layer, slots.within("self_attn"), rows, angles)
    if config.norms != "before":
        rows = plan.norm(rows, slots.norm("post_attention_layernorm"))
    plan.add(hidden, rows, config.residual_multiplier)
    if beside is not None:
        plan.add(hidden, beside)
        plan.scale(hidden, 2**-0.5)
    before = "pre_feedforward_layernorm" if config.norms == "around" else "post_attention_layernorm"
    rows = plan.norm(hidden, slots.norm(before)) if config.norms != "behind" else hidden
    if layer.feed_forward == "mixture":
        rows = mixture(plan, config, slots.within("mlp"), rows)
    else:
        rows = gated_products(plan, config, slots.within("mlp"), rows, layer.cut_off)
    if layer.feed_forward == "gated beside mixture":
        rows = mixture_beside(plan, config, slots, hidden, rows)
    if config.norms != "before":
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
    """Returns the attention of a layer. Keys and values go to memory first, unless the layer only reads it."""
    keys, values, last = layer.places["keys"], layer.places["values"], slots.matrix("o_proj")
    dim = keys.dim
    turned = None if layer.rotary is None else angles[layer.rotary]
    names = ("q_proj",) if layer.only_reads else ("q_proj", "k_proj", "v_proj")
    query, *remembered = plan.products(rows, *(slots.matrix(name) for name in names if slots.has(name)))
    value_dim = last.columns // (query.width // dim)
    if remembered:
        key, value = remembered[0], plan.copy(remembered[0]) if len(remembered) == 1 else remembered[1]
        heads(plan, config, slots, "k_norm", key, dim, turned, keys)
        if config.value_multiplier != 1:
            plan.scale(value, config.value_multiplier)
        of_values = slots.unweighted_norm(value_dim) if config.has_value_norms else None
        plan.heads(value, value_dim, norm=of_values, to=values)
    query = heads(plan, config, slots, "q_norm", query, dim, turned)
    if layer.tempering is not None:
        plan.temper(query, *layer.tempering)
    attended = plan.attention(
        query,
        keys,
        values,
        key_dim=dim,
        value_dim=value_dim,
        num_kv_heads=keys.heads,
        scale=config.scale,
        window=layer.window,
        chunk=layer.chunk,
        softcap=config.softcap,
        sinks=slots.numbers("sinks"),
        sees_pictures=config.sees_pictures == "all" or (config.sees_pictures == "windowed" and layer.window > 0),
    )
    if config.attention_gate:
        attended = plan.gated(plan.product(rows, slots.matrix("gate_proj")), attended, config.attention_gate)
    return plan.product(attended, last)


def heads(
    plan: ComputePlan,
    config: DecoderConfig,
    slots: Slots,
    name: str,
    rows: Buffer,
    dim: int,
    turned: RotaryAngles | None,
    to: Location | None = None,
) -> Buffer:
    """Returns heads with the norm of this name, and turned. They go to memory `to`."""
    norm = slots.norm(name) if config.has_head_norms else None
    if config.has_row_norms:
        rows = plan.norm(rows, slots.norm(name))
    if config.has_unweighted_norms and turned is not None:
        norm = slots.unweighted_norm(dim)
    if config.has_norms_behind_rotary and turned is not None:
        plan.heads(rows, dim, angles=turned)
        turned = None
    plan.heads(rows, dim, norm=norm, angles=turned, to=to)
    return rows


def gated_products(
    plan: ComputePlan, config: DecoderConfig, slots: Slots, rows: Buffer, cut_off: float = 0.0
) -> Buffer:
    """Returns down(f(gate) × up)."""
    if config.has_joined_gate_up:
        both = plan.product(rows, slots.matrix("gate_up_proj"))
        gate, up = both.part(0, both.width // 2), both.part(both.width // 2, both.width // 2)
    else:
        gate, up = plan.products(rows, slots.matrix("gate_proj"), slots.matrix("up_proj"))
    if cut_off:
        plan.cut_off(gate, cut_off)
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
