"""The files of `tools/bench shapes`, made small: libraries read them, the daemon converts one, and what is measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from diskprefix.model.load.gguf import converted_folder
from diskprefix.model.load.gguf_file import read_tensors
from diskprefix.model.quants.file_matrix import load_matrices
from tests.model import tiny
from tests.server.chat_model import write_tokenizer
from tests.tools.test_peers import WORKER
from tools.peers.peer import PeerError, Process, Reply, WorkerPeer
from tools.peers.results import MACHINE, Figure, Results
from tools.programs import shapes
from tools.shapes.gguf_shapes import DENSE_7B, GPT_OSS, MIXTURE_30B
from tools.shapes.known import shape_file
from tools.shapes.random_blocks import num_bytes, random_blocks

LAYERS, SCALE = 4, 32
"""The hybrid has full attention in every fourth layer."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return tiny.write_gguf(folder / "tiny.gguf", pre="qwen2")


def small(letter: str, folder: Path, tokenizer: Path) -> Path:
    return shape_file(letter, folder, tokenizer, SCALE, LAYERS, lambda _line: None)


@pytest.mark.parametrize("kind", ["F32", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4"])
def test_random_blocks_have_mean_zero_and_the_deviation_that_is_asked(kind: str) -> None:
    shape = (4, 64, 512)
    blocks = random_blocks(kind, shape, 0.02, np.random.default_rng(0))
    assert blocks.nbytes == num_bytes(kind, shape)
    numbers = blocks if kind == "F32" else gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    assert numbers.shape == shape
    assert abs(numbers.mean()) < 0.0005
    assert 0.015 < numbers.std() < 0.03
    # No two positions get nearly the same numbers because of a mean in the rows.
    assert abs(numbers.mean(axis=-1)).max() < 0.01


@pytest.mark.parametrize("letter", "abc")
def test_a_small_gguf_file_is_read_by_the_library_and_by_us(letter: str, tmp_path: Path, tokenizer: Path) -> None:
    path = small(letter, tmp_path, tokenizer)
    reader, (_, tensors) = gguf.GGUFReader(path), read_tensors([path])
    assert reader.get_field("tokenizer.ggml.pre").contents() == "qwen2"
    assert {tensor.name: tensor.kind for tensor in tensors} == {
        tensor.name: tensor.tensor_type.name for tensor in reader.tensors
    }
    name = reader.get_field("general.architecture").contents()
    architecture = next(key for key, known_as in gguf.MODEL_ARCH_NAMES.items() if known_as == name)
    known = gguf.get_tensor_name_map(architecture, LAYERS)
    assert all(known.get_name(tensor.name.rpartition(".")[0]) for tensor in tensors)
    assert small(letter, tmp_path, tokenizer) == path
    assert [path.name] == [file.name for file in tmp_path.iterdir()]


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("letter", "ac")
def test_a_small_gguf_file_is_converted_and_gives_logits_that_differ_by_position(
    letter: str, tmp_path: Path, tokenizer: Path
) -> None:
    folder = converted_folder(small(letter, tmp_path, tokenizer), lambda _line: None)
    spread = logits_spread(folder)
    assert 0.1 < spread < 10


@pytest.mark.usefixtures("cache")
def test_experts_of_gpt_oss_stay_in_the_file_and_their_biases_are_beside_them(tmp_path: Path, tokenizer: Path) -> None:
    file = small("c", tmp_path, tokenizer)
    folders = {weights: converted_folder(file, lambda _line: None, weights) for weights in ("native", "auto")}
    kept = load_matrices(folders["auto"], [file])
    native, auto = (load_file(folder / "model.safetensors") for folder in folders.values())
    at = "model.layers.1.mlp.experts"
    both = native[f"{at}.gate_up_proj"].transpose(1, 2)
    assert torch.equal(kept[f"{at}.gate"].dequantised(), both[:, ::2])
    assert torch.equal(kept[f"{at}.up"].dequantised(), both[:, 1::2])
    assert torch.equal(kept[f"{at}.down"].dequantised(), native[f"{at}.down_proj"].transpose(1, 2))
    assert torch.equal(auto[f"{at}.up.bias"], native[f"{at}.gate_up_proj_bias"][:, 1::2])
    assert torch.equal(auto[f"{at}.down.bias"], native[f"{at}.down_proj_bias"])
    assert auto["model.layers.1.self_attn.sinks"].any()


def logits_spread(folder: Path) -> float:
    """Returns the deviation of the logits from position to position, which must be finite."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.inference_mode():
        logits = model(torch.arange(3, 35).unsqueeze(0)).logits[0].float()
    assert logits.isfinite().all()
    return float(logits.std(0).mean())


@pytest.mark.parametrize("letter", "def")
def test_a_small_folder_is_loaded_with_all_its_weights(letter: str, tmp_path: Path, tokenizer: Path) -> None:
    folder = small(letter, tmp_path, tokenizer)
    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert (folder / "tokenizer.json").is_file()
    assert logits_spread(folder) > 0.01


def test_files_have_the_sizes_of_the_models_and_as_many_layers_as_fit() -> None:
    vocabulary = 151_936
    sizes = {
        shape.architecture: sum(tensor.num_bytes for tensor in shape.tensors(vocabulary)) / 1e9
        for shape in (DENSE_7B, MIXTURE_30B, GPT_OSS)
    }
    assert 4.5 < sizes["qwen2"] < 4.8
    assert 11.5 < sizes["qwen3moe"] <= 12
    assert 10 < sizes["gpt-oss"] <= 12
    assert not any(tensor.name.startswith("blk.47.") for tensor in MIXTURE_30B.tensors(vocabulary))


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerPeer]:
    (tmp_path / "worker.py").write_text(WORKER)
    peer = WorkerPeer(Process([sys.executable, str(tmp_path / "worker.py")], tmp_path / "log"), restores=True)
    yield peer
    peer.kill()


def test_every_case_is_measured(worker: WorkerPeer, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "made").write_bytes(b"x" * 10_000)
    found = {figure.cell: figure.value for figure in shapes.measured(worker, tmp_path / "kept", (64, 128), 60)}
    starts = {"first_s", "later_s", "peak_gib", "later_peak_gib", "resident_gib", "mapped_gib", "disk_gib"}
    of_prompts = {f"{case} {size}" for case in ("prefill", "rate", "recovery_s", "next_s") for size in (64, 128)}
    assert found.keys() == starts | of_prompts | {"together 64"}
    assert found["peak_gib"] > 0.005
    assert 0 < found["mapped_gib"] < found["resident_gib"]
    assert found["prefill 64"] == 7
    assert 10_000 <= found["disk_gib"] * 2**30 <= 20_000


def test_a_part_that_takes_too_long_ends_its_program_and_says_so(worker: WorkerPeer, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("import time; time.sleep(60)")
    with pytest.raises(PeerError, match=r"^first start: not done after 0 s$"):
        list(shapes.measured(worker, tmp_path, (64,), 0.2))
    assert worker.process.popen is None


def test_a_restored_prompt_with_another_reply_is_an_error(worker: WorkerPeer, tmp_path: Path) -> None:
    texts = iter(["", "one reply", "the other reply", *["five"] * 5, "one", "next", "another"])
    ask = worker.ask

    def told(prompts: Sequence[str], max_tokens: int) -> list[Reply]:
        return [replace(reply, text=next(texts)) for reply in ask(prompts, max_tokens)]

    worker.ask = told  # type: ignore[method-assign]
    figures = shapes.measured(worker, tmp_path, (64, 128), 60)
    with pytest.raises(PeerError, match=r"^prompt of 128 after kill -9: the reply was 'the other reply' before"):
        list(figures)
    assert next(texts, None) is None


def test_the_table_has_ratios_and_says_why_a_program_is_missing() -> None:
    results = Results(None, "shapes")
    results.add("a", MACHINE, 0, [Figure("read_s", 0, 2.0)])
    results.add("a", "diskprefix", 0, [Figure("prefill", 2000, 30.0), Figure("first_s", 0, 4.0)])
    results.add("a", "llama.cpp", 0, [Figure("prefill", 2000, 10.0), Figure("first_s", 0, 2.0)])
    results.leave_out("c", "diskprefix", "first start: error: no such type")
    report = results.report()
    assert report["models"]["a"]["prefill 2000"]["llama.cpp"]["ratio"] == 3
    shapes.show(report, Console(width=150, file=(shown := StringIO())))
    rows = [" ".join(line.split()) for line in shown.getvalue().splitlines()]
    assert "prefill, tokens/s, 2000 30.0 10.0 3.00" in rows
    assert "first start, s 4 2 0.50" in rows
    assert "diskprefix: first start: error: no such type" in rows


def test_a_program_that_was_cut_off_or_failed_is_measured_again(
    worker: WorkerPeer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").write_bytes(bytes(4096))
    path, asked = tmp_path / "results.json", {"diskprefix": (64, 128), "llama.cpp": (64,)}
    monkeypatch.setattr(shapes, "diskprefix", lambda *_: worker)
    monkeypatch.setattr(shapes, "PEERS", {"llama.cpp": lambda *_: worker})

    def measure() -> bool:
        results, progress = Results(path, "shapes"), Console(file=StringIO())
        return shapes.measure("a", tmp_path / "model.gguf", asked, 60, results, tmp_path, progress)

    before = Results(path, "shapes")
    before.begin("a", "diskprefix", 0)
    before.add("a", "diskprefix", 0, [Figure("first_s", 0, 1000.0)])
    assert json.loads(path.read_text())["left_out"] == {"a": {"diskprefix": "cut off"}}
    assert measure()
    report = json.loads(path.read_text())
    assert report["left_out"] == {"a": {}}
    cells = report["models"]["a"]
    assert cells["first_s"]["diskprefix"]["max"] < 1000
    assert cells["prefill 128"].keys() == {"diskprefix"}
    assert cells["prefill 64"].keys() == cells["next_s 64"].keys() == {"diskprefix", "llama.cpp"}
    (tmp_path / "worker.py").unlink()
    assert measure()
    assert json.loads(path.read_text())["samples"] == report["samples"]


def test_an_unknown_shape_is_refused() -> None:
    refused = CliRunner().invoke(shapes.main, ["--only", "a,z"])
    assert refused.exit_code == 2
    assert "'z' is not one of a, b, c, d, e, f" in refused.output
