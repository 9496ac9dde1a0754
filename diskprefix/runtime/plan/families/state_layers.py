"""Layers with states instead of attention.

Their sizes follow from the shapes of the states: [channels, kernel] of a convolution, [heads, key_dim, value_dim] of
the delta rule, [heads, dim, state_dim] of a state space.
"""

from __future__ import annotations

from diskprefix.runtime.plan.config import DecoderConfig, LayerConfig
from diskprefix.runtime.plan.operands import Buffer
from diskprefix.runtime.plan.part_options import DeltaConfig
from diskprefix.runtime.plan.plan import ComputePlan
from diskprefix.runtime.plan.slots import Slots


def short_convolution(plan: ComputePlan, layer: LayerConfig, slots: Slots, rows: Buffer) -> Buffer:
    """Returns out(c × convolution(b × x)), where b, c and x are the parts of one product."""
    parts = plan.product(rows, slots.matrix("in_proj"))
    width = parts.width // 3
    gate_in, gate_out, inputs = (parts.part(number * width, width) for number in range(3))
    rows = plan.gated(gate_in, inputs, "identity")
    rows = plan.convolution(rows, *slots.convolution("conv"), layer.states["conv", 0])
    return plan.product(plan.gated(rows, gate_out, "identity"), slots.matrix("out_proj"))


def delta_rule(plan: ComputePlan, config: DecoderConfig, layer: LayerConfig, slots: Slots, rows: Buffer) -> Buffer:
    """Returns out(f(z) × norm(delta rule(q, k, v))), where a convolution gives q, k and v. Its decays are the
    logarithms -exp(A) × softplus(a + bias), its betas sigmoid(b)."""
    delta, state = config.delta, layer.states["recurrent", 0]
    assert delta is not None
    heads, _, value_dim = state.shape
    mixed, gate, betas, steps = _delta_inputs(plan, delta, slots, rows, state.shape)
    mixed = plan.convolution(mixed, *slots.convolution("conv1d"), layer.states["conv", 0], has_silu=True)
    of_values = heads * value_dim
    of_keys = (mixed.width - of_values) // 2
    query, key, value = (mixed.part(*bounds) for bounds in ((0, of_keys), (of_keys, of_keys), (2 * of_keys, of_values)))
    betas = plan.gated(betas, None, "sigmoid")
    plan.scale(betas, delta.beta_factor)
    decays = plan.step_sizes(steps, slots.numbers("dt_bias"), slots.decays("A_log", steps.width // heads))
    out = plan.delta_rule(query, key, value, decays, plan.widened(betas), state)
    out = plan.gated_norm(out, gate, slots.float_norm("norm"), delta.gate, groups=heads)
    matrix, columns = slots.regrouped("out_proj")
    if columns is not None:
        # Move the numbers of the rows, because the columns of quants cannot be moved.
        first, second, width = columns
        out = plan.split_heads(out, first, *[width] * second)
    return plan.product(out, matrix)


def _delta_inputs(
    plan: ComputePlan, delta: DeltaConfig, slots: Slots, rows: Buffer, shape: tuple[int, ...]
) -> tuple[Buffer, Buffer, Buffer, Buffer]:
    """Returns the inputs of the delta rule: q, k and v joined, z, b and a."""
    heads, key_dim, value_dim = shape
    if delta.inputs == "by_key_heads":
        both, small = plan.products(rows, slots.matrix("in_proj_qkvz"), slots.matrix("in_proj_ba"))
        of_values = heads * value_dim
        key_heads = (both.width - 2 * of_values) // (2 * key_dim)
        of_each = heads // key_heads
        both = plan.split_heads(both, key_heads, key_dim, key_dim, of_each * value_dim, of_each * value_dim)
        small = plan.split_heads(small, key_heads, of_each, of_each)
        of_mixed = both.width - of_values
        return both.part(0, of_mixed), both.part(of_mixed, of_values), small.part(0, heads), small.part(heads, heads)
    names = ["in_proj_qkv"] if delta.inputs == "together" else ["q_proj", "k_proj", "v_proj"]
    products = plan.products(rows, *(slots.matrix(name) for name in (*names, "in_proj_z", "in_proj_b", "in_proj_a")))
    *parts, gate, betas, steps = products
    if delta.has_narrow_gates:
        gate = plan.product(gate, slots.matrix("gate_proj"))
        steps = plan.product(steps, slots.matrix("decay_proj"))
    return plan.concat_columns(*parts) if len(parts) > 1 else parts[0], gate, betas, steps


def state_space(plan: ComputePlan, config: DecoderConfig, layer: LayerConfig, slots: Slots, rows: Buffer) -> Buffer:
    """Returns out(norm(silu(z) × state space(x, B, C))), where a convolution gives x, B and C. Its steps are
    softplus(dt + bias)."""
    space, state = config.space, layer.states["recurrent", 0]
    assert space is not None
    heads, dim, state_dim = state.shape
    weight, bias = slots.convolution("conv1d")
    width, of_mixed = heads * dim, weight.shape[0]
    of_states = (of_mixed - width) // 2
    inputs = plan.product(plan.scaled(rows, space.in_multiplier), slots.matrix("in_proj"))
    if space.multipliers:
        inputs = plan.weighed(inputs, slots.spread(space.multipliers, (width, width, of_states, of_states, heads)))
    gate, mixed, steps = (inputs.part(*bounds) for bounds in ((0, width), (width, of_mixed), (width + of_mixed, heads)))
    mixed = plan.convolution(mixed, weight, bias, layer.states["conv", 0], has_silu=True)
    into, out_of = (mixed.part(first, of_states) for first in (width, width + of_states))
    out = plan.state_space(
        mixed.part(0, width),
        into,
        out_of,
        plan.step_sizes(steps, slots.numbers("dt_bias"), limits=space.step_limits),
        slots.decays("A_log"),
        slots.numbers("D"),
        state,
    )
    out = plan.gated_norm(
        out, gate, slots.float_norm("norm"), "silu", groups=of_states // state_dim, gates_first=space.gates_first
    )
    out = plan.product(out, slots.matrix("out_proj"))
    plan.scale(out, space.out_multiplier)
    return out
