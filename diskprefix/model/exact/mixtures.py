"""The experts of a mixture, in the interface of transformers for them: computed one by one with products of torch, or
by the compiled operator in one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from diskprefix.model.exact.rows import in_whole_vectors, linear
from diskprefix.native.experts_operator import RoutedExperts
from diskprefix.native.matrix import Matrix, fills_blocks

Product = Callable[[torch.Tensor], torch.Tensor]

_PROBED = 2.0**60
"""The largest number for which curves are compared with what the module computes."""


@dataclass(frozen=True, eq=False)
class GateCurves:
    """The numbers between the products of an expert: curve(gate) × up_curve(up), or curve(gate) if there is no up.

    Curves are bfloat16 [65 537], by the bits of a number, and one more. `up` is None if up is taken as it is.
    """

    gate: torch.Tensor
    up: torch.Tensor | None

    def __call__(self, gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        found = _at(self.gate, gate)
        if up is None:
            return found
        return found * (up if self.up is None else _at(self.up, up))


def is_mixture(module: Any) -> bool:
    """Returns whether a module holds experts in the interface of transformers, as matrices in three dimensions."""
    known = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm", "_apply_gate")
    return all(hasattr(module, name) for name in known) and isinstance(
        module._parameters.get("down_proj"), nn.Parameter
    )


def matrices_of(module: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """Returns the matrices of all experts, [experts, rows, columns], each with its biases [experts, rows] or None:
    `gate`, `up` (unless there is none) and `down`. They are views."""
    found = dict[str, tuple[torch.Tensor, torch.Tensor | None]]()
    for name, (weight, bias) in _weights(module).items():
        biases = {} if bias is None else named_halves(module, name, bias)
        found |= {part: (half, biases.get(part)) for part, half in named_halves(module, name, weight).items()}
    return found


def _weights(module: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """Returns the parameters of experts by their names, as they lie there but for turned ones, with their biases."""
    parameters = module._parameters
    return {
        name: (
            parameters[name].detach().transpose(1, 2) if module.is_transposed else parameters[name].detach(),
            parameters[f"{name}_bias"].detach() if module.has_bias else None,
        )
        for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    }


def named_halves(module: Any, name: str, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the parts of the parameter `name` of experts, [experts, rows, ..], that is not turned. Gate and up lie
    behind each other, or turn about."""
    if name == "down_proj" or not module.has_gate:
        return {"down" if name == "down_proj" else "gate": rows}
    gate, up = rows.chunk(2, dim=1) if module.is_concatenated else (rows[:, ::2], rows[:, 1::2])
    return {"gate": gate, "up": up}


def curves_of(module: Any) -> GateCurves | None:
    """Returns what a module computes between its products; None if that is not one curve for gate and one for up."""
    numbers = all_numbers()
    if not module.has_gate:
        return GateCurves(_table(in_whole_vectors(module.act_fn, numbers)), None)

    def compute(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        both = torch.stack([gate, up], dim=0 if module.is_concatenated else 1).view(1, -1)
        found: torch.Tensor = module._apply_gate(both)[0]
        return found

    with torch.inference_mode():
        gate = compute(numbers, torch.ones_like(numbers))
        # Where the value is a power of two, nothing is rounded. A smaller one than 1 would round subnormal numbers.
        mantissa, exponent = torch.frexp(gate.float())
        distance = torch.where((mantissa == 0.5) & (exponent > 0), exponent - 1, 1 << 10)
        at = int(distance.argmin())
        up = (compute(numbers[at].expand(len(numbers)), numbers).float() / gate[at].float()).bfloat16()
        if gate.dtype is not torch.bfloat16 or distance[at] == 1 << 10:
            return None
        probed = numbers[numbers.abs() <= _PROBED]
        is_same = torch.equal(_at(up, probed), probed)
        found = GateCurves(_table(gate), None if is_same else _table(up))
        others = probed[torch.randperm(len(probed), generator=torch.Generator().manual_seed(6), device="cpu")]
        # Filled up, as the curves of torch are of whole vectors.
        left, right = (nn.functional.pad(part, (0, -len(part) % 128)) for part in (probed, others))
        return found if torch.equal(found(left, right), compute(left, right)) else None


def experts_of(module: Any) -> RoutedExperts | None:
    """Returns the operator for experts in bfloat16, None if they do not lie so that it takes them."""
    if not is_mixture(module) or module.has_post_expert_norm:
        return None
    found = matrices_of(module)
    if any(weight.dtype is not torch.bfloat16 or weight.device.type != "cpu" for weight, _ in found.values()):
        return None
    if not all(weight[0].is_contiguous() and fills_blocks(weight[0]) for weight, _ in found.values()):
        return None
    curves = curves_of(module)
    return None if curves is None else routed(curves, {part: matrices(*of_part) for part, of_part in found.items()})


def routed(curves: GateCurves, matrices: dict[str, list[Matrix]]) -> RoutedExperts:
    """Returns the operator with the matrices of each expert, `gate`, `up` and `down`."""
    return RoutedExperts(matrices["gate"], matrices.get("up", []), matrices["down"], curves.gate, curves.up)


def matrices(weight: torch.Tensor, bias: torch.Tensor | None) -> list[Matrix]:
    """Returns the matrices of experts, [experts, rows, columns], with their biases."""
    biases = [None] * len(weight) if bias is None else [*bias]
    return [Matrix(one, (one.shape[0], one.shape[1]), bias=its) for one, its in zip(weight, biases, strict=True)]


def experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Returns what the experts of transformers' modules do, [tokens, hidden_size]; for its experts interface."""
    (first, first_bias), (last, last_bias) = _weights(self).values()

    def compute(expert: int, rows: torch.Tensor) -> torch.Tensor:
        inner = linear(rows, first[expert], None if first_bias is None else first_bias[expert])
        inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
        found = linear(inner, last[expert], None if last_bias is None else last_bias[expert])
        return self.post_expert_norm(found) if self.has_post_expert_norm else found

    return one_by_one(compute, hidden_states, top_k_index, top_k_weights)


def one_by_one(
    compute: Callable[[int, torch.Tensor], torch.Tensor],
    rows: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Returns the sum of the experts that each row chose, in their order. `compute` gets the number of an expert and
    its rows."""
    flat = chosen.reshape(-1)
    out = rows.new_empty(len(flat), rows.shape[-1])
    for expert in sorted(set(flat.tolist())):
        at = (flat == expert).nonzero()[:, 0]
        out[at] = compute(expert, rows[at // chosen.shape[1]]).to(out.dtype)
    return weighted(out, weights)


def weighted(found: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the sum over choices, [rows, width], of what experts have `found`, [rows × choices, width]."""
    parts = (found * weights.reshape(-1, 1)).to(found.dtype).view(*weights.shape, -1).float()
    total = parts[:, 0]
    for number in range(1, weights.shape[1]):
        total = total + parts[:, number]
    return total.to(found.dtype)


def all_numbers() -> torch.Tensor:
    """Returns all bfloat16 numbers, by their bits."""
    return torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.int16).view(torch.bfloat16)


def _at(table: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return table[numbers.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF]


def _table(values: torch.Tensor) -> torch.Tensor:
    """Returns a curve with one number more. Layers share equal ones."""
    return _shared(values.contiguous().view(torch.uint8).numpy().tobytes())


@lru_cache
def _shared(content: bytes) -> torch.Tensor:
    with torch.inference_mode(False):
        return nn.functional.pad(torch.frombuffer(bytearray(content), dtype=torch.bfloat16), (0, 1))
