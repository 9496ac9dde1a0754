"""Several streams of hidden states (AltUp). A layer computes the first stream, and predicts and corrects the others.

With r(x) = tanh(R · norm(x) ÷ width) and streams x, the prediction is p = x + x · P r(x₀). The layer computes z from
p₀. The streams after it are p + (z - p₀) × (1 + C r(z)).
"""

from __future__ import annotations

from collections.abc import Sequence

from diskprefix.runtime.plan.operands import Buffer
from diskprefix.runtime.plan.plan import ComputePlan
from diskprefix.runtime.plan.slots import Slots


def expanded(plan: ComputePlan, slots: Slots, hidden: Buffer, count: int) -> list[Buffer]:
    """Returns the streams before the first layer, from the embeddings."""
    streams = [hidden, *plan.products(hidden, *(slots.matrix(f"altup_projections.{i}") for i in range(count - 1)))]
    for stream in streams[1:]:
        plan.match_rms(stream, hidden)
    return streams


def mean_of_streams(plan: ComputePlan, slots: Slots, streams: Sequence[Buffer]) -> Buffer:
    """Returns the mean of streams."""
    if len(streams) == 1:
        return streams[0]
    total = streams[0]
    matrices = [slots.matrix(f"altup_unembed_projections.{i}") for i in range(len(streams) - 1)]
    others = [plan.product(stream, matrix) for stream, matrix in zip(streams[1:], matrices, strict=True)]
    for other in others:
        plan.match_rms(other, streams[0])
    for other in others:
        plan.add(total, other)
    plan.scale(total, 1 / len(streams))
    return total


def predicted(plan: ComputePlan, slots: Slots, streams: Sequence[Buffer]) -> list[Buffer]:
    """Returns the predicted streams; a single stream is not changed."""
    if len(streams) == 1:
        return [*streams]
    factors, count = plan.product(_modes(plan, slots, streams[0]), slots.matrix("prediction_coefs")), len(streams)
    return [plan.mix(stream, streams, factors.part(i * count, count)) for i, stream in enumerate(streams)]


def correct(plan: ComputePlan, slots: Slots, streams: Sequence[Buffer], predicted: Sequence[Buffer], z: Buffer) -> None:
    """Sets the streams after a layer, from its output `z` and the predicted streams."""
    factors = plan.product(_modes(plan, slots, z), slots.matrix("correction_coefs"))
    difference = plan.copy(z)
    plan.add(difference, predicted[0], -1)
    for number, (out, base) in enumerate(zip(streams, predicted, strict=True)):
        plan.mix(base, [difference], factors.part(number, 1), offset=1, out=out)


def _modes(plan: ComputePlan, slots: Slots, rows: Buffer) -> Buffer:
    normed = plan.norm(rows, slots.norm("router_norm"))
    plan.scale(normed, 1 / rows.width)
    return plan.gated(plan.product(normed, slots.matrix("modality_router")), None, "tanh")
