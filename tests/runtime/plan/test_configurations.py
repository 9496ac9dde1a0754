"""What is computed from a configuration, instead of a run of transformers' modules, is what those have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from diskprefix.errors import SettingsError
from diskprefix.prefixstore.kv.layout import TensorSpec
from diskprefix.runtime.grid.state_layout import read_layout
from diskprefix.runtime.plan.families.memory_layout import layout_of
from diskprefix.runtime.plan.families.rotary import rotary_of
from diskprefix.runtime.plan.families.types.known_types import TYPES
from tests.exactness.architectures import WITH_DRAFT_LAYER, tiny_model
from tests.runtime.plan.tensor_weights import decoder_of
from tests.runtime.plan.test_plan import BESIDES, FAMILIES, YARN

LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *BESIDES,
    ("starcoder2", {"sliding_window": None}),
    *(
        ("llama", {"head_dim": 96, "rope_parameters": one})
        for one in (LINEAR, LLAMA_3, YARN, YARN | {"truncate": False})
    ),
    ("llama", {"head_dim": 64, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 20}}),
    ("stablelm", {"rope_parameters": YARN | {"attention_factor": 1.5, "partial_rotary_factor": 0.5}}),
    ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
]
CASES = [*((name, {}) for name in FAMILIES), *OPTIONS]


def found_in(model: PreTrainedModel) -> dict[str, tuple[torch.Tensor, float]]:
    """The frequencies that transformers' modules have, and their factors."""
    decoder = decoder_of(model)
    if own := getattr(decoder, "rotary_embs", ()):
        return {str(one.config.rope_parameters["rope_theta"]): (one.inv_freq, one.attention_scaling) for one in own}
    module = getattr(decoder, "rotary_emb", getattr(decoder, "pos_emb", None))
    if module is None:
        return {}
    kinds = [""] if isinstance(module.rope_type, str) else [f"{kind}_" for kind in module.rope_type]
    return {
        kind.rstrip("_"): (getattr(module, f"{kind}inv_freq"), getattr(module, f"{kind}attention_scaling"))
        for kind in kinds
    }


@pytest.mark.cases(10)
@pytest.mark.parametrize(("name", "fields"), CASES, ids=[f"{name}-{'-'.join(fields)}" for name, fields in CASES])
def test_layouts_and_positions_are_those_of_the_modules(name: str, fields: dict[str, Any]) -> None:
    model = tiny_model(name, torch.bfloat16, **fields)
    expected, found = read_layout(model), layout_of(model.config, "bfloat16")
    if name == "qwen4_exp":
        # The grid has no place for its indexer's keys, so only the plan serves it.
        assert expected.unsupported == ("DynamicIndexedLayer",)
    else:
        assert not expected.unsupported
        assert (found.describe(), found.layers) == (expected.describe(), expected.layers)
    rotary = rotary_of(model.config.get_text_config(decoder=True))
    modules = found_in(model)
    assert rotary.keys() == modules.keys()
    for kind, (frequencies, factor) in modules.items():
        ours = abs(rotary[kind].frequencies)
        assert ours.dtype == np.float32
        assert rotary[kind].factor == pytest.approx(factor)
        # Powers are rounded once, torch's are nearly so.
        np.testing.assert_array_max_ulp(ours, frequencies.float().numpy(), maxulp=4)


def test_keys_and_values_in_8_bits_are_items_of_32_numbers() -> None:
    sizes = {}
    for name, fields in (
        ("llama", {"head_dim": 96}), ("llama", {"head_dim": 80}), ("qwen2", {}), ("deepseek_v3", {}), ("mamba2", {})
    ):  # fmt: skip
        config = tiny_model(name, torch.bfloat16, **fields).config
        wide, narrow = (layout_of(config, "bfloat16", kv_type) for kv_type in ("auto", "q8"))
        assert narrow.states == wide.states
        assert (narrow.describe() == wide.describe()) == (name == "mamba2")
        sizes[name, *fields.values()] = wide.bytes_per_token, narrow.bytes_per_token
    # Two layers, of two heads or of a latent of 32 numbers with a rotary key of 8.
    assert sizes == {
        ("llama", 96): (1536, 8 * 3 * 34),
        ("llama", 80): (1280, 8 * 3 * 34),
        # Keys stay, and a head of 16 numbers is an item.
        ("qwen2",): (256, 128 + 4 * 34),
        ("deepseek_v3",): (160, 2 * 2 * 34),
        ("mamba2",): (0, 0),
    }


def test_latents_that_fill_no_item_are_refused() -> None:
    config = tiny_model("deepseek_v3", torch.bfloat16, kv_lora_rank=24).config
    with pytest.raises(SettingsError, match=r"^--kv-type q8 has no place for latents of 24 numbers: 32 share a scale$"):
        layout_of(config, "bfloat16", "q8")


@pytest.mark.parametrize("name", WITH_DRAFT_LAYER)
def test_the_layout_has_the_draft_layer(name: str) -> None:
    model = tiny_model(name, torch.float32)
    layers, found = read_layout(model).layers, layout_of(model.config, "float32", with_draft_layer=True)
    text = model.config.get_text_config(decoder=True)
    kind = (TYPES[text.model_type].draft_layer or {}).get("layer_types")
    like = len(layers) - 1 if kind is None else max(at for at, one in enumerate(text.layer_types) if one == kind)
    assert found.layers == (*layers, layers[like])
    specs = [spec for group in found.groups for spec in group.specs]
    own, others = ({spec.part: spec.form for spec in specs if spec.layer == layer} for layer in (len(layers), like))
    assert own == others | {"hidden": own["hidden"]}
    assert own["hidden"] == TensorSpec(0, "hidden", 1, text.hidden_size, "float32").form
