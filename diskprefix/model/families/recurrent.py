"""Layers with states in the place of attention."""

from __future__ import annotations

from diskprefix.model.config import LayerConfig
from diskprefix.model.plan import Buffer, ComputePlan
from diskprefix.model.slots import Slots


def short_convolution(plan: ComputePlan, layer: LayerConfig, slots: Slots, rows: Buffer) -> Buffer:
    """Returns out(c × convolution(b × x)), where b, c and x are parts of one product."""
    parts = plan.product(rows, slots.matrix("in_proj"))
    width = parts.width // 3
    before, behind, inputs = (parts.part(number * width, width) for number in range(3))
    rows = plan.gated(before, inputs, "identity")
    rows = plan.convolution(rows, *slots.convolution("conv"), layer.states["conv", 0])
    behind = plan.gated(behind, None, "identity")
    return plan.product(plan.gated(rows, behind, "identity"), slots.matrix("out_proj"))
