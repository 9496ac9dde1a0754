"""Layers with states in the place of attention.

Their sizes are those of the states: of a convolution [channels, kernel], of the delta rule [heads, key_dim, value_dim].
"""

from __future__ import annotations

from diskprefix.model.config import DecoderConfig, DeltaConfig, LayerConfig
from diskprefix.model.plan import Buffer, ComputePlan
from diskprefix.model.slots import Slots


def short_convolution(plan: ComputePlan, layer: LayerConfig, slots: Slots, rows: Buffer) -> Buffer:
    """Returns out(c × convolution(b × x)), where b, c and x are parts of one product."""
    parts = plan.product(rows, slots.matrix("in_proj"))
    width = parts.width // 3
    before, behind, inputs = (parts.part(number * width, width) for number in range(3))
    rows = plan.gated(before, inputs, "identity")
    rows = plan.convolution(rows, *slots.convolution("conv"), layer.states["conv", 0])
    return plan.product(plan.gated(rows, behind, "identity"), slots.matrix("out_proj"))


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
    query, key, value = (mixed.part(*one) for one in ((0, of_keys), (of_keys, of_keys), (2 * of_keys, of_values)))
    betas = plan.gated(betas, None, "sigmoid")
    if delta.beta_factor != 1:
        plan.scale(betas, delta.beta_factor)
    decays = plan.step_sizes(steps, slots.numbers("dt_bias"), slots.decays("A_log"))
    found = plan.delta_rule(query, key, value, decays, plan.widened(betas), state)
    found = plan.gated_norm(found, gate, slots.float_norm("norm"), delta.gate, groups=heads)
    return plan.product(found, slots.matrix("out_proj"))


def _delta_inputs(
    plan: ComputePlan, delta: DeltaConfig, slots: Slots, rows: Buffer, shape: tuple[int, ...]
) -> tuple[Buffer, Buffer, Buffer, Buffer]:
    """Returns what the delta rule takes: q, k and v side by side, z, b and a."""
    heads, key_dim, value_dim = shape
    if delta.inputs == "by_key_heads":
        both, small = plan.products(rows, slots.matrix("in_proj_qkvz"), slots.matrix("in_proj_ba"))
        of_values = heads * value_dim
        key_heads = (both.width - 2 * of_values) // (2 * key_dim)
        of_each = heads // key_heads
        both = plan.by_parts(both, key_heads, key_dim, key_dim, of_each * value_dim, of_each * value_dim)
        small = plan.by_parts(small, key_heads, of_each, of_each)
        of_mixed = both.width - of_values
        return both.part(0, of_mixed), both.part(of_mixed, of_values), small.part(0, heads), small.part(heads, heads)
    others = [f"in_proj_{name}" for name in "zba"]
    if delta.inputs == "together":
        mixed, gate, betas, steps = plan.products(rows, *map(slots.matrix, ["in_proj_qkv", *others]))
        return mixed, gate, betas, steps
    *parts, gate, betas, steps = plan.products(rows, *map(slots.matrix, ["q_proj", "k_proj", "v_proj", *others]))
    return plan.beside(*parts), gate, betas, steps
