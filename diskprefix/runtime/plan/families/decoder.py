"""Decoders: layers of attention and gated products, or of their alternatives.

y = x + o(attention(q(n), k(n), v(n))), z = y + down(f(gate(m)) × up(m)), where n and m are norms of x and y. With norms
around a part, the part's result is normalised before it is added. If the parts are parallel, m is a norm of x, or n.
"""

from __future__ import annotations

from diskprefix.runtime.plan.config import DecoderConfig, LayerConfig
from diskprefix.runtime.plan.families.altup import correct, expanded, mean_of_streams, predicted
from diskprefix.runtime.plan.families.feed_forward import FEED_FORWARD, mixture, router_logits
from diskprefix.runtime.plan.families.head_attention import attention
from diskprefix.runtime.plan.families.hyper_connections import add_ngrams, read_streams, stream_gates
from diskprefix.runtime.plan.families.late_gemma import gated_plus_mixture, inputs_of_layers, laurel, layer_input
from diskprefix.runtime.plan.families.latent_decoder import latent_attention
from diskprefix.runtime.plan.families.state_layers import delta_rule, short_convolution, state_space
from diskprefix.runtime.plan.operands import Buffer, RotaryAngles
from diskprefix.runtime.plan.plan import ComputePlan
from diskprefix.runtime.plan.slots import Slots


def decoder(plan: ComputePlan, config: DecoderConfig, slots: Slots, *, with_hidden: bool) -> None:
    """Writes the plan of a step. Without `with_hidden`, the last layers may compute only rows that get logits."""
    angles = {name: plan.angles(rotary) for name, rotary in config.rotary.items()}
    hidden = plan.embeddings(slots.table("embed_tokens"))
    plan.scale(hidden, config.inputs.multiplier)
    if config.inputs.position_offset is not None:
        plan.add(hidden, plan.of_positions(slots.table("embed_positions"), config.inputs.position_offset))
    if config.norms.of_embeddings:
        hidden = plan.norm(hidden, slots.norm("embedding_norm"))
    plan.pictures(hidden)
    if config.has_float_residual:
        hidden = plan.widened(hidden)
    inputs = inputs_of_layers(plan, config, slots, hidden) if config.inputs.of_layers else None
    if config.hyper_streams:
        hidden = plan.repeated(hidden, config.hyper_streams)
    streams = expanded(plan, slots, hidden, config.num_streams)
    for number, layer in enumerate(config.layers):
        if number == config.num_writing and not with_hidden:
            streams = [plan.select_logit_rows(stream) for stream in streams]
            inputs = None if inputs is None else plan.select_logit_rows(inputs)
            angles = {name: plan.angles_of_logits(each) for name, each in angles.items()}
        in_layer = slots.within(f"layers.{number}")
        with plan.scratch():
            before = predicted(plan, in_layer.within("altup"), streams)
            hidden = plan.copy(before[0]) if config.num_streams > 1 else streams[0]
            is_last = config.ends_early and number + 1 == len(config.layers) and not with_hidden
            compute = hyper_layer if config.hyper_streams else decoder_layer
            hidden = compute(plan, config, layer, in_layer, hidden, angles, is_last=is_last)
            if is_last:
                streams = [hidden]
            if config.num_streams > 1:
                correct(plan, in_layer.within("altup"), streams, before, hidden)
                hidden = plan.weighed(streams[0], in_layer.vector("altup.correct_output_scale"))
            if inputs is not None:
                own_input = layer_input(plan, config, in_layer, hidden, inputs, number)
                for stream in streams[1:] or streams:
                    plan.add(stream, own_input)
            if config.has_layer_scales:
                plan.scale(streams[0], in_layer.factor("layer_scalar"))
        if number < config.inputs.deepstack:
            plan.pictures(hidden, number + 1)
    if config.hyper_streams:
        mixer = slots.within("hyper_connection_mixer")
        plan.hidden, _ = read_streams(plan, mixer, streams[0], config.hyper_streams)
    else:
        plan.hidden = plan.norm(mean_of_streams(plan, slots, streams), slots.norm("norm"))
    plan.logits = plan.product(plan.select_logit_rows(plan.hidden), slots.head())
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
    """Adds the results of a layer to `hidden`, and returns it. With `is_last`, returns only rows that get logits."""
    mix = config.mixture if layer.feed_forward == "mixture" else None
    logits = router_logits(plan, mix, slots.within("mlp"), hidden) if mix is not None and mix.reads_input else None
    rows = normed = plan.norm(hidden, slots.norm("input_layernorm")) if layer.norm_place != "after" else hidden
    before = "pre_feedforward_layernorm" if layer.norm_place == "around" else "post_attention_layernorm"
    if config.parallel == "two_norms":
        normed = plan.norm(hidden, slots.norm(before))
    if layer.mixer != "none":
        branch = laurel(plan, slots.within("laurel"), rows) if config.num_streams > 1 else None
        rows = mixed(plan, config, layer, slots, rows, angles, is_last=is_last)
        if is_last:
            hidden, rows = plan.select_logit_rows(hidden), plan.select_logit_rows(rows)
            normed = plan.select_logit_rows(normed) if config.parallel else normed
            logits = logits and plan.select_logit_rows(logits)
        if layer.norm_place != "before":
            rows = plan.norm(rows, slots.norm("post_attention_layernorm"))
        plan.add(hidden, rows, config.residual_multiplier)
        if branch is not None:
            plan.add(hidden, branch)
            plan.scale(hidden, 2**-0.5)
    if layer.feed_forward == "none":
        return hidden
    if not (config.parallel or layer.mixer == "none"):
        normed = plan.norm(hidden, slots.norm(before)) if layer.norm_place != "after" else hidden
    if logits is not None:
        rows = mixture(plan, config, layer, slots.within("mlp"), normed, logits)
    else:
        rows = FEED_FORWARD[layer.feed_forward](plan, config, layer, slots.within("mlp"), normed)
    if layer.feed_forward == "gated plus mixture":
        rows = gated_plus_mixture(plan, config, slots, hidden, rows)
    if layer.norm_place != "before":
        rows = plan.norm(rows, slots.norm("post_feedforward_layernorm"))
    plan.add(hidden, rows, config.residual_multiplier)
    return hidden


def hyper_layer(
    plan: ComputePlan,
    config: DecoderConfig,
    layer: LayerConfig,
    slots: Slots,
    streams: Buffer,
    angles: dict[str, RotaryAngles],
    *,
    is_last: bool = False,
) -> Buffer:
    """Adds the results of a layer to `streams`, and returns them. With `is_last`, returns only rows that get logits."""
    if layer.ngrams is not None:
        add_ngrams(plan, config, layer, slots.within("ple"), streams)
    connection = slots.within("attn_hyper_connection")
    rows, normed = read_streams(plan, connection, streams, config.hyper_streams)
    rows = mixed(plan, config, layer, slots, rows, angles, is_last=is_last)
    if is_last:
        streams, normed, rows = (plan.select_logit_rows(each) for each in (streams, normed, rows))
    plan.add_to_streams(streams, stream_gates(plan, connection, normed), rows)
    connection = slots.within("mlp_hyper_connection")
    rows, normed = read_streams(plan, connection, streams, config.hyper_streams)
    rows = FEED_FORWARD[layer.feed_forward](plan, config, layer, slots.within("mlp"), rows)
    plan.add_to_streams(streams, stream_gates(plan, connection, normed), rows)
    return streams


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
    """Returns the result of the part of a layer that reads other tokens."""
    is_last &= not config.joined and layer.position_scaling is None
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
