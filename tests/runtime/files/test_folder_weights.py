"""The weights of a folder are those that transformers reads of it, however a published checkpoint calls them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.conversion_mapping import get_model_conversion_mapping

from diskprefix.runtime.files import folder_weights
from diskprefix.runtime.files.checkpoint import stored_tensors, weight_files
from diskprefix.runtime.files.folder_weights import FolderWeights
from tests.arrays import tensor_of
from tests.exactness.architectures import tiny_model
from tests.runtime.plan.plans import logits_of
from tests.runtime.plan.tensor_weights import weights_of
from tests.runtime.plan.test_plan import FAMILIES


@pytest.mark.cases(5)
@pytest.mark.parametrize("is_published", [True, False], ids=["published", "as transformers"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_gives_a_plan_the_weights_that_it_gives_to_modules(
    name: str, is_published: bool, tmp_path: Path
) -> None:
    model = tiny_model(name, torch.bfloat16)
    # With these, transformers writes the names that it reads.
    model._weight_conversions = get_model_conversion_mapping(model) if is_published else None
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    weights = FolderWeights(stored_tensors(tmp_path, weight_files(tmp_path)), again.config, "bfloat16")
    assert torch.equal(logits_of(weights, again.config), logits_of(weights_of(again), again.config))


@pytest.mark.parametrize("is_copy", [True, False])
def test_a_tied_head_that_is_stored_twice_is_kept_once_if_it_is_a_copy(is_copy: bool, tmp_path: Path) -> None:
    model = tiny_model("llama", torch.bfloat16, tie_word_embeddings=True)
    state = {name: one.clone() for name, one in model.state_dict().items()}
    state["lm_head.weight"][-1, -1] += 0 if is_copy else 1
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    weights = FolderWeights(stored_tensors(tmp_path, weight_files(tmp_path)), model.config, "bfloat16")
    logits_of(weights, model.config)
    names = [name for name, _ in weights.named()]
    assert weights.has_parameter("lm_head.weight") != is_copy
    assert ("lm_head.weight" in names, "embed_tokens.weight" in names) == (not is_copy, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_numbers_are_rounded_as_torch_rounds_them(
    stored: torch.dtype, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_weights, "_PIECE_BYTES", 100)
    model = tiny_model("llama", torch.float32)
    model.to(stored).save_pretrained(tmp_path)
    name = str(dtype).removeprefix("torch.")
    weights = FolderWeights(stored_tensors(tmp_path, weight_files(tmp_path)), model.config, name)
    for own, parameter in model.get_decoder().state_dict().items():
        assert torch.equal(tensor_of(weights.tensor(own)), parameter.to(dtype)), own
