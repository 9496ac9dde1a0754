"""A folder is quantised parameter by parameter: the numbers of a whole model, and nothing is left of failures."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from diskprefix.errors import ModelError
from diskprefix.model.load import loader
from diskprefix.model.load.checkpoint import StoredTensor, tensors_in
from diskprefix.model.load.loader import LoadedModel, load_model
from diskprefix.model.quants import quantising
from diskprefix.model.quants.quantising import StreamedQuantising
from diskprefix.settings import Settings
from tests.exactness.architectures import tiny_model
from tests.model import tiny
from tests.model.quantising_in_place import quantise

FILE = "model.safetensors"


@pytest.fixture
def folder(cache: Path, tmp_path: Path) -> Path:
    assert not cache.exists()
    return tiny.write_folder(tmp_path / "tiny", dtype=torch.bfloat16, hidden_size=64, intermediate_size=96)


def loaded(folder: Path, weights: str = "int4", **changes: Any) -> LoadedModel:
    return load_model(Settings(model=str(folder), weights=weights, **changes), lambda _: None)


def made_in(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if not path.name.startswith(".lock-")]


def quantised_whole(model: PreTrainedModel, weights: str) -> dict[str, torch.Tensor]:
    quantise(model, weights)
    return dict(model.state_dict())


@pytest.mark.parametrize("extra", [0, 1])
def test_logits_with_a_matrix_of_their_own_keep_it(extra: int, folder: Path, tmp_path: Path) -> None:
    """The configuration says that they have none. `extra`: a matrix that does not fill blocks is not quantised."""
    config = LlamaConfig.from_pretrained(folder, tie_word_embeddings=True)
    config.vocab_size = -(-config.vocab_size // 16) * 16 + extra
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(tmp_path / "own")
    tiny.tokenizer().save_pretrained(tmp_path / "own")
    weights = load_file(tmp_path / "own" / FILE)
    own = weights["lm_head.weight"] = torch.randn_like(weights["model.embed_tokens.weight"])
    save_file(weights, tmp_path / "own" / FILE, {"format": "pt"})
    found = loaded(tmp_path / "own", "int8")
    head: Any = found.model.lm_head
    assert torch.equal(found.model.model.embed_tokens.weight, weights["model.embed_tokens.weight"])
    assert (head.weight.float() - own.float()).abs().max() < (0.05 if extra == 0 else 1e-9)
    assert found.fit.needs.state == loaded(tmp_path / "own", "native").fit.needs.state


@pytest.mark.parametrize("name", ["gemma3", "mixtral", "qwen3_next", "phi3"])
def test_a_streamed_model_has_the_bits_of_one_that_is_quantised_whole(name: str, cache: Path, tmp_path: Path) -> None:
    model = tiny_model(name, torch.bfloat16)
    model.save_pretrained(tmp_path / name)
    tiny.tokenizer().save_pretrained(tmp_path / name)
    found = {one.name: one.read() for one in tensors_in(quantised_folder(tmp_path / name, cache) / FILE)}
    expected = quantised_whole(model, "int4")
    tied = {source: target for target, source in model.all_tied_weights_keys.items()}
    assert {name for name in expected if name not in found} <= set(tied.values())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def quantised_folder(source: Path, cache: Path, weights: str = "int4") -> Path:
    from transformers import AutoConfig

    from diskprefix.model.load.kinds import require_served_kind

    config = AutoConfig.from_pretrained(source)
    files, kind = sorted(source.glob("*.safetensors")), require_served_kind(source, config)
    quantising.weight_files_in(weights, source, files, config, kind, lambda _: None)
    (found,) = made_in(cache)
    return cache / found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_of_other_types_are_first_rounded_to_bfloat16(dtype: torch.dtype, cache: Path, tmp_path: Path) -> None:
    assert not cache.exists()
    folder = tiny.write_folder(tmp_path / "made", dtype=dtype)
    expected = quantised_whole(tiny.llama().to(dtype).bfloat16(), "int8")
    found = loaded(folder, "int8").model
    assert found.dtype is torch.bfloat16
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.state_dict().items())


def test_no_more_than_two_tensors_of_the_file_are_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, alive, most = StoredTensor.read, [], 0

    def counted(tensor: StoredTensor) -> torch.Tensor:
        nonlocal most
        found = read(tensor)
        alive.append(ref(found))
        most = max(most, sum(one() is not None for one in alive))
        return found

    monkeypatch.setattr(StoredTensor, "read", counted)
    loaded(folder)
    assert len(alive) == 2 * len(load_file(folder / FILE)), "of the folder, and of what was made of it"
    assert most <= 2


def too_little_memory(patch: pytest.MonkeyPatch, _: Path) -> None:
    patch.setattr(StoredTensor, "read", lambda *_: pytest.fail("a tensor was read"))
    patch.setattr(loader, "available_bytes", lambda _device: 1000)


def full_disk(patch: pytest.MonkeyPatch, _: Path) -> None:
    def fill(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(StreamedQuantising, "_add", fill)


def cut_short_meanwhile(patch: pytest.MonkeyPatch, folder: Path) -> None:
    reads, size = count(), (folder / FILE).stat().st_size

    def cutting(stored: StoredTensor, read: Any = StoredTensor.read) -> torch.Tensor:
        if next(reads) == 4:
            os.truncate(stored.file, size // 2)
        found: torch.Tensor = read(stored)
        return found

    patch.setattr(StoredTensor, "read", cutting)


def written_meanwhile(patch: pytest.MonkeyPatch, _: Path) -> None:
    def touching(stored: StoredTensor, read: Any = StoredTensor.read) -> torch.Tensor:
        os.utime(stored.file)
        found: torch.Tensor = read(stored)
        return found

    patch.setattr(StoredTensor, "read", touching)


def without_a_tensor(_: pytest.MonkeyPatch, folder: Path) -> None:
    tensors = load_file(folder / FILE)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / FILE, {"format": "pt"})


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (too_little_memory, r"^\S+ does not fit: about .* 1000 B available"),
        (full_disk, "is full; free some space"),
        (cut_short_meanwhile, r"model\.safetensors ends within .*; fetch or copy it again"),
        (written_meanwhile, "were changed while they were read; start again"),
        (without_a_tensor, r"the weights lack 1 tensors of the model, for example model\.layers\.0\.mlp"),
    ],
)
def test_a_model_that_cannot_be_quantised_leaves_nothing(
    problem: Callable[[pytest.MonkeyPatch, Path], None],
    words: str,
    folder: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem(monkeypatch, folder)
    with pytest.raises(ModelError, match=words):
        loaded(folder)
    assert not made_in(cache)
