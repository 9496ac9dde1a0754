"""The matrices of the experts of a mixture, in the interface of transformers for them, and what a module computes
between its products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from diskprefix.native.experts_operator import RoutedExperts
from diskprefix.native.matrix import Matrix

_VECTOR, _UNSHARED = 64, 32768
"""The count of numbers that fill the vectors of a loop, and the count up to which torch uses one thread."""
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


def routed(curves: GateCurves, matrices: dict[str, list[Matrix]]) -> RoutedExperts:
    """Returns the operator with the matrices of each expert, `gate`, `up` and `down`."""
    return RoutedExperts(matrices["gate"], matrices.get("up", []), matrices["down"], curves.gate, curves.up)


def matrices(weight: torch.Tensor, bias: torch.Tensor | None) -> list[Matrix]:
    """Returns the matrices of experts, [experts, rows, columns], with their biases."""
    biases = [None] * len(weight) if bias is None else [*bias]
    return [Matrix(one, (one.shape[0], one.shape[1]), bias=its) for one, its in zip(weight, biases, strict=True)]


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


def in_whole_vectors(function: Callable[..., torch.Tensor], numbers: torch.Tensor, *args: Any) -> torch.Tensor:
    """Returns the result of `function`, which works number by number, of whole vectors: for the rest
    torch has other code."""
    # Numbers side by side fill vectors, in the part of each thread.
    count = numbers.numel()
    if count % (_VECTOR * max(1, min(torch.get_num_threads(), -(-count // _UNSHARED)))) == 0:
        return function(numbers.contiguous(), *args)
    flat = numbers.reshape(-1)
    parts = [
        function(functional.pad(part, (0, -len(part) % _VECTOR)), *args)[: len(part)]
        for part in torch.split(flat, _UNSHARED)
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(numbers.shape)
