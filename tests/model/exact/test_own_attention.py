"""Attention that a module computes in a method of its own: found by what it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diskprefix.model.exact import own_attention
from diskprefix.model.exact.patterns import NotInvariant, Pattern
from tests.exactness.architectures import WINDOW, tiny_model


def modules_of(name: str) -> list[Any]:
    model = tiny_model(name, torch.float32)
    return [module for module in model.modules() if hasattr(module, "_attn")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gptj", [(0.25, Pattern())] * 2),
        ("codegen", [(0.25, Pattern())] * 2),
        ("gpt_neox_japanese", [(0.25, Pattern())] * 2),
        ("gpt_neo", [(1.0, Pattern()), (1.0, Pattern(window=WINDOW))]),
    ],
)
def test_its_scale_and_its_window_are_found(name: str, expected: list[tuple[float, Pattern]]) -> None:
    found: list[Any] = list(map(own_attention.replacement, modules_of(name)))
    assert [method.args[1:] for method in found] == expected


def test_a_method_that_computes_something_else_is_kept() -> None:
    (module, _) = modules_of("gptj")

    class Doubled(type(module)):  # type: ignore[misc]
        def _attn(self, *given: Any) -> Any:
            out, weights = super()._attn(*given)
            return out * 2, weights

    module.__class__ = Doubled
    assert own_attention.replacement(module) is None


def test_only_the_last_rows_may_be_cut_from_a_mask() -> None:
    everything = slice(None)
    assert Pattern(window=5)[:, :, -3:, :] == Pattern(window=5, last=3)
    for part in ((everything, everything, slice(3, None), everything), (everything, everything, slice(-3, None))):
        with pytest.raises(NotInvariant, match="part of a mask"):
            Pattern()[part]
