"""Attention of heads: softmax(s × q · K) · V, and the norms, rotations, scales and gates around it."""

from __future__ import annotations

from collections.abc import Sequence

from diskprefix.runtime.plan.config import DecoderConfig, LayerConfig
from diskprefix.runtime.plan.operands import Buffer, ChosenBlocks, Location, RotaryAngles
from diskprefix.runtime.plan.plan import ComputePlan
from diskprefix.runtime.plan.slots import Slots


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
    """Returns the attention of a layer. Stores its keys and values first, unless the layer only reads memory. With
    `is_last`, returns only the rows that get logits."""
    keys, values, out_matrix = layer.places["keys"], layer.places["values"], slots.matrix("o_proj")
    rotation = None if layer.rotary is None else angles[layer.rotary]
    rows = plan.scaled(rows, config.multipliers.attention_in)
    chosen = chosen_blocks(plan, config, layer, slots.within("indexer"), rows, rotation, is_last=is_last)
    rows, query, new = query_key_value(plan, config, layer, slots, rows, is_last=is_last)
    query, gate = query_and_gate(plan, config, slots, rows, query, keys.dim)
    value_dim = out_matrix.columns // (query.width // keys.dim)
    if new:
        store_key_and_value(plan, config, layer, slots, new, rotation, value_dim)
    if query.is_of_logits and rotation is not None:
        rotation = plan.angles_of_logits(rotation)
    query = norm_and_rotate(plan, config, slots, "q_norm", query, keys.dim, rotation)
    if layer.position_scaling is not None:
        plan.scale_by_position(query, *layer.position_scaling)
    attended = plan.attention(
        query,
        keys,
        values,
        key_dim=keys.dim,
        value_dim=value_dim,
        num_kv_heads=keys.heads,
        scale=config.scale,
        window=layer.window,
        chunk=layer.chunk,
        softcap=config.softcap,
        sinks=slots.numbers("sinks"),
        sees_pictures=config.inputs.sees_pictures == "all"
        or (config.inputs.sees_pictures == "windowed" and layer.window > 0),
        chosen=chosen,
    )
    if gate is not None:
        attended = plan.gated(gate, attended, config.gates.attention)
    if config.norms.inner:
        attended = plan.norm(attended, slots.norm("inner_norm"))
    out = plan.product(attended, out_matrix)
    plan.scale(out, config.multipliers.attention_out)
    return out


def chosen_blocks(
    plan: ComputePlan,
    config: DecoderConfig,
    layer: LayerConfig,
    slots: Slots,
    rows: Buffer,
    rotation: RotaryAngles | None,
    *,
    is_last: bool,
) -> ChosenBlocks | None:
    """Returns the blocks of tokens that the indexer of a layer chooses for each row, None without an indexer. Stores
    the indexer's keys of the rows first. With `is_last`, returns only the blocks of rows that get logits."""
    indexer = config.indexer
    if indexer is None:
        return None
    assert layer.rotary is not None, "the keys of blocks are rotated"
    keys = layer.places["index"]
    both = plan.product(rows, slots.matrix("index_qk_proj"))
    of_queries = indexer.num_heads * keys.dim
    plan.norm_rotate_store(both.part(of_queries, keys.dim), keys.dim, to=keys)
    plan.pool_keys(keys, indexer.block, slots.norm("k_layernorm"), config.rotary[layer.rotary])
    query = plan.copy(both.part(0, of_queries))
    if is_last:
        query = plan.select_logit_rows(query)
        rotation = None if rotation is None else plan.angles_of_logits(rotation)
    plan.norm_rotate_store(query, keys.dim, norm=slots.norm("q_layernorm"), angles=rotation)
    return plan.choose_blocks(query, keys, indexer.num_heads, indexer.block, indexer.num_chosen)


def query_key_value(
    plan: ComputePlan, config: DecoderConfig, layer: LayerConfig, slots: Slots, rows: Buffer, *, is_last: bool
) -> tuple[Buffer, Buffer, Sequence[Buffer]]:
    """Returns the rows that have queries, their queries, and the keys and values of all rows: none if the layer only
    reads memory, the keys alone if they are the values, too."""
    keys = layer.places["keys"]
    if config.joined:
        joined = plan.product(rows, slots.matrix("qkv_proj"))
        query, *new = split_joined(plan, joined, keys.heads, keys.dim, in_heads=config.joined == "in_heads")
        return rows, query, new
    names = ("q_proj",) if layer.only_reads else ("q_proj", "k_proj", "v_proj")
    matrices = [slots.matrix(name) for name in names if slots.has_module(name)]
    if not is_last:
        query, *new = plan.products(rows, *matrices)
        return rows, query, new
    new = plan.products(rows, *matrices[1:])
    rows = plan.select_logit_rows(rows)
    return rows, plan.product(rows, matrices[0]), new


def split_joined(plan: ComputePlan, joined: Buffer, heads: int, dim: int, *, in_heads: bool) -> list[Buffer]:
    """Returns the queries, keys and values of joined rows: three parts of a row, or of each head of keys."""
    groups, keys = (heads, dim) if in_heads else (1, heads * dim)
    queries = joined.width // groups - 2 * keys
    parts = (0, queries), (queries, keys), (queries + keys, keys)
    return [plan.per_group(joined, groups, first, width) for first, width in parts]


def query_and_gate(
    plan: ComputePlan, config: DecoderConfig, slots: Slots, rows: Buffer, query: Buffer, dim: int
) -> tuple[Buffer, Buffer | None]:
    """Returns the queries, and the gate of what attention gives, None without one."""
    if config.gates.is_in_query:
        both = plan.split_heads(query, query.width // (2 * dim), dim, dim)
        return both.part(0, both.width // 2), both.part(both.width // 2, both.width // 2)
    return query, plan.product(rows, slots.matrix("gate_proj")) if config.gates.attention else None


def store_key_and_value(
    plan: ComputePlan,
    config: DecoderConfig,
    layer: LayerConfig,
    slots: Slots,
    new: Sequence[Buffer],
    rotation: RotaryAngles | None,
    value_dim: int,
) -> None:
    """Stores the keys and values of rows in the memory of a layer, normalised, scaled, and the keys rotated."""
    key, value = new[0], plan.copy(new[0]) if len(new) == 1 else new[1]
    plan.scale(key, config.multipliers.keys)
    norm_and_rotate(plan, config, slots, "k_norm", key, layer.places["keys"].dim, rotation, layer.places["keys"])
    plan.scale(value, config.multipliers.values)
    norm = slots.unweighted_norm(value_dim) if config.norms.of_values else None
    plan.norm_rotate_store(value, value_dim, norm=norm, to=layer.places["values"])


def norm_and_rotate(
    plan: ComputePlan,
    config: DecoderConfig,
    slots: Slots,
    name: str,
    rows: Buffer,
    dim: int,
    rotation: RotaryAngles | None,
    to: Location | None = None,
) -> Buffer:
    """Returns heads, normalised by the norm `name` and rotated. Stores them at `to`."""
    norm = slots.norm(name) if config.norms.query_key == "head" else None
    if config.norms.query_key == "row":
        rows = plan.norm(rows, slots.norm(name))
    if config.norms.query_key == "without_weights" and rotation is not None:
        norm = slots.unweighted_norm(dim)
    if config.norms.after_rotary and rotation is not None:
        plan.norm_rotate_store(rows, dim, angles=rotation)
        rotation = None
    plan.norm_rotate_store(rows, dim, norm=norm, angles=rotation, to=to)
    return rows
