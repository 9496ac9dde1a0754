"""A folder of gpt-oss in MXFP4 is served as it is: products compute with the quants of the file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from diskprefix.daemon.settings import Settings
from diskprefix.errors import ModelError
from diskprefix.runtime.files import mxfp4
from diskprefix.runtime.files.checkpoint import StoredTensor, stored_tensors
from diskprefix.runtime.files.file_matrix import MatrixPacking
from diskprefix.runtime.files.fit import needs_of_folder
from diskprefix.runtime.files.mxfp4 import FORM, Mxfp4Experts
from diskprefix.runtime.load import packed_weights
from diskprefix.runtime.load.loader import LoadedModel, load_model
from diskprefix.runtime.plan.part_options import ExpertsForm
from diskprefix.runtime.plan.quants.forms import compiled, weights_of
from tests import forked
from tests.daemon.engine.driving import done, load, run, tokens, tokens_of
from tests.exactness.architectures import tiny_model
from tests.runtime.plan import plans, tiny
from tests.runtime.test_memory import MIB, note_growth

BLOCK = 16
TOKENS = tokens(40)
QUANTS: dict[str, Any] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
EXPERTS = ("gate_up_proj", "down_proj")
Change: TypeAlias = Callable[[dict[str, torch.Tensor]], object]
GPT_OSS = ExpertsForm(has_bias=True, is_transposed=True, is_interleaved=True)


def made_up(shape: tuple[int, ...], scales: tuple[int, int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of all codes, and scales between these."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(scales[0], scales[1] + 1, shape, generator=generator, dtype=torch.uint8)


def write_folder(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object] = lambda _: None
) -> GptOssForCausalLM:
    """Writes a tiny gpt-oss as it is published. Returns it with the numbers that transformers makes of its quants."""
    model: Any = tiny_model("gpt_oss", torch.bfloat16)
    tensors = dict(model.state_dict())
    for number, layer in enumerate(model.model.layers):
        for at, name in enumerate(EXPERTS):
            path, parameter = f"model.layers.{number}.mlp.experts.{name}", getattr(layer.mlp.experts, name)
            experts, columns, rows = parameter.shape
            blocks, scales = made_up((experts, rows, columns // 32), (120, 124), seed=2 * number + at)
            parameter.data = convert_moe_packed_tensors(blocks, scales)
            del tensors[path]
            tensors |= {f"{path}_blocks": blocks, f"{path}_scales": scales}
    change(tensors)
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {**model.config.to_dict(), "quantization_config": QUANTS, "architectures": ["GptOssForCausalLM"]}
    (folder / "config.json").write_text(json.dumps({name: one for name, one in config.items() if name != "dtype"}))
    tiny.tokenizer().save_pretrained(folder)
    assert isinstance(model, GptOssForCausalLM)
    return model


def loaded(folder: Path, **settings: Any) -> LoadedModel:
    return load_model(Settings(model=str(folder), **settings), lambda _: None)


def stored(folder: Path, name: str, blocks: torch.Tensor, scales: torch.Tensor) -> Mxfp4Experts:
    folder.mkdir(exist_ok=True)
    file = folder / "model.safetensors"
    save_file({f"{name}_blocks": blocks, f"{name}_scales": scales}, file)
    found = Mxfp4Experts.of(name, {one.name: one for one in stored_tensors(folder, [file])})
    assert found is not None
    return found


def bits(numbers: torch.Tensor | np.ndarray) -> np.ndarray:
    """Of bfloat16 numbers. A code has a zero with a sign, which a product does not see."""
    found = numbers.contiguous().view(torch.uint16).numpy() if isinstance(numbers, torch.Tensor) else numbers
    return np.where(found == 0x8000, 0, found)


def test_the_numbers_are_those_of_transformers_bit_for_bit(tmp_path: Path) -> None:
    """Of every code with every scale but the one that is no number."""
    for name, rows in (("gate_up_proj", 64), ("down_proj", 48)):
        blocks, scales = made_up((3, rows, 4), (0, 254))
        blocks[0, :16, 0] = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
        scales.reshape(-1)[:255] = torch.arange(255, dtype=torch.uint8)
        expected = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
        experts = stored(tmp_path / name, name, blocks, scales)
        packing = MatrixPacking(compiled())
        parts = experts.packed(name, GPT_OSS, packing, is_unread=False)
        packing.finish_packing()
        assert [*parts] == (["gate", "up"] if name == "gate_up_proj" else ["down"])
        for part, quants in parts.items():
            own = {"gate": expected[:, ::2], "up": expected[:, 1::2], "down": expected}[part]
            for number, packed in enumerate(quants.packed):
                np.testing.assert_array_equal(bits(weights_of(packed, FORM)), bits(own[number]))
        out = np.empty((3, 128, rows), np.uint16)
        np.testing.assert_array_equal(bits(experts.transposed(out)), bits(expected.transpose(1, 2)))


@pytest.mark.parametrize(
    ("dtype", "weights", "most"), [("float32", "auto", 1e-4), ("bfloat16", "native", 0.1), ("auto", "auto", 0.2)]
)
def test_a_folder_has_the_logits_of_transformers(dtype: str, weights: str, most: float, tmp_path: Path) -> None:
    model = write_folder(tmp_path).float()
    with torch.inference_mode():
        expected = model(input_ids=torch.from_numpy(TOKENS[None].astype(np.int64)), use_cache=False).logits[0]
    found = loaded(tmp_path, dtype=dtype, weights=weights)
    assert found.dtype == ("bfloat16" if dtype == "auto" else dtype)
    assert found.weights is not None
    assert bool([one for one in found.weights.named() if one[0].endswith("experts.gate")]) == (dtype == "auto")
    logits = plans.logits_of(found.weights, found.config, TOKENS)
    errors = (logits.float() - expected).abs().amax(1) / expected.std()
    # In bfloat16, a router may choose another expert for a token.
    assert float(errors.quantile(1.0 if dtype == "float32" else 0.5)) < most


def test_the_next_start_maps_packed_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "m")
    for file in (tmp_path / "m").iterdir():
        os.utime(file, (1e9, 1e9))  # Its digest is remembered.
    monkeypatch.setattr(packed_weights, "LEAST_BYTES", 0)
    first = loaded(tmp_path / "m", packed_weights=str(tmp_path / "weights"))
    for _ in first.keep_weights():
        pass
    monkeypatch.setattr(mxfp4, "pack", Mock(side_effect=AssertionError("nothing is packed")))
    second = loaded(tmp_path / "m", packed_weights=str(tmp_path / "weights"))
    for found in (first, second):
        assert found.weights is not None
    before, after = (dict(found.weights.named()) for found in (first, second) if found.weights is not None)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_server_restores_what_it_computed(tmp_path: Path) -> None:
    write_folder(tmp_path / "m")
    replies = []
    for restored in (0, len(TOKENS)):
        engine = load(tmp_path / "m", tmp_path / "kv", block_size=BLOCK)
        assert engine.cache.layout.exact_at == "token"
        events = run(engine, TOKENS, max_tokens=6)
        assert done(events).usage.cached_tokens == restored
        replies.append(tokens_of(events))
        assert engine.close()
    assert replies[0] == replies[1]


# Memory.


def test_the_estimated_memory_equals_the_size_in_the_file(tmp_path: Path) -> None:
    write_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    in_file = sum(one.num_bytes for one in stored_tensors(tmp_path, [file]) if one.kind == "U8")
    found = loaded(tmp_path)
    assert found.weights is not None
    assert sum(one.nbytes for name, one in found.weights.named() if one.dtype == np.uint8) == in_file
    assert found.fit.needs.weights["MXFP4"] == needs_of_folder(tmp_path, [file], "auto").weights["MXFP4"] == in_file
    wide = needs_of_folder(tmp_path, [file], "float32").weights
    assert wide.keys() == {"float32"}
    assert wide["float32"] > 32 / 17 * 4 * in_file
    assert "MXFP4" not in needs_of_folder(tmp_path, [file], "auto", "native").weights


def write_large(folder: Path) -> int:
    """Writes one of zeros, which take no room on the disk. Returns the bytes of its quants."""
    experts, width, inner, layers = 16, 1024, 1024, 2
    config = tiny_model("gpt_oss", torch.bfloat16).config.to_dict()
    config |= {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "head_dim": 64}
    config |= {"num_local_experts": experts, "layer_types": ["full_attention"] * layers}
    config |= {"quantization_config": QUANTS, "architectures": ["GptOssForCausalLM"]}
    heads, keys, vocabulary = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "vocab_size"))
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        name: ("BF16", shape)
        for name, shape in (
            ("model.embed_tokens.weight", (vocabulary, width)),
            ("lm_head.weight", (vocabulary, width)),
            ("model.norm.weight", (width,)),
        )
    }
    for layer in range(layers):
        at = f"model.layers.{layer}"
        plain: dict[str, tuple[int, ...]] = {
            f"{at}.{one}_layernorm.weight": (width,) for one in ("input", "post_attention")
        }
        for name, rows, columns in (
            ("q", heads * 64, width), ("k", keys * 64, width), ("v", keys * 64, width), ("o", width, heads * 64)
        ):  # fmt: skip
            plain |= {
                f"{at}.self_attn.{name}_proj.weight": (rows, columns),
                f"{at}.self_attn.{name}_proj.bias": (rows,),
            }
        plain |= {f"{at}.self_attn.sinks": (heads,)}
        plain |= {f"{at}.mlp.router.weight": (experts, width), f"{at}.mlp.router.bias": (experts,)}
        for name, rows, columns in (("gate_up_proj", 2 * inner, width), ("down_proj", width, inner)):
            path = f"{at}.mlp.experts.{name}"
            plain |= {f"{path}_bias": (experts, rows)}
            shapes |= {f"{path}_blocks": ("U8", (experts, rows, columns // 32, 16))}
            shapes |= {f"{path}_scales": ("U8", (experts, rows, columns // 32))}
        shapes |= {name: ("BF16", shape) for name, shape in plain.items()}
    header, size = {}, 0
    for name, (kind, shape) in shapes.items():
        num_bytes = prod(shape) * (1 if kind == "U8" else 2)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [size, size + num_bytes]}
        size += num_bytes
    text = json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    tiny.tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    return sum(prod(shape) for kind, shape in shapes.values() if kind == "U8")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel does not tell")
def test_loading_takes_no_copy_in_bfloat16(tmp_path: Path) -> None:
    size = write_large(tmp_path)
    in_bfloat16 = 2 * size * 32 // 17
    assert forked.run(note_growth, str(tmp_path), tmp_path / "growth") == 0
    # All in bfloat16 would be 192 MiB. Libraries take 50 to 75.
    assert size <= int((tmp_path / "growth").read_text()) <= size + 120 * MIB < in_bfloat16


# What is refused.


def changed(
    end: str, change: Callable[[torch.Tensor], torch.Tensor | None]
) -> Callable[[dict[str, torch.Tensor]], None]:
    """Returns what changes the first tensor whose name ends so, or takes it out."""

    def of(tensors: dict[str, torch.Tensor]) -> None:
        name = next(one for one in tensors if one.endswith(end))
        found = change(tensors.pop(name))
        if found is not None:
            tensors[name] = found

    return of


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (changed("gate_up_proj_scales", lambda _: None), r"lack layers.0.mlp.experts.gate_up_proj_scales"),
        (changed("down_proj_blocks", lambda _: None), r"lack layers.0.mlp.experts.down_proj_blocks"),
        (changed("down_proj_blocks", lambda one: one.float()), r"down_proj_blocks is of the type F32, not U8"),
        (changed("down_proj_scales", lambda one: one[:, :16]), r"down_proj_scales is \(.*: no blocks of 32"),
        (changed("down_proj_blocks", lambda one: one[..., :8]), r"down_proj_blocks is \(.*: no blocks of 32"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(change: Any, problem: str, tmp_path: Path) -> None:
    write_folder(tmp_path, change)
    with pytest.raises(ModelError, match=problem):
        loaded(tmp_path)


def test_experts_of_another_number_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    short = {name: one[:4].contiguous() if "down_proj_" in name else one for name, one in tensors.items()}
    save_file(short, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="its weights do not fit together"):
        loaded(tmp_path)


def test_a_file_that_is_cut_short_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path)
    read, file = StoredTensor.read_into, tmp_path / "model.safetensors"

    def cut(tensor: StoredTensor, out: Any, first: int = 0) -> None:
        if tensor.name.endswith("_blocks"):
            with file.open("r+b") as content:
                content.truncate(tensor.offset + 1)
        read(tensor, out, first)

    monkeypatch.setattr(StoredTensor, "read_into", cut)
    with pytest.raises(ModelError, match=r"ends within model.layers.0.mlp.experts.gate_up_proj_blocks"):
        loaded(tmp_path)


def test_without_a_plan_it_is_refused_and_so_are_other_quants(tmp_path: Path) -> None:
    write_folder(tmp_path)
    with pytest.raises(ModelError, match=r"not served without a plan \(no plan computes in float16\); take a"):
        loaded(tmp_path, dtype="float16")
    config = json.loads((tmp_path / "config.json").read_text())
    for changes in ({"quantization_config": {"quant_method": "fp8"}}, {"model_type": "llama"}):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ModelError, match=r"weights quantised with (fp8|mxfp4) are not served; take a .gguf file"):
            loaded(tmp_path)
