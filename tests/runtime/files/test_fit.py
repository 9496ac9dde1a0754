"""The estimate of what a model needs: from headers alone, compared with what models take, and what is advised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from diskprefix.daemon.settings import Settings
from diskprefix.errors import ModelError
from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.prefixstore.kv.sizes import longest_within
from diskprefix.runtime.fetch.alternatives import other_forms, require_fit
from diskprefix.runtime.fetch.hub import listing_of
from diskprefix.runtime.files.checkpoint import number_type, require_plain_weights, tensors_in
from diskprefix.runtime.files.fit import (
    ROOM_BYTES,
    ModelNeeds,
    TokenState,
    fitted,
    needs_of_folder,
    needs_of_gguf,
    state_of,
)
from diskprefix.runtime.grid.rehearsal import rehearse
from diskprefix.runtime.plan.families.memory_layout import layout_of
from tests.exactness.architectures import tiny_model
from tests.runtime.load.test_loader import load
from tests.runtime.plan import tiny
from tests.runtime.plan.hub import fake_hub

MIB = 1024**2


def folder_of(path: Path, dtype: torch.dtype = torch.float32) -> Path:
    return tiny.write_folder(path / "tiny", dtype=dtype)


def needs_in(folder: Path, dtype: str = "auto") -> ModelNeeds:
    return needs_of_folder(folder, sorted(folder.glob("*.safetensors")), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_size_of_weights_follows_from_headers_and_the_served_type(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny.llama()
    taken = sum(p.numel() * dtype.itemsize for p in model.parameters())
    needs = needs_in(folder_of(tmp_path), dtype=str(dtype).removeprefix("torch."))
    assert needs.weights_bytes == taken


def test_packed_weights_keep_their_size(tmp_path: Path) -> None:
    tensors = {"packed": torch.zeros(64, dtype=torch.uint8), "index": torch.zeros(2, dtype=torch.int64)}
    save_file(tensors | {"scale": torch.zeros(4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    assert needs_in(tmp_path).weights_bytes == 64 + 2 * 8 + 4 * 2


def test_a_type_of_numbers_in_which_nothing_computes_is_refused() -> None:
    assert number_type("float16", {"dtype": "odd"}) == "float16"
    for config in ({"dtype": "float8_e4m3fn"}, {"text_config": {"torch_dtype": 3}}):
        with pytest.raises(ModelError, match=r"^the configuration's dtype is .*; choose another --dtype$"):
            number_type("auto", config)


HEADERS = (
    "[]",
    '{"a": 1}',
    '{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}}',
    '{"a": {"dtype": "ODD"}}',
)


@pytest.mark.parametrize("content", [0.0, 0.001, 0.5, 0.99, *HEADERS])
def test_truncated_weights_and_invalid_headers_are_refused_by_name(content: float | str, tmp_path: Path) -> None:
    file = folder_of(tmp_path) / "model.safetensors"
    if isinstance(content, str):
        file.write_bytes(len(content).to_bytes(8, "little") + content.encode() + bytes(64))
    else:
        file.write_bytes(file.read_bytes()[: int(content * file.stat().st_size)])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        tensors_in(file)


SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256, "max_position_embeddings": 2048}
ROW = 2 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("changed", "state"),
    [
        ({}, TokenState(4 * ROW, positions=2048)),
        ({"head_dim": 32}, TokenState(4 * ROW // 2, positions=2048)),
        ({"kv_lora_rank": 560, "qk_rope_head_dim": 16}, TokenState(576 * 4 * 2, positions=2048)),
        ({"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, TokenState(ROW, positions=2048)),
        (
            {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 512},
            TokenState(ROW, 3 * ROW, 512, positions=2048),
        ),
        ({"sliding_window": 512}, TokenState(4 * ROW, positions=2048)),
        ({"max_position_embeddings": None}, TokenState(4 * ROW, positions=131_072)),
    ],
)
def test_the_state_of_a_model_without_a_plan_follows_from_its_configuration(
    changed: dict[str, Any], state: TokenState
) -> None:
    config = {"model_type": "of_tomorrow", "num_hidden_layers": 4, **SIZES, **changed}
    assert state_of("x", config, 2) == state
    assert state_of("x", {"text_config": config}, 2) == state


def test_missing_options_of_a_published_configuration_have_the_types_defaults() -> None:
    text = {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "sliding_window": 1024}
    config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    row = 2 * 4 * 256 * 2
    assert state_of("x", config, 2) == TokenState(5 * row, 29 * row, 1024, positions=131_072)


@pytest.mark.parametrize("state", [TokenState(10), TokenState(10, 5, 100), TokenState(0, 5, 100), TokenState(0)])
def test_the_longest_sequence_is_the_one_that_fits(state: TokenState) -> None:
    for num_bytes in (0, 9, 2559, 2560, 21_000, 35_000, 100_000):
        tokens = state.tokens_in(num_bytes)
        assert not tokens or state.num_bytes(tokens) <= num_bytes
        assert tokens == state.positions or state.num_bytes(tokens + 1) > num_bytes


@pytest.mark.cases(8)
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize("kv_type", ["auto", "q8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_estimated_context_equals_the_allocated_one(name: str, dtype: torch.dtype, kv_type: str) -> None:
    model = tiny_model(name, dtype)
    named = str(dtype).removeprefix("torch.")
    layout = layout_of(model.config, named, kv_type) if kv_type == "q8" else rehearse(model)
    pool = PagePool(layout, block_size=256)
    state = state_of(name, model.config.to_dict(), dtype.itemsize).of_type(kv_type)
    for num_tokens in (500, 1024, 1025, 5000, 20_000):
        num_bytes = state.num_bytes(num_tokens)
        assert num_bytes == pool.sequence_bytes(num_tokens)
        for left in (num_bytes - 1, num_bytes):
            assert longest_within(left, pool.sequence_bytes, state.positions, 256) == state.tokens_in(left)


def test_the_context_line_names_q8_if_its_context_is_longer() -> None:
    for positions, words in ((1024, "1,024 of 1,024 tokens"), (8192, "2,048 of 8,192 tokens, 3,840 with --kv-type q8")):
        state = TokenState(64, positions=positions, in_q8=(34, 0))
        assert fitted(ModelNeeds(name="x", state=state), 0, 64 * 2048).context_line == words
        assert "q8" not in fitted(ModelNeeds(name="x", state=state).of("q8", None), 0, 64 * 2048).context_line
    assert fitted(ModelNeeds(name="x", state=TokenState(64)), 0, 64 * 2048).context_line == "2,048 of 131,072 tokens"


def test_few_weights_of_a_form_have_no_row_of_their_own_and_the_sum_stays() -> None:
    weights = {"bfloat16": 70 << 10, "Q4_1": 90 * MIB, "Q6_K": 2 * MIB}
    found = fitted(ModelNeeds(name="x", weights=weights, state=TokenState(64, positions=1024)), 1 << 40)
    rows = dict(found.rows())
    assert [what for what in rows if what.startswith("weights")] == ["weights in Q4_1", "weights in Q6_K"]
    assert sum(rows.values()) == found.needed_bytes
    assert rows["weights in Q4_1"] == (90 * MIB) + (70 << 10)
    assert weights["bfloat16"] == 70 << 10, "the needs stay"


def test_kv_memory_and_context_follow_from_what_is_free() -> None:
    needs = ModelNeeds(name="x", weights={"Q4_0": 100 * MIB}, state=TokenState(MIB, positions=100_000))
    for left, context in ((0, 2048), (4607, 2048), (4608, 2304), (8192, 4096)):
        found = fitted(needs, 100 * MIB + ROOM_BYTES + left * MIB)
        assert (found.context, found.kv_limit) == (context, max(left * MIB // 2, 2048 * MIB))
        assert found.is_enough == (left > 2048)
        assert found.kv_bytes == found.kv_limit


def test_queued_writes_have_room_besides_kv_memory() -> None:
    needs = ModelNeeds(name="x", weights={"Q4_0": 100 * MIB}, state=TokenState(1024, positions=100_000))
    for left, kv_memory, room in ((4000, None, 1000), (1000, 200 * MIB, 400), (1000, 1000 * MIB, 64)):
        found = fitted(needs, 100 * MIB + ROOM_BYTES + left * MIB, kv_memory)
        assert found.buffer_bytes(1 << 40) == room * MIB
        assert found.buffer_bytes(MIB) == MIB


def test_a_refusal_has_the_sum_and_the_context_that_would_fit() -> None:
    needs = ModelNeeds(name="x", weights={"Q4_0": 100 * MIB}, state=TokenState(MIB // 4, positions=100_000))
    free = 100 * MIB + ROOM_BYTES + 700 * MIB
    text = fitted(needs, free, 1000 * MIB).refusal()
    assert "x does not fit: about 1.7 GiB of memory needed (weights in Q4_0 100.0 MiB, KV memory for 3,840" in text
    assert text.endswith("a context of 2,560 tokens would fit: --kv-memory 700MiB")
    assert not fitted(needs, free, 700 * MIB).needed_bytes > free


def test_other_files_that_would_fit_are_named(tmp_path: Path) -> None:
    large, small = (tiny.write_gguf(tmp_path / f"{kind}.gguf", quantised=kind) for kind in ("Q8_0", "Q4_0"))
    others = dict(other_forms(Settings(model=str(large))))
    assert list(others) == ["the file Q4_0.gguf"]
    assert others["the file Q4_0.gguf"].weights_bytes == needs_of_gguf(small, "auto").weights_bytes
    needs = ModelNeeds(name="x", weights={"Q8_0": 2**40}, state=TokenState(1, positions=10))
    with pytest.raises(ModelError, match=r"the file Q4_0\.gguf would fit: ") as caught:
        require_fit(needs, 2**30, Settings(model=str(large)))
    assert "\n" not in caught.value.message


@pytest.mark.usefixtures("cache")
def test_a_model_of_the_hub_that_does_not_fit_is_refused_before_it_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path)
    expected = needs_in(folder).weights_bytes
    monkeypatch.setattr("diskprefix.runtime.load.loader.available_bytes", lambda _device: 1000)
    with fake_hub(tmp_path / "hub", monkeypatch) as hub:
        hub.repos["org/tiny"] = folder
        listing = listing_of("org/tiny")
        assert listing is not None
        assert listing.needs("auto").weights_bytes == expected
        with pytest.raises(ModelError, match=r"^org/tiny does not fit: "):
            load("org/tiny")
    assert not list((tmp_path / "hub").rglob("*.safetensors"))


@pytest.mark.usefixtures("cache")
def test_published_quants_are_refused_before_they_are_fetched_and_the_file_to_pull_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(config))
    with fake_hub(tmp_path / "hub", monkeypatch) as hub:
        hub.repos["org/tiny-FP8"] = folder
        with pytest.raises(ModelError) as raised:
            load("org/tiny-FP8")
    assert raised.value.message == (
        "org/tiny-FP8: weights quantised with fp8 are not served; take a .gguf file of the model, such as that of "
        "`diskprefix pull org/tiny-GGUF`"
    )
    assert not list((tmp_path / "hub").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("name", "method", "file"),
    [
        ("Qwen/Qwen3-4B-FP8", "fp8", "Qwen/Qwen3-4B-GGUF"),
        ("org/Llama-3.1-8B-Instruct-AWQ-INT4", "awq", "org/Llama-3.1-8B-Instruct-GGUF"),
        ("org/Some-7B-GPTQ-Int4", "gptq", "org/Some-7B-GGUF"),
        ("org/Some-7B-quantized.w4a16", "compressed-tensors", "org/Some-7B-GGUF"),
        ("org/Some-7B-bnb-4bit", "bitsandbytes", "org/Some-7B-GGUF"),
        ("/models/gpt-oss-20b", "mxfp4", "ORG/gpt-oss-20b-GGUF"),
    ],
)
def test_the_file_to_pull_has_the_name_without_its_quants(name: str, method: str, file: str) -> None:
    with pytest.raises(ModelError, match=f"quantised with {method} are.*`diskprefix pull {file}`$"):
        require_plain_weights(name, {"text_config": {"quantization_config": {"quant_method": method}}})


def test_a_hub_that_cannot_be_reached_lists_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_hub(tmp_path / "hub", monkeypatch):
        pass
    assert listing_of("org/tiny") is None
    assert list(other_forms(Settings(model="org/tiny"))) == []
