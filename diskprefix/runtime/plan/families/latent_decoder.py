"""Latent attention (MLA) over memory that stays compressed.

A token's keys and values of each head are products of its latent with matrices of the head, K and V. All heads share a
rotary key. Memory holds [latent, rotary key]. A query has a part q for keys and a rotary part r: [q·K, r] is a query
for memory as it is, and the attention over latents times V is the output.
"""

from __future__ import annotations

from diskprefix.runtime.plan.config import DecoderConfig, LayerConfig
from diskprefix.runtime.plan.operands import Buffer, RotaryAngles
from diskprefix.runtime.plan.plan import ComputePlan
from diskprefix.runtime.plan.slots import Slots


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
    """Returns the latent attention of a layer. Stores latents and rotary keys first. With `is_last`, returns only the
    rows that get logits."""
    sizes = config.latent
    assert sizes is not None
    heads, memory = sizes.num_heads, layer.places["latent"]
    latent = plan.product(rows, slots.matrix("kv_a_proj_with_mqa"))
    rotation = None if layer.rotary is None else angles[layer.rotary]
    plan.norm_rotate_store(
        latent.part(0, sizes.latent_dim), sizes.latent_dim, norm=slots.norm("kv_a_layernorm"), to=memory
    )
    rotary = latent.part(sizes.latent_dim, sizes.rotary_dim)
    plan.norm_rotate_store(rotary, sizes.rotary_dim, angles=rotation, to=memory.after(sizes.latent_dim))
    if is_last:
        rows, rotation = plan.select_logit_rows(rows), rotation and plan.angles_of_logits(rotation)
    if sizes.has_query_latents:
        rows_of_query = plan.norm(plan.product(rows, slots.matrix("q_a_proj")), slots.norm("q_a_layernorm"))
        query = plan.product(rows_of_query, slots.matrix("q_b_proj"))
    else:
        query = plan.product(rows, slots.matrix("q_proj"))
    plan.norm_rotate_store(
        query, sizes.key_dim + sizes.rotary_dim, angles=rotation and rotation._replace(first=sizes.key_dim)
    )
    if layer.position_scaling is not None:
        plan.scale_by_position(query, *layer.position_scaling)
    key_matrices, value_matrices = slots.expansions("kv_b_proj", heads, sizes.key_dim, sizes.value_dim)
    for_latents = plan.heads_times(query, key_matrices, rest=sizes.rotary_dim)
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
    return plan.product(plan.heads_times(attended, value_matrices), slots.matrix("o_proj"))
