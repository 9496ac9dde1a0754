"""Streams of hidden states that a layer predicts and corrects (AltUp), of which it computes the first one alone.

With r(x) = tanh(R · norm(x) ÷ width) and streams x, p = x + x · P r(x₀) is predicted, z is what the layer makes of p₀,
and p + (z - p₀) × (1 + C r(z)) are the streams behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

from diskprefix.model.operands import Buffer
from diskprefix.model.plan import ComputePlan
from diskprefix.model.slots import Slots


def expanded(plan: ComputePlan, slots: Slots, hidden: Buffer, count: int) -> list[Buffer]:
    """Returns streams that begin with the embeddings."""
    streams = [hidden, *plan.products(hidden, *(slots.matrix(f"altup_projections.{i}") for i in range(count - 1)))]
    for stream in streams[1:]:
        plan.level(stream, hidden)
    return streams


def mean_of_streams(plan: ComputePlan, slots: Slots, streams: Sequence[Buffer]) -> Buffer:
    """Returns the mean of streams."""
    if len(streams) == 1:
        return streams[0]
    total = streams[0]
    others = [plan.product(one, slots.matrix(f"altup_unembed_projections.{i}")) for i, one in enumerate(streams[1:])]
    for other in others:
        plan.level(other, streams[0])
    for other in others:
        plan.add(total, other)
    plan.scale(total, 1 / len(streams))
    return total


def predicted(plan: ComputePlan, slots: Slots, streams: Sequence[Buffer]) -> list[Buffer]:
    """Returns the streams as a layer predicts them: a single one as it is."""
    if len(streams) == 1:
        return [*streams]
    factors, count = plan.product(_modes(plan, slots, streams[0]), slots.matrix("prediction_coefs")), len(streams)
    return [plan.mix(one, streams, factors.part(i * count, count)) for i, one in enumerate(streams)]


def correct(plan: ComputePlan, slots: Slots, streams: Sequence[Buffer], predicted: Sequence[Buffer], z: Buffer) -> None:
    """Sets the streams behind a layer."""
    factors = plan.product(_modes(plan, slots, z), slots.matrix("correction_coefs"))
    news = plan.copy(z)
    plan.add(news, predicted[0], -1)
    for number, (out, base) in enumerate(zip(streams, predicted, strict=True)):
        plan.mix(base, [news], factors.part(number, 1), offset=1, out=out)


def _modes(plan: ComputePlan, slots: Slots, rows: Buffer) -> Buffer:
    normed = plan.norm(rows, slots.norm("router_norm"))
    plan.scale(normed, 1 / rows.width)
    return plan.gated(plan.product(normed, slots.matrix("modality_router")), None, "tanh")
