"""A model of a `.gguf` file: its weights, tokenizer and template, read at each start."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from diskprefix.daemon.settings import Settings
from diskprefix.errors import ModelError
from diskprefix.runtime.files.chat_template import render_template
from diskprefix.runtime.files.gguf import gguf_file
from diskprefix.runtime.files.gguf.gguf_header import GgufHeader, read_header
from diskprefix.runtime.files.gguf.gguf_weights import GgufWeights
from diskprefix.runtime.load import loader
from diskprefix.runtime.load.loader import LoadedModel, load_model
from tests.arrays import tensor_of
from tests.runtime.plan import tiny
from tests.runtime.plan.tiny import read_file

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return tiny.write_gguf(tmp_path / "tiny.gguf")


def test_a_gguf_becomes_a_model_with_its_weights_tokenizer_and_template(gguf: Path) -> None:
    source, found = tiny._tensors(0), read_file(gguf)
    state = contents_of(found)
    for ours, theirs in (("embed_tokens", "token_embd"), ("lm_head", "output"), ("norm", "output_norm")):
        expected = torch.from_numpy(source[f"{theirs}.weight"]).to(torch.bfloat16)
        assert torch.equal(state[f"{ours}.weight"], expected)
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    text = render_template(found.tokenizer.get_chat_template(), [{"role": "user", "content": "hello"}])
    assert text == "<|im_start|>user\nhello<|im_end|>\n"
    ids = found.tokenizer.encode(text)
    assert ids[0] == 1
    assert ids.count(2) == 1
    assert found.tokenizer.decode(ids) == text


def test_threads_that_ask_for_one_header_read_it_once(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both_read, read = threading.Barrier(2), list[Path]()

    def read_with_another(path: Path) -> GgufHeader:
        read.append(path)
        with suppress(threading.BrokenBarrierError):
            both_read.wait(timeout=0.2)
        return read_header(path)

    monkeypatch.setattr(gguf_file, "read_header", read_with_another)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(gguf_file.read_tensors, [[gguf], [gguf]])
    assert first is second
    assert read == [gguf]


def test_all_stop_tokens_of_the_file_end_a_reply(gguf: Path) -> None:
    assert read_file(gguf).stops == [2, 0]


def test_a_float32_file_is_computed_in_float32(gguf: Path) -> None:
    state = contents_of(load_model(Settings(model=str(gguf), dtype="float32"), print))
    assert torch.equal(state["lm_head.weight"], torch.from_numpy(tiny._tensors(0)["output.weight"]))


def test_the_content_of_a_file_determines_the_identity(gguf: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "other.gguf"
    elsewhere.parent.mkdir()
    shutil.copyfile(gguf, elsewhere)
    (elsewhere.parent / "config.json").write_text('{"model_type": "bert"}')
    digest = read_file(gguf).weights_digest
    assert read_file(elsewhere).weights_digest == digest
    assert read_file(tiny.write_gguf(elsewhere, seed=1)).weights_digest != digest


def test_a_start_writes_nothing_and_prints_nothing_but_its_own_line(
    gguf: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    load_model(Settings(model=str(gguf)), lines.append)
    assert capfd.readouterr() == ("", "")
    assert lines == ["loading the weights"]
    assert not cache.exists()


def test_any_part_of_a_split_gguf_names_the_model_of_all_parts(tmp_path: Path) -> None:
    parts = tiny.write_parts(tmp_path)
    whole = read_file(tiny.write_gguf(parts[0].with_name("tiny.gguf"), quantised="Q4_0"), "auto")
    found = [read_file(part, "auto") for part in parts]
    assert len({one.weights_digest for one in found}) == 1
    expected = contents_of(whole)
    for one in found:
        state = contents_of(one)
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)


def contents_of(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    assert loaded.weights is not None
    return {name: tensor_of(array) for name, array in loaded.weights.named()}


def replaced(patch: pytest.MonkeyPatch, file: Path) -> None:
    """The file is another one once its tensors are known."""
    own = GgufWeights._read_tensor

    def replace_and_read(self: GgufWeights, name: str) -> np.ndarray:
        shutil.copyfile(file, file.with_name("other"))
        file.with_name("other").replace(file)
        return own(self, name)

    patch.setattr(GgufWeights, "_read_tensor", replace_and_read)


def no_memory(patch: pytest.MonkeyPatch, _: Path) -> None:
    patch.setattr(loader, "available_bytes", lambda _: 2048)


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (replaced, r"tiny\.gguf was changed while it was read; start again"),
        (no_memory, r"does not fit: .*, 2\.0 KiB available"),
    ],
)
def test_a_file_that_cannot_be_loaded_now_is_refused_in_one_line(
    problem: Callable[[pytest.MonkeyPatch, Path], None], words: str, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem(monkeypatch, gguf)
    with pytest.raises(ModelError, match=words):
        read_file(gguf)


@pytest.mark.parametrize(
    ("error", "words"),
    [(ModelError("the file ends here"), "^the file ends here$"), (MemoryError(), r"tiny\.gguf does not fit in memory")],
)
def test_the_error_says_why_a_file_cannot_become_modules(
    error: Exception, words: str, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> torch.Tensor:
        raise error

    monkeypatch.setattr(GgufWeights, "parameter", fail)
    with pytest.raises(ModelError, match=words):
        load_model(Settings(model=str(gguf), dtype="float16"), print)


def test_a_later_start_makes_the_vocabulary_in_parts_until_it_is_needed(gguf: Path) -> None:
    first = load_model(Settings(model=str(gguf)), print)
    assert not first.tokenizer.is_in_parts
    assert [*first.keep_weights()]
    second = load_model(Settings(model=str(gguf)), print).tokenizer
    text = "<|im_start|>user\nhe said the same, Größe 日本語<|im_end|>\n"
    assert second.encode(text) == first.tokenizer.encode(text)
    assert second.decode(second.encode(text)) == first.tokenizer.decode(second.encode(text))
    assert second.is_in_parts
    assert second.get_vocab() == first.tokenizer.get_vocab()
    assert not second.is_in_parts
