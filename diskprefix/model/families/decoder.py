"""Decoders: attention and gated products in each layer, and what takes their place in some.

y = x + o(attention(q(n), k(n), v(n))), z = y + down(f(gate(m)) × up(m)), where n and m are norms of x and y. With norms
around a part, what is added has a norm of its own. If the parts are parallel, m is a norm of x, or n.
"""

from __future__ import annotations

from diskprefix.model.config import DecoderConfig, LayerConfig
from diskprefix.model.families.feed_forward import FEED_FORWARD
from diskprefix.model.families.latent_decoder import latent_attention
from diskprefix.model.plan import Buffer, ComputePlan, RotaryAngles
from diskprefix.model.slots import Slots


def decoder(plan: ComputePlan, config: DecoderConfig, slots: Slots) -> None:
    """Writes the plan of a step."""
    angles = {name: plan.angles(rotary) for name, rotary in config.rotary.items()}
    hidden = plan.embeddings(slots.table("embed_tokens"))
    if config.embedding_multiplier != 1:
        plan.scale(hidden, config.embedding_multiplier)
    if config.position_offset is not None:
        plan.add(hidden, plan.of_positions(slots.table("embed_positions"), config.position_offset))
    if config.has_embedding_norm:
        hidden = plan.norm(hidden, slots.norm("embedding_norm"))
    plan.pictures(hidden)
    for number, layer in enumerate(config.layers):
        with plan.scratch():
            decoder_layer(plan, config, layer, slots.within(f"layers.{number}"), hidden, angles)
        if number < config.deepstack:
            plan.pictures(hidden, number + 1)
    plan.hidden = plan.norm(hidden, slots.norm("norm"))
    plan.logits = plan.product(plan.that_get_logits(plan.hidden), slots.head())
    if config.logits_multiplier != 1:
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
    rows = normed = plan.norm(hidden, slots.norm("input_layernorm")) if config.norms != "behind" else hidden
    before = "pre_feedforward_layernorm" if config.norms == "around" else "post_attention_layernorm"
    if config.parallel == "two_norms":
        normed = plan.norm(hidden, slots.norm(before))
    mixer = latent_attention if layer.mixer == "latent" else attention
    rows = mixer(plan, config, layer, slots.within("self_attn"), rows, angles)
    if config.norms != "before":
        rows = plan.norm(rows, slots.norm("post_attention_layernorm"))
    plan.add(hidden, rows, config.residual_multiplier)
    if not config.parallel:
        normed = plan.norm(hidden, slots.norm(before)) if config.norms != "behind" else hidden
    rows = FEED_FORWARD[layer.feed_forward](plan, config, slots.within("mlp"), normed)
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
    """Returns the attention of a layer. Keys and values go to memory first."""
    dim, keys, values = config.head_dim, layer.places["keys"], layer.places["values"]
    if config.joined:
        joined = plan.product(rows, slots.matrix("qkv_proj"))
        query, key, value = parted(plan, joined, keys.heads, dim, in_heads=config.joined == "in_heads")
    else:
        query, key, value = plan.products(rows, *(slots.matrix(name) for name in ("q_proj", "k_proj", "v_proj")))
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
    if config.attention_gate:
        attended = plan.gated(plan.product(rows, slots.matrix("gate_proj")), attended, config.attention_gate)
    if config.has_inner_norms:
        attended = plan.norm(attended, slots.norm("inner_norm"))
    return plan.product(attended, slots.matrix("o_proj"))


def parted(plan: ComputePlan, joined: Buffer, heads: int, dim: int, *, in_heads: bool) -> list[Buffer]:
    """Returns queries, keys and values of rows in which they lie joined."""
    groups, keys = (heads, dim) if in_heads else (1, heads * dim)
    queries = joined.width // groups - 2 * keys
    parts = (0, queries), (queries, keys), (queries + keys, keys)
    return [plan.of_groups(joined, groups, first, width) for first, width in parts]
