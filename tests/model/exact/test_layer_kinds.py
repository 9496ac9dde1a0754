"""A measurement runs one layer of each kind, and finds what is wrong in any."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer

from diskprefix.kv.arena import KVArena
from diskprefix.model.exact import layer_kinds
from diskprefix.model.exact.invariance import make_exact
from diskprefix.model.exact.layer_kinds import LayerSample, sample_of
from diskprefix.model.exact.rehearsal import made_up_tokens, rehearse
from tests.exactness.architectures import OVERRIDES, quantised_tiny_model, shrink

pytestmark = pytest.mark.usefixtures("cache")

SLIDING, FULL = "sliding_attention", "full_attention"
PATTERN = [SLIDING, SLIDING, SLIDING, FULL] * 2
SAMPLE = (0, 1, 3)


def deep_model(name: str = "gemma3", **overrides: Any) -> PreTrainedModel:
    """A model of eight layers of two kinds in float32, unless `overrides` say otherwise."""
    torch.manual_seed(0)
    config = shrink(name, **(OVERRIDES.get(name, {}) | {"num_hidden_layers": 8, "layer_types": PATTERN} | overrides))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    found: nn.ModuleList = model.get_decoder().layers
    return found


def sample(model: PreTrainedModel) -> LayerSample:
    layout, token_ids = rehearse(model), made_up_tokens(model, 1, 4)
    with torch.inference_mode():
        return sample_of(model, layout, lambda: KVArena(layout, model.device).forward(model, token_ids))


def test_a_sample_has_a_layer_of_each_kind_and_the_first_two_of_the_commonest() -> None:
    model = deep_model()
    before = [*layers_of(model)]
    found = sample(model)
    assert (found.chosen, found.is_whole) == (SAMPLE, False)
    assert [*layers_of(model)] == before
    with found.alone():
        own = [number for number, layer in enumerate(layers_of(model)) if layer is before[number]]
    assert tuple(own) == SAMPLE
    assert [*layers_of(model)] == before


@pytest.mark.parametrize(
    ("name", "overrides", "chosen"),
    [
        ("llama", {"layer_types": None}, (0, 1)),
        ("qwen3_5", {"layer_types": ["linear_attention", "linear_attention", "linear_attention", FULL] * 2}, SAMPLE),
        ("deepseek_v3", {"layer_types": None, "first_k_dense_replace": 2}, (0, 2, 3)),
        # The layers that share keys, and those whose keys they take, are kinds of their own.
        ("gemma4", {"num_kv_shared_layers": 4}, (0, 2, 3, 4, 5, 7)),
    ],
)
def test_layers_that_differ_are_of_different_kinds(name: str, overrides: Any, chosen: tuple[int, ...]) -> None:
    assert sample(deep_model(name, **overrides)).chosen == chosen


def test_quantised_layers_of_one_form_are_of_one_kind() -> None:
    model = quantised_tiny_model("smollm3", "int8")
    kinds = layer_kinds._kinds_of(model, layers_of(model), rehearse(model))
    assert kinds == [0, 1, 0, 1]


class Neighbourly(nn.Module):
    """Gated products, and a part of what the other rows of a step have: each operator is one of the harmless."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.own(rows)
        return found + 0.01 * rows.mean(dim=1, keepdim=True)


def with_neighbourly(number: int) -> PreTrainedModel:
    model = deep_model()
    layer: Any = layers_of(model)[number]
    layer.mlp = Neighbourly(layer.mlp)
    return model


@pytest.mark.parametrize("number", [3, 6, 7])
def test_a_single_layer_that_depends_on_the_step_is_found(number: int) -> None:
    model = with_neighbourly(number)
    layout, reason = make_exact(model)
    assert (layout.exact_at, reason) == ("grid", "its state depends on the steps (0)")


def test_without_a_layer_of_its_kind_it_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_neighbourly(6)
    monkeypatch.setattr(layer_kinds, "_first_of_each", lambda _: SAMPLE)
    monkeypatch.setattr(layer_kinds._OperatorsOfLayers, "are_those_of", lambda *_: True)
    assert make_exact(model)[1] == ""


def test_an_operator_that_only_one_layer_calls_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its class all layers are alike: it asks for its number."""
    own = Gemma3DecoderLayer.forward

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found: torch.Tensor = own(self, hidden_states, *args, **kwargs)
        return found + 0.01 * hidden_states.mean(dim=1, keepdim=True) if self.self_attn.layer_idx == 6 else found

    monkeypatch.setattr(Gemma3DecoderLayer, "forward", forward)
    model = deep_model()
    assert sample(model).is_whole
    assert make_exact(model)[0].exact_at == "grid"


def test_layers_that_use_each_other_are_all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    own, left = Gemma3DecoderLayer.forward, dict[int, torch.Tensor]()

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        number = self.self_attn.layer_idx
        left[number] = hidden_states
        found: torch.Tensor = own(self, hidden_states, *args, **kwargs)
        return found + 0.01 * left[max(number - 1, 0)]

    model = deep_model()
    assert not sample(model).is_whole
    monkeypatch.setattr(Gemma3DecoderLayer, "forward", forward)
    assert sample(model).is_whole


def test_a_sample_compares_what_its_layers_return() -> None:
    model = deep_model()
    layout, found = rehearse(model), sample(model)
    keys = sum(spec.bytes_per_token for group in layout.groups for spec in group.specs if spec.layer in SAMPLE)
    assert found.token_bytes(layout) == keys + len(SAMPLE) * 4 * model.config.hidden_size
    assert replace(found, chosen=tuple(range(8))).token_bytes(layout) == layout.bytes_per_token
    with torch.inference_mode(), found.alone(), found.recorded() as record:
        logits = KVArena(layout, model.device).forward(model, made_up_tokens(model, 1, 4))
    assert len(record.content()) == len(SAMPLE) * 4 * 4 * model.config.hidden_size
    assert logits.isfinite().all()
