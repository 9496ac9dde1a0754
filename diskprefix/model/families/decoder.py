"""Decoders: attention and gated products in each layer, and what takes their place in some.

y = x + o(attention(q(n), k(n), v(n))), z = y + down(f(gate(m)) × up(m)), where n and m are norms of x and y. With norms
around a part, what is added has a norm of its own. If the parts are parallel, m is a norm of x, or n.
"""

from __future__ import annotations

from diskprefix.model.config import DecoderConfig, LayerConfig
from diskprefix.model.families.altup import correct, expanded, mean_of_streams, predicted
from diskprefix.model.families.feed_forward import FEED_FORWARD
from diskprefix.model.families.head_attention import attention
from diskprefix.model.families.late_gemma import inputs_of_layers, laurel, layer_input, mixture_beside
from diskprefix.model.families.latent_decoder import latent_attention
from diskprefix.model.families.state_layers import delta_rule, short_convolution, state_space
from diskprefix.model.operands import Buffer, RotaryAngles
from diskprefix.model.plan import ComputePlan
from diskprefix.model.slots import Slots


def decoder(plan: ComputePlan, config: DecoderConfig, slots: Slots, *, with_hidden: bool) -> None:
    """Writes the plan of a step. Only `with_hidden` are there hidden states of rows that get no logits."""
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
        if number == config.num_writing and not with_hidden:
            streams = [plan.that_get_logits(one) for one in streams]
            inputs = None if inputs is None else plan.that_get_logits(inputs)
            angles = {name: plan.angles_of_logits(one) for name, one in angles.items()}
        of_layer = slots.within(f"layers.{number}")
        with plan.scratch():
            before = predicted(plan, of_layer.within("altup"), streams)
            hidden = plan.copy(before[0]) if config.num_streams > 1 else streams[0]
            is_last = config.ends_early and number + 1 == len(config.layers) and not with_hidden
            hidden = decoder_layer(plan, config, layer, of_layer, hidden, angles, is_last=is_last)
            if is_last:
                streams = [hidden]
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
    *,
    is_last: bool = False,
) -> Buffer:
    """Adds what a layer computes to `hidden`, and returns it. Behind the last one are the rows that get logits."""
    rows = normed = plan.norm(hidden, slots.norm("input_layernorm")) if layer.norms != "behind" else hidden
    before = "pre_feedforward_layernorm" if layer.norms == "around" else "post_attention_layernorm"
    if config.parallel == "two_norms":
        normed = plan.norm(hidden, slots.norm(before))
    if layer.mixer != "none":
        beside = laurel(plan, slots.within("laurel"), rows) if config.num_streams > 1 else None
        rows = mixed(plan, config, layer, slots, rows, angles, is_last=is_last)
        if is_last:
            hidden, rows = plan.that_get_logits(hidden), plan.that_get_logits(rows)
            normed = plan.that_get_logits(normed) if config.parallel else normed
        if layer.norms != "before":
            rows = plan.norm(rows, slots.norm("post_attention_layernorm"))
        plan.add(hidden, rows, config.residual_multiplier)
        if beside is not None:
            plan.add(hidden, beside)
            plan.scale(hidden, 2**-0.5)
    if layer.feed_forward == "none":
        return hidden
    if not (config.parallel or layer.mixer == "none"):
        normed = plan.norm(hidden, slots.norm(before)) if layer.norms != "behind" else hidden
    rows = FEED_FORWARD[layer.feed_forward](plan, config, layer, slots.within("mlp"), normed)
    if layer.feed_forward == "gated beside mixture":
        rows = mixture_beside(plan, config, slots, hidden, rows)
    if layer.norms != "before":
        rows = plan.norm(rows, slots.norm("post_feedforward_layernorm"))
    plan.add(hidden, rows, config.residual_multiplier)
    return hidden


def mixed(
    plan: ComputePlan,
    config: DecoderConfig,
    layer: LayerConfig,
    slots: Slots,
    rows: Buffer,
    angles: dict[str, RotaryAngles],
    *,
    is_last: bool,
) -> Buffer:
    """Returns what a layer computes from other tokens."""
    is_last &= not config.joined and layer.tempering is None
    match layer.mixer:
        case "short_convolution":
            return short_convolution(plan, layer, slots.within("conv"), rows)
        case "delta_rule":
            return delta_rule(plan, config, layer, slots.within("linear_attn"), rows)
        case "state_space":
            return state_space(plan, config, layer, slots.within("mamba"), rows)
        case "latent":
            return latent_attention(plan, config, layer, slots.within("self_attn"), rows, angles, is_last=is_last)
    is_last &= layer.mixer == "attention"
    attended = attention(plan, config, layer, slots.within("self_attn"), rows, angles, is_last=is_last)
    if layer.mixer == "space_and_attention":
        plan.add(attended, state_space(plan, config, layer, slots.within("mamba"), rows))
    return attended
