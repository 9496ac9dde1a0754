"""Latent attention (MLA) over memory that stays compressed.

A token's keys and values of all heads are products of its latent with matrices of each head, K and V, beside a rotary
key that all heads share. Memory holds [latent, rotary key]. A query q has a part for keys and a rotary part r:
(q·K) with r behind it is a query for memory as it is, and what attention gives of latents times V is the output.
"""

from __future__ import annotations

from diskprefix.model.config import DecoderConfig, LayerConfig
from diskprefix.model.operands import Buffer, RotaryAngles
from diskprefix.model.plan import ComputePlan
from diskprefix.model.slots import Slots


def latent_attention(
    plan: ComputePlan,
    config: DecoderConfig,
    layer: LayerConfig,
    slots: Slots,
    rows: Buffer,
    angles: dict[str, RotaryAngles],
    *,
    is_last: bool = False,
) -> Buffer:
    """Returns the latent attention of a layer. Latents and rotary keys go to memory first. That of the last layer is of
    the rows that get logits."""
    sizes = config.latent
    assert sizes is not None
    heads, memory = sizes.num_heads, layer.places["latent"]
    latent = plan.product(rows, slots.matrix("kv_a_proj_with_mqa"))
    turned = None if layer.rotary is None else angles[layer.rotary]
    plan.heads(latent.part(0, sizes.latent_dim), sizes.latent_dim, norm=slots.norm("kv_a_layernorm"), to=memory)
    rotary = latent.part(sizes.latent_dim, sizes.rotary_dim)
    plan.heads(rotary, sizes.rotary_dim, angles=turned, to=memory.behind(sizes.latent_dim))
    if is_last:
        rows, turned = plan.that_get_logits(rows), turned and plan.angles_of_logits(turned)
    if sizes.has_query_latents:
        rows_of_query = plan.norm(plan.product(rows, slots.matrix("q_a_proj")), slots.norm("q_a_layernorm"))
        query = plan.product(rows_of_query, slots.matrix("q_b_proj"))
    else:
        query = plan.product(rows, slots.matrix("q_proj"))
    plan.heads(query, sizes.key_dim + sizes.rotary_dim, angles=turned and turned._replace(first=sizes.key_dim))
    if layer.tempering is not None:
        plan.temper(query, *layer.tempering)
    of_keys, of_values = slots.expansions("kv_b_proj", heads, sizes.key_dim, sizes.value_dim)
    for_latents = plan.heads_times(query, of_keys, behind=sizes.rotary_dim)
    attended = plan.attention(
        for_latents,
        memory,
        memory,
        key_dim=sizes.latent_dim + sizes.rotary_dim,
        value_dim=sizes.latent_dim,
        num_kv_heads=1,
        scale=config.scale,
        window=layer.window,
    )
    return plan.product(plan.heads_times(attended, of_values), slots.matrix("o_proj"))
