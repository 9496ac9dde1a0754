"""The tables of n-grams of a folder stay in their files, of which steps read single rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM, PreTrainedModel

from diskprefix.errors import ModelError
from diskprefix.runtime.files.checkpoint import read_config, stored_tensors, weight_files
from diskprefix.runtime.files.fit import needs_of_folder
from diskprefix.runtime.files.folder_weights import FolderWeights
from diskprefix.runtime.files.kinds import config_of_plan
from diskprefix.runtime.plan.families.decoder_options import pictures_problem, without_plan
from diskprefix.runtime.plan.model_config import ModelConfig
from diskprefix.runtime.plan.planned import plan_layout
from tests.exactness.architectures import ARCHITECTURES, tiny_model
from tests.runtime.plan.plans import logits_of
from tests.runtime.plan.tensor_weights import weights_of

NAME = "qwen4_exp"
TABLE = "model.layers.0.ple.ple_embedding.ngram_embedding.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model(NAME, torch.bfloat16)


def written(model: PreTrainedModel, folder: Path, change: Callable[[Tensors], None] = lambda _tensors: None) -> Path:
    """Writes the folder of a model with changed tensors, and returns the file of its weights."""
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return file


def in_shards(tensors: Tensors) -> None:
    # With ten, the names in alphabetical order would have another order than the numbers.
    for number, part in enumerate(tensors.pop(TABLE).tensor_split(11)):
        tensors[TABLE.replace("weight", f"shard_{number}.weight")] = part.clone()


def without_integers(tensors: Tensors) -> None:
    for name in [name for name, tensor in tensors.items() if not tensor.is_floating_point()]:
        del tensors[name]


def read(model: PreTrainedModel, folder: Path) -> FolderWeights:
    return FolderWeights(stored_tensors(folder, weight_files(folder)), model.config, "bfloat16")


def test_a_table_in_shards_is_one_table_and_is_not_read_into_memory(model: PreTrainedModel, tmp_path: Path) -> None:
    written(model, tmp_path, in_shards)
    weights = read(model, tmp_path)
    assert torch.equal(logits_of(weights, model.config), logits_of(weights_of(model), model.config))
    names = [name for name, _ in weights.named()]
    assert "embed_tokens.weight" in names
    assert not any("ngram_embedding" in name for name in names)


def test_a_table_is_no_part_of_the_memory_that_a_model_needs(model: PreTrainedModel, tmp_path: Path) -> None:
    file = written(model, tmp_path)
    sizes = {tensor.name: tensor.num_bytes for tensor in stored_tensors(tmp_path, [file])}
    of_tables = sum(size for name, size in sizes.items() if name.endswith("ngram_embedding.weight"))
    assert of_tables > 100_000
    needed = needs_of_folder(tmp_path, [file], "bfloat16").weights_bytes
    assert needed == sum(sizes.values()) - of_tables


def test_a_table_whose_file_is_cut_short_while_it_is_used_fails_the_step(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    file = written(model, tmp_path, without_integers)
    weights = read(model, tmp_path)
    logits_of(weights, model.config)
    with file.open("r+b") as opened:
        opened.truncate(1000)
    with pytest.raises(OSError, match="a row of a table cannot be read from its file"):
        logits_of(weights, model.config)


def lacks_a_shard(tensors: Tensors) -> None:
    in_shards(tensors)
    del tensors[TABLE.replace("weight", "shard_3.weight")]


def lacks_the_table(tensors: Tensors) -> None:
    del tensors[TABLE]


def has_integers(tensors: Tensors) -> None:
    tensors[TABLE] = tensors[TABLE].to(torch.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lacks_a_shard, "lacks layers.0.ple.ple_embedding.ngram_embedding.shard_3.weight"),
        (lacks_the_table, "lacks layers.0.ple.ple_embedding.ngram_embedding.weight"),
        (has_integers, r"ngram_embedding.weight is I8 \[\d+, 4\], not a table of floating-point numbers"),
    ],
)
def test_a_folder_without_the_whole_table_is_refused_by_name(
    model: PreTrainedModel, tmp_path: Path, change: Callable[[Tensors], None], message: str
) -> None:
    written(model, tmp_path, change)
    with pytest.raises(ModelError, match=message):
        logits_of(read(model, tmp_path), model.config)


def has_few_rows(tensors: Tensors) -> None:
    tensors[TABLE] = tensors[TABLE][:100].clone()


def has_another_hash(tensors: Tensors) -> None:
    tensors[TABLE.replace("ngram_embedding.weight", "layer_multipliers")] += 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (has_few_rows, r"n-grams of \d+ rows, of a table of 100"),
        (has_another_hash, "layer_multipliers has other numbers than the options say"),
    ],
)
def test_a_table_of_other_rows_than_the_options_say_is_refused(
    model: PreTrainedModel, tmp_path: Path, change: Callable[[Tensors], None], message: str
) -> None:
    written(model, tmp_path, change)
    with pytest.raises(ValueError, match=message):
        logits_of(read(model, tmp_path), model.config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"indexer_budget": None}, "indexer_budget is None"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads is 2, not 1"),
        ({"indexer_budget": 25}, "indexer_budget is not a multiple of its indexer_compress_ratio"),
        ({"hc_count": 1}, "hc_count is 1"),
        ({"hc_lowrank": 0}, "hc_lowrank is 0"),
        ({"num_experts_per_tok": 9}, "9 of 8 experts"),
        ({"output_gate_type": "tanh"}, "output_gate_type is tanh"),
        ({"ngram_size": 9}, "ngram_size of 9"),
        ({"ple_conv_kernel_size": 9}, "ple_conv_kernel_size"),
        ({"ple_embed_dim": 60}, "ple_embed_dim 60 of the configuration is not a multiple of 16"),
        ({"eos_token_id": None}, "no eos_token_id"),
        ({"ple_layer_ids": [2]}, "ple_layer_ids has 2, which is no layer with linear attention"),
        ({"ple_layer_ids": [9]}, "ple_layer_ids has 9"),
    ],
)
def test_options_that_do_not_fit_together_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    given = ARCHITECTURES[NAME].build().to_dict()
    assert ModelConfig.of(given).layer_types.count("indexed_attention") == 2
    with pytest.raises(ModelError, match=message):
        ModelConfig.of(given | options)


def test_a_model_without_the_options_of_its_indexer_has_no_plan() -> None:
    given = ARCHITECTURES[NAME].build().to_dict()
    given |= {name: None for name in given if name.startswith("indexer_")}
    assert without_plan(ModelConfig.of(given)) == "no plan has layers with an indexer whose options are missing"


def test_a_model_with_an_encoder_of_pictures_computes_text_and_takes_no_pictures(tmp_path: Path) -> None:
    text = ARCHITECTURES[NAME].build().to_dict()
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    torch.manual_seed(0)
    config = CONFIG_MAPPING[NAME](text_config=text, vision_config=vision)
    whole = AutoModelForMultimodalLM.from_config(config, dtype=torch.bfloat16).eval()
    whole.save_pretrained(tmp_path)
    given = read_config(tmp_path)
    own = config_of_plan(tmp_path, given)
    assert own is not None
    assert without_plan(own) == ""
    weights = FolderWeights(stored_tensors(tmp_path, weight_files(tmp_path)), own, "bfloat16")
    ids = torch.arange(3, 40)
    with torch.inference_mode():
        expected = whole(input_ids=ids[None], use_cache=False).logits[0].float()
    logits = logits_of(weights, own, ids.numpy())
    assert (logits - expected).norm() < 0.1 * expected.norm()
    layout = plan_layout(weights, own)
    assert pictures_problem(own, layout) == "no plan has the places of pictures in an indexer"
