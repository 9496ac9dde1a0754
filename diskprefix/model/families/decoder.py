"""Decoders: attention and gated products in each layer, and what takes their place in some.

y = x + o(attention(q(n), k(n), v(n))), z = y + down(f(gate(m)) × up(m)), where n and m are norms of x and y. With norms
around a part, what is added has a norm of its own. If the parts are parallel, m is a norm of x, or n.
"""

from __future__ import annotations

from diskprefix.model.config import DecoderConfig, LayerConfig
from diskprefix.model.families.altup import correct, expanded, mean_of_streams, predicted
from diskprefix.model.families.feed_forward import FEED_FORWARD
from diskprefix.model.families.late_gemma import inputs_of_layers, laurel, layer_input, mixture_beside
from diskprefix.model.families.latent_decoder import latent_attention
from diskprefix.model.families.state_layers import delta_rule, short_convolution, state_space
from diskprefix.model.plan import Buffer, ComputePlan, Location, RotaryAngles
from diskprefix.model.slots import Slots


def decoder(plan: ComputePlan, config: DecoderConfig, slots: Slots) -> None:
    """Writes the plan of a step."""
    angles = {name: plan.angles(rotary) for name, rotary in config.rotary.items()}
    hidden = plan.embeddings(slots.table("embed_tokens"))
    plan.scale(hidden, config.embedding_multiplier)
    if config.position_offset is not None:
        plan.add(hidden, plan.of_positions(slots.table("embed_positions"), config.position_offset))
    if config.has_embedding_norm:
        hidden = plan.norm(hidden, slots.norm("embedding_norm"))
    plan.pictures(hidden)
    if config.has_float_residual:
        hidden = plan.widened(hidden)
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
    plan.hidden = plan.norm(mean_of_streams(plan, slots, streams), slots.norm("norm"))
    plan.logits = plan.product(plan.that_get_logits(plan.hidden), slots.head())
    plan.scale(plan.logits, config.logits_multiplier)
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
    rows = normed = plan.norm(hidden, slots.norm("input_layernorm")) if layer.norms != "behind" else hidden
    before = "pre_feedforward_layernorm" if layer.norms == "around" else "post_attention_layernorm"
    if config.parallel == "two_norms":
        normed = plan.norm(hidden, slots.norm(before))
    if layer.mixer != "none":
        beside = laurel(plan, slots.within("laurel"), rows) if config.num_streams > 1 else None
        rows = mixed(plan, config, layer, slots, rows, angles)
        if layer.norms != "before":
            rows = plan.norm(rows, slots.norm("post_attention_layernorm"))
        plan.add(hidden, rows, config.residual_multiplier)
        if beside is not None:
            plan.add(hidden, beside)
            plan.scale(hidden, 2**-0.5)
    if layer.feed_forward == "none":
        return
    if not (config.parallel or layer.mixer == "none"):
        normed = plan.norm(hidden, slots.norm(before)) if layer.norms != "behind" else hidden
    rows = FEED_FORWARD[layer.feed_forward](plan, config, layer, slots.within("mlp"), normed)
    if layer.feed_forward == "gated beside mixture":
        rows = mixture_beside(plan, config, slots, hidden, rows)
    if layer.norms != "before":
        rows = plan.norm(rows, slots.norm("post_feedforward_layernorm"))
    plan.add(hidden, rows, config.residual_multiplier)


def mixed(
    plan: ComputePlan,
    config: DecoderConfig,
    layer: LayerConfig,
    slots: Slots,
    rows: Buffer,
    angles: dict[str, RotaryAngles],
) -> Buffer:
    """Returns what a layer computes from other tokens."""
    match layer.mixer:
        case "short_convolution":
            return short_convolution(plan, layer, slots.within("conv"), rows)
        case "delta_rule":
            return delta_rule(plan, config, layer, slots.within("linear_attn"), rows)
        case "state_space":
            return state_space(plan, config, layer, slots.within("mamba"), rows)
        case "latent":
            return latent_attention(plan, config, layer, slots.within("self_attn"), rows, angles)
    attended = attention(plan, config, layer, slots.within("self_attn"), rows, angles)
    if layer.mixer == "space_and_attention":
        plan.add(attended, state_space(plan, config, layer, slots.within("mamba"), rows))
    return attended


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
    rows = plan.scaled(rows, config.multipliers.attention_in)
    if config.joined:
        joined = plan.product(rows, slots.matrix("qkv_proj"))
        query, *remembered = parted(plan, joined, keys.heads, dim, in_heads=config.joined == "in_heads")
    else:
        names = ("q_proj",) if layer.only_reads else ("q_proj", "k_proj", "v_proj")
        query, *remembered = plan.products(rows, *(slots.matrix(name) for name in names if slots.has(name)))
    gate = None
    if config.has_gate_in_query:
        both = plan.by_parts(query, query.width // (2 * dim), dim, dim)
        query, gate = both.part(0, both.width // 2), both.part(both.width // 2, both.width // 2)
    elif config.attention_gate:
        gate = plan.product(rows, slots.matrix("gate_proj"))
    value_dim = last.columns // (query.width // dim)
    if remembered:
        key, value = remembered[0], plan.copy(remembered[0]) if len(remembered) == 1 else remembered[1]
        plan.scale(key, config.multipliers.keys)
        heads(plan, config, slots, "k_norm", key, dim, turned, keys)
        plan.scale(value, config.multipliers.values)
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
    if gate is not None:
        attended = plan.gated(gate, attended, config.attention_gate)
    if config.has_inner_norms:
        attended = plan.norm(attended, slots.norm("inner_norm"))
    out = plan.product(attended, last)
    plan.scale(out, config.multipliers.attention_out)
    return out


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


def parted(plan: ComputePlan, joined: Buffer, heads: int, dim: int, *, in_heads: bool) -> list[Buffer]:
    """Returns queries, keys and values of rows in which they lie joined."""
    groups, keys = (heads, dim) if in_heads else (1, heads * dim)
    queries = joined.width // groups - 2 * keys
    parts = (0, queries), (queries, keys), (queries + keys, keys)
    return [plan.of_groups(joined, groups, first, width) for first, width in parts]
