"""Attention of heads: softmax(s × q · K) · V, with what models do to queries, keys and values before and behind it."""

from __future__ import annotations

from diskprefix.model.config import DecoderConfig, LayerConfig
from diskprefix.model.operands import Buffer, Location, RotaryAngles
from diskprefix.model.plan import ComputePlan
from diskprefix.model.slots import Slots


def attention(
    plan: ComputePlan,
    config: DecoderConfig,
    layer: LayerConfig,
    slots: Slots,
    rows: Buffer,
    angles: dict[str, RotaryAngles],
    *,
    is_last: bool = False,
) -> Buffer:
    """Returns the attention of a layer. Keys and values go to memory first, unless the layer only reads it. That of the
    last layer is of the rows that get logits."""
    keys, values, last = layer.places["keys"], layer.places["values"], slots.matrix("o_proj")
    dim = keys.dim
    turned = None if layer.rotary is None else angles[layer.rotary]
    rows = plan.scaled(rows, config.multipliers.attention_in)
    if config.joined:
        joined = plan.product(rows, slots.matrix("qkv_proj"))
        query, *remembered = parted(plan, joined, keys.heads, dim, in_heads=config.joined == "in_heads")
    else:
        names = ("q_proj",) if layer.only_reads else ("q_proj", "k_proj", "v_proj")
        matrices = [slots.matrix(name) for name in names if slots.has(name)]
        if is_last:
            remembered = plan.products(rows, *matrices[1:])
            rows = plan.that_get_logits(rows)
            query = plan.product(rows, matrices[0])
        else:
            query, *remembered = plan.products(rows, *matrices)
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
    if query.is_of_logits and turned is not None:
        turned = plan.angles_of_logits(turned)
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
