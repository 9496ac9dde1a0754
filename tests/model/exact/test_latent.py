"""Latent attention over compressed memory: that of transformers, apart from rounding, and the form of its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diskprefix.kv.layout import Group, TensorSpec
from diskprefix.kv.page_table import LayerRows, PageTable
from diskprefix.model.exact import latent
from diskprefix.model.exact.patterns import NotInvariant
from diskprefix.model.exact.self_check import rehearse
from tests.exactness.architectures import tiny_model

NAMES = ("deepseek_v2", "deepseek_v3", "axk1", "glm4_moe_lite", "longcat_flash", "minicpm3", "mistral4", "youtu")
LATENT, ROTARY = 32, 8


def attention_of(name: str) -> Any:
    model = tiny_model(name, torch.float32)
    return next(module for module in model.modules() if hasattr(module, "expand_kv"))


@pytest.mark.parametrize("name", NAMES)
def test_the_expansion_of_each_architecture_is_found_and_its_memory_is_one_row(name: str) -> None:
    model = tiny_model(name, torch.float32)
    modules = [module for module in model.modules() if hasattr(module, "expand_kv")]
    assert modules
    assert all(latent.expansion_of(module) for module in modules)
    layout = rehearse(model)
    (group,) = layout.groups
    assert (group.heads, group.head_dim, len(group.specs)) == (1, LATENT + ROTARY, len(modules))
    assert {spec.part for spec in group.specs} == {"latent"}


def test_queries_for_latents_give_the_scores_of_keys() -> None:
    module = attention_of("deepseek_v3")
    expansion = latent.expansion_of(module)
    assert expansion is not None
    random = torch.Generator().manual_seed(1)
    rows = torch.randn(1, 1, 5, LATENT + ROTARY, generator=random)
    query = torch.randn(1, 4, 3, module.qk_head_dim, generator=random)
    with torch.inference_mode():
        keys, values = module.expand_kv(rows[..., :LATENT], rows[..., LATENT:])
        assert torch.allclose(expansion.queries(query) @ rows.mT, query @ keys.mT, atol=1e-4)
        weights = torch.rand(1, 4, 3, 5, generator=random)
        attended = (weights @ rows[..., :LATENT]).transpose(1, 2)
        assert torch.allclose(expansion.outputs(attended), (weights @ values).transpose(1, 2), atol=1e-4)


def test_memory_that_is_not_in_pages_is_refused() -> None:
    expansion = latent.expansion_of(attention_of("minicpm3"))
    assert expansion is not None
    table = PageTable(Group((TensorSpec(0, "latent", 1, LATENT + ROTARY, torch.float32),)), 4)
    latents, rotary = LayerRows(table, 0, 0, LATENT), LayerRows(table, 0, LATENT, LATENT + ROTARY)
    found, _ = latent.remember(expansion, [latents], [rotary])
    assert [(rows.table, rows.start, rows.end) for rows in found.rows] == [(table, 0, LATENT + ROTARY)]
    with pytest.raises(NotInvariant, match="pages"):
        latent.remember(expansion, torch.zeros(1, 1, 4, LATENT), torch.zeros(1, 1, 4, ROTARY))
